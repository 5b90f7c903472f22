"""One build of a folder at a time, without anything to clean up after a crash."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import TargetError

if sys.platform == "win32":
    import msvcrt

    def _try(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# What the system says of a lock that somebody else holds; anything else comes from a file system that has no locks.
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)


def held(path: Path) -> bool:
    """Whether another process has locked the file at `path`, which is not made; ComfyUI locks its database in the same way."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        _try(handle)
    except OSError as error:
        return error.errno in _TAKEN
    else:
        return False
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(target: Path, progress: Callable[[str], None], patience: float = 300.0) -> Iterator[None]:
    """Holds the lock of `target`, a file beside it. The system lets go of it when the process ends.

    Raises `TargetError` when another process holds it for longer than `patience` seconds. Where the file system has no locks, nothing is held.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                _try(handle)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    break
                progress(f"Waiting for another process that works on {target}")
                if time.monotonic() > until:
                    raise TargetError(f"another process has been building {target} for {patience:.0f} seconds: wait for it, or end it") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)
