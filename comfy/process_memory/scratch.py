"""What a process holds beside models: cast buffers, weights cached for hooks, originals of patched weights.

None of it is in the list of loaded models. It is summed here when somebody asks, each storage once, from ComfyUI's own books.
"""
from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from . import own
from .figures import manager

_backups: tuple[float, int] = (float("-inf"), 0)


def on_device(device: Any) -> int:
    """Bytes of cast buffers and cached hook weights on `device`."""
    mm = manager()
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in list(getattr(mm, "STREAM_CAST_BUFFERS", {}).values()) if buffer.device == device)
    paged = sum(int(buffer.size()) for buffer in list(getattr(mm, "STREAM_AIMDO_CAST_BUFFERS", {}).values())
                if getattr(buffer, "device", None) == device.index)
    return buffers + paged + _once(tensor for tensor in _plain(_hook_weights()) if tensor.device == device)


def backups() -> int:
    """Bytes of host memory in originals of patched weights, a second ago at most; what is put back as it is, or belongs to the
    pages of a model file, is no copy."""
    global _backups
    now = time.monotonic()
    if now - _backups[0] > 1.0:
        _backups = now, _count_backups()
    return _backups[1]


def _count_backups() -> int:
    kept = []
    for patcher in _patchers():
        for entry in list(getattr(patcher, "backup", {}).values()):
            if getattr(entry, "inplace_update", True):      # else it is the very tensor that is put back
                kept.append(getattr(entry, "weight", entry))
    return in_ram([*kept, *_hook_weights()])


def in_ram(tensors: Iterable[Any]) -> int:
    """Bytes of host memory in `tensors`, each storage once; what belongs to the pages of a model file is in none of them."""
    return _once(tensor for tensor in _plain(tensors) if getattr(getattr(tensor, "device", None), "type", "") == "cpu"
                 and tensor.device.index is None and getattr(tensor.untyped_storage(), "_comfy_tensor_mmap_refs", None) is None)


def _plain(tensors: Iterable[Any]) -> Iterable[Any]:
    """The tensors in which the bytes of `tensors` are: one that wraps others, as quantised weights do, has no storage of its own."""
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            yield tensor
        else:
            yield from _plain(getattr(tensor, name) for name in flatten()[0])


def _patchers() -> list[Any]:
    found = {}
    for device in own.all_devices():
        for entry in own.loaded_models(device):
            patcher = entry.model
            if patcher is not None:
                found[id(getattr(patcher, "backup", patcher))] = patcher    # clones share the dictionary
    return list(found.values())


def _hook_weights() -> Iterable[Any]:
    for patcher in _patchers():
        for tensor, *_ in list(getattr(patcher, "hook_backup", {}).values()):
            yield tensor
        for weights in list(getattr(patcher, "cached_hook_patches", {}).values()):
            for tensor, *_ in list(weights.values()):
                yield tensor


def _once(tensors: Iterable[Any]) -> int:
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
