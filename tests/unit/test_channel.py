"""The endpoint as anybody meets it who may connect: the key, the frames, and whatever else arrives."""
from __future__ import annotations

import json
import logging
import os
import random
import resource
import socket
import struct
import threading
import time

import pytest

from comfy_multiproc import channel, endpoint
from comfy_multiproc.channel import MAX_FRAME, ChannelError, Client, Frames, auth_key, decode, encode
from comfy_multiproc.endpoint import Endpoint

KEY = b"k" * 32
SECONDS = 30.0


def soon():
    return time.monotonic() + SECONDS


@pytest.fixture(params=["unix", "tcp"])
def kind(request, monkeypatch):
    """Both kinds of address, wherever the tests run."""
    if request.param == "tcp":
        monkeypatch.setattr(channel, "UNIX", False)
    return request.param


@pytest.fixture
def echo(tmp_path):
    """An endpoint that answers every request with itself."""
    served = Endpoint(tmp_path, "echo.sock", KEY, lambda message, reply: reply({"echo": message}))
    yield served
    served.close()
    assert not served._thread.is_alive() and not list(tmp_path.glob("*.sock"))


def connect(address):
    kind, _, where = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
    else:
        sock = socket.create_connection(("127.0.0.1", int(where)))
    sock.settimeout(SECONDS)
    return sock


def dropped(sock):
    """Whether the other end closes, after whatever it has still to say."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def still_serves(served):
    client = Client(served.address, KEY, soon())
    assert client.request({"type": "x"}, soon())["echo"]["type"] == "x"
    client.close()


def until(condition):
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_and_answers(kind, echo):
    assert echo.address.startswith(kind)
    client = Client(echo.address, KEY, soon())
    for i in range(3):
        assert client.request({"type": "x", "n": i, "text": "ä\n"}, soon())["echo"]["n"] == i
    client.close()


def test_a_path_too_long_for_a_unix_socket(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    served = Endpoint(folder, "echo.sock", KEY, lambda message, reply: reply({"echo": message}))
    assert served.address.startswith("tcp:")
    still_serves(served)
    served.close()


def test_two_clients_at_once_each_get_their_own_answers(kind, echo):
    wrong = []

    def ask(who):
        client = Client(echo.address, KEY, soon())
        for i in range(200):
            if client.request({"who": who, "i": i}, soon())["echo"]["who"] != who:
                wrong.append(who)
        client.close()
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SECONDS)
    assert not wrong


def test_the_answer_may_come_from_another_thread_after_it_has_begun(tmp_path):
    replies = []
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: replies.append(reply))
    got = []
    client = Client(served.address, KEY, soon())
    asking = threading.Thread(target=lambda: got.append(client.request({}, soon(), start_by=soon())))
    asking.start()
    until(lambda: replies)
    replies[0].begun()
    replies[0]({"n": 1})
    replies[0]({"n": 2})
    asking.join(SECONDS)
    assert got == [{"n": 1, "id": 1}], "a second answer is none"
    client.close()
    until(lambda: not replies[0].wanted)
    served.close()


def test_no_answer_in_time_and_a_late_one_is_not_taken_for_the_next(tmp_path):
    replies = []
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: replies.append(reply))
    client = Client(served.address, KEY, soon())
    with pytest.raises(TimeoutError):
        client.request({"n": 1}, time.monotonic() + 0.05)
    with pytest.raises(OSError):
        client.request({"n": 2}, soon())
    other = Client(served.address, KEY, soon())
    with pytest.raises(TimeoutError):
        other.request({}, soon(), start_by=time.monotonic() + 0.05)
    served.close()


@pytest.mark.parametrize("key", [b"", b"x" * 32, b"k" * 31])
def test_a_wrong_key(kind, echo, key):
    with pytest.raises((ChannelError, OSError)):
        Client(echo.address, key, soon()).request({}, soon())
    still_serves(echo)


def test_a_server_that_does_not_know_the_key_is_not_believed(tmp_path):
    """Somebody else listens at the address: it learns nothing, and its answers are not taken."""
    listener, address = channel.listen(tmp_path, "s")

    def pose():
        sock, _ = listener.accept()
        sock.sendall(encode({"v": 1, "nonce": "n"}))
        sock.recv(65536)
        sock.sendall(encode({"v": 1, "proof": "0" * 64}))
    threading.Thread(target=pose, daemon=True).start()
    with pytest.raises(ChannelError, match="does not know the key"):
        Client(address, KEY, soon())
    listener.close()


def test_another_version_is_said_to_be_one(tmp_path):
    listener, address = channel.listen(tmp_path, "s")

    def pose():
        sock, _ = listener.accept()
        sock.sendall(encode({"v": 2, "nonce": "n"}))
    threading.Thread(target=pose, daemon=True).start()
    with pytest.raises(ChannelError, match="protocol 2, this one 1: update"):
        Client(address, KEY, soon())
    listener.close()


@pytest.mark.parametrize("first", [True, False], ids=["before the key", "after it"])
@pytest.mark.parametrize("data", [
    b"\xff\xff\xff\xff", struct.pack(">I", MAX_FRAME + 1), struct.pack(">I", 3) + b"abc", struct.pack(">I", 2) + b"[]",
    struct.pack(">I", 0), struct.pack(">I", 100_000) + b"[" * 100_000, struct.pack(">I", 20_000) + b"9" * 20_000,
    struct.pack(">I", 4) + b"\xff\xfe\x00\x00", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.",
], ids=["length", "one too many", "no json", "a list", "empty", "nested", "digits", "no utf-8", "http", "a pickle"])
def test_what_is_no_message_ends_the_connection_and_nothing_else(kind, echo, first, data):
    if first:
        sock = connect(echo.address)
    else:
        client = Client(echo.address, KEY, soon())
        sock = client._socket
        sock.settimeout(SECONDS)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    assert dropped(sock)
    sock.close()
    still_serves(echo)


@pytest.mark.parametrize("message", [{}, {"id": "1"}, {"id": 1.5}, {"id": True}, {"id": None}])
def test_a_request_without_an_id_ends_the_connection(echo, message):
    client = Client(echo.address, KEY, soon())
    client._socket.sendall(encode(message))
    assert dropped(client._socket)
    client.close()
    still_serves(echo)


def test_a_handler_that_raises_answers_with_an_error(tmp_path, caplog):
    def handle(message, reply):
        raise ZeroDivisionError("oh")
    served = Endpoint(tmp_path, "s", KEY, handle)
    client = Client(served.address, KEY, soon())
    for _ in range(3):
        assert "error" in client.request({}, soon())
    assert [r.levelno for r in caplog.records] == [logging.WARNING], "each kind is said once"
    client.close()
    served.close()


def test_who_stays_silent_or_sends_half_a_frame_is_dropped_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(endpoint, "FRAME_SECONDS", 0.1)
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: reply({"echo": message}))
    silent, half = connect(served.address), Client(served.address, KEY, soon())
    half._socket.settimeout(SECONDS)
    half._socket.sendall(encode({"id": 1, "type": "x"})[:-3])
    assert dropped(silent) and dropped(half._socket)
    # A client that has nothing to ask for a while is none of these.
    idle = Client(served.address, KEY, soon())
    still_serves(served)
    assert idle.request({}, soon())
    for sock in (silent, half, idle):
        sock.close()
    served.close()


def test_a_frame_that_comes_byte_by_byte(echo):
    client = Client(echo.address, KEY, soon())
    for byte in encode({"id": 1, "type": "slow"}):
        client._socket.send(bytes([byte]))
    assert client._receive(soon())["echo"]["type"] == "slow"
    client.close()


def test_a_client_that_never_reads_costs_a_bound_and_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "BACKLOG_BYTES", 1 << 16)
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: reply({"big": "x" * 50_000}))
    greedy = Client(served.address, KEY, soon())
    greedy._socket.settimeout(SECONDS)
    try:
        for i in range(1000):
            greedy._socket.sendall(encode({"id": i}))
    except ConnectionError:
        pass
    until(lambda: served.connections == 0)
    greedy.close()
    served.close()


def test_answers_larger_than_the_socket_takes_at_once_arrive_whole(tmp_path):
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: reply({"big": "x" * 900_000}))
    client = Client(served.address, KEY, soon())
    for _ in range(3):
        assert len(client.request({}, soon())["big"]) == 900_000
    client.close()
    served.close()


def test_more_unanswered_requests_than_a_connection_may_have(tmp_path):
    held = []
    served = Endpoint(tmp_path, "s", KEY, lambda message, reply: held.append(reply))
    client = Client(served.address, KEY, soon())
    for i in range(endpoint.PENDING + 1):
        client._socket.sendall(encode({"id": i}))
    assert "too many" in client._receive(soon())["error"]
    assert len(held) == endpoint.PENDING
    client.close()
    served.close()


def test_thousands_of_connections(echo, caplog):
    """Strangers crowd each other out, not those that know the key; nothing grows; it is said once."""
    known = Client(echo.address, KEY, soon())
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(20):
        crowd = []
        for _ in range(100):
            try:
                crowd.append(connect(echo.address))
            except (BlockingIOError, ConnectionError):
                pass        # the backlog is full: the system says no, which is right too
        assert known.request({"still": "here"}, soon())["echo"]["still"] == "here"
        assert echo.connections <= endpoint.CONNECTIONS
        for sock in crowd:
            sock.close()
    until(lambda: echo.connections == 1)
    if before is not None:
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert sum("more connections" in r.message for r in caplog.records) == 1
    known.close()
    still_serves(echo)


def test_without_file_descriptors_it_waits_and_goes_on(echo):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SECONDS)
    try:
        # Nothing can be opened from here on; what is open stays so.
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        sock.connect(echo.address.partition(":")[2])
        until(lambda: echo._pause_until)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sock.close()
    still_serves(echo)


def test_fuzz(echo, caplog):
    """Random bytes, cut frames and random messages: every connection ends or answers, and no log line comes twice."""
    rng = random.Random(7)
    for _ in range(300):
        knows = rng.random() < 0.5
        client = Client(echo.address, KEY, soon()) if knows else None
        sock = client._socket if client else connect(echo.address)
        for _ in range(rng.randrange(1, 4)):
            data = rng.choice([rng.randbytes(rng.randrange(200)), encode({"id": rng.choice([1, "a", None, -5, 1e9]), "type": rng.random()}),
                               struct.pack(">I", rng.randrange(1 << 32)) + rng.randbytes(50)])
            try:
                sock.sendall(data[:rng.randrange(len(data) + 1)])
            except OSError:
                break
        sock.close()
    still_serves(echo)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(set(lines)) and len(lines) < 12


def test_frames_need_no_luck_with_boundaries():
    messages = [{"n": i, "text": "ä" * i} for i in range(50)]
    stream = b"".join(map(encode, messages))
    rng = random.Random(1)
    frames, got, at = Frames(), [], 0
    while at < len(stream):
        step = rng.randrange(1, 40)
        frames.feed(stream[at:at + step])
        at += step
        while (message := frames.next()) is not None:
            got.append(message)
    assert got == messages and not frames.partial


def test_what_is_too_large_to_send_is_refused_here():
    with pytest.raises(ChannelError, match="larger than a frame"):
        encode({"x": "y" * MAX_FRAME})


def test_decoding_gives_plain_data_only():
    assert decode(json.dumps({"a": [1, None, True, "x", {"b": 2.5}]}).encode()) == {"a": [1, None, True, "x", {"b": 2.5}]}


def test_the_key_is_made_once_and_is_only_this_users(tmp_path):
    key = auth_key(tmp_path)
    assert len(key) == 32 and auth_key(tmp_path) == key
    assert (tmp_path / "authkey").stat().st_mode & 0o777 == 0o600
    (tmp_path / "authkey").write_bytes(b"short")
    assert len(auth_key(tmp_path)) == 32
