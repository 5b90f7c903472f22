"""The memory of other processes, as ComfyUI's memory management consults it.

Whoever holds memory in another process registers a :class:`ProcessMemoryProvider` for it. The functions here are
what ComfyUI's own code calls at its decisions. With no provider registered each of them is one test.
"""
# ruff: noqa: F401  what is imported is called from ComfyUI's files
from collections.abc import Callable

from . import claims, devices, registry
from .admission import claim_load, claims_memory, limit_budget, model_loaded, node_ended, node_started, wait_for_turn
from .capture import begin_capture, end_capture, may_capture, wait_for_captures
from .control import claim_network, hint_memory, settle_network
from .copies import admit_copy, copy_loaded, shared_counter
from .gates import for_file, settled_dtype, shared_card
from .interrupts import tell_interrupt
from .ladder import ask_busy_peers, ask_peer, make_room, peer_candidates
from .pager import set_pager_headroom
from .pins import one_pin_ceiling, peers_pins_too, peers_registrations_too, pin_again, pin_shortfall, pins_full, reserves_pins
from .provider import (API_VERSION, DEADLINE, Candidate, DeviceUsage, Kind, Outcome, ProcessMemoryProvider, RamUsage,
                       Reason, Receipt, ReleaseRequest)
from .ram import beyond_container, container_cache_sizes, container_free, container_total, peers_results_too, tell_headroom, weigh_outputs
from .reading import left_by_peers
from .registry import register as register_process_memory_provider
from .registry import serving
from .registry import unregister as unregister_process_memory_provider
from .report import processes, with_processes
from .retry import asks_peers_on_oom, asks_peers_on_oom_same_noise, peers_made_room, start_over_if_peers_made_room
from .sizers import ask_for_room, batch_size, free_after_asking, free_for_batch, obtainable, reclaimable, room_for_batch
from .unloading import peers_unload_too, release_peers_caches, reset_peers

on_change: Callable[[], None] | None = None
"""Called on the execution thread after what this process holds has changed; set by the runtime that publishes it."""


def changed() -> None:
    """What this process holds has changed."""
    for settle in claims.settlers:
        settle()
    if on_change is not None:
        on_change()
