"""Claims that every process on the card sees: checking what is free and claiming it is one step for all of them."""
from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from .ledger import Slot


class LedgerClaims:
    """The claims of this process, written to its slot under a file lock for each device.

    `slot` gives the slot to write to, or None while this process is not listed; `discover` registers peers that have
    started since. A lock is held for arithmetic only; the system takes it back from a holder that dies, and one that
    has been stopped costs the others `timeout` seconds. Any thread.
    """

    shared = True

    def __init__(self, folder: Path, slot: Callable[[], Slot | None], discover: Callable[[], None]):
        self._folder = folder
        self._slot = slot
        self._discover = discover
        self._locks: dict[str, tuple[threading.RLock, filelock.BaseFileLock]] = {}
        self._own: dict[str, int] = {}
        self._writing = threading.Lock()    # the slot may be replaced meanwhile

    @contextmanager
    def hold(self, device: str, timeout: float) -> Iterator[bool]:
        """Hold the lock of `device`; gives whether it was had in time. Re-entrant on one thread. Never raises."""
        mine, theirs = self._lock(device)
        deadline = time.monotonic() + timeout
        held = mine.acquire(timeout=timeout)
        try:
            shared = held
            if held:
                try:
                    theirs.acquire(timeout=max(0.0, deadline - time.monotonic()), poll_interval=0.001)
                except (filelock.Timeout, OSError, RuntimeError):
                    shared = False
            try:
                self._discover()
                yield shared
            finally:
                if shared:
                    theirs.release()
        finally:
            if held:
                mine.release()

    def write(self, device: str, size: int) -> None:
        """This process claims `size` bytes on `device` in all; 0: none."""
        with self._writing:
            self._own[device] = size
            self._write(device, size)

    def own(self, device: str) -> int:
        """What this process claims on `device`."""
        return self._own.get(device, 0)

    def restore(self) -> None:
        """Write all claims again, to a slot that is new."""
        with self._writing:
            for device, size in self._own.items():
                self._write(device, size)

    def move(self, folder: Path) -> None:
        """The locks are in another folder from now on."""
        self._folder, self._locks = folder, {}

    def _write(self, device: str, size: int) -> None:
        slot = self._slot()
        if slot is not None:
            try:
                slot.claim(device, size)
            except ValueError as error:
                logging.debug("Process memory: a claim on %s cannot be told to other processes: %s", device, error)

    def _lock(self, device: str) -> tuple[threading.RLock, filelock.BaseFileLock]:
        locks = self._locks.get(device)
        if locks is None:
            name = hashlib.blake2b(device.encode(), digest_size=8).hexdigest()
            # The file lock is one object for all threads: it is only touched under the thread lock.
            path = self._folder / f"device-{name}.lock"
            locks = self._locks.setdefault(device, (threading.RLock(), filelock.FileLock(path, mode=0o600, thread_local=False)))
        return locks
