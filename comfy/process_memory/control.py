"""Control nets: what they bring to a card beside the models that are admitted.

A hint image is kept at pixel resolution for the whole run, and a ControlLora builds a second network in the middle of
sampling, of which it shares what it can with the first. Both are measured here: hints before the load, a network before it moves. While sampling, only peers are asked.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from comfy import process_memory

from . import admission, arithmetic, claims, devices, ladder, registry
from .figures import manager
from .provider import Reason


def hint_memory(conds: Mapping[str, Any], shape: Any, dtype: Any) -> int:
    """Bytes of the hints of all control nets in `conds` for latents of `shape`, as they stay on the card while sampling."""
    if not admission.active():
        return 0
    found = {id(net): net for cs in conds.values() for cond in cs for net in _chain(cond.get("control"))}
    return sum(hint_size(net, shape, manager().dtype_size(dtype)) for net in found.values())


def hint_size(net: Any, shape: Any, dtype_size: int) -> int:
    """Bytes of one hint, repeated for both conds of a batch of latents of `shape`."""
    hint = getattr(net, "cond_hint_original", None)
    ratio = getattr(net, "compression_ratio", None)
    if hint is None or ratio is None or len(shape) < 4:
        return 0
    if getattr(net, "vae", None) is not None:
        # Encoded again at the resolution of the latents.
        channels, ratio = shape[1], 1
    else:
        channels = hint.shape[1]
    size = 4 if hasattr(net, "t2i_model") else dtype_size
    return int(shape[0] * 2 * channels * (shape[-2] * ratio) * (shape[-1] * ratio) * size)


def claim_network(network: Any, device: Any, weights: Mapping[str, Any] | None = None, dtype: Any = None) -> None:
    """A network that no list knows is about to move to `device`, followed by `weights` as `dtype`: have peers make room for
    both, and claim it."""
    place = devices.key(device) if registry.entries else None
    if place is None:
        return
    mm = manager()
    size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    if weights:
        size += sum(tensor.numel() for tensor in weights.values()) * mm.dtype_size(dtype)
    size = arithmetic.clamp(size, mm.get_total_memory(device))
    ladder.make_room(device, size, Reason.LOAD)
    with claims.current.hold(place, claims.HOLD) as held:
        if held:
            admission.add(place, min(size, arithmetic.clamp(mm.get_free_memory(device), arithmetic.SENTINEL)))


def settle_network(device: Any) -> None:
    """It is there, or gone again."""
    place = devices.key(device) if registry.entries else None
    if place is not None:
        admission.lower(place)
        process_memory.changed()


def _chain(net: Any) -> Iterator[Any]:
    while net is not None:
        yield net
        net = getattr(net, "previous_controlnet", None)
