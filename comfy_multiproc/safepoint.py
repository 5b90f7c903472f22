"""The inbox: requests of other processes wait here for a safe point on the execution thread.

Memory is given back only on the execution thread, because aimdo has no lock and a context for each thread, and
``free_memory`` works by index into a list that nobody else may change meanwhile; and only at a moment when nothing is
half done. A request is never left without an answer: it is served at the next safe point within its patience, or
answered BUSY; at once when memory management is at work.
"""
from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comfy.process_memory.provider import NOTHING, Outcome, Reason, Receipt

BUSY = Receipt(outcome=Outcome.BUSY)

WAKE_AGAIN = 0.004
"""Seconds after which an idle execution thread is woken once more: it may have gone to sleep just after a wake-up."""


class Moment(enum.IntEnum):
    """How far a safe point goes. A request that cannot be met at one waits for a later one."""
    STEP = 0      # inside a node: only what the node does not use
    BOUNDARY = 1  # between two nodes
    IDLE = 2      # no prompt


@dataclass(slots=True, eq=False)
class Ask:
    """One request of another process."""
    kind: str                               # release, release_pins, release_ram, unload, reset
    answer: Callable[[Receipt], None]
    device: str | None = None
    bytes: int = 0
    candidate: str | None = None
    reason: Reason = Reason.LOAD
    ticket: str | None = None
    origin: str = ""
    patience: float = 0.0                   # time.monotonic() until which it waits for a safe point
    begun: Callable[[], None] = lambda: None        # tells the sender that the work has begun
    wanted: Callable[[], bool] = lambda: True
    needs: Moment = field(default=Moment.STEP)   # the least moment at which it is worth trying


class Inbox:
    """Requests that wait, and the rule when they are served.

    `work(ask, moment)` does one on the execution thread and gives its receipt, or the :class:`Moment` that it needs when
    it cannot be done at this one. It is not called again before the first call has returned.
    """

    def __init__(self, work: Callable[[Ask, Moment], Receipt | Moment]):
        self._work = work
        self._lock = threading.Lock()
        self._at_work = threading.RLock()   # other threads' memory management waits until a request has been done
        self._waiting: list[Ask] = []
        self._closed = 0
        self._serving = False
        self._owner: int | None = None
        self._wakers: list[Callable[[], None]] = []
        self._least = Moment.IDLE + 1       # the least moment any waiting request needs; read without the lock

    def bind(self) -> None:
        """The calling thread is the execution thread."""
        self._owner = threading.get_ident()

    @property
    def bound(self) -> bool:
        """Whether there is an execution thread yet."""
        return self._owner is not None

    def on_execution_thread(self) -> bool:
        """Whether the calling thread is the execution thread."""
        return self._owner == threading.get_ident()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """While the execution thread sleeps in this block, `wake` is called when a request arrives, on the endpoint's thread."""
        with self._lock:
            self._wakers.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)

    def submit(self, ask: Ask) -> None:
        """Take a request. Any thread; returns at once. The answer is given exactly once, on whichever thread."""
        with self._lock:
            refused = self._owner is None or (self._closed and not self._serving)
            if not refused:
                self._waiting.append(ask)
                self._note()
            wakers = list(self._wakers)
        if refused:
            ask.answer(BUSY)
        else:
            for wake in wakers:
                wake()

    def closed(self) -> None:
        """Memory management is at work: answer BUSY to what waits and to what comes, until :meth:`opened`. Any thread; nests."""
        with self._at_work, self._lock:
            self._closed += 1
            refused: list[Ask] = []
            if self._waiting and not self._serving:
                refused, self._waiting = self._waiting, []
                self._note()
        for ask in refused:
            ask.answer(BUSY)

    def opened(self) -> bool:
        """The end of one :meth:`closed`; whether it was the outermost."""
        with self._lock:
            self._closed -= 1
            return not self._closed

    def serve(self, moment: Moment) -> int:
        """Serve what waits and can be served now; how many were answered. Does nothing on any other thread than the execution
        thread, inside :meth:`closed`, and inside itself."""
        if self._least > moment or self._owner != threading.get_ident() or self._serving or self._closed:
            return 0
        answered = 0
        while True:
            with self._at_work:
                ask = self._next(moment)
                if ask is None:
                    return answered
                try:
                    done = self._one(ask, moment)
                finally:
                    with self._lock:
                        self._serving = False
            if isinstance(done, Receipt):
                answered += 1
                ask.answer(done)
            else:
                with self._lock:
                    ask.needs = done
                    self._waiting.append(ask)
                    self._note()

    def tick(self, now: float) -> float | None:
        """Answer BUSY to what has waited too long, drop what nobody waits for any more, and wake a sleeping execution thread
        again; gives the seconds until the next call. Any thread."""
        with self._lock:
            if not self._waiting:
                return None
            late = [a for a in self._waiting if a.patience <= now or not a.wanted()]
            self._waiting = [a for a in self._waiting if a not in late]
            self._note()
            wakers = list(self._wakers) if self._waiting else []
            nearest = min((a.patience - now for a in self._waiting), default=None)
        for ask in late:
            ask.answer(BUSY)
        for wake in wakers:
            wake()
        if wakers and nearest is not None:
            return min(nearest, WAKE_AGAIN)
        return nearest

    def refuse_all(self) -> None:
        """Answer BUSY to whatever waits: this process is about to stop serving."""
        with self._lock:
            refused, self._waiting = self._waiting, []
            self._owner = None
            self._note()
        for ask in refused:
            ask.answer(BUSY)

    def _note(self) -> None:
        self._least = min((a.needs for a in self._waiting), default=Moment.IDLE + 1)

    def _next(self, moment: Moment) -> Ask | None:
        with self._lock:
            if self._closed:
                return None
            for i, ask in enumerate(self._waiting):
                if ask.needs <= moment:
                    del self._waiting[i]
                    self._note()
                    self._serving = True
                    return ask
        return None

    def _one(self, ask: Ask, moment: Moment) -> Receipt | Moment:
        if not ask.wanted():
            return BUSY     # whoever asked has gone; its answer goes nowhere
        try:
            return self._work(ask, moment)
        except Exception:
            logging.exception("Process memory: could not do what %s asked for (%s)", ask.origin or "another process", ask.kind)
            return NOTHING      # who is told BUSY asks again, and again
        except BaseException:
            ask.answer(BUSY)
            raise


def waits_until(patience: Any, limit: float) -> float:
    """The `time.monotonic()` until which a request waits, from what its sender asked for; at most `limit` seconds away."""
    seconds = patience if isinstance(patience, (int, float)) and patience == patience else 0.0
    return time.monotonic() + max(0.0, min(float(seconds), limit))
