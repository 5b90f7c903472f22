"""What this process is about to allocate, told to whoever shares the card.

A *claim* is a number of bytes on a device that a load has been admitted for and that have not appeared yet.
Checking what is free and claiming it must be one step, so both happen while :meth:`Claims.hold` is held:

    with claims.current.hold(device, timeout):
        ...                                   # read free and the claims of others: arithmetic only
        claims.current.write(device, size)    # never a load, an unload or a message

One process alone needs a thread lock and a number: :class:`LocalClaims`. A runtime that knows of other processes
calls :func:`install` with an object whose lock and numbers they can see. The claims of others are read through
their providers (``DeviceUsage.claimed``).
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

HOLD = 1.0
"""Seconds to wait for a device's lock before a load goes on without it."""


class Claims(Protocol):
    """The claims of this process. Every method may be called on any thread."""

    shared: bool
    """Whether other processes see these claims. While False and no provider is registered, nothing is claimed."""

    def hold(self, device: str, timeout: float) -> AbstractContextManager[bool]:
        """Hold the device's lock; gives whether it was had within `timeout` seconds.

        Never raises for a lock that is not to be had: the load then goes on as it would without this. Re-entrant
        on one thread. An implementation that is shared by processes has every peer registered when it enters, so
        that the claims read under the lock are complete; a holder that dies gives the lock up.
        """
        ...

    def write(self, device: str, size: int) -> None:
        """This process now claims `size` bytes on `device` in all (0: none). Called with the lock held, or to lower it."""
        ...

    def own(self, device: str) -> int:
        """What this process claims on `device`."""
        ...


class LocalClaims:
    """The claims of a process that shares its card with nobody it knows."""

    shared = False

    def __init__(self) -> None:
        self._locks: dict[str, threading.RLock] = {}
        self._sizes: dict[str, int] = {}

    @contextmanager
    def hold(self, device: str, timeout: float) -> Iterator[bool]:
        lock = self._locks.setdefault(device, threading.RLock())
        held = lock.acquire(timeout=timeout)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def write(self, device: str, size: int) -> None:
        self._sizes[device] = size

    def own(self, device: str) -> int:
        return self._sizes.get(device, 0)


current: Claims = LocalClaims()

settlers: list[Callable[[], None]] = []
"""Called after a load or a node: each gives up what is claimed beyond what is still to come."""


def install(claims: Claims) -> Claims:
    """Use `claims` from now on; returns what was used before. Loads that are running settle with what they began."""
    global current
    before, current = current, claims
    return before
