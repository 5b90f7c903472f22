"""The workers of this process: started when they are needed, watched, ended with everything that they started.

A `Worker` stands for a name, not for a process: when its process has ended, the next call starts another one. All of its
methods may be called on any thread; none of them waits longer than it says.
"""
from __future__ import annotations

import atexit
import json
import logging
import multiprocessing.util  # noqa: F401  its handler at exit has to be there before ours
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from . import boot, failures, headroom, link, logs, recycling, spawning
from .failures import WorkerDied
from .guard import Guard
from .link import Handler, Link, Message
from .worker import main

GRACE = 5.0
"""Seconds that a worker has to end a call after an interrupt, or itself when told to, before it is killed."""
SEND_SECONDS = 30.0
"""How long a worker may take no messages, stopped or stuck, before it is killed."""
SHOWN_LINES = 20
SHOWN_LETTERS = 200

guard = Guard()
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_lock = threading.RLock()
_owner = os.getpid()


class State(Enum):
    """What a worker is doing."""
    STOPPED = "stopped"         # no process; the next call starts one
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"


@dataclass(frozen=True)
class Spec:
    """What a worker is. `packs`: plain data for its own side. `entry`: the module that is its own side: ``prestartup(context)`` is
    called there before torch is imported, ``before_nodes(context)`` after that, ``load(context)`` when the core nodes are there; what
    that gives is what `Worker.start` answers. All three may be missing. `python`: another environment's. Sizes in bytes, times in seconds."""
    name: str
    packs: tuple[Mapping[str, Any], ...] = ()
    entry: str = ""
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ram_limit: int | None = None
    idle_seconds: float | None = None
    keep_processes: bool = False
    grace: float = GRACE


@dataclass(eq=False, slots=True)
class _Call:
    prompt: str | None
    label: str
    unwanted: Callable[[Message], None]
    over: threading.Event | None = None     # set when it is over, for an interrupt that waits
    interrupted: bool = False


class _Run:
    """One process of a worker."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.begun = time.monotonic()
        self.ready: Future[Message] = Future()
        self.ready.set_running_or_notify_cancel()       # many wait for it, and none of them can cancel it for the others
        self.process: BaseProcess | None = None
        self.pid: int | None = None
        self.link: Link = None  # type: ignore[assignment]
        self.log: logs.WorkerLog | None = None
        self.calls: dict[int, _Call] = {}
        self.used = time.monotonic()
        self.trimmed = False
        self.stopping = False
        self.over = threading.Event()


class Worker:
    """A named worker.

    `pins`: called to learn how many objects in its process are still referred to from outside (handles); a worker with any is
    never recycled, only trimmed: its models are unloaded and its caches emptied. `on_end(worker, error)`: called, on a thread of
    this module, whenever its process has ended, whatever the reason. `on_ready(worker, said)`: likewise when a process is ready,
    with what its side says of the packs. All may be set at any time.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.pins: Callable[[], int] = lambda: 0
        self.on_end: Callable[[Worker, BaseException], None] = lambda worker, error: None
        self.on_ready: Callable[[Worker, Any], None] = lambda worker, said: None
        self.starts = 0
        self._handlers: dict[str, Handler] = {}
        self._lock = threading.RLock()
        self._run: _Run | None = None
        self._numbers = 0
        self._kept = 0
        with _lock:
            _workers.add(self)

    def __repr__(self) -> str:
        return f"<worker {self.name}: {self.state.value}, pid {self.pid}>"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def packs(self) -> tuple[Mapping[str, Any], ...]:
        return self.spec.packs

    @property
    def pid(self) -> int | None:
        """Of its process; None if it has none."""
        run = self._run
        return None if run is None else run.pid

    @property
    def state(self) -> State:
        run = self._run
        if run is None:
            return State.STOPPED
        if not run.ready.done():
            return State.STARTING
        return State.BUSY if run.calls else State.IDLE

    @property
    def link(self) -> Link | None:
        """To its process; None if it has none. Handlers are set with `on`, so that the next process has them too."""
        run = self._run
        return None if run is None else run.link

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines that its process has written."""
        run = self._run
        return () if run is None or run.log is None else run.log.tail

    def on(self, kind: str, handler: Handler) -> None:
        """As `Link.on`, for this process and the ones to come."""
        with self._lock:
            self._handlers[kind] = handler
            if self._run is not None:
                self._run.link.on(kind, handler)

    def start(self) -> Future[Message]:
        """Start the process if there is none, without waiting for it. The future holds what its side says of the packs, or why
        it could not start: the exception of its start, or WorkerDied. Raises OSError when the system starts no process."""
        if (shortage := headroom.shortage(self.name)) is not None and self._run is None:
            recycling.make_room(worker for worker in workers() if worker is not self)
            if (shortage := headroom.shortage(self.name)) is not None:
                raise shortage
        with self._lock:
            return (self._run or self._spawn()).ready

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The process is not recycled meanwhile: it is in use otherwise than by a call."""
        with self._lock:
            self._kept += 1
        try:
            yield
        finally:
            with self._lock:
                self._kept -= 1
                if self._run is not None:
                    self._run.used = time.monotonic()

    def call(self, kind: str, body: Any = None, fds: Sequence[int] = (), *, over: Link | None = None, prompt: str | None = None,
             label: str = "", unwanted: Callable[[Message], None] = Message.close) -> Future[Message]:
        """Ask the worker for something, starting it if need be, and give the future of the answer.

        over: the process that the message was made for, by its link. prompt: what `interrupt` knows the call by. label: what it is,
        for the report of a crash ("node 7 (KSampler)"). unwanted: gets an answer that nobody waits for any more. The future fails
        with the exception of the other side, with InterruptProcessingException once the prompt was interrupted, whatever the worker
        has answered, or with WorkerDied. Raises OSError when it cannot be started, LinkError for a bad message, LinkClosed when
        the process `over` has ended.
        """
        if over is None:
            self.start()
        with self._lock:
            run = self._run or (self._spawn() if over is None else None)
            if run is None or over not in (None, run.link):
                raise link.LinkClosed(f"worker {self.name} has ended before the call; run it again")
            self._numbers += 1
            number = self._numbers
            call = run.calls[number] = _Call(prompt, label, unwanted)
            run.used, run.trimmed = time.monotonic(), False

        def outcome(result: Message | BaseException) -> Message | BaseException:
            return self._answered(run, number, call, result)
        try:
            future = run.link.request(kind, body, fds, prompt=prompt, outcome=outcome, unwanted=unwanted)
        except BaseException:
            run.calls.pop(number, None)
            raise
        future.add_done_callback(lambda f: self._over(run, number, call) if f.cancelled() else None)
        return future

    def interrupt(self, prompt: str | None = None) -> None:
        """Interrupt the calls of that prompt, or all if it is None. Returns at once.

        The worker is told; a call that is still there after the grace period ends with its process.
        """
        run = self._run
        if run is None:
            return
        meant = [c for c in list(run.calls.values()) if prompt is None or c.prompt == prompt]
        if not meant:
            return
        for call in meant:
            call.over = call.over or threading.Event()
            call.interrupted = True
        _background(f"interrupt {self.name}", self._interrupt, run, prompt, meant)

    def stop(self, grace: float | None = None) -> None:
        """End the process and what it has started; waits for it, at most `grace` seconds and a moment. Calls that run fail."""
        with self._lock:
            run = self._run
        if run is not None:
            self._stop(run, self.spec.grace if grace is None else grace)

    def kill(self) -> None:
        """End the process and what it has started at once."""
        self.stop(0.0)

    def restart(self) -> Future[Message]:
        """`stop`, then `start`."""
        self.stop()
        return self.start()

    @property
    def idle(self) -> float | None:
        """Seconds since its process was last in use; None while it is, or if there is none."""
        run = self._run
        if run is None or self.state is not State.IDLE or self._kept or run.stopping:
            return None
        return time.monotonic() - run.used

    def retire(self, reason: str = "idle") -> bool:
        """End the idle process that nothing refers to, and wait for that as `stop` does; whether there was one. A call that comes
        meanwhile starts another process."""
        with self._lock:
            run = self._run
            if run is None or self.idle is None or self.pins() > 0:
                return False
            run.stopping, self._run = True, None
        logging.info("Worker %s is %s: it is ended, the next call starts it again", self.name, reason)
        self._stop(run, self.spec.grace)
        return True

    def trim(self) -> bool:
        """Have the idle process unload its models and give back what can be had again; False if it has done so since it was last used."""
        run = self._run
        if run is None or run.trimmed:
            return False
        run.trimmed = True
        try:
            run.link.notify("trim")
        except link.LinkClosed:
            pass
        return True

    # the life of one process

    def _spawn(self) -> _Run:
        run = _Run()
        spec = self.spec
        logging.info("Starting worker %s ...", self.name)
        ours, theirs = link.pair()
        read, write = logs.pipe()
        run.link = Link(ours, name=f"worker {self.name}", lost=lambda why: self._lost(run, why), send_timeout=SEND_SECONDS)
        state = {**boot.collect(), "name": self.name, "packs": list(spec.packs), "entry": spec.entry, "host": os.getpid(),
                 "token": run.token, "grace": spec.grace, "keep_processes": spec.keep_processes, "python": spec.python is not None,
                 "share_memory": _sharing()}
        environment = {**boot.environment(self.name, spec.python, spec.environment), spawning.TOKEN: run.token}
        try:
            run.process = spawning.start(main, (json.dumps(state), theirs, spawning.Inherited(write)), name=f"worker {self.name}",
                                         path=boot.search_path(own=spec.python is None), python=spec.python, environment=environment)
        except BaseException:
            os.close(read)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write)
        run.pid = run.process.pid
        try:
            run.log = logs.WorkerLog(read, self.name)
            guard.watch(run.pid or 0, run.token, spec.keep_processes)
            for kind, handler in self._handlers.items():
                run.link.on(kind, handler)
            run.link.on("ready", lambda r: self._ready(run, Message("ready", r.body, r.take_fds())))
            run.link.on("failed", lambda r: self._ready(run, failures.rebuild(r.body, f"worker {self.name}")))
            run.link.start()
        except BaseException:
            # No thread or file more, perhaps: nobody would see to this process.
            run.process.kill()      # not by its token: so early it may not be seen yet
            if spawning.wait(run.process, GRACE) is not None:
                run.process.close()
            guard.forget(run.token)
            ours.close()
            if run.log is None:
                os.close(read)
            raise
        self._run = run
        self.starts += 1
        recycling.look_after(self)
        return run

    def _ready(self, run: _Run, outcome: Message | BaseException) -> None:
        run.used = time.monotonic()
        if not run.ready.done():
            if isinstance(outcome, BaseException):
                run.ready.set_exception(outcome)
            else:
                run.ready.set_result(outcome)
                logging.info("Worker %s is ready after %.1f s", self.name, run.used - run.begun)
                _background(f"start of {self.name}", self._up, outcome.body)

    def _up(self, said: Any) -> None:
        try:
            self.on_ready(self, said)
        except Exception:
            logging.exception("Worker %s: what it says of its packs could not be used", self.name)

    def _lost(self, run: _Run, why: str) -> BaseException:
        """On the link's thread, once: the process is gone or is to go."""
        process = run.process
        assert process is not None
        code = spawning.wait(process, 0.5 if not run.stopping else self.spec.grace)
        spawning.end_tree(run.pid or 0, run.token, keep=self.spec.keep_processes)
        killed = code is None
        if killed:
            code = spawning.wait(process, GRACE)
            # It may have been ending, slowly, for a reason of its own.
            killed = code in (None, -getattr(signal, "SIGKILL", signal.SIGTERM))
        if code is not None:
            process.close()
        guard.forget(run.token)
        if run.log is not None:
            run.log.settle(0.5)
        error: BaseException = self._died(run, code, why if killed else "")
        with self._lock:
            if self._run is run:
                self._run = None
        if not run.ready.done():
            run.ready.set_exception(error)
        elif (cause := run.ready.exception()) is not None:
            error = cause       # that it then ended is no news
        if not run.stopping and all(call.interrupted for call in list(run.calls.values())):
            logging.error("%s", error)      # otherwise those whose calls fail with it say so
        run.over.set()
        try:
            _background(f"end of {self.name}", self._ended, run, error)
        except RuntimeError:
            pass    # the interpreter ends, and since Python 3.12 no thread starts then
        return error

    def _ended(self, run: _Run, error: BaseException) -> None:
        run.link.join(GRACE)    # so that every call has failed before
        try:
            self.on_end(self, error)
        except Exception:
            logging.exception("Worker %s: could not put away what belonged to it", self.name)

    def _died(self, run: _Run, code: int | None, why: str) -> WorkerDied:
        number = -code if code is not None and code < 0 else None
        who, hint = f"worker {self.name} (pid {run.pid})", ""
        if run.stopping:
            text = f"{who} was stopped"
        elif why:
            text = f"{who} was ended: {why}"
        elif number is not None:
            text = f"{who} was ended by signal {number} ({_signal_name(number)})"
            if number == getattr(signal, "SIGKILL", 9):
                hint = "; the usual cause of that signal is that the machine or the container ran out of RAM"
        else:
            text = f"{who} has ended with exit code {code}"
        error = WorkerDied(text + hint)
        error.hint = hint
        error.pid, error.signal, error.exitcode, error.remote_type = run.pid, number, code, ""
        error.log = run.log.tail if run.log is not None else ()
        return error

    def _over(self, run: _Run, number: int, call: _Call) -> None:
        run.calls.pop(number, None)
        run.used = time.monotonic()
        if call.over is not None:
            call.over.set()

    def _answered(self, run: _Run, number: int, call: _Call, result: Message | BaseException) -> Message | BaseException:
        self._over(run, number, call)
        if call.interrupted:
            if isinstance(result, Message):
                call.unwanted(result)
            # Whatever the node has made of it: one that swallows the exception does not bring the prompt back.
            return failures.interrupted()
        return _with_place(result, call.label) if isinstance(result, WorkerDied) else result

    def _interrupt(self, run: _Run, prompt: str | None, calls: list[_Call]) -> None:
        try:
            run.link.notify("interrupt", {"prompt": prompt, "value": True})
        except link.LinkClosed:
            return
        until = time.monotonic() + self.spec.grace
        for call in calls:
            if call in run.calls.values() and call.over is not None and not call.over.wait(max(0.0, until - time.monotonic())):
                logging.warning("Worker %s (pid %s) did not stop within %g s after the interrupt: it is killed", self.name, run.pid,
                                self.spec.grace)
                run.stopping = True
                self._kill(run)
                return

    def _stop(self, run: _Run, grace: float) -> None:
        self._ask_to_stop(run, grace)
        if not run.over.wait(grace):
            self._kill(run)
            run.over.wait(GRACE)

    def _ask_to_stop(self, run: _Run, grace: float) -> None:
        run.stopping = True
        if grace > 0:
            try:
                run.link.notify("interrupt", {"prompt": None, "value": True})
                run.link.notify("stop")
            except link.LinkClosed:
                pass

    def _kill(self, run: _Run) -> None:
        spawning.end_tree(run.pid or 0, run.token, keep=self.spec.keep_processes)
        run.link.close("did not end by itself")


def workers() -> list[Worker]:
    """All there are."""
    with _lock:
        return list(_workers)


def interrupt(prompt: str | None = None) -> None:
    """Interrupt that prompt in every worker; any thread, returns at once."""
    for worker in workers():
        worker.interrupt(prompt)


def stop_all(grace: float = 2.0) -> None:
    """End every worker, at the same time; waits at most `grace` seconds and a moment. Calls that run are cancelled, not failed:
    nobody wants a report of them. Done at exit by itself."""
    if os.getpid() != _owner:
        return      # a fork of the host: they are not its own
    # Without a thread for each: at exit none can be started since Python 3.12.
    ending = [(worker, run) for worker in workers() if (run := worker._run) is not None]
    for worker, run in ending:
        for call in list(run.calls.values()):
            call.interrupted = True
        worker._ask_to_stop(run, grace)
    until = time.monotonic() + grace
    for worker, run in ending:
        if not run.over.wait(max(0.0, until - time.monotonic())):
            worker._kill(run)
    for _, run in ending:
        run.over.wait(GRACE)
    guard.close()


def _at_exit() -> None:
    try:
        stop_all()
    except KeyboardInterrupt:       # a second Ctrl-C: somebody does not want to wait
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_all(0.0)


# After multiprocessing's own, so before it at exit: that one waits for every child, without a bound.
atexit.register(_at_exit)


def _background(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True, name=f"comfy_multiproc: {name}")
    thread.start()
    return thread


def _with_place(error: WorkerDied, label: str) -> WorkerDied:
    text = error.while_it(f"ran {label}") if label else str(error)
    if error.log:
        text += "\nIts last lines:\n" + "\n".join(f"    {line[:SHOWN_LETTERS]}" for line in error.log[-SHOWN_LINES:])
    placed = WorkerDied(text)
    placed.__dict__.update(error.__dict__)
    return placed


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _sharing() -> bool:
    args = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    return not getattr(args, "disable_process_memory", False)
