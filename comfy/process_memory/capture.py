"""Graph capture: nothing may come in between. A process that captures gives nothing, and others hold their loads on that
device meanwhile, with a bound."""
from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

from . import devices, registry
from .figures import STALE, last_words

Function = TypeVar("Function", bound=Callable[..., Any])

PATIENCE = 2.0
"""Seconds that a load waits for the captures of others on its devices to end."""

_here = threading.local()


def may_capture(prefetch_queue_pop: Function) -> Function:
    """Decorates a function that may capture: whatever :func:`begin_capture` has begun in it ends with it."""
    @functools.wraps(prefetch_queue_pop)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not registry.entries:
            return prefetch_queue_pop(*args, **kwargs)
        try:
            return prefetch_queue_pop(*args, **kwargs)
        finally:
            if getattr(_here, "window", None) is not None:
                end_capture()
    return call  # type: ignore[return-value]


def begin_capture(device: Any) -> None:
    """A graph is about to be captured on `device`."""
    place = devices.key(device) if registry.entries else None
    if place is None:
        return
    end_capture()   # one that failed where nobody looked: the first provider had been registered in the middle of it
    window = _here.window = ExitStack()
    for entry in registry.entries:
        if registry.overridden(entry, "exclusive") and entry.ready:
            try:
                window.enter_context(entry.provider.exclusive(place))
            except Exception as error:
                entry.failed("exclusive", f"raised {type(error).__name__}: {error}")


def end_capture() -> None:
    """It has been captured, or it has failed."""
    window, _here.window = getattr(_here, "window", None), None
    if window is not None:
        try:
            window.close()
        except Exception:
            logging.exception("Process memory: the end of a graph capture could not be told to all processes")


def wait_for_captures(wanted: Iterable[Any]) -> bool:
    """Wait until nobody else captures on the devices in `wanted`, at most PATIENCE seconds; whether it came to that."""
    if not registry.entries or registry.is_serving():
        return True
    places = [place for device in wanted if (place := devices.key(device)) is not None]
    deadline = time.monotonic() + PATIENCE
    while any(usage.capturing and usage.age <= STALE for place in places for _, usage in last_words(place)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True
