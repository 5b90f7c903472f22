"""What an object that stays in this process costs it in host memory, for whoever holds a handle of it."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from comfy.process_memory import scratch

MAX_DEPTH = 8


def in_ram(value: object) -> int:
    """Bytes of host memory in the tensors of an object: a model's weights, or what plain containers and attributes hold.

    Each storage counts once; what is on a card, or in pages of a model file, does not. 0 for what cannot be looked into.
    """
    try:
        return scratch.in_ram(_tensors(value, 0))
    except Exception:
        return 0    # an object of somebody's own, which may do anything when it is asked


def _tensors(value: Any, depth: int) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth < MAX_DEPTH:
        if isinstance(value, dict):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set)):
            parts = value
        elif depth == 0:
            patcher = getattr(value, "patcher", value)      # of a CLIP or a VAE
            model = getattr(patcher, "model", None)
            parts = [model] if isinstance(model, torch.nn.Module) else vars(value).values()
        else:
            return
        for part in list(parts):
            yield from _tensors(part, depth + 1)
