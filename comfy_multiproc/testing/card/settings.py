"""What a virtual card is like: given in Python, or as text in the environment for a server or a worker."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE = "COMFY_VIRTUAL_CARD"             # the settings, as CardSettings.parse reads them
FILE_VARIABLE = "COMFY_VIRTUAL_CARD_FILE"   # the capacity file that the processes share

FORMS = ("python", "npu")
STATES = ("normal", "low", "no", "high")
DTYPES = ("fp16", "bf16", "fp8")
MIXING = ("error", "log", "off")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """`400M`, `1.5G`, `64K`, `1000`: bytes, in powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes; write 400M, 1.5G, 64K or 1000")
    return int(float(match[1]) * UNITS[match[2].upper()])


@dataclass(frozen=True)
class CardSettings:
    """Sizes in bytes. None leaves a figure as ComfyUI computes it; in the Python form it is scaled to the card instead."""

    size: int                           # of each card
    count: int = 1                      # cards
    form: str = "python"                # "python": cpu:0, cpu:1, ...; "npu": the C++ device npu:0, npu:1, ...
    state: str = "normal"               # vram state, Python form only: the C++ form obeys --lowvram and the like
    inference: int | None = None        # what is kept free for inference: minimum_inference_memory() less `reserved`
    reserved: int | None = None         # extra_reserved_memory()
    weight_ratio: float | None = None   # MIN_WEIGHT_MEMORY_RATIO; Python form: 0.0, as on Nvidia
    dtypes: tuple[str, ...] = ("fp16", "bf16")  # what the card computes in, Python form only
    context: int = 0                    # what each process occupies on each card it uses
    keep_freed: bool = False            # freed bytes stay with the process until its cache is emptied
    mixing: str = "error"               # operands on two devices, Python form only: error, log or off

    def __post_init__(self) -> None:
        for name, value, choices in (("form", self.form, FORMS), ("state", self.state, STATES), ("mixing", self.mixing, MIXING)):
            if value not in choices:
                raise ValueError(f"virtual card: {name}={value} is not one of {', '.join(choices)}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"virtual card: dtypes={dtype} is not one of {', '.join(DTYPES)}, none")
        if self.size <= 0 or self.count <= 0:
            raise ValueError(f"virtual card: size={self.size} and count={self.count} must be above 0")
        if self.form == "npu" and (self.state != "normal" or self.dtypes != ("fp16", "bf16")):
            raise ValueError("virtual card: state and dtypes belong to the Python form; with form=npu use ComfyUI's own arguments")

    @classmethod
    def parse(cls, text: str) -> CardSettings:
        """`size=400M,count=2,state=low,dtypes=fp16+bf16`. Raises ValueError naming the part that is wrong."""
        readers: dict[str, Callable[[str], Any]] = {
            "size": parse_bytes, "count": int, "form": str, "state": str, "inference": parse_bytes,
            "reserved": parse_bytes, "weight_ratio": float, "context": parse_bytes, "mixing": str,
            "dtypes": lambda t: () if t == "none" else tuple(t.split("+")),
            "keep_freed": lambda t: {"1": True, "0": False, "true": True, "false": False}[t.lower()]}
        values = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            if name not in readers:
                raise ValueError(f"virtual card: no setting {name!r}; there are {', '.join(readers)}")
            try:
                values[name] = readers[name](value)
            except (ValueError, KeyError) as e:
                raise ValueError(f"virtual card: {part}: {e}") from None
        if "size" not in values:
            raise ValueError(f"virtual card: {text!r} names no size; write size=400M")
        return cls(**values)

    def text(self) -> str:
        """The settings for the environment; parse() reads them back."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default or value is None:
                continue
            if field.name == "dtypes":
                value = "+".join(value) or "none"
            parts.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts)
