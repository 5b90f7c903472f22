"""Dtype gates: how much of a card counts when the dtype of a model's weights is chosen.

ComfyUI casts an 8-bit file up where the card is big enough for the result. What other processes have committed of the card
is taken off that size here. A model counts from the moment its dtype is chosen: until it is in the list of loaded models,
its bytes are claimed under the device's key plus ``+meant``, which no free figure sees and every gate does.

A file keeps the dtype that it was given first, so that a prompt gives the same picture again whoever runs beside it. Of a file
that was first loaded while nobody else was there, only that is remembered: upstream's answer for the whole card is its dtype.
"""
from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from . import admission, arithmetic, claims, devices, registry
from .figures import last_words, manager

Result = TypeVar("Result")

_path: ContextVar[Any] = ContextVar("path", default=None)                  # of the file that is being loaded
_whole_card: ContextVar[bool] = ContextVar("whole_card", default=False)    # whether nobody else is looked at
_lock = threading.Lock()
_alone: set[Any] = set()                                    # paths whose first dtype was chosen while nobody could see it
_dtypes: dict[tuple[Any, ...], Any] = {}                    # what was decided for a file -> dtype
_building: dict[tuple[Any, str], int] = {}                  # (path, device key) -> bytes, while a loader runs
_claimed: set[str] = set()                                   # device keys under which something is claimed
_built: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()   # model -> device key, bytes


def meant(place: str) -> str:
    """The key under which the models meant for the device `place`, and not in the list of loaded models, are claimed."""
    return place + "+meant"


def for_file(load: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a loader whose first argument is the path of a model file."""
    first = next(iter(inspect.signature(load).parameters))

    @functools.wraps(load)
    def load_file(*args: Any, **kwargs: Any) -> Result:
        path = args[0] if args else kwargs.get(first)
        if not (registry.entries or claims.current.shared or _built):
            _alone.add(path)
            return load(*args, **kwargs)
        before = _path.set(path)
        try:
            result = load(*args, **kwargs)
            for patcher in _patchers(result):
                _count(patcher)
            return result
        finally:
            _path.reset(before)
            for key in [key for key in _building if key[0] == path]:
                _building.pop(key, None)
            settle()
    return load_file


def settled_dtype(unet_dtype: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates unet_dtype: checking what others have committed and committing the model is one step; a file's first answer stays."""
    @functools.wraps(unet_dtype)
    def choose(device: Any = None, model_params: float = 0, *args: Any, **kwargs: Any) -> Any:
        path = _path.get()
        if path is None:
            return unet_dtype(device, model_params, *args, **kwargs)
        if path in _alone:
            whole_card = _whole_card.set(True)
            try:
                return unet_dtype(device, model_params, *args, **kwargs)
            finally:
                _whole_card.reset(whole_card)
        key = (_identity(path), str(device), model_params, repr(args), repr(sorted(kwargs.items())))
        if key not in _dtypes:
            place = devices.key(manager().get_torch_device() if device is None else device)
            if place is None or model_params <= 0:
                _dtypes[key] = unet_dtype(device, model_params, *args, **kwargs)
            else:
                with claims.current.hold(meant(place), claims.HOLD):
                    _dtypes[key] = unet_dtype(device, model_params, *args, **kwargs)
                    _building[path, place] = int(model_params * manager().dtype_size(_dtypes[key]))
                    settle()
        return _dtypes[key]
    return choose


def shared_card(maximum_vram_for_weights: Callable[..., float]) -> Callable[..., float]:
    """Decorates maximum_vram_for_weights: the card is what others have not committed of it."""
    @functools.wraps(maximum_vram_for_weights)
    def maximum(device: Any = None) -> float:
        size = maximum_vram_for_weights(device)
        if not registry.entries or _whole_card.get():
            return size
        place = devices.key(manager().get_torch_device() if device is None else device)
        if place is None:
            return size
        mm = manager()
        total = mm.get_total_memory(device)
        return arithmetic.gate(size, total, mm.minimum_inference_memory(), committed(place, total))
    return maximum


def committed(place: str, total: float) -> int:
    """What other processes have committed of a card of `total` bytes, loaded or not."""
    size = sum(arithmetic.charged_commitment(usage, total) for _, usage in last_words(place))
    return size + sum(usage.claimed or 0 for _, usage in last_words(meant(place)))


def settle() -> None:
    """Claim what is meant for each device and not in the list of loaded models."""
    if not _building and not _built and not _claimed:
        return
    listed = {id(entry.model.model) for entry in list(manager().current_loaded_models) if entry.model is not None}
    with _lock:
        sizes = dict.fromkeys(_claimed, 0)
        for (_, place), size in list(_building.items()):
            sizes[place] = sizes.get(place, 0) + size
        for model, (place, size) in list(_built.items()):
            if id(model) not in listed:
                sizes[place] = sizes.get(place, 0) + size
        for place, size in sizes.items():
            if size != claims.current.own(meant(place)):
                claims.current.write(meant(place), size)
            (_claimed.add if size else _claimed.discard)(place)


claims.settlers.append(settle)


def _identity(path: Any) -> tuple[str, int, int]:
    """A file's path, size and time of change; whatever cannot be looked at is its path."""
    try:
        found = os.stat(path)
        return os.fspath(path), found.st_size, found.st_mtime_ns
    except (OSError, TypeError, ValueError):
        return str(path), 0, 0


def _patchers(result: Any) -> Iterator[Any]:
    for part in result if isinstance(result, (tuple, list)) else (result,):
        patcher = getattr(part, "patcher", part)
        if hasattr(patcher, "load_device") and hasattr(patcher, "model_size") and hasattr(patcher, "model"):
            yield patcher


def mean(patcher: Any) -> None:
    """A model has been built for the device of `patcher`."""
    if admission.active():
        _count(patcher)
        settle()


def _count(patcher: Any) -> None:
    place = devices.key(patcher.load_device)
    if place is not None:
        _built[patcher.model] = place, int(patcher.model_size())
