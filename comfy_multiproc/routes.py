"""In the host: the routes of isolated packs. A request goes on to the pack's worker over a connection of its own, body and all."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from yarl import URL

CONNECT = 60.0      # seconds until a worker that may have to be started takes a connection
HOP = frozenset(("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
                 "upgrade", "content-length"))

ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""aiohttp gives these to a request that has none, and a pack would answer in ways that the page never asked for."""

HANDSHAKE = ("Authorization", "Cookie", "Origin", "User-Agent")
"""What a pack may want to know of who opens a websocket."""


class Target(Protocol):
    """The worker that routes lead to."""
    name: str

    async def http(self, sock: socket.socket) -> None:
        """Give it one end of a new connection; starts the worker if it is not there. The socket stays the caller's to close."""

    def kept(self) -> AbstractContextManager[None]:
        """The worker is not recycled meanwhile."""


class LinkConnector(aiohttp.BaseConnector):
    """Connections to a worker: socket pairs whose one end travels to it, so that there is no port and no path to protect."""

    def __init__(self, target: Target):
        super().__init__(limit=0)
        self._target = target

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await asyncio.wait_for(self._target.http(theirs), CONNECT)
            ours.setblocking(False)
            _, protocol = await asyncio.get_running_loop().create_connection(self._factory, sock=ours)
        except BaseException as error:
            ours.close()
            if isinstance(error, Exception):
                raise OSError(f"worker {self._target.name}: {error or type(error).__name__}") from error
            raise
        return protocol


class Forwarder:
    """The requests to one worker. On the server's loop."""

    def __init__(self, target: Target):
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(connector=LinkConnector(self._target), auto_decompress=False,
                                                  cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None),
                                                  skip_auto_headers=ADDED)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def handler(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """For the route `path`, also under /api, where the worker does not know it."""
        async def forward(request: web.Request) -> web.StreamResponse:
            raw = request.raw_path
            if raw.startswith("/api/") and not path.startswith("/api/"):
                raw = raw[4:]
            try:
                if request.headers.get("Upgrade", "").lower() == "websocket":
                    return await self._websocket(request, raw)
                return await self._forward(request, raw)
            except (aiohttp.ClientError, OSError) as error:
                logging.warning("%s %s: %s", request.method, request.path, error)
                return web.Response(status=502, text=f"worker {self._target.name} did not answer: {error}")
        return forward

    async def _forward(self, request: web.Request, raw: str) -> web.StreamResponse:
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in HOP]
        body = request.content if request.body_exists else None
        url = URL(f"http://{request.host or 'worker'}{raw}", encoded=True)
        with self._target.kept():
            return await self._answer(request, self.session().request(request.method, url, headers=headers, data=body, allow_redirects=False))

    async def _answer(self, request: web.Request, asking: Any) -> web.StreamResponse:
        async with asking as answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in HOP:
                    response.headers.add(name, value)
            response.content_length = answer.content_length
            await response.prepare(request)
            try:
                if request.method != "HEAD":
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                await response.write_eof()
            except (aiohttp.ClientError, OSError) as error:
                # Half of it has gone: only the end of the connection says that the rest is missing.
                logging.warning("%s %s: the answer of worker %s has broken off: %s", request.method, request.path, self._target.name, error)
                if request.transport is not None:
                    request.transport.abort()
            return response

    async def _websocket(self, request: web.Request, raw: str) -> web.StreamResponse:
        headers = [(name, value) for name, value in request.headers.items() if name in HANDSHAKE]
        wanted = [part.strip() for part in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if part.strip()]
        async with self.session().ws_connect(f"http://worker{raw}", max_msg_size=0, protocols=wanted, headers=headers) as theirs:
            # A browser gives up if it has asked for protocols and gets none.
            ours = web.WebSocketResponse(max_msg_size=0, protocols=[theirs.protocol] if theirs.protocol else [])
            await ours.prepare(request)

            async def pump(source: Any, sink: Any) -> None:
                async for message in source:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        await sink.send_str(message.data)
                    elif message.type is aiohttp.WSMsgType.BINARY:
                        await sink.send_bytes(message.data)
                await sink.close()
            await asyncio.gather(pump(ours, theirs), pump(theirs, ours), return_exceptions=True)
            return ours


def register(server: Any, routes: Sequence[dict[str, Any]], forwarder: Forwarder) -> None:
    """Add what a worker announced to the host's server, before that adds its own. A path that exists already keeps its handler."""
    taken = {(route.method, route.path) for route in server.routes if isinstance(route, web.RouteDef)}
    for route in routes:
        method, path = str(route["method"]), str(route["path"])
        if (method, path) in taken:
            continue
        taken.add((method, path))
        handler = forwarder.handler(path)
        if route.get("app"):
            server.app.router.add_route(method, path, handler)
        else:
            server.routes.route(method, path)(handler)
