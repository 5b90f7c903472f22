"""Assignments that can be taken back."""

from __future__ import annotations

import types
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes set on modules and classes, with what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # A module or class may answer for an attribute that it does not have itself: that one is restored by deleting the new one.
        before = vars(owner).get(name, _ABSENT) if isinstance(owner, (type, types.ModuleType)) else getattr(owner, name)
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore everything, last assignment first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
