"""Which node packs are isolated, and how each says so. Reads files only; imports neither torch nor ComfyUI."""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = "comfyui-multiproc"
EVERY_PACK = "all"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class PackConfigError(ValueError):
    """``[tool.comfyui-multiproc]`` of a pack cannot be used; the text names the file, the key and what may stand there."""


@dataclass(frozen=True)
class PackConfig:
    """``[tool.comfyui-multiproc]`` of a pack's ``pyproject.toml``."""
    isolate: bool | None = None
    group: str | None = None            # packs of one group share a worker
    ram_limit: int | None = None        # bytes of resident memory above which the idle worker is replaced
    idle_seconds: float | None = None   # the worker ends after so long without a call
    environment: str | None = None      # folder of a Python environment, or a Python, for the worker; relative to the pack
    fallback: str = "host"              # when it cannot be isolated: load it in the "host", or "refuse" it
    keep_processes: bool = False        # processes that its nodes start outlive a cancel or the end of the worker


@dataclass(frozen=True)
class Pack:
    """A folder or file below a ``custom_nodes`` folder, and where its nodes run."""
    name: str
    path: Path
    isolated: bool
    reason: str
    config: PackConfig = field(default_factory=PackConfig)
    names: frozenset[str] = frozenset()     # what --isolate may call it, in lower case

    @property
    def worker(self) -> str:
        """Name of the worker it runs in."""
        return self.config.group or self.name

    @property
    def python(self) -> Path | None:
        """The Python that its worker runs on; None is the host's own. Raises PackConfigError if there is none there."""
        if self.config.environment is None:
            return None
        place = (self.path if os.path.isdir(self.path) else self.path.parent) / os.path.expanduser(self.config.environment)
        for python in (place, place / "bin" / "python", place / "Scripts" / "python.exe", place / "python.exe"):
            if os.path.isfile(python):
                return python
        raise PackConfigError(f"environment of pack {self.name} is {str(place):.500}, where there is no Python")


def name_of(path: str | os.PathLike[str]) -> str:
    """What ComfyUI calls the pack at `path`: the folder's name, or the file's without ``.py``."""
    name = Path(path).name
    return name[:-3] if name.endswith(".py") else name


def decide(path: str | os.PathLike[str], asked: Sequence[str] = ()) -> Pack:
    """Where the pack at `path` runs; `asked` are the values of ``--isolate``. A broken configuration is logged, not raised."""
    path, name = Path(path), name_of(path)
    problem = None
    try:
        config, project = read(path)
    except PackConfigError as error:
        config, project, problem = PackConfig(), None, str(error)
        logging.warning("%s", error)
    names = frozenset(n.lower() for n in (name, project) if n)

    def pack(isolated: bool, reason: str) -> Pack:
        return Pack(name, path, isolated, reason, config, names)
    for value in asked:
        if value.lower() in names:
            return pack(True, f"--isolate {value}")
    if problem:
        return pack(False, problem)
    if config.isolate is not None:
        return pack(config.isolate, f"isolate = {str(config.isolate).lower()} in its pyproject.toml")
    if EVERY_PACK in asked:
        return pack(True, f"--isolate {EVERY_PACK}")
    return pack(False, "nothing asks for its isolation")


def find(folders: Iterable[str | os.PathLike[str]], asked: Sequence[str] = ()) -> list[Pack]:
    """Every pack below the ``custom_nodes`` folders that ComfyUI would load, in its order. Folders that do not exist hold none."""
    packs = []
    for folder in folders:
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            path = Path(folder) / entry
            loads = entry.endswith(".py") if os.path.isfile(path) else os.path.isdir(path)
            if loads and entry != "__pycache__" and not entry.endswith(".disabled"):
                packs.append(decide(path, asked))
    return packs


def unknown(asked: Iterable[str], packs: Iterable[Pack]) -> list[str]:
    """The values of ``--isolate`` that name no pack."""
    known = {EVERY_PACK}.union(*(pack.names for pack in packs))
    return [value for value in asked if value.lower() not in known]


def nearest(value: str, packs: Iterable[Pack]) -> str | None:
    """The pack that somebody may have meant by a name that is none."""
    known = {name: pack.name for pack in packs for name in pack.names}
    return next((known[name] for name in difflib.get_close_matches(value.lower(), known, n=1)), None)


def read(path: Path) -> tuple[PackConfig, str | None]:
    """The configuration of the pack at `path`, and its project name. Raises PackConfigError."""
    file = path / "pyproject.toml"
    if not os.path.isdir(path) or not os.path.isfile(file):
        return PackConfig(), None
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:      # ValueError: text, TOML, or a number of thousands of digits
        raise PackConfigError(f"{file} cannot be read: {error}") from error
    project = data.get("project")
    name = project.get("name") if isinstance(project, dict) else None
    tool = data.get("tool")
    table = tool.get(TABLE, {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise PackConfigError(f"{file}: tool.{TABLE} must be a table")
    values, mistakes = {}, []
    for key, value in table.items():
        try:
            values[key] = value_of(file, key, value)
        except PackConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise PackConfigError("; ".join([mistakes[0], *(mistake.removeprefix(f"{file}: ") for mistake in mistakes[1:])]))
    return PackConfig(**values), name if isinstance(name, str) else None


def value_of(file: Path, key: str, value: Any) -> Any:
    """A checked value of the table. Raises PackConfigError."""
    def wrong(wanted: str) -> PackConfigError:
        return PackConfigError(f"{file}: {key} = {value!r:.200} in [tool.{TABLE}] must be {wanted}")
    if key in ("isolate", "keep_processes"):
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if key == "group":
        if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,64}", value):
            raise wrong("a name of letters, digits, '-', '_' and '.'")
        return value
    if key == "ram_limit":
        size = size_of(value)
        if size is None:
            raise wrong('a positive size such as "6G" or a number of bytes')
        return size
    if key == "idle_seconds":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise wrong("a positive number of seconds")
        return float(value)
    if key == "environment":
        if not isinstance(value, str) or not value:
            raise wrong("the path of a Python environment")
        return value
    if key == "fallback":
        if value not in ("host", "refuse"):
            raise wrong('"host" or "refuse"')
        return value
    raise PackConfigError(f"{file}: [tool.{TABLE}] has no key {key!r:.200}; it may have {', '.join(PackConfig.__dataclass_fields__)}")


def size_of(value: Any) -> int | None:
    """``"6G"``, ``"512 MiB"`` or a number, in bytes; None if it is no positive size."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        size = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
        if 0 < size < 1 << 63:
            return int(size)
    return None
