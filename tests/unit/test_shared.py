"""Memory that two processes map: that it is used again, given back, and had in containers that have little of it."""

import ctypes
import errno
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest

from comfy_multiproc import shared
from comfy_multiproc.shared import Attachments, SharedMemoryError, SharedPool, size_class
from tests.unit.value_peer import Pair

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def no_memory_files(monkeypatch, tmp_path):
    """A platform without anonymous memory files."""
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared, "_warned", shared.threading.Event())
    return tmp_path


def disk(monkeypatch, total, free):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, total - free, free) if path == shared.SHM else real(path))


def crosses(pool):
    """Whether bytes that are written into a segment of the pool are seen by who maps it."""
    segment = pool.allocate(8 * MIB)
    segment.array[::4096] = 7
    fd = os.dup(segment.descriptor.fileno())
    mapping = Attachments(SharedPool(), private=True).attach(segment.name, segment.size, fd)
    os.close(fd)
    seen = mapping.open()[::4096].all()
    pool.release(segment)
    return seen


@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1, 3 * MIB + 5, 64 * MIB, 100 * MIB + 1])
def test_a_segment_is_little_larger_than_what_it_is_for(size):
    assert size <= size_class(size) <= max(1 << 16, size * 1.125 + (1 << 16)) and size_class(size_class(size)) == size_class(size)


def test_memory_that_came_back_is_used_again_and_given_back_when_idle():
    pool = SharedPool(max_idle=3 * MIB)
    first = pool.allocate(MIB)
    pool.release(first)
    assert pool.allocate(MIB - 5000) is first
    others = [pool.allocate(MIB) for _ in range(4)]
    assert pool.usage().lent == 5 * MIB
    for segment in [first, *others]:
        pool.release(segment)
    assert pool.usage() == shared.PoolUsage(lent=0, idle=3 * MIB, received=0)
    assert pool.trim(3600) == 0
    assert pool.trim(0) == 3 * MIB and pool.usage().idle == 0


def test_what_the_sender_gives_up_the_receiver_unmaps():
    import torch
    gc.collect()
    before = mapped()
    pair = Pair()
    arrived = pair.to_worker(torch.ones(2 * MIB))
    del arrived
    pair.until(lambda: pair.host.pool.usage().idle == 8 * MIB)
    assert mapped() == before + 2
    pair.host.pool.trim(0)
    pair.until(lambda: not pair.worker._attachments._idle)
    assert mapped() == before
    pair.close()


def mapped():
    with open("/proc/self/maps") as maps:
        return sum("comfy-multiproc" in line for line in maps)


def test_nobody_can_shorten_a_segment_under_its_readers():
    segment = SharedPool().allocate(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor.fileno(), 10)


def test_a_segment_that_is_smaller_than_said_is_refused():
    with tempfile.TemporaryFile() as file:
        file.truncate(100)
        with pytest.raises(SharedMemoryError, match="said to have 65536 bytes and has 100"):
            Attachments(SharedPool(), private=False).attach("x", 65536, file.fileno())


# containers

def test_without_memory_files_shared_memory_is_used_and_nothing_is_left_in_it(no_memory_files, monkeypatch, caplog):
    disk(monkeypatch, 1 << 34, 1 << 34)
    before = os.listdir(shared.SHM)
    assert crosses(SharedPool())
    assert os.listdir(shared.SHM) == before and not caplog.records


@pytest.mark.parametrize(("total", "free", "wanted"), [(64, 64, 256), (64, 4, 8)], ids=["small", "full"])
def test_small_shared_memory_is_gone_round_with_one_warning(no_memory_files, monkeypatch, caplog, total, free, wanted):
    disk(monkeypatch, total * MIB, free * MIB)
    caplog.set_level(logging.WARNING)
    pool = SharedPool()
    segments = [pool.allocate(wanted * MIB // 8 * 8) for _ in range(2)]
    for segment in segments:
        segment.array[-1] = 1
    warning, = caplog.messages
    assert f"has {total} MiB" in warning and f"{free} MiB of them free" in warning and "--shm-size" in warning
    assert os.listdir(no_memory_files) == []


def test_no_room_anywhere_is_said_before_anything_is_written(no_memory_files, monkeypatch):
    disk(monkeypatch, 0, 0)

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=r"5242880 bytes \(5 MiB\).*No space left.*--shm-size"):
        SharedPool().allocate(5 * MIB)


def test_idle_memory_is_given_up_for_a_value_that_finds_no_room(no_memory_files, monkeypatch):
    disk(monkeypatch, 1 << 34, 1 << 34)
    pool = SharedPool()
    pool.release(pool.allocate(MIB))
    calls = []

    def full_at_first(fd, offset, size):
        calls.append(size)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    assert pool.allocate(2 * MIB).size == 2 * MIB and pool.usage().idle == 0


SMALL = """
import logging, os, sys
import torch
from comfy_multiproc.handles import HandleTable
from comfy_multiproc.shared import SharedPool
from tests.unit.value_peer import Peer

logging.basicConfig(format="%(message)s", stream=sys.stdout)
peer = Peer(HandleTable("host"), SharedPool())
large = torch.arange(int(sys.argv[1]) // 4, dtype=torch.float32)
assert peer.do("echo", large).equal(large)
with open("/dev/shm/full", "wb") as file:
    file.write(bytes(60 << 20))
assert os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 8 << 20
middle = large[:2 << 20].clone()
assert peer.do("echo", middle).equal(middle)
peer.close()
assert peer.process.returncode == 0
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts something in a namespace of its own")
@pytest.mark.parametrize(("memory_files", "size"), [(True, 80 * MIB), (False, 256 * MIB)])
def test_values_cross_in_a_container_with_64_mib_of_shared_memory(tmp_path, memory_files, size):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("there are no namespaces here")
    if not memory_files:
        (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create\n")
    done = subprocess.run(["unshare", "-m", "sh", "-ec", 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$0" -c "$1" "$2"', sys.executable, SMALL, str(size)],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # The other process has a log of its own.
    for log in (done.stdout, done.stderr):
        warnings = [line for line in log.splitlines() if "Shared memory is small" in line]
        assert len(warnings) == (not memory_files)
        assert all("has 64 MiB" in line and f"{size >> 20} MiB are needed" in line and "--shm-size" in line for line in warnings)


# where descriptors cannot be passed

@pytest.fixture
def by_name(monkeypatch):
    """The way of a platform that shares memory by name."""
    monkeypatch.setattr(shared, "BY_DESCRIPTOR", False)
    monkeypatch.setattr(shared_memory, "resource_tracker", type("Tracker", (), {"register": lambda *_: None, "unregister": lambda *_: None}), raising=False)
    made = []
    create = shared._create_named

    def remembered(size):
        made.append(create(size))
        return made[-1]

    def map_named(name, size, private):
        fd = os.open(f"{shared.SHM}/{name}", os.O_RDWR)
        try:
            return shared._map(fd, size, private)
        finally:
            os.close(fd)
    monkeypatch.setattr(shared, "_create_named", remembered)
    monkeypatch.setattr(shared, "_map_named", map_named)
    yield made
    for _, segment in made:
        segment.close()
        os.unlink(f"{shared.SHM}/{segment.name}")


def test_values_cross_by_name_too(by_name):
    import torch
    pair = Pair()
    for number in range(3):
        arrived = pair.to_worker(torch.full((MIB,), float(number)))
        assert arrived.eq(number).all()
        arrived.fill_(-1)
        back = pair.to_host(arrived)
        assert back.eq(-1).all() and pair.to_worker(back).eq(-1).all()
        del arrived, back
        pair.until(lambda: pair.host.pool.usage().lent == pair.worker.pool.usage().lent == 0)
    pair.close()
    assert len(by_name) <= 6


def test_names_of_two_hosts_at_once_and_of_an_earlier_one_never_meet(by_name, monkeypatch):
    tokens = iter(["old", "old", "new", "new", "newer"])
    monkeypatch.setattr(shared.secrets, "token_hex", lambda _: next(tokens))
    name = f"comfy-multiproc-{os.getpid()}-old"
    stranger = shared_memory.SharedMemory(name, create=True, size=4096)
    stranger.buf[0] = 42
    next(tokens)
    segments = [pool.allocate(1000) for pool in (SharedPool(), SharedPool())]
    for segment in segments:
        segment.array[:] = 1
    assert len({name, *(s.name for s in segments)}) == 3 and stranger.buf[0] == 42
    stranger.close()
    stranger.unlink()


def test_a_mapping_of_its_own_memory_is_told_from_one_that_was_written():
    pool = SharedPool()
    segment = pool.allocate(4 * MIB)
    segment.array[:] = 1
    mapping = Attachments(SharedPool(), private=True).attach(segment.name, segment.size, segment.descriptor.fileno())
    array = mapping.open()
    assert array.sum() == 4 * MIB and not mapping._written()
    array[2 * MIB] = 5
    assert mapping._written() and segment.array[2 * MIB] == 1
    assert mapping.clean() and np.frombuffer((ctypes.c_ubyte * segment.size).from_address(mapping.address), np.uint8).sum() == 4 * MIB
