"""Other ComfyUI processes of this user on this machine, as providers: counted from the ledger, asked at their endpoint."""
from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from comfy.process_memory.provider import (NOTHING, Candidate, DeviceUsage, Outcome, ProcessMemoryProvider, RamUsage, Receipt,
                                           ReleaseRequest)

from .channel import ChannelError, Client, Message
from .ledger import Ledger
from .liveness import alive, stopped
from .records import WAITING, Process

PATIENCE = 1.0
"""Seconds to wait for a busy process to come to a safe point."""

FAMILY_PATIENCE = 300.0
"""Seconds that a load waits for a process of the same server to be done with its node: they work on the same prompts."""

MARGIN = 0.05             # a request ends this long before its deadline, so that its receipt is still in time
SIGN_OF_LIFE = 0.25       # seconds beyond its patience after which a process that has said nothing is silent
ENDING = 2.0              # seconds that a process may take to end once it has closed its connections
SILENT_SECONDS = 1.0      # for which a silent process is not asked again; doubles up to
SILENT_LIMIT = 30.0
REFRESH = 0.05            # seconds after which it is looked anew whether a process lives, and how old its figures are
RESCAN = 0.5              # seconds after which the ledger is looked through even if nobody has come or gone

BUSY = Receipt(outcome=Outcome.BUSY)
GONE = Receipt(outcome=Outcome.GONE, resident=0)
UNKNOWN = DeviceUsage(resident=None, busy=True)


def _nothing(busy: bool) -> DeviceUsage:
    return DeviceUsage(resident=0, cached=0, fixed=0, scratch=0, claimed=0, committed=0, reclaimable=0, busy=busy)


HELD_BY_THE_DEAD = _nothing(False)
HELD = {busy: _nothing(busy) for busy in (False, True)}


class Occupied(ChannelError):
    """The one connection to a process is in use by another thread."""


class PeerProcess(ProcessMemoryProvider):
    """One other process.

    Counting reads the ledger: microseconds, any thread. Requests go to the process's endpoint; one at a time, others
    wait for their turn within their deadlines. A process that has ended holds nothing and answers GONE. `capture` is
    entered while this process captures a graph on a device; `related`: it belongs to the same server as this one.
    """

    inline_counting = True

    def __init__(self, ledger: Ledger, process: Process, key: bytes, *, patience: float = PATIENCE,
                 capture: Callable[[str], AbstractContextManager[object]] = lambda device: nullcontext(),
                 related: bool = False):
        self.pid: int = process.pid
        self.start = process.start
        self.slot, self.generation = process.slot, process.generation
        self.family = process.family
        self._name = process.name
        self._ledger, self._key, self._patience = ledger, key, patience
        self._capture = capture
        self.patience = FAMILY_PATIENCE if related else 0.0
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._sequence = ledger.sequence_place(process.slot)
        self._usages: dict[str, tuple[int, int, int, float, DeviceUsage]] = {}
        self._offers: dict[str, tuple[int, float, tuple[Candidate, ...]]] = {}
        self._silent_until = 0.0
        self._silences = 0
        self._complained = False

    @property
    def name(self) -> str:
        return self._name

    def process(self, exact: bool = False) -> Process | None:
        """What the ledger says of it; None once it has ended."""
        process = self._ledger.read(self.slot, exact)
        return process if process is not None and process.generation == self.generation else None

    # counting

    def usage(self, device: str) -> DeviceUsage:
        # Every look at free memory comes through here: what has not changed since the last time is given again.
        words = self._ledger.words
        last = self._usages.get(device)
        if last is not None and words[self._sequence] == last[0] and words[last[1]] == last[2] and time.monotonic() < last[3]:
            # A claim keeps room from others, so whether its owner lives is looked at each time; what it holds shows in the card's figure.
            if not last[2] or alive(self.pid, self.start):
                return last[4]
        place = self._ledger.claim_place(self.slot, device)
        claimed_word = words[place]
        until = time.monotonic() + REFRESH
        process = self.process(exact=claimed_word > 0)
        if process is None:
            return HELD_BY_THE_DEAD
        report = process.devices.get(device)
        usage = report.usage if report is not None else HELD[process.busy] if process.settled else UNKNOWN
        usage = dataclasses.replace(usage, age=self._ledger.age(self.slot), claimed=self._ledger.claimed(self.slot, device))
        if not process.settled:
            return dataclasses.replace(usage, busy=True)
        self._usages[device] = process.sequence, place, claimed_word, until, usage
        return usage

    def candidates(self, device: str) -> Sequence[Candidate]:
        last = self._offers.get(device)
        if last is not None and self._ledger.words[self._sequence] == last[0] and time.monotonic() < last[1]:
            return last[2]
        until = time.monotonic() + REFRESH
        process = self.process()
        if process is None or not process.settled:
            return ()
        report = process.devices.get(device)
        offers = () if report is None else report.candidates
        self._offers[device] = process.sequence, until, offers
        return offers

    def waiting(self) -> bool:
        return bool(self._ledger.words[self._sequence + WAITING]) and self.process() is not None

    def ram(self) -> RamUsage:
        process = self.process()
        if process is None:
            return RamUsage(resident=0, pinned=0, registered=0, backups=0, outputs=0)
        return dataclasses.replace(process.ram, age=self._ledger.age(self.slot))

    # asking

    def release(self, request: ReleaseRequest) -> Receipt:
        return self._ask("release", request)

    def release_pins(self, request: ReleaseRequest) -> Receipt:
        return self._ask("release_pins", request)

    def release_ram(self, request: ReleaseRequest) -> Receipt:
        return self._ask("release_ram", request)

    def unload(self, request: ReleaseRequest) -> Receipt:
        return self._ask("unload", request)

    def reset(self, request: ReleaseRequest) -> Receipt:
        return self._ask("reset", request)

    def ping(self, timeout: float = PATIENCE) -> bool:
        """Whether its endpoint answers within `timeout` seconds. Says nothing about its execution thread."""
        try:
            return self._exchange({"type": "ping"}, time.monotonic() + timeout, None).get("pong") is True
        except (OSError, ChannelError):
            return False

    # telling

    def exclusive(self, device: str) -> AbstractContextManager[object]:
        return self._capture(device)

    def close(self) -> None:
        """Close the connection, unless a request is under way: that one ends by itself."""
        if self._lock.acquire(blocking=False):
            self._disconnect()
            self._lock.release()

    def _ask(self, kind: str, request: ReleaseRequest) -> Receipt:
        if self._ended():
            return GONE
        now = time.monotonic()
        if now < self._silent_until or stopped(self.pid):
            return BUSY
        left = request.remaining() - MARGIN
        if left <= 0:
            return BUSY
        patience = min(self._patience, left)
        message = {"type": kind, "device": request.device, "bytes": request.bytes, "reason": request.reason.value,
                   "candidate": request.candidate, "ticket": request.ticket, "origin": request.origin, "wait": patience}
        try:
            answer = self._exchange(message, now + left, now + patience + SIGN_OF_LIFE)
        except TimeoutError:
            if self._ended():
                return GONE
            self._silences += 1
            self._silent_until = time.monotonic() + min(SILENT_LIMIT, SILENT_SECONDS * 2 ** min(self._silences - 1, 16))
            return BUSY
        except Occupied:
            return BUSY
        except (OSError, ChannelError) as e:
            if self._has_ended(min(now + left, time.monotonic() + ENDING) if isinstance(e, ConnectionError) else 0.0):
                return GONE
            self._complain(f"cannot be asked: {e}")
            return BUSY
        self._silences = 0
        return self._receipt(answer)

    def _ended(self) -> bool:
        return self.process(exact=True) is None

    def _has_ended(self, until: float) -> bool:
        """Whether the process has ended, or does so by `until`: its connections close a little before it is seen to be gone."""
        while not self._ended():
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def _exchange(self, message: Message, deadline: float, start_by: float | None) -> Message:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Occupied("another request to it is not done yet")
        try:
            cached = self._client is not None
            try:
                return self._connected(deadline if start_by is None else start_by).request(message, deadline, start_by)
            except ConnectionError:
                self._disconnect()
                if not cached:
                    raise
                # The other end drops connections that it has no use for; the first that this end sees of it is now.
                return self._connected(deadline).request(message, deadline, start_by)
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def _connected(self, deadline: float) -> Client:
        if self._client is None:
            process = self.process()
            if process is None or not process.address:
                raise ConnectionError("it has no endpoint")
            self._client = Client(process.address, self._key, deadline)
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _receipt(self, answer: Message) -> Receipt:
        freed, resident = answer.get("freed", 0), answer.get("resident")
        try:
            outcome = Outcome(answer.get("outcome"))
        except ValueError:
            self._complain(f"gave an answer that is no receipt: {str(answer)[:200]}")
            return BUSY
        if not _is_size(freed) or not (resident is None or _is_size(resident)) or outcome is Outcome.GONE:
            self._complain(f"gave a receipt with impossible figures: {str(answer)[:200]}")
            return BUSY
        return Receipt(outcome=outcome, freed=freed, resident=resident) if outcome is not Outcome.NOTHING or resident else NOTHING

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            logging.warning("Process memory: %s (pid %d) %s (said once)", self._name, self.pid, what)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


class Peers:
    """The other processes in the ledger, found without any configuration.

    `found(peer)` and `lost(peer)` are called, on whichever thread looks, when one has come or gone.
    """

    def __init__(self, ledger: Ledger, own: tuple[int, int], make: Callable[[Process], PeerProcess],
                 found: Callable[[PeerProcess], None], lost: Callable[[PeerProcess], None]):
        self._ledger, self._own, self._make = ledger, own, make
        self._found, self._lost = found, lost
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, int], PeerProcess] = {}      # slot, generation
        self._changes = -1
        self._scanned = 0.0

    def __iter__(self) -> Iterator[PeerProcess]:
        return iter(list(self._peers.values()))

    def refresh(self) -> None:
        """Look who has come and who has gone. Microseconds unless somebody has. Any thread."""
        now = time.monotonic()
        changes = self._ledger.changes
        if changes == self._changes and now - self._scanned < RESCAN:
            return
        with self._lock:
            if changes == self._changes and now - self._scanned < RESCAN:
                return
            live = {(p.slot, p.generation): p for p in self._ledger.processes(exact=True) if (p.pid, p.start) != self._own}
            for which in self._peers.keys() - live.keys():
                peer = self._peers.pop(which)
                peer.close()
                self._lost(peer)
            for which in live.keys() - self._peers.keys():
                peer = self._peers[which] = self._make(live[which])
                self._found(peer)
            # Last, so that a thread that finds nothing new to look at finds everybody registered.
            self._changes, self._scanned = changes, now

    def clear(self) -> None:
        """Forget everybody."""
        with self._lock:
            for peer in self._peers.values():
                peer.close()
                self._lost(peer)
            self._peers.clear()
            self._changes = -1
