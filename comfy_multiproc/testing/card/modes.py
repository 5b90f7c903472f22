"""The modes that make cpu:N a place of its own: torch runs them around every operation of a thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from comfy_multiproc.testing.card.books import Books, address

Tensor = torch.Tensor
CPU = torch.device("cpu")

# A card takes these with operands on two devices.
MAY_MIX = {"copy_", "copy", "to", "_to_copy", "set_", "set_data", "_has_compatible_shallow_copy_type", "record_stream", "is_pinned",
           "_foreach_copy_"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}

# These make something on the plain CPU, unless told otherwise, whatever their operands are on.
FACTORIES = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.rand, torch.randint,
             torch.randn, torch.randperm, torch.scalar_tensor, torch.zeros}

log = logging.getLogger(__name__)


def card_index(device: Any) -> int | None:
    """0 for cpu:0, 1 for cpu:1; None for the plain CPU and everything else."""
    return device.index if isinstance(device, torch.device) and device.type == "cpu" else None


def leave(tensor: Tensor) -> Tensor:
    """A copy off the card."""
    with _disable_current_modes():
        return tensor.clone()


class Calls:
    """The functions of torch that a thread is in, as far as they have not been asked for the plain CPU.

    Outside inference mode torch takes a function apart before a dispatch mode sees it, and its parts ask for the device that
    torch knows the operands by: the plain CPU.
    """

    def __init__(self, books: Books):
        self.books = books
        self._operands: list[Any] = []      # of each call; None where the CPU may be meant

    @contextlib.contextmanager
    def inside(self, func: Any, args: tuple, kwargs: dict) -> Iterator[None]:
        named = func in FACTORIES or any(value == "cpu" or value == CPU for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device)))
        self._operands.append(None if named else (args, kwargs))
        try:
            yield
        finally:
            self._operands.pop()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """In a call that says itself what goes where."""
        self._operands.append(None)
        try:
            yield
        finally:
            self._operands.pop()

    def card(self) -> int | None:
        """Where what the running call makes on the CPU belongs: on the card of its operands, unless it has been asked for the CPU."""
        if not self._operands or self._operands[-1] is None:
            return None
        places = (self.books.card_of(t) for t in tree_leaves(self._operands[-1]) if isinstance(t, Tensor))
        return next((place for place in places if place is not None), None)


class CardMode(TorchDispatchMode):
    """Books what operations put on a card.

    A storage gets there by an explicit device=cpu:N, or as the result of an operation on something that is there. A move to
    the plain CPU, which torch takes for no move at all, becomes the copy that it would be on a card.
    """

    def __init__(self, books: Books, mixing: str, calls: Calls):
        super().__init__()
        self.books, self.mixing, self.calls = books, mixing, calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        books = self.books
        leaves = tree_leaves((args, kwargs))
        inputs = [t for t in leaves if isinstance(t, Tensor)]
        device = next((d for d in leaves if isinstance(d, torch.device)), None)
        places = [books.card_of(t) for t in inputs]
        here = next((p for p in places if p is not None), None)
        if self.mixing != "off" and here is not None and any(p != here for p in places):
            self._check(func, inputs, places)
        target = card_index(device)
        out = func(*args, **kwargs)
        if device == CPU and (meant := self.calls.card()) is not None:
            here, device = meant if here is None else here, None
        if device == CPU:
            return leave(out) if isinstance(out, Tensor) and books.card_of(out) is not None else out
        place = here if device is None else target
        if place is not None:
            given = {address(t) for t in inputs}
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    if address(t) in given:     # a view stays where its storage is
                        books.written(t)
                    else:
                        books.put(t, place)
        return out

    def _check(self, func: Any, inputs: list[Tensor], places: list[int | None]) -> None:
        """Complain of operands on two devices as a card does."""
        devices = {p for t, p in zip(inputs, places, strict=True) if t.dim() > 0 or p is not None}
        name = func._schema.name.partition("::")[2]
        if name in INDEXING and places[0] is not None:
            devices -= {None} if name.endswith("index") or inputs[-1].dim() == 0 or places[-1] is not None else set()
        if len(devices) < 2 or name in MAY_MIX:
            return
        names = " and ".join(sorted("cpu" if d is None else f"cuda:{d}" for d in devices))
        message = f"Expected all tensors to be on the same device, but found at least two devices, {names}! (virtual card, {func})"
        if self.mixing == "error":
            raise RuntimeError(message)
        log.warning(message)


class IdentityMode(TorchFunctionMode):
    """For what takes its device from a tensor or a list below the sight of a dispatch mode."""

    def __init__(self, books: Books, calls: Calls):
        super().__init__()
        self.books, self.calls = books, calls
        self.handlers: dict[Any, Callable[[Any, tuple, dict], Any]] = {
            Tensor.to: self._to, Tensor.cpu: self._cpu, torch.tensor: self._from_data, torch.as_tensor: self._from_data,
            torch.asarray: self._from_data, Tensor.new_tensor: self._new_tensor, Tensor.type_as: self._type_as,
            Tensor.__deepcopy__: self._deepcopy}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler, kwargs = self.handlers.get(func), kwargs or {}
        with self.calls.moving() if handler else self.calls.inside(func, args, kwargs):
            return handler(func, args, dict(kwargs)) if handler else func(*args, **kwargs)

    def _to(self, func: Any, args: tuple, kwargs: dict) -> Any:
        x, rest = args[0], list(args[1:])
        other = kwargs.pop("other", None)
        if rest and isinstance(rest[0], Tensor):
            other = rest.pop(0)
        if other is not None:
            rest[:0] = [other.device, other.dtype]
        positional = bool(rest) and isinstance(rest[0], (str, torch.device))
        where = rest[0] if positional else kwargs.get("device")
        where = torch.device(where) if isinstance(where, str) else where
        if card_index(where) is not None and card_index(where) == self.books.card_of(x):
            # There already; torch would copy, as cpu:0 is not its cpu. What is left is a change of dtype.
            rest = rest[1:] if positional else rest
            dtype = (rest.pop(0) if rest else kwargs.pop("dtype", None)) or x.dtype
            kwargs.pop("device", None)
            return func(x, dtype, *rest, **kwargs)
        out = func(x, *rest, **kwargs)
        return leave(out) if where == CPU and self.books.card_of(out) is not None else out

    def _cpu(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        return leave(out) if self.books.card_of(out) is not None else out

    def _from_data(self, func: Any, args: tuple, kwargs: dict) -> Any:
        where = kwargs.get("device")
        where = torch.device(where) if isinstance(where, str) else where
        if card_index(where) is not None:
            del kwargs["device"]
            return func(*args, **kwargs).to(where)
        out = func(*args, **kwargs)
        if where == CPU:
            return leave(out) if self.books.card_of(out) is not None else out
        here = self.books.card_of(args[0]) if where is None and args and isinstance(args[0], Tensor) else None
        return out if here is None else out.to(torch.device("cpu", here))

    def _new_tensor(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out, here = func(*args, **kwargs), self.books.card_of(args[0])
        return out.to(torch.device("cpu", here)) if here is not None and kwargs.get("device") is None else out

    def _type_as(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return args[0].to(args[1].device, args[1].dtype)

    def _deepcopy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out, here = func(*args, **kwargs), self.books.card_of(args[0])
        if here is not None:
            self.books.put(out, here)
        return out


@contextlib.contextmanager
def on_this_thread(books: Books, mixing: str) -> Iterator[None]:
    """Both modes, for the operations of this thread."""
    calls = Calls(books)
    with CardMode(books, mixing, calls), IdentityMode(books, calls):
        yield
