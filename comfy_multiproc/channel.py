"""Messages between processes of one user on one machine: JSON objects in frames with a length, over a local socket.

A frame is a 32-bit big-endian length and that many bytes of UTF-8 JSON, at most 1 MiB. Both ends prove that they know
the key that lies beside the ledger, without sending it:

    server   {"v": 1, "nonce": N}
    client   {"v": 1, "nonce": M, "proof": HMAC(key, "client" N M)}
    server   {"v": 1, "proof": HMAC(key, "server" N M)}

and then requests ``{"id": 7, "type": "release", ...}`` with answers ``{"id": 7, ...}``. Nothing that is received is
ever unpickled or evaluated. Sockets are used rather than ``multiprocessing.connection`` because every wait needs a
deadline: there, half a frame or a client that does not authenticate stops its reader for good.
"""
from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

PROTOCOL = 1
MAX_FRAME = 1 << 20
UNIX = hasattr(socket, "AF_UNIX")
HEAD = struct.Struct(">I")

Message = dict[str, Any]


class ChannelError(Exception):
    """The other end sent something that is no message, or does not know the key; the connection is of no more use."""


def encode(message: Message) -> bytes:
    """A message as a frame. Raises ChannelError for one above 1 MiB."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME:
        raise ChannelError(f"a message of {len(body)} bytes is larger than a frame can be ({MAX_FRAME})")
    return HEAD.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in the body of a frame. Raises ChannelError."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ChannelError("not JSON") from None
    if not isinstance(message, dict):
        raise ChannelError("not a JSON object")
    return message


class Frames:
    """Takes bytes as they arrive and gives the messages in them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        self._data += data

    def next(self) -> Message | None:
        """The next whole message; None if there is none yet. Raises ChannelError."""
        if len(self._data) < HEAD.size:
            return None
        size, = HEAD.unpack_from(self._data)
        if size > MAX_FRAME:
            raise ChannelError(f"a frame of {size} bytes, more than {MAX_FRAME}")
        if len(self._data) < HEAD.size + size:
            return None
        body = bytes(self._data[HEAD.size:HEAD.size + size])
        del self._data[:HEAD.size + size]
        return decode(body)

    @property
    def partial(self) -> bool:
        """Whether a frame has begun that is not complete."""
        return bool(self._data)


def proof(key: bytes, role: str, server_nonce: str, client_nonce: str) -> str:
    """What shows that `role` ("client" or "server") knows the key."""
    return hmac.new(key, f"{role}\n{server_nonce}\n{client_nonce}".encode(), "sha256").hexdigest()


def proved(message: Message, expected: str) -> bool:
    """Whether `message` carries that proof."""
    given = message.get("proof")
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


def nonce() -> str:
    return secrets.token_hex(32)


def auth_key(folder: Path) -> bytes:
    """The key of this user's processes, made if it is not there. Call with the ledger's lock held."""
    path = folder / "authkey"
    try:
        key = path.read_bytes()
        if len(key) == 32:
            return key
    except FileNotFoundError:
        pass
    key = secrets.token_bytes(32)
    temporary = folder / f"authkey.{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
        f.write(key)
    os.replace(temporary, path)
    return key


def listen(folder: Path, name: str) -> tuple[socket.socket, str]:
    """A listening socket and its address: a Unix socket in `folder`, or loopback where there is none (Windows) or where
    the path is too long for one. Whoever connects has to know the key in either case."""
    path = str(folder / name)
    if UNIX and len(os.fsencode(path)) < 100:
        if os.path.exists(path):
            os.unlink(path)
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        os.chmod(path, 0o600)
        address = f"unix:{path}"
    else:
        server = socket.socket(socket.AF_INET)
        server.bind(("127.0.0.1", 0))
        address = f"tcp:{server.getsockname()[1]}"
    server.listen(128)
    return server, address


class Client:
    """A connection to the endpoint of another process. One thread at a time.

    Every method takes a deadline (``time.monotonic()``) and raises ChannelError or OSError (TimeoutError past the
    deadline); the connection is then closed, so that a late answer is never taken for another request's.
    """

    def __init__(self, address: str, key: bytes, deadline: float):
        kind, _, where = address.partition(":")
        target: str | tuple[str, int]
        self._frames = Frames()
        self._id = 0
        if kind == "unix":
            self._socket, target = socket.socket(socket.AF_UNIX), where
        elif kind == "tcp" and where.isdecimal():
            self._socket, target = socket.socket(socket.AF_INET), ("127.0.0.1", int(where))
        else:
            raise ChannelError(f"an address of an unknown kind: {address!r}")
        try:
            self._wait(deadline)
            self._socket.connect(target)
            hello = self._receive(deadline)
            if hello.get("v") != PROTOCOL or not isinstance(hello.get("nonce"), str):
                raise ChannelError(f"the other process speaks protocol {hello.get('v')!r}, this one {PROTOCOL}: update the older of the two")
            mine = nonce()
            self._send({"v": PROTOCOL, "nonce": mine, "proof": proof(key, "client", hello["nonce"], mine)}, deadline)
            if not proved(self._receive(deadline), proof(key, "server", hello["nonce"], mine)):
                raise ChannelError("the other process does not know the key")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def request(self, message: Message, deadline: float, start_by: float | None = None) -> Message:
        """Send a request and wait for its answer.

        `start_by`: the other process must say by then that it has begun (``{"begun": true}``), or have answered.
        """
        try:
            self._id += 1
            self._send({**message, "id": self._id}, deadline)
            until = deadline if start_by is None else min(start_by, deadline)
            while True:
                answer = self._receive(until)
                if answer.get("id") == self._id:
                    if answer.get("begun") is not True:
                        return answer
                    until = deadline
        except BaseException:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)

    def _send(self, message: Message, deadline: float) -> None:
        self._wait(deadline)
        self._socket.sendall(encode(message))

    def _receive(self, deadline: float) -> Message:
        while (message := self._frames.next()) is None:
            self._wait(deadline)
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the other process has closed the connection")
            self._frames.feed(data)
        return message
