"""This process as one of several: listed in the ledger, served at its endpoint, with every other one registered.

:func:`start` is called once in a ComfyUI process, :func:`stop` before it ends (at exit by itself). Nothing has to be set
up, and nothing is left to be cleaned up when the process is killed.
"""
from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from comfy import process_memory
from comfy.process_memory import admission, ladder, moments, own
from comfy.process_memory import claims as process_claims
from comfy.process_memory.provider import DEADLINE, Outcome, Reason, Receipt

from .channel import ChannelError, Message, auth_key
from .claims import LedgerClaims
from .endpoint import Endpoint, Reply
from .giveback import give_back
from .ledger import Ledger, LedgerError, Slot, runtime_folder
from .liveness import alive, process_start
from .peer import PATIENCE, PeerProcess, Peers
from .publish import memory_managed, node_began, pinned, report
from .records import SLOTS, Process
from .safepoint import Ask, Inbox, Moment, waits_until

HOUSEKEEPING = 0.5      # seconds between two looks at who has come or gone; also how often an idle process confirms its books
BOUNDARY_INTERVAL = 0.02    # seconds between two writings at node boundaries at which nothing was loaded or unloaded
LONGEST = 3600.0        # seconds that a load may be told to wait for busy processes
KINDS = ("release", "release_pins", "release_ram", "unload", "reset")
TEXT = 128              # characters of a name in a message
LARGEST = 1 << 62

current: Runtime | None = None
"""The runtime of this process, once started."""


class Runtime:
    """What :func:`start` starts. Implements the moments that the hooks call."""

    def __init__(self, name: str, *, family: int | None = None, patience: float = PATIENCE, idle: float | None = None):
        self.name = name
        self.started = process_start(os.getpid()) or 0
        self.family = os.getpid() if family is None else family
        self.patience = max(0.0, min(patience, LONGEST))
        self._idle_limit = idle         # seconds after which this process unloads its models by itself
        self._worked = time.monotonic()     # when it, or another process of its family, was last seen at work
        self._idle_done = False
        self.inbox = Inbox(self._work)
        self._executor: Any = None
        self._queue: Any = None
        self._sleeping: ExitStack | None = None
        self._always = ExitStack()
        self._busy = False
        self._loaded = False            # whether the running prompt has loaded anything
        self._wake: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None     # of the running prompt
        self._called = False                                    # whether it has a call of ours to come
        self._dirty = False
        self._published = 0.0
        self._pinned = 0
        self._behind = False            # whether a boundary has passed since then
        self._captures: dict[str, int] = {}
        self._lock = threading.Lock()
        self._checked = math.inf        # no housekeeping before everything is there
        self._full = False
        self._stopped = False
        self._troubles: set[str] = set()
        self.ledger = Ledger()
        with self.ledger.lock():
            self._key = auth_key(self.ledger.folder)
            self._remove_litter()
        self.endpoint = Endpoint(self.ledger.folder, f"{os.getpid()}-{self.started}.sock", self._key, self._handle, self._tick)
        self.slot: Slot | None = None
        self.claims = LedgerClaims(self.ledger.folder, lambda: self.slot, lambda: self.peers.refresh())
        self.peers = self._look_for_peers()
        self._take_slot()
        self._before = process_claims.install(self.claims)
        process_memory.on_change = self.changed
        own.name, own.busy, ladder.patience = name, lambda: self._busy, self.patience
        moments.handler = self
        self.peers.refresh()
        self.changed()
        self._checked = 0.0

    def stop(self) -> None:
        """Take this process off the list; what it holds from now on is its own affair."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if moments.handler is self:
            moments.handler = None
            process_memory.on_change = None
            process_claims.install(self._before)
            own.busy = admission.node_running
        self.inbox.refuse_all()
        self.endpoint.close()
        self.peers.clear()
        if self.slot is not None:
            try:
                self.slot.close()
            except LedgerError:
                pass    # somebody holds the lock; this process ends, so the slot is free all the same
            self.slot = None

    # moments of the execution thread

    def execution_thread(self, queue: Any, executor: Any) -> None:
        self.inbox.bind()
        self._executor = executor
        self._queue = queue
        not_empty = getattr(queue, "not_empty", None)

        def wake() -> None:
            if not_empty is not None and not_empty.acquire(timeout=0.05):
                try:
                    not_empty.notify_all()
                finally:
                    not_empty.release()
        self._wake = wake
        self._always.enter_context(self.inbox.waking(self._wake_loop))
        self.changed()

    def idle(self) -> None:
        self._loop = None
        if self._behind:
            self.changed()      # before it: who sees this process idle takes its figures for what it holds at rest
        self._set_busy(False)
        self._serve(Moment.IDLE)
        if self._sleeping is None:
            self._sleeping = ExitStack()
            self._sleeping.enter_context(self.inbox.waking(self._wake))

    def awake(self, prompt: bool) -> None:
        if self._sleeping is not None:
            self._sleeping.close()
            self._sleeping = None
        self._serve(Moment.IDLE)
        if prompt:
            self._loaded = False
            self._set_busy(True, prompt=True)

    def before_node(self) -> None:
        self._serve(Moment.BOUNDARY)
        self._boundary(node_began())
        self._serve_while_awaiting()

    def after_node(self) -> None:
        self._boundary(False)
        self._serve(Moment.BOUNDARY)

    def _boundary(self, changed: bool) -> None:
        """Write what this process holds, if it may have changed: a node that takes less time than that is not slowed down by it."""
        # Pins that have gone must be known at once: what is reserved and not locked is room that others may not take.
        if changed or self._dirty or pinned() != self._pinned or time.monotonic() - self._published > BOUNDARY_INTERVAL:
            self.changed()
        else:
            self._behind = True

    def step(self) -> None:
        self._serve(Moment.STEP)

    def waiting(self, seconds: float) -> None:
        if not self.inbox.on_execution_thread():
            time.sleep(seconds)
            return
        if self.slot is not None:
            self.slot.waiting(seconds > 0)
        # load_models_gpu has shut the inbox; whoever it waits for may be waiting for what is in this process.
        self.inbox.opened()
        try:
            time.sleep(seconds)
            self._serve(Moment.STEP)
        finally:
            self.inbox.closed()

    def closed(self) -> None:
        memory_managed()
        self.inbox.closed()

    def opened(self) -> None:
        if self.inbox.opened():
            self._loaded = True
            self.changed()

    def changed(self) -> None:
        """Write what this process holds. Off the execution thread, once there is one, that is left to it."""
        if self.inbox.bound and not self.inbox.on_execution_thread():
            self._dirty = True
            return
        self._dirty = False
        slot = self.slot
        if slot is None:
            return
        self._published, self._behind, self._pinned = time.monotonic(), False, pinned()
        try:
            slot.publish(report(self._busy and self._loaded))
            slot.confirm()
        except Exception as e:
            # A custom node's model may not answer like ComfyUI's own; the load that goes on here must not fail for it.
            self._trouble(f"cannot tell other processes what this one holds: {type(e).__name__}: {e}")

    @contextmanager
    def capture(self, device: str) -> Iterator[None]:
        """While a graph is captured on `device`, others hold their loads there and get nothing from this process."""
        self._count_capture(device, 1)
        self.inbox.closed()
        try:
            yield
        finally:
            self.inbox.opened()
            self._count_capture(device, -1)

    def _serve_while_awaiting(self) -> None:
        """A prompt that awaits something lets its event loop run: requests are served there, as inside a node."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if loop is not self._loop:
            self._loop = loop
            self._called = False

    def _wake_loop(self) -> None:
        loop = self._loop
        if loop is not None and not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._in_loop)
            except RuntimeError:
                pass    # the prompt has just ended, and its loop with it

    def _in_loop(self) -> None:
        self._called = False
        self._serve(Moment.STEP)

    def _count_capture(self, device: str, by: int) -> None:
        with self._lock:
            now = self._captures[device] = self._captures.get(device, 0) + by
            if self.slot is not None and now == max(by, 0):
                self.slot.capture(device, by > 0)

    def _set_busy(self, busy: bool, prompt: bool = False) -> None:
        changed, self._busy = busy != self._busy, busy
        if changed:
            self._worked, self._idle_done = time.monotonic(), False     # here, for what is over between two looks
        if self.slot is not None and (changed or prompt):
            self.slot.busy(busy, prompt=prompt)
        # What is in use is on offer again, or not any more; without a load the figures are what they were.
        if self._dirty or (changed and self._loaded):
            self.changed()

    def _serve(self, moment: Moment) -> None:
        self.inbox.serve(moment)

    def _work(self, ask: Ask, moment: Moment) -> Receipt | Moment:
        try:
            done = give_back(ask, moment, self._executor)
        finally:
            self.changed()      # before the answer goes out: whoever gets it looks at the books next
        if isinstance(done, Receipt) and done.freed:
            logging.info("Process memory: gave back %d MB for %s", done.freed >> 20, ask.origin or "another process")
        return done

    # the endpoint's thread

    def _handle(self, message: Message, reply: Reply) -> None:
        kind = message.get("type")
        if kind in KINDS:
            self._take(str(kind), message, reply)
        elif kind == "ping":
            reply({"pong": True, "name": self.name})
        else:
            reply({"error": f"unknown message {str(kind)[:TEXT]!r}: the processes are of different versions"})

    def _take(self, kind: str, message: Message, reply: Reply) -> None:
        texts = {}
        for field in ("device", "candidate", "ticket", "origin"):
            value = message.get(field)
            if value is not None and not (isinstance(value, str) and len(value) <= TEXT):
                reply({"error": f"{field} must be a text of at most {TEXT} characters"})
                return
            texts[field] = value
        size = message.get("bytes")
        if type(size) is not int or size < 0:
            reply({"error": "bytes must be a whole number, not negative"})
            return
        try:
            reason = Reason(message.get("reason"))
        except ValueError:
            reason = Reason.LOAD

        def answer(receipt: Receipt) -> None:
            reply({"outcome": receipt.outcome.value, "freed": receipt.freed, "resident": receipt.resident})
        self.inbox.submit(Ask(kind=kind, answer=answer, device=texts["device"], bytes=min(size, LARGEST),
                              candidate=texts["candidate"], ticket=texts["ticket"], origin=texts["origin"] or "", reason=reason,
                              patience=waits_until(message.get("wait"), DEADLINE), begun=reply.begun,
                              wanted=lambda: reply.wanted))

    def _tick(self, now: float) -> float | None:
        if now - self._checked >= HOUSEKEEPING:
            self._checked = now
            try:
                self._keep_house()
            except Exception as e:
                self._trouble(str(e) if isinstance(e, LedgerError) else f"{type(e).__name__}: {e}")
        again = self.inbox.tick(now)
        return HOUSEKEEPING if again is None else min(again, HOUSEKEEPING)

    def _keep_house(self) -> None:
        if self._stopped:
            return
        if self.ledger.replaced or self._elsewhere():
            self._move()
        elif self.slot is None:
            self._take_slot()
        if self.slot is not None:
            self.slot.confirm()
        if self._sleeping is not None and getattr(self._queue, "flags", None):
            self._wake()    # /free has come between ComfyUI's look at its flags and its sleep, which lasts for minutes
        self.peers.refresh()
        self._look_idle(time.monotonic())

    def _look_idle(self, now: float) -> None:
        """Past the idle limit: have the execution thread unload its models. While a prompt runs, none of the server's processes is
        idle: the prompt may come back to any of them."""
        if self._idle_limit is None or not self.inbox.bound:
            return
        if self._busy or any(peer.family == self.family and (process := peer.process()) is not None and process.busy for peer in self.peers):
            self._worked, self._idle_done = now, False
        elif not self._idle_done and now - self._worked >= self._idle_limit:
            self._idle_done = True

            def answered(receipt: Receipt) -> None:
                self._idle_done = receipt.outcome is not Outcome.BUSY
            self.inbox.submit(Ask(kind="unload", answer=answered, bytes=LARGEST, reason=Reason.IDLE, wanted=lambda: not self._busy,
                                  origin=f"whoever needs it, after {self._idle_limit:g} s without work", patience=now + DEADLINE))

    def _elsewhere(self) -> bool:
        """Whether processes that start now use another folder: a session's own comes and goes with the session."""
        try:
            return runtime_folder() != self.ledger.folder
        except LedgerError:
            return False

    def _move(self) -> None:
        """Somebody has deleted the ledger or made a new one: go where everybody else goes."""
        ledger = Ledger()
        with ledger.lock():
            key = auth_key(ledger.folder)
        self.endpoint.move(ledger.folder, key)
        logging.info("Process memory: the ledger has been replaced; this process lists itself in the new one")
        if self.slot is not None and not self.ledger.replaced:
            self.slot.close()
        # The old mapping is not closed: another thread may be reading it. It goes with the last reference.
        self.ledger, self._key, self.slot = ledger, key, None
        self.claims.move(ledger.folder)
        self.peers.clear()
        self.peers = self._look_for_peers()
        self._take_slot()

    def _take_slot(self) -> None:
        slot = self.ledger.take(self.name, self.endpoint.address, family=self.family, only=True)
        if slot is None:
            if not self._full:
                logging.warning("Process memory: %d processes are listed already; this one goes on unlisted (others cannot ask "
                                "it for memory) until one of them ends", SLOTS)
            self._full = True
            return
        self._full = False
        slot.busy(self._busy)
        self.slot = slot
        self.claims.restore()
        self._dirty = True
        if self.inbox.bound:
            self._wake()    # an idle execution thread has nothing to write by itself
        else:
            self.changed()

    def _look_for_peers(self) -> Peers:
        return Peers(self.ledger, (os.getpid(), self.started), self._make_peer, self._found, self._lost)

    def _make_peer(self, process: Process) -> PeerProcess:
        family = self.family != 0 and process.family == self.family
        return PeerProcess(self.ledger, process, self._key, patience=self.patience, capture=self.capture,
                           related=family)

    def _found(self, peer: PeerProcess) -> None:
        logging.log(self._level(peer), "Process memory: shared with %s (pid %d)", peer.name, peer.pid)
        process_memory.register_process_memory_provider(peer)

    def _lost(self, peer: PeerProcess) -> None:
        process_memory.unregister_process_memory_provider(peer)
        if not self._stopped:
            logging.log(self._level(peer), "Process memory: %s (pid %d) has ended", peer.name, peer.pid)

    def _level(self, peer: PeerProcess) -> int:
        # Each member of a family meets every other, and the server's log has them all.
        return logging.DEBUG if self.family != 0 and peer.family == self.family else logging.INFO

    def _remove_litter(self) -> None:
        for path in self.ledger.folder.glob("*-*.sock"):
            pid, _, start = path.stem.partition("-")
            if pid.isdecimal() and start.isdecimal() and not alive(int(pid), int(start)):
                path.unlink(missing_ok=True)

    def _trouble(self, what: str) -> None:
        if what not in self._troubles and len(self._troubles) < 16:
            self._troubles.add(what)
            logging.warning("Process memory: %s (said once)", what)


def start(name: str | None = None, **options: Any) -> Runtime | None:
    """Share this machine's memory with the other ComfyUI processes of this user, from now on.

    `name` is for people; `options` are those of :class:`Runtime`. Gives None, and says why in the log, where it cannot be
    done: the process then goes on by itself. A second call gives what the first has started.
    """
    global current
    if current is not None:
        return current
    try:
        current = Runtime(name or f"ComfyUI {os.getpid()}", **options)
    except (LedgerError, ChannelError, OSError) as e:
        logging.warning("Process memory: not shared with other processes: %s", e)
        return None
    atexit.register(stop)
    others = len(list(current.peers))
    logging.info("Process memory: this is %s; %d other process%s", current.name, others, "" if others == 1 else "es")
    return current


def start_sharing(args: Any) -> None:
    """Start it in a server with these command line arguments, unless they say not to."""
    if args.process_memory_idle is not None and idle_limit(args) is None:
        logging.warning("--process-memory-idle %s is no positive number of seconds: models stay loaded", args.process_memory_idle)
    if not args.disable_process_memory:
        start(args.process_memory_name or f"ComfyUI on port {args.port}", patience=args.process_memory_patience, idle=idle_limit(args))


def idle_limit(args: Any) -> float | None:
    """Seconds without work after which a process with these command line arguments unloads its models."""
    seconds = getattr(args, "process_memory_idle", None)
    return seconds if seconds is not None and 0 < seconds < math.inf else None


def stop() -> None:
    """The end of what :func:`start` has started; nothing if it has not."""
    global current
    if current is not None:
        runtime, current = current, None
        runtime.stop()
        atexit.unregister(stop)


def _forget() -> None:
    """What this process has forked is none of ComfyUI's processes: the slot, the endpoint and the claims are its parent's."""
    global current
    current = None
    if isinstance(moments.handler, Runtime):
        moments.handler = process_memory.on_change = None
        process_claims.install(process_claims.LocalClaims())
        own.busy = admission.node_running


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
