"""Running a program whose output is worth watching."""

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolError, says_disk_full

TAIL = 200
"""Lines of output kept for an error message."""


@dataclass(frozen=True)
class Finished:
    """How a program ended: its exit code (negative: the signal) and the last lines it wrote."""

    returncode: int
    tail: list[str]

    @property
    def disk_full(self) -> bool:
        """Whether it failed because the disk is full."""
        return self.returncode != 0 and says_disk_full("\n".join(self.tail))

    def errors(self, limit: int = 6) -> str:
        """The lines that say what went wrong, else simply the last ones; at most `limit`."""
        found = [line for line in self.tail if line.lower().lstrip().startswith(("error:", "fatal:")) and line != "ERROR: Exception:"]
        return "\n".join((found or self.tail)[-limit:]) or f"exit code {self.returncode}"


def watch(
    args: Sequence[str | os.PathLike[str]],
    *,
    on_line: Callable[[str], None] = lambda line: None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 3600.0,
) -> Finished:
    """Runs a program and calls `on_line` (in this thread) with each line it writes, progress bars included.

    Raises `ToolError` if it cannot be started or runs longer than `timeout` seconds; it is ended then.
    """
    try:
        process = subprocess.Popen(args, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise ToolError(f"cannot run {os.fspath(args[0])}: {(error.strerror or str(error)).lower()}") from error
    tail: deque[str] = deque(maxlen=TAIL)
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None
        rest = b""
        # read1 hands over what is there, so that a progress bar that ends no line is seen while it moves.
        while block := process.stdout.read1(65536):  # type: ignore[attr-defined]
            *lines, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                _line(line, tail, on_line)
        _line(rest, tail, on_line)
        returncode = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    if late.is_set():
        raise ToolError(f"{Path(args[0]).name} did not end within {timeout:.0f} seconds and was stopped")
    return Finished(returncode, list(tail))


def attached(args: Sequence[str], *, cwd: Path, grace: float, env: Mapping[str, str] | None = None) -> int:
    """Runs a program that has the terminal; returns its exit code.

    The terminal tells it of Ctrl-C too: it has `grace` seconds to finish, or until a second Ctrl-C, before it is ended.
    """
    with subprocess.Popen(args, cwd=cwd, env=env) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
            raise
        finally:
            process.kill()


def _line(raw: bytes, tail: deque[str], on_line: Callable[[str], None]) -> None:
    line = raw.decode("utf-8", "replace").rstrip()
    if line:
        tail.append(line)
        on_line(line)
