"""test: the same set-up as up, then the project's tests."""

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import TORCH, Environment, project_root, requirement_lines, test_requirements
from comfy_multiproc.fork.errors import ForkError

WORKERS = 4
"""Test processes at most; a level that starts servers needs about 2 GB for each."""
GRACE = 60.0
"""Seconds pytest has to report after Ctrl-C."""


def configure(commands: Any) -> None:
    parser = commands.add_parser(
        "test",
        help="set everything up and run the tests",
        usage="comfy_multiproc test [LEVEL ...] [--rows] [--upstream PATH] [--release V] [--dir DIR] [--force] [-- PYTEST ARGUMENTS]",
    )
    parser.add_argument("level", nargs="*", metavar="LEVEL", help="folders below tests/ (default: all)")
    parser.add_argument("--rows", action="store_true", help="write docs/rows.md from this run, which must be of all levels")
    common.build_arguments(parser)
    parser.set_defaults(run=run, takes_rest=True)


def run(args: argparse.Namespace, console: Console) -> int:
    root = project_root()
    chosen = choose(args.level, levels(root))
    if args.rows and chosen != levels(root):
        raise ForkError("--rows writes what all tests show: give no LEVEL with it")
    source = common.find_source(args, console)
    built = common.build_fork(args, source, console)
    environment = Environment(root / ".venv")
    environment.ensure([*TORCH, *requirement_lines(built.path / "requirements.txt"), *test_requirements(root)], console.progress)
    console.settle()
    command = [str(environment.python), "-m", "pytest", *parallel(args.rest), *rows(args, chosen == levels(root)), *(str(Path("tests", level)) for level in chosen), *args.rest]
    fork = {"COMFY_MULTIPROC_FORK": str(built.path), "COMFY_MULTIPROC_UPSTREAM": str(source.path)}
    with subprocess.Popen(command, cwd=root, env=os.environ | fork) as pytest:
        try:
            return pytest.wait()
        except KeyboardInterrupt:
            # The terminal has told pytest too, which ends its workers and reports; a second Ctrl-C does not wait for that.
            return pytest.wait(GRACE)


def rows(args: argparse.Namespace, everything: bool) -> list[str]:
    """What makes pytest write docs/rows.md or, in a run of everything, compare it."""
    if args.rows:
        return ["--rows-write"]
    return ["--rows-check"] if everything and not args.rest else []


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
