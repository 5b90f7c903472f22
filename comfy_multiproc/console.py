"""What the commands write: results on stdout, progress and errors on stderr."""

import os
import shutil
import sys
import time
from typing import TextIO

EVERY = 10.0
"""Seconds between two lines about the same step when the output is no terminal."""


class Console:
    """Progress lines have the form "step" or "step: detail"; details of the running step replace one another on a terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        # There is none where whoever called us closed it.
        self.out = out or sys.stdout or open(os.devnull, "w")
        self.err = err or sys.stderr or open(os.devnull, "w")
        for stream in (self.out, self.err):
            # A terminal that cannot show a letter of somebody's folder name is no reason to stop.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        self._live = self.err.isatty()
        self._colour = self._live and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._step: str | None = None
        self._shown = 0.0

    def say(self, text: str) -> None:
        """A line of the result."""
        self.settle()
        self.out.write(text + "\n")
        self.out.flush()

    def progress(self, line: str) -> None:
        """What is being done now."""
        step, _, detail = line.partition(": ")
        now = time.monotonic()
        if self._live:
            if self._step is not None and step != self._step:
                self.settle()
            width = shutil.get_terminal_size().columns - 1
            self.err.write("\r\x1b[K" + line.replace("\n", " ")[:width])
        elif step != self._step or now - self._shown >= EVERY:
            self.err.write(line + "\n")
            self._shown = now
        self._step = step
        self.err.flush()

    def settle(self) -> None:
        """Ends the running step, so that something else may write to the terminal."""
        if self._live and self._step is not None:
            self.err.write("\r\x1b[K" + self._step + "\n")
            self.err.flush()
        self._step = None

    def note(self, text: str) -> None:
        """Something worth knowing that is neither a result nor a step."""
        self.settle()
        self.err.write(f"comfy_multiproc: {text}\n")
        self.err.flush()

    def error(self, text: str) -> None:
        """Why the command ends."""
        self.settle()
        mark = "\x1b[31merror:\x1b[0m" if self._colour else "error:"
        self.err.write(f"comfy_multiproc: {mark} {text}\n")
        self.err.flush()

    def strong(self, text: str) -> str:
        """`text` in bold where that can be shown."""
        return f"\x1b[1m{text}\x1b[0m" if self._colour and self.out.isatty() else text
