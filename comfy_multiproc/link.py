"""Messages between a host and one worker: requests and notifications both ways, with file descriptors.

A frame is the length of its body (32 bits, big-endian), the number of descriptors that came with it (16 bits), and the
body: UTF-8 JSON. What it may be:

    {"k": kind, "i": 7, "b": body}     a request; "p" names the prompt
    {"k": kind, "b": body}             a notification
    {"a": 7, "b": body}                the answer to request 7
    {"a": 7, "e": failure}             its failure, as `failures.describe` puts it
    {"c": 7}                           nobody waits for request 7 any more

Nothing that arrives is unpickled or evaluated. Each end has a thread that always reads, so that two ends which send at
the same time never wait for one another.
"""
from __future__ import annotations

import array
import copy
import errno
import itertools
import json
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from . import failures

HEAD = struct.Struct(">IH")
MAX_BODY = 256 << 20
"""Bytes of JSON in one message. Tensors and large strings travel in shared memory and are not counted."""
MAX_FDS = 250
READ_BYTES = 1 << 16
DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
GONE = (errno.ENOTCONN, errno.ENOTSOCK)
"""What a send meets, besides a ConnectionError, where there is no link any more; the second in what a worker has forked."""
CAN_PASS_FDS = hasattr(socket, "CMSG_SPACE")


class LinkError(Exception):
    """A message cannot be sent: too large, too many descriptors, not JSON."""


class LinkClosed(ConnectionError):
    """The other end is gone, or this one has been closed."""


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a new link; either may be given to a process that is being spawned."""
    return socket.socketpair()


class Message:
    """What the other end has sent. Descriptors that nobody takes are closed with it."""

    __slots__ = ("_fds", "body", "kind")

    def __init__(self, kind: str, body: Any, fds: list[int]):
        self.kind, self.body, self._fds = kind, body, fds

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors; still the message's."""
        return self._fds

    def take_fds(self) -> list[int]:
        """The descriptors, now the caller's to close."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        for fd in self.take_fds():
            os.close(fd)

    def __del__(self) -> None:
        if self._fds:
            self.close()


class Request(Message):
    """A message that waits for an answer, unless it is a notification: then answers go nowhere.

    `prompt` is the prompt that it belongs to; None: none.
    """

    __slots__ = ("_answered", "_link", "cancelled", "id", "on_cancel", "prompt")

    def __init__(self, link: Link, kind: str, body: Any, fds: list[int], id_: int | None, prompt: str | None):
        super().__init__(kind, body, fds)
        self._link, self.id, self.prompt = link, id_, prompt
        self._answered = id_ is None
        self.cancelled = False
        self.on_cancel: Callable[[], None] | None = None

    @property
    def link(self) -> Link:
        """The end that it came to."""
        return self._link

    def reply(self, body: Any = None, fds: Sequence[int] = ()) -> None:
        """Send the answer; once, from any thread. Descriptors stay the caller's. Raises LinkError, with nothing sent."""
        self._answer({"a": self.id, "b": body}, fds)

    def fail(self, error: BaseException | failures.Failure) -> None:
        """Send the failure instead: the exception, or what `failures.describe` has made of it."""
        self._answer({"a": self.id, "e": failures.describe(error) if isinstance(error, BaseException) else error}, ())

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self.cancelled = True
        if (on_cancel := self.on_cancel) is not None:
            on_cancel()

    def _answer(self, envelope: dict[str, Any], fds: Sequence[int]) -> None:
        if self._answered:
            return
        try:
            self._link._send(envelope, fds)
        except LinkClosed:
            pass    # nobody is there to miss it
        self._answered, self.on_cancel = True, None
        self._link._serving.pop(self.id, None)


Handler = Callable[[Request], None]
Outcome = Message | BaseException
Pending = tuple["Future[Message]", Callable[[Outcome], Outcome], Callable[[Message], None]]

_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Link:
    """One end. `start` begins to read; handlers that matter from the first message on are registered before.

    `lost` is called once, on the reading thread, when the other end is gone: what it returns is the failure of every request
    that is still open. `send_timeout`: seconds that the other end may take to read before it counts as gone; None: for ever,
    which is right where the other end may be stopped for good reason.
    """

    def __init__(self, sock: socket.socket, *, name: str = "link", lost: Callable[[str], BaseException] | None = None,
                 send_timeout: float | None = None):
        self._socket = sock
        self._name = name
        self._lost = lost or (lambda why: LinkClosed(f"{name}: {why}"))
        self._timeout = -1.0 if send_timeout is None else send_timeout
        if send_timeout is not None:
            # Only sending is bounded: a timeout of the socket object would bound the reader too.
            bound = struct.pack("ll", int(send_timeout), int(send_timeout % 1 * 1e6)) if os.name == "posix" else int(send_timeout * 1000)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        self._sending = threading.Lock()
        self._overflow: deque[tuple[memoryview, list[int], bool]] = deque()     # what the reading thread could not send at once
        self._guard = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._unwanted: dict[int, Callable[[Message], None]] = {}       # of requests that nobody waits for any more
        self._serving: dict[int | None, Request] = {}
        self._handlers: dict[str, Handler] = {}
        self._otherwise: Handler | None = None
        self._gone: BaseException | None = None
        self._why: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"comfy_multiproc: {name}")

    def start(self) -> Link:
        self._thread.start()
        return self

    @property
    def closed(self) -> bool:
        """Whether the other end is gone or this one was closed."""
        return self._gone is not None

    def on(self, kind: str, handler: Handler) -> None:
        """Have `handler` called with every message of that kind, on the reading thread, where it must not block.

        It answers with `reply` or `fail`, then or later. What it raises becomes the failure of the request.
        """
        self._handlers[kind] = handler

    def otherwise(self, handler: Handler) -> None:
        """Have `handler` called with the messages of every other kind."""
        self._otherwise = handler

    def handler(self, kind: str) -> Handler:
        """What `on` was told about that kind. Raises LinkError if it was not told anything."""
        try:
            return self._handlers[kind]
        except KeyError:
            raise LinkError(f"{self._name}: nothing here answers {kind!r}") from None

    def notify(self, kind: str, body: Any = None, fds: Sequence[int] = ()) -> None:
        """Send without waiting for an answer. Raises LinkError, LinkClosed."""
        self._send({"k": kind, "b": body}, fds)

    def request(self, kind: str, body: Any = None, fds: Sequence[int] = (), *, timeout: float | None = None,
                prompt: str | None = None,
                outcome: Callable[[Outcome], Outcome] = lambda outcome: outcome,
                unwanted: Callable[[Message], None] = Message.close) -> Future[Message]:
        """Send and give the future of the answer. Descriptors stay the caller's. `outcome` may change what the future gets, and
        `unwanted` gets an answer that comes when nobody waits for it any more, both on the reading thread.

        The future fails with the other end's failure, with what `lost` made when it is gone, or with TimeoutError after
        `timeout` seconds. Cancelling it tells the other end. Raises LinkError; never LinkClosed (the future fails instead).
        """
        future: Future[Message] = Future()
        id_ = next(self._ids)
        with self._guard:
            gone = self._gone
            if gone is None:
                self._pending[id_] = future, outcome, unwanted
        if gone is not None:
            _settle((future, outcome, unwanted), copy.copy(gone))
            return future
        envelope = {"k": kind, "i": id_, "b": body}
        if prompt is not None:
            envelope["p"] = prompt
        try:
            self._send(envelope, fds)
        except LinkClosed:
            pass        # the reading thread fails the future, with a better reason than this one
        except BaseException:
            self._pending.pop(id_, None)
            raise
        if timeout is not None:
            timer = threading.Timer(timeout, self._late, (id_, kind, timeout))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        future.add_done_callback(lambda f: self._cancelled(id_) if f.cancelled() else None)
        return future

    def close(self, why: str = "closed") -> None:
        """End the link; open requests fail. Any thread, more than once."""
        self._why = self._why or why
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if not self._thread.is_alive() and self._gone is None:
            self._end(why)

    def join(self, timeout: float) -> bool:
        """Wait until nothing is read any more; whether that is so."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # sending

    def _send(self, envelope: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            body = _dumps(envelope).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise LinkError(f"{self._name}: a message of kind {envelope.get('k', 'answer')!r} is not JSON: {error}") from None
        if len(body) > MAX_BODY:
            raise LinkError(f"{self._name}: a message of {len(body)} bytes is larger than {MAX_BODY}; large values belong into tensors or bytes")
        if len(fds) > MAX_FDS or (fds and not CAN_PASS_FDS):
            raise LinkError(f"{self._name}: {len(fds)} descriptors cannot go with one message")
        frame = HEAD.pack(len(body), len(fds)) + body
        if threading.current_thread() is self._thread:
            self._send_from_reader(frame, fds)
            return
        self._acquire()
        try:
            self._put(frame, fds)
        finally:
            self._sending.release()

    def _acquire(self) -> None:
        if not self._sending.acquire(timeout=self._timeout):
            raise self._stuck()

    def _stuck(self) -> LinkClosed:
        self.close(f"it has not read its messages for {self._timeout:g} s")
        return LinkClosed(f"{self._name}: the other end does not read")

    def _put(self, frame: bytes | memoryview, fds: Sequence[int], flags: int = 0) -> int:
        """Write the frame, with `_sending` held; the bytes written, which are all of them without `flags`."""
        if self._gone is not None:
            raise LinkClosed(f"{self._name}: {self._why or 'gone'}")
        sent = 0
        try:
            if fds:
                sent = self._socket.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], flags)
            else:
                sent = self._socket.send(frame, flags)
            while sent < len(frame) and not flags:
                sent += self._socket.send(memoryview(frame)[sent:])
            return sent
        except (BlockingIOError, TimeoutError):      # the second on Windows
            if flags:
                return 0
            # Half a frame may have gone: whatever followed would not be understood.
            raise self._stuck() from None
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.errno not in GONE:
                # The link lives, so nobody else would tell whoever waits for the answer.
                if sent == 0:
                    raise LinkError(f"{self._name}: a message cannot be sent: {error.strerror or error}") from error
                self.close(f"half a message was sent: {error.strerror or error}")
            # Not closed otherwise: what the other end had said before it went is still to be read.
            raise LinkClosed(f"{self._name}: {error.strerror or error}") from None

    def _send_from_reader(self, frame: bytes, fds: Sequence[int]) -> None:
        """Never waits: if both ends' readers waited for each other to read, neither would. Another thread sends the rest."""
        held = not self._overflow and DONT_WAIT != 0 and self._sending.acquire(blocking=False)
        sent = 0
        try:
            if held:
                sent = self._put(frame, fds, DONT_WAIT)
                if sent == len(frame):
                    self._sending.release()
                    return
            kept = [os.dup(fd) for fd in fds] if not sent else []
        except BaseException:
            if held:
                self._sending.release()
            raise
        with self._guard:
            self._overflow.append((memoryview(frame)[sent:], kept, held))
            begin = len(self._overflow) == 1
        if begin:
            threading.Thread(target=self._send_overflow, daemon=True, name=f"comfy_multiproc: {self._name}, sending").start()

    def _send_overflow(self) -> None:
        while True:
            frame, fds, held = self._overflow[0]
            try:
                if not held:
                    self._acquire()
                try:
                    self._put(frame, fds)
                finally:
                    self._sending.release()
            except LinkClosed:
                pass    # the reading thread tells whoever waits
            except LinkError as error:
                self.close(f"an answer was lost: {error}")      # whoever waits for it must not do so for ever
            for fd in fds:
                os.close(fd)
            with self._guard:
                self._overflow.popleft()
                if not self._overflow:
                    return

    def _late(self, id_: int, kind: str, timeout: float) -> None:
        pending = self._give_up(id_)
        if pending is not None:
            _settle(pending, TimeoutError(f"{self._name}: no answer to {kind!r} within {timeout:g} s"))
            self._tell_cancelled(id_)

    def _cancelled(self, id_: int) -> None:
        if self._give_up(id_) is not None:
            self._tell_cancelled(id_)

    def _give_up(self, id_: int) -> Pending | None:
        """The request, if it is not answered yet; from now on nobody waits for it."""
        with self._guard:
            pending = self._pending.pop(id_, None)
            if pending is not None:
                self._unwanted[id_] = pending[2]
        return pending

    def _tell_cancelled(self, id_: int) -> None:
        try:
            self._send({"c": id_}, ())
        except (LinkClosed, LinkError):
            pass

    # reading

    def _read(self) -> None:
        why = "the other end has closed the link"
        buffer = bytearray()
        fds: list[int] = []
        try:
            while True:
                while len(buffer) >= HEAD.size:
                    size, count = HEAD.unpack_from(buffer)
                    if size > MAX_BODY or count > len(fds):
                        raise ValueError("a frame that is none")
                    if len(buffer) < HEAD.size + size:
                        break
                    body = bytes(memoryview(buffer)[HEAD.size:HEAD.size + size])
                    del buffer[:HEAD.size + size]
                    taken, fds = fds[:count], fds[count:]
                    self._take(body, taken)
                wanted = HEAD.size + size - len(buffer) if len(buffer) >= HEAD.size else 0
                if not self._receive(buffer, fds, max(READ_BYTES, min(wanted, 4 << 20))):
                    break
        except OSError as error:
            why = error.strerror or str(error)
        except Exception as error:
            why = f"the other end has sent what is no message ({error})"
        finally:
            for fd in fds:
                os.close(fd)
            self._end(self._why or why)

    def _receive(self, buffer: bytearray, fds: list[int], size: int) -> bool:
        if not CAN_PASS_FDS:
            data = self._socket.recv(size)
        else:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, ancillary, told, _ = self._socket.recvmsg(size, socket.CMSG_SPACE(MAX_FDS * 4), flags)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    arrived = array.array("i")
                    arrived.frombytes(payload[:len(payload) - len(payload) % arrived.itemsize])
                    fds.extend(arrived)
                    if not flags:
                        for fd in arrived:
                            os.set_inheritable(fd, False)
            if told & getattr(socket, "MSG_CTRUNC", 0):
                raise ValueError("descriptors were lost: this process may not open more files (ulimit -n)")
        buffer += data
        return bool(data)

    def _take(self, body: bytes, fds: list[int]) -> None:
        message = Message("", None, fds)     # closes the descriptors on every way out
        envelope = json.loads(body.decode("utf-8", "surrogatepass"))
        if not isinstance(envelope, dict):
            raise ValueError("not an object")
        if "a" in envelope:
            pending = self._pending.pop(envelope["a"], None)
            if pending is None:
                with self._guard:
                    unwanted = self._unwanted.pop(envelope["a"], None)
                if unwanted is not None and "e" not in envelope:
                    unwanted(Message("answer", envelope.get("b"), message.take_fds()))
                return
            _settle(pending, failures.rebuild(envelope["e"], self._name) if "e" in envelope
                    else Message("answer", envelope.get("b"), message.take_fds()))
        elif "c" in envelope:
            request = self._serving.get(envelope["c"])
            if request is not None:
                request.cancel()
        else:
            kind, id_ = envelope.get("k"), envelope.get("i")
            request = Request(self, str(kind), envelope.get("b"), message.take_fds(), id_, envelope.get("p"))
            if id_ is not None:
                self._serving[id_] = request
            try:
                handler = self._handlers.get(request.kind) or self._otherwise or self.handler(request.kind)
                handler(request)
            except BaseException as error:
                if id_ is None:
                    logging.exception("%s: could not do what the message %r says", self._name, request.kind)
                else:
                    request.fail(error)

    def _end(self, why: str) -> None:
        error: BaseException
        try:
            self._socket.shutdown(socket.SHUT_RDWR)     # so that nobody goes on waiting in send
        except OSError:
            pass
        try:
            error = self._lost(why)
        except Exception as e:
            logging.exception("%s: %s", self._name, why)
            error = LinkClosed(f"{self._name}: {why} ({e})")
        with self._guard:
            self._gone = error
            open_, self._pending = self._pending, {}
            self._unwanted.clear()
        for request in list(self._serving.values()):
            request.cancel()
        self._serving.clear()
        for pending in open_.values():
            # One each: raising adds frames to an exception, and with them everything that they refer to.
            _settle(pending, copy.copy(error))
        with self._sending:     # whoever is sending has been woken by the shutdown
            self._socket.close()


def _settle(pending: Pending, result: Outcome) -> None:
    future, outcome, unwanted = pending
    try:
        result = outcome(result)
    except Exception as error:
        result = error
    if future.set_running_or_notify_cancel():
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    elif isinstance(result, Message):
        unwanted(result)
