"""Upstream's own unit tests say of each commit of the fork what they say of upstream."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from comfy_multiproc.fork import series
from tests.series.trees import commits, run, unpack

CHOSEN = ["tests-unit/execution_test", "tests-unit/prompt_server_test", "tests-unit/comfy_test", "tests-unit/jobs_cancel_test"]
"""What of upstream's tests runs for each commit: what touches the files that the series hooks."""

NETWORK = {"tests-unit.app_test.frontend_manager_test"}
"""Asks a public server, so its result depends on the weather."""

PYTEST = "import sys, pytest; from comfy.cli_args import args; args.cpu = True; sys.exit(pytest.main(sys.argv[1:]))"
"""Upstream's tests ask the card at import; without one a part of them runs only with --cpu."""


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
