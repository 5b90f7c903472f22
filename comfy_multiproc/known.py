"""Classes that both ends of a link have, whose objects cross by their parts: a closed list.

An object is rebuilt without calling anything of its class: its attributes are set as they were. A class that a release does
not have is never met there.
"""
from __future__ import annotations

import enum
import importlib
import sys
from typing import Any

CLASSES = {
    "comfy_execution.graph_utils:ExecutionBlocker",
    "comfy.nested_tensor:NestedTensor",
    "comfy_api.latest._input_impl.video_types:VideoFromFile",
    "comfy_api.latest._input_impl.video_types:VideoFromComponents",
    "comfy_api.latest._util.video_types:VideoComponents",
    "comfy_api.latest._util.geometry_types:VOXEL",
    "comfy_api.latest._util.geometry_types:MESH",
    "comfy_api.latest._util.geometry_types:SPLAT",
    "comfy_api.latest._util.geometry_types:File3D",
    "comfy_api.latest._util.image_types:SVG",
    "comfy_api.latest._input.curve_types:MonotoneCubicCurve",
    "comfy_api.latest._input.curve_types:LinearCurve",
    "comfy_api.latest._input.range_types:RangeInput",
}
QUANTIZED = "comfy_kitchen.tensor.base:QuantizedTensor"
ENUMS = ("comfy.", "comfy_api.", "comfy_execution.")


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def find(name: str) -> type:
    """The class of that name. Raises ValueError if it is not on the list."""
    if name not in CLASSES:
        raise ValueError(f"objects of {name!r} are not sent by their parts")
    module, _, qualname = name.partition(":")
    return getattr(importlib.import_module(module), qualname)


def rebuild(name: str, parts: dict[str, Any]) -> Any:
    """An object of a class of the list with these attributes."""
    cls = find(name)
    value: Any = object.__new__(cls)
    value.__dict__.update(parts)
    return value


def is_enum(cls: type) -> bool:
    """Whether its members cross by their name."""
    return issubclass(cls, enum.Enum) and cls.__module__.startswith(ENUMS)


def member(name: str, of: str) -> Any:
    """A member of an enumeration of ComfyUI's own. Raises ValueError if there is none."""
    module, _, qualname = of.partition(":")
    cls: Any = sys.modules.get(module) if module.startswith(ENUMS) else None
    for part in qualname.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise ValueError(f"{of!r} is no enumeration of ComfyUI's here")
    return cls[name]


def quantized_parts(value: Any) -> dict[str, Any]:
    """A quantised tensor's data, the name of its layout, and the layout's parameters."""
    return {"qdata": value._qdata, "layout": value._layout_cls, "params": dict(vars(value._params))}


def rebuild_quantized(parts: dict[str, Any]) -> Any:
    """The quantised tensor of these parts. Raises ValueError for a layout that is not registered here."""
    from comfy_kitchen.tensor import base
    try:
        layout = base.get_layout_class(parts["layout"])
    except KeyError:
        raise ValueError(f"the quantisation layout {parts['layout']!r} is not known in this process") from None
    params = object.__new__(layout.Params)
    params.__dict__.update(parts["params"])
    return base.QuantizedTensor(parts["qdata"], parts["layout"], params)
