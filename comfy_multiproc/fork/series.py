"""The patch series as written: one TOML file per patch in ``patches/``, applied in the order of their names.

    subject = "model_management: ask other processes in the eviction ladder"
    body = "why, for a maintainer; what stays the same when nobody registers"
    rows = [2, 9, 17]                      # rows of the specification that the patch serves
    tests = ["tests/fork/test_ladder.py"]  # tests of this project that show it: where to look first

    [[insert]]
    file = "comfy/model_management.py"
    scope = "free_memory"                  # where, what, within, pick: see anchors.py
    where = "after"
    what = "assign can_unload_sorted"
    since = "0.17.0"                       # the mechanism does not exist before; until: no longer from there on
    where_present = true                   # for what is in no release yet: left out where there is no such scope, or no such file
    code = "..."

    [[add]]
    path = "comfy/process_memory"          # new files, taken from this tree
    only = ["provider.py", "ladder.py"]    # names in that folder; without it, all that is there
"""

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .anchors import Anchor, AnchorError, check
from .errors import ForkError

PROJECT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages which patches add to a tree: the checkout, or site-packages."""

JUNK = ("__pycache__", ".DS_Store")


class SeriesError(ForkError):
    """A patch file that cannot be used; the message names the file and the entry."""


@dataclass(frozen=True)
class Insert:
    """Lines of ours at one anchor."""
    anchor: Anchor
    code: str
    since: str = ""
    until: str = ""
    where_present: bool = False

    def exists_in(self, version: str) -> bool:
        """Whether the mechanism that this hooks exists in that release."""
        number = version_number(version)
        return not (self.since and number < version_number(self.since)) and not (self.until and number >= version_number(self.until))


@dataclass(frozen=True)
class Add:
    """A file or folder of ours that upstream does not have."""
    path: str
    only: tuple[str, ...] = ()

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Path in the tree and content, sorted."""
        top = PROJECT / self.path
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            inner = file.relative_to(top).parts
            if file.is_file() and file.suffix != ".pyc" and not any(part in JUNK for part in inner) and (not self.only or inner[0] in self.only):
                yield file.relative_to(PROJECT).as_posix(), file.read_bytes()


@dataclass(frozen=True)
class Patch:
    """One commit of the series."""
    name: str
    subject: str
    body: str
    rows: tuple[int, ...]
    tests: tuple[str, ...]
    inserts: tuple[Insert, ...]
    adds: tuple[Add, ...]

    @property
    def message(self) -> str:
        """Of the commit, wrapped for mail. It names nothing of this project: whoever reads it has ComfyUI alone before them."""
        return "\n\n".join([self.subject, *(wrapped(paragraph) for paragraph in self.body.strip().split("\n\n"))]) + "\n"


def wrapped(paragraph: str) -> str:
    """A paragraph of a message as mail has it."""
    return textwrap.fill(paragraph, 76, break_long_words=False, break_on_hyphens=False)


def version_number(version: str) -> tuple[int, ...]:
    """``0.30.0`` as numbers; whatever follows the digits of a part is left out."""
    numbers = []
    for part in version.split("."):
        digits = part[:len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def folder() -> Path:
    """Where the patch files are: in the checkout, or inside the installed package."""
    packaged = Path(__file__).with_name("patches")
    return packaged if packaged.is_dir() else PROJECT / "patches"


def load(where: Path | None = None) -> list[Patch]:
    """The whole series in order. Raises SeriesError."""
    where = where or folder()
    patches = [read(path) for path in sorted(where.glob("*.toml"))]
    if not patches:
        raise SeriesError(f"no patch files in {where}: the checkout is incomplete, get it again with git")
    return patches


def read(path: Path) -> Patch:
    """One patch file. Raises SeriesError."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeriesError(f"patch {path.name} is not TOML: {error}") from error
    known(path, "", data, {"subject", "body", "rows", "tests", "insert", "add"}, {"subject", "body"})
    inserts = tuple(read_insert(path, index, entry) for index, entry in enumerate(data.get("insert", []), 1))
    adds = tuple(read_add(path, index, entry) for index, entry in enumerate(data.get("add", []), 1))
    if not inserts and not adds:
        raise SeriesError(f"patch {path.name} neither inserts nor adds anything")
    rows = data.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, int) and 1 <= row <= 42 for row in rows):
        raise SeriesError(f"patch {path.name}: rows is a list of numbers from 1 to 42")
    tests = data.get("tests", [])
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise SeriesError(f"patch {path.name}: tests is a list of paths")
    return Patch(path.stem, data["subject"], data["body"], tuple(rows), tuple(tests), inserts, adds)


def read_insert(path: Path, index: int, entry: dict[str, Any]) -> Insert:
    place = f"insert {index}"
    anchor_keys = {field.name for field in fields(Anchor)}
    known(path, place, entry, {*anchor_keys, "since", "until", "where_present", "code"}, {"file", "where", "code"})
    where_present = entry.pop("where_present", False)
    if not isinstance(where_present, bool):
        raise SeriesError(f"patch {path.name}, {place}: where_present is true or false")
    if not all(isinstance(value, str) for value in entry.values()):
        raise SeriesError(f"patch {path.name}, {place}: every value is a string")
    anchor = Anchor(**{key: value for key, value in entry.items() if key in anchor_keys})
    try:
        check(anchor)
    except AnchorError as error:
        raise SeriesError(f"patch {path.name}, {place}: {error}") from error
    code = entry["code"].strip("\n")
    if not code.strip():
        raise SeriesError(f"patch {path.name}, {place}: code is empty")
    try:
        # By itself, so that an open bracket, string or line cannot take in what upstream has below it.
        ast.parse(textwrap.dedent(code) + ("\ndef below(): pass" if anchor.where.startswith("decorate") else "\n"))
    except SyntaxError as error:
        raise SeriesError(f"patch {path.name}, {place}: code is not whole statements: {error.msg}") from error
    return Insert(anchor, code, entry.get("since", ""), entry.get("until", ""), where_present)


def read_add(path: Path, index: int, entry: dict[str, Any]) -> Add:
    known(path, f"add {index}", entry, {"path", "only"}, {"path"})
    only = entry.get("only", [])
    if not isinstance(only, list) or not all(isinstance(name, str) for name in only):
        raise SeriesError(f"patch {path.name}, add {index}: only is a list of names in {entry['path']}")
    for name in ["", *only]:
        if not (PROJECT / entry["path"] / name).exists():
            raise SeriesError(f"patch {path.name}, add {index}: there is no {Path(entry['path'], name)} in {PROJECT}")
    return Add(entry["path"], tuple(only))


def known(path: Path, place: str, entry: dict[str, Any], allowed: set[str], needed: set[str]) -> None:
    name = f"patch {path.name}" + (f", {place}" if place else "")
    if unknown := sorted(set(entry) - allowed):
        raise SeriesError(f"{name}: unknown key {unknown[0]}; known are {', '.join(sorted(allowed))}")
    if missing := sorted(needed - set(entry)):
        raise SeriesError(f"{name}: {missing[0]} is missing")
