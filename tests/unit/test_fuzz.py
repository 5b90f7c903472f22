"""Whatever arrives at the endpoint of a real process: it neither ends nor grows, says each thing once, and goes on serving."""
from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from comfy.process_memory import Outcome
from comfy_multiproc.channel import MAX_FRAME, ChannelError, Client, auth_key, encode
from comfy_multiproc.ledger import Ledger
from comfy_multiproc.testing.card.capacity import CapacityFile
from tests.unit.processes import SECONDS, children, meet
from tests.unit.small import KEY, MB, process

CONNECTIONS = int(os.environ.get("COMFY_MULTIPROC_CONNECTIONS", "2000"))
MEMORY = 16 * MB        # that it may have more afterwards: what an interpreter keeps, whatever came


@pytest.fixture
def served(tmp_path):
    """A process with a model, another that asks it, and what a third one needs to connect."""
    CapacityFile.create(tmp_path / "card", [1000 * MB]).close()
    with children((process, tmp_path / "run", tmp_path / "card", "served"), (process, tmp_path / "run", tmp_path / "card", "asking")) as both:
        meet(both, ["served", "asking"])
        ledger = Ledger(tmp_path / "run")
        address = next(p.address for p in ledger.processes() if p.name == "served")
        with ledger.lock():
            key = auth_key(ledger.folder)
        ledger.close()
        yield *both, address, key


def soon():
    return time.monotonic() + SECONDS


def size_of(pid):
    """Descriptors, threads and resident bytes of a process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) << 10


def connect(address):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SECONDS)
    sock.connect(address.partition(":")[2])
    return sock


def noise(rng):
    """Something that is no message, or not all of one."""
    whole = encode({"id": rng.choice([1, -1, "1", None, 1e9, 2**80, [1]]), "type": rng.choice(["ping", "release", 7, None, "__class__"])})
    return rng.choice([
        rng.randbytes(rng.randrange(300)),
        struct.pack(">I", rng.choice([0xffffffff, MAX_FRAME + 1, MAX_FRAME])) + rng.randbytes(rng.randrange(300)),
        whole[:rng.randrange(len(whole))],
        struct.pack(">I", 4) + b"null", struct.pack(">I", 50_000) + b"[" * 50_000, b"\x80\x04cos\nsystem\n(S'true'\ntR."])


def value(rng):
    return rng.choice([None, True, 0, -1, 2**64, 10**400, 0.5, float(10**300), "", "x", "x" * 5000, [], [1], {}, {"a": {}}, KEY, "1", "0"])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_random_bytes_wrong_keys_and_thousands_of_connections(served):
    target, asking, address, key = served
    assert target.call(("load", "Unet", 300 * MB)) == 300 * MB
    rng = random.Random(5)

    def storm(connections):
        held = []
        for n in range(connections):
            with contextlib.suppress(OSError, ChannelError):        # the backlog is full, or it has closed: both are answers
                way = n % 4
                if way == 0:
                    Client(address, rng.randbytes(32), soon())      # a wrong key
                elif way == 1:
                    client = Client(address, key, soon())
                    client._socket.sendall(noise(rng))
                    held.append(client)
                else:
                    sock = connect(address)
                    held.append(sock)
                    if way == 2:
                        sock.sendall(noise(rng))
            if len(held) > 200:
                for one in held:
                    one.close()
                held.clear()
        for one in held:
            one.close()
    storm(200)
    descriptors, threads, memory = size_of(target.pid)
    storm(CONNECTIONS)
    deadline = soon()
    while (now := size_of(target.pid))[:2] > (descriptors, threads) and time.monotonic() < deadline:
        time.sleep(0.01)        # the last ones are still being dropped
    assert now[0] <= descriptors + 2 and now[1] <= threads and now[2] < memory + MEMORY, (now, descriptors, threads, memory)
    assert asking.call(("ask", "served", "release", 100 * MB))[:2] == (Outcome.FREED, 100 * MB)
    said = target.call(("said",))
    assert said and len(said) == len(set(said)) and len(said) < 16, said
    assert all("(said once)" in line for line in said), said


def test_random_requests_are_all_answered(served):
    target, asking, address, key = served
    assert target.call(("load", "Unet", 300 * MB)) == 300 * MB
    rng = random.Random(6)
    client = Client(address, key, soon())
    for _ in range(1500):
        kind = rng.choice(["release", "release_pins", "release_ram", "unload", "reset", "ping", value(rng)])
        message = {"type": kind, "wait": 0.0, **{field: value(rng) for field in rng.sample(
            ["device", "bytes", "candidate", "ticket", "origin", "reason", "wait", "prompt", "value", "more"], rng.randrange(8))}}
        answer = client.request(message, soon())
        assert {"outcome", "error", "pong"} & answer.keys(), (message, answer)
    client.close()
    books = target.call(("books",))
    assert sum(books["resident"].values()) == books["allocated"]
    assert target.call(("load", "Unet", 300 * MB)) == 300 * MB
    assert asking.call(("ask", "served", "release", 100 * MB))[:2] == (Outcome.FREED, 100 * MB)
    said = target.call(("said",))
    assert len(said) == len(set(said)) and len(said) < 16, said


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_another_users_process_gets_nowhere(kind):
    """In a folder that everybody can look into, so that it is the files themselves that refuse."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / ("run" if kind == "unix" else "r" * 100)      # too long for a local socket
        (Path(name) / "hello").write_text("hello")
        CapacityFile.create(Path(name) / "card", [1000 * MB]).close()
        with children((process, folder, Path(name) / "card", "served")) as [child]:
            assert child.hear() == "ready"
            child.call(("load", "Unet", 300 * MB))
            ledger = Ledger(folder)
            address, path = next(p.address for p in ledger.processes()), ledger.path
            ledger.close()
            assert address.startswith(kind) and stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            os.chmod(name, 0o755)
            os.chmod(folder, 0o755)
            tried = subprocess.run([sys.executable, "-c", f"""if True:
                import os, sys
                sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
                from comfy_multiproc.channel import Client, ChannelError
                import socket, time
                os.setgroups([]), os.setgid(65534), os.setuid(65534)
                print(open({str(Path(name) / "hello")!r}).read())
                for file in {[str(path), str(folder / "authkey")]!r}:
                    for mode in "rb", "r+b":
                        try:
                            open(file, mode)
                        except PermissionError:
                            print("refused")
                try:
                    Client({address!r}, b"x" * 32, time.monotonic() + 10)
                except {"PermissionError" if kind == "unix" else "(ChannelError, ConnectionError)"}:
                    print("refused")
                try:
                    os.unlink({str(path)!r})
                except PermissionError:
                    print("refused")
                """], capture_output=True, text=True, timeout=60)
            assert tried.stdout.split() == ["hello", *["refused"] * 6], tried.stderr
            assert child.call(("books",))["resident"] == {"Unet": 300 * MB}
