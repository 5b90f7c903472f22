"""The memory of other processes, as ComfyUI's memory management consults it.

Whoever holds memory in another process registers a :class:`ProcessMemoryProvider` for it. The functions here are
what ComfyUI's own code calls at its decisions. With no provider registered each of them is one test.
"""
from collections.abc import Callable

from . import claims, devices, gates, moments, pins, ram, registry
from .admission import admit, admitting, budget, loaded, node_ended, node_started, take_turn
from .capture import begin_capture, captures_over, end_capture, may_capture
from .control import arrived, arriving, hints
from .gates import for_file, settled_dtype, shared_card
from .ladder import asked, candidates, make_room, rest
from .pager import leave_headroom
from .pins import full, one_ceiling, peers_pins_too, peers_registrations_too, pin_again, pin_shortfall, reserved
from .provider import (API_VERSION, DEADLINE, Candidate, DeviceUsage, Kind, Outcome, ProcessMemoryProvider, RamUsage,
                       Reason, Receipt, ReleaseRequest)
from .ram import cache_sizes, excess, free_ram, headroom, pressed, total_ram, weigh
from .reading import free
from .registry import register as register_process_memory_provider
from .registry import serving
from .registry import unregister as unregister_process_memory_provider
from .report import processes, with_processes
from .retry import noisy_oom_site, oom_site, room_given, start_again
from .scratch import copied, copying, shared_counter
from .sizers import batch, make_way, ready, reclaimable, room_for, sizing, within
from .unloading import everywhere, release_caches

__all__ = [
    "API_VERSION", "Candidate", "DEADLINE", "DeviceUsage", "Kind", "Outcome", "ProcessMemoryProvider",
    "RamUsage", "Reason", "Receipt", "ReleaseRequest", "admit", "admitting", "arrived", "arriving", "asked",
    "batch", "begin_capture", "budget", "cache_sizes", "candidates", "captures_over", "changed", "claims",
    "copied", "copying", "devices", "end_capture", "everywhere", "excess", "for_file", "free",
    "free_ram", "full", "gates", "headroom", "hints", "leave_headroom", "loaded", "make_room", "make_way",
    "may_capture", "moments", "node_ended", "node_started", "noisy_oom_site", "on_change", "one_ceiling",
    "oom_site", "peers_pins_too", "peers_registrations_too", "pin_again", "pin_shortfall", "pins", "pressed",
    "processes", "ram", "ready", "reclaimable", "register_process_memory_provider", "registry",
    "release_caches", "reserved", "rest", "room_for", "room_given", "serving", "settled_dtype", "shared_card",
    "shared_counter", "sizing", "start_again", "take_turn", "total_ram", "unregister_process_memory_provider", "weigh", "with_processes",
    "within",
]

on_change: Callable[[], None] | None = None
"""Called on the execution thread after what this process holds has changed; set by the runtime that publishes it."""


def changed() -> None:
    """What this process holds has changed."""
    gates.settle()
    pins.settle()
    if on_change is not None:
        on_change()
