"""Readings that several decisions need: this process's manager, and what others have a right to."""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

from . import arithmetic, devices, registry
from .provider import DeviceUsage

STALE = 10.0
"""Seconds for which the last word of a provider that does not answer still counts."""

here = threading.local()


def manager() -> Any:
    """comfy.model_management, which imports this package and so cannot be imported by it."""
    return sys.modules["comfy.model_management"]


def last_words(place: str) -> Iterator[tuple[registry.Entry, DeviceUsage]]:
    """What each process says that it holds under the key `place`, without those that have ended or have been silent for too long."""
    for entry, usage, age in registry.count("usage", place):
        if usage is not None and age <= STALE and not entry.gone:
            yield entry, usage


def others(device: Any, place: str) -> int:
    """Bytes of a card that this process must leave to others and that its free figure does not show."""
    whole = devices.whole_card(device)
    size = 0
    for _, usage in last_words(place):
        size += arithmetic.charged_claim(usage)
        if not whole:
            size += arithmetic.charged_holding(usage, manager().get_total_memory(device))
    return size


def allocator(device: Any) -> tuple[int, int] | None:
    """What this process's allocator has reserved of `device`, and what of that it has given out; None where the backend does not say."""
    mm = manager()
    if device.type == "mps" or getattr(mm, "directml_enabled", False):
        return None
    here.raw = True
    try:
        reserved = int(mm.get_total_memory(device, torch_total_too=True)[1])
        return reserved, int(reserved - mm.get_free_memory(device, torch_free_too=True)[1])
    finally:
        here.raw = False


def own_bytes(device: Any) -> int | None:
    """What this process's allocator has given out on `device`; None where the backend does not say."""
    found = allocator(device)
    return None if found is None else found[1]
