"""How tensors and other bytes are laid out in the segments of one message.

A storage crosses once, however many tensors of the message look at it, and only the part of it that they look at. Bytes
that nobody shares are packed one behind the other; what is large gets a segment of its own, so that keeping one picture
does not keep everything that came with it.
"""
from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ALIGN = 64
INLINE = 16 << 10
"""Bytes up to which a message carries its data in itself: a segment costs more than copying them."""
ALONE = 1 << 20
"""Bytes from which data gets a segment of its own."""
MAX_SEGMENTS = 16
"""Segments of one message that are passed on, and as many again that are made for it; a descriptor each."""

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)
          and not str(v).startswith(("torch.q", "torch.bits"))}
"""The dtypes that cross, by name: all but those that mean nothing without the quantiser of their tensor."""


@dataclass
class Block:
    """Bytes that stay together. `where` is filled in when they have their place: [group, offset, size].

    `write` copies them into a tensor of so many bytes. `card`: the card whose memory they go into, and a tensor that is on it.
    """
    size: int
    write: Callable[[torch.Tensor], None]
    found: tuple[Any, int] | None = None            # a received segment that has them already, and their offset in it
    where: list[int] = field(default_factory=lambda: [0, 0, 0])
    card: tuple[str, torch.Tensor] | None = None


@dataclass
class View:
    """A tensor of the message before it has its place."""
    tensor: torch.Tensor
    spec: dict[str, Any]
    start: int          # bytes into its storage
    end: int
    card: str | None = None     # whose memory it goes into, instead of the host's


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """A name that means the same device in every process of this machine, whatever cards each of them sees."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return str(device)


def device_here(name: str) -> torch.device | None:
    """The device of that name if this process has it."""
    kind, _, which = name.partition(":")
    module = getattr(torch, kind, None)
    try:
        if module is not None and module.is_available():
            for index in range(module.device_count()):
                device = torch.device(kind, index)
                if device_name(device) == name or not which:
                    return device
    except (AttributeError, RuntimeError):
        pass    # no device at all
    return None


def sendable(tensor: torch.Tensor) -> bool:
    """Whether it has bytes that can be copied: not for wrappers of other tensors, sparse, quantised or meta tensors."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested \
        and tensor.device.type != "meta" and dtype_name(tensor.dtype) in DTYPES


def view(tensor: torch.Tensor, spec: dict[str, Any], card: Callable[[torch.Tensor], str | None] = lambda tensor: None) -> View:
    """Take a tensor up; `spec` gets what `Reader.tensor` needs, except the place.

    `card(tensor)` names the card whose memory takes it to the other end; None: the host's memory.
    """
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    which = card(tensor)
    if which is not None:
        spec["device"] = which
    elif tensor.device.type != "cpu":
        spec["device"] = device_name(tensor.device)
        tensor = tensor.cpu()
    itemsize = tensor.element_size()
    start = int(tensor.storage_offset()) * itemsize
    span = 0
    if tensor.numel():
        span = int(1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * itemsize
    spec["dtype"] = dtype_name(tensor.dtype)
    spec["shape"] = list(tensor.shape)
    return View(tensor, spec, start, start + span, which)


def blocks(views: list[View], locate: Callable[[int, int], tuple[Any, int] | None]) -> list[Block]:
    """The bytes of these tensors. `locate(address, size)` knows which lie in a received segment."""
    by_storage: dict[tuple[int, str | None], list[View]] = {}
    for item in views:
        if item.end > item.start:
            by_storage.setdefault((item.tensor.untyped_storage().data_ptr(), item.card), []).append(item)
        else:
            item.spec["at"] = None
    found: list[Block] = []
    for (base, _), items in by_storage.items():
        items.sort(key=lambda v: v.start)
        cluster: list[View] = []
        end = 0
        for item in items:
            # Tensors that share no byte need not stay together.
            if cluster and item.start >= end:
                found.append(_block(base, cluster, end, locate))
                cluster = []
            end = max(end, item.end) if cluster else item.end
            cluster.append(item)
        found.append(_block(base, cluster, end, locate))
    return found


def _block(base: int, cluster: list[View], end: int, locate: Callable[[int, int], tuple[Any, int] | None]) -> Block:
    first = cluster[0]
    # 16 is the largest item size; storages start at multiples of it.
    start = first.start & ~15
    where = locate(base + start, end - start) if first.card is None else None
    tensor = first.tensor
    card = None if first.card is None else (first.card, tensor)
    if where is None and len(cluster) == 1 and tensor.nbytes < end - first.start:
        block = Block(tensor.nbytes, lambda out: _copy_dense(out, tensor), card=card)
        first.spec.update(at=block.where, offset=0)
        return block
    size = end - start
    block = Block(size, lambda out: _copy_bytes(out, tensor, start), where, card=card)
    for item in cluster:
        item.spec.update(at=block.where, offset=(item.start - start) // item.tensor.element_size())
        if not item.tensor.is_contiguous():
            item.spec["stride"] = list(item.tensor.stride())
    return block


def _copy_bytes(out: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    out.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, out.shape, (1,)))


def _copy_dense(out: torch.Tensor, tensor: torch.Tensor) -> None:
    target = torch.empty(0, dtype=tensor.dtype, device=out.device)
    target.set_(out.untyped_storage(), int(out.storage_offset()) // tensor.element_size(), tensor.shape, _dense(tensor.shape)).copy_(tensor)


def _dense(shape: Any) -> list[int]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return stride[::-1]


def data_block(data: Any) -> Block:
    """The bytes of a buffer."""
    source = np.frombuffer(data, np.uint8)
    return Block(source.size, lambda out: np.copyto(out.numpy(), source))


def groups(items: list[Block]) -> list[list[Block]]:
    """Which blocks go into one segment. Gives each block its place; blocks that are already in a segment are groups too."""
    result: list[list[Block]] = []
    packed: list[Block] = []
    segments: dict[Any, int] = {}
    cards: dict[str, list[Block]] = {}
    for block in items:
        if block.card is not None:
            cards.setdefault(block.card[0], []).append(block)
            continue
        if block.found is not None and (block.found[0] in segments or len(segments) < MAX_SEGMENTS):
            key, offset = block.found
            index = segments.setdefault(key, len(result))
            if index == len(result):
                result.append([])
            result[index].append(block)
            block.where[:] = index, offset, block.size
            continue
        block.found = None
        if block.size >= ALONE and len(result) < 2 * MAX_SEGMENTS:
            block.where[:] = len(result), 0, block.size
            result.append([block])
        else:
            packed.append(block)
    for group in (packed, *cards.values()):
        end = 0
        for block in group:
            block.where[:] = len(result), end, block.size
            end += -(-block.size // ALIGN) * ALIGN
        if group:
            result.append(group)
    return result


def extent(group: list[Block]) -> int:
    """Bytes from the start of the segment to the end of its last block."""
    return max(block.where[1] + block.size for block in group)


def write(group: list[Block], out: torch.Tensor) -> None:
    """Copy a group's bytes to their places in a tensor of bytes."""
    with torch.no_grad():
        for block in group:
            at = block.where[1]
            block.write(out[at:at + block.size])


def inline(group: list[Block]) -> str:
    """A group's bytes as text."""
    out = np.zeros(extent(group), np.uint8)
    write(group, torch.from_numpy(out))
    return base64.b64encode(out.tobytes()).decode()


class Reader:
    """The bytes of a message that has arrived, one array for each group; a tensor of bytes where it is memory of a card.

    Its methods raise KeyError, IndexError, TypeError, ValueError or RuntimeError for a description that is none.
    """

    def __init__(self, arrays: list[Any], device: Callable[[str], torch.device | None]):
        self._arrays, self._device = arrays, device
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def data(self, where: list[int]) -> Any:
        """The bytes of a block; not a copy."""
        group, start, size = where
        if min(group, start, size) < 0 or start + size > len(self._arrays[group]):
            raise ValueError("data beyond the end of its segment")
        return self._arrays[group][start:start + size]

    def tensor(self, spec: dict[str, Any]) -> torch.Tensor:
        """The tensor that `view` has described, over the bytes of its block."""
        dtype, shape = DTYPES[spec["dtype"]], spec["shape"]
        if spec["at"] is None:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            # Tensors of one block have one storage, and with it each other's edits.
            storage = self._storages.get(key := tuple(spec["at"][:2]))
            if storage is None:
                storage = self._storages[key] = self._storage(spec["at"])
            stride = spec.get("stride") or _dense(shape)
            last = spec["offset"] + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if min(spec["offset"], *stride, 0) < 0 or (last + 1) * dtype.itemsize > storage.nbytes():
                raise ValueError("a tensor beyond the end of its data")
            tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, spec["offset"], shape, stride)
        if (name := spec.get("device")) is not None:
            tensor = tensor.to(self._device(name) or torch.device("cpu"))
        return tensor

    def _storage(self, where: list[int]) -> torch.UntypedStorage:
        if isinstance(self._arrays[where[0]], torch.Tensor):
            # Memory of the sender, who wants it back; one copy each, so that keeping one does not keep the others.
            return self.data(where).clone().untyped_storage()
        return torch.from_numpy(self.data(where)).untyped_storage()
