"""The headroom of aimdo's pager, which evicts the pages of this process only: what others are about to take of the card.

The pager sees how full the card is, and not what another process has been admitted for. While somebody has, this process
leaves what others hold and have claimed, and the reserve, by its own accord.
"""
from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

from . import devices, own, registry
from .figures import last_words, manager

_forwarded: int | None = None
_refused: Any = None        # the aimdo that did not take it


def set_pager_headroom() -> None:
    """Tell the pager what it must leave. Called between nodes and before a load; nothing is told unless it has changed."""
    global _forwarded, _refused
    if not registry.entries and _forwarded is None:
        return
    mm = manager()
    control = sys.modules.get("comfy_aimdo.control")
    if control is None or control is _refused or not mm.comfy.memory_management.aimdo_enabled:
        return
    size = max((_others(device) for device in own.all_devices()), default=0)
    wanted = int(mm.extra_reserved_memory() + size)
    if (size or _forwarded is not None) and wanted != _forwarded:
        try:
            if forward(control, wanted, mm.args):
                _forwarded = wanted
        except Exception as error:      # a version that has it in another way yet: no prompt ends for that
            _refused = control
            logging.warning("Process memory: the pager cannot be told what others have been admitted for: %s: %s", type(error).__name__, error)


def forward(control: Any, size: int, args: Any) -> bool:
    """Set the headroom in aimdo, in the way of its version, and nothing else; False where it has none to set."""
    setter = getattr(control, "set_simple_vram_headroom", None)
    if setter is not None:
        setter(size)
        return True
    known = inspect.signature(control.init).parameters
    if "simple_vram_headroom" not in known:
        return False
    # Once it is initialised, init() only sets what it is given, and the source of pressure whether given or not.
    more = {"nvml_pressure": not getattr(args, "disable_nvml_pressure", False)} if "nvml_pressure" in known else {}
    control.init(simple_vram_headroom=size, **more)
    return True


def _others(device: Any) -> int:
    """What others hold and have claimed of a device, if they have claimed anything; else the pager sees all there is to see."""
    place = devices.key(device)
    if place is None:
        return 0
    claimed = held = 0
    for _, usage in last_words(place):
        claimed += usage.claimed or 0
        held += sum(size or 0 for size in (usage.resident, usage.cached, usage.fixed, usage.scratch))
    return claimed + held if claimed else 0
