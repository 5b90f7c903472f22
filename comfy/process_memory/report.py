"""Every process in words and numbers: ``/system_stats``, and the memory summary after an out-of-memory error."""
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from . import devices, own, registry
from .figures import STALE
from .provider import DeviceUsage, RamUsage

MIB = 1024 * 1024


def processes() -> list[dict[str, Any]]:
    """This process and every other one that is known, from local state only; sizes are bytes, None is unknown.

    `state` is idle, busy (a prompt runs in it, also while that prompt waits for another process), silent (its last word is
    old, or it does not answer), not confirmed (it has not said whether it unloaded) or gone. `age` is in seconds.
    """
    places = [(device, place) for device in own.all_devices() if (place := devices.key(device)) is not None]
    used = own.used_devices()
    here: list[tuple[str, DeviceUsage | None]] = [(place, own.usage(device)) for device, place in places if device in used]
    rows = [_row(os.getpid(), own.name, "busy" if own.busy() else "idle", own.ram(), here, 0.0)]
    usages = {place: {count.entry: count for count in registry.count("usage", place)} for _, place in places}
    for entry, ram, ram_age in registry.count("ram"):
        counts = [(place, usages[place][entry]) for _, place in places if entry in usages[place]]
        ages = [count.age + count.value.age for _, count in counts if count.value is not None]
        age = max(ages, default=None if ram is None else ram_age + ram.age)
        known = [count.value for _, count in counts]
        holds = any(usage is None or usage.resident is None or usage.resident for usage in known)
        stale = age is None or age > STALE
        at_work = not stale and any(usage is not None and usage.busy for usage in known)
        if entry.gone:
            state = "gone"
        elif entry.unconfirmed and holds and not at_work:
            state = "not confirmed"
        else:
            state = "silent" if stale or not entry.ready else ""
        rows.append(_row(entry.pid, entry.name, state, ram, [(place, count.value) for place, count in counts], age))
    return rows


def with_processes(debug_memory_summary: Callable[[], str]) -> Callable[[], str]:
    """Decorates debug_memory_summary: then it has a line for each process, if there are several."""
    @functools.wraps(debug_memory_summary)
    def summary() -> str:
        text = debug_memory_summary()
        if not registry.entries:
            return text
        return "\n".join([text, *(line for row in processes() for line in _lines(row))])
    return summary


def _row(pid: int | None, name: str, state: str, ram: RamUsage | None, usages: list[tuple[str, DeviceUsage | None]],
         age: float | None) -> dict[str, Any]:
    known = [usage for _, usage in usages if usage is not None]
    if not state:
        state = "idle" if all(usage.busy is False for usage in known) else "busy"
    return {
        "pid": pid, "name": name, "state": state, "age": age,
        "ram": None if ram is None else ram.resident,
        "pinned": None if ram is None else ram.pinned,
        "devices": [{"device": place, **{figure: getattr(usage, figure, None) for figure in
                     ("resident", "cached", "fixed", "scratch", "claimed", "committed", "reclaimable")},
                     "vram": None if usage is None or usage.resident is None else in_use(usage)}
                    for place, usage in usages],
    }


def in_use(usage: DeviceUsage) -> int:
    """What a process is known to take of a card's memory."""
    return sum(size or 0 for size in (usage.resident, usage.cached, usage.fixed, usage.scratch))


def _lines(row: dict[str, Any]) -> list[str]:
    who = f"{row['name']} (pid {row['pid']}, {row['state']})"
    return [f"{who} on {figures['device']}: {_mb(figures['vram'])} in use, {_mb(figures['cached'])} of it cached, "
            f"{_mb(figures['claimed'])} claimed, {_mb(figures['reclaimable'])} reclaimable" for figures in row["devices"]]


def _mb(size: int | None) -> str:
    return "unknown" if size is None else f"{size // MIB} MB"
