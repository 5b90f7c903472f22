"""The face of a card: the functions of torch.npu that ComfyUI calls, answered from the capacity file.

ComfyUI drives an Ascend NPU through these few functions only, and asks it nothing about its generation, so both forms of the
card pose as one: ComfyUI's own bodies of get_free_memory, get_total_memory, soft_empty_cache and so on run unchanged.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from comfy_multiproc.testing.card.capacity import CapacityFile


def interface(file: CapacityFile) -> types.ModuleType:
    """A module to stand in as torch.npu."""
    npu = types.ModuleType("torch.npu")
    current = [0]

    def index(device: Any = None) -> int:
        if device is None:
            return current[0]
        if isinstance(device, int):
            return device
        return torch.device(device).index or 0

    def set_device(device: Any) -> None:
        current[0] = index(device)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        card = index(device)
        file.touch(card)
        return file.free(card), file.size(card)

    def memory_stats(device: Any = None) -> dict[str, int]:
        own = file.own(index(device))
        return {"active_bytes.all.current": own.allocated, "reserved_bytes.all.current": own.allocated + own.cached,
                "active_bytes.all.peak": own.peak - own.fixed, "num_ooms": own.refusals}

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        card = index(device)
        return types.SimpleNamespace(name=get_device_name(card), total_memory=file.size(card), uuid=f"{file.path}#{card}",
                                     major=8, minor=6, has_fp16=True)

    def get_device_name(device: Any = None) -> str:
        return f"virtual card {index(device)}"

    def empty_all() -> None:
        for card in range(file.cards):
            file.empty_cache(card)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for function in (set_device, mem_get_info, memory_stats, get_device_properties, get_device_name):
        setattr(npu, function.__name__, function)
    npu.__dict__.update(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: file.cards, current_device=lambda: current[0],
        empty_cache=empty_all, synchronize=nothing, manual_seed=nothing,
        manual_seed_all=nothing, _lazy_init=nothing, _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16])
    return npu
