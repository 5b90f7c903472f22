"""Which tensors of this process are on which card, and their bytes in the shared file."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
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
        self.known: dict[int, int] = {}     # storage address -> card
        self._lock = threading.Lock()
        self._closed = False
        self._gone: deque[tuple[int, int]] = deque()    # (card, bytes) not yet given back in the file

    def card_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the card that holds the tensor's bytes; None: the CPU, or a tensor without bytes of its own."""
        key = address(tensor)
        return None if key is None else self.known.get(key)

    def put(self, tensor: torch.Tensor, card: int) -> None:
        """Book a new tensor on a card. One whose storage is on a card already stays there.

        Raises torch.OutOfMemoryError if it does not fit.
        """
        key = address(tensor)
        if key is None or key in self.known or self._closed:
            return
        storage = with_bytes(tensor).untyped_storage()
        size = storage.nbytes()
        with self._section(), out_of_memory():
            self.file.allocate(card, size)
        self.known[key] = card
        weakref.finalize(storage, self._died, key, card, size).atexit = False

    def close(self) -> None:
        """Forget everything. Tensors that were on a card are ordinary CPU tensors from now on."""
        with self._section():
            self.known.clear()
            self._closed = True
        self.file.close()

    def empty_cache(self, card: int) -> None:
        """Give back what the allocator keeps on this card."""
        with self._section():
            self.file.empty_cache(card)

    def _died(self, key: int, card: int, size: int) -> None:
        # May run inside any allocation of this very thread (garbage collection), so it never waits for the lock: whoever
        # holds it gives back what is queued before and after.
        self.known.pop(key, None)
        self._gone.append((card, size))
        self._settle()

    def _settle(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._gone:
            card, size = self._gone.popleft()
            if not self._closed:
                self.file.release(card, size)

    @contextlib.contextmanager
    def _section(self) -> Iterator[None]:
        with self._lock:
            self._drain()
            yield
        self._settle()


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
