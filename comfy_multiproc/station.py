"""In the host: one worker for packs, with what belongs to the link to it: values, handles, routes, messages to the page."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from . import link, progress, standin
from .handles import Handle, HandleTable
from .host import Spec, State, Worker
from .link import Link, LinkClosed, Message, Request
from .nodecall import Call, unpacked
from .pack import Pack
from .shared import SharedPool
from .values import Codec

ENTRY = "comfy_multiproc.packworker"
ANSWER = 0.5        # seconds for what the page waits for and that can do without
PROMPT_HANDLER = 30.0

_host: tuple[HandleTable, SharedPool] | None = None


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
        self._codec: tuple[Link, Codec] | None = None
        self.worker = Worker(spec_of(name, packs))
        self.worker.pins = lambda: self._codec[1].held if self._codec is not None else 0
        self.worker.on_end = self._ended
        on = self.worker.on
        on("values", lambda r: self._codec_of(r._link).receive(r.body))
        on("progress", lambda r: progress.show(self._value(r)))
        on("send", lambda r: progress.send(self._value(r)))
        on("queue_updated", lambda r: progress.queue_updated())
        on("queue", self._queue)

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
        current = self._codec
        return current is not None and handle._route is current[1]

    def send(self, call: Call, values: dict[str, Any], aside: bool = False) -> Future[Any]:
        self.worker.start()
        to = self.worker.link
        if to is None:
            raise LinkClosed(f"worker {self.name} has ended before the call; run it again")
        codec = self._codec_of(to)
        packet = codec.encode(values)
        try:
            sent = self.worker.call("ask" if aside else "node", {"call": call.data(), "values": packet.body}, packet.fds,
                                    prompt=call.prompt or None, label=f"node {call.id} ({call.node})" if call.id else call.node)
        except BaseException:
            packet.cancel()
            raise
        result: Future[Any] = Future()

        def answered(answer: Future[Message]) -> None:
            if not result.set_running_or_notify_cancel():
                if not answer.cancelled() and answer.exception() is None:
                    codec.discard(answer.result().body, answer.result().take_fds())
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
        self._notify("drop", instance)

    def forget(self, recipe: int) -> None:
        """Nothing needs what the worker made from that recipe."""
        self._notify("forget", recipe)

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

    # the link

    def _codec_of(self, to: Link) -> Codec:
        with self._lock:
            if self._codec is None or self._codec[0] is not to:
                handles, pool = of_host()
                self._codec = to, Codec(handles, pool, lambda notice: to.notify("values", notice), private=False)
            return self._codec[1]

    def _ended(self, worker: Worker, error: BaseException) -> None:
        with self._lock:
            ended = self._codec
            if ended is None or not ended[0].closed:
                return
            self._codec = None
            self.lost_handles = self.lost_handles or ended[1].held > 0
        ended[1].close(str(error).partition("\n")[0])

    def _value(self, request: Request) -> Any:
        return self._codec_of(request._link).decode(request.body, request.take_fds())

    def _queue(self, request: Request) -> None:
        server = progress.server_instance()
        packet = self._codec_of(request._link).encode(progress.queue_call(server, standin.QUEUE_METHODS, self._value(request)))
        request.reply(packet.body, packet.fds)

    def _notify(self, kind: str, body: Any) -> None:
        to = self.worker.link
        if to is not None:
            try:
                to.notify(kind, body)
            except (LinkClosed, OSError):
                pass    # the worker has ended, and what it remembered with it


def packs_data(packs: Sequence[Pack]) -> tuple[dict[str, Any], ...]:
    return tuple({"name": pack.name, "path": os.path.abspath(pack.path)} for pack in packs)


def spec_of(name: str, packs: Sequence[Pack]) -> Spec:
    """One worker for packs that share it: the most generous of their limits. Raises PackConfigError."""
    limits = [pack.config.ram_limit for pack in packs if pack.config.ram_limit is not None]
    idle = [pack.config.idle_seconds for pack in packs if pack.config.idle_seconds is not None]
    return Spec(name, packs=packs_data(packs), entry=ENTRY, python=packs[0].python if packs else None, ram_limit=max(limits, default=None),
                idle_seconds=max(idle, default=None), keep_processes=any(pack.config.keep_processes for pack in packs))
