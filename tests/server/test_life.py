"""The life of a server with workers: how it is replaced, stopped with the terminal and killed, and what is left of it: nothing."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from comfy_multiproc.testing import start_server
from comfy_multiproc.testing.server import ServerError
from comfy_multiproc.testing.workflows import Graph

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and exec")

SOON = 30.0     # generous: the machine that runs this may be busy
START = 180.0
PACKS = ("life_a", "life_b", "life_c")


@pytest.fixture
def start(fork_tree, packs, tmp_path):
    """A server with three workers of packs, and what it has in /dev/shm is told apart."""
    def start(**environment):
        folder = tmp_path / "copies"
        for name in PACKS:
            shutil.copytree(packs / "zoo_life", folder / name)
        isolate = [argument for name in PACKS for argument in ("--isolate", name)]
        return start_server(fork_tree, ["--cpu", *isolate], packs=[*folder.iterdir(), packs / "zoo_restart"], environment=environment)
    return start


def until(condition, what="", within=SOON):
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


def post(server, how):
    """Ask for nodes that will not end, and wait until they run."""
    before = len(server.log())
    graph = Graph()
    for name, kind in how.items():
        graph.add(name, name, how=kind, seed=time.time_ns() % 10 ** 9)
    server.post("/prompt", {"prompt": graph})
    for name, kind in how.items():
        until(lambda: re.search(rf"\[{name}\] {name} {kind} \d+", server.log()[before:]), f"{name} does not run:\n{server.log()[before:]}")


def family(server):
    """All processes that were started by this server or that one of its workers has started, by their environment."""
    mark = f"COMFY_MULTIPROC_CACHE={server.home / 'cache'}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    marked = mark in file.read().split(b"\0")
                with open(f"/proc/{entry}/stat") as file:
                    marked = marked and file.read().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            found |= {int(entry)} if marked else set()
    return found


def workers(server):
    """Those of the family that are workers."""
    found = set()
    for pid in family(server):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found |= {pid} if b"COMFY_MULTIPROC_WORKER=" in file.read() else set()
        except OSError:
            continue
    return found


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
    """B053, B066, B056: a worker asked for at import; three programs in the same process, each with a busy worker; then SIGKILL."""
    with start(ZOO_ASK_AT_IMPORT="1") as server:
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

        post(server, {"life_a": "loop", "life_b": "native"})
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not family(server), "something has outlived the server")
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
    """B057: the terminal's whole group gets it, twice."""
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
