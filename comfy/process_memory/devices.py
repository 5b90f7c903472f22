"""Device keys: one name for one card in every process.

``CUDA_VISIBLE_DEVICES`` gives the same card different indices in different processes, so indices name nothing
outside of one. RAM has no key.
"""
from __future__ import annotations

import os
import sys
from typing import Any

_names: dict[tuple[str, int], str] = {}
_keys: dict[tuple[str, int], str | None] = {}
_whole: dict[str, bool] = {}


def key(device: Any) -> str | None:
    """The key of a ``torch.device``, or None where it is RAM (a plain ``cpu``) or no device at all.

    ``cuda:<uuid>`` for NVIDIA and AMD cards, ``xpu:<uuid>`` for Intel's, else ``<type>:<index>``.
    """
    if device is None:
        return None
    if isinstance(device, (str, int)):
        device = sys.modules["torch"].device(device)
    place = (device.type, device.index)
    try:
        return _keys[place]
    except KeyError:
        pass
    if device.index is None and device.type != "cpu":
        return key(_indexed(device))  # not remembered: the current device of a process can change
    found = _names.get(place) or (None if place == ("cpu", None) else f"{device.type}:{_identity(device)}")
    _keys[place] = found
    return found


def is_card(key: str) -> bool:
    """Whether `key` names a device: claims are also made under names of their own, for host memory (``ram:...``) and for models
    that are meant for a device (``...+meant``)."""
    return not key.startswith("ram:") and not key.endswith("+meant")


def name(device: Any, key: str | None) -> None:
    """Give `device` the key `key` from now on (a card that torch does not know the identity of); None takes it back."""
    place = (device.type, device.index)
    if key is None:
        _names.pop(place, None)
    else:
        _names[place] = key
    _keys.clear()


def whole_card(device: Any) -> bool:
    """Whether the free figure of this backend covers the whole card, or only what this process has taken of it."""
    place = key(device)
    if place is not None and place in _whole:
        return _whole[place]
    # Windows gives each process a budget of its own, and for Intel cards ComfyUI subtracts from the card's total
    # what its own process has reserved.
    return device.type != "xpu" and os.name != "nt"


def cover(key: str, whole: bool | None) -> None:
    """Say whether the free figure of the card `key` covers the whole card; None goes back to what is known of the backend."""
    if whole is None:
        _whole.pop(key, None)
    else:
        _whole[key] = whole


def _indexed(device: Any) -> Any:
    torch = sys.modules["torch"]
    backend = getattr(torch, device.type, None)
    current = getattr(backend, "current_device", None)
    return torch.device(device.type, current() if current is not None else 0)


def _identity(device: Any) -> str:
    if device.type != "cpu":
        backend = getattr(sys.modules["torch"], device.type, None)
        properties = getattr(backend, "get_device_properties", None)
        uuid = None if properties is None else getattr(properties(device), "uuid", None)
        if uuid is not None:
            return str(uuid)
    return str(device.index)
