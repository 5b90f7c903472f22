"""Tests run on any machine: ComfyUI is imported as with --cpu where torch finds no accelerator."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from typing import Any

from comfy_multiproc.testing.card.settings import VARIABLE

_MANAGER = "comfy.model_management"


class _BeforeTheManager:
    """Selects --cpu right before comfy.model_management is imported, which looks for its device at import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == _MANAGER:
            sys.meta_path.remove(self)
            # Without ComfyUI on sys.path the import that led here says so itself.
            with contextlib.suppress(ImportError):
                _select()
        return None


def expect() -> None:
    """From now on an import of comfy.model_management selects --cpu if there is no accelerator; nothing is imported before."""
    # A process with a card from its environment has been given its arguments; the card in C++ is an accelerator.
    if _MANAGER not in sys.modules and not os.environ.get(VARIABLE):
        sys.meta_path.insert(0, _BeforeTheManager())


def _select() -> None:
    import torch

    import comfy.cli_args
    # torch has its name for all accelerators together since 2.6.
    found = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available() or torch.backends.mps.is_available()
    if not found and comfy.cli_args.args.directml is None:
        comfy.cli_args.args.cpu = True
