"""What ComfyUI reads off a node class, as data that crosses to another process and back.

Ordinary values keep their exact type (lists and tuples differ for validation). Three tricks that packs play with types are
kept by what they do: type names that equal others, dictionaries that claim to hold every key, tuples without an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

PROBE = "comfy_multiproc probe"     # no type and no input is called so
DEPTH = 64


class InterfaceError(ValueError):
    """A description that no worker of this version would send."""


class TypeName(str):
    """A type name that claims to be others than itself. Of each operator: the names for which it lies, None for every one.

    The two are kept apart because packs override ``!=`` alone, and validation uses both.
    """
    equal: frozenset[str] | None = frozenset()      # == says True
    same: frozenset[str] | None = frozenset()       # != says False

    def __eq__(self, other: object) -> bool:
        return self.equal is None or str.__eq__(self, other) is True or other in tuple(self.equal)

    def __ne__(self, other: object) -> bool:
        return not (self.same is None or str.__eq__(self, other) is True or other in tuple(self.same))

    __hash__ = str.__hash__


class OpenDict(dict):
    """A dictionary that claims to hold every key; `beyond` is what it answers for those that it does not."""
    beyond: Any = None

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return self.beyond


class OpenTuple(tuple):
    """A tuple that answers `beyond` for every index past its end."""
    beyond: Any = None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            return self.beyond
        return tuple.__getitem__(self, index)


class Files(list):
    """The files of one of ComfyUI's model folders, with what a pack has put around them: looked up again wherever it is decoded."""

    def __init__(self, files: Iterable[Any], folder: str, before: Iterable[Any] = (), after: Iterable[Any] = ()):
        self.folder, self.before, self.after = folder, list(before), list(after)
        super().__init__([*self.before, *files, *self.after])

    def _files(self) -> list[Any]:
        return list(self)[len(self.before):len(self) - len(self.after)]

    def __add__(self, other: Any) -> Any:
        return Files(self._files(), self.folder, self.before, [*self.after, *other]) if isinstance(other, list) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Files(self._files(), self.folder, [*other, *self.before], self.after) if isinstance(other, list) else NotImplemented


file_list: Callable[[str], list[str]] | None = None
"""Gives the files of a model folder of this process; None, or an exception of it: the files of the process that was described."""


class Opaque:
    """Stands for a value that cannot be described. Whoever needs it as data fails, as on the original."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def encode(value: Any, types: Iterable[str] = (), depth: int = 0) -> Any:
    """`value` as JSON data. `types` are the type names that a peculiar type name is compared with."""
    if depth > DEPTH:
        return {"opaque": "nested too deeply"}
    if value is None or value is True or value is False or type(value) is str:
        return value
    if isinstance(value, str):
        return encode_name(value, types)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, dict):
        data: dict[str, Any] = {"dict": [[encode(k, types, depth + 1), encode(v, types, depth + 1)] for k, v in dict.items(value)]}
        found, beyond = beyond_of(value, PROBE) if type(value) is not dict and PROBE in value else (False, None)
        if found:
            data["beyond"] = encode(beyond, types, depth + 1)
        return data
    if isinstance(value, tuple):
        data = {"tuple": [encode(v, types, depth + 1) for v in tuple.__iter__(value)]}
        found, beyond = beyond_of(value, tuple.__len__(value) + 1000) if type(value) is not tuple else (False, None)
        if found:
            data["beyond"] = encode(beyond, types, depth + 1)
        return data
    if isinstance(value, Files) and len(value) >= len(value.before) + len(value.after):
        return {"files": value.folder, **{part: [encode(v, types, depth + 1) for v in items] for part, items in
                                          (("before", value.before), ("now", value._files()), ("after", value.after))}}
    if isinstance(value, list):
        return [encode(v, types, depth + 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((encode(v, types, depth + 1) for v in value), key=repr)}     # the same in every process
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), types, depth + 1)
    return {"opaque": f"<{type(value).__module__}.{type(value).__qualname__}>"}


def encode_name(value: str, types: Iterable[str]) -> Any:
    text = str.__str__(value)
    try:
        equal = None if value == PROBE else [name for name in types if name != text and value == name]
        same = None if not value != PROBE else [name for name in types if name != text and not value != name]
    except Exception:
        return text
    if equal == same == []:
        return text
    return {"name": text, "equal": equal and sorted(equal), "same": same and sorted(same)}


def beyond_of(value: Any, key: Any) -> tuple[bool, Any]:
    try:
        return True, value[key]
    except Exception:
        return False, None


def decode(data: Any, depth: int = 0) -> Any:
    """The value that :func:`encode` described. Raises InterfaceError."""
    if depth > 2 * DEPTH:
        raise InterfaceError("nested too deeply")
    if data is None or isinstance(data, (str, bool, int, float)):
        return data
    if isinstance(data, list):
        return [decode(v, depth + 1) for v in data]
    try:
        match data:
            case {"name": str(text), "equal": equal, "same": same}:
                name = TypeName(text)
                name.equal, name.same = (None if names is None else frozenset(names) for names in (equal, same))
                return name
            case {"files": str(folder), "before": list(before), "now": list(now), "after": list(after)}:
                return [*decode(before, depth + 1), *(files_of(folder) or decode(now, depth + 1)), *decode(after, depth + 1)]
            case {"int": str(text)}:
                return int(text, 16)
            case {"float": str(text)}:
                return float(text)
            case {"dict": list(items)}:
                pairs = ((decode(k, depth + 1), decode(v, depth + 1)) for k, v in items)
                return with_beyond(OpenDict, pairs, data, depth) if "beyond" in data else dict(pairs)
            case {"tuple": list(items)}:
                values = (decode(v, depth + 1) for v in items)
                return with_beyond(OpenTuple, values, data, depth) if "beyond" in data else tuple(values)
            case {"set": list(items)}:
                return {decode(v, depth + 1) for v in items}
            case {"opaque": str(text)}:
                return Opaque(text)
    except (TypeError, ValueError) as error:
        raise InterfaceError(f"{error} in {str(data)[:200]}") from error
    raise InterfaceError(f"unknown form {str(data)[:200]}")


def files_of(folder: str) -> list[str]:
    if file_list is None:
        return []
    try:
        return file_list(folder)
    except Exception:
        return []       # a folder that only the pack's process knows


def with_beyond(kind: Any, items: Any, data: dict[str, Any], depth: int) -> Any:
    value = kind(items)
    value.beyond = decode(data["beyond"], depth + 1)
    return value
