"""How much is done at once: batches, chunks and tiles that are sized by what is free.

What idle peers could give back counts as free here (and never in get_free_memory, which says what to ask for). Once a size
is chosen, what it needs beyond what is really free is asked for, before anything runs; busy peers are not waited for,
since this comes once in every sampling step. What cannot be had makes the size smaller.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import arithmetic, devices, ladder, ram, registry
from .figures import manager, own_bytes
from .provider import Reason

PAUSE = 5.0
"""Seconds for which a device's peers, having kept what they said they could give, are neither counted nor asked again."""

_kept: dict[str, float] = {}    # device key -> when


def reclaimable(device: Any) -> int:
    """Bytes of `device` that idle peers could give back."""
    if not registry.entries:
        return 0
    place = devices.key(device)
    if place is None or registry.is_serving() or time.monotonic() - _kept.get(place, -PAUSE) < PAUSE:
        return 0
    return sum(usage.reclaimable or 0 for entry, usage, age in registry.count("usage", place)
               if usage is not None and age == 0.0 and usage.busy is False and not usage.capturing and not entry.gone)


def free_for_batch(patcher: Any, device: Any, free: float) -> float:
    """What a batch on `device` may be sized by, where ComfyUI read the mere `free` figure: as for any other batch."""
    return float(patcher.get_free_memory(device)) if registry.entries else free


def room_for_batch(patcher: Any, device: Any, needed: Callable[[], float]) -> bool:
    """Whether `needed` bytes are there for the next forward of `patcher`, asking idle peers for what is missing of them."""
    if not registry.entries:
        return True
    size = needed()
    return size <= _at_hand(patcher, device, size)


def batch_size(patcher: Any, device: Any, each: float, number: int, items: int) -> int:
    """How many of `items` are done at once, each of them needing so many bytes: `number`, or as many as there is room for."""
    if not registry.entries or each <= 0:
        return number
    needed = each * min(number, items)
    at_hand = _at_hand(patcher, device, needed)
    return number if needed <= at_hand else max(1, int(at_hand / each))


def free_after_asking(device: Any, needed: float, free: float) -> float:
    """What is free on `device`, `free` before: idle peers are asked for what is missing of `needed`."""
    if needed <= free or not registry.entries or not reclaimable(device):
        return free
    return _ask(device, needed)


def ask_for_room(device: Any, needed: float) -> None:
    """Before a choice is made by whether more than `needed` bytes are free on `device`, which may be the CPU: idle peers are
    asked for what is missing, so that the figure read next is the one that counts."""
    if not registry.entries or device is None or needed <= 0:
        return
    if devices.key(device) is None:
        ram.admit(needed)
    else:
        free_after_asking(device, needed + 1, manager().get_free_memory(device))


def obtainable(device: Any, size: float) -> float:
    """`size`, but no more than this process can have of the card: what it has, what is free, and what idle peers would give."""
    if not registry.entries or devices.key(device) is None:
        return size
    mm = manager()
    own = own_bytes(device)
    room = mm.get_free_memory(device) + (own or 0) + reclaimable(device) - mm.extra_reserved_memory()
    return min(size, max(0, room))


def _at_hand(patcher: Any, device: Any, needed: float) -> float:
    before = reclaimable(device)
    at_hand = patcher.get_free_memory(device)       # what is free, what the pager of this process would give, and what is promised
    promised = max(before, reclaimable(device))     # somebody may have become idle in between
    at_hand -= promised
    if needed <= at_hand or not promised:
        return float(at_hand)
    free = manager().get_free_memory(device)
    paged = max(0, at_hand - free)
    return _ask(device, needed - paged) + paged


def _ask(device: Any, needed: float) -> float:
    mm = manager()
    place = devices.key(device)
    assert place is not None
    shortfall = ladder.Shortfall(device, place, arithmetic.clamp(needed, mm.get_total_memory(device)), Reason.LOAD)
    for peer in sorted(shortfall.idle()):
        shortfall.ask(peer)
    free = mm.get_free_memory(device)
    if free < needed:
        _kept[place] = time.monotonic()
    return float(free)
