"""Each commit of the fork of the main release stands on its own: it compiles, starts, and passes ComfyUI's own linter."""

import pytest

from comfy_multiproc.fork import git, series
from tests.series.trees import commits, run, unpack


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


def test_each_commit_passes_comfyuis_own_linter(fork, tmp_path):
    """Its configuration is in the tree; an import that only a later commit uses is a finding, for example."""
    git.run("clone", "--quiet", "--no-checkout", str(fork.path), str(tmp_path / "tree"))
    for patch, commit in zip(series.load(), commits(fork), strict=True):
        git.run("checkout", "--quiet", "--detach", commit, cwd=tmp_path / "tree")
        done = run(tmp_path / "tree", "-m", "ruff", "check", "--no-cache", "--output-format", "concise", ".")
        assert done.returncode == 0, f"{patch.name}:\n{done.stdout}{done.stderr}"
