"""References to objects that stay in the process that made them, and what keeps those objects alive.

The owner counts every copy of a handle that it gives out; the holder says how many it has let go. Numbers travel rather than
"the last one is gone", so a copy that is under way while an earlier one is dropped is never lost.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class HandleLost(RuntimeError):
    """The process that held the object has ended. Running the node that made the object again makes a new one."""


class Handle:
    """An object of another process: a MODEL, a CLIP, whatever cannot be sent. Compared by identity; one per object and link.

    `owner` names the process, `id` the object there. `type_name` is its class, `text` a short description of it, `io_type` the
    ComfyUI type it is an output of, for whoever knows it to set. `lost` says why it is of no more use, or is None. `held_ram` is
    how many bytes of host memory its owner kept for the object when it gave the handle out.
    """

    __slots__ = ("__weakref__", "_held", "_route", "held_ram", "id", "io_type", "lost", "owner", "text", "type_name")

    def __init__(self, owner: str, id: int, type_name: str, text: str = "", io_type: str = "", route: object = None):
        self.owner, self.id, self.type_name, self.text, self.io_type = owner, id, type_name, text, io_type
        self.lost: str | None = None
        self.held_ram = 0
        self._route = route         # the link end over which its owner is reached
        self._held = [0]            # copies received and not yet given back; outlives the handle in its finalizer

    def check(self) -> None:
        """Raises HandleLost if the owner has ended."""
        if self.lost is not None:
            raise HandleLost(f"{self.described} is gone: {self.lost}. Run the node that made it again.")

    @property
    def described(self) -> str:
        """What it is, for a message."""
        kind = f"{self.io_type} ({self.type_name})" if self.io_type else self.type_name
        return f"the {kind} of process {self.owner}"

    def __repr__(self) -> str:
        return f"<Handle {self.text or self.type_name} of {self.owner}{' (lost)' if self.lost else ''}>"

    def __getattr__(self, name: str) -> NoReturn:
        # Also what hasattr() and copy protocols see, so it has to be an AttributeError.
        raise AttributeError(f"{name!r}: {self.described} stays in that process; only a node that runs there can use it")

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.described} cannot be pickled")


class HandleTable:
    """The objects of this process that others hold. Any thread.

    `process` is this process's name as other processes know it, different for every start. `drop` gets each object that
    nobody holds any more, so that a model can end its life on the execution thread; by default it ends where the last
    release arrives.
    """

    def __init__(self, process: str, drop: Callable[[object], None] | None = None):
        self.process = process
        self._drop = drop
        self._lock = threading.Lock()
        self._last = 0
        self._objects: dict[int, list[Any]] = {}    # id -> [object, count]
        self._ids: dict[int, int] = {}              # id() of an object in _objects -> its id

    def retain(self, value: object) -> int:
        """Count one more holder of the object and give its id; the same id while anybody holds it."""
        with self._lock:
            number = self._ids.get(id(value))
            if number is None:
                self._last += 1
                number = self._last
                self._ids[id(value)] = number
                self._objects[number] = [value, 0]
            self._objects[number][1] += 1
            return number

    def release(self, number: int, count: int = 1) -> None:
        """Count `count` holders less; the object is dropped with the last."""
        with self._lock:
            entry = self._objects.get(number)
            if entry is None:
                return
            entry[1] -= count
            if entry[1] > 0:
                return
            del self._objects[number]
            del self._ids[id(entry[0])]
        value = entry.pop(0)
        if self._drop is not None:
            self._drop(value)

    def get(self, number: int) -> Any:
        """The object. Raises HandleLost if nobody holds it any more."""
        with self._lock:
            entry = self._objects.get(number)
        if entry is None:
            raise HandleLost(f"object {number} of process {self.process} is no longer held here. Run the node that made it again.")
        return entry[0]

    @property
    def count(self) -> int:
        """Objects that others hold."""
        return len(self._objects)


def handles_in(value: object) -> Iterator[Handle]:
    """Every handle in a value: itself, or nested in lists, tuples, sets and dictionaries (as in CONDITIONING)."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Handle):
            yield item
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            todo.extend(reversed(list(item.values() if isinstance(item, dict) else item)))
