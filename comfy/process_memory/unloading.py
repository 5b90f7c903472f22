"""Unloading in every process: the Free button, the out-of-memory branch, the end of a prompt without smart memory."""
from __future__ import annotations

import functools
import logging
import sys
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from comfy import process_memory

from . import arithmetic, devices, ladder, own, registry
from .figures import manager
from .provider import DEADLINE, DeviceUsage, Kind, Outcome, Reason, ReleaseRequest

Result = TypeVar("Result")


def everywhere(unload_all_models: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates unload_all_models: then every other process unloads too, on every device that this one knows."""
    @functools.wraps(unload_all_models)
    def unload(*args: object, **kwargs: object) -> Result:
        if not registry.entries or registry.is_serving():
            return unload_all_models(*args, **kwargs)
        with ladder.alone():
            result = unload_all_models(*args, **kwargs)
        process_memory.changed()
        unload_peers(Reason.USER_FREE if sys.exc_info()[0] is None else Reason.OOM)
        return result
    return unload


def unload_peers(reason: Reason) -> None:
    """Ask every peer that holds something to unload its models, all at once with one deadline, and say what stays."""
    deadline = time.monotonic() + DEADLINE
    ticket = uuid.uuid4().hex
    requests: list[tuple[registry.Entry, ReleaseRequest]] = []
    held: list[int] = []
    for device in own.all_devices():
        place = devices.key(device)
        if place is None:
            continue
        total = int(manager().get_total_memory(device))
        for entry, usage, _ in registry.count("usage", place):
            size = holding(usage, total)
            if size and not entry.gone:
                held.append(size)
                requests.append((entry, ReleaseRequest(device=place, bytes=size, reason=reason, deadline=deadline, ticket=ticket)))
    for entry in registry.entries:
        entry.unconfirmed = False
    receipts = registry.ask("unload", requests)
    for (entry, request), size, receipt in zip(requests, held, receipts):
        if receipt is None:
            entry.unconfirmed = True
            logging.warning("Process memory: %s has not confirmed that it unloaded its models from %s", entry, request.device)
        elif receipt.outcome is Outcome.BUSY:
            entry.unconfirmed = True
            logging.warning("Process memory: %s is busy and keeps its models on %s", entry, request.device)
        else:
            logging.debug("Process memory: %s unloaded %d MB from %s", entry, arithmetic.freed(receipt, size) // (1024 * 1024), request.device)


def release_caches() -> None:
    """Ask idle peers for what their allocators keep and do not use. Called now and then, when this process does the same."""
    if not registry.entries or registry.is_serving():
        return
    deadline = time.monotonic() + ladder.patience
    requests = []
    for device in own.all_devices():
        place = devices.key(device)
        if place is not None:
            for peer in ladder.Shortfall(device, place, 0, Reason.IDLE).idle():
                if peer.candidate.kind is Kind.CACHE:
                    requests.append((peer.entry, ReleaseRequest(device=place, bytes=peer.candidate.resident, reason=Reason.IDLE,
                                                                candidate=peer.candidate.id, deadline=deadline)))
    registry.ask("release", requests)


def holding(usage: DeviceUsage | None, total: int) -> int:
    """How much a process may have to give on a card of `total`; what is unknown is the whole card."""
    if usage is None or usage.resident is None:
        return total
    return usage.resident + (usage.cached or 0)
