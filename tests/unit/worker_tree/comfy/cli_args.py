import enum
from types import SimpleNamespace


class PerformanceFeature(enum.Enum):
    Fp16Accumulation = "fp16_accumulation"


args = SimpleNamespace(cpu=False, reserve_vram=None, fast=set(), verbose="INFO", disable_process_memory=True)
