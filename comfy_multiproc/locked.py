"""Received memory that ComfyUI has page-locked: it is unlocked before it is unmapped, or written again by its sender."""
from __future__ import annotations

import functools
import sys
import types


def unlock(address: int, size: int) -> None:
    """Unlock what ComfyUI has locked in the `size` bytes at `address`. Any thread; next to nothing where it has locked nothing.

    What stays registered with the driver after it is gone keeps whatever is mapped there next from being locked.
    """
    manager = sys.modules.get("comfy.model_management")
    sizes = getattr(manager, "PINNED_MEMORY", None)
    if manager is None or not sizes:
        return
    for start in [start for start in list(sizes) if address <= start < address + size]:
        # What unpin_memory reads of a tensor; the tensor itself is gone.
        manager.unpin_memory(types.SimpleNamespace(device=types.SimpleNamespace(type="cpu"), nbytes=sizes.get(start), data_ptr=functools.partial(int, start)))
