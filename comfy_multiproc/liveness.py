"""Whether a process that was seen before is still the same one and still runs.

A pid alone does not say: the system gives pids again. A process is named by its pid together with its *start*, a
number that differs between two processes which were given the same pid.
"""
from __future__ import annotations

import hashlib
import os
import sys


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on; None: there is no such process. Raises OSError if it cannot be looked at."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as f:
            fields = f.read(2048).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields if len(fields) > 19 else None


def process_start(pid: int) -> int | None:
    """The start of the process `pid`; None: there is no such process, or it has ended.

    On Linux clock ticks since boot, so that setting the clock changes nothing; elsewhere hundredths of a second since
    the epoch, as recorded by the system when the process started. Any thread. Raises OSError where it cannot be looked at
    (this process may open no more files).
    """
    if sys.platform == "linux":
        fields = _stat(pid)
        # A zombie has given back all its memory; only its parent has not looked yet.
        return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])
    import psutil
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.Error:
        return None


def stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, Ctrl-Z, a debugger) and so cannot answer; False where that is not to be seen."""
    try:
        fields = _stat(pid) if sys.platform == "linux" else None
    except OSError:
        return False
    return fields is not None and fields[0] in (b"T", b"t")


def alive(pid: int, start: int) -> bool:
    """Whether the process that had this pid and start still runs. Never raises: one that cannot be looked at does."""
    try:
        return pid > 0 and process_start(pid) == start
    except OSError:
        return True


def boot_id() -> int:
    """A number that differs between two boots of the machine; 0 where starts are dates, which no two boots share."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as f:
            return int.from_bytes(hashlib.blake2b(f.read().strip(), digest_size=8).digest(), "little")
    except OSError:
        return 0


def pid_namespace() -> str:
    """What the pids of this process are relative to: two containers that share a folder do not share pids."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]") or "0"
    except OSError:
        return "0"
