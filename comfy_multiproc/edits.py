"""What importing a pack changed in ComfyUI itself. In a worker such changes would reach nobody but that worker."""

from __future__ import annotations

import sys
import types
from typing import Any

CORE = ("comfy", "comfy_extras", "comfy_execution", "comfy_api", "app", "nodes", "execution", "server", "latent_preview", "protocol")
# What ComfyUI itself keeps there and changes as it runs, and what is carried to the host by other ways.
STATE = {
    "comfy.model_management", "comfy.memory_management", "comfy.pinned_memory", "comfy.cli_args", "comfy.utils",
    "comfy_execution.progress", "comfy_execution.cache_provider", "comfy_api.feature_flags",
}
CARRIED = {("nodes", "NODE_CLASS_MAPPINGS"), ("nodes", "NODE_DISPLAY_NAME_MAPPINGS"), ("nodes", "EXTENSION_WEB_DIRS"),
           ("nodes", "LOADED_MODULE_DIRS")}
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, classmethod, staticmethod, property)
NAMED = 12      # changes that are listed by name


class Snapshot:
    """The functions, classes, methods and lists of ComfyUI's modules at one moment. Costs some 30 ms."""

    def __init__(self) -> None:
        self._things = {name: dict(things_of(name, module)) for name, module in core_modules()}

    def changes(self) -> list[str]:
        """What differs now, in words; modules that were imported since are not looked at."""
        found = []
        for name, module in core_modules():
            before = self._things.get(name)
            if before is None:
                continue
            for key, thing in things_of(name, module):
                if key in before and (text := difference(before[key], thing)):
                    found.append(f"{key} {text}")
        return found if len(found) <= NAMED else [*found[:NAMED], f"and {len(found) - NAMED} more"]


def core_modules() -> list[tuple[str, types.ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items())
            if name.partition(".")[0] in CORE and isinstance(module, types.ModuleType) and not name.startswith("comfy.process_memory")]


def things_of(name: str, module: types.ModuleType) -> list[tuple[str, Any]]:
    things: list[tuple[str, Any]] = []
    for attribute, value in list(vars(module).items()):
        if (name, attribute) in CARRIED or attribute.startswith("__"):
            continue
        if isinstance(value, type) and value.__module__ == name:
            things.append((f"{name}.{attribute}", value))
            for member, inner in list(vars(value).items()):
                if isinstance(inner, CALLABLE):
                    things.append((f"{name}.{attribute}.{member}", inner))
                elif isinstance(inner, (list, tuple, set)) and name not in STATE:
                    things.append((f"{name}.{attribute}.{member}", kept(inner)))
        elif isinstance(value, CALLABLE):
            things.append((f"{name}.{attribute}", value))
        elif isinstance(value, (list, tuple, set, dict)) and name not in STATE:
            things.append((f"{name}.{attribute}", kept(value)))
    return things


class Kept(list):
    """The content of a collection at one moment."""


def kept(value: Any) -> Kept:
    # Strings are what such lists are about; of anything else the identity says whether it was exchanged.
    return Kept(item if isinstance(item, (str, int)) else id(item) for item in list(value))


def difference(before: Any, now: Any) -> str:
    if not isinstance(before, Kept):
        return "" if before is now or isinstance(now, Kept) else "was replaced"
    if not isinstance(now, Kept):
        return "was replaced"
    added = [item for item in now if item not in before]
    gone = [item for item in before if item not in now]
    words = [f"{verb} {', '.join(repr(i) if isinstance(i, str) else 'an entry' for i in items[:4])}"
             for verb, items in (("got", added), ("lost", gone)) if items]
    return " and ".join(words)
