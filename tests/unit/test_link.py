"""Messages between two ends, in one process: what is sent arrives whole, and no kind of bad peer stops an end."""
from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from comfy_multiproc.link import HEAD, MAX_BODY, Link, LinkClosed, LinkError, Message, Request, pair

SECONDS = 30.0
MIB = 1 << 20


def echo(request: Request) -> None:
    request.reply(request.body, request.fds)


class Ends:
    def __init__(self) -> None:
        ours, theirs = pair()
        self.host = Link(ours, name="host", send_timeout=SECONDS)
        self.worker = Link(theirs, name="worker")
        for end in (self.host, self.worker):
            end.on("echo", echo)

    def close(self) -> None:
        for end in (self.host, self.worker):
            end.close()
            assert end.join(SECONDS)


@pytest.fixture
def ends() -> Iterator[Ends]:
    files = len(os.listdir("/dev/fd"))
    ends = Ends()
    ends.host.start()
    ends.worker.start()
    yield ends
    ends.close()
    assert len(os.listdir("/dev/fd")) <= files


@pytest.fixture
def raw() -> Iterator[tuple[Link, socket.socket]]:
    """A link whose other end sends whatever the test likes."""
    ours, theirs = pair()
    end = Link(ours, name="host", send_timeout=0.5).start()
    yield end, theirs
    theirs.close()
    end.close()
    assert end.join(SECONDS)


def body_of(future: object) -> object:
    return future.result(SECONDS).body  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", [None, 0, "äöü \N{SNOWMAN}", "\ud800", [1, [2.5, None]], {"a": {"b": True}}, float("inf"), 2**80])
def test_json_comes_back_as_it_was(ends, body):
    assert body_of(ends.host.request("echo", body)) == body


def test_both_ends_send_large_messages_at_the_same_time(ends):
    text = "x" * (8 * MIB)
    read, write = os.pipe()
    for _ in range(5):
        futures = [end.request("echo", text) for end in (ends.host, ends.worker) for _ in range(2)]
        futures.append(ends.host.request("echo", text, [write]))
        assert all(body_of(f) == text for f in futures)
        assert len(futures[-1].result().fds) == 1
    os.close(read)
    os.close(write)


def test_requests_are_answered_in_any_order(ends):
    waiting: list[Request] = []
    ends.worker.on("later", waiting.append)
    ends.worker.on("now", lambda r: r.reply("now"))
    later = ends.host.request("later")
    assert body_of(ends.host.request("now")) == "now"
    waiting[0].reply("later")
    waiting[0].reply("and once more")       # ignored
    assert body_of(later) == "later"


def test_descriptors_arrive_with_their_message_and_close_with_it(ends):
    files = len(os.listdir("/dev/fd"))
    for count in (1, 3, 200):
        pipes = [os.pipe() for _ in range(count)]
        answer = ends.host.request("echo", count, [write for _, write in pipes]).result(SECONDS)
        assert len(answer.fds) == count
        for i, ((read, write), fd) in enumerate(zip(pipes, answer.fds)):
            assert not os.get_inheritable(fd)
            os.write(fd, str(i).encode())
            assert os.read(read, 10) == str(i).encode()
            os.close(read)
            os.close(write)
        del answer
    assert body_of(ends.host.request("echo")) is None       # the worker has finished with the requests before it
    assert len(os.listdir("/dev/fd")) <= files + 1


def test_descriptors_that_are_taken_stay_open(ends):
    read, write = os.pipe()
    answer = ends.host.request("echo", None, [write]).result(SECONDS)
    taken, = answer.take_fds()
    del answer
    os.write(taken, b"x")
    assert os.read(read, 1) == b"x"
    for fd in (read, write, taken):
        os.close(fd)


def test_what_a_handler_raises_fails_the_request_and_nothing_else(ends):
    def bad(request: Request) -> None:
        raise BaseException("even this")
    ends.worker.on("bad", bad)
    with pytest.raises(Exception, match="even this"):
        ends.host.request("bad").result(SECONDS)
    ends.host.notify("bad")
    with pytest.raises(Exception, match="nothing here answers 'unknown'"):
        ends.host.request("unknown").result(SECONDS)
    assert body_of(ends.host.request("echo", 1)) == 1


def test_what_cannot_be_sent_is_an_error_here_and_the_link_goes_on(ends, monkeypatch):
    monkeypatch.setattr("comfy_multiproc.link.MAX_BODY", MIB)
    for body in ({1, 2}, object(), "x" * MIB):
        with pytest.raises(LinkError):
            ends.host.request("echo", body)
    with pytest.raises(LinkError, match="251 descriptors"):
        ends.host.request("echo", None, [0] * 251)
    ends.worker.on("unanswerable", lambda r: r.reply({1}))
    with pytest.raises(Exception, match="not JSON"):
        ends.host.request("unanswerable").result(SECONDS)
    assert body_of(ends.host.request("echo", 1)) == 1


def test_a_request_that_nobody_answers_in_time(ends):
    ends.worker.on("never", lambda r: None)
    with pytest.raises(TimeoutError, match="no answer to 'never' within 0.05 s"):
        ends.host.request("never", timeout=0.05).result(SECONDS)
    assert body_of(ends.host.request("echo", 1, timeout=SECONDS)) == 1


def test_cancelling_tells_the_other_end(ends):
    told = threading.Event()
    begun: list[Request] = []

    def slow(request: Request) -> None:
        request.on_cancel = told.set
        begun.append(request)
    ends.worker.on("slow", slow)
    future = ends.host.request("slow")
    assert body_of(ends.host.request("echo")) is None
    assert future.cancel()
    assert told.wait(SECONDS)
    assert begun[0].cancelled
    begun[0].reply("too late")
    with pytest.raises(CancelledError):
        future.result()
    assert body_of(ends.host.request("echo", 1)) == 1


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_an_answer_that_comes_too_late_is_handed_to_whoever_can_put_it_away(ends, timeout):
    begun: list[Request] = []
    got: list[Message] = []
    ends.worker.on("slow", begun.append)
    future = ends.host.request("slow", timeout=timeout, unwanted=got.append)
    if timeout is None:
        assert body_of(ends.host.request("echo")) is None
        future.cancel()
    else:
        assert future.exception(SECONDS) is not None
    read, write = os.pipe()
    begun[0].reply("too late", [write])
    assert body_of(ends.worker.request("echo")) is None
    assert [(message.body, len(message.fds)) for message in got] == [("too late", 1)]
    got.clear()
    os.close(read)
    os.close(write)


def test_a_descriptor_that_is_closed_is_an_error_and_the_link_goes_on(ends):
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(LinkError, match="cannot be sent"):
        ends.host.request("echo", None, [write])
    assert body_of(ends.host.request("echo", 1)) == 1


def test_the_end_of_a_peer_fails_what_is_open_each_with_an_exception_of_its_own():
    ours, theirs = pair()
    end = Link(ours, lost=lambda why: ValueError(f"gone: {why}")).start()
    futures = [end.request("x") for _ in range(3)]
    theirs.close()
    errors = [f.exception(SECONDS) for f in futures]
    assert all(isinstance(e, ValueError) for e in errors)
    assert len({id(e) for e in errors}) == 3
    with pytest.raises(ValueError, match="gone"):
        end.request("y").result(SECONDS)
    with pytest.raises(LinkClosed):
        end.notify("y")
    assert end.join(SECONDS)


def test_what_a_peer_said_before_it_went_still_arrives():
    ours, theirs = pair()
    got: list[object] = []
    end = Link(ours)
    end.on("word", lambda r: got.append(r.body))
    other = Link(theirs)
    for i in range(100):
        other.notify("word", i)
    other.close()
    end.start()
    assert end.join(SECONDS)
    assert got == list(range(100))


def test_a_peer_that_reads_nothing_counts_as_gone(raw):
    end, theirs = raw
    futures = []
    with pytest.raises(LinkClosed):
        for _ in range(100):
            futures.append(end.request("x", "y" * MIB))
            if futures[-1].done():
                futures[-1].result()
    assert isinstance(futures[0].exception(SECONDS), LinkClosed)
    assert "has not read its messages for 0.5 s" in str(futures[0].exception())


def frame(body: bytes, fds: int = 0) -> bytes:
    return HEAD.pack(len(body), fds) + body


@pytest.mark.parametrize("bytes_", [
    HEAD.pack(MAX_BODY + 1, 0), frame(b"no json"), frame(b"[]"), frame(b"\xff\xfe"), frame(b"{}", fds=3), frame(b"[" * 100_000), b"\x00",
    frame(json.dumps({"a": [1]}).encode()),
], ids=["too long", "no json", "no object", "no utf-8", "absent descriptors", "nested", "half a head", "unhashable id"])
def test_bad_bytes_end_the_link_with_an_error_and_never_hang(raw, bytes_):
    end, theirs = raw
    future = end.request("x")
    theirs.sendall(bytes_)
    theirs.shutdown(socket.SHUT_WR)
    assert isinstance(future.exception(SECONDS), LinkClosed)


@pytest.mark.parametrize("message", [
    {}, {"k": None}, {"k": ["x"], "i": 1}, {"a": 99}, {"a": None, "b": 1}, {"c": 5}, {"a": 1, "e": 7}, {"a": 1, "e": {"type": {}, "frames": 3}},
])
def test_odd_messages_are_answered_or_ignored(raw, message):
    end, theirs = raw
    theirs.sendall(frame(json.dumps(message).encode()))
    end.on("alive", lambda r: r.reply(True))
    theirs.sendall(frame(b'{"k":"alive","i":12}'))
    theirs.settimeout(SECONDS)
    data = b""
    while b'{"a":12,"b":true}' not in data:
        data += theirs.recv(4096)


def test_frames_in_pieces(raw):
    end, theirs = raw
    got: list[object] = []
    done = threading.Event()
    end.on("word", lambda r: (got.append(r.body), len(got) == 50 and done.set()))
    data = b"".join(frame(json.dumps({"k": "word", "b": i}).encode()) for i in range(50))
    for i in range(0, len(data), 7):
        theirs.sendall(data[i:i + 7])
    assert done.wait(SECONDS)
    assert got == list(range(50))


def test_a_message_closes_its_descriptors_once():
    read, write = os.pipe()
    message = Message("x", None, [write])
    message.close()
    message.close()
    assert os.read(read, 1) == b""
    os.close(read)
