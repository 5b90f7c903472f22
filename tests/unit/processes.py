"""Real processes for the tests of the ledger and the peers: children that run a function of a test module and talk over a pipe."""
from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy_multiproc.liveness import stopped

SECONDS = 30.0      # a bound on hangs, never a measure of anything

# Forked from a process that has imported what they need and nothing else: a start is milliseconds, and as clean as a spawned one.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.unit.small", "comfy_multiproc.runtime"])


class Child:
    """A process that runs ``target(pipe, *args)``. `tell` sends to it, `hear` waits for what it sends."""

    def __init__(self, target: Callable[..., None], *args: Any):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, what: Any) -> None:
        self.pipe.send(what)

    def hear(self) -> Any:
        if not self.pipe.poll(SECONDS):
            if self.process.is_alive():
                os.kill(self.pid, signal.SIGUSR1)       # where its threads are goes to stderr: see `small`
                self.pipe.poll(1)
            raise AssertionError(f"child {self.pid} said nothing within {SECONDS:.0f} seconds")
        return self.pipe.recv()

    def call(self, what: Any) -> Any:
        self.tell(what)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(SECONDS)

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says so."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + SECONDS
        while not stopped(self.pid):
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def children(*targets: tuple[Any, ...]) -> Iterator[list[Child]]:
    """Children that are gone when the block ends, however it ends."""
    started: list[Child] = []
    try:
        for target, *args in targets:
            started.append(Child(target, *args))
        yield started
    finally:
        for child in started:
            child.process.kill()
            child.process.join(SECONDS)
            child.process.close()
            child.pipe.close()


def meet(started: list[Child], names: list[str]) -> None:
    """Wait until these small ComfyUI processes are ready and each knows all others."""
    for child in started:
        assert child.hear() == "ready"
    for child, name in zip(started, names, strict=True):
        deadline = time.monotonic() + SECONDS
        while child.call(("books",))["peers"] != sorted(set(names) - {name}):
            assert time.monotonic() < deadline, "they do not find each other"
            time.sleep(0.01)
