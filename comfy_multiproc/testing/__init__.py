"""For testing providers and packs: a virtual card that processes share, tiny models, a real server, the conformance kit.

Importing this package imports neither torch nor ComfyUI; each name does so when it is first used. Import it before
comfy.model_management, which then takes the CPU on a machine without a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from comfy_multiproc.testing import without_gpu

_HOME = {
    "CardError": "card.capacity", "CardFull": "card.capacity", "CardReading": "card.capacity", "read_card": "card.capacity",
    "CardSettings": "card.settings",
    "VirtualCard": "card.virtual", "virtual_card": "card.virtual", "server_environment": "card.virtual",
    "stub_patcher": "stubs",
    "CardProcess": "process", "ProcessError": "process", "RemoteError": "process",
    "Result": "server", "Server": "server", "ServerError": "server", "start_server": "server",
    "check_provider": "conformance",
}


_MODULES = ("tiny_models", "workflows")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


without_gpu.expect()
