"""Building the fork, putting the series on a user's own checkout, and exporting it for upstream.

A built tree is a git repository: upstream's commit, one commit per patch on the branch ``multiproc``, and a note in
``.git`` of what it was built from. Rebuilding moves the branch and the tracked files only; what a person keeps in the
tree (models, custom nodes, outputs) is never touched, and tracked files that were edited are an error, not lost.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import cache, commits, git, running, series
from .errors import TargetError, ToolError, UpstreamError, writing
from .locking import locked
from .plan import Plan, make_plan
from .report import CheckReport
from .upstream import Source, checkout, patched_by, version_of

Progress = Callable[[str], None]

BRANCH = "multiproc"
NOTE = "multiproc.json"
"""File in .git that says what a tree was built from; absent: not built by us."""

# What upstream tracks in folders that its own .gitignore names.
_TRACKED_THOUGH_IGNORED = ("models/configs/*", "models/**/put_*", "custom_nodes/*.example", "custom_nodes/websocket_image_save.py", "input/example.png", "output/_output*")


@dataclass(frozen=True)
class Built:
    """A tree with the series in it. `base` and `head` are commits; `reused` says that it was there already."""

    path: Path
    version: str
    base: str
    head: str
    reused: bool = False


def _quiet(line: str) -> None:
    pass


def check(root: Path) -> CheckReport:
    """Resolves and proves the whole series against the pristine tree at `root`; reads only. Raises `ForkError` if it is no such tree."""
    version = version_of(root)
    if by := patched_by(root):
        raise UpstreamError(f"{root} already has the series in it, applied by comfy_multiproc {by}: check a checkout without it")
    return CheckReport(make_plan(root, version, series.load()))


def build(source: Source, target: Path, *, force: bool = False, progress: Progress = _quiet) -> Built:
    """The fork of `source` at `target`, which is reused when it is up to date.

    `force` rebuilds a tree that is up to date, and discards edits of tracked files in it. Raises `ForkError`; the
    target is then as it was, or, after an interruption, mended by the next build.
    """
    target = target.absolute()
    if target.resolve() == source.path:
        raise TargetError(f"{target} is the upstream tree itself, which is never modified: choose another --dir, or use `series apply`")
    with _pristine(source) as (source, base):
        plan = make_plan(source.path, source.version, series.load(), base)
        plan.require_ok()
        start = base or _base_files(source)
        stamp = _stamp(plan, start)
        with writing(target), locked(target, progress):
            note = _read_note(target)
            if note is None:
                if target.exists() and (not target.is_dir() or any(target.iterdir())):
                    raise TargetError(f"{target} exists and was not built by this command: choose another --dir, or move it away")
                progress(f"building ComfyUI {source.version} with {len(plan.patches)} patches in {target}")
                return _create(plan, source, start, target, stamp)
            if note.get("state") == "ready":
                edited = _edited(target, note["head"])
                if edited and not force:
                    raise TargetError(f"{target} has edits that a build would overwrite ({edited}): commit them elsewhere, or --force to discard them")
                if note["stamp"] == stamp and not force:
                    return Built(target, source.version, note["base"], note["head"], reused=True)
            if running_there := running.describe(target):
                raise TargetError(f"{target} would be changed, and {running_there}: stop that first, or choose another --dir")
            progress(f"updating {target} to ComfyUI {source.version} with {len(plan.patches)} patches")
            if base is not None:
                git.run("fetch", "--quiet", "--no-tags", "--update-shallow", str(source.path), base, cwd=target)
            return _commit(plan, start, target, stamp, target)


def apply(path: Path, *, force: bool = False, progress: Progress = _quiet) -> Built:
    """Commits the series on a new branch ``multiproc`` of the clean git checkout at `path` and switches to it.

    `force` replaces a branch of that name. Raises `ForkError`; the checkout is then as it was.
    """
    source = checkout(path, force=force)
    if not _is_repository(source.path):
        raise UpstreamError(f"{source.path} is not a git checkout: run `git init` and commit it first, or use `build`, which makes a copy")
    if not force and git.attempt("rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}", cwd=source.path).returncode == 0:
        raise UpstreamError(f"{source.path} already has a branch {BRANCH}: delete or rename it, or --force to replace it")
    with _pristine(source) as (pristine, base):
        assert base is not None
        plan = make_plan(pristine.path, source.version, series.load(), base)
        plan.require_ok()
        progress(f"committing {len(plan.patches)} patches on the branch {BRANCH}")
        made = commits.write(source.path, plan, base, ref="refs/multiproc/new")
        try:
            git.run("checkout", "--quiet", "-B", BRANCH, made.head, cwd=source.path)
        finally:
            git.run("update-ref", "-d", "refs/multiproc/new", cwd=source.path)
    return Built(source.path, source.version, made.base, made.head)


def export(source: Source, out: Path, *, author: str | None = None, progress: Progress = _quiet) -> list[Path]:
    """Writes the series as ``git format-patch`` files with real context into the new or empty folder `out`.

    `author` is "Name <mail>"; by default the identity that git is configured with. Raises `ForkError`.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TargetError(f"{out} is not empty: choose another --out, so that old and new patches do not mix")
    with _pristine(source) as (source, base), writing(out):
        plan = make_plan(source.path, source.version, series.load(), base)
        plan.require_ok()
        who = author or _identity()
        with cache.scratch(out.parent) as work:
            repository = _repository(work / "git", source, base)
            made = commits.write(repository, plan, base or _base_files(source), ref="refs/heads/export", author=who)
            progress(f"writing {len(made.series)} patches to {out}")
            git.run("format-patch", "--quiet", "--no-signature", "--no-renames", "--full-index", "--binary", "--output-directory", str(work / "patches"),
                    f"{made.base}..{made.head}", cwd=repository, settings=False)
            out.mkdir(parents=True, exist_ok=True)
            out.rmdir()
            os.replace(work / "patches", out)
    return sorted(out.glob("*.patch"))


@contextlib.contextmanager
def _pristine(source: Source) -> Iterator[tuple[Source, str | None]]:
    """The tree without the series, and its commit where it is in git.

    Differs from `source` only when that is a patched checkout which the user forced.
    """
    base = git.run("rev-parse", "HEAD", cwd=source.path).strip() if _is_repository(source.path) else None
    if patched_by(source.path) is None:
        yield source, base
        return
    first = ""
    if base is not None:
        first = git.run("log", "--diff-filter=A", "--format=%H", "--", "comfy/process_memory/provider.py", cwd=source.path).split("\n")[0]
    if not first:
        raise UpstreamError(f"{source.path} has the series in it and no commit without it: get a pristine checkout of ComfyUI {source.version}")
    base = git.run("rev-parse", f"{first}^", cwd=source.path).strip()
    with cache.scratch(cache.folder()) as work:
        git.run("clone", "--quiet", "--no-checkout", str(source.path), str(work / "tree"), cwd=work)
        git.run("checkout", "--quiet", "--detach", base, cwd=work / "tree")
        yield Source(work / "tree", version_of(work / "tree"), "checkout"), base


def _is_repository(path: Path) -> bool:
    """Whether `path` is the top of a git work tree, not merely inside one."""
    done = git.attempt("rev-parse", "--show-toplevel", cwd=path)
    if done.returncode and "dubious ownership" in done.stderr:
        raise ToolError(done.stderr.strip())
    return done.returncode == 0 and Path(done.stdout.rstrip("\n")).resolve() == path.resolve()


def _base_files(source: Source) -> list[str]:
    """The files of a tree that is not in git and belong to upstream, as paths below it."""
    root = source.path
    if source.kind == "sdist":
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    with cache.scratch(cache.folder()) as work:
        git.run("init", "--quiet", "--bare", str(work / "git"), cwd=work)
        # upstream's .gitignore says what is a person's own; that person's ignored files say nothing about upstream's
        listed = git.run("-c", f"core.excludesFile={os.devnull}", f"--git-dir={work / 'git'}", f"--work-tree={root}", "ls-files", "--others", "--exclude-standard", "-z", cwd=root)
    extra = {path.relative_to(root).as_posix() for pattern in _TRACKED_THOUGH_IGNORED for path in root.glob(pattern) if path.is_file()}
    return sorted(extra.union(name for name in listed.split("\0") if name and (root / name).is_file()))


def _repository(place: Path, source: Source, base: str | None) -> Path:
    """A new repository at `place`; with a base commit, one that has it and upstream's history."""
    if base is None:
        git.run("init", "--quiet", f"--initial-branch={BRANCH}", str(place), cwd=place.parent)
    else:
        git.run("clone", "--quiet", "--no-checkout", str(source.path), str(place), cwd=place.parent)
    for key, value in (("core.autocrlf", "false"), ("core.eol", "lf"), ("core.attributesFile", os.devnull)):
        git.run("config", key, value, cwd=place)
    return place


def _create(plan: Plan, source: Source, start: str | list[str], target: Path, stamp: str) -> Built:
    with cache.scratch(target.parent) as work:
        place = _repository(work / "tree", source, start if isinstance(start, str) else None)
        built = _commit(plan, start, place, stamp, target)
        if target.exists():
            target.rmdir()
        os.rename(place, target)
    return built


def _commit(plan: Plan, start: str | list[str], repository: Path, stamp: str, target: Path) -> Built:
    for left in (*repository.glob(".git/*.lock"), *repository.glob(".git/refs/**/*.lock")):
        left.unlink()       # of a git that was killed in an interrupted build; ours is the only one here
    made = commits.write(repository, plan, start, ref="refs/multiproc/new")
    note = {"version": plan.version, "base": made.base, "head": made.head, "stamp": stamp}
    _write_note(repository, note | {"state": "building"})
    git.run("symbolic-ref", "HEAD", f"refs/heads/{BRANCH}", cwd=repository)
    git.run("reset", "--quiet", "--hard", made.head, cwd=repository)
    _write_note(repository, note | {"state": "ready"})
    return Built(target, plan.version, made.base, made.head)


def _stamp(plan: Plan, start: str | list[str]) -> str:
    """What a built tree depends on: upstream's commit, or its files where it is in none; the patches, our files."""
    total = hashlib.sha256(f"{plan.version} {start if isinstance(start, str) else None}\n".encode())
    for name in [] if isinstance(start, str) else start:
        total.update(f"{name} {cache.file_digest(plan.root / name)}\n".encode("utf-8", "surrogateescape"))
    for order, patch in enumerate(plan.patches):
        total.update(patch.message.encode())
        for name, data in sorted(plan.changed(order).items()):
            total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


def _edited(target: Path, head: str) -> str:
    """What a person has changed in a built tree, in words; empty: nothing."""
    if git.attempt("rev-parse", "HEAD", cwd=target).stdout.strip() != head:
        return "commits of its own"
    changed = git.run("status", "--porcelain", "--untracked-files=no", cwd=target).splitlines()
    return ", ".join(line[3:] for line in changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def _read_note(target: Path) -> dict[str, str] | None:
    try:
        return json.loads((target / ".git" / NOTE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (NotADirectoryError, ValueError):
        return {} if (target / ".git" / NOTE).is_file() else None


def _write_note(repository: Path, note: dict[str, str]) -> None:
    place = repository / ".git" / NOTE
    place.with_suffix(".new").write_text(json.dumps(note), "utf-8")
    os.replace(place.with_suffix(".new"), place)


def _identity() -> str:
    name = git.attempt("config", "user.name").stdout.strip()
    mail = git.attempt("config", "user.email").stdout.strip()
    return f"{name} <{mail}>" if name and mail else commits.AUTHOR
