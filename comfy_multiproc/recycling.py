"""Ending idle workers: those that are to be small, and one where another needs its room. Only the end of a process gives everything back."""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .host import Spec, Worker

LOOK_EVERY = 0.5

_watched: weakref.WeakSet[Worker] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def look_after(worker: Worker) -> None:
    """From now on recycle the worker, or trim it while objects in it are referred to, whenever its limits say so."""
    global _thread
    if worker.spec.idle_seconds is None and worker.spec.ram_limit is None:
        return
    with _lock:
        _watched.add(worker)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look_after_all, daemon=True, name="comfy_multiproc: recycling")
            _thread.start()


def make_room(workers: Iterable[Worker]) -> None:
    """End the one of these workers that has been idle for longest, if nothing refers to it."""
    idle = [(seconds, worker) for worker in workers if (seconds := worker.idle) is not None]
    for _, worker in sorted(idle, key=lambda pair: pair[0], reverse=True):
        if worker.retire():
            return


def _look_after_all() -> None:
    while True:
        time.sleep(LOOK_EVERY)
        with _lock:
            workers = list(_watched)
        for worker in workers:
            try:
                _look(worker)
            except Exception:
                logging.exception("Worker %s cannot be recycled", worker.name)


def _look(worker: Worker) -> None:
    idle = worker.idle
    reason = None if idle is None else _reason(worker.spec, worker.pid, idle)
    if reason is None:
        return
    if worker.pins() == 0:
        worker.retire(reason)
    elif worker.trim():
        logging.info("Worker %s is %s; objects in it are in use, so its models are unloaded and it stays", worker.name, reason)


def _reason(spec: Spec, pid: int | None, idle: float) -> str | None:
    if spec.idle_seconds is not None and idle >= spec.idle_seconds:
        return f"idle for {idle:.0f} s"
    if spec.ram_limit is not None and idle >= LOOK_EVERY and (size := _private_bytes(pid)) > spec.ram_limit:
        return f"using {size >> 20} MB of RAM, more than its limit of {spec.ram_limit >> 20} MB"
    return None


def _private_bytes(pid: int | None) -> int:
    """RAM of the process without what it shares: values that others hold count for nobody's limit."""
    import psutil
    try:
        memory = psutil.Process(pid).memory_info()
    except (psutil.Error, OSError):
        return 0
    return memory.rss - getattr(memory, "shared", 0)
