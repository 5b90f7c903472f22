"""What a worker writes: read by the host at once, shown with the worker's name, kept for the report of a crash.

Reading never waits for showing: when the log of the host is slower than the worker, or stands still, lines are dropped and
counted, because a full pipe would stop the node that prints.
"""
from __future__ import annotations

import io
import logging
import os
import queue
import re
import sys
import threading
import time
from collections import deque

KEPT_LINES = 50
LINE_BYTES = 8 << 10
WAITING_LINES = 2000
"""Lines that have been read and are not yet shown."""
PROGRESS_SECONDS = 1.0
"""Between two states of a progress bar that redraws its line."""
PIPE_BYTES = 1 << 20
LEVEL = re.compile(r"\x1e(\d{1,2})\x1e")
BAR = re.compile(r"\d%\s*\||\[\d+:\d\d[^]]*(/s|s/it)")
ENDS = re.compile(rb"[\r\n]")


class LevelFormatter(logging.Formatter):
    """The worker's side: marks each line with its level, so that the host can log it at that."""

    def format(self, record: logging.LogRecord) -> str:
        mark = f"\x1e{min(record.levelno, 99)}\x1e"
        return "\n".join(mark + line for line in super().format(record).split("\n"))


class WorkerLog:
    """Reads `fd`, which is its to close, until its end, and logs every line as ``[name] line``."""

    def __init__(self, fd: int, name: str):
        self.name = name
        self._fd = fd
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._waiting: queue.Queue[tuple[int, str] | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        self._shown = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"comfy_multiproc: output of {name}")
        self._shower = threading.Thread(target=self._show, daemon=True, name=f"comfy_multiproc: log of {name}")
        self._reader.start()
        self._shower.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, without level or name, and without progress bars."""
        return tuple(self._tail)

    def settle(self, seconds: float) -> None:
        """Wait until everything has been read, at most so long: what the worker started may keep the pipe open."""
        if threading.current_thread() not in (self._reader, self._shower):
            self._reader.join(seconds)

    def _read(self) -> None:
        rest = b""
        try:
            while chunk := os.read(self._fd, 1 << 16):
                rest += chunk
                while end := ENDS.search(rest):
                    self._line(rest[:end.start()], redrawn=end.group() == b"\r" and rest[end.end():end.end() + 1] != b"\n")
                    rest = rest[end.end():]
                if len(rest) > LINE_BYTES:
                    self._line(rest, redrawn=False)
                    rest = b""
        except OSError:
            pass
        finally:
            if rest:
                self._line(rest, redrawn=False)
            os.close(self._fd)
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                self._dropped += 1      # the shower looks for the end by itself

    def _line(self, raw: bytes, redrawn: bool) -> None:
        text = raw[:LINE_BYTES].decode("utf-8", "backslashreplace")
        level = logging.INFO
        if mark := LEVEL.match(text):
            level = int(mark.group(1))
        text = LEVEL.sub("", text).rstrip()
        if not text:
            return
        if redrawn:
            now = time.monotonic()
            if now - self._shown < PROGRESS_SECONDS:
                return
            self._shown = now
        if not redrawn and not BAR.search(text):
            self._tail.append(text)
        try:
            self._waiting.put_nowait((level, text))
        except queue.Full:
            self._dropped += 1

    def _show(self) -> None:
        while True:
            try:
                item = self._waiting.get(timeout=1.0)
            except queue.Empty:
                if not self._reader.is_alive():
                    break
                continue
            if item is None:
                break
            level, text = item
            self._log(level, text)
            if self._dropped and self._waiting.qsize() < WAITING_LINES // 2:
                dropped, self._dropped = self._dropped, 0
                self._log(logging.WARNING, f"({dropped} lines were not shown: they came faster than the log takes them)")
        if self._dropped:
            self._log(logging.WARNING, f"({self._dropped} lines were not shown)")

    def _log(self, level: int, text: str) -> None:
        try:
            logging.log(level, "[%s] %s", self.name, text)
        except Exception:
            pass    # a log that fails is no reason to stop reading


def pipe() -> tuple[int, int]:
    """A pipe for a worker's output, with room for a burst."""
    read, write = os.pipe()
    try:
        import fcntl
        fcntl.fcntl(write, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
    except (ImportError, OSError):
        pass
    return read, write


class Output(io.TextIOWrapper):
    """Standard output or error of a worker: writing never fails, and closing does nothing."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        self.flush()


def take_over(fd: int, level: int) -> None:
    """The worker's side: send everything that this process writes into `fd`, and log at `level` and above.

    Works where the host has no standard output, and whatever the locale: a print never fails for a letter, nor because
    something has closed the descriptors 1 and 2.
    """
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for name in ("stdout", "stderr"):
        stream = Output(open(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LevelFormatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
