"""Let ComfyUI find the C++ card where it looks for an Ascend NPU: it imports torch_npu and asks torch.npu."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

from comfy_multiproc.testing.card.capacity import CapacityFile
from comfy_multiproc.testing.card.settings import CardSettings


def install(file: CapacityFile) -> None:
    """Answer `import torch_npu` from now on. The device is built, if need be, and registered at that import."""
    sys.meta_path.insert(0, _Finder(file))


def figures(mm: types.ModuleType, settings: CardSettings) -> None:
    """Set in comfy.model_management what `settings` names; with none of these settings ComfyUI stays untouched."""
    from comfy_multiproc.testing.card import comfy
    from comfy_multiproc.testing.card.patches import Patches
    comfy.figures(mm, settings, Patches())


def register(file: CapacityFile) -> types.ModuleType:
    """Make npu:0, npu:1, ... devices of torch, for the rest of the process. Returns torch.npu. Raises BuildError."""
    import torch

    from comfy_multiproc.testing.card import npu
    from comfy_multiproc.testing.cpp import build
    extension = build.load()
    extension.open(file.path)
    torch.version.cuda = None       # a torch built for an NPU says so
    module = npu.interface(file)
    module.current_device = extension.current_device                                # type: ignore[attr-defined]
    module.set_device = lambda device: extension.set_device(_index(device))         # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _index(device: Any) -> int:
    import torch
    return device if isinstance(device, int) else torch.device(device).index or 0


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, file: CapacityFile):
        self.file = file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "torch_npu" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.npu = register(self.file)        # type: ignore[attr-defined]
