"""Fails a module of tests that leaves something behind: a process that it has started, whoever that belongs to by now, or shared memory.

`from tests.leaks import nothing_is_left` in a conftest is all.
"""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "COMFY_MULTIPROC_TESTED_BY"
WITHIN = 15.0       # seconds that what has been told to end may still take
SHARED = "comfy-multiproc"


def processes(mark: str) -> dict[int, str]:
    """Command lines of the running processes whose environment has the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            # The standard library's own helper of the test process lives as long as that does.
            if command and "resource_tracker" not in command:
                found[int(entry.name)] = command[:200]
    return found


def shared_memory() -> set[str]:
    """Shared memory of the project that this process has open or mapped, and named files of it but for those of other living processes."""
    found = set()
    for path in Path("/dev/shm").glob(f"{SHARED}-*"):
        pid = path.name.removeprefix(f"{SHARED}-").partition("-")[0]
        if pid == str(os.getpid()) or not (pid.isdecimal() and Path("/proc", pid).exists()):
            found.add(str(path))
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if SHARED in (place := os.readlink(fd)) and "memfd" in place:
                found.add(f"descriptor {fd.name} of {place} ({fd.stat().st_size} bytes)")
    with open("/proc/self/maps") as maps:
        found |= {f"mapping {line.split()[0]} of memory {line.split()[4]}" for line in maps if f"/memfd:{SHARED}" in line}
    return found


@pytest.fixture(scope="module", autouse=sys.platform == "linux")
def nothing_is_left() -> Iterator[None]:
    """Nothing that the module's tests and fixtures have started is there when all of them are done."""
    token = uuid.uuid4().hex
    before = shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, token)
        yield
    deadline = time.monotonic() + WITHIN
    while (left := processes(f"{MARK}={token}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "processes are left:\n" + "\n".join(f"{pid}: {command}" for pid, command in left.items())
    while (more := sorted(shared_memory() - before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not more, "shared memory is left:\n" + "\n".join(more)
