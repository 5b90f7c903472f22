"""The registered providers, and how core stays safe from them.

Every call into a provider goes through here. Requests, and the counting of a provider that does not promise
``inline_counting``, run on a helper thread of that provider, so that core can walk away from a call that does not
come back. A provider that raises, overruns, or answers with something that is no answer is left out, named once
in the log, and tried again after a back-off that doubles; when it answers again one log line says so. Nothing is
piled up on a call that hangs: until it returns, the provider is left out.
"""
from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from .provider import (API_VERSION, Candidate, DeviceUsage, Kind, Outcome, ProcessMemoryProvider, RamUsage, Receipt,
                       ReleaseRequest)

COUNT_DEADLINE = 0.25
"""Seconds after which core stops waiting for a count."""

SLOW_COUNT = 0.01
"""Seconds above which a count is slow; after `SLOW_COUNTS` of them in a row the provider is left out."""

SLOW_COUNTS = 3

CROWDED = 0.001
"""Seconds for which a thread that gives up the interpreter waits for it where others are at work: each system call of a count does."""

GRACE = 0.25
"""Seconds beyond a request's deadline that core waits, since an answer at the deadline has a way to come."""

BACK_OFF = 2.0
BACK_OFF_LIMIT = 120.0

_lock = threading.Lock()
_here = threading.local()
_tickets: deque[str] = deque(maxlen=256)


class _Call:
    __slots__ = ("abandoned", "args", "done", "error", "method", "result", "seconds", "started", "told")

    def __init__(self, method: str, args: tuple[Any, ...], told: bool) -> None:
        self.method = method
        self.args = args
        self.told = told            # nobody waits for it
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
        self.patience = provider.patience
        self.gone = False                       # its last answer was that the process is dead
        self.unconfirmed = False                # it has not said what became of the last unload
        self.failures = 0
        self.retry_at = 0.0
        self._failing: set[str] = set()         # counts, or "request", that have failed and not been answered since
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
        """A request to it is running; or anything, for who must not wait: a provider that counts with the help of others."""
        running = self._running
        return running is not None and (is_serving() or not (running.told or running.method in KINDS))

    def start(self, method: str, *args: Any, told: bool = False) -> _Call:
        """Begin a call on the helper thread."""
        call = _Call(method, args, told)
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

    def finish(self, call: _Call, timeout: float) -> bool:
        """Whether `call` has come back within `timeout` seconds, and has not raised."""
        if call.abandoned or not call.done.wait(timeout):
            call.abandoned = True
            running = self._running
            if call.started:
                self.failed(call.method, f"gave no answer within {timeout:.2g} s")
            elif running is not None and running.told:
                running.abandoned = True
                self.failed(running.method, f"has not come back, and holds up {call.method}")
            return False
        if call.error is not None:
            self.failed(call.method, f"raised {type(call.error).__name__}: {call.error}")
        return call.error is None

    def failed(self, method: str, problem: str) -> None:
        """Leave it out for a while."""
        if not self.failures:
            logging.warning("Process memory: %s is left out and tried again later: %s %s", self, method, problem)
        self.retry_at = time.monotonic() + min(BACK_OFF_LIMIT, BACK_OFF * 2 ** min(self.failures, 16))
        self.failures += 1
        self._failing.add(_sort(method))

    def answered(self, method: str) -> None:
        """It has given a proper answer: it answers again once that is so of all that has failed."""
        self._failing.discard(_sort(method))
        if self.failures and not self._failing:
            self.failures = 0
            logging.info("Process memory: %s answers again", self)

    def known(self, key: tuple[Any, ...]) -> Count:
        """What a count gave last, with its age; (None, inf) if never."""
        last = self._known.get(key)
        return Count(self, None, float("inf")) if last is None else Count(self, last.count.value, time.perf_counter() - last.at)

    def counted(self, key: tuple[Any, ...], value: Any, seconds: float, now: float) -> Count:
        """Take note of a count, and leave the provider out if it keeps being slow."""
        last = self._known.get(key)
        if last is None or last.count.value is not value or type(value) is list:
            problem = problem_with(value, KINDS[key[0]])
            if problem:
                self.failed(key[0], problem)
                return self.known(key)
            if last is None:
                last = self._known[key] = _Last(Count(self, value, 0.0))
            else:
                last.count = Count(self, value, 0.0)
        last.at = now
        if seconds > SLOW_COUNT:
            if _crowded():
                return last.count       # whose doing that was is not to be told
            self._slow += 1
            if self._slow >= SLOW_COUNTS:
                self._slow = SLOW_COUNTS - 1
                self.failed(key[0], f"takes {seconds * 1000:.0f} ms; counting must be answered from local state")
                return last.count
        else:
            self._slow = 0
        if self.failures:
            self.answered(key[0])
        return last.count

    def close(self) -> None:
        """End the helper thread once it has nothing left to do."""
        with _lock:
            self._closed = True
            if self._calls is not None:
                self._calls.put(None)

    def _serve(self, calls: SimpleQueue[_Call | None]) -> None:
        # Whatever a provider does to answer, it never makes core ask in turn.
        _here.serving, _here.helper = 1, self.name
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
            if call.told and call.error is not None:
                self.failed(call.method, f"raised {type(call.error).__name__}: {call.error}")
            del call


entries: tuple[Entry, ...] = ()
"""The registered providers; replaced as a whole, never changed, so any thread may iterate over it."""


def register(provider: ProcessMemoryProvider) -> None:
    """Let `provider` stand for another process in every memory decision of this one, from the next decision on.

    May be called on any thread, also while a load is running. Registering the same object again changes nothing.
    Raises TypeError for an object that is no provider, ValueError for one of another API version or with an odd `pid` or `patience`.
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
    if not (provider.pid is None or _size(provider.pid)):
        raise ValueError(f"{name}: pid must be a whole number or None, not {provider.pid!r}")
    if not _seconds(provider.patience):
        raise ValueError(f"{name}: patience must be a finite number of seconds, not {provider.patience!r}")
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


def keep_off() -> None:
    """Raises RuntimeError on a provider's helper thread: its execution thread may be in the middle of the list of loaded models, and
    waits for that provider."""
    name = getattr(_here, "helper", None)
    if name is not None:
        raise RuntimeError(f"the provider {name} must not manage this process's memory while it counts or answers")


def count(method: str, *args: Any) -> list[Count]:
    """Ask every provider to count: `usage` or `candidates` with a device key, `ram`, or `waiting`.

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
                entry.failed(method, f"raised {type(error).__name__}: {error}")
                counts.append(entry.known(key))
                now = time.perf_counter()
                continue
            began, now = now, time.perf_counter()
            counts.append(entry.counted(key, value, now - began, now))
            if now - began > SLOW_COUNT:
                now = time.perf_counter()       # what has become of that is not the next one's doing
        elif entry.asked:
            counts.append(entry.known(key))
        else:
            calls.append((len(counts), entry, entry.start(method, *args)))
            counts.append(None)
    deadline = now + COUNT_DEADLINE
    for index, entry, call in calls:
        came = entry.finish(call, max(0.0, deadline - time.perf_counter()))
        counts[index] = entry.counted(key, call.result, call.seconds, time.perf_counter()) if came else entry.known(key)
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
            entry.start(method, *args, told=True)


def overridden(entry: Entry, method: str) -> bool:
    """Whether its provider has that method of its own; the one that it inherits does nothing."""
    return getattr(type(entry.provider), method) is not getattr(ProcessMemoryProvider, method)


def problem_with(value: Any, kind: type | tuple[type, ...]) -> str:
    """What is wrong with a provider's answer, in words; empty if nothing is."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        return f"returned {type(value).__name__}, not {' or '.join(k.__name__ for k in kinds)}"
    for part in value if isinstance(value, (list, tuple)) else (value,):
        rules = next((rules for known, rules in _RULES.items() if isinstance(part, known)), None)
        if rules is None and part is not value:
            return f"returned a sequence with {type(part).__name__} in it, not Candidate"
        for name, (proper, words) in (rules or {}).items():
            if not proper(getattr(part, name)):
                return f"returned {type(part).__name__}({name}={getattr(part, name)!r}); {words}"
    return ""


def _size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


_Rule = tuple[Callable[[Any], bool], str]
_SIZE: _Rule = _size, "sizes are whole bytes, never negative"
_FIGURE: _Rule = lambda value: value is None or _size(value), _SIZE[1]
_FLAG: _Rule = lambda value: type(value) is bool, "it is True or False"
_MAYBE: _Rule = lambda value: value is None or type(value) is bool, "it is True, False, or None where that is unknown"
_AGE: _Rule = _seconds, "an age is a finite number of seconds, never negative"
_TEXT: _Rule = lambda value: isinstance(value, str), "it is a text"

KINDS: dict[str, type | tuple[type, ...]] = {"usage": DeviceUsage, "ram": RamUsage, "candidates": (list, tuple), "waiting": bool}

_RULES: dict[type, dict[str, _Rule]] = {
    DeviceUsage: {**dict.fromkeys(("resident", "cached", "fixed", "scratch", "claimed", "committed", "reclaimable"), _FIGURE),
                  "busy": _MAYBE, "capturing": _FLAG, "age": _AGE},
    RamUsage: {**dict.fromkeys(("resident", "pinned", "registered", "backups", "outputs"), _FIGURE), "age": _AGE},
    Candidate: {"id": _TEXT, "name": _TEXT, "kind": (lambda value: isinstance(value, Kind), "it is a Kind"), "resident": _SIZE, "size": _SIZE,
                "refs": _SIZE, "in_use": _FLAG},
    Receipt: {"outcome": (lambda value: isinstance(value, Outcome), "it is an Outcome"), "freed": _SIZE, "resident": _FIGURE},
}


def _sort(method: str) -> str:
    return method if method in KINDS else "request"


def _crowded() -> bool:
    began = time.perf_counter()
    time.sleep(0)
    return time.perf_counter() - began > CROWDED


def _receipt(entry: Entry, request: ReleaseRequest, call: _Call | None) -> Receipt | None:
    # By one time for all requests of a call: several to one provider that hangs cost one deadline.
    if call is None or not entry.finish(call, max(0.0, request.deadline + GRACE - time.monotonic())):
        return None
    problem = problem_with(call.result, Receipt)
    if problem:
        entry.failed(call.method, problem)
        return None
    receipt: Receipt = call.result
    entry.answered(call.method)
    entry.gone = receipt.outcome is Outcome.GONE
    return receipt


def _forget() -> None:
    """In what this process has forked there are neither helper threads nor, mostly, what providers need."""
    global entries, _lock
    entries, _lock = (), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
