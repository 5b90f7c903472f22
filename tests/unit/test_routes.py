"""Requests that the host forwards to a worker, with the worker's end in this process."""
from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from comfy_multiproc.routes import Forwarder

SECONDS = 30.0


class Target:
    """A worker that answers with these bytes and closes the connection."""

    name = "packs"

    def __init__(self, answer: bytes):
        self._answer = answer
        self.uses = 0

    async def http(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock.dup())

        async def serve() -> None:
            self.asked = await reader.readuntil(b"\r\n\r\n")
            assert self.uses == 1
            writer.write(self._answer)
            await writer.drain()
            writer.close()
        self._task = asyncio.create_task(serve())

    @contextmanager
    def kept(self) -> Iterator[None]:
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1


async def ask(target: Target) -> tuple[int, bytes]:
    forwarder = Forwarder(target)
    app = web.Application()
    app.router.add_get("/pack", forwarder.handler("/pack"))
    try:
        async with TestClient(TestServer(app)) as client:
            async with client.get("/pack", timeout=aiohttp.ClientTimeout(SECONDS), skip_auto_headers=["Accept-Encoding", "User-Agent"],
                                  headers={"Accept": "text/plain"}) as answer:
                return answer.status, await answer.read()
    finally:
        await forwarder.close()
        assert target.uses == 0


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def test_an_answer_comes_through():
    target = Target(HEAD % 4 + b"body")
    assert asyncio.run(ask(target)) == (200, b"body")
    asked = {line.partition(b":")[0] for line in target.asked.split(b"\r\n")[1:] if line}
    assert asked == {b"Host", b"Accept"}, "a header that the client did not send changes what a pack answers"


@pytest.mark.parametrize("answer", [HEAD % 400 + b"half", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"])
def test_an_answer_that_breaks_off_does_so_here_too(answer):
    """Nothing else is appended to it."""
    with pytest.raises(aiohttp.ClientError):
        asyncio.run(ask(Target(answer)))


def test_a_worker_that_answers_nothing_is_named():
    status, text = asyncio.run(ask(Target(b"")))
    assert status == 502 and b"worker packs did not answer" in text


class Application(Target):
    """A worker with one websocket that says what it was opened with."""

    def __init__(self):
        super().__init__(b"")

    async def http(self, sock: socket.socket) -> None:
        async def open_(request: web.Request) -> web.WebSocketResponse:
            ws = web.WebSocketResponse(protocols=["second"])
            await ws.prepare(request)
            await ws.send_str(request.headers.get("Cookie", ""))
            await ws.close()
            return ws
        app = web.Application()
        app.router.add_get("/pack", open_)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await asyncio.get_running_loop().connect_accepted_socket(self.runner.server, sock.dup())


def test_a_websocket_keeps_its_protocol_and_its_cookies():
    async def opened() -> tuple[str | None, str]:
        target = Application()
        forwarder = Forwarder(target)
        app = web.Application()
        app.router.add_get("/pack", forwarder.handler("/pack"))
        async with TestClient(TestServer(app)) as client:
            async with client.ws_connect("/pack", protocols=["first", "second"], headers={"Cookie": "user=1"}) as ws:
                said = ws.protocol, await ws.receive_str(timeout=SECONDS)
        await forwarder.close()
        await target.runner.cleanup()
        return said
    assert asyncio.run(opened()) == ("second", "user=1")
