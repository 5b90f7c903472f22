"""The sums behind the decisions: pure functions over plain numbers. Bytes throughout."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from .provider import Candidate, DeviceUsage, Kind, Outcome, Receipt

T = TypeVar("T")

SENTINEL = 1e18
"""Amounts from here on mean "everything" (callers write 1e30 and 1e32), not a number of bytes."""

FULL = 0
"""The partial load budget by which load_models_gpu means the whole model."""

LEAST = 0.1
"""The partial load budget by which it means as little as the model can run with."""

PEER = 1 << 40
"""Above every index into a list of models: peers' places in the eviction order count from here."""


def clamp(size: float, limit: float) -> int:
    """`size` as whole bytes, rounded up, from 0 to `limit`. Infinite and sentinel sizes are `limit`; nan is 0."""
    if not size > 0:
        return 0
    return int(limit) if size >= limit else math.ceil(size)


def shortfall(required: float, free: float, total: float) -> int:
    """Bytes of a card of `total` that are missing to have `required` of it free."""
    return max(0, clamp(required, total) - clamp(free, total))


def rank(candidate: Candidate, place: int, own_first: bool = False) -> tuple[float, int, int, int]:
    """The sort key of a peer's candidate among the entries of free_memory's ladder.

    Those are (-offloaded, references, size, index); `place` stands for the index and puts a peer after an own model
    that is equal otherwise. What an allocator keeps and nobody uses goes before every model. `own_first` puts peers
    after all own models: where those are unloaded anyhow, peers are asked for what is then still missing.
    """
    if own_first:
        first = math.inf
    else:
        first = -math.inf if candidate.kind is Kind.CACHE else -candidate.offloaded
    return first, candidate.refs, candidate.size, PEER + place


def enough(items: Iterable[T], sizes: Iterable[int], missing: int) -> list[T]:
    """The shortest beginning of `items` whose `sizes` add up to `missing`; all of them if they never do."""
    chosen = []
    for item, size in zip(items, sizes):
        if missing <= 0:
            break
        chosen.append(item)
        missing -= size
    return chosen


def freed(receipt: Receipt | None, held: int) -> int:
    """What a receipt counts for: nothing unless it says FREED, and never more than was `held`."""
    if receipt is None or receipt.outcome is not Outcome.FREED:
        return 0
    return min(receipt.freed, held)


def charged_claim(usage: DeviceUsage) -> int:
    """What a process is about to allocate. Where it does not say, its ceiling: all that is meant for the device and not there."""
    if usage.claimed is not None:
        return usage.claimed
    if usage.committed is None or usage.resident is None:
        return 0  # nothing is known to be coming; what is there shows in the card's own figure
    return max(0, usage.committed - usage.resident)


def charged_holding(usage: DeviceUsage, total: int) -> int:
    """What a process holds of a card whose free figure does not show it. Where it does not say, its ceiling."""
    if usage.resident is None:
        return total if usage.committed is None else min(total, usage.committed)
    held = usage.resident + (usage.cached or 0) + (usage.fixed or 0) + (usage.scratch or 0)
    if None in (usage.cached, usage.fixed, usage.scratch):
        held = max(held, usage.committed or 0)
    return min(total, held)


def free_here(total: float, cached: float, others: int) -> float:
    """What is free to this process, given the backend's figure, which includes the `cached` bytes of this process's own
    allocator, and the bytes that `others` have a right to. Its own cache nobody else can take."""
    return max(min(total, cached), total - others)


def granted_claim(wanted: Iterable[float], available: float) -> int:
    """What may be claimed of `available`, so that what is resident and claimed never passes the card."""
    return min(clamp(sum(wanted), SENTINEL), clamp(available, SENTINEL))


def granted_budget(budget: float, offloaded: int, available: float, spare: float, contended: bool) -> float:
    """The partial load budget for a model of which `offloaded` bytes are not on the device yet.

    `available` is what others have left of the card, `spare` that without what inference needs at least. Never above
    `budget`, where 0 is the whole model. Unless others have claims (`contended`), a whole model stays a whole model:
    that it does not fit is then this process's own affair.
    """
    least = max(LEAST, spare)
    if budget == FULL:
        return least if contended and offloaded > available else FULL
    return min(budget, least) if budget > LEAST else budget


def still_to_come(claimed: int, base: int, now: int) -> int:
    """What is left of a claim after this process has grown from `base` to `now` bytes on the device."""
    return max(0, claimed - max(0, now - base))


def charged_commitment(usage: DeviceUsage, total: float) -> int:
    """What a process has committed of a card of `total`, offloaded parts included. Where it does not say, its ceiling."""
    if usage.committed is None and usage.resident is None:
        return int(total)
    return max(usage.committed or 0, usage.resident or 0)


def gate(size: float, total: float, least: float, committed: float) -> float:
    """What may be spent on the weights of one model, when a card of `total` allows `size` and others have `committed` some.

    `size` is a share of the card without the `least` that inference needs; the share of what others have not committed
    takes its place. Never above `size`.
    """
    share = (size + least) / total if total else 0.0
    return min(size, size - share * committed)
