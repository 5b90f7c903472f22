"""Host memory as the kernel grants it: the machine's, or what the containers (control groups) around this process leave.

psutil reads the machine's figures, which say nothing of a container's limit. Every group from the process's own up to the
root counts, since the kernel ends a process at the nearest limit that is reached. Pages of files that can be dropped are not
counted as used, in both versions of control groups. ComfyUI releases that have ``comfy.system_memory`` read the limit
themselves: that module is used where it exists.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import time
from typing import Any

LOOK_AGAIN = 5.0
"""Seconds after which limits are read anew: they can be changed while a process runs."""

UNLIMITED = 1 << 60
"""Version 1 writes a number from here on where there is no limit."""

FLOOR = 2048 * 1024 ** 2
"""Bytes that ComfyUI keeps free at least when it locks memory."""


class Groups:
    """The control groups around this process that limit its memory.

    `membership` and `mounts` are the kernel's files that say which they are and where they are mounted.
    """

    def __init__(self, membership: str = "/proc/self/cgroup", mounts: str = "/proc/self/mountinfo"):
        self._membership, self._mounts = membership, mounts
        self._levels: list[tuple[str, int]] = []
        self._looked = float("-inf")

    def total(self, machine: int) -> int:
        """The memory that this process may use at most, of `machine` bytes."""
        return min([machine, *(limit for _, limit in self._limits())])

    def available(self, machine: int) -> int:
        """What is left of it, when `machine` bytes are available on the machine."""
        return max(0, min([machine, *(limit - _used(folder) for folder, limit in self._limits())]))

    def _limits(self) -> list[tuple[str, int]]:
        now = time.monotonic()
        if now - self._looked > LOOK_AGAIN:
            self._levels = [(folder, limit) for folder in self._folders() for limit in (_limit(folder),) if limit is not None]
            self._looked = now
        return self._levels

    def _folders(self) -> list[str]:
        """The folders of this process's groups, own ones first."""
        found = []
        for root, mounted, version in self._mounted():
            path = self._path(version)
            if path is None:
                continue
            # Of a container that sees the whole hierarchy only its own part is mounted.
            inner = os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."
            folder = os.path.normpath(os.path.join(mounted, inner))
            while folder.startswith(mounted):
                found.append(folder)
                if folder == mounted:
                    break
                folder = os.path.dirname(folder)
        return found

    def _mounted(self) -> list[tuple[str, str, int]]:
        found = []
        for line in _read(self._mounts).splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if len(fields) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2":
                found.append((fields[3], fields[4], 2))
            elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
                found.append((fields[3], fields[4], 1))
        return found

    def _path(self, version: int) -> str | None:
        for line in _read(self._membership).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "" if version == 2 else "memory" in controllers.split(","):
                return path
        return None


def _limit(folder: str) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(os.path.join(folder, name)).strip()
        if text.isdecimal() and int(text) < UNLIMITED:
            return int(text)
    return None


def _used(folder: str) -> int:
    """What is used in a group and cannot be dropped."""
    for name, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        text = _read(os.path.join(folder, name)).strip()
        if text.isdecimal():
            figures = dict(line.split(" ", 1) for line in _read(os.path.join(folder, "memory.stat")).splitlines() if " " in line)
            files = sum(int(figures.get(prefix + kind, 0)) for kind in ("inactive_file", "active_file"))
            return max(0, int(text) - files)
    return 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return ""


groups = Groups()


@functools.cache
def upstream() -> Any:
    """ComfyUI's own module for this, or None."""
    try:
        return importlib.import_module("comfy.system_memory") if importlib.util.find_spec("comfy.system_memory") else None
    except ModuleNotFoundError:
        return None


def total() -> int:
    """Bytes of host memory that this process and those around it may use in all."""
    own = upstream()
    if own is not None:
        return int(own.virtual_memory_total())
    import psutil
    return groups.total(psutil.virtual_memory().total)


def available() -> int:
    """Bytes of it that are left."""
    own = upstream()
    if own is not None:
        return int(own.virtual_memory_available())
    import psutil
    return groups.available(psutil.virtual_memory().available)
