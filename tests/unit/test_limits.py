"""What a container leaves, as the kernel's own files say it: made-up ones for every layout, and a real control group."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import types
import uuid

import pytest

from comfy.process_memory import limits

GIB = 1 << 30
MIB = 1 << 20
MACHINE = 256 * GIB


def container(tmp_path, version, groups, root="/", path="/box/job"):
    """Kernel files of a process in the group `path`; groups: folder below the mount -> {file: content}."""
    mounted = tmp_path / "cgroup"
    for folder, files in groups.items():
        (mounted / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (mounted / folder / name).write_text(f"{content}\n")
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (tmp_path / "mountinfo").write_text(f"22 1 0:5 / /proc rw - proc proc rw\n35 31 0:32 {root} {mounted} rw,relatime - {kind}\n")
    (tmp_path / "membership").write_text(f"0::{path}\n" if version == 2 else f"9:name=systemd:/\n4:memory:{path}\n0::/\n")
    return limits.Groups(str(tmp_path / "membership"), str(tmp_path / "mountinfo"))


def v2(limit, used, stat="anon 1"):
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit, used, stat="total_rss 1"):
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.row(8)
def test_version_2_the_group_s_own_limit(tmp_path):
    groups = container(tmp_path, 2, {"box/job": v2(32 * GIB, 30 * GIB), "box": v2("max", 90 * GIB), ".": {}})
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (32 * GIB, 2 * GIB)


@pytest.mark.row(8)
def test_version_2_the_limit_of_a_group_above_with_what_is_used_there(tmp_path):
    groups = container(tmp_path, 2, {"box/job": v2("max", 1 * GIB), "box": v2(8 * GIB, 5 * GIB), ".": {}})
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (8 * GIB, 3 * GIB)


@pytest.mark.row(8)
def test_the_nearest_to_its_limit_counts_not_the_smallest(tmp_path):
    groups = container(tmp_path, 2, {"box/job": v2(8 * GIB, 2 * GIB), "box": v2(16 * GIB, 15 * GIB)})
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (8 * GIB, 1 * GIB)


@pytest.mark.row(8)
@pytest.mark.parametrize("root, path, folder", [("/", "/box/job", "box/job"), ("/docker/abc", "/docker/abc", "."), ("/", "/", ".")])
def test_version_1_wherever_the_container_s_part_is_mounted(tmp_path, root, path, folder):
    groups = container(tmp_path, 1, {".": v1(9223372036854771712, 99 * GIB), **{folder: v1(32 * GIB, 30 * GIB)}}, root, path)
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (32 * GIB, 2 * GIB)


@pytest.mark.row(8)
@pytest.mark.parametrize("version, make, prefix", [(2, v2, ""), (1, v1, "total_")])
def test_pages_of_files_are_available_and_what_is_locked_is_not(tmp_path, version, make, prefix):
    stat = f"{prefix}inactive_file {{}}\n{prefix}active_file {{}}\n{prefix}anon {{}}"
    groups = container(tmp_path, version, {"box/job": make(32 * GIB, 31 * GIB, stat.format(20 * GIB, 5 * GIB, 6 * GIB))})
    assert groups.available(200 * GIB) == 26 * GIB
    (tmp_path / "cgroup/box/job/memory.stat").write_text(stat.format(1 * GIB, 1 * GIB, 29 * GIB))
    assert groups.available(200 * GIB) == 3 * GIB


@pytest.mark.row(8)
@pytest.mark.parametrize("version, make, none", [(2, v2, "max"), (1, v1, 9223372036854771712)])
def test_without_a_limit_the_machine_s_figures_stay(tmp_path, version, make, none):
    groups = container(tmp_path, version, {"box/job": make(none, 30 * GIB), "box": make(none, 90 * GIB)})
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (MACHINE, 200 * GIB)


def test_without_control_groups_the_machine_s_figures_stay(tmp_path):
    groups = limits.Groups(str(tmp_path / "none"), str(tmp_path / "none"))
    assert (groups.total(MACHINE), groups.available(200 * GIB)) == (MACHINE, 200 * GIB)


def test_a_machine_that_is_fuller_than_the_container_counts(tmp_path):
    groups = container(tmp_path, 2, {"box/job": v2(32 * GIB, 2 * GIB)})
    assert groups.available(1 * GIB) == 1 * GIB


def test_comfyui_s_own_module_is_used_where_it_exists(monkeypatch):
    own = types.SimpleNamespace(virtual_memory_total=lambda: 7, virtual_memory_available=lambda: 3)
    monkeypatch.setattr(limits, "upstream", lambda: own)
    assert (limits.total(), limits.available()) == (7, 3)
    from comfy.process_memory import claims, ram
    monkeypatch.setattr(claims.current, "shared", True, raising=False)
    assert ram.beyond_container() == 0


# a real control group

MEMORY = pathlib.Path("/sys/fs/cgroup/memory")

TASK = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("limits", sys.argv[1])
limits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(limits)
import psutil

MIB = 1 << 20
said = lambda *what: (sys.stdout.write(" ".join(map(str, what)) + "\\n"), sys.stdout.flush())
sys.stdin.readline()
said(limits.total() // MIB, limits.available() // MIB)
with open(sys.argv[2], "rb") as f:
    while f.read(MIB):
        pass
said(limits.available() // MIB)
available = limits.available if sys.argv[3] == "group" else lambda: psutil.virtual_memory().available
held = []
while available() > 48 * MIB:
    held.append(bytearray(os.urandom(64)) * (8 * MIB // 64))
said("stopped at", len(held) * 8)
"""


@pytest.fixture
def group():
    """A real control group of 256 MiB; None where the kernel or the rights are missing."""
    folder = MEMORY / f"process-memory-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(256 * MIB))
    except OSError:
        if folder.exists():
            folder.rmdir()
        pytest.skip("no version 1 memory control group can be made here")
    yield folder
    folder.rmdir()


def in_group(group, tmp_path, which):
    files = tmp_path / "model"
    files.write_bytes(os.urandom(MIB) * 128)
    os.sync()
    with open(files, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    where = importlib.util.find_spec("comfy.process_memory.limits").origin
    with subprocess.Popen([sys.executable, "-c", TASK, where, files, which], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        out, _ = process.communicate("go\n", timeout=60)
    return process.returncode, out.splitlines()


@pytest.mark.row(8)
def test_in_a_real_container_a_process_stops_before_the_kernel_ends_it(group, tmp_path):
    code, (first, after_file, stopped) = in_group(group, tmp_path, "group")
    total, available = map(int, first.split())
    assert code == 0 and total == 256 and 150 < available <= 256
    assert abs(int(after_file) - available) < 24        # 128 MiB of file are in the cache, and no less is available
    assert available - 48 - 24 <= int(stopped.split()[-1]) <= available - 48 + 24


@pytest.mark.row(8)
def test_in_a_real_container_the_machine_s_figures_lead_into_the_limit(group, tmp_path):
    code, said = in_group(group, tmp_path, "machine")
    assert code == -9 and len(said) == 2
