"""The demonstration, as `up --demo` runs it: the example packs, a workflow in the host, in a worker and in both, a cancel and a killed worker."""

import json
import subprocess
import sys

import pytest


@pytest.mark.row(2)
@pytest.mark.row(39)
def test_every_check_of_the_demonstration_holds(fork_tree, upstream_tree, tmp_path):
    command = [sys.executable, "-m", "comfy_multiproc.demo", "--fork", str(fork_tree), "--upstream", str(upstream_tree), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert done.returncode == 0 and report["ok"], done.stdout + done.stderr
    assert len(report["checks"]) >= 12 and len(report["peaks"]) == 2
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 5000 and (tmp_path / "out" / "host.png").exists()
    assert "at most" in done.stdout and done.stdout.rstrip().endswith("checks hold")
