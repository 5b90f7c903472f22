"""The ledger: what each ComfyUI process of this user on this machine holds, in one memory-mapped file.

Every process writes its own slot and reads the others'; no message is sent and no lock is held for either. The file
lock is taken only to take a slot or to make the file. Nothing has to be cleaned up: a slot whose process has ended is
skipped by everybody at the next read and used again by the next process that starts.

:mod:`.records` says how it is laid out.
"""
from __future__ import annotations

import dataclasses
import mmap
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from comfy.process_memory.provider import DeviceUsage, RamUsage

from .liveness import alive, boot_id, pid_namespace, process_start
from .records import (BODY, BUSY, CHANGES, CLAIMS, DEVICE_SIZE, DEVICES, FILE_SIZE, HEADER, HEADER_SIZE, MAGIC, SLOT_HEAD, SLOT_SIZE, SLOTS,
                      UNKNOWN, VERSION, WAITING, DeviceReport, Process, Report, as_text, as_word, digest_of, pack_device, unpack)

LOCK_SECONDS = 10.0       # the lock is held for arithmetic only; this long means that its holder is stopped
LOOK_AGAIN = 0.05         # seconds for which a process that was seen alive is taken to be so
READ_TRIES = 20


class LedgerError(Exception):
    """The ledger cannot be used; the message names the file or folder and the way out."""


_fence_lock = threading.Lock()


def _fence() -> None:
    # Memory accesses are not moved across taking and giving back a lock; Python has no other barrier.
    with _fence_lock:
        pass


def runtime_folder() -> Path:
    """The private folder of this user that holds the ledger, made if it is not there.

    ``COMFY_MULTIPROC_RUNTIME`` names another one. Raises LedgerError if it belongs to somebody else.
    """
    named = os.environ.get("COMFY_MULTIPROC_RUNTIME")
    if named:
        folder = Path(named)
    elif hasattr(os, "getuid"):
        # A service has often no XDG_RUNTIME_DIR, while the user's login shell has; both must find the same folder.
        for base in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"):
            if base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid() and os.access(base, os.W_OK):
                folder = Path(base) / "comfyui-multiproc"
                break
        else:
            folder = Path(tempfile.gettempdir()) / f"comfyui-multiproc-{os.getuid()}"
    else:
        folder = Path(tempfile.gettempdir()) / "comfyui-multiproc"
    try:
        folder.mkdir(mode=0o700, parents=bool(named), exist_ok=True)
        found = os.lstat(folder)
    except OSError as e:
        raise LedgerError(f"cannot make the folder {folder}: {e.strerror}; "
                          "set COMFY_MULTIPROC_RUNTIME to a folder that you own") from None
    if not stat.S_ISDIR(found.st_mode):
        raise LedgerError(f"{folder} is not a folder; remove it, or set COMFY_MULTIPROC_RUNTIME to a folder that you own")
    if hasattr(os, "getuid"):
        if found.st_uid != os.getuid():
            raise LedgerError(f"{folder} belongs to another user; remove it, or set COMFY_MULTIPROC_RUNTIME to a folder "
                              "that you own")
        if found.st_mode & 0o077:
            try:
                os.chmod(folder, 0o700)
            except OSError as e:
                raise LedgerError(f"cannot make {folder} private: {e.strerror}; set COMFY_MULTIPROC_RUNTIME to a folder that you own") from None
    return folder


class Ledger:
    """The ledger file, open. Any thread may read.

    `create` False opens an existing file for reading only. `words` is the file as 64-bit words. Raises LedgerError.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, create: bool = True):
        self.folder = runtime_folder() if folder is None else Path(folder)
        self.path = self.folder / f"ledger-{VERSION}-{pid_namespace()}"
        self._lock = threading.Lock()
        if create:
            with self.lock():
                if not self._usable():
                    self._make()
        elif not self._usable():
            raise LedgerError(f"no ComfyUI process of this user has run since the machine started: {self.path} is not there")
        try:
            with open(self.path, "r+b" if create else "rb") as f:
                self._inode = os.fstat(f.fileno()).st_ino
                self._map = mmap.mmap(f.fileno(), FILE_SIZE, access=mmap.ACCESS_WRITE if create else mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise LedgerError(f"cannot open {self.path}: {e}; remove it and start again") from None
        self.words = memoryview(self._map).cast("Q")
        self._seen: list[Process | None] = [None] * SLOTS
        self._half: list[int] = [0] * SLOTS      # an odd sequence at which waiting for the owner was in vain
        self._looked: list[tuple[float, int, int, bool]] = [(0.0, 0, 0, False)] * SLOTS

    def lock(self) -> _BoundedLock:
        """The lock under which slots are taken and given back; a context manager that waits at most 10 seconds."""
        return _BoundedLock(str(self.path) + ".lock")

    def _usable(self) -> bool:
        try:
            with open(self.path, "rb") as f:
                if os.fstat(f.fileno()).st_size != FILE_SIZE:
                    return False
                magic, version, boot, slots, size, _ = HEADER.unpack(f.read(HEADER.size))
        except FileNotFoundError:
            return False
        except OSError as e:
            raise LedgerError(f"cannot read {self.path}: {e.strerror}; remove it, or set COMFY_MULTIPROC_RUNTIME to a "
                              "folder that you own") from None
        return (magic, version, boot, slots, size) == (MAGIC, VERSION, boot_id(), SLOTS, SLOT_SIZE)

    def _make(self) -> None:
        """Put a new file in the place of one that is missing, damaged or left by another boot.

        Never in place: cutting a file short kills whoever has it mapped. Processes that still use the old one notice
        that it has been replaced (:attr:`replaced`).
        """
        try:
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix="ledger-")   # made with mode 0600
            with os.fdopen(handle, "wb") as f:
                f.write(HEADER.pack(MAGIC, VERSION, boot_id(), SLOTS, SLOT_SIZE, 0))
                f.truncate(FILE_SIZE)
                if hasattr(os, "posix_fallocate"):
                    # Where there is no room: an error here, and not the end of a process (SIGBUS) at its first writing in a new page.
                    os.posix_fallocate(f.fileno(), 0, FILE_SIZE)
            os.replace(temporary, self.path)
        except OSError as e:
            raise LedgerError(f"cannot make {self.path}: {e.strerror}; make room there, or set COMFY_MULTIPROC_RUNTIME to "
                              "another folder") from None

    @property
    def replaced(self) -> bool:
        """Whether the file at this path is no longer the one that is open (deleted, or made anew by somebody)."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return True

    @property
    def changes(self) -> int:
        """Grows whenever a process takes a slot or gives one back."""
        return self.words[CHANGES]

    def close(self) -> None:
        """Unmap the file."""
        with self._lock:
            self.words.release()
            self._map.close()

    def age(self, slot: int) -> float:
        """Seconds since the owner of `slot` has last said that what is there is so."""
        return max(0.0, time.monotonic() - self.words[(HEADER_SIZE + slot * SLOT_SIZE) // 8 + 6] / 1e9)

    def sequence_place(self, slot: int) -> int:
        """Index of the word that changes with everything in `slot` but claims and their age."""
        return (HEADER_SIZE + slot * SLOT_SIZE) // 8

    def claim_place(self, slot: int, device: str) -> int:
        """Index of the word that holds what the owner of `slot` claims on `device`.

        While it has never claimed anything there: of a word that is 0 until it claims something on a device that is new.
        """
        words, digest = self.words, digest_of(device)
        first = (HEADER_SIZE + slot * SLOT_SIZE + SLOT_HEAD.size) // 8
        for at in range(first, first + 2 * CLAIMS, 2):
            if words[at] in (0, digest):
                return at + 1
        return first + 2 * CLAIMS - 1

    def claimed(self, slot: int, device: str) -> int:
        """What the owner of `slot` claims on `device` now."""
        at = self.claim_place(slot, device)
        return self.words[at] if self.words[at - 1] == digest_of(device) else 0

    def take(self, name: str, address: str = "", *, family: int = 0, only: bool = False) -> Slot | None:
        """A slot for this process, with its name for people, where its endpoint listens, and which family it belongs to.

        None when all 64 belong to live processes. `only`: it is the one slot of this process. Another one is of the program that ran
        in it before (os.execv keeps the pid and the start), and is given back.
        """
        pid = os.getpid()
        start = process_start(pid) or 0
        words = self.words
        with self.lock():
            for i in range(SLOTS if only else 0):
                self.vacate(i, pid, start)
            for i in range(SLOTS):
                at = self.sequence_place(i)
                if words[at + 1] and alive(words[at + 1], words[at + 2]):
                    continue
                sequence = words[at] + 1 | 1
                words[at] = sequence
                _fence()
                self._map[HEADER_SIZE + i * SLOT_SIZE + SLOT_HEAD.size:HEADER_SIZE + i * SLOT_SIZE + BODY] = bytes(BODY - SLOT_HEAD.size)
                head = SLOT_HEAD.pack(sequence, pid, start, words[at + 3] + 1, 0, 0, time.monotonic_ns(), 0,
                                      *[UNKNOWN] * 5, family, 0, 0, as_text(name, 64), as_text(address, 192))
                first = HEADER_SIZE + i * SLOT_SIZE
                self._map[first + 8:first + SLOT_HEAD.size] = head[8:]
                _fence()
                words[at] = sequence + 1
                words[CHANGES] += 1
                return Slot(self, i, pid, start)
        return None

    def vacate(self, slot: int, pid: int, start: int) -> None:
        """Give `slot` back if it is that process's. Called with :meth:`lock` held."""
        words, at = self.words, self.sequence_place(slot)
        if words[at + 1] == pid and words[at + 2] == start:
            words[at + 1] = 0
            words[at] = (words[at] | 1) + 1     # whoever has read it looks again
            words[CHANGES] += 1

    def processes(self, exact: bool = False) -> Iterator[Process]:
        """Every live process that is listed. `exact`: look whether each one lives now, not up to 50 ms ago."""
        for i in range(SLOTS):
            process = self.read(i, exact)
            if process is not None:
                yield process

    def read(self, slot: int, exact: bool = False) -> Process | None:
        """The process in `slot`; None when there is none or it has ended."""
        words = self.words
        at = self.sequence_place(slot)
        pid = words[at + 1]
        if not pid:
            return None
        start = words[at + 2]
        now = time.monotonic()
        looked, looked_pid, looked_start, lives = self._looked[slot]
        if exact or looked_pid != pid or looked_start != start or (lives and now - looked > LOOK_AGAIN):
            lives = alive(pid, start)
            self._looked[slot] = (now, pid, start, lives)
        if not lives:
            return None
        seen = self._seen[slot]
        for n in range(READ_TRIES):
            sequence = words[at]
            if seen is not None and seen.sequence == sequence and seen.pid == pid:
                return seen
            if not sequence & 1:
                _fence()
                first = HEADER_SIZE + slot * SLOT_SIZE
                count = min(words[at + 7], DEVICES)
                data = self._map[first:first + BODY + count * DEVICE_SIZE]
                _fence()
                if words[at] == sequence:
                    seen = self._seen[slot] = unpack(slot, data)
                    return seen
            elif sequence == self._half[slot]:
                break
            if n:
                time.sleep(0.00005)
        else:
            self._half[slot] = sequence if sequence & 1 else 0
        if seen is not None and (seen.pid, seen.start) == (pid, start):
            # What it wrote last is the best there is: its owner has been stopped, so it has changed nothing since.
            return dataclasses.replace(seen, settled=False, busy=True)
        return Process(slot=slot, sequence=1, pid=pid, start=start, name=f"process {pid}", address="", family=0, generation=words[at + 3],
                       busy=True, prompts=0, ram=RamUsage(), devices={}, settled=False)


class _BoundedLock:
    """A file lock as a context manager that gives up after a bound instead of waiting for ever."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        # Here, because reading the ledger (`comfy-multiproc top`) must work on a bare Python.
        import filelock
        self._lock = filelock.FileLock(self._path, mode=0o600)
        try:
            self._lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.002)
        except filelock.Timeout:
            raise LedgerError(f"another process has held {self._path} for {LOCK_SECONDS:.0f} seconds; "
                              "look for a stopped ComfyUI process and continue or end it") from None
        except (OSError, RuntimeError) as e:      # a file system without locks
            raise LedgerError(f"cannot lock {self._path}: {getattr(e, 'strerror', None) or e}; set COMFY_MULTIPROC_RUNTIME to a folder "
                              "that you own") from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Slot:
    """This process's own slot. Any thread may write; what others read is always one whole writing."""

    def __init__(self, ledger: Ledger, index: int, pid: int, start: int):
        self.index = index
        self._ledger = ledger
        self._at = ledger.sequence_place(index)
        self._pid, self._start = pid, start
        self._lock = threading.Lock()
        self._report = Report()
        self._busy = False
        self._capturing: set[str] = set()
        self._written: object = None

    def confirm(self) -> None:
        """Say that what is written is still so. One word: nobody has to read the slot again."""
        self._ledger.words[self._at + 6] = time.monotonic_ns()

    def publish(self, report: Report) -> None:
        """Write what this process holds. Nothing is written if nothing but the time has changed.

        Raises ValueError for more than 16 devices.
        """
        with self._lock:
            self._report = report
            self._publish()

    def claim(self, device: str, size: int) -> None:
        """Write what this process has been admitted for on `device` and has not allocated yet; 0 ends it.

        Raises ValueError for a forty-ninth device.
        """
        words, digest = self._ledger.words, digest_of(device)
        first = self._at + SLOT_HEAD.size // 8
        with self._lock:
            for at in range(first, first + 2 * CLAIMS, 2):
                if words[at] in (0, digest):
                    words[at + 1] = as_word(size)
                    _fence()
                    words[at] = digest
                    return
        raise ValueError(f"a process can claim on {CLAIMS} devices")

    def busy(self, busy: bool, *, prompt: bool = False) -> None:
        """Write whether a prompt runs; `prompt` counts one more."""
        with self._lock:
            if busy != self._busy or prompt:
                self._busy = busy
                prompts = self._ledger.words[self._at + 5] + prompt
                self._write(4 * 8, struct.pack("<2Q", BUSY if busy else 0, prompts))

    def waiting(self, waiting: bool) -> None:
        """Write whether a load waits for others. One word, as a claim."""
        self._ledger.words[self._at + WAITING] = waiting

    def capture(self, device: str, capturing: bool) -> None:
        """Write whether a graph is being captured on `device`."""
        with self._lock:
            (self._capturing.add if capturing else self._capturing.discard)(device)
            self._publish()

    def close(self) -> None:
        """Give the slot back."""
        with self._lock, self._ledger.lock():
            self._ledger.vacate(self.index, self._pid, self._start)

    def _publish(self) -> None:
        devices: Sequence[DeviceReport] = self._report.devices
        listed = {d.key for d in devices}
        more = [DeviceReport(key=key, usage=DeviceUsage(resident=0)) for key in self._capturing - listed]
        if len(devices) + len(more) > DEVICES:
            raise ValueError(f"a process can list {DEVICES} devices, not {len(devices) + len(more)}")
        ram = self._report.ram
        body = struct.pack("<6Q", len(devices) + len(more), *map(as_word, (
            ram.resident, ram.pinned, ram.registered, ram.backups, ram.outputs)))
        table = b"".join(pack_device(d, d.key in self._capturing) for d in (*devices, *more))
        # RAM changes all the time; a few megabytes are not worth that every reader parses the slot again.
        written = table, body[:8], [None if f is None else f >> 24 for f in (ram.resident, ram.pinned, ram.registered, ram.backups,
                                                                            ram.outputs)]
        if self._written == written:
            return
        self._written = written
        self._write(6 * 8, struct.pack("<Q", time.monotonic_ns()) + body, table)

    def _write(self, offset: int, data: bytes, table: bytes = b"") -> None:
        words, at = self._ledger.words, self._at
        first = HEADER_SIZE + self.index * SLOT_SIZE
        sequence = words[at] | 1
        words[at] = sequence
        _fence()
        self._ledger._map[first + offset:first + offset + len(data)] = data
        if table:
            self._ledger._map[first + BODY:first + BODY + len(table)] = table
        _fence()
        words[at] = sequence + 1
