"""The registered providers, and how core stays safe from them.

Every call into a provider goes through here. Requests, and the counting of a provider that does not promise
``inline_counting``, run on a helper thread of that provider, so that core can walk away from a call that does not
come back. A provider that raises, overruns, or answers with something that is no answer is left out, named once
in the log, and tried again after a back-off that doubles; when it answers again one log line says so. Nothing is
piled up on a call that hangs: until it returns, the provider is left out.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from .provider import (API_VERSION, Candidate, DeviceUsage, Outcome, ProcessMemoryProvider, RamUsage, Receipt,
                       ReleaseRequest)

COUNT_DEADLINE = 0.25
"""Seconds after which core stops waiting for a count."""

SLOW_COUNT = 0.01
"""Seconds above which a count is slow; after `SLOW_COUNTS` of them in a row the provider is left out."""

SLOW_COUNTS = 3

GRACE = 0.25
"""Seconds beyond a request's deadline that core waits, since an answer at the deadline has a way to come."""

BACK_OFF = 2.0
BACK_OFF_LIMIT = 120.0

_lock = threading.Lock()
_here = threading.local()
_tickets: deque[str] = deque(maxlen=256)


class _Call:
    __slots__ = ("abandoned", "args", "done", "error", "method", "result", "seconds", "started")

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.done = threading.Event()
        self.started = False
        self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0


class Count(NamedTuple):
    """What one provider has counted."""
    entry: Entry
    value: Any     # None: unknown
    age: float     # seconds since it was counted; 0.0: just now


class _Last:
    __slots__ = ("at", "count")

    def __init__(self, count: Count) -> None:
        self.count = count
        self.at = 0.0


class Entry:
    """One registered provider, its health, and the helper thread its calls run on."""

    def __init__(self, provider: ProcessMemoryProvider, name: str) -> None:
        self.provider = provider
        self.name = name
        self.pid = provider.pid
        self.gone = False                       # its last answer was that the process is dead
        self.unconfirmed = False                # it has not said what became of the last unload
        self.failures = 0
        self.retry_at = 0.0
        self._slow = 0
        self._closed = False
        self._running: _Call | None = None
        self._calls: SimpleQueue[_Call | None] | None = None
        self._known: dict[tuple[Any, ...], _Last] = {}

    def __repr__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else self.name

    @property
    def hung(self) -> bool:
        """A call that core has walked away from is still running."""
        running = self._running
        return running is not None and running.abandoned

    @property
    def ready(self) -> bool:
        """It may be called: it answers, or its back-off is over."""
        return not self.hung and (not self.failures or time.monotonic() >= self.retry_at)

    @property
    def asked(self) -> bool:
        """A request to it is running."""
        return self._running is not None

    def start(self, method: str, *args: Any) -> _Call:
        """Begin a call on the helper thread."""
        call = _Call(method, args)
        with _lock:
            if self._closed:
                call.abandoned = True
                return call
            if self._calls is None:
                self._calls = SimpleQueue()
                threading.Thread(target=self._serve, args=(self._calls,), daemon=True,
                                 name=f"process memory: {self.name}").start()
            self._calls.put(call)
        return call

    def finish(self, call: _Call, timeout: float, kind: type) -> Any:
        """The result of `call`, or None when there is none of type `kind` within `timeout` seconds."""
        if call.abandoned or not call.done.wait(timeout):
            call.abandoned = True
            if call.started:
                self.failed(f"{call.method} gave no answer within {timeout:.2g} s")
            return None
        if call.error is not None:
            self.failed(f"{call.method} raised {type(call.error).__name__}: {call.error}")
            return None
        problem = _problem(call.result, kind)
        if problem:
            self.failed(f"{call.method} {problem}")
            return None
        return call.result

    def failed(self, problem: str) -> None:
        """Leave it out for a while."""
        if not self.failures:
            logging.warning("Process memory: %s is left out and tried again later: %s", self, problem)
        self.retry_at = time.monotonic() + min(BACK_OFF_LIMIT, BACK_OFF * 2 ** min(self.failures, 16))
        self.failures += 1

    def answered(self) -> None:
        """It has given a proper answer."""
        if self.failures:
            self.failures = 0
            logging.info("Process memory: %s answers again", self)

    def known(self, key: tuple[Any, ...]) -> Count:
        """What a count gave last, with its age; (None, inf) if never."""
        last = self._known.get(key)
        return Count(self, None, float("inf")) if last is None else Count(self, last.count.value, time.perf_counter() - last.at)

    def counted(self, key: tuple[Any, ...], value: Any, seconds: float, now: float) -> Count:
        """Take note of a count, and leave the provider out if it keeps being slow."""
        last = self._known.get(key)
        if last is None:
            last = self._known[key] = _Last(Count(self, value, 0.0))
        elif last.count.value is not value:
            last.count = Count(self, value, 0.0)
        last.at = now
        if seconds > SLOW_COUNT:
            self._slow += 1
            if self._slow >= SLOW_COUNTS:
                self._slow = SLOW_COUNTS - 1
                self.failed(f"{key[0]} takes {seconds * 1000:.0f} ms; counting must be answered from local state")
                return last.count
        else:
            self._slow = 0
        if self.failures:
            self.answered()
        return last.count

    def close(self) -> None:
        """End the helper thread once it has nothing left to do."""
        with _lock:
            self._closed = True
            if self._calls is not None:
                self._calls.put(None)

    def _serve(self, calls: SimpleQueue[_Call | None]) -> None:
        # Whatever a provider does to answer, it never makes core ask in turn.
        _here.serving = 1
        while (call := calls.get()) is not None:
            if call.abandoned:
                continue
            self._running = call
            call.started = True
            began = time.perf_counter()
            try:
                call.result = getattr(self.provider, call.method)(*call.args)
            except BaseException as error:
                call.error = error
            call.seconds = time.perf_counter() - began
            self._running = None
            call.done.set()
            del call


entries: tuple[Entry, ...] = ()
"""The registered providers; replaced as a whole, never changed, so any thread may iterate over it."""


def register(provider: ProcessMemoryProvider) -> None:
    """Let `provider` stand for another process in every memory decision of this one, from the next decision on.

    May be called on any thread, also while a load is running. Registering the same object again changes nothing.
    Raises TypeError for an object that is no provider, ValueError for one of another API version.
    """
    global entries
    if isinstance(provider, type) or not isinstance(provider, ProcessMemoryProvider):
        what = f"the class {provider.__name__}" if isinstance(provider, type) else repr(provider)
        raise TypeError(f"register_process_memory_provider needs an instance of a subclass of ProcessMemoryProvider, not {what}")
    name = str(provider.name)
    try:
        major, _ = provider.api_version
    except (TypeError, ValueError):
        raise TypeError(f"{name}: api_version must be a (major, minor) pair, not {provider.api_version!r}") from None
    if major != API_VERSION[0]:
        older, newer = ("the provider", "ComfyUI") if major < API_VERSION[0] else ("ComfyUI", "the provider")
        raise ValueError(f"{name} is a ProcessMemoryProvider of version {major}, this ComfyUI has version {API_VERSION[0]}: "
                         f"update {older}, or use an older release of {newer}")
    with _lock:
        if all(entry.provider is not provider for entry in entries):
            entries = (*entries, Entry(provider, name))


def unregister(provider: ProcessMemoryProvider) -> None:
    """Forget `provider`. A decision that is under way may still ask it. What is not registered is ignored."""
    global entries
    with _lock:
        dropped = [entry for entry in entries if entry.provider is provider]
        entries = tuple(entry for entry in entries if entry.provider is not provider)
    for entry in dropped:
        entry.close()


@contextmanager
def serving(ticket: str | None = None) -> Iterator[bool]:
    """Entered by whoever answers a request, on the thread that does the work: inside, nothing here asks anybody.

    Gives False when `ticket` was issued by this process, that is, when its own request has come back to it: the
    answer is then NOTHING.
    """
    _here.serving = getattr(_here, "serving", 0) + 1
    try:
        yield ticket is None or ticket not in _tickets
    finally:
        _here.serving -= 1


def is_serving() -> bool:
    """Whether this thread is answering a request."""
    return getattr(_here, "serving", 0) > 0


def count(method: str, *args: Any) -> list[Count]:
    """Ask every provider to count: `usage` or `candidates` with a device key, or `ram`.

    Whoever cannot be called now, or is busy with a request, is given with what it counted last.
    """
    key = (method, *args)
    counts: list[Count | None] = []
    calls: list[tuple[int, Entry, _Call]] = []
    now = time.perf_counter()
    for entry in entries:
        provider = entry.provider
        if entry.failures and not entry.ready:
            counts.append(entry.known(key))
        elif provider.inline_counting:
            try:
                value = getattr(provider, method)(*args)
            except Exception as error:
                entry.failed(f"{method} raised {type(error).__name__}: {error}")
                counts.append(entry.known(key))
                continue
            began, now = now, time.perf_counter()
            counts.append(entry.counted(key, value, now - began, now))
        elif entry.asked:
            counts.append(entry.known(key))
        else:
            calls.append((len(counts), entry, entry.start(method, *args)))
            counts.append(None)
    deadline = now + COUNT_DEADLINE
    for index, entry, call in calls:
        value = entry.finish(call, max(0.0, deadline - time.perf_counter()), _KINDS[method])
        counts[index] = entry.known(key) if value is None else entry.counted(key, value, call.seconds, time.perf_counter())
    return [count for count in counts if count is not None]


def ask(method: str, requests: Sequence[tuple[Entry, ReleaseRequest]]) -> list[Receipt | None]:
    """Ask providers at once, each until its request's deadline; None where no answer came.

    Nobody is asked by a thread that is itself answering a request.
    """
    if is_serving():
        return [None] * len(requests)
    calls: list[_Call | None] = []
    for entry, request in requests:
        if request.ticket not in _tickets:
            _tickets.append(request.ticket)
        calls.append(entry.start(method, request) if entry.ready else None)
    return [_receipt(entry, request, call) for (entry, request), call in zip(requests, calls)]


def tell(method: str, *args: Any) -> None:
    """Call `method` (`claim`) of every provider that has one of its own, without waiting for it."""
    for entry in entries:
        if overridden(entry, method) and not entry.hung:
            entry.start(method, *args)


def overridden(entry: Entry, method: str) -> bool:
    """Whether its provider has that method of its own; the one that it inherits does nothing."""
    return getattr(type(entry.provider), method) is not getattr(ProcessMemoryProvider, method)


_KINDS: dict[str, type] = {"usage": DeviceUsage, "ram": RamUsage, "candidates": Sequence}

_SIZES: dict[type, tuple[str, ...]] = {
    DeviceUsage: ("resident", "cached", "fixed", "scratch", "claimed", "committed", "reclaimable"),
    RamUsage: ("resident", "pinned", "registered", "backups", "outputs"),
    Candidate: ("resident", "size", "refs"),
    Receipt: ("freed", "resident"),
}


def _receipt(entry: Entry, request: ReleaseRequest, call: _Call | None) -> Receipt | None:
    receipt: Receipt | None = None if call is None else entry.finish(call, request.remaining() + GRACE, Receipt)
    if receipt is not None:
        entry.answered()
        entry.gone = receipt.outcome is Outcome.GONE
    return receipt


def _problem(value: Any, kind: type) -> str:
    """What is wrong with an answer, in words; empty if nothing is."""
    if not isinstance(value, kind) or isinstance(value, str):
        return f"returned {type(value).__name__}, not {kind.__name__}"
    for part in value if isinstance(value, Sequence) else (value,):
        if kind is Sequence and not isinstance(part, Candidate):
            return f"returned a sequence with {type(part).__name__} in it, not Candidate"
        for size in _SIZES[type(part)] if type(part) in _SIZES else ():
            number = getattr(part, size)
            if number is not None and (type(number) is not int or number < 0):
                return f"returned {type(part).__name__}({size}={number!r}); sizes are whole bytes, never negative"
    return ""
