"""What this process holds, as it goes into its slot of the ledger. Read on the execution thread, from ComfyUI's own books.

Bytes are counted once. Weights are on a device in one of two ways: in torch's allocator, or in pages that aimdo maps
itself; ``loaded_size()`` of a model that aimdo pages is both together. So `allocator` is what torch has reserved, `pager`
is what aimdo has mapped beside that (weights and cast buffers), and they add up to what the process occupies.
aimdo's own total is not used: where its hooks are installed it contains torch's blocks.
"""
from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

from comfy.process_memory import devices, pins, scratch
from comfy.process_memory import ram as ram_budget
from comfy.process_memory.figures import allocator, manager
from comfy.process_memory.own import used_devices
from comfy.process_memory.provider import Candidate, DeviceUsage, Kind, RamUsage

from .records import DeviceReport, Report

CACHE_ID = "0"
"""The candidate that is the allocator's cache; models count from 1."""

_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_id = itertools.count(1)
_left: set[int] = set()     # ids of entries that an earlier node of the prompt has used


def candidate_id(loaded: Any) -> str:
    """A name for an entry of ``current_loaded_models`` that no other one ever had in this process."""
    patcher = loaded.model
    number = _ids.get(patcher)
    if number is None:
        number = _ids[patcher] = next(_next_id)
    return str(number)


def node_began() -> bool:
    """A node begins: what earlier ones have used it does not use, until it loads it. Whether that changes anything."""
    before = len(_left)
    _left.update(id(loaded) for loaded in manager().current_loaded_models if loaded.currently_used)
    return len(_left) != before


def memory_managed() -> None:
    """ComfyUI's memory management has been at work: its own marks say what is in use."""
    _left.clear()


def in_use(loaded: Any) -> bool:
    """Whether the running node uses an entry of ``current_loaded_models``."""
    return bool(loaded.currently_used) and id(loaded) not in _left


def report(busy: bool) -> Report:
    """What this process holds now. `busy`: what the running prompt uses is not on offer."""
    by_device: dict[Any, list[Any]] = {device: [] for device in used_devices()}
    for loaded in list(manager().current_loaded_models):
        if loaded.model is not None:
            by_device.setdefault(loaded.device, []).append(loaded)
    reports = [device_report(device, loaded, busy) for device, loaded in by_device.items()]
    return Report(ram=ram(), devices=tuple(r for r in reports if r is not None))


def device_report(device: Any, loaded_models: list[Any], busy: bool) -> DeviceReport | None:
    """What this process holds on a ``torch.device``; None for RAM."""
    key = devices.key(device)
    if key is None:
        return None
    candidates = []
    resident = committed = idle = weights = 0
    for loaded in loaded_models:
        refs = sys.getrefcount(loaded.model)      # before anything here refers to it: as free_memory counts
        patcher = loaded.model
        held, size = int(patcher.loaded_size()), int(patcher.model_size())
        dynamic = bool(patcher.is_dynamic())
        used = busy and in_use(loaded)
        candidates.append(Candidate(id=candidate_id(loaded), name=type(patcher.model).__name__, resident=held, size=size,
                                    refs=refs, in_use=used))
        resident += held
        committed += size
        idle += 0 if used else held
        weights += int(getattr(patcher.model, "model_loaded_weight_memory", held)) if dynamic else held
    reserved, live = allocator(device) or (None, None)
    cached = None if reserved is None or live is None else max(0, reserved - live)
    buffers = pager_buffers(device)
    if cached:
        candidates.append(Candidate(id=CACHE_ID, name="allocator cache", kind=Kind.CACHE, resident=cached, size=cached))
    usage = DeviceUsage(resident=resident, cached=cached, committed=committed, reclaimable=idle + (cached or 0),
                        scratch=None if live is None else max(0, live - weights) + buffers)
    return DeviceReport(key=key, usage=usage, candidates=tuple(candidates), allocator=reserved, pager=resident - weights + buffers,
                        total=int(manager().get_total_memory(device)))


def pager_buffers(device: Any) -> int:
    """What the cast buffers that aimdo maps occupy; torch's allocator does not know of them."""
    buffers = list(getattr(manager(), "STREAM_AIMDO_CAST_BUFFERS", {}).values())
    return sum(int(b.size()) for b in buffers if getattr(b, "device", None) == device.index)


def footprint(device: Any) -> int:
    """What this process occupies on a device, as exactly as it is to be known: torch's blocks and the pager's, or where
    the backend says nothing of blocks, the weights."""
    models = [m for m in manager().current_loaded_models if m.device == device and m.model is not None]
    resident = sum(int(m.model.loaded_size()) for m in models)
    found = allocator(device)
    if found is None:
        return resident
    paged = sum(int(m.model.loaded_size()) - int(m.model.model.model_loaded_weight_memory) for m in models
                if m.model.is_dynamic())
    return found[0] + paged + pager_buffers(device)


def ram() -> RamUsage:
    """What this process holds in host memory. ComfyUI counts all that is page-locked in one number."""
    return RamUsage(resident=resident_set(), pinned=pins.tell(), registered=0,
                    backups=scratch.backups(), outputs=ram_budget.results())


def pinned() -> int:
    """Bytes of page-locked host memory; none before there is a manager."""
    return max(0, int(getattr(sys.modules.get("comfy.model_management"), "TOTAL_PINNED_MEMORY", 0)))


def resident_set() -> int:
    """The resident set of this process in bytes."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as f:
            return int(f.read(128).split()[1]) * PAGE
    except OSError:
        import psutil
        return int(psutil.Process().memory_info().rss)


def _page_size() -> int:
    try:
        import resource
        return resource.getpagesize()
    except ImportError:
        return 4096


PAGE = _page_size()
