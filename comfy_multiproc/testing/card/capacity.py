"""The capacity of the virtual cards, shared by every process that uses them.

One memory-mapped file holds, for each card, its size and a slot for each process: the bytes its tensors occupy, the bytes
its allocator keeps, the fixed cost of its context. An allocation is checked and booked under one file lock, so the sum over
all processes never passes the size of the card, and the largest sum there ever was is in the file. A slot is named by pid and
process start time; the slot of a process that is gone (killed, too) is given back at the next reading or when room is needed.

The C++ form of the card (`testing/cpp/vcard.cpp`) writes the same file. Layout, in 64-bit words of the machine's byte order:

    file    0 magic   1 version   2 cards   3 slots a card   4 context bytes   5 allocator keeps freed bytes (0 or 1)   6-7 unused
    card    0 size    1 peak      2 refusals                 3-7 unused        then its slots
    slot    0 pid     1 start     2 allocated   3 cached     4 fixed           5 peak of this process   6 refusals   7 unused

Standard library only; torch is not needed to read or to fill a card.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MAGIC = int.from_bytes(b"COMFVCRD", "little")
VERSION = 1
SLOTS = 64
WORD, BLOCK = 8, 8                  # bytes a word, words a block
LOCK_SECONDS = 10.0                 # a lock is held for arithmetic only, so this long means that something is wrong

PID, START, ALLOCATED, CACHED, FIXED, PEAK, REFUSALS = range(7)
CARD_SIZE, CARD_PEAK, CARD_REFUSALS = range(3)


class CardError(RuntimeError):
    """The file is missing, damaged, of another version, full of processes, or its lock is not given back."""


class CardFull(CardError):
    """An allocation does not fit. All in bytes: `requested`, `free` on the card, `size` of the card."""

    def __init__(self, card: int, requested: int, free: int, size: int):
        super().__init__(f"{requested} bytes do not fit on virtual card {card}: {free} of {size} bytes are free")
        self.card, self.requested, self.free, self.size = card, requested, free, size


@dataclass(frozen=True)
class ProcessReading:
    """One process on one card; bytes."""

    pid: int
    allocated: int      # live tensors
    cached: int         # kept by the allocator, in no tensor
    fixed: int          # context
    peak: int           # the most that the three have been together
    refusals: int       # allocations that did not fit

    @property
    def total(self) -> int:
        return self.allocated + self.cached + self.fixed


@dataclass(frozen=True)
class CardReading:
    """One card; bytes. `peak` is exact: the largest sum over all live processes that there ever was."""

    size: int
    peak: int
    refusals: int
    processes: tuple[ProcessReading, ...]

    @property
    def used(self) -> int:
        return sum(p.total for p in self.processes)

    @property
    def free(self) -> int:
        return self.size - self.used

    def process(self, pid: int) -> ProcessReading:
        """What this process holds; all zero if it holds nothing."""
        return next((p for p in self.processes if p.pid == pid), ProcessReading(pid, 0, 0, 0, 0, 0))


def process_start(pid: int) -> int | None:
    """A number that differs between two processes which were given the same pid; None: no such process, or it has ended."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            return None
        # A zombie has given its memory back already; only its parent has not looked yet.
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    import psutil
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.Error:
        return None


class CapacityFile:
    """The cards of a capacity file, as this process uses them. Any thread may call.

    Raises CardError if the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._fd = os.open(self.path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        except OSError as e:
            raise CardError(f"virtual card: cannot open {self.path}: {e.strerror}") from None
        try:
            length = os.fstat(self._fd).st_size
            if length < BLOCK * WORD:
                raise CardError(f"virtual card: {self.path} is too short to be a capacity file")
            self._map = mmap.mmap(self._fd, length)
        except (OSError, CardError):
            os.close(self._fd)
            raise
        self._words = memoryview(self._map).cast("Q")
        magic, version, self.cards, slots = self._words[:4]
        if magic != MAGIC or version != VERSION or length != (BLOCK + self.cards * BLOCK * (1 + SLOTS)) * WORD or slots != SLOTS:
            self.close()
            raise CardError(f"virtual card: {self.path} is not a capacity file of version {VERSION}")
        self._context, self._keeps = self._words[4], bool(self._words[5])
        self._thread_lock = threading.Lock()
        self._pid = os.getpid()
        self._start = process_start(self._pid) or 0
        self._own: dict[int, int] = {}      # card -> first word of this process's slot
        self._gone: deque[tuple[int, int]] = deque()    # (card, bytes) released, not yet in the file

    @classmethod
    def create(cls, path: str | os.PathLike[str], sizes: Sequence[int], *, context: int = 0, keep_freed: bool = False) -> CapacityFile:
        """Make the file and open it. One that is there already, made by another process at the same moment, is opened as it is.

        `sizes`: bytes of each card. `context`: bytes that every process occupies on each card it uses. `keep_freed`: freed
        bytes stay with the process until `empty_cache`, as they do with torch's caching allocator.
        """
        path = os.fspath(path)
        words = [MAGIC, VERSION, len(sizes), SLOTS, context, int(keep_freed), 0, 0]
        for size in sizes:
            words += [size] + [0] * (BLOCK * (1 + SLOTS) - 1)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(struct.pack(f"={len(words)}Q", *words))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)    # unlike a rename this never replaces a file that others have mapped
        finally:
            os.unlink(temporary)
        return cls(path)

    def close(self) -> None:
        """Unmap the file. What this process holds stays booked until it ends."""
        self._pid = 0
        self._words.release()
        self._map.close()
        os.close(self._fd)

    # ---- using a card

    def allocate(self, card: int, nbytes: int) -> None:
        """Book `nbytes` for this process, from its own cache first. Raises CardFull, and then nothing is booked."""
        with self._locked():
            slot = self._slot(card)
            words = self._words
            from_cache = min(nbytes, words[slot + CACHED])
            self._grow(card, slot, nbytes - from_cache, nbytes)
            words[slot + CACHED] -= from_cache
            words[slot + ALLOCATED] += nbytes
            self._mark(card, slot)

    def release(self, card: int, nbytes: int) -> None:
        """Give `nbytes` of a tensor back that is gone; in a process that has been forked, nothing: they are its parent's.

        A tensor may go inside any function of this very class (garbage collection), so this waits for no thread: whoever has the
        lock gives back what is queued, before and after.
        """
        if os.getpid() == self._pid:
            self._gone.append((card, nbytes))
            self._settle()

    def empty_cache(self, card: int) -> None:
        """Give the bytes that the allocator keeps back to the card."""
        with self._locked():
            self._words[self._slot(card) + CACHED] = 0

    def touch(self, card: int) -> None:
        """Pay the fixed cost of a context, as the first use of a card does. Raises CardFull."""
        with self._locked():
            self._slot(card)

    # ---- looking at it

    def free(self, card: int) -> int:
        """Bytes of the card that no live process occupies."""
        with self._locked():
            self._reclaim(card)
            return self._words[self._card(card) + CARD_SIZE] - self._sum(card)

    def size(self, card: int) -> int:
        """Bytes of the card."""
        return self._words[self._card(card) + CARD_SIZE]

    def own(self, card: int) -> ProcessReading:
        """What this process holds."""
        return self.read(card).process(self._pid)

    def read(self, card: int) -> CardReading:
        """The card as it is now, without the processes that are gone."""
        with self._locked():
            self._reclaim(card)
            at = self._card(card)
            size, peak, refusals = self._words[at:at + 3]
            processes = tuple(ProcessReading(*self._words[s + PID:s + START], *self._words[s + ALLOCATED:s + REFUSALS + 1])
                              for s in self._slots(card) if self._words[s + PID])
        return CardReading(size, peak, refusals, processes)

    # ---- with the lock held

    def _card(self, card: int) -> int:
        if not 0 <= card < self.cards:
            raise CardError(f"virtual card {card}: there are {self.cards}, counted from 0")
        return BLOCK + card * BLOCK * (1 + SLOTS)

    def _slots(self, card: int) -> range:
        first = self._card(card) + BLOCK
        return range(first, first + SLOTS * BLOCK, BLOCK)

    def _sum(self, card: int) -> int:
        words = self._words
        return sum(words[s + ALLOCATED] + words[s + CACHED] + words[s + FIXED] for s in self._slots(card) if words[s + PID])

    def _slot(self, card: int) -> int:
        slot = self._own.get(card)
        if slot is not None:
            return slot
        self._reclaim(card)
        words, empty = self._words, None
        for s in self._slots(card):
            # The C++ form in the same process has a slot of its own making: it is the same one.
            if words[s + PID] == self._pid and words[s + START] == self._start:
                self._own[card] = s
                return s
            if empty is None and not words[s + PID]:
                empty = s
        if empty is None:
            raise CardError(f"virtual card {card}: more than {SLOTS} processes use {self.path}")
        free = words[self._card(card) + CARD_SIZE] - self._sum(card)
        if self._context > free:
            words[self._card(card) + CARD_REFUSALS] += 1
            raise CardFull(card, self._context, free, words[self._card(card) + CARD_SIZE])
        for field, value in ((START, self._start), (ALLOCATED, 0), (CACHED, 0), (FIXED, self._context), (PEAK, 0), (REFUSALS, 0),
                             (PID, self._pid)):
            words[empty + field] = value
        self._own[card] = empty
        self._mark(card, empty)
        return empty

    def _reclaim(self, card: int) -> None:
        words = self._words
        for s in self._slots(card):
            pid = words[s + PID]
            if pid and pid != self._pid and process_start(pid) != words[s + START]:
                words[s + PID] = 0
            elif pid == self._pid and words[s + START] != self._start:
                words[s + PID] = 0

    def _grow(self, card: int, slot: int, more: int, requested: int) -> None:
        """See that `more` bytes fit. Looking whether processes live takes much longer than a sum, so only where it matters."""
        words, at = self._words, self._card(card)
        total = self._sum(card) + more
        if total > words[at + CARD_PEAK]:
            self._reclaim(card)
            total = self._sum(card) + more
        if total > words[at + CARD_SIZE]:
            words[at + CARD_REFUSALS] += 1
            words[slot + REFUSALS] += 1
            raise CardFull(card, requested, words[at + CARD_SIZE] - total + more, words[at + CARD_SIZE])

    def _mark(self, card: int, slot: int) -> None:
        words, at = self._words, self._card(card)
        words[at + CARD_PEAK] = max(words[at + CARD_PEAK], self._sum(card))
        words[slot + PEAK] = max(words[slot + PEAK], words[slot + ALLOCATED] + words[slot + CACHED] + words[slot + FIXED])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:        # a forked child shares the lock with its parent: neither would keep the other out
            raise CardError("virtual card: opened before a fork, or closed; start processes with spawn")
        if not self._thread_lock.acquire(timeout=LOCK_SECONDS):
            raise CardError(f"virtual card: a thread of this process kept {self.path} locked for {LOCK_SECONDS:.0f} s")
        try:
            with self._alone():
                yield
        finally:
            self._thread_lock.release()
            self._settle()

    def _settle(self) -> None:
        while self._gone and self._thread_lock.acquire(blocking=False):
            try:
                with self._alone():
                    pass
            finally:
                self._thread_lock.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """With the lock of the threads held: that of the processes, too, and what is gone given back."""
        deadline = None
        while not _try_lock(self._fd):
            now = time.monotonic()
            deadline = deadline or now + LOCK_SECONDS
            if now > deadline:
                raise CardError(f"virtual card: another process kept {self.path} locked for {LOCK_SECONDS:.0f} s")
            time.sleep(0.00005)
        try:
            while self._gone:
                card, nbytes = self._gone.popleft()
                slot = self._slot(card)
                self._words[slot + ALLOCATED] -= nbytes
                if self._keeps:
                    self._words[slot + CACHED] += nbytes
            yield
        finally:
            _unlock(self._fd)


if sys.platform == "win32":
    def _try_lock(fd: int) -> bool:
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
else:
    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def read_card(path: str | os.PathLike[str], card: int = 0) -> CardReading:
    """Look at a card from outside: who holds what, and the most that was ever held. Raises CardError."""
    file = CapacityFile(path)
    try:
        return file.read(card)
    finally:
        file.close()
