"""test: the same set-up as up, then the project's tests."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import TORCH, Environment, project_root, requirement_lines, test_requirements
from comfy_multiproc.fork import process
from comfy_multiproc.fork.errors import ForkError

WORKERS = 4
"""Test processes at most; a level that starts servers needs about 2 GB for each."""
NOTHING = 5
"""Pytest's exit code when no test was chosen."""
GRACE = 60.0
"""Seconds pytest has to report after Ctrl-C."""


def configure(commands: Any) -> None:
    parser = commands.add_parser(
        "test",
        help="set everything up and run the tests",
        usage="comfy_multiproc test [LEVEL | FILE ...] [--rows] [--upstream PATH] [--release V] [--dir DIR] [--force] [-- PYTEST ARGUMENTS]",
    )
    parser.add_argument("level", nargs="*", metavar="LEVEL | FILE", help="folders below tests/, or files and tests in them such as tests/unit/test_values.py (default: all)")
    parser.add_argument("--rows", action="store_true", help="write docs/rows.md from this run, which must be of all levels")
    common.build_arguments(parser)
    parser.set_defaults(run=run, takes_rest="pytest")


def run(args: argparse.Namespace, console: Console) -> int:
    root = project_root()
    args.level, files = apart(root, args.level)
    args.rest = [*files, *args.rest]
    chosen = choose(args.level, levels(root))
    if args.rows and (args.rest or chosen != levels(root)):
        raise ForkError("--rows writes what all tests show: give no LEVEL and no pytest arguments with it")
    source = common.find_source(args, console)
    built = common.build_fork(args, source, console)
    environment = Environment(root / ".venv")
    environment.ensure([*TORCH, *requirement_lines(built.path / "requirements.txt"), *test_requirements(root)], console.progress)
    console.settle()
    fork = {"COMFY_MULTIPROC_FORK": str(built.path), "COMFY_MULTIPROC_UPSTREAM": str(source.path)}
    asked = places(root, args.rest)
    if other := [level for level in asked if level not in chosen]:
        raise ForkError(f"{asked[other[0]][0]} is not in {', '.join(chosen)}: leave the LEVEL out")
    rest = [argument for argument in args.rest if argument not in sum(asked.values(), [])]
    whole = chosen == levels(root) and not args.rest
    records = root / ".pytest_cache" / "rows"
    shutil.rmtree(records, ignore_errors=True)
    codes: dict[str, int] = {}
    for level in [level for level in chosen if level in asked] if asked else chosen:
        # A process per level: the levels import ComfyUI from different places.
        console.progress(f"Testing {level}")
        console.settle()
        command = [str(environment.python), "-m", "pytest", "-p", "tests.rows", *parallel(rest), "-o", f"cache_dir=.pytest_cache/{level}"]
        record = ["--rows-record", str(records / f"{level}.json")] if whole else []
        codes[level] = process.attached([*command, *record, *asked.get(level, [f"tests/{level}"]), *rest], cwd=root, env=os.environ | fork, grace=GRACE)
        if codes[level] and {"-x", "--exitfirst", "--pdb"}.intersection(rest):
            break
    if whole:
        compare = [str(environment.python), "-m", "tests.rows", "write" if args.rows else "check", *(str(records / f"{level}.json") for level in chosen)]
        codes["docs/rows.md"] = subprocess.run(compare, cwd=root).returncode
    return summary(codes, console)


def summary(codes: dict[str, int], console: Console) -> int:
    """Says which levels failed. A level of which a choice like `-k` leaves nothing has not failed, unless it is so for all."""
    failed = {level: code for level, code in codes.items() if code not in (0, NOTHING)}
    if len(codes) > 1:
        word, named = ("Failed", list(failed)) if failed else ("Passed", [level for level, code in codes.items() if not code])
        console.say(f"{word}: {', '.join(named) or 'nothing, no test was chosen'}")
    return next(iter(failed.values())) if failed else NOTHING if set(codes.values()) == {NOTHING} else 0


def places(root: Path, arguments: list[str]) -> dict[str, list[str]]:
    """The files and tests among pytest's arguments, by level."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("tests/") and (path := Path(argument.partition("::")[0])).parts[1:] and (root / path).exists():
            found.setdefault(path.parts[1], []).append(argument)
    return found


def apart(root: Path, asked: list[str]) -> tuple[list[str], list[str]]:
    """Levels, and the files and tests that were named among them, as pytest is to be given them."""
    named = [name for name in asked if "/" in name or "::" in name]
    files = []
    for name in named:
        file, colons, test = name.partition("::")
        path = next((path for path in (Path(os.path.abspath(file)), root / file) if path.exists() and path.is_relative_to(root / "tests")), None)
        if path is None:
            raise ForkError(f"there is no {file} below {root / 'tests'}")
        files.append(path.relative_to(root).as_posix() + colons + test)
    return [name for name in asked if name not in named], files


def levels(root: Path) -> list[str]:
    """The levels that have tests, cheapest first."""
    order = ["unit", "series", "fork", "server", "gpu"]
    found = {path.parent.relative_to(root / "tests").parts[0] for path in (root / "tests").glob("*/**/test_*.py")}
    if not found:
        raise ForkError(f"there are no tests in {root / 'tests'}: run this in a checkout of the project")
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def choose(asked: list[str], there: list[str]) -> list[str]:
    """The levels to run, in their own order."""
    for level in asked:
        if level not in there:
            raise ForkError(f"there is no test level {level!r}: choose from {', '.join(there)}")
    return [level for level in there if level in asked or not asked]


def parallel(arguments: list[str]) -> list[str]:
    """What spreads the tests over processes, unless the user decides that or wants to debug. By file: servers and models are a file's."""
    if any(argument.startswith(("-n", "--numprocesses", "--dist", "--pdb", "-s")) for argument in arguments):
        return []
    return ["-n", str(min(os.cpu_count() or 1, WORKERS)), "--dist", "loadfile"]
