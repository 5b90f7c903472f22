"""The tests that the pages show, as a reader runs them: in a fresh process that has nothing from this test run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/testing.md", "docs/provider-api.md"]
SNIPPETS = [pytest.param(code, id=f"{page}:{re.search(r'def (test_[a-z_]+)', code)[1]}")
            for page in PAGES for code in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
            if "def test_" in code]


def test_every_page_that_shows_tests_is_read():
    assert {snippet.id.split(":")[0] for snippet in SNIPPETS} == {"docs/testing.md", "docs/provider-api.md"}


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_test_that_a_page_shows_passes(code, fork_tree, tmp_path):
    assert code.startswith("from comfy_multiproc.testing import "), "ComfyUI may be imported only after it, without a GPU"
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "ComfyUI-0.30.0").symlink_to(fork_tree)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "test_x.py").write_text(code, "utf-8")
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "LANG") if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(["build/ComfyUI-0.30.0", "examples/packs/language_model_pack"])
    environment["COMFY_MULTIPROC_RUNTIME"] = os.environ["COMFY_MULTIPROC_RUNTIME"]  # no process of the user's is met
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "test_x.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " 1 passed" in " " + done.stdout.replace("\n", " "), done.stdout + done.stderr
