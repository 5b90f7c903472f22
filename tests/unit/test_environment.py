"""The environment that the server and the tests run in, with real interpreters and a real pip, and packages made on the spot."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from comfy_multiproc import environment
from comfy_multiproc.environment import Environment, requirement_lines
from comfy_multiproc.fork.errors import ForkError, TargetError, ToolError

Project = Callable[..., None]


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as `create` makes it; copy nothing into it."""
    folder = tmp_path_factory.mktemp("fresh ö") / ".venv"
    Environment(folder).create(quiet)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Puts a package into the folder that pip takes packages from instead of an index."""
    index = tmp_path / "index"
    index.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())

    def make(name: str, version: str, *requires: str) -> None:
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {line}\n" for line in requires)
        with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")

    return make


def uninstall(env: Environment, *names: str) -> None:
    subprocess.run([env.python, "-m", "pip", "uninstall", "-q", "-y", *names], check=True, capture_output=True)


def test_what_is_missing_is_installed_once(fresh: Path, project: Project) -> None:
    project("mpone", "1.0", "mptwo>=2 ; python_version > '3'", "mpthree ; extra == 'more'")
    project("mptwo", "2.0")
    env = Environment(fresh)
    asked = ["mpone>=1", "mpnever ; python_version < '3'"]
    assert env.ensure(asked, quiet)
    shutil.rmtree(Path(os.environ["PIP_FIND_LINKS"].removeprefix("file://")))  # pip could do nothing now
    assert not env.ensure(asked, quiet)
    assert env.missing(["mpone[more]"]) == ["mpthree; extra == 'more'"] or env.missing(["mpone[more]"]) == ['mpthree; extra == "more"']
    assert env.missing(["MpOne==2", "mpone==1.0"]) == ["MpOne==2"]
    uninstall(env, "mptwo")
    assert [line.split(">")[0] for line in env.missing(asked)] == ["mptwo"]
    uninstall(env, "mpone")


def test_a_package_that_pip_left_half_installed_is_installed_again(fresh: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "1")     # how some machines are set up, and pip refuses it in an environment
    project("mphalf", "1.0")
    wheel = next(Path(os.environ["PIP_FIND_LINKS"].removeprefix("file://")).glob("mphalf*"))
    whole = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as file:
        content = {name: file.read(name) for name in file.namelist()} | {"mphalf.py": b"whole = True"}
    with zipfile.ZipFile(wheel, "w") as file:
        for name in sorted(content, key=lambda name: ("METADATA" not in name, "RECORD" in name)):   # some builders begin with the metadata
            file.writestr(name, content[name])
    wheel.write_bytes(wheel.read_bytes().replace(b"whole = True", b"whole = Fals"))      # ends pip in the middle, as a full disk does
    env = Environment(fresh)
    with pytest.raises(ToolError, match="pip could not install"):
        env.ensure(["mphalf"], quiet)
    wheel.write_bytes(whole)
    assert env.ensure(["mphalf"], quiet)
    subprocess.run([env.python, "-c", "import mphalf"], check=True)
    uninstall(env, "mphalf")


def test_what_cannot_be_installed_is_named(fresh: Path, project: Project) -> None:
    project("mpone", "1.0")
    env = Environment(fresh)
    with pytest.raises(ToolError, match="pip could not install.*\n.*mpnone"):
        env.ensure(["mpone", "mpnone==7"], quiet)
    assert env.ensure(["mpone"], quiet)
    uninstall(env, "mpone")


def test_a_requirement_that_is_not_understood_is_left_to_pip(fresh: Path) -> None:
    assert Environment(fresh).missing(["pip", "not a requirement !"]) == ["not a requirement !"]


def test_an_environment_that_works_is_left_alone(fresh: Path) -> None:
    mine = fresh / "mine.txt"
    mine.write_text("")
    said: list[str] = []
    Environment(fresh).create(said.append)
    assert mine.exists() and said == []


def with_interpreter(folder: Path, script: str) -> Environment:
    """An environment whose interpreter is that shell script."""
    env = Environment(folder)
    env.python.parent.mkdir()
    env.python.write_text(f"#!/bin/sh\n{script}\n")
    env.python.chmod(0o755)
    return env


def test_an_environment_without_pip_gets_it_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    """As `uv venv` makes them."""
    folder = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "mine.txt").touch()
    Environment(folder).create(quiet)
    assert Environment(folder).works() and (folder / "mine.txt").exists()


def test_an_environment_that_cannot_be_used_is_not_deleted(tmp_path: Path) -> None:
    env = with_interpreter(tmp_path, "case $2 in pass) exit 0;; esac\nexit 1")
    with pytest.raises(TargetError, match="older Python.*move it away"):
        env.create(quiet)
    assert env.python.exists()


@pytest.mark.parametrize("left", ["lib", "pyvenv.cfg"])
def test_an_environment_that_was_left_half_made_is_made_anew(tmp_path: Path, left: str) -> None:
    folder = tmp_path / ".venv"
    (folder / "lib").mkdir(parents=True)
    if left == "pyvenv.cfg":
        (folder / left).write_text("home = /nonexistent\n")
    env = Environment(folder)
    assert not env.works()
    env.create(quiet)
    assert env.works()


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/precious.txt").write_text("mine")
    with pytest.raises(TargetError, match="is no Python environment: move it away"):
        Environment(tmp_path / ".venv").create(quiet)
    assert (tmp_path / ".venv/precious.txt").read_text() == "mine"


def test_without_ensurepip_the_message_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
    with pytest.raises(ToolError, match=rf"apt install python3\.{sys.version_info.minor}-venv"):
        Environment(tmp_path / ".venv").create(quiet)
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="cannot write .*venv"):
        Environment(tmp_path / "file" / ".venv").create(quiet)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in interpreter is a shell script")
def test_a_disk_that_fills_up_while_installing(tmp_path: Path) -> None:
    env = with_interpreter(tmp_path, "case \"$*\" in *install*) echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'; exit 1;; *-c*json*) exit 1;; esac")
    with pytest.raises(ToolError, match="because the disk is full"):
        env.ensure(["x"], quiet)


def test_requirement_lines(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# comment\n\ntorch\n--extra-index-url x\naiohttp>=3.11.8  # why\n-r other.txt\nname[a]==1 ; python_version > '3'\n")
    assert requirement_lines(file) == ["torch", "aiohttp>=3.11.8", "name[a]==1 ; python_version > '3'"]
    with pytest.raises(ForkError, match="cannot read .*nothing"):
        requirement_lines(tmp_path / "nothing")


def test_the_tests_find_what_they_need() -> None:
    assert "pytest" in environment.test_requirements(environment.project_root())


TORCH = """\
__version__ = "9.9"
class version: cuda, hip = "13.0", None
class Namespace:
    def __init__(self, **names): self.__dict__.update(names)
def device(kind, index=None): return kind, index
class tensor:
    def add_(self, other): return self
    def cpu(self): return self
def zeros(size, device=None):
    if device[0] == "xpu": raise RuntimeError("driver too old\\nmore")
    return tensor()
cuda = Namespace(is_available=lambda: CUDA, device_count=lambda: 2, get_device_name=lambda index: f"Card {index}",
                 get_device_properties=lambda index: Namespace(total_memory=8 << 30))
xpu = Namespace(is_available=lambda: XPU, device_count=lambda: 1, get_device_name=lambda index: "Arc")
backends = Namespace(mps=Namespace(is_available=lambda: False))
"""


@pytest.fixture
def with_torch(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Environment]:
    def make(source: str) -> Environment:
        (tmp_path / "torch-9.9.dist-info").mkdir()
        (tmp_path / "torch-9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
        (tmp_path / "torch.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Environment(fresh)

    return make


def test_devices_that_a_tensor_can_be_put_on(with_torch: Callable[[str], Environment]) -> None:
    torch = with_torch(TORCH.replace("CUDA", "True").replace("XPU", "True")).torch()
    assert torch is not None and (torch.version, torch.build) == ("9.9", "CUDA 13.0")
    assert [(device["kind"], device["name"], device["total"]) for device in torch.devices] == [("cuda", f"Card {i}", 8 << 30) for i in (0, 1)]
    assert torch.failed == ["xpu: driver too old"]


def test_no_device(with_torch: Callable[[str], Environment]) -> None:
    torch = with_torch(TORCH.replace("CUDA", "False").replace("XPU", "False")).torch()
    assert torch is not None and torch.devices == [] and torch.failed == []


def test_a_torch_that_cannot_be_imported(with_torch: Callable[[str], Environment]) -> None:
    with pytest.raises(ToolError, match=r"cannot be imported \(ImportError: libcudart is missing\).*delete"):
        with_torch("raise ImportError('libcudart is missing')\n").torch()


def test_no_torch(fresh: Path) -> None:
    assert Environment(fresh).torch() is None
