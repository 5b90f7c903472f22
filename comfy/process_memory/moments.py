"""The moments of this process at which its memory may be given back to others, and those at which it may not.

Memory is given back on the execution thread only, where ComfyUI's own memory management runs. The hooks call the
functions here; a runtime that serves other processes sets :data:`handler`. Without one, each is a single test.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from . import registry

Function = TypeVar("Function", bound=Callable[..., Any])


class Handler(Protocol):
    """What a runtime does at these moments. All but :meth:`closed` and :meth:`opened` are called on the execution thread."""

    def execution_thread(self, queue: Any, executor: Any) -> None:
        """The calling thread is the execution thread; `queue` is what it waits on while idle, `executor` runs prompts."""

    def idle(self) -> None:
        """No prompt runs; the thread is about to wait for one."""

    def awake(self, prompt: bool) -> None:
        """The wait is over; whether it is for a prompt."""

    def before_node(self) -> None:
        """A node is about to run."""

    def after_node(self) -> None:
        """A node has run, or waits for something."""

    def step(self) -> None:
        """In the middle of a node, where it can be interrupted. Called for every operation: must be cheap. Any thread."""

    def waiting(self, seconds: float) -> None:
        """A load waits for its turn, for so many seconds; 0.0: the wait is over. Nothing is half done."""

    def closed(self) -> None:
        """Memory management is at work from now on: nothing may be given back. Any thread; nests."""

    def opened(self) -> None:
        """The end of what :meth:`closed` began."""


handler: Handler | None = None

executor: Any = None
"""What runs prompts in this process, once :func:`execution_thread` has said so."""


def execution_thread(queue: Any, prompt_executor: Any) -> None:
    global executor
    executor = prompt_executor
    if handler is not None:
        handler.execution_thread(queue, prompt_executor)


def idle() -> None:
    if handler is not None:
        handler.idle()


def awake(prompt: bool) -> None:
    if handler is not None:
        handler.awake(prompt)


def before_node() -> None:
    if handler is not None:
        handler.before_node()


def after_node() -> None:
    if handler is not None:
        handler.after_node()


def step() -> None:
    if handler is not None:
        handler.step()


def waiting(seconds: float) -> None:
    if handler is not None:
        handler.waiting(seconds)


def no_safe_point(function: Function) -> Function:
    """Nothing is given back to other processes while the decorated function runs, and no provider runs it while it is asked."""
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if registry.entries:
            registry.keep_off()
        here = handler
        if here is None:
            return function(*args, **kwargs)
        here.closed()
        try:
            return function(*args, **kwargs)
        finally:
            here.opened()
    return call  # type: ignore[return-value]
