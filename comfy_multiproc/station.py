"""In the host: one worker for packs, with what belongs to the link to it: values, handles, routes, messages to the page."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from . import link, progress, standin
from .handles import Handle, HandleTable
from .host import Spec, State, Worker
from .link import Link, LinkClosed, LinkError, Message, Request
from .nodecall import Call, unpacked
from .pack import Pack
from .shared import SharedPool
from .values import Codec

ENTRY = "comfy_multiproc.packworker"
ANSWER = 0.5        # seconds for what the page waits for and that can do without
PROMPT_HANDLER = 30.0

_host: tuple[HandleTable, SharedPool] | None = None

_gone: queue.SimpleQueue[tuple[PackStation, str, int]] = queue.SimpleQueue()
"""What workers need not remember any more. Finalizers put it here: they run at any point of any thread, even inside a lock of a link."""
_teller: threading.Thread | None = None


def of_host() -> tuple[HandleTable, SharedPool]:
    """What all links of this process share."""
    global _host
    if _host is None:
        _host = HandleTable(f"host-{os.getpid()}-{secrets.token_hex(4)}"), SharedPool()
    return _host


class PackStation:
    """Implements `calls.Station` and `routes.Target`. Any thread."""

    def __init__(self, name: str, packs: Sequence[Pack]):
        self.packs = list(packs)
        self.lost_handles = False       # objects that were in its process are gone since the last look
        self._lock = threading.Lock()
        self._codecs: dict[Link, Codec] = {}        # more than one while a process is still ending and the next one is there
        self.worker = Worker(spec_of(name, packs))
        self.worker.pins = lambda: sum(codec.held for codec in list(self._codecs.values()))
        self.worker.on_end = self._ended
        on = self.worker.on
        on("values", lambda r: self._codec_of(r.link).receive(r.body))
        on("progress", lambda r: progress.show(self._value(r)))
        on("send", lambda r: progress.send(self._value(r)))
        on("queue_updated", lambda r: progress.queue_updated())
        on("queue", self._queue)
        _start_teller()

    @property
    def name(self) -> str:
        return self.worker.name

    def without(self, pack: Pack) -> None:
        """The pack is loaded elsewhere after all. The worker starts again without it, when it is needed."""
        self.packs.remove(pack)
        self.worker.spec = replace(self.worker.spec, packs=packs_data(self.packs))
        if self.worker.pid is not None:     # otherwise that would be the next one, which another pack waits for
            threading.Thread(target=self.worker.stop, name=f"comfy_multiproc: {self.name}", daemon=True).start()

    # calls.Station

    def running(self) -> bool:
        return self.worker.state in (State.IDLE, State.BUSY)

    def owns(self, handle: Handle) -> bool:
        return handle._route in self._codecs.values()

    def send(self, call: Call, values: dict[str, Any], aside: bool = False) -> Future[Any]:
        with self.worker.kept():
            self.worker.start()
            to = self.worker.link
            if to is None:
                raise LinkClosed(f"worker {self.name} has ended before the call; run it again")
            codec = self._codec_of(to)

            def discard(message: Message) -> None:
                codec.discard(message.body, message.take_fds())
            with codec.encode(values) as packet:
                sent = self.worker.call("ask" if aside else "node", {"call": call.data(), "values": packet.body}, packet.fds, over=to, unwanted=discard,
                                        prompt=call.prompt or None, label=f"node {call.id} ({call.node})" if call.id else call.node)
        result: Future[Any] = Future()

        def answered(answer: Future[Message]) -> None:
            if not result.set_running_or_notify_cancel():
                if not answer.cancelled() and answer.exception() is None:
                    discard(answer.result())
                return
            try:
                message = answer.result()
                result.set_result(unpacked(codec.decode(message.body, message.take_fds())))
            except BaseException as error:
                result.set_exception(error)
        result.add_done_callback(lambda f: sent.cancel() if f.cancelled() else None)
        sent.add_done_callback(answered)
        return result

    def drop(self, instance: int) -> None:
        _gone.put((self, "drop", instance))

    def forget(self, recipe: int) -> None:
        """Nothing needs what the worker made from that recipe. Any thread, also a finalizer's."""
        _gone.put((self, "forget", recipe))

    def prompt_ended(self, prompt: str) -> None:
        self._notify("prompt_end", prompt)

    # what the page asks

    def inputs(self, pack: str) -> dict[str, Any] | None:
        """See `proxy.Host.inputs`."""
        to = self.worker.link
        if to is None or not self.running():
            return None
        try:
            answer = to.request("inputs", pack, timeout=ANSWER).result(2 * ANSWER)
        except Exception as error:
            logging.debug("worker %s does not say what the inputs of %s are: %s", self.name, pack, error)
            return None
        return answer.body if isinstance(answer.body, dict) else None

    def on_prompt(self, data: Any) -> Any:
        """The prompt as the handlers of the worker's packs change it. Starts the worker if need be."""
        self.worker.start().result(PROMPT_HANDLER)
        to = self.worker.link
        if to is None:
            raise LinkClosed(f"worker {self.name} has ended")
        return to.request("on_prompt", data, timeout=PROMPT_HANDLER).result().body

    async def http(self, sock: socket.socket) -> None:
        """See `routes.Target.http`."""
        loop = asyncio.get_running_loop()
        ready = await loop.run_in_executor(None, self.worker.start)
        await asyncio.wrap_future(ready)
        to = self.worker.link
        if to is None:
            raise LinkClosed(f"worker {self.name} has ended")
        if link.CAN_PASS_FDS:
            await asyncio.wrap_future(to.request("http", None, [sock.fileno()]))
        else:
            shared = sock.share(self.worker.pid or 0)      # type: ignore[attr-defined, unused-ignore]
            await asyncio.wrap_future(to.request("http", {"share": base64.b64encode(shared).decode()}))

    def kept(self) -> AbstractContextManager[None]:
        """See `routes.Target.kept`."""
        return self.worker.kept()

    # the link

    def _codec_of(self, to: Link) -> Codec:
        with self._lock:
            codec = self._codecs.get(to)
            if codec is None:
                handles, pool = of_host()
                codec = Codec(handles, pool, lambda notice: to.notify("values", notice), private=False)
                if to.closed:
                    codec.close()       # nobody else would; what is sent with it fails
                else:
                    self._codecs[to] = codec
            return codec

    def _ended(self, worker: Worker, error: BaseException) -> None:
        with self._lock:
            ended = [self._codecs.pop(link) for link in list(self._codecs) if link.closed]
            self.lost_handles = self.lost_handles or any(codec.held for codec in ended)
        for codec in ended:
            codec.close(str(error).partition("\n")[0])

    def _value(self, request: Request) -> Any:
        return self._codec_of(request.link).decode(request.body, request.take_fds())

    def _queue(self, request: Request) -> None:
        server = progress.server_instance()
        answer = progress.queue_call(server, standin.QUEUE_METHODS, self._value(request))
        with self._codec_of(request.link).encode(answer) as packet:
            request.reply(packet.body, packet.fds)

    def _notify(self, kind: str, body: Any) -> None:
        to = self.worker.link
        if to is not None:
            try:
                to.notify(kind, body)
            except (LinkClosed, LinkError):
                pass    # the worker has ended, and what it remembered with it


def _start_teller() -> None:
    global _teller
    if _teller is None or not _teller.is_alive():
        _teller = threading.Thread(target=_tell_gone, name="comfy_multiproc: gone", daemon=True)
        _teller.start()


def _tell_gone() -> None:
    while True:
        station, kind, number = _gone.get()
        station._notify(kind, number)
        del station


def packs_data(packs: Sequence[Pack]) -> tuple[dict[str, Any], ...]:
    return tuple({"name": pack.name, "path": os.path.abspath(pack.path)} for pack in packs)


def spec_of(name: str, packs: Sequence[Pack]) -> Spec:
    """One worker for packs that share it: the most generous of their limits. Raises PackConfigError."""
    limits = [pack.config.ram_limit for pack in packs if pack.config.ram_limit is not None]
    idle = [pack.config.idle_seconds for pack in packs if pack.config.idle_seconds is not None]
    return Spec(name, packs=packs_data(packs), entry=ENTRY, python=packs[0].python if packs else None, ram_limit=max(limits, default=None),
                idle_seconds=max(idle, default=None), keep_processes=any(pack.config.keep_processes for pack in packs))
