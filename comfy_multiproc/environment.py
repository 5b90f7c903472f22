"""The Python environment that the server and the tests run in: `.venv` in the project folder."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fork import process
from .fork.errors import ForkError, TargetError, ToolError, writing
from .fork.locking import locked

Progress = Callable[[str], None]

OLDEST = (3, 11)
TORCH = ("torch", "torchvision", "torchaudio")

# Runs in the environment. pip brings the one parser of requirements that is there before anything is installed. What is asked
# for is held to its version; what that needs in turn only has to be there, since which versions go together is pip's business.
_MISSING = """\
import importlib.metadata as metadata, json, sys
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

missing, seen = [], set()

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def visit(requirement, exact, extras):
    if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
        return
    installed = version(requirement.name)
    if installed is None or exact and not requirement.specifier.contains(installed, prereleases=True):
        missing.append(str(requirement))
        return
    key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
    if key in seen:
        return
    seen.add(key)
    for line in metadata.requires(requirement.name) or ():
        visit(Requirement(line), False, {"", *requirement.extras})

for line in json.load(sys.stdin):
    try:
        visit(Requirement(line), True, {""})
    except InvalidRequirement:
        missing.append(line)
json.dump(missing, sys.stdout)
"""

_DEVICES = """\
import json, sys
import torch
for name in ("torch_npu", "torch_mlu", "torch_directml"):
    try:
        __import__(name)
    except Exception:
        pass
found = []
for kind in ("cuda", "xpu", "npu", "mlu", "mps"):
    module = getattr(torch, kind, None) if kind != "mps" else torch.backends.mps
    try:
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count() if kind != "mps" else 1):
            torch.zeros(1, device=torch.device(kind, index)).add_(1).cpu()
            name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind
            total = module.get_device_properties(index).total_memory if kind in ("cuda", "xpu") else None
            found.append({"kind": kind, "index": index, "name": name, "total": total})
    except Exception as error:
        found.append({"kind": kind, "index": None, "name": None, "total": None, "error": str(error).splitlines()[0]})
json.dump({"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": found}, sys.stdout)
"""


@dataclass(frozen=True)
class Torch:
    """torch as the environment has it. `devices` are those that a tensor could be put on; `failed` says why others could not."""

    version: str
    build: str
    devices: list[dict[str, Any]]
    failed: list[str]


def project_root() -> Path:
    """The checkout this module is in, or the current folder when it is an installed package."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


def requirement_lines(file: Path) -> list[str]:
    """The requirements that a requirements file names, without comments and options. Raises `ForkError` without the file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ForkError(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from error
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def test_requirements(root: Path) -> list[str]:
    """What the tests need beside what the server needs."""
    with (root / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["dependency-groups"]["test"])


class Environment:
    """The environment in `folder`; it need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def works(self) -> bool:
        """Whether its interpreter starts, is new enough and has pip."""
        return self._runs(f"import sys, pip; sys.exit(sys.version_info < {OLDEST})")

    def _runs(self, code: str) -> bool:
        try:
            return subprocess.run([self.python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def create(self, progress: Progress) -> None:
        """Makes the environment unless one that works is there. One whose interpreter does not start is made anew; one without pip gets it."""
        if self.works():
            return
        if self._runs("pass"):
            # Whatever made it (uv makes them without pip), there may be gigabytes in it.
            progress(f"Installing pip in {self.folder}")
            done = process.watch([self.python, "-m", "ensurepip"], timeout=600)
            if not self.works():
                raise TargetError(f"{self.folder} is an environment of an older Python, or pip cannot be installed in it: move it away\n{done.errors()}")
            return
        if self.folder.exists() and not (self.folder / "pyvenv.cfg").exists() and not _BEFORE_CONFIG.issuperset(os.listdir(self.folder)):
            raise TargetError(f"{self.folder} is there and is no Python environment: move it away")
        if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ToolError(f"this Python cannot make environments: install its venv module (Debian, Ubuntu: apt install python{version}-venv)")
        progress(f"Making a Python environment in {self.folder}")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        done = process.watch([sys.executable, "-m", "venv", "--clear", self.folder], timeout=600)
        if done.returncode or not self.works():
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ToolError(f"cannot make a Python environment in {self.folder}{' because the disk is full' * done.disk_full}\n{done.errors()}")

    def missing(self, requirements: Sequence[str]) -> list[str]:
        """Those of `requirements`, and of what they need, that are not installed in a version that will do."""
        command: list[str | Path] = [self.python, "-c", _MISSING]
        try:
            done = subprocess.run(command, input=json.dumps(list(requirements)), capture_output=True, text=True, timeout=120, check=True)
        except subprocess.SubprocessError:
            # Without an answer everything is handed to pip, which knows best.
            return list(requirements)
        return json.loads(done.stdout)

    def ensure(self, requirements: Sequence[str], progress: Progress) -> bool:
        """Makes the environment satisfy `requirements` (lines as in a requirements file); says whether pip had to install anything.

        Raises `ForkError`. What pip had installed when it was interrupted stays, and the next call goes on from there.
        """
        if self.works() and not self._half_installed() and not self.missing(requirements):
            return False
        with writing(self.folder), locked(self.folder, progress, patience=3600.0):
            # Another run may have finished it while this one waited.
            self.create(progress)
            for left in self._half_installed():
                shutil.rmtree(left)     # then pip takes the package for one that is not there, which it is
            if not self.missing(requirements):
                return False
            self._install(requirements, progress)
        return True

    def _half_installed(self) -> list[Path]:
        """What says that a package is there although pip was ended while it copied the package: its list of files comes last."""
        places = (*self.folder.glob("lib/python*/site-packages"), self.folder / "Lib" / "site-packages")
        return [info for place in places for info in place.glob("*.dist-info") if not (info / "RECORD").exists()]

    def _install(self, requirements: Sequence[str], progress: Progress) -> None:
        step = "Installing packages (the first time this downloads several GB)"
        progress(step)
        done = process.watch(
            [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *requirements],
            on_line=lambda line: progress(f"{step}: {line.strip()}") if line.strip().split(" ")[0] in _WORTH_SHOWING else None,
            env=os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"},
            timeout=3 * 3600,
        )
        if done.returncode:
            raise ToolError(
                f"pip could not install what is needed{' because the disk is full' * done.disk_full}; what it did install stays, and the next run goes on from there\n{done.errors()}"
            )

    def torch(self) -> Torch | None:
        """torch and the devices it can use, seen by starting the interpreter (seconds); None when torch is not installed.

        Raises `ToolError` when torch is there and cannot be imported.
        """
        if not self.works() or self.missing(["torch"]):
            return None
        try:
            done = subprocess.run([self.python, "-c", _DEVICES], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"torch in {self.folder} did not answer within 300 seconds: is a graphics driver hanging?") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ToolError(f"torch in {self.folder} cannot be imported ({said}): delete {self.folder} and run the command again")
        answer = json.loads(done.stdout.splitlines()[-1])
        build = f"ROCm {answer['hip']}" if answer["hip"] else f"CUDA {answer['cuda']}" if answer["cuda"] else "CPU"
        usable = [device for device in answer["devices"] if "error" not in device]
        failed = [f"{device['kind']}: {device['error']}" for device in answer["devices"] if "error" in device]
        return Torch(answer["torch"], build, usable, failed)


# What `python -m venv` makes before it writes pyvenv.cfg: an interrupted run leaves no more than these.
_BEFORE_CONFIG = frozenset(("bin", "lib", "lib64", "include", "Scripts", "Lib", "Include"))
_WORTH_SHOWING = ("Collecting", "Downloading", "Using", "Building", "Installing", "Preparing")
