"""Running git without the settings of whoever called us getting in the way."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

from .errors import TargetError, ToolError, says_disk_full

TIMEOUT = 900.0
"""Seconds after which a git command is given up: long enough for a clone over a slow line."""


ALMOST_FULL = 1 << 20
"""Bytes free on a disk that count as none."""

# Hooks, templates and daemons of the user's have no part in this.
COMMAND = ("git", "-c", f"core.hooksPath={os.devnull}", "-c", "init.templateDir=", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false")


def environment(settings: bool = True) -> dict[str, str]:
    """The environment git runs in: English messages, no prompts, no optional writes, no foreign repository; without `settings` none of the user's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
    }
    # `git status` refreshes the index on disk unless told not to, and a user's checkout is never written.
    without = {} if settings else {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return env | without | {"LC_ALL": "C.UTF-8", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


def attempt(
    *args: str, cwd: Path | None = None, timeout: float = TIMEOUT, stdin: IO[bytes] | None = None, settings: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs git and returns what happened, whatever the exit code. Raises `ToolError` without git or after `timeout` seconds."""
    try:
        return subprocess.run(
            [*COMMAND, *args],
            cwd=cwd,
            env=environment(settings),
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise ToolError(f"{cwd} does not exist") from error
        raise ToolError("git was not found: install git and make sure that it is on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"git {args[0]} did not end within {timeout:.0f} seconds") from error


def run(*args: str, cwd: Path | None = None, timeout: float = TIMEOUT, stdin: IO[bytes] | None = None, settings: bool = True) -> str:
    """Runs git and returns its output. Raises `ToolError` with git's own words when it fails, `TargetError` on a full disk."""
    done = attempt(*args, cwd=cwd, timeout=timeout, stdin=stdin, settings=settings)
    if done.returncode:
        place = cwd or Path.cwd()
        # What git says of a file that it cannot write does not always say why.
        if says_disk_full(done.stderr) or ("unable to write" in done.stderr and shutil.disk_usage(place).free < ALMOST_FULL):
            raise TargetError(f"cannot write {place}: the disk is full; free some space there or choose another folder")
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ToolError(f"git {' '.join(args[:2])} failed in {place}: {said}")
    return done.stdout


class Commit:
    """The files of a commit. What a checkout makes of them may differ: other line ends and modes, files hidden from `git status`."""

    def __init__(self, repository: Path, commit: str) -> None:
        self._repository = repository
        self._entries = {}
        for line in run("ls-tree", "-r", "-z", commit, cwd=repository).split("\0")[:-1]:
            entry, _, name = line.partition("\t")
            self._entries[name] = entry.split()

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""
        if name not in self._entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        command = [*COMMAND, "cat-file", "blob", self._entries[name][2]]
        done = subprocess.run(command, cwd=self._repository, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT)
        if done.returncode:
            raise ToolError(f"git cannot read {name} in {self._repository}: {done.stderr.decode('utf-8', 'replace').strip()}")
        return done.stdout

    def executable(self, name: str) -> bool:
        """Whether a file may be run; what the commit does not have may not."""
        return name in self._entries and self._entries[name][0] == "100755"


class Folder:
    """The same for a folder that is not in git."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes:
        """The content of a file. Raises OSError."""
        return (self._root / name).read_bytes()

    def executable(self, name: str) -> bool:
        """Whether a file may be run."""
        return os.access(self._root / name, os.X_OK)
