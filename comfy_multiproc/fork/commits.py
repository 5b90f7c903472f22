"""The series as git commits, written in one ``git fast-import`` stream, so that no index and no work tree is touched."""

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import git
from .errors import explain_os_error
from .plan import Plan

AUTHOR = "ComfyUI Multiproc <comfyui-multiproc@localhost>"
EPOCH = 1767225600
"""The date of built commits (2026-01-01), the same on every machine, so that the same series gives the same commits."""


@dataclass(frozen=True)
class Commits:
    """A base commit and the commits of the series on top of it, in order."""

    base: str
    series: tuple[str, ...]

    @property
    def head(self) -> str:
        return self.series[-1]


def write(repository: Path, plan: Plan, base: str | Iterable[str], *, ref: str, author: str | None = None) -> Commits:
    """Writes the commits of `plan` into `repository` and points `ref` at the last.

    `base` is the commit to stand on, or the paths below `plan.root` of which a first commit is made. With an `author`
    ("Name <mail>") the commits are dated now, else at a fixed date.
    """
    who = author or AUTHOR
    when = int(time.time()) if author else EPOCH
    with _temporary() as (stream, work):
        if not isinstance(base, str):
            _commit(stream, ref, 1, f"ComfyUI {plan.version}\n", AUTHOR, EPOCH)
            for name in base:
                _file(stream, plan, name, plan.files.read(name))
        made: list[str] = []
        for order in range(len(plan.patches)):
            files = plan.changed(order)
            if not files:
                continue    # nothing of it exists in this release, and mail without a change is none
            _commit(stream, ref, order + 2, plan.message(order), who, when, base if not made and isinstance(base, str) else "")
            made.append(f":{order + 2}")
            for name, data in files.items():
                _file(stream, plan, name, data)
        stream.write(b"done\n")
        stream.seek(0)
        marks = work / "marks"
        git.run("fast-import", "--quiet", "--done", "--force", f"--export-marks={marks}", cwd=repository, stdin=stream)
        numbers = dict(line.split() for line in marks.read_text("ascii").splitlines())
    return Commits(base if isinstance(base, str) else numbers[":1"], tuple(numbers[mark] for mark in made))


@contextlib.contextmanager
def _temporary() -> Iterator[tuple[IO[bytes], Path]]:
    try:
        with tempfile.TemporaryFile() as stream, tempfile.TemporaryDirectory() as work:
            yield stream, Path(work)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise explain_os_error(error, f"{tempfile.gettempdir()}, the folder for temporary files (TMPDIR)") from error


def _commit(stream: IO[bytes], ref: str, mark: int, message: str, who: str, when: int, start: str = "") -> None:
    text = message.encode()
    stream.write(f"commit {ref}\nmark :{mark}\nauthor {who} {when} +0000\ncommitter {who} {when} +0000\ndata {len(text)}\n".encode() + text + b"\n")
    if start:
        stream.write(f"from {start}\n".encode())


def _file(stream: IO[bytes], plan: Plan, name: str, data: bytes) -> None:
    mode = b"100755" if plan.files.executable(name) else b"100644"
    path = os.fsencode(name)
    if path.startswith(b'"') or b"\n" in path:
        path = b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
    stream.write(b"M " + mode + b" inline " + path + b"\ndata " + str(len(data)).encode() + b"\n" + data + b"\n")
