"""What makes ComfyUI take cpu:0, cpu:1, ... for cards, and what a small card needs of either form.

No function that the patch series hooks is replaced. ComfyUI's memory functions run their own bodies, hooks included; what
differs is what these bodies call: the backend is an Ascend NPU (`npu.py`), and a device of the card has no `type`, which is how
upstream tells the CPU from a card. The rest is numbers of the module that the start-up with --cpu has set for the CPU.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch

from comfy_multiproc.testing.card.capacity import CapacityFile
from comfy_multiproc.testing.card.modes import card_index
from comfy_multiproc.testing.card.patches import Patches
from comfy_multiproc.testing.card.settings import CardSettings

MIB = 1 << 20
INFERENCE = 1024 * 1024 * 1024 * 0.8    # what minimum_inference_memory() adds to the reserve


def pose(mm: types.ModuleType, settings: CardSettings, file: CapacityFile, npu: types.ModuleType, patches: Patches) -> None:
    """Let `mm` (comfy.model_management, imported with --cpu) see the cards of the Python form."""
    if not mm.args.cpu:
        raise RuntimeError("virtual card: start ComfyUI with --cpu, or set comfy.cli_args.args.cpu before comfy.model_management is imported")

    def has_attribute(owner: Any, name: str) -> bool:
        return not (name == "type" and card_index(owner) is not None) and builtins.hasattr(owner, name)

    devices = [torch.device("cpu", i) for i in range(file.cards)]

    def get_torch_device() -> torch.device:
        return devices[npu.current_device()]

    def get_all_torch_devices(exclude_current: bool = False) -> list[torch.device]:
        return [d for d in devices if not (exclude_current and d == get_torch_device())]

    patches.set(torch, "npu", npu)
    patches.set(mm, "hasattr", has_attribute)
    patches.set(mm, "get_torch_device", get_torch_device)
    if hasattr(mm, "get_all_torch_devices"):
        patches.set(mm, "get_all_torch_devices", get_all_torch_devices)
    patches.set(mm, "is_nvidia", lambda: False)     # a CUDA build of torch says that it is
    state = {"normal": mm.VRAMState.NORMAL_VRAM, "low": mm.VRAMState.LOW_VRAM, "no": mm.VRAMState.NO_VRAM,
             "high": mm.VRAMState.HIGH_VRAM}[settings.state]
    size = file.size(0)     # of the file, not of the settings: the file may have been there before
    reserved = size // 20 if mm.args.reserve_vram is None else None
    numbers = {"cpu_state": mm.CPUState.GPU, "npu_available": True, "xpu_available": False, "mlu_available": False,
               "directml_enabled": False, "total_vram": size / MIB, "vram_state": state, "set_vram_to": state,
               "lowvram_available": True, "ENABLE_PYTORCH_ATTENTION": True, "NUM_STREAMS": 0,
               "FORCE_FP32": mm.FORCE_FP32 or "fp16" not in settings.dtypes and "bf16" not in settings.dtypes,
               "SUPPORT_FP8_OPS": "fp8" in settings.dtypes}
    for name, value in numbers.items():
        patches.set(mm, name, value)
    for dtype, gate in (("fp16", "should_use_fp16"), ("bf16", "should_use_bf16")):
        if settings.dtypes and dtype not in settings.dtypes:
            patches.set(mm, gate, lambda *args, **kwargs: False)
    figures(mm, settings, patches, inference=size // 10, reserved=reserved, weight_ratio=0.0)


def figures(mm: types.ModuleType, settings: CardSettings, patches: Patches, *, inference: int | None = None,
            reserved: int | None = None, weight_ratio: float | None = None) -> None:
    """Set what `settings` says, else the defaults given here, else nothing: ComfyUI's own figures suit no card of some MiB."""
    inference = settings.inference if settings.inference is not None else inference
    reserved = settings.reserved if settings.reserved is not None else reserved
    weight_ratio = settings.weight_ratio if settings.weight_ratio is not None else weight_ratio
    if reserved is not None:
        patches.set(mm, "EXTRA_RESERVED_VRAM", reserved)
    if weight_ratio is not None:
        patches.set(mm, "MIN_WEIGHT_MEMORY_RATIO", weight_ratio)
    if inference is not None:
        function = own_function(mm, "minimum_inference_memory")
        constants = function.__code__.co_consts
        if INFERENCE not in constants:
            raise RuntimeError("virtual card: minimum_inference_memory() no longer adds 0.8 GiB")
        code = function.__code__.replace(co_consts=tuple(inference if c == INFERENCE else c for c in constants))
        patches.set(function, "__code__", code)


def own_function(module: types.ModuleType, name: str) -> types.FunctionType:
    """The function as the module's file defines it, below whatever decorates it."""
    seen: list[Any] = [getattr(module, name)]
    for found in seen:
        if isinstance(found, types.FunctionType):
            if found.__code__.co_name == name and found.__code__.co_filename == module.__file__:
                return found
            inner = [getattr(found, "__wrapped__", None), *(cell.cell_contents for cell in found.__closure__ or ())]
            seen += [f for f in inner if isinstance(f, types.FunctionType) and f not in seen]
    raise RuntimeError(f"virtual card: {module.__name__}.{name} is not a function of {module.__file__}")
