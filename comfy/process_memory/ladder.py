"""Other processes in free_memory's eviction ladder.

The candidates of idle peers are ranked in one list with this process's own models and asked in their turn for what is
then missing. What busy peers do not use just now comes only after that, with one bounded wait.
"""
from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import admission, arithmetic, devices, registry
from .provider import DEADLINE, Candidate, DeviceUsage, Outcome, Reason, ReleaseRequest
from .figures import manager

patience = 1.0
"""Seconds that one shortfall may wait, in all, for peers that are busy."""

AGAIN = 0.02
"""Seconds after which a busy peer is asked again, doubled each time, up to a second: it says so at once while its own
memory management is at work."""

_here = threading.local()


class Peer(tuple[float, int, int, int]):
    """An entry of the ladder that stands for a peer's candidate; sorts as the tuples around it do."""
    entry: registry.Entry
    candidate: Candidate
    shortfall: Shortfall


class Shortfall:
    """Memory that is missing on one device, and who has been asked for it."""

    def __init__(self, device: Any, place: str, required: int, reason: Reason) -> None:
        self.device = device
        self.place = place
        self.required = required
        self.reason = reason
        self.ticket = uuid.uuid4().hex
        self.left_out: set[registry.Entry] = set()   # busy, dead or without an answer: not asked again for this
        self.asked: set[tuple[registry.Entry, str]] = set()

    def missing(self) -> int:
        """Bytes that are missing now."""
        mm = manager()
        return arithmetic.shortfall(self.required, mm.get_free_memory(self.device), mm.get_total_memory(self.device))

    def idle(self, own_first: bool = False) -> list[Peer]:
        """What idle peers could give back, unsorted."""
        return self._peers(own_first, lambda usage: usage.busy is False)

    def busy(self) -> list[Peer]:
        """What peers that are or may be busy do not use just now, and what has not been asked for yet, in order."""
        found = self._peers(False, lambda usage: True)
        return sorted(peer for peer in found if (peer.entry, peer.candidate.id) not in self.asked)

    def _peers(self, own_first: bool, wanted: Any) -> list[Peer]:
        usages = {entry: usage for entry, usage, age in registry.count("usage", self.place) if age == 0.0}
        found: list[Peer] = []
        for entry, candidates, age in registry.count("candidates", self.place):
            usage: DeviceUsage | None = usages.get(entry)
            if usage is None or age != 0.0 or usage.capturing or not wanted(usage):
                continue
            for candidate in candidates:
                if candidate.in_use or candidate.resident <= 0:
                    continue
                peer = Peer(arithmetic.rank(candidate, len(found), own_first))
                peer.entry, peer.candidate, peer.shortfall = entry, candidate, self
                found.append(peer)
        return found

    def ask(self, peer: Peer) -> None:
        """Ask one peer for what is missing now."""
        missing = self.missing()
        if missing and peer.entry not in self.left_out:
            self._ask([peer], missing, time.monotonic() + DEADLINE)

    def ask_busy(self) -> None:
        """Ask for what is not in use, however busy its holder, until it is enough or patience is at its end."""
        deadline = time.monotonic() + patience
        again = AGAIN
        while (missing := self.missing()) and time.monotonic() < deadline:
            self.left_out.clear()
            peers = self.busy()
            chosen = arithmetic.enough(peers, (peer.candidate.resident for peer in peers), missing)
            if not chosen:
                return
            self._ask(chosen, missing, deadline)
            if self.left_out:
                time.sleep(min(again, max(0.0, deadline - time.monotonic())))
                again = min(2 * again, 1.0)

    def _ask(self, peers: Sequence[Peer], missing: int, deadline: float) -> None:
        requests = []
        for peer in peers:
            request = ReleaseRequest(device=self.place, bytes=missing, reason=self.reason, candidate=peer.candidate.id,
                                     ticket=self.ticket, deadline=deadline)
            requests.append((peer.entry, request))
            missing = max(1, missing - peer.candidate.resident)
        for peer, (_, request), receipt in zip(peers, requests, registry.ask("release", requests)):
            if receipt is None or receipt.outcome in (Outcome.BUSY, Outcome.GONE):
                self.left_out.add(peer.entry)
            if receipt is None or receipt.outcome is not Outcome.BUSY:
                self.asked.add((peer.entry, peer.candidate.id))
            freed = arithmetic.freed(receipt, peer.candidate.resident)
            logging.debug("Process memory: asked %s for %s: %s, %d MB (%d bytes, %d were missing)", peer.entry, peer.candidate.name,
                          "no answer" if receipt is None else receipt.outcome.value, freed // (1024 * 1024), freed, request.bytes)


def peer_candidates(device: Any, keep_loaded: Sequence[Any], memory_required: float, for_dynamic: bool) -> Iterable[Peer]:
    """What idle peers could give back, to be sorted with the models of this process; empty if `memory_required` is free.

    Models of this process that page on demand leave what a dynamic load needs by themselves, so peers, which cannot,
    are asked only for what is missing beyond them.
    """
    if not registry.entries:
        return ()
    _here.shortfall = None
    place = devices.key(device)
    if place is None or registry.is_serving() or getattr(_here, "alone", False):
        return ()
    if keep_loaded and memory_required >= arithmetic.SENTINEL:
        return ()  # "unload just what is not in this list", which is a list of this process
    mm = manager()
    required = arithmetic.clamp(memory_required, mm.get_total_memory(device))
    if for_dynamic:
        required -= sum(loaded.model.loaded_size() for loaded in mm.current_loaded_models
                        if loaded.device == device and loaded.model is not None and loaded.model.is_dynamic()
                        and loaded not in keep_loaded)
    shortfall = Shortfall(device, place, max(0, required), Reason.LOAD)
    _here.shortfall = shortfall
    return shortfall.idle(own_first=mm.DISABLE_SMART_MEMORY) if shortfall.missing() else ()


def ask_peer(entry: tuple[Any, ...]) -> bool:
    """Whether an entry of the ladder is a peer's; it has then been asked for what was missing, and has had its turn."""
    if type(entry) is not Peer:
        return False
    entry.shortfall.ask(entry)
    return True


def ask_busy_peers() -> None:
    """The end of the ladder: ask busy peers for what is missing still, and claim what has become free."""
    if not registry.entries:
        return
    shortfall, _here.shortfall = getattr(_here, "shortfall", None), None
    if shortfall is None:
        return
    shortfall.ask_busy()
    admission.top_up(shortfall.device, shortfall.place)


def make_room(device: Any, size: float, reason: Reason = Reason.OOM) -> int:
    """Ask peers, and only them, until `size` bytes are free on `device`; gives by how much the free figure has grown.

    For an exception handler, where models of this process cannot be unloaded.
    """
    if not registry.entries:
        return 0
    place = devices.key(device)
    if place is None or registry.is_serving():
        return 0
    mm = manager()
    before = mm.get_free_memory(device)
    shortfall = Shortfall(device, place, arithmetic.clamp(size, mm.get_total_memory(device)), reason)
    if shortfall.missing():
        for peer in sorted(shortfall.idle()):
            shortfall.ask(peer)
        shortfall.ask_busy()
    return max(0, int(mm.get_free_memory(device) - before))


@contextmanager
def alone() -> Iterator[None]:
    """Inside, free_memory on this thread is about this process only: the caller asks peers itself."""
    _here.alone = True
    try:
        yield
    finally:
        _here.alone = False
