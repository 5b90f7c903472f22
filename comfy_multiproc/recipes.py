"""How objects of the host that cannot cross were made, so that a worker that needs one can make its own.

A MODEL from a core loader, a SAMPLER, a CONTROL_NET: such outputs stay in the host. When an isolated node takes one, its
worker runs the core node that made it, with the same inputs, once; the model file's pages are shared between the
processes, and the host's copy is never loaded onto a card for it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .handles import Handle
from .nodecall import RECIPE, Call

DEPTH = 6       # how deep into lists and dictionaries objects are looked for


@dataclass(eq=False)
class Recipe:
    """The call of a core node that made an object, and which of its outputs that is."""
    number: int
    call: Call
    values: dict[str, Any] = field(repr=False)
    slot: int = 0


class Recipes:
    """The recipes of the objects that are alive. `forget(number)` is called when nothing needs what a recipe made any more, on
    whichever thread let go of it."""

    def __init__(self, forget: Callable[[int], None]):
        self._forget = forget
        self._numbers = 0
        self._known: dict[int, tuple[Any, Recipe]] = {}     # id of the object -> its weak reference, or itself
        self._lock = threading.RLock()

    def record(self, call: Call, values: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        """A core node of this process has made `outputs`."""
        slots = [slot for slot, value in enumerate(outputs) if stays(value)]
        if not slots:
            return
        self.prune()
        with self._lock:
            self._numbers += 1
            number = self._numbers
        for slot in slots:
            self._remember(outputs[slot], Recipe(number, call, values, slot))

    def _remember(self, value: Any, recipe: Recipe) -> None:
        key = id(value)
        with self._lock:
            known = self._known.get(key)
            if known is not None and alive(known[0]) is value:
                return      # a node that passes on what it got has not made it
            try:
                reference: Any = weakref.ref(value, lambda _: self._gone(key, recipe))
            except TypeError:
                reference = [value]     # a list or dictionary; see prune
            self._known[key] = reference, recipe

    def of(self, value: Any) -> Recipe | None:
        """How that very object was made, if it is known."""
        known = self._known.get(id(value))
        return known[1] if known is not None and alive(known[0]) is value else None

    def prune(self) -> None:
        """Let go of lists and dictionaries that nobody else refers to: they tell nobody when that is so."""
        with self._lock:
            for key, (reference, recipe) in list(self._known.items()):
                if isinstance(reference, list) and sys.getrefcount(reference[0]) <= 2:
                    self._gone(key, recipe)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def _gone(self, key: int, recipe: Recipe) -> None:
        with self._lock:
            known = self._known.get(key)
            if known is None or known[1] is not recipe:
                return
            del self._known[key]
            # A copy: other objects may end while this looks.
            last = not any(r.number == recipe.number for _, r in list(self._known.values()))
        if last:
            self._forget(recipe.number)

    def crossing(self, value: Any) -> Any:
        """`value` with the recipe in the place of an object that has one; also of the items of a list."""
        recipe = self.of(value)
        if recipe is not None:
            values = {**recipe.values, "inputs": {k: self.crossing(v) for k, v in recipe.values["inputs"].items()}}
            return {RECIPE: recipe.number, "call": recipe.call.data(), "values": values, "slot": recipe.slot}
        if type(value) is list and any(self.of(item) is not None for item in value):
            return [self.crossing(item) for item in value]
        return value


def alive(reference: Any) -> Any:
    return reference[0] if isinstance(reference, list) else reference()


def stays(value: Any, depth: int = 0) -> bool:
    """Whether an output has something in it that cannot cross by its value."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, Handle)):
        return False
    if isinstance(value, (list, tuple)):
        return depth < DEPTH and any(stays(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return depth < DEPTH and any(stays(item, depth + 1) for item in value.values())
    return not crosses(type(value))


def crosses(kind: type) -> bool:
    from . import known
    module = kind.__module__.partition(".")[0]
    return module in ("torch", "numpy", "builtins", "PIL", "comfy_kitchen") or known.name_of(kind) in known.CLASSES
