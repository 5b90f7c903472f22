"""The scoreboard: which rows of the specification the tests of a run show, as docs/rows.md.

A pytest plugin. Tests carry ``@pytest.mark.row(N)`` or ``behaviour(N)``, with ``partial="what is left"`` when the row is
met only in part. A row is met when at least one of its tests passed and none failed; without a test it is not.

    pytest --rows-record FILE                   write what this run says of each row
    python -m tests.rows write FILE ...         docs/rows.md from such records
    python -m tests.rows check FILE ...         fail if docs/rows.md is not what they say
"""

import argparse
import difflib
import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from comfy_multiproc.fork import series

HERE = Path(__file__).parent
TABLE = HERE.parent / "docs" / "rows.md"
LAST = {"row": 42, "behaviour": 23}
PROPERTY = "specification"

Outcomes = dict[tuple[str, int], dict[str, tuple[str, str]]]

HEAD = """# The specification, row by row

Written by `python -m comfy_multiproc test --rows` from a run of all tests, and checked by every full run: a row says yes only where a test
shows it on real ComfyUI or, where a row is arithmetic, on its numbers. "Partial" names what is left; a row that no test shows says no.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("rows").addoption("--rows-record", type=Path, metavar="FILE", help="write what this run says of each row of the specification")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Scoreboard(config), "scoreboard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind, last in LAST.items():
            for mark in item.iter_markers(kind):
                if not mark.args or not all(isinstance(number, int) and 1 <= number <= last for number in mark.args):
                    raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{kind} takes numbers from 1 to {last}")
                # properties travel with the report from the process that ran the test
                item.user_properties += [(PROPERTY, [kind, number, mark.kwargs.get("partial", "")]) for number in mark.args]


class Scoreboard:
    """What the tests of this run say of each row: (kind, number) -> test -> (outcome, what is left)."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.outcomes: Outcomes = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("[")[0].removeprefix("tests/")
        for key, value in report.user_properties:
            if key == PROPERTY:
                kind, number, partial = value
                tests = self.outcomes[kind, number]
                before = tests[name][0] if name in tests else report.outcome
                tests[name] = (max(before, report.outcome, key=["skipped", "passed", "failed"].index), partial)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput") or exitstatus not in (0, 1):
            return
        if record := self.config.getoption("--rows-record"):
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps([[*row, tests] for row, tests in self.outcomes.items()]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rows")
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("record", nargs="+", type=Path)
    args = parser.parse_args()
    if missing := [path.stem for path in args.record if not path.exists()]:
        sys.stderr.write(f"docs/rows.md is left as it is: there is no complete run of {', '.join(missing)}\n")
        return 1
    outcomes: Outcomes = defaultdict(dict)
    for path in args.record:
        for kind, number, tests in json.loads(path.read_text()):
            outcomes[kind, number] |= tests
    said = table(outcomes)
    if args.action == "write":
        TABLE.write_text(said, "utf-8")
        return 0
    there = TABLE.read_text("utf-8") if TABLE.exists() else ""
    for line in difflib.unified_diff(there.splitlines(), said.splitlines(), "docs/rows.md", "this run", n=0, lineterm=""):
        sys.stderr.write(line + "\n")
    if there != said:
        sys.stderr.write("docs/rows.md is not what this run says: write it with `python -m comfy_multiproc test --rows`\n")
    return int(there != said)


def table(outcomes: Outcomes) -> str:
    texts = tomllib.loads((HERE / "rows.toml").read_text("utf-8"))
    parts = [HEAD]
    for kind, title in (("row", "Mechanisms"), ("behaviour", "Behaviours that go on working in a worker")):
        lines, verdicts = [], []
        for entry in texts[kind]:
            said, why = verdict(outcomes.get((kind, entry["n"]), {}))
            verdicts.append(said)
            tests = ", ".join(f"`{name}`" for name in sorted(outcomes.get((kind, entry["n"]), {})))
            lines.append(f"| {entry['n']} | {entry['name']} | {entry['alone']} | {entry['here']} | **{said}**{why} | {tests} |")
        count = ", ".join(f"{verdicts.count(word)} {word}" for word in ("yes", "partial", "no") if word in verdicts)
        parts.append(f"## {title}: {count}\n\n| # | what | ComfyUI alone | here | verdict | tests |\n|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n")
    parts.append(patches(outcomes))
    return "\n".join(parts)


def patches(outcomes: Outcomes) -> str:
    """Which rows each patch of the series serves, and the files whose tests show them."""
    lines = []
    for patch in series.load():
        rows = [f"{number} ({verdict(outcomes.get(('row', number), {}))[0]})" for number in patch.rows]
        files = {test.partition("::")[0] for number in patch.rows for test in outcomes.get(("row", number), {})}
        files |= {test.removeprefix("tests/") for test in patch.tests}
        lines.append(f"| {patch.name} | {', '.join(rows) or '-'} | {', '.join(f'`{file}`' for file in sorted(files))} |")
    return "## The series, patch by patch\n\n| patch | rows | tests of these rows, and of the patch itself |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def verdict(tests: dict[str, tuple[str, str]]) -> tuple[str, str]:
    states = [state for state, _ in tests.values()]
    left = "; ".join(sorted({partial for _, partial in tests.values() if partial}))
    if "failed" in states or "passed" not in states:
        return "no", ": a test fails" if "failed" in states else ""
    return ("partial", f": {left}") if left else ("yes", "")


if __name__ == "__main__":
    sys.exit(main())
