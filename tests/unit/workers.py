"""Real workers for the tests of their life: everything of a worker but ComfyUI, which is stood in for so that one starts at once."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from comfy_multiproc import boot, spawning

HERE = Path(__file__).resolve().parent
SECONDS = 30.0      # a bound on hangs, never a measure of anything


def make_tree(folder: Path) -> Path:
    """A ComfyUI for workers: stand-ins, and the real runtime."""
    ignore = shutil.ignore_patterns("__pycache__", "fork", "testing", "commands")
    shutil.copytree(HERE / "worker_tree", folder, ignore=ignore)
    shutil.copytree(Path(boot.__file__).parent, folder / "comfy_multiproc", ignore=ignore)
    shutil.copytree(Path(boot.__file__).parent.parent / "comfy" / "process_memory", folder / "comfy" / "process_memory", ignore=ignore)
    return folder


def until(condition: Callable[[], object]) -> None:
    """Wait until that is so; it has to become so."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def strays(tokens: set[str]) -> list[int]:
    """Processes that belong to one of these workers."""
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if any(spawning._belongs(pid, t) for t in tokens) and runs(pid)]


def read_pids(file: Path) -> list[int]:
    """What a job has written there, once it is there."""
    until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


HOST = """
import os, sys
sys.path.insert(0, {tree!r})
import comfy.cli_args
from comfy_multiproc import host
with open({log!r}, "a") as f:
    f.write("main ran in %d\\n" % os.getpid())
worker = host.Worker(host.Spec("zoo", entry="zoo", grace=2.0))
"""


def host_program(tree: Path, folder: Path, body: str, **options: object) -> subprocess.Popen[str]:
    """A process of its own that runs `body` after it has made ``worker``; what it writes is text."""
    program = folder / "host_program.py"
    program.write_text(HOST.format(tree=str(tree), log=str(folder / "main.log")) + body)
    environment = {**os.environ, "COMFY_MULTIPROC_RUNTIME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    settings: dict[str, object] = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                                   "stderr": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    return subprocess.Popen([sys.executable, str(program)], **settings)     # type: ignore[call-overload, no-any-return]
