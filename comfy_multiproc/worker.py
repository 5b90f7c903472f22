"""A worker process: from its first instruction to its last.

`main` is what the host spawns. It becomes a ComfyUI process with the host's options, loads the core nodes and its packs, and
then runs what the host asks for on its main thread, which is its execution thread. Other threads only read the link and
watch the host.
"""
from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

from . import boot, failures, logs, spawning
from .link import Link, LinkClosed, Message, Request

Job = Callable[[Request], Any]
"""Runs on the execution thread; answers the request itself, at once or later, or gives a coroutine that does."""

IDLE_AFTER = 0.005
"""Seconds without a job after which other processes hear that this one is idle: calls often follow one another at once."""
REMEMBERED_PROMPTS = 256

current: Context | None = None
"""The context of this process; None in a process that is no worker."""


class Context:
    """What the rest of the runtime has of its worker.

    The execution thread waits on a queue, which is what answers fastest, and runs an event loop only while a job is a coroutine.
    """

    def __init__(self, name: str, state: dict[str, Any], link: Link):
        self.name = name
        self.state = state
        self.link = link
        self._loop = asyncio.new_event_loop()
        self._queue: queue.SimpleQueue[Request | Callable[[], Any]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._running: dict[int, Request] = {}      # by the order in which they began
        self._number = 0
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._resets: list[Callable[[], None]] = []
        self.unwanted: Callable[[Request], None] = lambda request: None     # gets a request that is not done, because nobody waits for it
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_loop = False
        self._stopping = False
        self._idle = False
        self._lock = threading.Lock()
        link.otherwise(self._post)      # also what comes before its handler is there
        link.on("interrupt", self._on_interrupt)
        link.on("stop", lambda _: self.stop())
        link.on("trim", lambda _: self.soon(self._trim))

    # for those who do the work

    def on_execution(self, kind: str, job: Job) -> None:
        """Have `job` called on the execution thread with every message of that kind. What it raises becomes the failure of the
        request. Messages that came before the packs were loaded wait."""
        self._jobs[kind] = job

    def on_reset(self, function: Callable[[], None]) -> None:
        """Have `function` called, on the execution thread, when what this process remembers is to be dropped."""
        self._resets.append(function)

    def wait(self, future: Future[Message]) -> Message:
        """On the execution thread: wait for the answer to a request of this worker, which has a bound of its own. Meanwhile memory is
        given back to other processes. Raises what the future holds."""
        from comfy.process_memory import moments
        while not futures.wait([future], 0.2).done:
            moments.before_node()
        return future.result()

    @property
    def serving(self) -> bool:
        """Whether a request of the host runs now."""
        return bool(self._running)

    def cancelled(self, prompt: str | None) -> bool:
        """Whether that prompt was interrupted; any thread."""
        return prompt is not None and prompt in self._cancelled

    def interrupt(self, prompt: str | None, value: bool = True) -> None:
        """The user has interrupted the prompt, or whatever runs if it is None; False: that is over. Any thread."""
        with self._lock:
            if prompt is not None:
                self._cancelled.pop(prompt, None)
                if value:
                    self._cancelled[prompt] = None
                    while len(self._cancelled) > REMEMBERED_PROMPTS:
                        self._cancelled.popitem(last=False)
            meant = any(prompt is None or r.prompt == prompt for r in list(self._running.values()))
        if meant or not value:
            self._flag(value)

    # jobs

    def _on_interrupt(self, request: Request) -> None:
        body = request.body if isinstance(request.body, dict) else {}
        self.interrupt(body.get("prompt"), body.get("value") is not False)

    def _flag(self, value: bool) -> None:
        management = sys.modules.get("comfy.model_management")
        if management is not None and hasattr(management, "interrupt_current_processing"):
            management.interrupt_current_processing(value)

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Have ``function(*args)`` called on the execution thread between two jobs. Any thread."""
        self._queue.put(partial(function, *args) if args else function)
        self._call_loop()

    def stop(self) -> None:
        """Let `run` return after the job that runs now. Any thread."""
        def stop() -> None:
            self._stopping = True
        self.soon(stop)

    def _call_loop(self) -> None:
        if self._in_loop:
            try:
                self._loop.call_soon_threadsafe(self._loop.stop)
            except RuntimeError:
                pass    # it has been closed: this process ends

    def _post(self, request: Request) -> None:
        self._queue.put(request)
        self._call_loop()

    def _run(self, request: Request) -> None:
        number = self._begin(request)
        try:
            if request.cancelled or self.cancelled(request.prompt):
                self.unwanted(request)
                raise failures.interrupted()
            job = self._jobs.get(request.kind) or self.link.handler(request.kind)
            result = job(request)
            if inspect.iscoroutine(result):
                task = self._loop.create_task(self._finish(request, number, result))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
        except BaseException as error:
            self._failed(request, error)
        self._end(number)

    async def _finish(self, request: Request, number: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            await coroutine
        except BaseException as error:
            self._failed(request, error)
        finally:
            self._end(number)
            self._loop.stop()       # to look at the queue, and whether there are other tasks

    def _failed(self, request: Request, error: BaseException) -> None:
        if request.id is None:
            logging.error("Could not do what the host's message %r says: %s", request.kind, error, exc_info=error)
        failure = failures.describe(error)
        # The frames of the call refer to its tensors. They are free before the host hears of the failure and tries again.
        failures.forget(error)
        del error
        gc.collect(0)
        request.fail(failure)

    def _begin(self, request: Request) -> int:
        with self._lock:
            alone = not self._running
            self._number += 1
            self._running[self._number] = request
        if alone:
            self._flag(False)       # an interrupt that came too late for the last call is not meant for this one
        return self._number

    def _end(self, number: int) -> None:
        with self._lock:
            self._running.pop(number, None)

    def reset(self) -> None:
        """Drop what this worker remembers for packs and nodes. On the execution thread."""
        for function in self._resets:
            try:
                function()
            except Exception:
                logging.exception("Could not drop all that is remembered")
        gc.collect()

    def _trim(self) -> None:
        """The host leaves this worker alone for long: give back all that can be had again."""
        if self._running:
            return
        import comfy.model_management
        comfy.model_management.unload_all_models()
        gc.collect()
        comfy.model_management.soft_empty_cache()
        give_ram_back()

    def run(self) -> None:
        """Run jobs until the host says stop or is gone."""
        import torch
        from comfy.process_memory import moments
        moments.execution_thread(_Wake(self), self)
        asyncio.set_event_loop(self._loop)
        with torch.inference_mode():
            while not self._stopping:
                item = self._next()
                if isinstance(item, Request):
                    self._run(item)
                elif item is not None:
                    self._do(item)
                del item    # it would keep what it refers to until the next one comes

    def _do(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException:
            logging.exception("Worker %s: something that was to be done between two calls has failed", self.name)

    def _next(self) -> Request | Callable[[], Any] | None:
        """What is to be done next, waited for; None: look again."""
        from comfy.process_memory import moments
        if self._tasks:
            self._in_loop = True
            if self._queue.empty():
                self._loop.run_forever()
            self._in_loop = False
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                return None
        try:
            return self._queue.get(timeout=IDLE_AFTER)
        except queue.Empty:
            pass
        # Other processes take this one as idle from here on, and it gives back what they ask for when it is woken.
        self._idle = True
        while self._idle:
            moments.idle()
            item = self._queue.get()
            self._idle = item is _look
        moments.awake(isinstance(item, Request))
        return item


def _look() -> None:
    """Somebody has asked for memory; put into the queue, it makes the idle execution thread serve."""


class _Wake:
    """What the safe points know of the execution thread's sleep: a condition that can be notified."""

    def __init__(self, context: Context):
        self._context = context
        self.not_empty = self

    def acquire(self, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def notify_all(self) -> None:
        if self._context._idle:
            self._context.soon(_look)


def main(text: str, sock: socket.socket, output: spawning.Inherited) -> None:
    """The whole life of the worker; called by `multiprocessing` in the spawned process."""
    global current
    spawning.own_session()
    spawning.keep_from_forks(sock.fileno())
    multiprocessing.set_start_method(None, force=True)     # packs find the system's own, as in the host
    state = {**json.loads(text), "pid": os.getpid()}
    logs.take_over(output.take(), boot.log_level(state))
    faulthandler.enable(sys.stderr, all_threads=False)      # where native code crashes, for the report
    watch_host(state)
    for name in boot.OTHER_PYTHON if state["python"] else ():
        os.environ.pop(name, None)      # it was for this process, not for what nodes start
    link = Link(sock, name="the host", lost=lambda why: _host_gone(state, why))
    current = context = Context(state["name"], state, link)
    link.start()
    try:
        body = start(context)
    except BaseException as error:
        logging.error("Could not start: %s", error, exc_info=error)
        _tell(link, "failed", failures.describe(error))
    else:
        _tell(link, "ready", body)
        context.run()
    _leave(state)


def start(context: Context) -> Any:
    """Become a ComfyUI process; gives what the packs say of themselves. The order is that of ComfyUI's own start."""
    state = context.state
    root = logging.getLogger()
    level = root.level
    root.setLevel(max(level, logging.WARNING))      # the host has said all this about ComfyUI already
    boot.take_path()
    boot.take_options(state)
    boot.take_folders(state)
    # Before anything puts ComfyUI/comfy on the path, where another `utils` lies.
    for name in ("utils.extra_config", "utils.install_util"):
        importlib.import_module(name)
    boot.pager_before_torch(state)
    entry: Any = importlib.import_module(state["entry"]) if state["entry"] else None
    if hasattr(entry, "prestartup"):
        root.setLevel(level)
        entry.prestartup(context)
        root.setLevel(max(level, logging.WARNING))
    import comfy.utils  # noqa: F401  torch comes with it, as in the host
    import nodes
    boot.pager_after_torch(state)
    if hasattr(entry, "before_nodes"):
        entry.before_nodes(context)
    boot.guard_functions()
    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=not state["args"].get("disable_api_nodes")))
    boot.take_path()
    if state["share_memory"]:
        from . import runtime
        from comfy.cli_args import args
        runtime.start(f"worker {context.name}", family=state["host"], idle=runtime.idle_limit(args))
    root.setLevel(level)
    body = entry.load(context) if hasattr(entry, "load") else None
    import comfy.model_management
    if hasattr(comfy.model_management, "set_cudnn_benchmark"):
        comfy.model_management.set_cudnn_benchmark()        # packs may have turned it on, as in the host
    return body


def watch_host(state: dict[str, Any]) -> None:
    """End this process and what it has started as soon as the host is gone, busy or not."""
    parent = multiprocessing.parent_process()
    signs: list[Any] = [parent.sentinel] if parent is not None else []
    try:
        # A process that the host has forked keeps the sentinel open.
        signs.append(os.pidfd_open(state["host"]))      # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        pass

    def watch() -> None:
        while not multiprocessing.connection.wait(signs):
            pass
        end_now(state)
    if os.name == "posix" and os.getppid() != state["host"]:
        end_now(state)
    threading.Thread(target=watch, daemon=True, name="comfy_multiproc: host").start()


def end_now(state: dict[str, Any]) -> None:
    """End without looking back."""
    if not state["keep_processes"]:
        spawning.end_tree(os.getpid(), state["token"])
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _host_gone(state: dict[str, Any], why: str) -> BaseException:
    if os.getpid() != state["pid"]:
        return LinkClosed("a process that was forked from a worker has no link to the host")
    # The host has closed the link, to be done with this worker or because it has become another program.
    if current is not None:
        current.stop()
    _end_later(state)
    return LinkClosed(f"the host is gone: {why}")


def _end_later(state: dict[str, Any]) -> None:
    def end() -> None:
        time.sleep(state["grace"])
        end_now(state)
    threading.Thread(target=end, daemon=True, name="comfy_multiproc: end").start()


def _tell(link: Link, kind: str, body: Any) -> None:
    try:
        link.notify(kind, body)
    except LinkClosed:
        pass


def _leave(state: dict[str, Any]) -> None:
    _end_later(state)       # what packs have registered may hang
    runtime = sys.modules.get("comfy_multiproc.runtime")
    if runtime is not None:
        runtime.stop()
    # What packs have registered is run; taking the interpreter and torch apart piece by piece would take seconds more.
    multiprocessing.util._exit_function()   # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(0)


def give_ram_back() -> None:
    """Give what the C library keeps of freed memory back to the system, where it can be asked to."""
    import ctypes
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass
