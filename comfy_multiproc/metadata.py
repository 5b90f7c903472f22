"""The hidden inputs EXTRA_PNGINFO and PROMPT: nodes edit them in place, for what is saved with pictures and for other nodes.

A worker's node has copies. What it has changed in them comes back with its result, change by change, because several nodes that
run at the same time may have begun with the same state.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

CHANGES = "comfy_multiproc.metadata"    # marks a result with changes


def places_of(objects: Sequence[Any], values: dict[str, Any]) -> list[list[Any]]:
    """In the host: where these very dictionaries, or a list of one, are among the values of a call: ``[part, name, which]``."""
    return [[part, name, which] for part in ("inputs", "hidden") for name, value in values.get(part, {}).items()
            for which, found in enumerate(objects) if type(found) is dict and (value is found or type(value) is list and len(value) == 1 and value[0] is found)]


class Watched:
    """In a worker: what stands at the places of :func:`places_of`, to be compared with what it will be."""

    def __init__(self, values: dict[str, Any]):
        self._watched = []
        for part, name, which in values.get("metadata", ()):
            now = values[part][name]
            now = now[0] if type(now) is list else now
            self._watched.append((which, copy.deepcopy(now), now))

    def with_changes(self, result: Any) -> Any:
        """The result, with what has been changed since."""
        found = [[which, *change] for which, before, now in self._watched for change in changes(before, now)]
        return {CHANGES: found, "result": result} if found else result


def changes(before: Any, now: Any) -> Iterator[list[Any]]:
    """``[path, value]`` for what is there now and was not, ``[path]`` for what is not there any more."""
    if type(before) is type(now) is dict:
        for key in [*now, *(key for key in before if key not in now)]:
            if key not in now:
                yield [[key]]
            elif key not in before:
                yield [[key], now[key]]
            else:
                yield from ([[key, *path], *value] for path, *value in changes(before[key], now[key]))
    elif type(before) is type(now) is list and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from ([[index, *path], *value] for path, *value in changes(one, other))
    elif before is not now and (type(before) is not type(now) or _differ(before, now)):
        yield [[], now]


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except Exception:
        return False    # nothing that could be saved


def take_over(result: Any, objects: Sequence[Any]) -> Any:
    """In the host: the result without the changes, which are made in `objects`; those whose place is gone are left out."""
    if not (isinstance(result, dict) and CHANGES in result):
        return result
    for which, path, *value in result[CHANGES]:
        try:
            holder = objects[which]
            for key in path[:-1]:
                holder = holder[key]
            if value:
                _put(holder, path[-1], value[0])
            else:
                del holder[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
    return result["result"]


def _put(holder: Any, key: Any, value: Any) -> None:
    there = holder.get(key) if isinstance(holder, dict) else None
    if type(there) is type(value) is dict:      # another node has added it meanwhile
        for inner, part in value.items():
            _put(there, inner, part)
    else:
        holder[key] = value
