"""A small process beside a host that ends the host's workers when the host is gone.

Each worker watches its host by itself, on a thread. That thread does not run while native code keeps the interpreter's lock,
and it dies with a worker that is killed, whose own programs then stay. This process has nothing to do but wait.
"""
from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from comfy_multiproc.guard import main; main(int(sys.argv[2]))"


class Guard:
    """The host's end. Started with the first worker; a guard that has died is replaced at the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._watched: dict[str, str] = {}

    def watch(self, pid: int, token: str, keep: bool) -> None:
        """End this worker when this process is gone; keep: but not what it has started."""
        with self._lock:
            self._watched[token] = f"+ {pid} {token} {int(keep)}\n"
            if self._process is None or self._process.poll() is not None:
                try:
                    self._start()
                except OSError as error:
                    logging.warning("Nothing but themselves ends the workers when this process is gone: %s", error)
                    return
                self._tell("".join(self._watched.values()))
            else:
                self._tell(self._watched[token])

    def forget(self, token: str) -> None:
        """That worker has been ended."""
        with self._lock:
            if self._watched.pop(token, None):
                self._tell(f"- 0 {token} 0\n")

    def close(self) -> None:
        """End the guard; what it still watches goes with it. Waits at most 5 seconds."""
        with self._lock:
            process, self._process = self._process, None
            if process is None or self._owner != os.getpid():
                return
            try:
                if process.stdin is not None:
                    process.stdin.close()
            except OSError:
                pass
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)

    def _start(self) -> None:
        session = {"start_new_session": True} if os.name == "posix" else {"creationflags": getattr(subprocess, "CREATE_NO_WINDOW", 0)}
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-c", PROGRAM, str(ROOT), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0, **session)

    def _tell(self, text: str) -> None:
        try:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(text.encode())
        except OSError:
            pass    # it has died; the next worker gets a new one, and this one still watches by itself


def main(host: int) -> None:
    """Wait for the end of the host, which closes standard input, and end what it has left."""
    watched: dict[str, tuple[int, bool]] = {}
    for line in _lines(host):
        sign, _, rest = line.partition(b" ")
        number, token, keep = rest.decode().split()
        if sign == b"+":
            watched[token] = int(number), keep == "1"
        else:
            watched.pop(token, None)
    from comfy_multiproc.spawning import end_tree
    for token, (pid, keep_processes) in watched.items():
        end_tree(pid, token, keep=keep_processes)


def _lines(host: int) -> Iterator[bytes]:
    """The lines of standard input until it ends or the host does: somebody else may have inherited the other end."""
    try:
        gone = os.pidfd_open(host)      # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        yield from sys.stdin.buffer
        return
    data = b""
    while True:
        ready, _, _ = select.select([0, gone], [], [])
        chunk = os.read(0, 65536) if 0 in ready else b""
        *lines, data = (data + chunk).split(b"\n")
        yield from lines
        if not chunk:
            return
