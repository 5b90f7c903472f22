"""Models of a chosen size, for tests of the memory manager."""

from __future__ import annotations

from typing import Any

import torch


def stub_patcher(nbytes: int, device: Any = None, *, layers: int = 8) -> Any:
    """A real comfy.model_patcher.ModelPatcher around plain linear layers of `nbytes` in all.

    `nbytes` is a multiple of 4 x `layers`; `device` is ComfyUI's default device if None; weights start on the CPU and go back
    there. Each layer loads and unloads by itself, so the model can be loaded in part. Calling the model uses every weight.
    """
    import comfy.model_management
    import comfy.model_patcher
    import comfy.ops
    if nbytes <= 0 or nbytes % (4 * layers):
        raise ValueError(f"stub_patcher: {nbytes} bytes do not divide into {layers} layers of float32")

    class Stub(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = nbytes // (4 * layers)
            self.layers = torch.nn.ModuleList(comfy.ops.manual_cast.Linear(1, rows, bias=False) for _ in range(layers))
            for layer in self.layers:
                layer.weight = torch.nn.Parameter(torch.zeros(rows, 1), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).mean(-1, keepdim=True)
            return x

    load_device = comfy.model_management.get_torch_device() if device is None else torch.device(device)
    return comfy.model_patcher.ModelPatcher(Stub(), load_device=load_device, offload_device=torch.device("cpu"))
