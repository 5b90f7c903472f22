"""What the ledger's file says, word by word.

All words are 64-bit little-endian, aligned and written whole; all sizes are bytes; a figure that is not known is
``2**64 - 1``, never zero; text is UTF-8 padded with NULs::

    file       0  header, 4096 bytes
            4096  64 slots
    header     0  magic    1 version    2 boot    3 slots    4 bytes a slot    5 changes: slots taken and given back
    slot       0  sequence: odd while the owner writes; a reader looks again until it is even and the same before and after
               1  pid      2 start (see liveness)   3 generation: how often the slot has been taken
               4  flags: 1 busy, a prompt is running
               5  prompts run so far    6 when last confirmed, nanoseconds of time.monotonic()    7 devices that follow
               8  RAM: resident   9 pinned   10 registered   11 backups   12 outputs
              13  family: processes that belong to one server have the same
              14  waiting: 1 while a load waits for others to be done with what they use; one word, as a claim
              15  not used
                  then name (64 bytes), address of the endpoint (192 bytes), 48 claims, 16 devices
    claim      0  digest of the device's key; 0: not used, nor any after it    1  what is claimed there
               Not under the sequence: a claim is one word, and whoever reads it must have the newest, whatever else its
               owner is writing. A place belongs to one device for as long as the slot is held.
    device        key (64 bytes), then the words
               0  resident: weights on the device (torch's and the pager's)
               1  cached: kept by torch's allocator, unused     2 fixed     3 scratch: live, and not weights
               4  not used    5 committed     6 reclaimable
               7  allocator: all that torch's allocator has reserved; contains `cached`
               8  pager: all that aimdo has mapped for weights and cast buffers, which is not in `allocator`
               9  candidates that follow                        10  capturing: 1 while a graph is captured there
              11  size of the device                           12-15  not used
                  then 32 candidates
    candidate  0  id    1 kind: 0 model, 1 cache; plus 256 in use
               2  resident    3 size    4 references    5 not used
                  then name (48 bytes)

``allocator + pager`` is what the process occupies on the device beside its context, each byte once.
"""
from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass, field

from comfy.process_memory.provider import Candidate, DeviceUsage, Kind, RamUsage

MAGIC = int.from_bytes(b"COMFYMEM", "little")
VERSION = 1
SLOTS = 64
CLAIMS = 48
DEVICES = 16
CANDIDATES = 32
UNKNOWN = 2**64 - 1

HEADER_SIZE = 4096
HEADER = struct.Struct("<6Q")
SLOT_HEAD = struct.Struct("<16Q64s192s")
CLAIM = struct.Struct("<2Q")
DEVICE_HEAD = struct.Struct("<64s16Q")
CANDIDATE = struct.Struct("<6Q48s")
DEVICE_SIZE = DEVICE_HEAD.size + CANDIDATES * CANDIDATE.size
BODY = SLOT_HEAD.size + CLAIMS * CLAIM.size      # where the devices begin
SLOT_SIZE = -(-(BODY + DEVICES * DEVICE_SIZE) // 4096) * 4096
FILE_SIZE = HEADER_SIZE + SLOTS * SLOT_SIZE

BUSY = 1
IN_USE = 256
KINDS = (Kind.MODEL, Kind.CACHE)
WAITING = 14              # index of a slot's word
CHANGES = 5               # index of the header's word


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What a process holds on one device, as it is written."""
    key: str
    usage: DeviceUsage
    candidates: tuple[Candidate, ...] = ()
    allocator: int | None = None
    pager: int | None = None
    total: int | None = None            # size of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a process holds, as it is written. Claims are not in it: :meth:`Slot.claim`, :meth:`Ledger.claimed`."""
    ram: RamUsage = field(default_factory=RamUsage)
    devices: tuple[DeviceReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as it was last read."""
    slot: int
    sequence: int
    pid: int
    start: int
    name: str
    address: str
    family: int
    generation: int
    busy: bool
    prompts: int
    ram: RamUsage
    devices: dict[str, DeviceReport]
    settled: bool = True                # False: its owner has stopped in the middle of writing it


@functools.lru_cache(maxsize=256)
def digest_of(device: str) -> int:
    """What stands for a device's key beside a claim; never 0."""
    return int.from_bytes(hashlib.blake2b(device.encode(), digest_size=8).digest(), "little") or 1


def as_text(value: str, size: int) -> bytes:
    """A text that has room in `size` bytes, with a NUL after it."""
    return value.replace("\0", "").encode("utf-8", "replace")[:size - 1].decode("utf-8", "ignore").encode()


def _read_text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode("utf-8", "replace")


def as_word(value: float | None) -> int:
    """A figure as it is written; None is not known."""
    return UNKNOWN if value is None else max(0, min(int(value), UNKNOWN - 1))


def _figure(word: int) -> int | None:
    return None if word == UNKNOWN else word


def pack_device(report: DeviceReport, capturing: bool) -> bytes:
    """What a process holds on a device, in `DEVICE_SIZE` bytes."""
    usage = report.usage
    candidates = report.candidates[:CANDIDATES]
    parts = [DEVICE_HEAD.pack(as_text(report.key, 64), *map(as_word, (
        usage.resident, usage.cached, usage.fixed, usage.scratch, 0, usage.committed, usage.reclaimable,
        report.allocator, report.pager, len(candidates), capturing, report.total, 0, 0, 0, 0)))]
    for c in candidates:
        kind = KINDS.index(c.kind) | (IN_USE if c.in_use else 0)
        parts.append(CANDIDATE.pack(int(c.id), kind, as_word(c.resident), as_word(c.size), as_word(c.refs), 0, as_text(c.name, 48)))
    return b"".join(parts).ljust(DEVICE_SIZE, b"\0")


def unpack(slot: int, data: bytes) -> Process:
    """The process that a slot is about. `data` may be noise: no number in it is trusted."""
    (sequence, pid, start, generation, flags, prompts, _, count, rss, pinned, registered, backups, outputs, family, _, _,
     name, address) = SLOT_HEAD.unpack_from(data)
    busy = bool(flags & BUSY)
    devices = {}
    at = BODY
    for _ in range(min(count, DEVICES)):
        key, resident, cached, fixed, scratch, _, committed, reclaimable, allocator, pager, number, capturing, total, *_ = \
            DEVICE_HEAD.unpack_from(data, at)
        candidates = []
        for i in range(min(number, CANDIDATES)):
            id_, kind, held, size, refs, _, what = CANDIDATE.unpack_from(data, at + DEVICE_HEAD.size + i * CANDIDATE.size)
            if kind & 255 < len(KINDS):
                candidates.append(Candidate(id=str(id_), name=_read_text(what), kind=KINDS[kind & 255], resident=held,
                                            size=size, refs=refs, in_use=bool(kind & IN_USE)))
        text = _read_text(key)
        devices[text] = DeviceReport(
            key=text, candidates=tuple(candidates), allocator=_figure(allocator), pager=_figure(pager),
            total=_figure(total),
            usage=DeviceUsage(resident=_figure(resident), cached=_figure(cached), fixed=_figure(fixed),
                              scratch=_figure(scratch), committed=_figure(committed),
                              reclaimable=_figure(reclaimable), busy=busy, capturing=bool(capturing)))
        at += DEVICE_SIZE
    return Process(slot=slot, sequence=sequence, pid=pid, start=start, name=_read_text(name), address=_read_text(address),
                   family=family, generation=generation, busy=busy, prompts=prompts, devices=devices,
                   ram=RamUsage(resident=_figure(rss), pinned=_figure(pinned), registered=_figure(registered),
                                backups=_figure(backups), outputs=_figure(outputs)))
