"""Page-locked host memory: one ceiling for all processes of the machine or container.

A process reserves what it is about to lock, in pieces of 256 MiB, under a lock that all processes share, so that reservations
never add up to more than the ceiling that ComfyUI gives one process, whoever asks first. What others hold reserved and have not
locked yet counts as taken from what is available. When the ceiling or the memory is short, own pins that no running prompt uses
go first, then those of idle peers, then own active ones, as ComfyUI orders them.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from comfy import process_memory

from . import admission, claims, limits, ram, registry
from .figures import STALE, last_words, manager
from .ram import PINS

PIECE = 256 * 1024 ** 2
"""Bytes by which a reservation grows."""

said = 0
"""Bytes that this process has last told others that it has locked."""

_here = threading.local()


def budget() -> int:
    """Bytes that all processes together may lock: ComfyUI's ceiling for one, in proportion where a container has less memory."""
    ceiling = manager().MAX_PINNED_MEMORY
    if ceiling <= 0 or limits.upstream() is not None:
        return int(ceiling)
    import psutil
    machine = psutil.virtual_memory().total
    return int(ceiling * limits.groups.total(machine) / machine)


def elsewhere() -> tuple[int, int]:
    """What other processes have reserved or locked, and how much of it they have not locked yet."""
    reserved = {entry: usage.claimed or 0 for entry, usage in last_words(PINS)}
    taken = coming = 0
    for entry, held, age in registry.count("ram"):
        locked = 0 if held is None or age > STALE or entry.gone else (held.pinned or 0) + (held.registered or 0)
        claimed = reserved.get(entry, 0)
        taken += max(claimed, locked)
        coming += max(0, claimed - locked)
    return taken, coming


def reserve(size: int, new: bool = False) -> int:
    """Reserve `size` more bytes than are locked here now; gives how many are missing, 0 if the reservation stands.

    `new`: they are not in memory yet either, so what is available must have room for them above the floor.
    """
    mm = manager()
    # What has been unlocked since others were told is theirs to take: they see it as available, and not as still to come.
    locked = max(mm.TOTAL_PINNED_MEMORY, said)
    if locked + size <= claims.current.own(PINS):
        return 0
    with claims.current.hold(PINS, claims.HOLD) as held:
        taken, coming = elsewhere()
        room = budget() - taken
        if new:
            room = min(room, locked + limits.available() - coming - ram.floor(mm.comfy.memory_management.RAM_CACHE_HEADROOM))
        if held and locked + size <= room:
            claims.current.write(PINS, int(min(room, -(-(locked + size) // PIECE) * PIECE)))
            return 0
        return max(1, int(locked + size - room))


def tell() -> int:
    """Bytes that are locked here, about to be told to others. What is reserved for those that have gone is given up first."""
    global said
    before, said = said, max(0, int(getattr(manager(), "TOTAL_PINNED_MEMORY", 0)))
    if said < before and said < claims.current.own(PINS):
        claims.current.write(PINS, said)
    return said


def settle() -> None:
    """Give up what is reserved beyond what is locked here; after a load or a node, or when pins have gone."""
    if claims.current.own(PINS):
        locked = int(manager().TOTAL_PINNED_MEMORY)
        if locked < claims.current.own(PINS):
            claims.current.write(PINS, locked)


claims.settlers.append(settle)


def _gone() -> None:
    """Own pins may have gone: until others are told, what has been locked is theirs."""
    settle()
    if manager().TOTAL_PINNED_MEMORY < said:
        process_memory.changed()


def pin_shortfall(size: int, shortfall: float) -> float:
    """What ensure_pin_budget finds to be short for `size` more bytes, with the container and the other processes in it."""
    if not _shared():
        return shortfall
    if manager().args.fast_disk:
        return max(shortfall, reserve(size))
    missing = reserve(size, new=True)
    own = manager().comfy.memory_management.RAM_CACHE_HEADROOM
    shortfall += ram.beyond_container() + ram.floor(own) - max(own / 2, limits.FLOOR)
    return max(shortfall, missing) if missing else shortfall


def reserves_pins(ensure_pin_budget: Callable[..., bool]) -> Callable[..., bool]:
    """Decorates ensure_pin_budget: what it has found room for is reserved, before another process finds the same room."""
    @functools.wraps(ensure_pin_budget)
    def ensure(size: int, *args: Any, **kwargs: Any) -> bool:
        granted = ensure_pin_budget(size, *args, **kwargs)
        if not granted or not _shared() or getattr(manager().args, "high_ram", False):
            return granted
        return not reserve(size, new=not manager().args.fast_disk)
    return ensure


def peers_pins_too(free_pins: Callable[..., int]) -> Callable[..., int]:
    """Decorates free_pins: idle peers' pins go before own active ones."""
    @functools.wraps(free_pins)
    def free(size: float, evict_active: bool = False, **kwargs: Any) -> int:
        if not registry.entries or registry.is_serving():
            freed = free_pins(size, evict_active=evict_active, **kwargs)
            _gone()
            return freed
        freed = free_pins(size, evict_active=False, **kwargs)
        if freed < size:
            freed += ram.ask("release_pins", size - freed)
        if freed < size and evict_active:
            freed += free_pins(size - freed, evict_active=True, **kwargs)
        _gone()
        return freed
    return free


def peers_registrations_too(free_registrations: Callable[..., bool]) -> Callable[..., bool]:
    """Decorates free_registrations, likewise."""
    @functools.wraps(free_registrations)
    def free(shortfall: float, evict_active: bool = True) -> bool:
        if not registry.entries or registry.is_serving() or manager().MAX_PINNED_MEMORY <= 0 or shortfall <= 0:
            return free_registrations(shortfall, evict_active=evict_active)
        before = manager().TOTAL_PINNED_MEMORY
        if free_registrations(shortfall, evict_active=False):
            return True
        shortfall -= before - manager().TOTAL_PINNED_MEMORY
        shortfall -= ram.ask("release_pins", shortfall)
        return shortfall <= 0 or free_registrations(shortfall, evict_active=evict_active)
    return free


def one_pin_ceiling(ensure_pin_registerable: Callable[..., bool]) -> Callable[..., bool]:
    """Decorates ensure_pin_registerable: the ceiling is one for all processes."""
    @functools.wraps(ensure_pin_registerable)
    def ensure(size: int, evict_active: bool = True) -> bool:
        if not _shared():
            return ensure_pin_registerable(size, evict_active=evict_active)
        missing = reserve(size)
        if missing:
            mm = manager()
            # What would be short of the ceiling of one process is made to be what is short of the common one.
            ensure_pin_registerable(missing + mm.MAX_PINNED_MEMORY - mm.TOTAL_PINNED_MEMORY, evict_active=evict_active)
            _gone()
            missing = reserve(size)
        if missing and ram.ask("release_pins", missing):
            missing = reserve(size)
        return not missing
    return ensure


def pins_full(size: int) -> bool:
    """Whether `size` more bytes are above the common ceiling, after everybody has been asked: they stay unlocked then."""
    if not _shared() or registry.is_serving():
        return False
    ensure = getattr(manager(), "ensure_pin_registerable", None)
    if ensure is not None:
        return not ensure(size)
    return bool(reserve(size)) and not (ram.ask("release_pins", size) and not reserve(size))


def pin_again(pin_memory: Callable[[Any], bool], tensor: Any) -> bool:
    """The driver has refused to lock a tensor: once own pins or idle peers' have gone, try once more."""
    if not registry.entries or getattr(_here, "again", False):
        return False
    size = int(tensor.nbytes)
    free = getattr(manager(), "free_registrations", None)
    if free is not None:
        free(size)
    elif not ram.ask("release_pins", size):
        return False
    _here.again = True
    try:
        return pin_memory(tensor)
    finally:
        _here.again = False


def _shared() -> bool:
    return admission.active() and manager().MAX_PINNED_MEMORY > 0
