"""What is free, with other processes in it."""
from __future__ import annotations

from typing import Any

from . import admission, arithmetic, devices, registry
from .figures import here, others


def left_by_peers(device: Any, total: float, cached: float) -> float:
    """What get_free_memory reports, given the backend's figure and the part of it that this process's allocator keeps.

    Others' claims are taken off, and what they hold too where the backend's figure does not show it. Nothing is ever
    added: what others could give back is not free.
    """
    if not registry.entries:
        return total
    place = devices.key(device)
    if place is None or getattr(here, "raw", False):
        return total
    admission.settle(place)
    return arithmetic.free_here(total, cached, others(device, place))
