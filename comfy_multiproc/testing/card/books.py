"""Which tensors of this process are on which card, and their bytes in the shared file."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from comfy_multiproc.testing.card.capacity import CapacityFile, CardFull

MIB = 1 << 20


class Books:
    """The storages on the cards. Any thread may call.

    A storage is booked by `put` and leaves when it dies: torch keeps one Python object for a storage as long as it lives, so
    a finalizer on it tells at once, and the address in `known` is gone before it can be given out again.
    """

    def __init__(self, file: CapacityFile):
        self.file = file
        self.known: dict[int, tuple[int, int]] = {}     # storage address -> card, bytes
        self._closed = False

    def card_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the card that holds the tensor's bytes; None: the CPU, or a tensor without bytes of its own."""
        key = address(tensor)
        held = None if key is None else self.known.get(key)
        return None if held is None else held[0]

    def put(self, tensor: torch.Tensor, card: int) -> None:
        """Book a new tensor on a card. One whose storage is on a card already stays there.

        Raises torch.OutOfMemoryError if it does not fit.
        """
        key = address(tensor)
        if key is None or key in self.known or self._closed:
            return
        storage = with_bytes(tensor).untyped_storage()
        size = storage.nbytes()
        with out_of_memory():
            self.file.allocate(card, size)
        self.known[key] = card, size
        weakref.finalize(storage, self._died, key).atexit = False

    def written(self, tensor: torch.Tensor) -> None:
        """A tensor has been written into, which may have made its storage larger. Raises torch.OutOfMemoryError."""
        if address(tensor) in self.known:
            self.resized(with_bytes(tensor).untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Book what a storage has grown or shrunk by, if it is on a card.

        Raises torch.OutOfMemoryError if it does not fit.
        """
        if (held := self.known.get(storage._cdata)) is None:
            return
        (card, before), size = held, storage.nbytes()
        if size > before:
            with out_of_memory():
                self.file.allocate(card, size - before)
        elif size < before:
            self.file.release(card, before - size)
        self.known[storage._cdata] = card, size

    def close(self) -> None:
        """Forget everything. Tensors that were on a card are ordinary CPU tensors from now on."""
        self._closed = True
        for key in list(self.known):
            self._died(key)
        for card in range(self.file.cards):
            self.file.empty_cache(card)
        self.file.close()

    def _died(self, key: int) -> None:
        if (held := self.known.pop(key, None)) is not None:
            self.file.release(*held)


def with_bytes(tensor: Any) -> torch.Tensor:
    """The tensor that has the bytes: a quantized one keeps them in another."""
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else getattr(tensor, "_qdata", tensor)


def address(tensor: Any) -> int | None:
    """The address of a tensor's storage."""
    try:
        return with_bytes(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Turn the file's refusal into the exception that ComfyUI and torch know."""
    try:
        yield
    except CardFull as e:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {e.requested / MIB:.2f} MiB. Virtual card {e.card} has a total capacity of "
            f"{e.size / MIB:.2f} MiB of which {e.free / MIB:.2f} MiB is free.") from None
