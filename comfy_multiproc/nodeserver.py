"""In a worker: what it does for the host, as long as it lives: node calls, questions about nodes, routes."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from . import describe, failures, nodecall, progress, standin
from .handles import HandleTable
from .link import Message, Request
from .nodecall import Call, Nodes
from .shared import SharedPool
from .values import Codec
from .worker import Context

QUEUE_SECONDS = 30.0


class NodeServer:
    """The packs of this worker, their nodes and their routes, served to the host."""

    def __init__(self, context: Context):
        self._context = context
        self._link = link = context.link
        process = f"{context.name}-{os.getpid()}-{context.state['token']}"
        handles = HandleTable(process, drop=lambda value: context.soon(_let_go, value))
        self.codec = Codec(handles, SharedPool(), lambda notice: link.notify("values", notice), private=True)
        self.nodes = Nodes()
        self.service = standin.Service()
        self.server = standin.ServerStandIn(self.service, self.tell, self.ask)
        self._classes: dict[str, list[str]] = {}
        context.on_execution("node", self._node)
        context.on_execution("unload", self._unload)
        context.on_execution("prompt_end", lambda r: self.nodes.end_prompt(r.body))
        context.on_reset(self.nodes.drop_all)
        link.on("values", lambda r: self.codec.receive(r.body))
        link.on("drop", lambda r: self.nodes.drop(r.body))
        link.on("forget", lambda r: self.nodes.forget(r.body))
        context.unwanted = lambda r: self._discard(r.body["values"], r) if r.kind == "node" else None

    def install(self) -> None:
        """Be where core nodes and packs look for the server and for progress bars. After torch, before any node."""
        standin.install(self.server)
        progress.Reporter(self.tell).install()
        describe.remember_file_lists()

    def load(self) -> dict[str, Any]:
        """Load the packs and be ready for calls; gives what the host needs to know of them, as JSON."""
        self.server.forget_registered()     # what core nodes have registered the host has too
        packs = {}
        for pack in self._context.state["packs"]:
            asyncio.set_event_loop(self.server.loop)        # what packs take for the server's, as in the host
            description = packs[pack["name"]] = describe.load(Path(pack["path"]))
            self._classes[pack["name"]] = [data["id"] for data in description.get("classes", ())]
        routes = self.server.announced()
        ready = threading.Event()

        async def serve() -> None:
            try:
                await self.server.serve()
            finally:
                ready.set()
        self.service.submit(serve())
        ready.wait(10)
        # Not before: what comes earlier waits until there are nodes to ask.
        for kind, function in (("ask", self._ask), ("inputs", self._inputs), ("on_prompt", self._on_prompt), ("http", self._http)):
            self._link.on(kind, functools.partial(self._aside, function))
        return {"packs": packs, "routes": routes, "prompt_handlers": len(self.server.on_prompt_handlers),
                "replacements": self.server.node_replace_manager.registered}

    # to the host

    def tell(self, kind: str, value: Any) -> None:
        """Send without an answer. Any thread. Raises LinkClosed, which is a ConnectionError."""
        with self.codec.encode(value) as packet:
            self._link.notify(kind, packet.body, packet.fds)

    def ask(self, kind: str, value: Any) -> Any:
        """Ask and wait, at most `QUEUE_SECONDS`. Any thread."""
        with self.codec.encode(value) as packet:
            future = self._link.request(kind, packet.body, packet.fds, timeout=QUEUE_SECONDS,
                                        unwanted=lambda answer: self._discard(answer.body, answer))
        on_execution = threading.current_thread() is threading.main_thread() and self._context.serving
        answer = self._context.wait(future) if on_execution else future.result()
        return self.codec.decode(answer.body, answer.take_fds())

    # for the host

    def _discard(self, body: Any, message: Message) -> None:
        self.codec.discard(body, message.take_fds())

    def _aside(self, function: Callable[[Request], Coroutine[Any, Any, None]], request: Request) -> None:
        self.service.submit(_answer(request, function))

    def _node(self, request: Request) -> Any:
        call = Call.of(request.body["call"])
        values = self.codec.decode(request.body["values"], request.take_fds())
        self.server.client_id, self.server.last_prompt_id, self.server.last_node_id = call.client, call.prompt, call.id
        request.on_cancel = lambda: self._context.interrupt(request.prompt)
        if request.cancelled:       # before it was told whom to tell
            raise failures.interrupted()
        work = self._run(request, call, values)
        if self.nodes.suspends(call, values):
            return work
        # It runs to its end without the event loop's help, so it does not wait for its turn there.
        try:
            work.send(None)
        except StopIteration:
            return None
        raise RuntimeError(f"{call.node}.{call.method} waits for something, although it is no coroutine function")

    def _unload(self, request: Request) -> None:
        import comfy.model_management
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()
        request.reply()

    async def _run(self, request: Request, call: Call, values: dict[str, Any]) -> None:
        with self.codec.encode(await self.nodes.run(call, values)) as packet:
            request.reply(packet.body, packet.fds)

    async def _ask(self, request: Request) -> None:
        call = Call.of(request.body["call"])
        values = self.codec.decode(request.body["values"], request.take_fds())
        with self.codec.encode(await self.nodes.ask(call, values)) as packet:
            request.reply(packet.body, packet.fds)

    async def _inputs(self, request: Request) -> None:
        import nodes
        types = describe.known_types(nodes)
        request.reply({name: describe.input_types(nodecall.class_of(name), types) for name in self._classes.get(request.body, ())})

    async def _on_prompt(self, request: Request) -> None:
        request.reply(self.server.trigger_on_prompt(request.body))

    async def _http(self, request: Request) -> None:
        if request.fds:
            sock = socket.socket(fileno=request.take_fds()[0])
        else:
            sock = socket.fromshare(base64.b64decode(request.body["share"]))     # type: ignore[attr-defined, unused-ignore]
        await self.server.connect(sock)
        request.reply()


async def _answer(request: Request, function: Any) -> None:
    try:
        await function(request)
    except BaseException as error:
        logging.debug("could not answer %s", request.kind, exc_info=True)
        request.fail(error)


def _let_go(value: object) -> None:
    """The last reference to an object that only the host had: it ends here, on the execution thread."""
