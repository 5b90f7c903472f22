"""A pack that gives out and takes in values of every kind that ComfyUI's own nodes exchange."""

import io
import math

import numpy as np
import torch
from comfy_api.latest import InputImpl, Types
from comfy_execution.graph_utils import ExecutionBlocker


def values():
    """By name; the same every time."""
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    batch = torch.arange(4 * 8 * 8 * 3, dtype=torch.float32).reshape(4, 8, 8, 3) / 1000
    found = {
        "plain": [None, True, 2 ** 70, -1.5, math.inf, "é\ud800", b"\0bytes", (1, [2, (3,)]), {1: "a", (2,): "b"}, {3, 4}, 1 + 2j, slice(1, 2)],
        "view": batch[1:2], "both": [batch, batch[2]], "strided": base.transpose(0, 2)[:, ::2], "empty": torch.zeros(0, 3), "scalar": torch.tensor(3),
        "grad": torch.ones(3, requires_grad=True), "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "latent": {"samples": base, "noise_mask": base > 3, "batch_index": [0, 1]},
        "conditioning": [[base, {"pooled_output": base[0], "guidance": 3.5, "area": (1, 2, 3, 4)}]],
        "audio": {"waveform": base, "sample_rate": 44100}, "mask": base[0],
        "blocker": ExecutionBlocker("why"),
        "video": InputImpl.VideoFromComponents(Types.VideoComponents(images=batch, audio=None, frame_rate=24)),
        "stream": io.BytesIO(b"x" * 5000),
    }
    for name in ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"):
        found[name] = torch.ones(5).to(getattr(torch, name))
    return found


def differs(a, b):
    """Why two values are not the same; "" if they are."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a!r} became {b!r}"
        same = a.reshape(-1).contiguous().view(torch.uint8).equal(b.reshape(-1).contiguous().view(torch.uint8)) if a.numel() else True
        return "" if same else "other numbers"
    if type(a) is not type(b):
        return f"{type(a)} became {type(b)}"
    if isinstance(a, np.ndarray):
        return "" if a.dtype == b.dtype and np.array_equal(a, b) else "another array"
    if isinstance(a, dict):
        return f"keys {list(b)}" if list(a) != list(b) else next((why for k in a if (why := differs(a[k], b[k]))), "")
    if isinstance(a, (list, tuple)):
        return f"{len(b)} items" if len(a) != len(b) else next((why for x, y in zip(a, b, strict=True) if (why := differs(x, y))), "")
    if isinstance(a, io.BytesIO):
        return "" if a.getvalue() == b.getvalue() else "other bytes"
    if hasattr(a, "get_components"):
        return differs(a.get_components().images, b.get_components().images)
    if isinstance(a, ExecutionBlocker):
        return "" if a.message == b.message else "another message"
    return "" if a == b else f"{a!r} became {b!r}"


class ZooGive:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": (sorted(values()),)}}

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    CATEGORY = "zoo"

    def run(self, name):
        return (values()[name],)


class ZooGiveAll(ZooGive):
    """Everything in one value."""
    RETURN_TYPES = ("DICT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def run(self):
        found = values()
        del found["blocker"]
        return (found,)


class ZooCheckAll:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"given": ("DICT",)}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, given):
        ours = values()
        wrong = {name: why for name, value in given.items() if (why := differs(ours[name], value))}
        storage = given["view"].untyped_storage().nbytes()
        shared = given["both"][0].untyped_storage().data_ptr() == given["both"][1].untyped_storage().data_ptr()
        return {"ui": {"wrong": [wrong], "missing": [sorted(set(ours) - set(given) - {"blocker"})], "storage": [storage], "shared": [shared]}}


class ZooBig:
    """A list of small tensors, or one large tensor."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"count": ("INT", {"default": 1, "max": 100000}), "numbers": ("INT", {"default": 1, "max": 1 << 30}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("LIST",)
    FUNCTION = "run"
    CATEGORY = "zoo"

    def run(self, count, numbers, seed):
        return ([torch.full((numbers,), float(i)) for i in range(count)],)


class ZooSum:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"items": ("LIST",)}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, items):
        import os
        return {"ui": {"sum": [sum(float(t[0]) + float(t[-1]) for t in items)], "files": [len(os.listdir("/proc/self/fd"))]}}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (ZooGive, ZooGiveAll, ZooCheckAll, ZooBig, ZooSum)}
