"""In a worker: what packs know as ``PromptServer.instance``. Its routes and messages work through the host's server."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from .progress import message_for_page

TEXT_EVENT = 3      # BinaryEventTypes.TEXT, which releases before it had the name lack
QUEUE_METHODS = ("get_tasks_remaining", "get_current_queue", "get_current_queue_volatile", "get_history", "wipe_queue", "wipe_history",
                 "delete_history_item", "set_flag")


class Service:
    """A thread with an event loop, where routes and what the host asks outside of a prompt are answered."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="comfy_multiproc: service", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine there; what it raises is logged. Any thread."""
        def done(future: Any) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                logging.error("A request to this worker failed: %s", error, exc_info=error)
        asyncio.run_coroutine_threadsafe(work, self.loop).add_done_callback(done)


class ServerStandIn:
    """The parts of ComfyUI's server that packs use, for a process that has none.

    `tell(kind, value)` sends to the host, `ask(kind, value)` waits for its answer; both from any thread. Whatever else is read
    fails when it is used, with a text that says so.
    """

    def __init__(self, service: Service, tell: Callable[[str, Any], None], ask: Callable[[str, Any], Any]):
        from comfy.cli_args import args
        self.loop = service.loop
        self.routes = web.RouteTableDef()
        self.app = web.Application(client_max_size=int(getattr(args, "max_upload_size", 100)) << 20)
        self.address, self.port = getattr(args, "listen", "127.0.0.1"), getattr(args, "port", 8188)
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.number = 0
        self.supports = ["custom_nodes_from_web"]
        self.sockets: dict[str, Any] = {}
        self.sockets_metadata: dict[str, Any] = {}
        self.on_prompt_handlers: list[Callable[[Any], Any]] = []
        self.prompt_queue = QueueStandIn(ask)
        self.node_replace_manager = NodeReplaceStandIn()
        self._tell = tell
        self._trial = web.Application()
        self._runner: web.AppRunner | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PromptServer.instance.{name}: the server is another process than the isolated pack's; "
                             "load the pack in the host (isolate = false) if it needs this")

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        """To the page `sid`, or to every page. Raises TypeError for what no page can be sent."""
        self._tell("send", message_for_page(event, data, sid))

    async def send(self, event: Any, data: Any, sid: str | None = None) -> None:
        self.send_sync(event, data, sid)

    async def send_json(self, event: str, data: Any, sid: str | None = None) -> None:
        self.send_sync(event, data, sid)

    async def send_bytes(self, event: Any, data: Any, sid: str | None = None) -> None:
        self.send_sync(event, bytes(data), sid)

    def send_progress_text(self, text: str | bytes, node_id: str, sid: str | None = None) -> None:
        node = str(node_id).encode()
        self.send_sync(TEXT_EVENT, struct.pack(">I", len(node)) + node + (text.encode() if isinstance(text, str) else bytes(text)), sid)

    def queue_updated(self) -> None:
        self._tell("queue_updated", None)

    def get_queue_info(self) -> dict[str, Any]:
        return {"exec_info": {"queue_remaining": self.prompt_queue.get_tasks_remaining()}}

    def add_on_prompt_handler(self, handler: Callable[[Any], Any]) -> None:
        self.on_prompt_handlers.append(handler)

    def trigger_on_prompt(self, json_data: Any) -> Any:
        """The prompt as the handlers of this worker's packs change it."""
        for handler in self.on_prompt_handlers:
            try:
                json_data = handler(json_data)
            except Exception:
                logging.exception("An on_prompt_handler of this worker failed")
        return json_data

    # what the packs have registered, and serving it

    def forget_registered(self) -> None:
        """What has been registered until now is not the packs'."""
        self.routes = web.RouteTableDef()
        self.on_prompt_handlers.clear()
        self.node_replace_manager.registered.clear()

    def announced(self) -> list[dict[str, Any]]:
        """Every route that the host has to forward, as JSON; the ones with ``app`` have no twin under /api. Routes that no server
        takes are dropped, and the log names them: the host would not start with them."""
        self.routes._items[:] = [route for route in self.routes if self._takes(route)]
        found: list[dict[str, Any]] = [{"method": route.method, "path": route.path} for route in self.routes if isinstance(route, web.RouteDef)]
        found += [{"method": "GET", "path": f"{route.prefix.rstrip('/')}/{{path:.*}}", "app": True}
                  for route in self.routes if isinstance(route, web.StaticDef)]
        for resource in self.app.router.resources():
            info = resource.get_info()
            path = f"{info['prefix']}/{{path:.*}}" if "prefix" in info else getattr(resource, "_orig_path", resource.canonical)
            methods = ["*"] if isinstance(resource, web.PrefixedSubAppResource) else [route.method for route in resource]
            found += [{"method": method, "path": path, "app": True} for method in methods if method != "HEAD"]
        return found

    def _takes(self, route: web.AbstractRouteDef) -> bool:
        try:
            route.register(self._trial.router)
        except Exception as error:
            logging.error("%r cannot be registered and is left out: %s", route, error)
            return False
        return True

    async def serve(self) -> None:
        """Be ready for :meth:`connect`; nothing can be registered any more. On the service's loop."""
        self.app.add_routes(self.routes)
        self._runner = web.AppRunner(self.app, access_log=None, handle_signals=False)
        await self._runner.setup()

    async def connect(self, sock: socket.socket) -> None:
        """Serve the HTTP connection whose end came from the host."""
        assert self._runner is not None and self._runner.server is not None
        sock.setblocking(False)
        await self.loop.connect_accepted_socket(self._runner.server, sock)


class QueueStandIn:
    """What packs read of the queue. Each call asks the host."""

    def __init__(self, ask: Callable[[str, Any], Any]):
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        if name not in QUEUE_METHODS:
            raise AttributeError(f"PromptServer.instance.prompt_queue.{name}: the queue is in another process than the isolated pack")

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._ask("queue", {"method": name, "args": list(args), "kwargs": kwargs})
        return call


class NodeReplaceStandIn:
    """Replacements of nodes that the packs register; the host registers them."""

    def __init__(self) -> None:
        self.registered: list[dict[str, Any]] = []

    def register(self, replacement: Any) -> None:
        self.registered.append({name: getattr(replacement, name)
                                for name in ("new_node_id", "old_node_id", "old_widget_ids", "input_mapping", "output_mapping")})


def install(stand_in: ServerStandIn) -> None:
    """Make it what packs find. The class is ComfyUI's own, without an instance."""
    import server
    server.PromptServer.instance = stand_in
