"""Giving memory back to other processes, with ComfyUI's own manager, on the execution thread.

A receipt says what has really left the device: the process's footprint before and after its allocator let go.
"""
from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import psutil

from comfy.process_memory import admission, devices, registry
from comfy.process_memory.figures import allocator, manager
from comfy.process_memory.own import all_devices, loaded_models, used_devices
from comfy.process_memory.provider import NOTHING, Outcome, Receipt

from .publish import CACHE_ID, candidate_id, footprint, in_use, resident_set
from .safepoint import Ask, Moment

EVERYTHING = 1 << 62


def give_back(ask: Ask, moment: Moment, executor: Any) -> Receipt | Moment:
    """Do what another process asked for; or the moment to wait for, if it cannot be done at this one.

    `executor` is ComfyUI's PromptExecutor, None where there is none. Nothing done here asks other processes in turn, and
    a request that this process has made itself and that has come back to it is answered NOTHING.
    """
    with registry.serving(ask.ticket) as fresh:
        if not fresh:
            return NOTHING
        if ask.kind == "release":
            return release(ask, moment)
        if moment < Moment.BOUNDARY:
            return Moment.BOUNDARY
        if ask.kind == "unload":
            return unload(ask)
        if ask.kind == "release_pins":
            return release_pins(ask)
        if moment < Moment.IDLE:
            return Moment.IDLE
        return reset(ask, executor) if ask.kind == "reset" else release_ram(ask, executor)


def release(ask: Ask, moment: Moment) -> Receipt | Moment:
    """One model, the allocator's cache, or whatever serves best until it is enough."""
    device = torch_device(ask.device)
    if device is None:
        return NOTHING
    models = list(loaded_models(device))
    if ask.candidate not in (None, CACHE_ID):
        models = [m for m in models if candidate_id(m) == ask.candidate]
        if not models:
            return NOTHING
    elif ask.candidate == CACHE_ID:
        models = []
    spared = [m for m in models if moment == Moment.STEP and in_use(m)]
    models = [m for m in models if all(m is not s for s in spared)]
    if spared and not models:
        return Moment.BOUNDARY
    ask.begun()
    before = footprint(device)
    if ask.candidate in (None, CACHE_ID) and _cached(device):
        manager().soft_empty_cache()
        admission.claim_again(device)
    for loaded in in_order(models):
        missing = ask.bytes - (before - footprint(device))
        if missing <= 0:
            break
        if _unload(loaded, missing):
            manager().soft_empty_cache()
            admission.claim_again(device)
    return receipt(device, before)


def unload(ask: Ask) -> Receipt:
    """Every model, on one device or on all."""
    ask.begun()
    wanted = used_devices() if ask.device is None else [d for d in (torch_device(ask.device),) if d is not None]
    freed = resident = 0
    for device in wanted:
        before = footprint(device)
        models = list(loaded_models(device))
        for loaded in models:
            _unload(loaded, EVERYTHING)
        if models or _cached(device):
            manager().soft_empty_cache()
        done = receipt(device, before)
        freed += done.freed
        resident += done.resident or 0
    return Receipt(outcome=Outcome.FREED if freed else Outcome.NOTHING, freed=freed, resident=resident)


def release_pins(ask: Ask) -> Receipt:
    """Page-locked host memory of models that are paged."""
    free_pins = getattr(manager(), "free_pins", None)
    if free_pins is None:
        return NOTHING
    ask.begun()
    return _ram_receipt(int(free_pins(ask.bytes)))


def release_ram(ask: Ask, executor: Any) -> Receipt:
    """Cached results, oldest first, as ComfyUI gives them up when its own memory is short."""
    outputs = getattr(getattr(executor, "caches", None), "outputs", None)
    give = getattr(outputs, "ram_release", None)
    if give is None:
        return NOTHING
    ask.begun()
    before = resident_set()
    give(psutil.virtual_memory().available + ask.bytes, free_active=True)
    return _ram_receipt(before - resident_set())


def reset(ask: Ask, executor: Any) -> Receipt:
    """What is remembered between prompts."""
    if executor is None:
        return NOTHING
    ask.begun()
    before = resident_set()
    executor.reset()
    gc.collect()
    manager().soft_empty_cache()
    return _ram_receipt(before - resident_set())


def receipt(device: Any, before: int) -> Receipt:
    """What has left `device` since its footprint was `before`, and the weights that are left."""
    freed = before - footprint(device)
    resident = sum(int(m.model_loaded_memory()) for m in loaded_models(device))
    return Receipt(outcome=Outcome.FREED if freed > 0 else Outcome.NOTHING, freed=max(0, freed), resident=resident)


def in_order(models: list[Any]) -> Iterator[Any]:
    """Most offloaded first, then fewest references, then smallest: the order in which ComfyUI unloads its models."""
    ranked = [(-m.model_offloaded_memory(), sys.getrefcount(m.model), m.model_memory(), i) for i, m in enumerate(models)]
    for *_, i in sorted(ranked):
        yield models[i]


def torch_device(key: str | None) -> Any:
    """This process's ``torch.device`` for a device key; None if it does not know that device."""
    for device in (*all_devices(), *(m.device for m in manager().current_loaded_models)):
        if key is not None and devices.key(device) == key:
            return device
    return None


def _unload(loaded: Any, missing: int) -> bool:
    """Whether anything was to be unloaded."""
    if loaded.model is None or not loaded.model_loaded_memory():
        return False
    if loaded.model_unload(missing):
        # By identity: entries compare equal when their models have been collected.
        current = manager().current_loaded_models
        for i, entry in enumerate(current):
            if entry is loaded:
                del current[i]
                break
    return True


def _cached(device: Any) -> bool:
    found = allocator(device)
    return found is not None and found[0] > found[1]


def _ram_receipt(freed: int) -> Receipt:
    return Receipt(outcome=Outcome.FREED, freed=freed) if freed > 0 else NOTHING
