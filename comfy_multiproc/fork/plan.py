"""What the series does to one upstream tree, worked out and proved in memory before anything is written.

Every anchor is resolved against the pristine file, never against a file that already has hooks in it, so a hook
cannot be mistaken for upstream's code and each prefix of the series stands on its own.
"""

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .anchors import AnchorError, Place, SourceFile, resolve
from .errors import ForkError
from .git import Commit, Folder
from .growing import new_files
from .series import Insert, Patch, wrapped


class PlanError(ForkError):
    """The series does not fit this tree; nothing has been written."""


@dataclass(frozen=True)
class Resolved:
    """What became of one insert in one tree."""
    patch: str
    insert: Insert
    status: str                 # "ok", "absent" (the mechanism does not exist in this release) or "error"
    line: int | None = None     # before which upstream line it goes, counted from 1
    message: str = ""


@dataclass(frozen=True)
class Hook:
    """Lines to insert into one file."""
    place: Place
    order: int                  # the patch's number in the series
    lines: tuple[bytes, ...]


@dataclass
class Plan:
    """The series on one tree: new contents after each patch, and what each insert found."""
    root: Path
    version: str
    patches: Sequence[Patch]
    files: Commit | Folder
    results: list[Resolved] = field(default_factory=list)
    sources: dict[str, SourceFile] = field(default_factory=dict)
    hooks: dict[str, list[Hook]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)   # path that a patch adds and upstream has -> patch

    @property
    def errors(self) -> list[Resolved]:
        return [result for result in self.results if result.status == "error"]

    @property
    def ok(self) -> bool:
        return not self.errors and not self.taken

    def changed(self, order: int) -> dict[str, bytes]:
        """Path -> content of every file that the patch with that number changes or adds."""
        files = {name: render(self.sources[name], [hook for hook in hooks if hook.order <= order])
                 for name, hooks in self.hooks.items() if any(hook.order == order for hook in hooks)}
        return files | new_files(self.patches, order)

    def message(self, order: int) -> str:
        """Of the commit of the patch with that number; it says which of the patch's hooks this tree is too old for."""
        patch = self.patches[order]
        absent = [result.insert.anchor for result in self.results
                  if result.patch == patch.name and result.status == "absent" and not result.insert.until]
        missing = sorted({f"{anchor.scope} ({anchor.file})" for anchor in absent if anchor.scope})
        if not missing:
            return patch.message
        note = f"Left out here, as ComfyUI {self.version} has no such code yet: hooks in {', '.join(missing)}."
        return f"{patch.message}\n{wrapped(note)}\n"

    def require_ok(self) -> None:
        """Raises PlanError with every reason why the series does not fit."""
        reasons = [describe(self.version, result) for result in self.errors]
        reasons += [f"patch {patch} adds {path}, which ComfyUI {self.version} already has" for path, patch in self.taken.items()]
        if reasons:
            raise PlanError(f"the series does not fit ComfyUI {self.version}; nothing was written:\n  " + "\n  ".join(reasons))


def describe(version: str, result: Resolved) -> str:
    anchor = result.insert.anchor
    scope = f" in {anchor.scope}" if anchor.scope else ""
    return f"patch {result.patch}: {anchor.file}{scope}: {anchor}: {result.message} (ComfyUI {version})"


def make_plan(root: Path, version: str, patches: Sequence[Patch], base: str | None = None) -> Plan:
    """Resolves and proves the whole series against the pristine tree at `root`, or against its commit `base`. Reads only."""
    plan = Plan(root, version, patches, Commit(root, base) if base else Folder(root))
    for order, patch in enumerate(patches):
        for insert in patch.inserts:
            plan.results.append(resolve_insert(plan, order, patch.name, insert))
        for add in patch.adds:
            if (root / add.path).exists():
                plan.taken[add.path] = patch.name
    for name, hooks in plan.hooks.items():
        prove_file(plan, name, hooks)
    return plan


def resolve_insert(plan: Plan, order: int, patch: str, insert: Insert) -> Resolved:
    if not insert.exists_in(plan.version):
        return Resolved(patch, insert, "absent")
    name = insert.anchor.file
    try:
        if name not in plan.sources:
            plan.sources[name] = SourceFile(name, plan.files.read(name))
        source = plan.sources[name]
        if insert.where_present and insert.anchor.scope and insert.anchor.scope not in source.scopes:
            return Resolved(patch, insert, "absent")
        place = resolve(source, insert.anchor)
    except OSError as error:
        if insert.where_present and isinstance(error, FileNotFoundError):
            return Resolved(patch, insert, "absent")
        return Resolved(patch, insert, "error", message=f"cannot read the file: {(error.strerror or str(error)).lower()}")
    except AnchorError as error:
        return Resolved(patch, insert, "error", message=str(error))
    code = textwrap.indent(textwrap.dedent(insert.code), place.indent.decode("ascii"))
    lines = tuple(line.encode(source.encoding.removesuffix("-sig")) + source.newline for line in code.split("\n"))
    plan.hooks.setdefault(name, []).append(Hook(place, order, lines))
    return Resolved(patch, insert, "ok", line=place.line + 1)


def in_order(hooks: Sequence[Hook]) -> list[Hook]:
    return sorted(hooks, key=lambda hook: (hook.place.line, hook.place.side, hook.place.depth, hook.order))


def render(source: SourceFile, hooks: Sequence[Hook]) -> bytes:
    """The file with the hooks in it."""
    parts: list[bytes] = []
    position = 0
    for hook in in_order(hooks):
        parts += source.lines[position:hook.place.line]
        position = hook.place.line
        if parts and not parts[-1].endswith((b"\n", b"\r")):
            parts.append(source.newline)    # the file's last line has no end of its own
        parts += hook.lines
    return b"".join(parts + source.lines[position:])


def without(data: bytes, hooks: Sequence[Hook], newline: bytes, ends_open: bool) -> bytes:
    """`data` with the hooks' lines taken out again, found by counting and compared byte for byte."""
    lines = data.splitlines(keepends=True)
    inserted = 0
    kept: list[bytes] = []
    position = 0
    for hook in in_order(hooks):
        start = hook.place.line + inserted
        if tuple(lines[start:start + len(hook.lines)]) != hook.lines:
            return b""
        kept += lines[position:start]
        position = start + len(hook.lines)
        inserted += len(hook.lines)
    kept += lines[position:]
    text = b"".join(kept)
    return text[:-len(newline)] if ends_open and text.endswith(newline) else text


def prove_file(plan: Plan, name: str, hooks: list[Hook]) -> None:
    """Turns the results of a file into errors unless every prefix of the series is additive and compiles."""
    source = plan.sources[name]
    ends_open = bool(source.lines) and not source.lines[-1].endswith((b"\n", b"\r")) and any(hook.place.line == len(source.lines) for hook in hooks)
    for order in sorted({hook.order for hook in hooks}):
        prefix = [hook for hook in hooks if hook.order <= order]
        data = render(source, prefix)
        opened = ends_open and any(hook.place.line == len(source.lines) for hook in prefix)
        if without(data, prefix, source.newline, opened) != source.data:
            return fail(plan, name, plan.patches[order].name, "not additive: taking the inserted lines out does not give the upstream file back")
        try:
            ast.parse(data)
        except SyntaxError as error:
            return fail(plan, name, plan.patches[order].name, f"the result does not compile: {error.msg} at line {error.lineno}: {(error.text or '').strip()}")


def fail(plan: Plan, name: str, patch: str, message: str) -> None:
    plan.results = [Resolved(patch, result.insert, "error", message=message)
                    if result.patch == patch and result.insert.anchor.file == name and result.status == "ok" else result
                    for result in plan.results]
