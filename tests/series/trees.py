"""The commits of a fork, each unpacked to be run."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from comfy_multiproc.fork import git, tree

LIMIT = 600.0


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
