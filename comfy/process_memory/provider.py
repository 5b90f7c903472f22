"""The memory of one other process, as this process may see it and ask for it.

All sizes are bytes. Nothing here imports torch or ``comfy.model_management``, and nothing here knows how the
other process is reached: that is the business of whoever implements :class:`ProcessMemoryProvider`.

Devices are named by *device keys*, plain strings that mean the same card in every process
(``CUDA_VISIBLE_DEVICES`` makes indices differ): ``comfy.process_memory.devices.key(device)`` gives the key of a
``torch.device``. RAM has no key; it is :class:`RamUsage`.
"""
from __future__ import annotations

import enum
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

API_VERSION = (1, 0)
"""Major and minor version of this interface. A provider of another major version is refused at registration."""

DEADLINE = 5.0
"""Seconds that one request may take before the asking process goes on without an answer."""


class Reason(str, enum.Enum):
    """Why memory is asked for."""
    LOAD = "load"            # a model is about to be loaded
    OOM = "oom"              # an allocation has failed; the requester is inside its handler
    RAM = "ram"              # host memory is short
    PINS = "pins"            # page-locked memory is short
    USER_FREE = "user_free"  # the Free button, /free
    IDLE = "idle"            # an idle limit has passed


class Outcome(str, enum.Enum):
    """What came of a request."""
    FREED = "freed"      # `freed` bytes have left the device, measured after the allocator let go
    NOTHING = "nothing"  # there was nothing to give
    BUSY = "busy"        # alive and still resident: never booked as freed, may be asked again after a safe point
    GONE = "gone"        # the process is dead: all it held is free


class Kind(str, enum.Enum):
    """What a candidate is."""
    MODEL = "model"  # one loaded model
    CACHE = "cache"  # what the process's allocator keeps and does not use


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """What a process holds on one device, in bytes.

    ``None`` means unknown. Unknown is charged as its ceiling and counts as busy; a missing figure is never zero.
    """
    resident: int | None             # weights on the device
    cached: int | None = None        # kept by the process's allocator, unused
    fixed: int | None = None         # context and library handles; never evictable
    scratch: int | None = None       # cast buffers, hook caches, capture pools
    claimed: int | None = None       # admitted, not allocated yet
    committed: int | None = None     # full size of the models meant for this device, offloaded part included
    reclaimable: int | None = None   # what a request could give back now
    busy: bool | None = None         # a node is running
    capturing: bool = False          # a graph capture is going on: not to be asked, and others hold their loads
    age: float = 0.0                 # seconds since the holder measured this


@dataclass(frozen=True, slots=True, kw_only=True)
class RamUsage:
    """What a process holds in host memory, in bytes; ``None`` means unknown."""
    resident: int | None = None      # resident set of the process
    pinned: int | None = None        # page-locked buffers of its own
    registered: int | None = None    # other memory it has registered with the driver
    backups: int | None = None       # copies of weights under patches
    outputs: int | None = None       # cached node results
    age: float = 0.0                 # seconds since the holder measured this


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One thing that a process could give back, with the keys by which the eviction ladder sorts."""
    id: str                  # the provider's own name for it, handed back in the request
    name: str                # for people: the model's class, "allocator cache"
    kind: Kind = Kind.MODEL
    resident: int = 0        # bytes on the device that a request could give back
    size: int = 0            # bytes of the whole thing, offloaded part included
    refs: int = 0            # references to it, as sys.getrefcount counts in free_memory
    in_use: bool = False     # a running node uses it just now: never a candidate for others

    @property
    def offloaded(self) -> int:
        """Bytes of it that are not on the device."""
        return max(0, self.size - self.resident)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """A request for memory.

    ``deadline`` is a ``time.monotonic()`` value of the asking process; send :meth:`remaining` to another process,
    never the value. ``ticket`` is the same for every request of one shortfall, so that a request that comes back
    to where it started is recognised.
    """
    device: str | None                 # device key; None for host memory
    bytes: int                         # how much is missing; at least this, and as little more as possible
    reason: Reason = Reason.LOAD
    candidate: str | None = None       # Candidate.id; None: whatever serves best
    deadline: float = field(default_factory=lambda: time.monotonic() + DEADLINE)
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    origin: str = ""                   # who asks, for the log

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a request did, as measured by the holder. Never an exception."""
    outcome: Outcome
    freed: int = 0                # bytes that left the device (or host memory), after the allocator let go
    resident: int | None = None   # what the holder has left there; None: unknown


NOTHING = Receipt(outcome=Outcome.NOTHING)


class ProcessMemoryProvider(ABC):
    """The memory of one other process.

    *Counting* (:meth:`usage`, :meth:`ram`, :meth:`candidates`) is answered from local state only: it is called on
    any thread, sends no message, holds no lock while somebody else is waited for, and never raises. *Asking*
    (:meth:`release` and its kin) is called on a helper thread, one call at a time for each provider; the other process
    does the work, with its own manager. It may take until the request's deadline and always ends in a
    :class:`Receipt`. A provider that serves a request never makes one, and calls neither ``free_memory`` nor
    ``load_models_gpu`` of this process. *Telling* is called on the helper thread too, except :meth:`interrupt`, and
    :meth:`exclusive`, which the thread that captures enters.

    Only :attr:`name`, :meth:`usage`, :meth:`candidates` and :meth:`release` are needed; what the others stand
    for is then simply not held.
    """

    api_version: tuple[int, int] = API_VERSION
    patience: float = 0.0
    """Seconds that a load may wait for this process to be done with what it uses, rather than go on without room.

    For processes that work on the same prompts, where going on would fail what works in one process; 0 for all others.
    """
    inline_counting: bool = False
    """True promises that counting takes microseconds and no lock that anything slow is done under. Core then counts
    on its own thread; without the promise it does so on a helper thread, which it can walk away from."""
    pid: int | None = None
    """The process's id, where it has one on this machine."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for people: log lines, ``/system_stats``."""

    # counting

    @abstractmethod
    def usage(self, device: str) -> DeviceUsage:
        """What the process holds on `device`; all zero for a device that it does not know."""

    @abstractmethod
    def candidates(self, device: str) -> Sequence[Candidate]:
        """What it could give back on `device`, a list or a tuple; empty for a device that it does not know."""

    def ram(self) -> RamUsage:
        """What it holds in host memory."""
        return RamUsage()

    def waiting(self) -> bool:
        """Whether a load of that process is waiting for others to be done with what they use."""
        return False

    # asking

    @abstractmethod
    def release(self, request: ReleaseRequest) -> Receipt:
        """Give back at least `request.bytes` on `request.device`."""

    def release_pins(self, request: ReleaseRequest) -> Receipt:
        """Give back page-locked host memory."""
        return NOTHING

    def release_ram(self, request: ReleaseRequest) -> Receipt:
        """Give back host memory: cached results, backups."""
        return NOTHING

    def unload(self, request: ReleaseRequest) -> Receipt:
        """Unload every model from `request.device` (the Free button; end of a prompt without smart memory)."""
        return self.release(request)

    def reset(self, request: ReleaseRequest) -> Receipt:
        """Drop what the process remembers between prompts (``/free`` with ``free_memory``); `request.bytes` is 0."""
        return NOTHING

    # telling

    def claim(self, device: str, size: int) -> None:
        """This process is about to allocate `size` bytes on `device`, in all; 0 when it has. Must return at once."""

    def interrupt(self, prompt_id: str | None, value: bool) -> None:
        """The prompt with that id (None: whatever runs for this process) was cancelled; `value` False: the next one starts.

        Called on a thread of its own, also while another call runs: a request that waits may be what is to be ended.
        """

    def exclusive(self, device: str) -> AbstractContextManager[object]:
        """Entered while this process captures a graph on `device`: the other process holds its loads there."""
        return nullcontext()
