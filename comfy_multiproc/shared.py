"""Memory that two processes map: segments, made and reused by their sender; mappings, made and kept by their receiver.

What costs is not the copy but fresh pages, so both sides keep what they have: the sender writes into a segment that it has
written before, as soon as every receiver has let go of it, and the receiver finds the segment still mapped.

A segment has no name in any file system where the platform can pass descriptors (an anonymous memory file on Linux): nothing
is left behind when a process is killed, nothing collides with an earlier run, and the limit of a container's /dev/shm does
not apply. It lives as long as somebody has it mapped, so what was received outlives its sender.
"""
from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BY_DESCRIPTOR = sys.platform != "win32"
SMALLEST = 64 << 10
KEEP_OPEN = 128
"""Segments that may keep a descriptor open, each as a sender and as a receiver; every one counts against `ulimit -n`."""
FORWARD_FROM = 1 << 20
"""Bytes from which a received segment keeps its descriptor, to be passed on without a copy."""
SHM = "/dev/shm"
PAGE = mmap.PAGESIZE
FAILED = ctypes.c_void_p(-1).value
FILE_PAGE, SWAPPED, PRESENT = (np.uint64(1 << bit) for bit in (61, 62, 63))

_warned = threading.Event()


class SharedMemoryError(OSError):
    """No shared memory can be had, or what another process calls a segment is none."""


class Descriptor:
    """An open file that closes with its last user."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int):
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


def size_class(size: int) -> int:
    """Bytes of the segment for `size` bytes: at most an eighth more, so that segments find a second use."""
    if size <= SMALLEST:
        return SMALLEST
    step = 1 << max(16, (size - 1).bit_length() - 4)
    return -(-size // step) * step


class Segment:
    """Shared memory of this process. `array` is all of it, as writable bytes."""

    def __init__(self, size: int):
        self.size = size
        self.name = secrets.token_hex(12)
        self.since = 0.0                                    # when it became idle
        self.reserved = 0                                   # bytes that surely have room behind them
        self.limited = False                                # whether it lies in something that can be full
        self.watchers: list[Callable[[str], None]] = []     # told when it is given up
        self.descriptor: Descriptor | None = None
        self._named: Any = None
        if BY_DESCRIPTOR:
            self.descriptor, self.limited = _open(size)
            self._map: Any = _map(self.descriptor.fileno(), size, private=False)
        else:
            self.name, self._named = _create_named(size)
            self._map = _map_named(self.name, size, private=False)
        self.array = np.frombuffer(self._map, np.uint8, size)

    def reserve(self, size: int) -> None:
        """See that `size` bytes can be written: without room, writing into a mapping ends the process."""
        if size > self.reserved and self.limited and self.descriptor is not None and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.descriptor.fileno(), 0, size)
            except OSError as error:
                raise _no_room(size, error) from error
        self.reserved = max(self.reserved, size)


def _open(size: int) -> tuple[Descriptor, bool]:
    """An unnamed file of that size, and whether it lies where there may be no room."""
    try:
        fd = os.memfd_create("comfy-multiproc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return _open_in_folder(size), True
    descriptor = Descriptor(fd)
    try:
        os.ftruncate(fd, size)
        _seal(fd)
    except OSError as error:
        raise _no_room(size, error) from error
    return descriptor, False


def _seal(fd: int) -> None:
    # Reading beyond the end of a file that somebody has shortened ends the reader.
    import fcntl
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _map(fd: int, size: int, private: bool) -> Any:
    """The file's bytes, mapped as long as anything refers to what is returned.

    Not the mmap module's: before Python 3.13 its mappings keep a descriptor open, each.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, FAILED):
        error = ctypes.get_errno()
        raise SharedMemoryError(error, f"{size} bytes ({size >> 20} MiB) of shared memory cannot be mapped: {os.strerror(error)}")
    mapped = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(mapped, _libc().munmap, address, size).atexit = False
    return mapped


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _open_in_folder(size: int) -> Descriptor:
    """The same where there are no anonymous memory files: in /dev/shm if it has room, else among the temporary files."""
    if os.path.isdir(SHM):
        total, _, free = shutil.disk_usage(SHM)
        # Filling it to the brim would take it away from everybody else in the container.
        if size <= free - total // 8:
            try:
                return _unnamed_file(SHM, size)
            except OSError:
                free = shutil.disk_usage(SHM).free
        if not _warned.is_set():
            _warned.set()
            logging.warning("Shared memory is small: %s has %d MiB, %d MiB of them free, and %d MiB are needed. Values of that size go "
                            "through files in %s, which is slower. In a container, start it with --shm-size=8g or --ipc=host.",
                            SHM, total >> 20, free >> 20, size >> 20, tempfile.gettempdir())
    try:
        return _unnamed_file(tempfile.gettempdir(), size)
    except OSError as error:
        raise _no_room(size, error) from error


def _unnamed_file(folder: str, size: int) -> Descriptor:
    fd, path = tempfile.mkstemp(prefix="comfy-multiproc-", dir=folder)
    descriptor = Descriptor(fd)
    os.unlink(path)
    os.ftruncate(fd, size)
    return descriptor


def _no_room(size: int, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(error.errno, f"no shared memory of {size} bytes ({size >> 20} MiB) for a value that goes to another process: "
                                          f"{error.strerror or error}. Free memory, or in a container start it with --shm-size=8g or --ipc=host")


def _create_named(size: int) -> tuple[str, Any]:
    from multiprocessing.shared_memory import SharedMemory
    while True:
        name = f"comfy-multiproc-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            return name, SharedMemory(name, create=True, size=size)
        except FileExistsError:
            continue    # a stranger's; it stays as it is


def _map_named(name: str, size: int, private: bool) -> Any:
    return mmap.mmap(-1, size, tagname=name, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE)   # type: ignore[call-arg]


@dataclass(frozen=True)
class PoolUsage:
    """Bytes of shared memory that a process has made (`lent`, `idle`) and has from others (`received`, in use)."""
    lent: int
    idle: int
    received: int


class SharedPool:
    """The segments of this process. Any thread.

    `max_idle` bounds the bytes that are kept for the next value, `idle_seconds` how long they are kept.
    """

    def __init__(self, max_idle: int = 1 << 30, idle_seconds: float = 30.0):
        self.max_idle, self.idle_seconds = max_idle, idle_seconds
        self._lock = threading.Lock()
        self._idle: dict[int, list[Segment]] = {}
        self._idle_bytes = self._lent_bytes = 0
        self._lent = 0
        self._starts: list[int] = []                            # addresses of mappings in use, sorted
        self._mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._open: OrderedDict[int, None] = OrderedDict()      # addresses of those with a descriptor, oldest first

    # sending

    def allocate(self, size: int) -> Segment:
        """A segment of at least `size` bytes, the caller's until `release` or `abandon`. Its content is undefined.

        Raises SharedMemoryError when there is no room.
        """
        wanted = size_class(size)
        with self._lock:
            kept = self._idle.get(wanted)
            segment = kept.pop() if kept else None
            if segment is not None:
                self._idle_bytes -= segment.size
        try:
            segment = self._room(segment, wanted, size)
        except SharedMemoryError:
            if not self.trim(0):
                raise
            segment = self._room(None, wanted, size)
        with self._lock:
            self._lent += 1
            self._lent_bytes += segment.size
        return segment

    def _room(self, segment: Segment | None, wanted: int, size: int) -> Segment:
        segment = segment or Segment(wanted)
        try:
            segment.reserve(size)
        except SharedMemoryError:
            _give_up(segment)
            raise
        return segment

    @property
    def crowded(self) -> bool:
        """Whether so many segments are with receivers that new ones had better be given away for good."""
        return BY_DESCRIPTOR and self._lent > KEEP_OPEN

    def release(self, segment: Segment) -> None:
        """No receiver has it any more; it may be written again."""
        with self._lock:
            self._forget(segment)
            fits = self._idle_bytes + segment.size <= self.max_idle
            if fits:
                segment.since = time.monotonic()
                self._idle_bytes += segment.size
                self._idle.setdefault(segment.size, []).append(segment)
        if not fits:
            _give_up(segment)

    def abandon(self, segment: Segment) -> None:
        """Receivers may have it for as long as they like; it is never written again."""
        with self._lock:
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        self._lent -= 1
        self._lent_bytes -= segment.size

    def trim(self, seconds: float | None = None) -> int:
        """Give up what has been idle for `seconds` (default: `idle_seconds`); bytes given back to the system."""
        oldest = time.monotonic() - (self.idle_seconds if seconds is None else seconds)
        gone: list[Segment] = []
        with self._lock:
            for size, kept in list(self._idle.items()):
                gone += [s for s in kept if s.since <= oldest]
                kept[:] = [s for s in kept if s.since > oldest]
                if not kept:
                    del self._idle[size]
            freed = sum(s.size for s in gone)
            self._idle_bytes -= freed
        for segment in gone:
            _give_up(segment)
        return freed

    def usage(self) -> PoolUsage:
        with self._lock:
            return PoolUsage(self._lent_bytes, self._idle_bytes, sum(m.size for m in self._mappings.values()))

    # receiving

    def locate(self, address: int, size: int) -> tuple[Mapping, Descriptor | None, int] | None:
        """The received segment in which these bytes lie and their offset, if it can be passed on as it is."""
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            while index >= 0:
                mapping = self._mappings.get(self._starts[index])
                if mapping is None:
                    # Unmapped after its link had ended, when nobody was left to say so.
                    self._starts.pop(index)
                    index -= 1
                    continue
                offset = address - mapping.address
                if offset + size > mapping.size or (mapping.descriptor is None and BY_DESCRIPTOR):
                    return None
                return mapping, mapping.descriptor, offset
            return None

    def _enter(self, mapping: Mapping) -> None:
        with self._lock:
            if mapping.address not in self._mappings:
                insort(self._starts, mapping.address)
            self._mappings[mapping.address] = mapping
            if mapping.descriptor is not None:
                self._open[mapping.address] = None
                if len(self._open) > KEEP_OPEN:
                    oldest = self._mappings.get(self._open.popitem(last=False)[0])
                    if oldest is not None:
                        oldest.descriptor = None

    def _leave(self, mapping: Mapping) -> None:
        with self._lock:
            if self._mappings.pop(mapping.address, None) is not None:
                self._starts.remove(mapping.address)
                self._open.pop(mapping.address, None)


def _give_up(segment: Segment) -> None:
    for watcher in segment.watchers:
        watcher(segment.name)
    segment.watchers = []


class Mapping:
    """A segment of another process, mapped here: all of it, at `address`."""

    def __init__(self, name: str, size: int, fd: int | None, private: bool):
        self.name, self.size, self.private = name, size, private
        self.descriptor: Descriptor | None = None
        self.idle_since = 0.0
        if fd is not None:
            if os.fstat(fd).st_size < size:
                raise SharedMemoryError(f"segment {name} is said to have {size} bytes and has {os.fstat(fd).st_size}")
            self._map: Any = _map(fd, size, private)
        else:
            from multiprocessing.shared_memory import SharedMemory
            named = SharedMemory(name)      # opens, where mmap would make an empty one if the sender is gone
            try:
                if named.size < size:
                    raise SharedMemoryError(f"segment {name} is said to have {size} bytes and has {named.size}")
                self._map = _map_named(name, size, private)
            finally:
                named.close()
        self.array: weakref.ref[np.ndarray] | None = None
        self.address = np.frombuffer(self._map, np.uint8, 1).__array_interface__["data"][0]

    def open(self) -> np.ndarray:
        """Its bytes. Everything made of them keeps the array alive, and nothing else does."""
        array = np.frombuffer(self._map, np.uint8, self.size)
        self.array = weakref.ref(array)
        return array

    def clean(self) -> bool:
        """See that it shows what the sender writes next, also where this process has written; whether that can be done."""
        if not self.private:
            return True
        if sys.platform != "linux":
            return False
        # Dropping all pages would be enough, but mapping them again costs as much as the copy that sharing saves.
        return not self._written() or _libc().madvise(self.address, self.size, mmap.MADV_DONTNEED) == 0

    def _written(self) -> bool:
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek(self.address // PAGE * 8)
                pages = np.frombuffer(pagemap.read(-(-self.size // PAGE) * 8), np.uint64)
        except OSError:
            return True
        if pages.size * PAGE < self.size:
            return True
        return bool((((pages & (PRESENT | SWAPPED)) != 0) & ((pages & FILE_PAGE) == 0)).any())


class Attachments:
    """The segments that one link has brought. Any thread; every step on the dictionary is a single one.

    `private`: writes of this process stay in this process. Otherwise they go where the sender and others may see them.
    """

    def __init__(self, pool: SharedPool, private: bool):
        self._pool, self._private = pool, private
        self._idle: dict[str, Mapping] = {}

    def attach(self, name: str, size: int, fd: int | None) -> Mapping:
        """The mapping of a segment; `open` gives its bytes. The descriptor stays the caller's. Raises SharedMemoryError."""
        mapping = self._idle.pop(name, None)
        if mapping is None or mapping.size != size:
            try:
                mapping = Mapping(name, size, fd, self._private)
            except SharedMemoryError:
                raise
            except (OSError, ValueError) as error:
                raise SharedMemoryError(f"segment {name} cannot be mapped: {error}") from error
        if fd is not None and size >= FORWARD_FROM and not self._private:
            try:
                mapping.descriptor = Descriptor(os.dup(fd))
            except OSError:
                pass    # no more files: it is passed on as a copy
        self._pool._enter(mapping)
        return mapping

    def recycle(self, mapping: Mapping, keep: bool) -> None:
        """Nothing uses the mapping's bytes any more. With `keep` the segment is expected again."""
        self._pool._leave(mapping)
        mapping.descriptor = None
        if keep and mapping.clean():
            mapping.idle_since = time.monotonic()
            self._idle[mapping.name] = mapping

    def forget(self, name: str) -> None:
        """The sender has given the segment up."""
        self._idle.pop(name, None)

    def trim(self, seconds: float) -> None:
        """Unmap what has not been used for so long."""
        oldest = time.monotonic() - seconds
        for mapping in list(self._idle.values()):
            if mapping.idle_since <= oldest:
                self._idle.pop(mapping.name, None)

    def close(self) -> None:
        self._idle.clear()
