"""Node values on the wire.

Plain data crosses as data, with its exact types; tensors and arrays as shared memory; what cannot cross stays where it is
and a handle goes in its place. A message is JSON and file descriptors; nothing in it is unpickled or evaluated.

    {"v": value, "s": [group, ...], "n": number}

A group is ``[name, size, kept]`` for a segment whose descriptor comes with the message, text with the bytes themselves, or
``{"card": card, "name": name, "exported": {...}}`` for memory of a card: see `gpu`.
`n` is there if the message has handles that are on their way home: the receiver says when it has resolved them. A value
that JSON has stands for itself; every other is ``{"$": kind, ...}``.

Notices tell the other end what has become of what it sent:

    {"returned": {segment: times}, "given_up": [segment], "released": [[owner, id, times]], "resolved": [n],
     "taken": [name], "probe": [{...}], "probed": [[number, found, why]], "refused": [[card, why]]}
"""
from __future__ import annotations

import base64
import functools
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import gpu, locked, tensors
from .encoding import Decoder, Encoder, Stays, handed_out
from .handles import Handle, HandleLost, HandleTable
from .shared import Attachments, Descriptor, Mapping, Segment, SharedMemoryError, SharedPool

GATHER = 0.002
"""Seconds without another for which notices are gathered into one, ten times that in all."""


class TransferError(RuntimeError):
    """A message that describes no value; the other process is of another version, or broken."""


class Packet:
    """An encoded value. `fds` go with the message that carries `body`; they stay open as long as the packet is referenced.

    In a ``with`` statement whose body sends it: what goes wrong there takes it back.
    """

    __slots__ = ("_codec", "_files", "_lent", "_number", "body")

    def __init__(self, codec: Codec, body: dict[str, Any], files: list[Descriptor], lent: list[str], number: int | None):
        self.body = body
        self._codec, self._files, self._lent, self._number = codec, files, lent, number

    @property
    def fds(self) -> list[int]:
        return [file.fileno() for file in self._files]

    def __enter__(self) -> Packet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()

    def cancel(self) -> None:
        """The message was never sent."""
        body, self.body = self.body, {}
        if body:
            self._codec._take_back(body, self._lent, self._number)


class Codec:
    """One end of a link, as far as values are concerned. Any thread.

    `handles` and `pool` are the process's. `notify(notice)` sends a notice to the other end's `receive`; it is called on a
    thread of the codec's own and may raise ConnectionError. `private`: what is received can be edited without the sender
    seeing it (a worker's end); otherwise it is shared with the sender, who does not write it again (the host's end).
    `device(name)` says where a tensor of that device of the sender belongs here; None leaves it on the CPU. `driver` has access to
    the memory of cards.
    """

    def __init__(self, handles: HandleTable, pool: SharedPool, notify: Callable[[dict[str, Any]], None], *, private: bool,
                 device: Callable[[str], torch.device | None] | None = None, driver: gpu.Driver | None = None):
        self.handles, self.pool = handles, pool
        self._notify, self._private = notify, private
        self._device = device or tensors.device_here
        self._attachments = Attachments(pool, private)
        self._lock = threading.Lock()
        self._lent: dict[str, list[Any]] = {}                       # segment -> [times, Segment or array]
        self._exported: dict[tuple[str, int], list[Any]] = {}       # (owner, id) -> [times, object or handle]
        self._foreign: weakref.WeakValueDictionary[tuple[str, int], Handle] = weakref.WeakValueDictionary()
        self._homeward: dict[int, list[Handle]] = {}
        self._numbers = itertools.count(1)
        self._closed: str | None = None
        # The one thing a finalizer may touch: it runs at any point of any thread, even inside a lock of ours.
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._over = threading.Event()      # nobody takes events any more
        # The host's end has the log that people read.
        self._cards = gpu.Cards(driver or gpu.CudaIPC(), lambda probe: self._say("probe", probe), warns=not private)
        self._thread: threading.Thread | None = None

    # sending

    def encode(self, value: Any) -> Packet:
        """Make a value ready to send.

        Everything is copied that has to be, so the value may change afterwards. Raises HandleLost for a handle whose owner
        has ended, SharedMemoryError when there is no room.
        """
        try:
            return self._encode(value, self._cards.card)
        except gpu.CannotShare:
            pass        # and with the exception, what it refers to on the card
        return self._encode(value, lambda tensor: None)

    def _encode(self, value: Any, card: Callable[[torch.Tensor], str | None]) -> Packet:
        encoder = Encoder(self.handles.process, self._homewards, card)
        try:
            body: dict[str, Any] = {"v": encoder.value(value)}
        except (Stays, RecursionError):
            # Too deep, or within itself.
            encoder = Encoder(self.handles.process, self._homewards, card)
            body = {"v": encoder.apart(value)}
        files: list[Descriptor] = []
        lent: list[str] = []
        try:
            if encoder.views or encoder.blocks:
                body["s"] = self._place(encoder, files, lent)
            number = None
            if encoder.homeward:
                number = body["n"] = next(self._numbers)
                with self._lock:
                    self._homeward[number] = encoder.homeward
            self._export(encoder.outward)
            return Packet(self, body, files, lent, number)
        except BaseException:
            self._take_back({}, lent, None)
            raise

    def _place(self, encoder: Encoder, files: list[Descriptor], lent: list[str]) -> list[Any]:
        result: list[Any] = []
        for group in tensors.groups(tensors.blocks(encoder.views, self._locate) + encoder.blocks):
            if group[0].found is not None:
                mapping, descriptor, array = group[0].found[0]
                self._lend(mapping.name, array)
                lent.append(mapping.name)
                if descriptor is not None:
                    files.append(descriptor)
                result.append([mapping.name, mapping.size, False])
                continue
            size = tensors.extent(group)
            if group[0].card is not None:
                card, like = group[0].card
                shared = self._cards.export(card, like, size, functools.partial(tensors.write, group))
                lent.append(shared["name"])
                result.append(shared)
                continue
            if size <= tensors.INLINE:
                result.append(tensors.inline(group))
                continue
            segment = self.pool.allocate(size)
            try:
                tensors.write(group, torch.from_numpy(segment.array))
            except BaseException:
                self.pool.release(segment)
                raise
            if segment.descriptor is not None:
                files.append(segment.descriptor)
            if self.pool.crowded:
                self.pool.abandon(segment)
                result.append([segment.name, segment.size, None])
            else:
                self._lend(segment.name, segment)
                lent.append(segment.name)
                result.append([segment.name, segment.size, True])
        return result

    def _homewards(self, handle: Handle) -> bool:
        return handle._route is self

    def _export(self, outward: list[tuple[dict[str, Any], Any]]) -> None:
        """Count the handles that are given out. Last, when nothing can fail any more."""
        for spec, value in outward:
            mine = type(value) is not Handle
            if mine:
                spec["id"] = self.handles.retain(value)
            with self._lock:
                again = self._closed is not None
                if not again:
                    entry = self._exported.setdefault((spec["owner"], spec["id"]), [0, None if mine else value])
                    entry[0] += 1
                    again = entry[0] > 1
            if mine and again:
                self.handles.release(spec["id"])   # the table counts a link once

    def _locate(self, address: int, size: int) -> tuple[Any, int] | None:
        found = self.pool.locate(address, size)
        if found is None or found[0].private:
            return None
        mapping, descriptor, offset = found
        array = mapping.array() if mapping.array is not None else None
        return None if array is None else (_Found((mapping, descriptor, array)), offset)

    def _lend(self, name: str, what: Segment | np.ndarray) -> None:
        self._start()
        with self._lock:
            closed = self._closed is not None
            if not closed:
                entry = self._lent.setdefault(name, [0, what])
                entry[0] += 1
        if isinstance(what, Segment):
            if closed:
                self.pool.abandon(what)
            elif self._given_up not in what.watchers:
                what.watchers.append(self._given_up)

    def _given_up(self, name: str) -> None:
        _tell(self._events, self._over, "given_up", name)

    def _take_back(self, body: dict[str, Any], lent: Sequence[str], number: int | None) -> None:
        self._returned({name: lent.count(name) for name in lent})
        self._cards.taken(lent)
        if number is not None:
            self._homeward.pop(number, None)
        for owner, id_ in handed_out(body.get("v")):
            self._released(owner, id_, 1)

    # receiving

    def decode(self, body: Any, fds: Sequence[int] = ()) -> Any:
        """The value of a message. Closes the descriptors. Raises TransferError, SharedMemoryError."""
        arrays: list[Any] = []
        taken: list[str] = []
        resolved: set[int] = set()
        read = False

        def resolve(spec: dict[str, Any]) -> Any:
            found = self._resolve(spec)
            resolved.add(id(spec))
            return found
        try:
            self._attach(body.get("s", ()), fds, arrays, taken)
            value = Decoder(tensors.Reader(arrays, self._device), resolve).value(body["v"])
            read = True
        except gpu.CannotShare as error:
            raise TransferError(f"a tensor on a card could not be taken over from the other process: {error}. From now on such tensors are "
                                "copied through host memory; run it again") from error
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, ImportError, RecursionError, OverflowError) as error:
            raise TransferError(f"the other process has sent what is no value: {type(error).__name__}: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
            if not read:
                self._decline(body, len(arrays), resolved)
            if taken:
                self._detach(arrays, taken)
        if "n" in body:
            self._say("resolved", body["n"])
        return value

    def _decline(self, body: Any, attached: int, resolved: set[int]) -> None:
        """A message could not be read: its sender need not keep for us what we have not got to."""
        try:
            for group in body.get("s", ())[attached:]:
                if isinstance(group, dict):
                    self._say("taken", str(group["name"]))
                elif isinstance(group, list) and group[2] is not None:
                    self._say("returned", str(group[0]))
            for owner, id_ in handed_out(body.get("v"), resolved):
                self._start()
                self._events.put(("released", owner, id_, [1]))
            if "n" in body:
                self._say("resolved", body["n"])
        except (AttributeError, KeyError, IndexError, TypeError):
            pass    # not even that much can be read

    def discard(self, body: Any, fds: Sequence[int] = ()) -> None:
        """Let go of a message whose value nobody wants."""
        try:
            self.decode(body, fds)
        except (TransferError, SharedMemoryError, HandleLost):
            logging.debug("a value that nobody wants could not be read either", exc_info=True)

    def _attach(self, described: Sequence[Any], fds: Sequence[int], arrays: list[Any], taken: list[str]) -> None:
        remaining = iter(fds)
        for group in described:
            if isinstance(group, str):
                arrays.append(np.frombuffer(bytearray(base64.b64decode(group)), np.uint8))
                continue
            if isinstance(group, dict):
                taken.append(str(group["name"]))
                try:
                    arrays.append(self._cards.open(str(group["card"]), group["exported"]))
                except gpu.CannotShare as error:
                    self._say("refused", [group["card"], str(error)])
                    raise
                continue
            name, size, kept = group
            mapping = self._attachments.attach(str(name), int(size), next(remaining, None))
            array = mapping.open()
            self._start()
            finalizer = weakref.finalize(array, _let_go, self._events, self._over, mapping, kept)
            finalizer.atexit = False
            arrays.append(array)

    def _detach(self, arrays: list[Any], taken: list[str]) -> None:
        """Let go of the memory of cards, which has been copied, and tell the sender."""
        try:
            for memory in arrays:
                if isinstance(memory, torch.Tensor):
                    self._cards.finish(memory)
                del memory
        finally:
            arrays.clear()      # also a traceback may refer to the list
            for name in taken:
                self._say("taken", name)

    def _resolve(self, spec: dict[str, Any]) -> Any:
        """The object or handle that a description of a handle stands for here."""
        owner, id_ = spec["owner"], spec["id"]
        if spec["home"]:
            if owner == self.handles.process:
                return self.handles.get(id_)
            with self._lock:
                entry = self._exported.get((owner, id_))
            if entry is None:
                raise HandleLost(f"object {id_} of process {owner} is no longer held here. Run the node that made it again.")
            return entry[1]
        with self._lock:
            handle = self._foreign.get((owner, id_))
            if handle is None:
                handle = Handle(owner, id_, spec["type"], spec["text"], spec["io_type"], self)
                handle.held_ram = int(spec["ram"])
                finalizer = weakref.finalize(handle, _tell, self._events, self._over, "released", owner, id_, handle._held)
                finalizer.atexit = False
                self._foreign[owner, id_] = handle
            handle._held[0] += 1
            handle.lost = self._closed
        self._start()
        return handle

    def receive(self, notice: Any) -> None:
        """Take a notice of the other end. Does not block. Raises TransferError."""
        try:
            self._returned(notice.get("returned", {}))
            for name in notice.get("given_up", ()):
                self._attachments.forget(name)
            for owner, id_, count in notice.get("released", ()):
                self._released(owner, id_, count)
            for number in notice.get("resolved", ()):
                self._homeward.pop(number, None)
            self._cards.taken(notice.get("taken", ()))
            for probe in notice.get("probe", ()):
                # A driver may hang on it, and nothing else is to wait for that.
                threading.Thread(target=self._examine, args=(int(probe.get("number")), probe), name="comfy_multiproc: probe", daemon=True).start()
            for number, found, why in notice.get("probed", ()):
                self._cards.answered(int(number), found is True, str(why))
            for card, why in notice.get("refused", ()):
                self._cards.refused(str(card), str(why))
        except (AttributeError, TypeError, ValueError) as error:
            raise TransferError(f"the other process has sent what is no notice: {error}") from error

    def _examine(self, number: int, probe: Any) -> None:
        self._say("probed", [number, *self._cards.examine(probe)])

    def _returned(self, counts: dict[str, int]) -> None:
        back = []
        with self._lock:
            for name, count in counts.items():
                entry = self._lent.get(name)
                if entry is not None:
                    entry[0] -= count
                    if entry[0] <= 0:
                        back.append(self._lent.pop(name)[1])
        for what in back:
            if isinstance(what, Segment):
                self.pool.release(what)

    def _released(self, owner: str, id_: int, count: int) -> None:
        with self._lock:
            entry = self._exported.get((owner, id_))
            if entry is None:
                return
            entry[0] -= count
            if entry[0] > 0:
                return
            del self._exported[owner, id_]
        if owner == self.handles.process:
            self.handles.release(id_)

    # what has become of things

    def _say(self, what: str, value: Any) -> None:
        self._start()
        self._events.put((what, value))

    def _start(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and self._closed is None:
                    self._thread = threading.Thread(target=self._work, name="comfy_multiproc: values", daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        trimmed = until = time.monotonic()
        closed = False
        while not closed:
            events: list[tuple[Any, ...]] = []
            wait = self.pool.idle_seconds
            try:
                while not closed:
                    events.append(self._events.get(timeout=wait))
                    closed = events[-1][0] == "closed"
                    if wait > GATHER:
                        wait, until = GATHER, time.monotonic() + 10 * GATHER
                    elif time.monotonic() > until:
                        break
            except queue.Empty:
                pass
            # Only now: looking through what is unmapped takes long, and at first the answer of the node that let go of it has to leave.
            notice: dict[str, Any] = {}
            while events:
                if events[0][0] != "closed":
                    self._note(notice, events[0])
                del events[0]       # or the mapping in it would stay until the next one comes
            if notice and not closed:
                try:
                    self._notify(notice)
                except ConnectionError:
                    pass    # the other end's death settles it all
                except Exception:
                    logging.exception("could not tell the other process what is no longer needed")
            if (now := time.monotonic()) - trimmed >= self.pool.idle_seconds:
                trimmed = now
                self.pool.trim()
                self._attachments.trim(self.pool.idle_seconds)
        self._attachments.close()       # here, where they are recycled: none comes back after it

    def _note(self, notice: dict[str, Any], event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == "unmapped":
            _, mapping, kept = event
            # Before the sender hears of it: the next value may be in the same segment.
            self._attachments.recycle(mapping, bool(kept))
            if kept is not None:
                self._note(notice, ("returned", mapping.name))
        elif kind == "returned":
            returned = notice.setdefault("returned", {})
            returned[event[1]] = returned.get(event[1], 0) + 1
        elif kind == "released":
            _, owner, id_, held = event
            notice.setdefault("released", []).append([owner, id_, held[0]])
        else:
            notice.setdefault(kind, []).append(event[1])

    @property
    def held(self) -> int:
        """Objects of the other process that this one holds handles of."""
        return len(self._foreign)

    def close(self, why: str = "the link has been closed") -> None:
        """The other process is gone. What was received stays readable; its handles are lost; what it held is let go."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = why
            lent, self._lent = self._lent, {}
            exported, self._exported = self._exported, {}
            self._homeward.clear()
            foreign = list(self._foreign.values())
        for handle in foreign:
            handle.lost = why
        for _, what in lent.values():
            if isinstance(what, Segment):
                self.pool.abandon(what)     # it may still be mapped there, by a process that is slow to end
        self._cards.close()
        for owner, id_ in exported:
            if owner == self.handles.process:
                self.handles.release(id_)
        self._over.set()
        self._events.put(("closed",))


def _let_go(events: queue.SimpleQueue[tuple[Any, ...]], over: threading.Event, mapping: Mapping, kept: bool | None) -> None:
    # Here and not where the event is read: the memory may be unmapped before anybody reads it, and its address used again.
    locked.unlock(mapping.address, mapping.size)
    _tell(events, over, "unmapped", mapping, kept)


def _tell(events: queue.SimpleQueue[tuple[Any, ...]], over: threading.Event, *event: Any) -> None:
    # In a queue that nobody reads, a mapping would stay.
    if not over.is_set():
        events.put(event)


class _Found(tuple):
    """A received segment in use: (mapping, descriptor, array). Compared by the mapping."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Found) and self[0] is other[0]

    def __hash__(self) -> int:
        return id(self[0])
