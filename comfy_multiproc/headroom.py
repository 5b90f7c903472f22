"""Whether the system has room for one more process.

On Windows memory counts against a limit (RAM plus paging file) as soon as it is asked for, and importing torch asks for gigabytes:
a process that starts without room fails in the middle of an import, often another one than the one to blame.
"""
from __future__ import annotations

import sys

WORKER_COMMIT = 3 << 30
"""Bytes that a worker's imports count for."""


class NoHeadroom(OSError):
    """A worker was not started because the system could not hold it."""


def commit() -> tuple[int, int] | None:
    """Bytes that the system can hold and bytes that count against that now; None where it does not count so."""
    if sys.platform != "win32":
        return None
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong) for name in ("total", "free", "limit", "left", "virtual", "virtual_left", "extended")]
    status = Status(length=ctypes.sizeof(Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return status.limit, status.limit - status.left


def shortage(worker: str) -> NoHeadroom | None:
    """Why `worker` cannot be started now; None if it can."""
    figures = commit()
    if figures is None or figures[0] - figures[1] >= WORKER_COMMIT:
        return None
    limit, used = (f"{size / (1 << 30):.1f} GB" for size in figures)
    return NoHeadroom(f"worker {worker} was not started: it needs {WORKER_COMMIT / (1 << 30):.0f} GB of commit charge, and {used} of "
                      f"{limit} are in use; make the paging file larger or isolate fewer packs")
