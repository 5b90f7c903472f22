"""One budget of host memory for all processes: what the container leaves, the same floor for everybody, and the turn in which
caches are given up.

ComfyUI compares psutil's figures with thresholds at some ten places. Each gets the difference between those figures and what
there is (:func:`beyond_container`), so that host and workers see one number. Nothing is different while no other process is known and
none can know of this one.
"""
from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import admission, claims, limits, moments, registry
from .figures import STALE, last_words, manager
from .provider import DEADLINE, Outcome, Reason, ReleaseRequest

Result = TypeVar("Result")

HEADROOM = "ram:headroom"
"""The key under which a process says how much host memory its output cache keeps free."""

PINS = "ram:pins"
"""The key under which it claims what it is about to lock, beside what it has locked."""

PAUSE = 1.0
"""Seconds for which peers, having given no host memory, are not asked again."""

FRESH = 0.02
"""Seconds for which a reading of what is available counts; it is looked at once for each weight that is pinned."""

_read: tuple[float, int] = (float("-inf"), 0)
_others_headroom: tuple[float, int] = (float("-inf"), 0)
_results: tuple[float, int] = (float("-inf"), 0)
_gave_nothing = {"release_ram": float("-inf"), "release_pins": float("-inf")}


def beyond_container() -> int:
    """By how many bytes psutil's available memory is more than this process and those around it may still use."""
    global _read
    if not admission.active() or limits.upstream() is not None or registry.is_serving():
        return 0
    now = time.monotonic()
    if now - _read[0] > FRESH:
        import psutil
        machine = psutil.virtual_memory().available
        _read = now, max(0, machine - limits.groups.available(machine))
    return _read[1]


def container_free(device: Any, total: float, own: float) -> tuple[float, float]:
    """What get_free_memory reports for a `device` that may be the CPU, given what it has read."""
    if admission.active() and getattr(device, "type", None) == "cpu" and getattr(device, "index", None) is None:
        total = own = max(0, total - beyond_container())
    return total, own


def container_total(device: Any, total: float) -> float:
    """What get_total_memory reports, likewise."""
    if admission.active() and getattr(device, "type", None) == "cpu" and getattr(device, "index", None) is None:
        return min(total, limits.total())
    return total


def container_cache_sizes(active: float, inactive: float, given: Sequence[float]) -> tuple[float, float]:
    """What the output cache keeps free for running prompts and for others, in GiB; `given` on the command line stays."""
    if not admission.active() or active <= 0:
        return active, inactive
    total = limits.total() / 1024 ** 3
    return (active if len(given) > 0 else min(active, max(2.0, total * 0.10)), inactive if len(given) > 1 else min(inactive, total))


def tell_headroom(size: int) -> None:
    """The output cache of this process keeps `size` bytes free from now on: others lock no memory below that floor either."""
    if admission.active() and size != claims.current.own(HEADROOM):
        claims.current.write(HEADROOM, size)


def floor(own: float) -> float:
    """The bytes that stay free when memory is locked, the same in every process; `own` is this one's headroom."""
    global _others_headroom
    now = time.monotonic()
    if now - _others_headroom[0] > FRESH:
        _others_headroom = now, max((usage.claimed or 0 for _, usage in last_words(HEADROOM)), default=0)
    return max(max(own, _others_headroom[1]) / 2, limits.FLOOR)


def admit(size: float) -> None:
    """`size` bytes of host memory are about to be taken at once: have peers make room for what is missing of them."""
    if registry.entries:
        missing = size + floor(manager().comfy.memory_management.RAM_CACHE_HEADROOM) - limits.available()
        if missing > 0:
            missing -= ask("release_pins", missing)
        if missing > 0:
            ask("release_ram", missing)


def peers_results_too(ram_release: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates RAMPressureCache.ram_release: an entry that cannot be measured is dropped instead of ending the prompt worker,
    and when this cache has nothing left to give, idle peers give up results of theirs."""
    @functools.wraps(ram_release)
    def release(cache: Any, target: float, *args: Any, **kwargs: Any) -> Any:
        try:
            freed = ram_release(cache, target, *args, **kwargs)
        except Exception as error:
            if not _drop_unmeasurable(cache, error):
                raise
            freed = ram_release(cache, target, *args, **kwargs)
        if registry.entries and kwargs.get("free_active", args[0] if args else False) and not kwargs.get("min_entry_size", 0):
            missing = target - limits.available()
            if missing > 0:
                ask("release_ram", missing)
        return freed
    return release


def weigh_outputs(outputs: Any, size: float, score: float) -> tuple[float, float]:
    """The `size` and the `score` that the output cache gives an entry, with what it does not see: tensors in dictionaries, and
    what stays in another process for the entry's sake (``held_ram`` of an object, in bytes)."""
    if not admission.active():
        return size, score
    more = _hidden(outputs, False, 0)
    return size + more, score + more


def results() -> int:
    """Bytes of host memory in the cached results of this process, as its output cache counts them, a second ago at most. On
    the execution thread."""
    global _results
    now = time.monotonic()
    if now - _results[0] > 1.0:
        entries = getattr(getattr(getattr(moments.executor, "caches", None), "outputs", None), "cache", None)
        _results = now, sum(_hidden(entry.outputs, True, 0) for entry in list((entries or {}).values()) if _measurable(entry.outputs))
    return _results[1]


def ask(method: str, missing: float) -> int:
    """Ask idle peers, whoever holds most first, for `missing` bytes of host memory; gives how much they say they have freed."""
    if not registry.entries or registry.is_serving() or time.monotonic() - _gave_nothing[method] < PAUSE:
        return 0
    kind = Reason.PINS if method == "release_pins" else Reason.RAM
    claimed = {entry: usage for entry, usage, _ in registry.count("usage", PINS)}
    held = []
    for entry, ram, age in registry.count("ram"):
        usage = claimed.get(entry)
        if entry.gone or usage is None or usage.busy is not False or ram is None or age > STALE:
            continue
        size = max((ram.pinned or 0) + (ram.registered or 0), usage.claimed or 0) if kind is Reason.PINS else ram.outputs
        if size != 0:
            held.append((size or 0, entry))
    held.sort(key=lambda pair: -pair[0])
    deadline, ticket, given = time.monotonic() + DEADLINE, uuid.uuid4().hex, 0
    for held_bytes, entry in held:
        left = int(missing - given)
        if left <= 0:
            break
        request = ReleaseRequest(device=None, bytes=left, reason=kind, deadline=deadline, ticket=ticket)
        receipt = registry.ask(method, [(entry, request)])[0]
        if receipt is not None:
            given += held_bytes if receipt.outcome is Outcome.GONE else receipt.freed
    if not given:
        _gave_nothing[method] = time.monotonic()
    return given


def _hidden(outputs: Any, inside: bool, depth: int) -> int:
    if isinstance(outputs, dict):
        return sum(_hidden(value, True, depth + 1) for value in outputs.values()) if depth < 8 else 0
    if isinstance(outputs, (list, tuple)):
        return sum(_hidden(value, inside, depth + 1) for value in outputs) if depth < 8 else 0
    if inside and hasattr(outputs, "element_size") and getattr(getattr(outputs, "device", None), "type", None) == "cpu":
        return int(outputs.numel() * outputs.element_size())
    held = getattr(outputs, "held_ram", 0)
    return held if type(held) is int else 0


def _drop_unmeasurable(cache: Any, error: Exception) -> bool:
    bad = [key for key, entry in list(cache.cache.items()) if not _measurable(entry.outputs)]
    for key in bad:
        del cache.cache[key]
        for table in (cache.used_generation, cache.timestamps, cache.children):
            table.pop(key, None)
    if bad:
        logging.warning("Dropped %d cached results that cannot be measured (%s: %s); their nodes run again when needed",
                        len(bad), type(error).__name__, error)
    return bool(bad)


def _measurable(outputs: Any) -> bool:
    if isinstance(outputs, (list, tuple)):
        return all(_measurable(output) for output in outputs)
    try:
        for name in ("is_dynamic", "patcher", "device"):
            getattr(outputs, name, None)
        return True
    except Exception:
        return False
