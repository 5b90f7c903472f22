"""What this machine has of what the commands need. Looks only; needs nothing that is not in a bare Python."""

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .environment import OLDEST, Environment
from .fork import cache, git, obtain, tree, upstream
from .fork.errors import ForkError

Verdict = Literal["ok", "note", "fails"]

ENVIRONMENT_BYTES = 12 << 30
"""Disk space that installing the environment takes with its downloads, in bytes."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `way_out` says what to do when `verdict` is "fails"; a "note" is no obstacle."""

    name: str
    verdict: Verdict
    detail: str
    way_out: str = ""


def examine(root: Path, upstream_path: Path | None, release: str | None) -> list[Finding]:
    """Everything, in the order in which `up` needs it. `root` is the project folder."""
    environment = Environment(root / ".venv")
    findings = [python(), git_version(), pip(), space(root), installed(environment), *torch(environment), memory(), shared_memory()]
    return findings + fork(upstream_path, release)


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        return Finding("Python", "fails", f"{version} at {sys.executable}", "use Python 3.11 or newer")
    return Finding("Python", "ok", f"{version} at {sys.executable}")


def git_version() -> Finding:
    try:
        return Finding("git", "ok", git.run("--version").strip().removeprefix("git version "))
    except ForkError as error:
        return Finding("git", "fails", "not found", str(error))


def pip() -> Finding:
    try:
        import ensurepip
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        return Finding("environments", "fails", f"no module {error.name}", f"install Python's venv module (Debian, Ubuntu: apt install {package})")
    return Finding("environments", "ok", f"venv, pip {ensurepip.version()} or newer")


def space(root: Path) -> Finding:
    """Disk space and the right to write, where `up` writes."""
    for folder in (root, cache.folder()):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            return Finding("disk", "fails", f"{there} may not be written to", f"get the right to write there, or set {cache.VARIABLE} for the cache")
    free = shutil.disk_usage(root).free
    detail = f"{size(free)} free in {root}"
    if free < ENVIRONMENT_BYTES and not Environment(root / ".venv").works():
        return Finding("disk", "fails", detail, f"the environment takes about {size(ENVIRONMENT_BYTES)} while it is installed: free some space")
    return Finding("disk", "ok", detail)


def installed(environment: Environment) -> Finding:
    if environment.works():
        return Finding("environment", "ok", str(environment.folder))
    if environment.folder.exists():
        return Finding("environment", "note", f"{environment.folder} does not work and will be made anew")
    return Finding("environment", "note", f"{environment.folder} is not there yet; up makes it")


def torch(environment: Environment) -> list[Finding]:
    """torch and the GPUs it can use."""
    try:
        found = environment.torch()
    except ForkError as error:
        return [Finding("torch", "fails", "cannot be used", str(error))]
    if found is None:
        return [Finding("torch", "note", "not installed yet; up installs it")]
    findings = [Finding("torch", "ok", f"{found.version}, built for {found.build}")]
    for device in found.devices:
        total = f", {size(device['total'])}" if device["total"] else ""
        findings.append(Finding("GPU", "ok", f"{device['kind']}:{device['index']} {device['name']}{total}"))
    findings += [Finding("GPU", "note", f"not usable, {reason}") for reason in found.failed]
    if not found.devices:
        findings.append(Finding("GPU", "note", "none that torch can use: the server runs on the CPU"))
    return findings


def memory() -> Finding:
    """The machine's, and what the containers around this process leave of it."""
    from comfy.process_memory.limits import Groups
    total = main_memory()
    if total is None:
        return Finding("memory", "note", "unknown")
    usable = Groups().total(total)
    detail = size(total) + (f", container limit {size(usable)}" if usable < total else ", no container limit")
    if usable < 2 << 30:
        return Finding("memory", "fails", detail, "the server alone needs about 1 GiB: give the machine or the container more")
    return Finding("memory", "ok", detail)


def main_memory() -> int | None:
    """Bytes of the machine's main memory."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemTotal:"))
    except (OSError, ValueError, StopIteration):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None


def shared_memory() -> Finding:
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("shared memory", "note", "no /dev/shm on this system")
    return Finding("shared memory", "ok", f"{size(found.free)} free of {size(found.total)} in /dev/shm")


def fork(upstream_path: Path | None, release: str | None) -> list[Finding]:
    """Whether the series fits the chosen tree. Without a choice only a tree that is in the cache is looked at."""
    wanted = upstream.normalize(release or upstream.DEFAULT_RELEASE)
    try:
        if upstream_path is None and release is None:
            source = obtain.cached(wanted)
            if source is None:
                return [Finding("ComfyUI", "note", f"{wanted} is not in the cache yet; up obtains it")]
        else:
            source = upstream.find(upstream_path, release)
        report = tree.check(source.path)
    except ForkError as error:
        return [Finding("ComfyUI", "fails", str(upstream_path or wanted), str(error))]
    findings = [Finding("ComfyUI", "ok", f"{source.version} in {source.path}")]
    if report.ok:
        return findings + [Finding("series", "ok", f"every patch fits ComfyUI {report.version}")]
    return findings + [Finding("series", "fails", report.table(), f"use a release that it fits, such as {upstream.DEFAULT_RELEASE}")]


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count / (1 << 30):.1f} GiB"


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """For a program."""
    return {"ok": all(finding.verdict != "fails" for finding in findings), "findings": [asdict(finding) for finding in findings]}
