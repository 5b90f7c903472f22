"""Tensors on a card: whether the other process takes their bytes over on the card itself, and how.

The sender copies what goes into memory made for this message, exports that, and keeps it until the receiver says that it
has it; the receiver copies it at once. So neither end ever works on memory of the other, each may end at any time, and
only as much is exported as is under way.

Whether it works is found out, not derived: some allocators export nothing, containers forbid opening it, drivers differ. The
first tensor of a card starts a probe: a pattern in exported memory, which the receiver opens and compares. Until it has said
that it found the pattern, and for good when it has not, tensors are copied through host memory.
"""
from __future__ import annotations

import base64
import itertools
import logging
import os
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from . import tensors

SHARE_FROM = tensors.ALONE
"""Bytes of a tensor from which opening another process's memory is worth it."""
PATTERN = 4096
MAX_HANDLE = 1 << 20
NO_COUNTER = b"/comfy-multiproc-uncounted"
NO_EVENT = bytes(64)

_warned = threading.Event()


class CannotShare(RuntimeError):
    """These bytes have to go through host memory."""


class NoCard(RuntimeError):
    """This process does not have the card."""


class Driver(Protocol):
    """Access to the memory of cards. Memory is a tensor of bytes. Whatever else it raises means that it cannot be done."""

    def card(self, tensor: torch.Tensor) -> str | None:
        """The card that the tensor is on, by a name that holds in every process; None: it is on none whose memory can be shared."""

    def allocate(self, like: torch.Tensor, size: int) -> torch.Tensor:
        """Memory on the card of a tensor."""

    def export(self, memory: torch.Tensor) -> dict[str, Any]:
        """What another process needs to open memory that has been allocated here, as JSON. Its content is complete by then."""

    def open(self, card: str, exported: dict[str, Any]) -> torch.Tensor:
        """Memory of another process, read only. Raises NoCard, or ValueError, KeyError or TypeError for what describes none."""

    def finish(self, memory: torch.Tensor) -> None:
        """Wait until what has been read of opened memory has been read."""

    def collect(self) -> None:
        """Nothing that was exported is needed any more."""


def supported() -> bool:
    """Whether the platform is one where memory of a card may be exported at all: where it is not, it hangs or corrupts."""
    wsl = "microsoft" in platform.release().lower() or os.path.exists("/dev/dxg")
    return sys.platform == "linux" and not wsl


class CudaIPC:
    """What torch has for this, without what it has for pickling."""

    def card(self, tensor: torch.Tensor) -> str | None:
        return tensors.device_name(tensor.device) if tensor.device.type == "cuda" and torch.version.cuda else None

    def allocate(self, like: torch.Tensor, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def export(self, memory: torch.Tensor) -> dict[str, Any]:
        if not supported():
            raise AssertionError("memory of a card is not exported on this platform")
        # Instead of an event: the receiver would have to open each, and torch never closes them.
        torch.cuda.current_stream(memory.device).synchronize()
        _, handle, size, offset, counter, place, _, _ = memory.untyped_storage()._share_cuda_()
        # torch keeps exported memory until the receiver has lowered a counter, for good if the receiver ends before. How long
        # it is needed is known here without it.
        torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
        return {"handle": base64.b64encode(handle).decode(), "size": size, "offset": offset}

    def open(self, card: str, exported: dict[str, Any]) -> torch.Tensor:
        handle = base64.b64decode(exported["handle"], validate=True)
        size, offset = exported["size"], exported["offset"]
        if not 0 < len(handle) <= MAX_HANDLE or not all(type(n) is int and 0 <= n < 1 << 48 for n in (size, offset)):
            raise ValueError("no memory of a card")
        device = tensors.device_here(card)
        if device is None:
            raise NoCard(f"there is no {card} here")
        # The counter is none that exists: torch takes the sender for one that has ended, and leaves it alone.
        storage = torch.UntypedStorage._new_shared_cuda(device.index, handle, size, offset, NO_COUNTER, 0, NO_EVENT, False)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))

    def finish(self, memory: torch.Tensor) -> None:
        torch.cuda.current_stream(memory.device).synchronize()

    def collect(self) -> None:
        torch.cuda.ipc_collect()    # takes the file of the counters away


class Cards:
    """What one end of a link knows of sharing the memory of cards. Any thread.

    `ask(probe)` has the other end's `examine` called. `warns`: this end says in the log what does not work, in both directions.
    """

    def __init__(self, driver: Driver, ask: Callable[[dict[str, Any]], None], *, warns: bool):
        self._driver, self._ask, self._warns = driver, ask, warns
        self._lock = threading.Lock()
        self._shared: dict[str, bool] = {}
        self._probes: dict[int, tuple[str, torch.Tensor]] = {}
        self._under_way: dict[str, torch.Tensor] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    # sending

    def card(self, tensor: torch.Tensor) -> str | None:
        """The card whose memory brings the tensor to the other end; None: it goes through host memory."""
        if tensor.nbytes < SHARE_FROM:
            return None
        card = self._driver.card(tensor)
        if card is None:
            return None
        with self._lock:
            known = card in self._shared
            shared = self._shared.setdefault(card, False)
        if not known:
            self._begin(card, tensor)
        return card if shared else None

    def _begin(self, card: str, tensor: torch.Tensor) -> None:
        if not supported():
            self.refused(card, "")
            return
        pattern = os.urandom(PATTERN)
        try:
            memory = self._driver.allocate(tensor, PATTERN)
            memory.copy_(torch.frombuffer(bytearray(pattern), dtype=torch.uint8))
            exported = self._driver.export(memory)
        except torch.cuda.OutOfMemoryError:
            with self._lock:
                del self._shared[card]      # the next tensor may find room
            return
        except Exception as error:
            logging.debug("Tensors on %s are copied: %s", card, _first_line(error))
            return
        with self._lock:
            number = next(self._numbers)
            if not self._closed:
                self._probes[number] = card, memory
        self._ask({"number": number, "card": card, "exported": exported, "pattern": base64.b64encode(pattern).decode()})

    def answered(self, number: int, found: bool, why: str) -> None:
        """The other end has examined a probe; `why` is empty if it does not have the card."""
        with self._lock:
            card, memory = self._probes.pop(number, (None, None))
            if card is not None and found:
                self._shared[card] = True
        del memory
        if card is None:
            return
        self._collect()
        if found:
            logging.debug("Tensors on %s are shared", card)
        else:
            self.refused(card, why)

    def refused(self, card: str, why: str) -> None:
        """From now on tensors on that card are copied."""
        with self._lock:
            self._shared[card] = False
        logging.debug("Tensors on %s are copied: %s", card, why or "the other process cannot have them there")
        self._warn(card, why)

    def export(self, card: str, like: torch.Tensor, size: int, write: Callable[[torch.Tensor], None]) -> dict[str, Any]:
        """Have `write` fill memory on the card of `like`; what the other end's `open` needs. It is kept until `taken` or `close`.

        Raises CannotShare, also if there is no room.
        """
        name = secrets.token_hex(12)
        try:
            memory = self._driver.allocate(like, size)
            write(memory)
            exported = self._driver.export(memory)
        except torch.cuda.OutOfMemoryError as error:
            raise CannotShare(str(error)) from error
        except Exception as error:
            self.refused(card, _first_line(error))
            raise CannotShare(str(error)) from error
        with self._lock:
            if not self._closed:
                self._under_way[name] = memory
        return {"card": card, "name": name, "exported": exported}

    def taken(self, names: Iterable[str]) -> None:
        """The other end has what was exported under these names, or never will."""
        with self._lock:
            before = len(self._under_way)
            for name in names:
                self._under_way.pop(name, None)
            last = before > 0 and not self._under_way
        if last:
            self._collect()

    def close(self) -> None:
        """The other end is gone."""
        with self._lock:
            self._closed = True
            exported = bool(self._probes or self._under_way)
            self._probes.clear()
            self._under_way.clear()
        if exported:
            self._collect()

    def _collect(self) -> None:
        try:
            self._driver.collect()
        except Exception:
            logging.debug("exported memory could not be collected", exc_info=True)

    # receiving

    def examine(self, probe: Any) -> tuple[bool, str]:
        """Whether memory of the other end can be opened here and holds what was written into it, and what is wrong if not.

        May take as long as the driver likes.
        """
        card = ""
        try:
            card, pattern = str(probe["card"]), base64.b64decode(probe["pattern"], validate=True)
            memory = self._driver.open(card, probe["exported"])
            if bytes(memory.cpu().numpy()) != pattern:
                raise CannotShare("it holds something else here")
            return True, ""
        except NoCard:
            return False, ""
        except Exception as error:
            self._warn(card, why := _first_line(error))
            return False, why

    def open(self, card: str, exported: Any) -> torch.Tensor:
        """Memory of the other end, to be copied and let go of. Raises CannotShare; ValueError, KeyError or TypeError for what describes none."""
        try:
            return self._driver.open(card, exported)
        except (ValueError, KeyError, TypeError):
            raise
        except Exception as error:
            self._warn(card, why := _first_line(error))
            raise CannotShare(why) from error

    def finish(self, memory: torch.Tensor) -> None:
        """Wait until what has been copied of opened memory has been copied."""
        self._driver.finish(memory)

    def _warn(self, card: str, why: str) -> None:
        if self._warns and why and not _warned.is_set():
            _warned.set()
            logging.warning("Tensors on %s go between processes through host memory, which is slower: memory of the card cannot be shared (%s). "
                            "In a container, --ipc=host and --cap-add=SYS_PTRACE may allow it.", card, why)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300] or type(error).__name__
