"""The folder of downloads and pristine trees, shared by every checkout of this project of one user."""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import ForkError, expanded, writing

VARIABLE = "COMFY_MULTIPROC_CACHE"
"""Environment variable that puts the cache elsewhere."""


SCRATCH = ".comfy-multiproc-"
"""What the names of unfinished folders begin with; in a folder of the user's nothing else may be swept."""


def folder() -> Path:
    """The cache folder (it need not exist yet)."""
    if chosen := os.environ.get(VARIABLE):
        return expanded(Path(chosen))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return expanded(Path(base)) / "comfyui-multiproc"
    except ForkError as error:
        raise ForkError(f"no home folder is known to keep downloads in: set HOME, or set {VARIABLE} to a folder") from error


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new empty folder in `parent`, on the same disk as what it will be renamed to, and gone afterwards.

    An OSError of the body becomes a `TargetError` that names `parent`.
    """
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        work = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}new-", dir=parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _sweep(parent: Path) -> None:
    # A run that was killed leaves its folder; a day is longer than any run that is still going.
    for left in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)


def settle(new: Path, target: Path, *, replace: bool) -> None:
    """Renames the finished `new` to `target` in one step.

    Without `replace` a `target` that appeared meanwhile is kept: another process made the same thing at the same time.
    """
    if replace and target.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}old-", dir=target.parent))
        try:
            os.replace(target, old / target.name)
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(new, target)
    except OSError:
        if not target.exists():
            raise


def file_digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(root: Path) -> str:
    """One sha256 over the names and bytes of every file below `root`; compiled files do not count."""
    total = hashlib.sha256()
    for folder_name, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder_name, name)
            relative = path.relative_to(root).as_posix()
            total.update(f"{relative}\0{file_digest(path)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
