"""The life of a server with workers: how it is replaced, stopped with the terminal and killed, and what is left of it: nothing."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from comfy_multiproc.ledger import Ledger
from comfy_multiproc.testing import CardSettings, read_card, start_server
from comfy_multiproc.testing.server import ServerError
from comfy_multiproc.testing.workflows import Graph
from tests.server.family import SOON, family, until, workers

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and exec")

START = 180.0
MIB = 1 << 20
PACKS = ("life_a", "life_b", "life_c")


@pytest.fixture
def start(fork_tree, packs, tmp_path):
    """A server with three workers of packs, and what it has in /dev/shm is told apart."""
    def start(args=("--cpu",), card=None, **environment):
        folder = tmp_path / "copies"
        for name in PACKS:
            shutil.copytree(packs / "zoo_life", folder / name)
        isolate = [argument for name in PACKS for argument in ("--isolate", name)]
        return start_server(fork_tree, [*args, *isolate], packs=[*folder.iterdir(), packs / "zoo_restart"], card=card, environment=environment)
    return start


def post(server, how):
    """Ask for nodes that will not end, and wait until they run; the pids that each has said."""
    before = len(server.log())
    graph = Graph()
    for name, kind in how.items():
        graph.add(name, name, how=kind, seed=time.time_ns() % 10 ** 9)
    server.post("/prompt", {"prompt": graph})
    said = {}
    for name, kind in how.items():
        found = until(lambda: re.search(rf"\[{name}\] {name} {kind} ([\d ]+)\n", server.log()[before:]),
                      f"{name} does not run:\n{server.log()[before:]}", START)       # its worker may have to be started first
        said[name] = [int(pid) for pid in found[1].split()]
    return said


def shared_memory(server):
    """Files in /dev/shm that the family has open or mapped."""
    found = set()
    for pid in family(server):
        try:
            with open(f"/proc/{pid}/maps") as file:
                found |= set(re.findall(r"/dev/shm/\S+", file.read()))
            found |= {path for fd in os.listdir(f"/proc/{pid}/fd") if (path := os.readlink(f"/proc/{pid}/fd/{fd}")).startswith("/dev/shm/")}
        except OSError:
            continue
    return found


def all_started(server):
    until(lambda: [pack["state"] for pack in server.get("/system_stats")["packs"] if pack["isolated"]] == ["idle"] * len(PACKS),
          "workers do not start", START)


def test_restarts_and_a_kill_leave_nothing(start):
    """A worker asked for at import; three programs in the same process, each with a busy worker; then SIGKILL with workers that are
    idle, in native code, and in a Python loop with processes of their own, all with memory on the card."""
    with start(args=(), card=CardSettings(size=64 * MIB), ZOO_ASK_AT_IMPORT="1") as server:
        asked = server.get("/zoo/at_import")
        assert asked["starts"] == 1 and asked["method"] == "fork" and asked["pid"] in workers(server)
        assert len(workers(server)) == len(PACKS) + 1
        for _ in range(3):
            post(server, {"life_a": "loop"})
            before = workers(server)
            with pytest.raises(ServerError):
                server.post("/zoo/restart", {})
            until(lambda: not before & workers(server), "a worker has outlived the restart")
            until(lambda: server.process.poll() is not None or answers(server), "no server after the restart", START)
        assert server.get("/zoo/at_import") == {}
        all_started(server)
        assert len(workers(server)) == len(PACKS)      # no duplicates
        listed = [process for process in Ledger(create=False).processes(exact=True) if process.pid == server.pid]
        assert len(listed) == 1, "nothing that the programs before it have left in the ledger is taken for this one"

        found = post(server, {"life_a": "pool", "life_b": "native"})
        children = set(found["life_a"][1:])
        assert len(children) == 2 and family(server) >= {*children, *found["life_a"], *found["life_b"]}
        card = server.home / "card"
        assert {process.pid for process in read_card(card).processes if process.allocated} >= {found["life_a"][0], found["life_b"][0]}
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not family(server), "something has outlived the server")
        assert read_card(card).used == 0
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))


def answers(server):
    try:
        return bool(server.get("/system_stats"))
    except ServerError:
        return False


def ended(server):
    """The exit code; where its threads are is in the log of one that does not end."""
    try:
        return server.process.wait(SOON)
    except subprocess.TimeoutExpired:
        server.process.send_signal(signal.SIGABRT)
        return server.process.wait(SOON)


def test_ctrl_c_is_one_clean_stop_with_workers_that_are_busy(start):
    """The terminal's whole group gets it, twice."""
    with start(PYTHONFAULTHANDLER="1") as server:
        post(server, {"life_a": "loop", "life_b": "native"})
        shared = shared_memory(server)
        os.killpg(server.pid, signal.SIGINT)
        time.sleep(0.5)     # as an impatient person does
        if server.process.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
        assert ended(server) == 0, server.log()
        until(lambda: not family(server), "something has outlived the server")
        log = server.log()
    assert log.count("Stopped server") == 1
    assert "Traceback" not in log and "resource_tracker" not in log and "leaked" not in log
    assert not [path for path in shared if os.path.exists(path)]
