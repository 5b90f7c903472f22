"""A value as JSON, and back. Closed lists on both sides: what is on none of them gets a handle, or is refused."""
from __future__ import annotations

import base64
import io
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from . import held, known, tensors
from .handles import Handle

MAX_DEPTH = 200
LARGE = 1 << 63
SMALL_BYTES = 1 << 10
"""Bytes that are written into the message as they are."""


class Stays(Exception):
    """Part of the value cannot cross, so the whole of it stays."""


def handed_out(encoded: Any, but: Collection[int] = ()) -> list[tuple[str, int]]:
    """Owner and id of every handle that an encoded value gives out; `but`: those whose description has one of these ``id()``."""
    found, todo = [], [encoded]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            if item.get("$") == "handle" and not item["home"]:
                if id(item) not in but:
                    found.append((item["owner"], item["id"]))
            else:
                todo.extend(item.values())
    return found


class Encoder:
    """Turns one value into JSON; what is not JSON is gathered on the way.

    `process` is this process's name, `homeward` says whether a handle's owner is reached over this link, `card` is what
    `tensors.view` asks. Afterwards: `views` and `blocks` are the data, `homeward` the handles on their way home, `outward` what
    the other end gets a handle of: an object of this process or a handle, each with its description, in which "id" is still to be
    set for an object.
    """

    def __init__(self, process: str, homeward: Callable[[Handle], bool], card: Callable[[torch.Tensor], str | None]):
        self._process, self._is_homeward, self._card = process, homeward, card
        self.views: list[tensors.View] = []
        self.blocks: list[tensors.Block] = []
        self.homeward: list[Handle] = []
        self.outward: list[tuple[dict[str, Any], Any]] = []
        self._depth = 0
        self._whole = 0     # inside an object that crosses with all its parts or not at all

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is int:
            return value if -LARGE < value < LARGE else {"$": "int", "v": hex(value)}
        method = _ENCODE.get(kind)
        if method is not None:
            if self._depth >= MAX_DEPTH:
                raise Stays
            self._depth += 1
            try:
                return method(self, value)
            finally:
                self._depth -= 1
        return self._other(kind, value)

    def _other(self, kind: type, value: Any) -> Any:
        if kind is Handle:
            return self._handle(value)
        if isinstance(value, torch.Tensor):
            if tensors.sendable(value):
                return self._tensor(value)
            if known.name_of(kind) == known.QUANTIZED:
                return self._parts(value, "quantized", {}, known.quantized_parts(value))
            return self.stay(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
            return {"$": "scalar", "dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode()}
        if known.is_enum(kind):
            return {"$": "enum", "of": known.name_of(kind), "name": value.name}
        if (name := known.name_of(kind)) in known.CLASSES:
            return self._parts(value, "object", {"of": name}, vars(value))
        return self.stay(value)

    def apart(self, value: Any, levels: int = 2) -> Any:
        """As :meth:`value` for a call or a result with a part that cannot cross at all: what the node knows as one value stays whole."""
        kind = type(value)
        if levels and kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: self.apart(item, levels - 1) for key, item in value.items()}
        if levels and kind in (list, tuple):
            items = [self.apart(item, 0) for item in value]
            return items if kind is list else {"$": "tuple", "v": items}
        gathered: tuple[list[Any], ...] = self.views, self.blocks, self.homeward, self.outward
        before = [len(each) for each in gathered]
        try:
            return self.value(value)
        except (Stays, RecursionError):
            self._depth = self._whole = 0
            for each, length in zip(gathered, before, strict=True):
                del each[length:]
            return self.stay(value)

    def stay(self, value: Any) -> dict[str, Any]:
        """A handle for an object of this process."""
        if self._whole:
            raise Stays
        kind = type(value)
        spec = {"$": "handle", "home": False, "owner": self._process, "id": 0, "type": kind.__qualname__,
                "text": f"{kind.__module__}.{kind.__qualname__}", "io_type": "", "ram": held.in_ram(value)}
        self.outward.append((spec, value))
        return spec

    def _handle(self, value: Handle) -> dict[str, Any]:
        if self._whole:
            raise Stays
        value.check()
        spec = {"$": "handle", "home": self._is_homeward(value), "owner": value.owner, "id": value.id}
        if spec["home"]:
            self.homeward.append(value)
        else:
            spec.update(type=value.type_name, text=value.text, io_type=value.io_type, ram=value.held_ram)
            self.outward.append((spec, value))
        return spec

    def _parts(self, value: Any, kind: str, spec: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        views, blocks = len(self.views), len(self.blocks)
        self._whole += 1
        try:
            encoded: Any = {"$": kind, **spec, "parts": {name: self.value(part) for name, part in parts.items()}}
        except Stays:
            del self.views[views:], self.blocks[blocks:]
            encoded = None
        finally:
            self._whole -= 1
        return self.stay(value) if encoded is None else encoded

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}

    def _list(self, value: list[Any]) -> list[Any]:
        return [self.value(item) for item in value]

    def _dict(self, value: dict[Any, Any]) -> Any:
        if "$" not in value and all(type(key) is str for key in value):
            return {key: self.value(item) for key, item in value.items()}
        return {"$": "dict", "v": [[self.value(key), self.value(item)] for key, item in value.items()]}

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        return {"$": "ordered", "v": [[self.value(key), self.value(item)] for key, item in value.items()]}

    def _items(self, value: Any) -> dict[str, Any]:
        return {"$": type(value).__name__, "v": [self.value(item) for item in value]}

    def _slice(self, value: slice) -> dict[str, Any]:
        return {"$": "slice", "v": [self.value(item) for item in (value.start, value.stop, value.step)]}

    def _range(self, value: range) -> dict[str, Any]:
        return {"$": "range", "v": [value.start, value.stop, value.step]}

    def _complex(self, value: complex) -> dict[str, Any]:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}

    def _fraction(self, value: Fraction) -> dict[str, Any]:
        return {"$": "fraction", "v": [value.numerator, value.denominator]}

    def _torch(self, value: Any) -> dict[str, Any]:
        return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}

    def _bytes(self, value: Any) -> dict[str, Any]:
        kind = type(value).__name__
        if len(value) <= SMALL_BYTES:
            return {"$": kind, "v": base64.b64encode(value).decode()}
        block = tensors.data_block(value)
        self.blocks.append(block)
        return {"$": kind, "at": block.where}

    def _stream(self, value: io.BytesIO) -> dict[str, Any]:
        return {"$": "stream", "v": self._bytes(value.getvalue()), "position": value.tell()}

    def _array(self, value: np.ndarray) -> dict[str, Any]:
        if value.dtype.hasobject or value.dtype.names is not None:
            return self.stay(value)
        spec = {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        if value.size and value.dtype.itemsize:
            block = tensors.data_block(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            self.blocks.append(block)
            spec["at"] = block.where
        return spec

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if not tensors.sendable(value):
            return self.stay(value)
        spec: dict[str, Any] = {"$": "tensor"}
        self.views.append(tensors.view(value, spec, self._card))
        return spec


_ENCODE: dict[type, Callable[[Encoder, Any], Any]] = {
    float: Encoder._float, list: Encoder._list, dict: Encoder._dict, OrderedDict: Encoder._ordered,
    tuple: Encoder._items, set: Encoder._items, frozenset: Encoder._items, torch.Size: Encoder._items,
    slice: Encoder._slice, range: Encoder._range, complex: Encoder._complex, Fraction: Encoder._fraction,
    torch.dtype: Encoder._torch, torch.device: Encoder._torch,
    bytes: Encoder._bytes, bytearray: Encoder._bytes, io.BytesIO: Encoder._stream,
    np.ndarray: Encoder._array, torch.Tensor: Encoder._tensor,
}


class Decoder:
    """The other direction. `handle` gives what a description of a handle stands for."""

    def __init__(self, reader: tensors.Reader, handle: Callable[[dict[str, Any]], Any]):
        self._reader, self._resolve = reader, handle

    def value(self, value: Any) -> Any:
        if type(value) is list:
            return [self.value(item) for item in value]
        if type(value) is dict:
            if "$" not in value:
                return {key: self.value(item) for key, item in value.items()}
            return _DECODE[value["$"]](self, value)
        return value

    def _items(self, spec: dict[str, Any]) -> list[Any]:
        return [self.value(item) for item in spec["v"]]

    def _pairs(self, spec: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in spec["v"]]

    def _bytes(self, spec: dict[str, Any]) -> bytes:
        return base64.b64decode(spec["v"]) if "v" in spec else self._reader.data(spec["at"]).tobytes()

    def _stream(self, spec: dict[str, Any]) -> io.BytesIO:
        stream = io.BytesIO(self._bytes(spec["v"]))
        stream.seek(spec["position"])
        return stream

    def _array(self, spec: dict[str, Any]) -> np.ndarray:
        dtype, shape = _dtype(spec["dtype"]), spec["shape"]
        if "at" not in spec:
            return np.empty(shape, dtype)
        return self._reader.data(spec["at"]).view(dtype).reshape(shape)

    def _scalar(self, spec: dict[str, Any]) -> Any:
        return np.frombuffer(base64.b64decode(spec["data"]), _dtype(spec["dtype"]))[0]

    def _parts(self, spec: dict[str, Any]) -> dict[str, Any]:
        return {str(name): self.value(part) for name, part in spec["parts"].items()}


def _dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"arrays of {name!r} are not sent")
    return dtype


_DECODE: dict[str, Callable[[Decoder, dict[str, Any]], Any]] = {
    "float": lambda d, s: float(s["v"]),
    "int": lambda d, s: int(s["v"], 16),
    "dict": lambda d, s: dict(d._pairs(s)),
    "ordered": lambda d, s: OrderedDict(d._pairs(s)),
    "tuple": lambda d, s: tuple(d._items(s)),
    "set": lambda d, s: set(d._items(s)),
    "frozenset": lambda d, s: frozenset(d._items(s)),
    "Size": lambda d, s: torch.Size(d._items(s)),
    "slice": lambda d, s: slice(*d._items(s)),
    "range": lambda d, s: range(*s["v"]),
    "complex": lambda d, s: complex(float(s["v"][0]), float(s["v"][1])),
    "fraction": lambda d, s: Fraction(*s["v"]),
    "dtype": lambda d, s: tensors.DTYPES[s["v"]],
    "device": lambda d, s: torch.device(s["v"]),
    "bytes": Decoder._bytes,
    "bytearray": lambda d, s: bytearray(d._bytes(s)),
    "stream": Decoder._stream,
    "array": Decoder._array,
    "scalar": Decoder._scalar,
    "tensor": lambda d, s: d._reader.tensor(s),
    "object": lambda d, s: known.rebuild(s["of"], d._parts(s)),
    "enum": lambda d, s: known.member(s["name"], s["of"]),
    "quantized": lambda d, s: known.rebuild_quantized(d._parts(s)),
    "handle": lambda d, s: d._resolve(s),
}
