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

from .errors import writing

VARIABLE = "COMFY_MULTIPROC_CACHE"
"""Environment variable that puts the cache elsewhere."""


def folder() -> Path:
    """The cache folder (it need not exist yet)."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "comfyui-multiproc"


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new empty folder in `parent`, on the same disk as what it will be renamed to, and gone afterwards.

    An OSError of the body becomes a `TargetError` that names `parent`.
    """
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _sweep(parent: Path) -> None:
    # A run that was killed leaves its folder; a day is longer than any run that is still going.
    for left in (*parent.glob(".new-*"), *parent.glob(".old-*")):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)


def settle(new: Path, target: Path, *, replace: bool) -> None:
    """Renames the finished `new` to `target` in one step.

    Without `replace` a `target` that appeared meanwhile is kept: another process made the same thing at the same time.
    """
    if replace and target.exists():
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent))
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
