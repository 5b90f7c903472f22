"""Out of memory: before a site makes its own work smaller, peers are asked, and the same size is tried once more.

ComfyUI catches an allocation that failed at some ten sites, each of which goes on with less. Such a function is decorated
with :func:`asks_peers_on_oom`; in its handler it calls :func:`peers_made_room` and begins its loop again, or :func:`start_over_if_peers_made_room`, which
has the decorator call it anew once the exception, which holds the tensors of the failed frames, is off the books. Only
peers are asked in a handler, never this process's own models, and at most once for each handler and call.
"""
from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from . import devices, ladder, registry
from .figures import manager

Function = TypeVar("Function", bound=Callable[..., Any])

PAUSE = 5.0
"""Seconds for which a device's peers, having given nothing, are not asked again for what a site lacks."""

_SIZE = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")
_CARD = re.compile(r"\b(?:GPU|XPU|NPU|[Cc]ard) (\d+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_here = threading.local()
_gave_nothing: dict[str, float] = {}    # device key -> when


class _Again(Exception):
    """The site begins anew. Never leaves the function that is decorated."""

    def __init__(self, site: _Site) -> None:
        self.site = site


class _Site:
    """One call of a decorated function."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.asked: set[int] = set()    # lines of the handlers that have asked


def asks_peers_on_oom(function: Function, noise: bool = False) -> Function:
    """Decorates a function that handles out of memory by itself. `noise`: it may draw random numbers, the same ones when it
    is called anew."""
    code = function.__code__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not registry.entries:
            return function(*args, **kwargs)
        site = _Site(code)
        sites = _here.__dict__.setdefault("sites", [])
        sites.append(site)
        try:
            drawn = _random_state() if noise else None
            try:
                return function(*args, **kwargs)
            except _Again as again:
                if again.site is not site:
                    raise
            manager().soft_empty_cache()
            if drawn is not None:
                _draw_again(drawn)
            return function(*args, **kwargs)
        finally:
            sites.pop()
    return call  # type: ignore[return-value]


asks_peers_on_oom_same_noise = functools.partial(asks_peers_on_oom, noise=True)


def peers_made_room() -> bool:
    """In a handler of out of memory: whether peers have made room, so that the same size is worth another try.

    True at most once for each handler and call of a function decorated with :func:`asks_peers_on_oom`.
    """
    return bool(registry.entries) and _room_given(sys._getframe(1)) is not None


def start_over_if_peers_made_room() -> None:
    """In a handler of out of memory: if peers have made room, leave the function and let it be called anew, once."""
    if registry.entries:
        site = _room_given(sys._getframe(1))
        if site is not None:
            raise _Again(site)


def _room_given(frame: Any) -> _Site | None:
    sites = getattr(_here, "sites", None)
    if not sites or sites[-1].code is not frame.f_code or frame.f_lineno in sites[-1].asked:
        return None
    site: _Site = sites[-1]
    site.asked.add(frame.f_lineno)
    return site if relief(sys.exc_info()[1]) else None


def relief(error: BaseException | None) -> int:
    """Ask peers for what an allocation has failed for and for the least that inference needs, beyond what is free now.
    Gives by how many bytes the free figure has grown."""
    mm = manager()
    device, size = failed_allocation(str(error), mm.get_torch_device())
    place = devices.key(device)
    if place is None or time.monotonic() - _gave_nothing.get(place, -PAUSE) < PAUSE:
        return 0
    given = ladder.make_room(device, mm.get_free_memory(device) + size + mm.minimum_inference_memory())
    if given:
        mm.soft_empty_cache()
    else:
        _gave_nothing[place] = time.monotonic()
    return given


def failed_allocation(message: str, device: Any) -> tuple[Any, int]:
    """The device and the bytes that an out-of-memory message is about; `device` and 0 where it does not say."""
    card, size = _CARD.search(message), _SIZE.search(message)
    if card is not None and device.index is not None and int(card[1]) != device.index:
        device = type(device)(device.type, int(card[1]))
    return device, 0 if size is None else int(float(size[1]) * _UNITS[size[2]])


def _random_state() -> list[tuple[Any, Any]]:
    torch = sys.modules["torch"]
    generators = [torch.default_generator]
    for backend in ("cuda", "xpu"):
        module = getattr(torch, backend)
        if module.is_available() and module.is_initialized():
            generators += module.default_generators
    return [(generator, generator.get_state()) for generator in generators]


def _draw_again(states: list[tuple[Any, Any]]) -> None:
    for generator, state in states:
        generator.set_state(state)
