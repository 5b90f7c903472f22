"""Admission of a load across processes: check and claim in one step, settle as the bytes appear, end with the load.

The claim of this process on a device is the sum of what its running loads still have to bring there and of what the
running node needs beyond weights. It is only ever raised under the device's lock, after reading what is free without
others' claims, so what is resident and what is claimed never passes the card. The reserve is no part of any claim:
whoever loads last leaves it free, once for the card.
"""
from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from comfy import process_memory

from . import arithmetic, claims, devices, registry, turns
from .figures import allocator, manager, others, own_bytes

Result = TypeVar("Result")

ROUNDING = 1.1
"""By what load_models_gpu multiplies the weights when it makes room for them."""

LOADING_INTERVAL = 0.02
"""Seconds between two looks at how much of a model has arrived."""

TURNS = 8
"""How often a load waits, at most, because a process that it asks has begun a node just then."""

SETTLE_INTERVAL = 0.05
"""Seconds between two looks at how much of a node's claim has appeared."""

_here = threading.local()
_lock = threading.Lock()
_setting = threading.RLock()    # the settling thread lowers what the execution thread raises


class _Load:
    """What one call of load_models_gpu has claimed."""

    def __init__(self) -> None:
        self.depth = 0
        self.need: dict[str, int] = {}        # device -> weights still to come, had there been room for all
        self.weights: dict[str, int] = {}     # device -> weights still to come, as budgeted
        self.beyond: dict[str, int] = {}      # device -> what the caller needs beyond weights
        self.room: dict[str, int] = {}        # device -> what should be free for all of it
        self.devices: dict[str, Any] = {}
        self.coming: _Coming | None = None    # the model that is being loaded


class _Coming:
    """A model on its way to a device."""

    def __init__(self, device: Any, place: str, offloaded: int, size: int, later: int) -> None:
        self.device = device
        self.place = place
        self.offloaded = offloaded            # what of it was not there
        self.size = size                      # what of it is budgeted to come
        self.later = later                    # weights of the same load that come after it
        self.base = own_bytes(device)


class _NodeClaim:
    """What the running node needs on one device beyond weights: it appears bit by bit, and ends with the node.

    What has appeared is what the allocator has given out since, or reserved: what it keeps between two steps is not free for others,
    and it has it at hand for the next.
    """

    def __init__(self, device: Any, size: int) -> None:
        self.device = device
        self.size = size
        self.left = size
        self.base = allocator(device)
        self.looked = 0.0

    def look(self) -> None:
        now = allocator(self.device)
        if now is not None and self.base is not None:
            self.left = arithmetic.still_to_come(self.size, 0, max(a - b for a, b in zip(now, self.base)))


class _Settler:
    """Lowers the claims of loads as their bytes appear, on a thread of its own that sleeps while nothing is loaded.

    Otherwise what has arrived would count twice for others, on the device and as claimed, until the whole model is there.
    """

    def __init__(self) -> None:
        self._loading = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="process memory: settling", daemon=True)
            self._thread.start()
        self._loading.set()

    def _run(self) -> None:
        while self._loading.wait():
            self._loading.clear()
            if _loads:
                self._loading.set()
            arrived()
            time.sleep(LOADING_INTERVAL)


_settler = _Settler()
_loads: set[_Load] = set()
_node: dict[str, _NodeClaim] = {}
_nodes_running = 0


def active() -> bool:
    """Whether anybody could see a claim."""
    return bool(registry.entries) or claims.current.shared


def claims_memory(load_models_gpu: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates load_models_gpu: whatever a call claims ends with it. Calls may nest on one thread."""
    @functools.wraps(load_models_gpu)
    def load(*args: Any, **kwargs: Any) -> Result:
        if not active():
            return load_models_gpu(*args, **kwargs)
        running = getattr(_here, "load", None)
        if running is None:
            running = _here.load = _Load()
            with _lock:
                _loads.add(running)
            _settler.watch()
        running.depth += 1
        try:
            return load_models_gpu(*args, **kwargs)
        finally:
            running.depth -= 1
            if not running.depth:
                _here.load = None
                _end(running)
            process_memory.changed()
    return load


def claim_load(needed: Mapping[Any, float], beyond: float) -> None:
    """A load is about to make room: claim what it `needed` (bytes of weights by device) and what its caller needs
    `beyond` weights, as far as it is there already."""
    load = _running()
    if load is None:
        return
    for device, size in needed.items():
        place = devices.key(device)
        if place is None:
            continue
        total = manager().get_total_memory(device)
        load.devices[place] = device
        load.need[place] = load.need.get(place, 0) + arithmetic.clamp(size, total)
        load.weights[place] = load.need[place]
        load.beyond[place] = max(load.beyond.get(place, 0), arithmetic.clamp(beyond, total))
        load.room[place] = arithmetic.clamp(size * ROUNDING + max(beyond, manager().minimum_inference_memory()), total)
        turns.wait(device, place, load.room[place])
        _claim(device, place)


def wait_for_turn(for_dynamic: bool) -> None:
    """Room has been made, as far as others gave it. A process that was idle when the load began may have begun a node
    before it was asked; then wait until it is done, and make room again."""
    load = _running()
    if load is None:
        return
    began = time.monotonic()
    for place, size in load.room.items():
        device = load.devices[place]
        for _ in range(TURNS):
            if not turns.in_the_way(device, place, size, began):
                break
            with _claiming_nothing(load, place):
                turns.wait(device, place, size, began)
            manager().free_memory(size, device, for_dynamic=for_dynamic)


def top_up(device: Any, place: str) -> None:
    """Room has been made on a device: claim as much of it as the running load needs, before somebody else does."""
    load = _running()
    if load is not None and place in load.need:
        _claim(device, place)


def limit_budget(loaded_model: Any, size: float) -> float:
    """The partial load budget for a model that is about to be loaded: `size`, or less if others have claimed the
    difference since it was worked out; the claim is then what will really come."""
    load = _running()
    place = None if load is None else devices.key(loaded_model.device)
    if load is None or place is None:
        return size
    offloaded = int(loaded_model.model_offloaded_memory())
    with claims.current.hold(place, claims.HOLD) as held:
        available = manager().get_free_memory(loaded_model.device)
        spare = available - manager().minimum_inference_memory()
        contended = others(loaded_model.device, place) > 0
        granted = arithmetic.granted_budget(size, offloaded, available, spare, contended)
        coming = offloaded if granted == arithmetic.FULL else arithmetic.clamp(granted, offloaded)
        later = max(0, load.need.get(place, 0) - offloaded)
        load.coming = _Coming(loaded_model.device, place, offloaded, coming, later)
        load.weights[place] = coming + later
        if held:
            _write(place, available)
        else:
            _lower(place)
    return granted


def arrived() -> None:
    """Take from the claims of running loads what of their models has arrived by now. Any thread."""
    with _lock:
        coming = [(load, load.coming) for load in _loads if load.coming is not None]
    for load, model in coming:
        size = own_bytes(model.device)
        if size is not None and model.base is not None and load.coming is model:
            load.weights[model.place] = arithmetic.still_to_come(model.size, model.base, size) + model.later
            _lower(model.place)


def model_loaded() -> None:
    """The model that :func:`limit_budget` was asked about is on its device, and in the list of loaded models."""
    load = _running()
    if load is None or load.coming is None:
        return
    arrived, load.coming = load.coming, None
    load.need[arrived.place] = max(0, load.need.get(arrived.place, 0) - arrived.offloaded)
    load.weights[arrived.place] = load.need[arrived.place]
    _lower(arrived.place)
    process_memory.changed()


def node_started() -> None:
    """A node begins on this process's execution thread."""
    global _nodes_running
    _nodes_running += 1


def node_ended() -> None:
    """A node has ended, and so has what it needed beyond weights."""
    global _nodes_running
    _nodes_running = max(0, _nodes_running - 1)
    if _node:
        with _lock:
            places = list(_node)
            _node.clear()
        for place in places:
            _lower(place)


def node_running() -> bool:
    """Whether a node is running in this process."""
    return _nodes_running > 0


def settle(place: str) -> None:
    """Take from the running node's claim what has appeared of it; cheap enough for every look at free memory."""
    claim = _node.get(place)
    now = time.monotonic()
    if claim is None or claim.base is None or now - claim.looked < SETTLE_INTERVAL:
        return
    claim.looked = now
    claim.look()
    _lower(place)


def claim_again(device: Any) -> None:
    """The allocator has let go of what it kept, in the middle of a node that will need it again."""
    place = devices.key(device)
    claim = None if place is None else _node.get(place)
    if place is not None and claim is not None:
        claim.look()
        _claim(device, place)


def add(place: str, size: int) -> None:
    """Claim `size` more bytes, until :func:`lower`. Called with the device's lock held."""
    with _setting:
        _set(place, claims.current.own(place) + size)


def lower(place: str) -> None:
    """Claim no more than what running loads and the running node still need."""
    _lower(place)


@contextmanager
def _claiming_nothing(load: _Load, place: str) -> Iterator[None]:
    """Whoever is waited for may have what this load would take: it could not go on otherwise, or only with a part of its model."""
    weights, beyond = load.weights[place], load.beyond[place]
    load.weights[place] = load.beyond[place] = 0
    _lower(place)
    try:
        yield
    finally:
        load.weights[place], load.beyond[place] = weights, beyond
        _claim(load.devices[place], place)


def _running() -> _Load | None:
    return getattr(_here, "load", None) if _loads else None


def _end(load: _Load) -> None:
    with _lock:
        _loads.discard(load)
    for place, size in load.beyond.items():
        kept = _node.get(place)
        if size and _nodes_running and (kept is None or kept.size < size):
            claim = _NodeClaim(load.devices[place], size)
            with _lock:
                _node[place] = claim
    for place in load.need:
        _lower(place)


def _wanted(place: str) -> list[float]:
    with _lock:
        wanted: list[float] = [load.weights.get(place, 0) + load.beyond.get(place, 0) for load in _loads]
        if place in _node:
            wanted.append(_node[place].left)
    return wanted


def _claim(device: Any, place: str) -> None:
    with claims.current.hold(place, claims.HOLD) as held:
        if held:
            _write(place, manager().get_free_memory(device))


def _write(place: str, available: float) -> None:
    with _setting:
        _set(place, arithmetic.granted_claim(_wanted(place), available))


def _lower(place: str) -> None:
    # Lowering needs no lock across processes: what others read meanwhile is too much, never too little.
    with _setting:
        _set(place, arithmetic.granted_claim(_wanted(place), claims.current.own(place)))


def _set(place: str, size: int) -> None:
    if size != claims.current.own(place):
        claims.current.write(place, size)
        registry.tell("claim", place, size)
