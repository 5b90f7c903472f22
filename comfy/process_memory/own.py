"""What this process holds, in the same words as it hears from others.

Read from ComfyUI's list of loaded models, on any thread: the list is copied first, since the execution thread changes it.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import admission, claims, devices
from .figures import allocator, manager
from .provider import DeviceUsage, RamUsage

name = "ComfyUI"
"""This process's name for people; a runtime may set it."""

busy: Callable[[], bool] = admission.node_running
"""Whether this process has work; a runtime sets what it tells other processes."""


def usage(device: Any) -> DeviceUsage:
    """What this process holds on a ``torch.device``.

    `fixed` is unknown: ComfyUI keeps no books on it.
    """
    from . import scratch
    resident = committed = idle = 0
    for model in loaded_models(device):
        size = int(model.model_loaded_memory())
        resident += size
        committed += int(model.model_memory())
        idle += 0 if model.currently_used and admission.node_running() else size
    found = allocator(device)
    cached = None if found is None else max(0, found[0] - found[1])
    place = devices.key(device)
    return DeviceUsage(resident=resident, cached=cached, claimed=0 if place is None else claims.current.own(place),
                       scratch=scratch.on_device(device), committed=committed, reclaimable=idle + (cached or 0), busy=admission.node_running())


def ram() -> RamUsage:
    """What this process holds in host memory."""
    import psutil

    from . import scratch
    return RamUsage(resident=psutil.Process(os.getpid()).memory_info().rss,
                    pinned=int(getattr(manager(), "TOTAL_PINNED_MEMORY", 0)), backups=scratch.backups())


def loaded_models(device: Any) -> Iterator[Any]:
    """The entries of ComfyUI's list on `device` whose model still exists, and does until the next one is asked for."""
    for entry in list(manager().current_loaded_models):
        model = entry.model     # an entry refers to it weakly, and another thread may be about to let go of it
        if model is not None and entry.device == device:
            yield entry


def used_devices() -> list[Any]:
    """Those of :func:`all_devices` that this process loads to or has something on.

    Asking any other for its figures would open a context there: hundreds of megabytes of a card that this process does not use.
    """
    mm = manager()
    every = all_devices()
    if len(every) < 2:
        return every
    known = [mm.get_torch_device(), *(entry.device for entry in list(mm.current_loaded_models))]
    return [device for device in every if device in known or _allocated(device)]


def _allocated(device: Any) -> bool:
    """Whether torch's allocator has anything on `device`, or does not say so by itself."""
    statistics = getattr(getattr(sys.modules.get("torch"), device.type, None), "memory_stats", None)
    return statistics is None or bool(statistics(device).get("reserved_bytes.all.current", 0))


def all_devices() -> list[Any]:
    """The devices that this process may load models to; older releases have only the current one."""
    mm = manager()
    return list(getattr(mm, "get_all_torch_devices", lambda: [mm.get_torch_device()])())
