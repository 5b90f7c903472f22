"""Each commit of the fork of the main release stands on its own: it compiles, starts, and upstream's own tests say what they said before."""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from comfy_multiproc.fork import git, series, tree, upstream

CHOSEN = ["tests-unit/execution_test", "tests-unit/prompt_server_test", "tests-unit/comfy_test", "tests-unit/jobs_cancel_test"]
"""What of upstream's tests runs for each commit: what touches the files that the series hooks."""

NETWORK = {"tests-unit.app_test.frontend_manager_test"}
"""Asks a public server, so its result depends on the weather."""

PYTEST = "import sys, pytest; from comfy.cli_args import args; args.cpu = True; sys.exit(pytest.main(sys.argv[1:]))"
"""Upstream's tests ask the card at import; without one a part of them runs only with --cpu."""

LIMIT = 600.0


@pytest.fixture(scope="session")
def source():
    return upstream.find(None, upstream.DEFAULT_RELEASE)


@pytest.fixture(scope="session")
def fork(source, tmp_path_factory):
    return tree.build(source, tmp_path_factory.mktemp("fork") / "fork")


def unpack(fork: tree.Built, commit: str, target: Path) -> Path:
    archive = target.with_suffix(".tar")
    git.run("archive", f"--output={archive}", commit, cwd=fork.path)
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    archive.unlink()
    return target


def commits(fork: tree.Built) -> list[str]:
    return git.run("rev-list", "--reverse", f"{fork.base}..{fork.head}", cwd=fork.path).split()


def run(tree_: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *args], cwd=tree_, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)


def outcomes(tree_: Path, *tests: str) -> dict[str, str]:
    """Test id -> outcome, as upstream's own test run in that tree says it."""
    report = tree_ / "report.xml"
    done = run(tree_, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junit-xml={report}", *tests)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("classname") not in NETWORK:
            states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            found[f"{case.get('classname')}::{case.get('name')}"] = states[0] if states else "passed"
    return found


@pytest.mark.parametrize("order", range(len(series.load())), ids=[patch.name for patch in series.load()])
def test_each_commit_stands_on_its_own(fork, tmp_path, order):
    tree_ = unpack(fork, commits(fork)[order], tmp_path / "tree")
    changed = git.run("diff", "--name-only", fork.base, commits(fork)[order], cwd=fork.path).split("\n")
    for name in changed:
        if name.endswith(".py"):
            compile((tree_ / name).read_bytes(), name, "exec")
    done = run(tree_, "main.py", "--cpu", "--quick-test-for-ci", "--database-url", "sqlite:///:memory:")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "IMPORT FAILED" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]


def test_upstreams_tests_say_what_they_said(fork, source, tmp_path):
    """The whole of upstream's unit tests on the last commit."""
    before = outcomes(unpack(fork, fork.base, tmp_path / "before"), "tests-unit")
    after = outcomes(unpack(fork, fork.head, tmp_path / "after"), "tests-unit")
    assert len(before) > 1000
    assert after == before


def test_upstreams_chosen_tests_say_what_they_said_at_every_commit(fork, tmp_path):
    before = outcomes(unpack(fork, fork.base, tmp_path / "before"), *CHOSEN)
    assert len(before) > 100
    for order, commit in enumerate(commits(fork)):
        assert outcomes(unpack(fork, commit, tmp_path / f"{order}"), *CHOSEN) == before, series.load()[order].name
