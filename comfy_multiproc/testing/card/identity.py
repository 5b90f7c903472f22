"""Tensors that know which card they are on."""

from __future__ import annotations

from typing import Any

import torch

from comfy_multiproc.testing.card.books import Books
from comfy_multiproc.testing.card.patches import Patches


def give(books: Books, patches: Patches) -> None:
    """torch.Tensor is a Python class, so its `device` and `numpy` can be answered here: cpu:N, and a TypeError."""
    native, numpy = torch._C.TensorBase.device.__get__, torch.Tensor.numpy

    def device(self: torch.Tensor) -> torch.device:
        card = books.card_of(self)
        return native(self) if card is None else torch.device("cpu", card)

    def to_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        card = books.card_of(self)
        if card is not None:
            raise TypeError(f"can't convert cuda:{card} device type tensor to numpy. Use Tensor.cpu() first. (virtual card)")
        return numpy(self, *args, **kwargs)

    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "numpy", to_numpy)
