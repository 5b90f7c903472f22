"""Unloading in every process: the Free button, the out-of-memory branch, the end of a prompt without smart memory."""
from __future__ import annotations

import functools
import logging
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from comfy import process_memory

from . import arithmetic, devices, ladder, limits, own, registry
from .figures import manager
from .provider import DEADLINE, DeviceUsage, Kind, Outcome, Reason, Receipt, ReleaseRequest

Result = TypeVar("Result")


def peers_unload_too(unload_all_models: Callable[..., Result]) -> Callable[..., Result]:
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
    """Ask every peer that holds something to unload its models, each with a deadline, and say what stays.

    All at once; or, where host memory has no room for all that may be copied there, one after another, the smallest first.
    """
    ticket = uuid.uuid4().hex
    wanted: list[tuple[int, registry.Entry, str]] = []
    for device in own.all_devices():
        place = devices.key(device)
        if place is None:
            continue
        for entry, usage, _ in registry.count("usage", place):
            size = holding(usage, device)
            if size and not entry.gone:
                wanted.append((size, entry, place))
    for entry in registry.entries:
        entry.unconfirmed = False
    turns = [wanted]
    if len(wanted) > 1 and sum(size for size, *_ in wanted) > limits.available() - limits.FLOOR:
        turns = [[one] for one in sorted(wanted, key=lambda one: one[0])]
    for turn in turns:
        deadline = time.monotonic() + DEADLINE
        requests = [(entry, ReleaseRequest(device=place, bytes=size, reason=reason, deadline=deadline, ticket=ticket)) for size, entry, place in turn]
        for (entry, request), receipt in zip(requests, registry.ask("unload", requests)):
            _note(entry, request, receipt)


def _note(entry: registry.Entry, request: ReleaseRequest, receipt: Receipt | None) -> None:
    if receipt is None:
        entry.unconfirmed = True
        logging.warning("Process memory: %s has not confirmed that it unloaded its models from %s", entry, request.device)
    elif receipt.outcome is Outcome.BUSY:
        entry.unconfirmed = True
        logging.warning("Process memory: %s is busy and keeps its models on %s", entry, request.device)
    else:
        logging.debug("Process memory: %s unloaded %d MB from %s", entry, arithmetic.freed(receipt, request.bytes) // (1024 * 1024), request.device)


def release_peers_caches() -> None:
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


def reset_peers() -> None:
    """Ask every peer to drop what it remembers between prompts, as this process has done. A busy one keeps it, which is said."""
    if not registry.entries or registry.is_serving():
        return
    deadline, ticket = time.monotonic() + DEADLINE, uuid.uuid4().hex
    requests = [(entry, ReleaseRequest(device=None, bytes=0, reason=Reason.USER_FREE, deadline=deadline, ticket=ticket))
                for entry in registry.entries if registry.overridden(entry, "reset") and not entry.gone]
    for (entry, _), receipt in zip(requests, registry.ask("reset", requests)):
        if receipt is None or receipt.outcome is Outcome.BUSY:
            logging.warning("Process memory: %s keeps what it remembers: it is busy, or does not answer", entry)


def holding(usage: DeviceUsage | None, device: Any) -> int:
    """How much a process may have to give on a card; what is unknown is the whole card."""
    if usage is None or usage.resident is None:
        return int(manager().get_total_memory(device))
    return usage.resident + (usage.cached or 0)
