"""Tensors that know which card they are on."""

from __future__ import annotations

from typing import Any

import torch

from comfy_multiproc.testing.card.books import Books
from comfy_multiproc.testing.card.patches import Patches


def give(books: Books, patches: Patches) -> None:
    """torch.Tensor is a Python class, so its `device` and `numpy` can be answered here: cpu:N, and a TypeError. So is its storage."""
    native, numpy = torch._C.TensorBase.device.__get__, torch.Tensor.numpy

    def device(self: torch.Tensor) -> torch.device:
        card = books.card_of(self)
        return native(self) if card is None else torch.device("cpu", card)

    def to_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        card = books.card_of(self)
        if card is not None:
            raise TypeError(f"can't convert cuda:{card} device type tensor to numpy. Use Tensor.cpu() first. (virtual card)")
        return numpy(self, *args, **kwargs)

    resize = torch.UntypedStorage.resize_

    def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized = resize(self, size)
        books.resized(self)
        return resized

    def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if not location.startswith("cpu:"):
            return None
        books.put(torch.empty(0, dtype=torch.uint8).set_(storage), int(location[4:]))
        return storage

    # torch.load() asks these in turn who knows the device that it is told to load to.
    known = [*torch.serialization._package_registry, (-1, lambda storage: None, restore)]
    patches.set(torch.serialization, "_package_registry", known)
    patches.set(torch.UntypedStorage, "resize_", resize_storage)
    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "numpy", to_numpy)
