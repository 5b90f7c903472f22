"""Running git without the settings of whoever called us getting in the way."""

import os
import subprocess
from pathlib import Path
from typing import IO

from .errors import TargetError, ToolError, says_disk_full

TIMEOUT = 900.0
"""Seconds after which a git command is given up: long enough for a clone over a slow line."""


def environment() -> dict[str, str]:
    """The environment git runs in: English messages, no prompts, no optional writes, no foreign repository."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
    }
    # `git status` refreshes the index on disk unless told not to, and a user's checkout is never written.
    return env | {"LC_ALL": "C.UTF-8", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


def attempt(
    *args: str, cwd: Path | None = None, timeout: float = TIMEOUT, stdin: IO[bytes] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs git and returns what happened, whatever the exit code. Raises `ToolError` without git or after `timeout` seconds."""
    try:
        return subprocess.run(
            ["git", *args],
            cwd=cwd,
            env=environment(),
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


def run(*args: str, cwd: Path | None = None, timeout: float = TIMEOUT, stdin: IO[bytes] | None = None) -> str:
    """Runs git and returns its output. Raises `ToolError` with git's own words when it fails, `TargetError` on a full disk."""
    done = attempt(*args, cwd=cwd, timeout=timeout, stdin=stdin)
    if done.returncode:
        if says_disk_full(done.stderr):
            raise TargetError(f"cannot write {cwd or Path.cwd()}: the disk is full; free some space there or choose another folder")
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ToolError(f"git {' '.join(args[:2])} failed in {cwd or Path.cwd()}: {said}")
    return done.stdout
