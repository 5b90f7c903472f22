"""What the commands tell a person instead of a traceback."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class ForkError(Exception):
    """Bad input or a machine that lacks something; the message names the thing and the way out.

    At the command line it becomes one message on stderr and exit code 2.
    """

    exit_code = 2


class UpstreamError(ForkError):
    """The upstream tree is not usable, or cannot be obtained."""


class TargetError(ForkError):
    """The place to write to is not usable."""


class ToolError(ForkError):
    """A program that is needed is missing or failed."""


def expanded(path: Path) -> Path:
    """`path` from the root, with the home folder for a leading ``~``. Raises `ForkError` where none is known."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ForkError(f"{path}: no home folder is known for {path.parts[0]}: write the path in full") from error


def explain_os_error(error: OSError, path: str | os.PathLike[str]) -> TargetError:
    """The `TargetError` that says what `error`, met while writing `path`, means for a person."""
    if error.errno == errno.ENOSPC:
        why = "the disk is full; free some space there or choose another folder"
    elif error.errno == errno.EDQUOT:
        why = "your disk quota is used up; free some space there or choose another folder"
    elif error.errno == errno.EROFS:
        why = "the file system is read-only; choose another folder"
    elif error.errno in (errno.EACCES, errno.EPERM):
        why = "permission denied; choose a folder that you may write to"
    elif error.errno == errno.ENAMETOOLONG:
        why = "the path is too long; choose a shorter one"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        why = "something that is not a folder is in the way; move it or choose another folder"
    else:
        why = (error.strerror or str(error)).lower()
    return TargetError(f"cannot write {os.fspath(path)}: {why}")


def says_disk_full(text: str) -> bool:
    """Whether a program's messages say that the disk is full."""
    return "No space left on device" in text or "Out of diskspace" in text or "Disk quota exceeded" in text


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError of the body into a `TargetError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, path) from error
