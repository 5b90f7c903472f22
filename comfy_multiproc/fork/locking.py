"""One build of a folder at a time, without anything to clean up after a crash."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
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


def held(path: Path) -> bool:
    """Whether another process has locked the file at `path`, which is not made; ComfyUI locks its database in the same way."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        _try(handle)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(target: Path, patience: float = 300.0) -> Iterator[None]:
    """Holds the lock of `target`, a file beside it. The system lets go of it when the process ends.

    Raises `TargetError` when another process holds it for longer than `patience` seconds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                _try(handle)
                break
            except OSError:
                if time.monotonic() > until:
                    raise TargetError(f"another process has been building {target} for {patience:.0f} seconds: wait for it, or end it") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)
