"""For testing providers and packs: a virtual card that processes share, tiny models, a real server, the conformance kit.

Importing this package imports neither torch nor ComfyUI; each name does so when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CardError": "card.capacity", "CardFull": "card.capacity", "CardReading": "card.capacity", "read_card": "card.capacity",
    "CardSettings": "card.settings",
    "VirtualCard": "card.virtual", "virtual_card": "card.virtual", "server_environment": "card.virtual",
    "stub_patcher": "stubs",
    "check_provider": "conformance",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
