"""Waiting for one's turn on a card, where processes work on the same prompts.

In one process nodes run one after the other, and a model that the last one used is there to be evicted. In several they
overlap: what one needs may be in use in another, for as long as its node runs. Going on with a part of the model, or
running out of memory, would fail a workflow that works in one process; so a load waits until what it needs is free or not
in use, as it would have waited for the node before it. Only for processes that say so (``patience``), and never for one
that waits itself: of two that wait for each other the one with the lower pid goes on.
"""
from __future__ import annotations

import logging
import os
import time
from typing import Any

from . import arithmetic, moments, registry
from .figures import manager

LOOK = 0.02
"""Seconds between two looks."""


def wait(device: Any, place: str, required: int, began: float | None = None) -> None:
    """Return once `required` bytes of `device` are free or not in use by anybody, or nobody is left to wait for.

    On the execution thread, while nothing is half done. Bounded by the patience of the provider that is waited for,
    counted from `began` (``time.monotonic()``, default now), and by an interrupt.
    """
    began = time.monotonic() if began is None else began
    said = False
    try:
        while (busy := in_the_way(device, place, required, began)) and not manager().processing_interrupted():
            if not said:
                logging.info("Process memory: a load waits until %s is done with what it uses on %s", busy[0], place)
                said = True
            moments.waiting(LOOK)
    finally:
        if said:
            moments.waiting(0.0)
            logging.debug("Process memory: the load went on after %.2f s", time.monotonic() - began)


def in_the_way(device: Any, place: str, required: int, began: float) -> list[registry.Entry]:
    """For whom a load of `required` bytes that waits since `began` should wait now."""
    busy = _busy(place, time.monotonic() - began)
    return busy if busy and not _enough(device, place, required) else []


def _busy(place: str, waited: float) -> list[registry.Entry]:
    """Who is worth waiting for."""
    if all(entry.patience <= waited for entry in registry.entries):
        return []
    waits = {entry: value for entry, value, age in registry.count("waiting") if age == 0.0}
    return [entry for entry, usage, age in registry.count("usage", place)
            if entry.patience > waited and usage is not None and age == 0.0 and usage.busy and usage.resident
            and (not waits.get(entry) or (entry.pid or 0) < os.getpid())]


def _enough(device: Any, place: str, required: int) -> bool:
    mm = manager()
    size = mm.get_free_memory(device)
    size += sum(loaded.model_loaded_memory() for loaded in mm.current_loaded_models if loaded.device == device and loaded.model is not None)
    for _, candidates, age in registry.count("candidates", place):
        size += sum(candidate.resident for candidate in candidates or () if age == 0.0 and not candidate.in_use)
    return arithmetic.shortfall(required, size, mm.get_total_memory(device)) == 0
