"""Weights that are kept twice: cached for hooks on a card, and loaded again for another GPU."""
from __future__ import annotations

from typing import Any

from . import gates, ram, registry
from .figures import manager


def shared_counter(counter: Any, device: Any) -> Any:
    """What is spent in place of a MemoryCounter that has been made from what was free on `device`; None if none has been made."""
    return _SharedCounter(counter, device) if registry.entries and counter is not None else counter


class _SharedCounter:
    """A MemoryCounter that is never above what is free by now, whoever else has taken some."""

    def __init__(self, counter: Any, device: Any):
        self._counter, self._device = counter, device

    def use(self, weight: Any) -> bool:
        self._lower()
        return bool(self._counter.use(weight))

    def is_useable(self, used: int) -> bool:
        self._lower()
        return bool(self._counter.is_useable(used))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counter, name)

    def _lower(self) -> None:
        self._counter.value = min(self._counter.value, manager().get_free_memory(self._device))


def admit_copy(patcher: Any) -> None:
    """The weights of `patcher` are about to be loaded a second time, for another GPU: have peers make room in host memory."""
    if registry.entries:
        ram.admit(patcher.model_size())


def copy_loaded(patcher: Any) -> None:
    """They are meant for its device."""
    gates.mean(patcher)
