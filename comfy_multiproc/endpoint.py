"""The endpoint of a process: one thread that takes the requests of other processes and sends the answers.

It does no work itself: requests go to a callback, answers come from whichever thread has done the work. A client that is
too slow, sends what is no message, or does not know the key is dropped; each kind of bad input is logged once.
"""
from __future__ import annotations

import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .channel import PROTOCOL, ChannelError, Frames, Message, encode, listen, nonce, proof, proved

CONNECTIONS = 256
STRANGERS = 64            # of them, how many may not have authenticated yet
PENDING = 64              # requests that one connection may have unanswered
HANDSHAKE_SECONDS = 2.0
FRAME_SECONDS = 5.0       # for the rest of a frame that has begun
BACKLOG_BYTES = 4 << 20   # answers that a client has not read


class Reply:
    """Where the answer to one request goes. Any thread; what is sent to a client that has gone is dropped."""

    __slots__ = ("_connection", "_endpoint", "_id", "_open")

    def __init__(self, endpoint: Endpoint, connection: _Connection, id_: int):
        self._endpoint, self._connection, self._id = endpoint, connection, id_
        self._open = True

    @property
    def wanted(self) -> bool:
        """Whether there is still somebody who waits for it."""
        return self._open and not self._connection.closed

    def begun(self) -> None:
        """Say that the work has begun."""
        self._endpoint._send(self._connection, {"id": self._id, "begun": True})

    def __call__(self, answer: Message) -> None:
        """Send the answer; a second one is ignored."""
        if self._open:
            self._open = False
            with self._connection.lock:
                self._connection.pending -= 1
            self._endpoint._send(self._connection, {**answer, "id": self._id})


class _Connection:
    def __init__(self, sock: socket.socket, now: float):
        self.socket = sock
        self.frames = Frames()
        self.lock = threading.Lock()       # around `unsent` and the socket's sending side
        self.unsent = bytearray()
        self.nonce = nonce()
        self.known = False
        self.closed = False
        self.pending = 0
        self.deadline: float | None = now + HANDSHAKE_SECONDS


class Endpoint:
    """Listens in `folder` under `name` and hands each request to `handle(message, reply)`, on its own thread.

    `tick(now)` is called there between events and gives the seconds until it wants to be called again (None: no need).
    `handle` must not block, nor raise for bad input: it answers ``{"error": ...}``.
    """

    def __init__(self, folder: Path, name: str, key: bytes, handle: Callable[[Message, Reply], None],
                 tick: Callable[[float], float | None] = lambda now: None):
        self._name, self._key, self._handle, self._tick = name, key, handle, tick
        self._listener, self.address = listen(folder, name)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._complained: set[str] = set()
        self._stopping = False
        self._pause_until = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="process memory: endpoint")
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._connections)

    def wake(self) -> None:
        """Make the thread call `tick` soon. Any thread."""
        try:
            self._wake_out.send(b"\0")
        except (BlockingIOError, OSError):
            pass    # it is awake already, or gone

    def move(self, folder: Path, key: bytes) -> None:
        """Listen anew in `folder` with another key; connections that are there stay. Only from `tick` or `handle`."""
        listener, address = listen(folder, self._name)
        if not self._pause_until:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self.address, self._key, self._pause_until = listener, address, key, 0.0
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening and drop all connections; waits for the thread at most 5 seconds."""
        self._stopping = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        wanted: float | None = 0.0
        try:
            while not self._stopping:
                for key, events in self._selector.select(wanted):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_in:
                        self._drain()
                    elif connection := self._connections.get(key.fileobj):  # type: ignore[call-overload]
                        self._serve(connection, events)
                now = time.monotonic()
                wanted = self._expire(now)
                again = self._tick(now)
                if again is not None:
                    wanted = again if wanted is None else min(again, wanted)
        except Exception:
            # Never part of a normal run. Others see a process that does not answer, and go on without it.
            logging.exception("Process memory: the endpoint has stopped; other processes get no memory from this one")
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            for sock in (self._listener, self._wake_in, self._wake_out):
                sock.close()
            kind, _, path = self.address.partition(":")
            if kind == "unix":
                try:
                    os.unlink(path)
                except OSError:
                    pass

    def _drain(self) -> None:
        try:
            self._wake_in.recv(4096)
        except OSError:
            pass
        for connection in list(self._connections.values()):
            if connection.unsent:
                self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as e:
                # No file descriptors left, for one: taking a breath is better than asking again at once.
                self._complain("accept", f"cannot take connections just now: {e.strerror}")
                self._selector.unregister(self._listener)
                self._pause_until = time.monotonic() + 0.2
                return
            strangers = [c for c in self._connections.values() if not c.known]
            if len(strangers) >= STRANGERS or len(self._connections) >= CONNECTIONS:
                self._complain("connections", "more connections than processes; the oldest that have not authenticated are dropped")
                if not strangers:
                    sock.close()
                    continue
                self._drop(strangers[0])
            sock.setblocking(False)
            connection = self._connections[sock] = _Connection(sock, time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ)
            self._send(connection, {"v": PROTOCOL, "nonce": connection.nonce})

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection.closed:
            self._drop(connection)
            return
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.frames.feed(data)
        try:
            while not connection.closed and (message := connection.frames.next()) is not None:
                if connection.known:
                    self._request(connection, message)
                else:
                    self._greet(connection, message)
        except ChannelError as e:
            self._complain(re.sub(r"\d+", "", str(e)), f"dropped a connection: {e}")
            self._drop(connection)
            return
        if connection.known:
            if not connection.frames.partial:
                connection.deadline = None
            elif connection.deadline is None:
                connection.deadline = time.monotonic() + FRAME_SECONDS

    def _greet(self, connection: _Connection, message: Message) -> None:
        theirs = message.get("nonce")
        if not isinstance(theirs, str) or not proved(message, proof(self._key, "client", connection.nonce, theirs)):
            raise ChannelError("the other end does not know the key")
        connection.known = True
        connection.deadline = None
        self._send(connection, {"v": PROTOCOL, "proof": proof(self._key, "server", connection.nonce, theirs)})

    def _request(self, connection: _Connection, message: Message) -> None:
        id_ = message.get("id")
        if type(id_) is not int:
            raise ChannelError("a request without an id")
        if connection.pending >= PENDING:
            self._send(connection, {"id": id_, "error": "too many requests at once"})
            return
        with connection.lock:
            connection.pending += 1
        reply = Reply(self, connection, id_)
        try:
            self._handle(message, reply)
        except Exception as e:
            self._complain("handle", f"could not take a request: {type(e).__name__}: {e}")
            reply({"error": "the request could not be taken"})

    def _send(self, connection: _Connection, message: Message) -> None:
        with connection.lock:
            if connection.closed:
                return
            waiting = bool(connection.unsent)
            connection.unsent += encode(message)
            if not waiting:
                self._push(connection)
            if not connection.unsent:
                return
            if len(connection.unsent) > BACKLOG_BYTES:
                connection.closed = True
        self.wake()

    def _push(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.unsent)
            del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            connection.closed = True

    def _flush(self, connection: _Connection) -> None:
        with connection.lock:
            self._push(connection)
            done = not connection.unsent
        if connection.closed:
            self._drop(connection)
        elif done:
            self._selector.modify(connection.socket, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        with connection.lock:
            connection.closed = True
            if self._connections.pop(connection.socket, None) is not None:
                self._selector.unregister(connection.socket)
                connection.socket.close()

    def _expire(self, now: float) -> float | None:
        """Drop what is past its deadline; the seconds until the next one."""
        nearest: float | None = None
        for connection in list(self._connections.values()):
            if connection.closed:
                self._drop(connection)
            elif connection.deadline is not None:
                if connection.deadline <= now:
                    self._complain("slow", "dropped a connection that did not finish what it began")
                    self._drop(connection)
                elif nearest is None or connection.deadline - now < nearest:
                    nearest = connection.deadline - now
        if self._pause_until:
            if now >= self._pause_until:
                self._pause_until = 0.0
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                nearest = min(nearest or 1.0, self._pause_until - now)
        return nearest

    def _complain(self, kind: str, what: str) -> None:
        if kind not in self._complained:
            self._complained.add(kind)
            logging.warning("Process memory: %s (said once)", what)
