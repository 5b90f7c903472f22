"""What a node's inputs and outputs look like on the other side."""

import gc
import io
import json
import math
import os
import threading
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comfy_multiproc import shared
from comfy_multiproc.handles import Handle, HandleTable
from comfy_multiproc.shared import SharedPool
from comfy_multiproc.values import TransferError
from tests.unit.providers import until
from tests.unit.value_peer import Pair, Peer, over_the_wire

MIB = 1 << 20


def descriptors():
    return len(os.listdir("/dev/fd"))


@pytest.fixture(scope="module")
def peer():
    """A process for tests that leave it alive and as it was."""
    pool = SharedPool()
    peer = Peer(HandleTable("host"), pool)
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Every descriptor is closed again and no file of ours lies in /dev/shm."""
    if "peer" in request.fixturenames:
        peer = request.getfixturevalue("peer")
        peer.do("echo")
    before = descriptors()
    yield
    gc.collect()

    def closed():
        if "peer" in request.fixturenames:
            peer.codec.pool.trim(0)     # what has come back by now
        return descriptors() <= before
    until(closed)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"comfy-multiproc-{os.getpid()}-")]


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def peers():
    table, pool, started = HandleTable("host"), SharedPool(), []

    def start(**options):
        started.append(Peer(table, pool, **options))
        return started[-1]
    yield start
    for peer in started:
        peer.close()
    pool.trim(0)


def same(a, b):
    """Equal, of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) or math.isnan(a) and math.isnan(b)
    return a == b


# plain data

@pytest.mark.parametrize("value", [
    None, True, 0, -1, 1 << 4000, 1.5, -0.0, math.inf, -math.inf, math.nan, 1 - 2j, "", "a\0\ud800", b"", b"x" * 5000, bytearray(b"ab"),
    [], (), {}, set(), frozenset({1}), (1, [2, (3,)]), {1: "a", None: 2, (1, 2): 3}, {"$": "tensor"}, OrderedDict(b=1, a=2),
    slice(1, None, 2), range(5), Fraction(24000, 1001), torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 3]),
    np.float32(1.5), np.int64(-3), np.bool_(True),
], ids=repr)
def test_plain_data_arrives_with_its_type(pair, value):
    assert same(pair.to_worker(value), value)
    assert same(pair.to_host([value]), [value])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20)


@settings(deadline=None, max_examples=60)
@given(value=PLAIN)
def test_any_nest_of_plain_data_arrives(value):
    pair = Pair()
    assert same(pair.to_worker(value), value)


def test_a_stream_arrives_with_its_content(pair):
    stream = io.BytesIO(b"x" * 100_000)
    stream.seek(7)
    arrived = pair.to_worker(stream)
    assert type(arrived) is io.BytesIO and arrived.getvalue() == stream.getvalue() and arrived.tell() == 7


@pytest.mark.parametrize("array", [
    np.arange(12, dtype=np.uint16).reshape(3, 4), np.arange(100_000.0)[::-2], np.array(3.5), np.empty((0, 3), np.int8),
    np.array(["ä", "bc"]), np.array(["2020-01-01"], "datetime64[D]"), np.asfortranarray(np.eye(3)),
], ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_arrive(pair, array):
    arrived = pair.to_worker(array)
    assert arrived.dtype == array.dtype and arrived.shape == array.shape and np.array_equal(arrived, array) and arrived.flags.writeable


# tensors

@pytest.mark.parametrize("dtype", sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}))
@pytest.mark.filterwarnings("ignore:.*support is experimental")
def test_every_dtype_arrives_bit_for_bit(pair, dtype):
    dtype = getattr(torch, dtype.removeprefix("torch."))
    try:
        data = torch.arange(96 * dtype.itemsize, dtype=torch.uint8) % 2
        tensor = data.view(dtype)
    except (RuntimeError, TypeError):
        pytest.skip("torch itself makes no such tensor")
    arrived = pair.to_worker(tensor)
    if type(arrived) is Handle:
        assert str(dtype).startswith(("torch.q", "torch.bits"))
        return
    assert arrived.dtype == dtype and arrived.shape == tensor.shape
    equal = arrived.view(torch.uint8).equal(data)
    assert equal    # without the tensors: torch cannot print each of them


def grown(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("tensor", [
    torch.tensor(2.5), torch.empty(0), torch.empty(2, 0, 3), grown((4, 6)).t(), grown((4, 6))[:, ::2], grown((4, 6))[1:3, 2:4],
    grown((2, 3, 8, 8)).to(memory_format=torch.channels_last), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag,
    torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.zeros(1, 5).expand(1000, 5),
    grown((300, 300)).flip(0)[::3].unfold(1, 5, 2),
], ids=lambda t: f"{tuple(t.shape)}-{t.stride()}")
def test_every_form_of_tensor_arrives(pair, tensor):
    arrived = pair.to_worker(tensor)
    assert type(arrived) is torch.Tensor and not arrived.requires_grad and arrived.shape == tensor.shape
    assert arrived.equal(tensor.detach())


def test_an_inference_tensor_arrives_as_one_that_can_be_used_anywhere(pair):
    with torch.inference_mode():
        tensor = torch.ones(1000)
    arrived = pair.to_worker(tensor)
    assert not arrived.is_inference() and arrived.add_(1).equal(torch.full((1000,), 2.0))


def test_a_tensor_of_a_card_that_the_receiver_does_not_see_is_left_where_it_can_be_used(pair):
    asked = []
    packet = pair.host.encode(torch.ones(4))
    packet.body["v"]["device"] = "cuda:GPU-of-another"
    assert pair.worker.decode(packet.body).device.type == "cpu"
    pair.worker._device = lambda name: asked.append(name) or torch.device("meta")
    packet = pair.host.encode(torch.ones(4))
    packet.body["v"]["device"] = "cuda:GPU-of-both"
    assert pair.worker.decode(packet.body).device.type == "meta" and asked == ["cuda:GPU-of-both"]


def test_an_expanded_mask_is_not_written_out(pair):
    arrived = pair.to_worker(torch.ones(1, 512, 512).expand(64, 512, 512))
    assert arrived.shape == (64, 512, 512) and arrived.untyped_storage().nbytes() <= 2 * MIB


def test_conditioning_keeps_its_form(pair):
    conditioning = [[torch.rand(1, 77, 64), {"pooled_output": torch.rand(1, 64), "strength": 0.5, "area": (1, 2, 3, 4), "mask": None}]]
    latent = {"samples": torch.rand(1, 4, 64, 64), "noise_mask": torch.rand(1, 1, 64, 64), "batch_index": [0]}
    (arrived,), got = pair.to_host((conditioning, latent))
    assert arrived[0].equal(conditioning[0][0]) and arrived[1]["area"] == (1, 2, 3, 4)
    assert arrived[1]["pooled_output"].equal(conditioning[0][1]["pooled_output"])
    assert got.keys() == latent.keys() and got["samples"].equal(latent["samples"]) and got["noise_mask"].equal(latent["noise_mask"])


def test_a_frame_of_a_batch_does_not_bring_the_batch(peer):
    batch = torch.rand(64, 256 << 10)
    total, storage = peer.do("touch", batch[0])
    assert total == pytest.approx(float(batch[0].sum())) and storage <= 2 * batch[0].nbytes
    frame, whole = peer.do("echo", [batch[3], batch])
    assert frame.equal(batch[3]) and whole.equal(batch)
    assert peer.do("same storage", [batch[3], batch])
    assert frame.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole.untyped_storage().nbytes() == batch.nbytes


def test_tensors_that_overlap_see_each_others_edits_and_others_do_not(pair):
    base = torch.zeros(100_000)
    left, right, apart = pair.to_worker((base[:60_000], base[50_000:], base.clone()))
    left[55_000] = 1
    assert right[5_000] == 1 and apart.sum() == 0


def test_a_view_of_another_dtype_shares_its_bytes_too(pair):
    base = torch.zeros(50_000)
    floats, odd = pair.to_worker((base[1:], base.view(torch.uint8)[5:]))
    odd.fill_(255)
    assert floats.isnan().sum() == floats.numel() - 1 or floats.isnan().all()


def test_a_part_of_a_message_does_not_keep_the_rest(pair):
    image, mask = pair.to_host((torch.ones(4 * MIB), torch.ones(2 * MIB)))
    del image
    pair.until(lambda: pair.worker.pool.usage().idle >= 16 * MIB)
    assert mask.sum() == 2 * MIB


# editing

@pytest.mark.parametrize("size", [1000, 16 * MIB], ids=["small", "large"])
def test_an_edit_in_the_worker_never_reaches_the_hosts_value(peer, size):
    cached = torch.zeros(size)
    assert [peer.do("edit", cached) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert not cached.any()


def test_an_edit_of_a_passed_on_result_does_not_reach_it_either(peers):
    one, other = peers(), peers()
    result = one.do("ones", 4 * MIB)
    assert other.do("edit", result) == 2.0 and one.do("edit", result) == 2.0
    assert result.sum() == 4 * MIB


def test_memory_that_was_edited_shows_the_next_value(pair):
    for number in range(5):
        arrived = pair.to_worker(torch.full((1 * MIB,), float(number)))
        assert arrived.eq(number).all()
        arrived[::3].fill_(-1)
        del arrived
        pair.until(lambda: pair.host.pool.usage().lent == 0)
    assert pair.host.pool.usage().idle == 4 * MIB


def test_a_result_is_not_overwritten_while_anybody_has_it(pair):
    held = [pair.to_host(torch.full((1 * MIB,), float(n))) for n in range(4)]
    part = held[2].view(1024, 1024)[5]
    del held[2]
    for n in range(4, 8):
        pair.to_host(torch.full((1 * MIB,), float(n)))
    assert [float(t.mean()) for t in held] == [0, 1, 3] and part.eq(2).all()


def test_the_same_memory_is_used_again(pair):
    for _ in range(20):
        arrived = pair.to_host(torch.ones(1 * MIB))
        del arrived
        pair.until(lambda: pair.worker.pool.usage().lent == 0)
    assert pair.worker.pool.usage().idle == 4 * MIB


# what outlives what

def test_a_result_outlives_its_worker_and_can_be_passed_on(peers):
    first, second = peers(), peers()
    result = first.do("keep", torch.arange(1 * MIB))
    small = first.do("keep", torch.arange(10))
    first.kill()
    assert result.equal(torch.arange(1 * MIB)) and small.equal(torch.arange(10))
    answer = second.do("echo", result, wait=False)
    del result
    assert second.result(answer).equal(torch.arange(1 * MIB))


def test_a_large_result_is_passed_on_without_a_copy(pair):
    result = pair.to_host(torch.ones(4 * MIB))
    packet = pair.host.encode({"image": result, "frame": result.view(4, -1)[1]})
    assert pair.host.pool.usage().lent == 0
    arrived = pair.worker.decode(packet.body, [os.dup(fd) for fd in packet.fds])
    assert arrived["image"].equal(result) and arrived["frame"].sum() == MIB


def test_memory_goes_back_when_a_link_ends_while_values_are_held(pair):
    results = [pair.to_host(torch.ones(2 * MIB)) for _ in range(3)]
    pair.close()
    assert pair.host.pool.usage().received == 24 * MIB
    first = results.pop(0)
    results.clear()
    gc.collect()
    assert first.sum() == 2 * MIB and pair.host.pool.usage().received == 8 * MIB


def test_a_message_that_is_not_sent_or_not_wanted_keeps_nothing(pair):
    thing = threading.Event()
    pair.host.encode([thing, torch.ones(MIB)]).cancel()
    assert pair.host.pool.usage().lent == 0 and pair.host.handles.count == 0
    packet = pair.host.encode([thing, torch.ones(MIB)])
    pair.worker.discard(packet.body, [os.dup(fd) for fd in packet.fds])
    pair.until(lambda: pair.host.pool.usage().lent == 0 and pair.host.handles.count == 0)


@pytest.mark.parametrize(("part", "bad"), [("v", {"$": "of another version"}), ("s", ["a segment that is none", 1 << 40, True])])
def test_a_message_that_cannot_be_read_keeps_nothing(pair, part, bad):
    handle = pair.to_host(threading.Event())
    packet = pair.host.encode([threading.Event(), torch.ones(MIB), handle, threading.Event(), torch.ones(2 * MIB)])
    body = over_the_wire(packet.body)
    body[part].insert(1, bad)
    with pytest.raises((TransferError, shared.SharedMemoryError)):
        pair.worker.decode(body, [os.dup(fd) for fd in packet.fds])
    del handle
    pair.until(lambda: pair.host.pool.usage().lent == 0 and pair.host.handles.count == pair.worker.handles.count == 0)


# many and much

def test_thousands_of_tensors_need_no_descriptor_each(peers):
    peer = peers(limit=100)
    ours, theirs = descriptors(), peer.do("descriptors")
    for _ in range(3):
        arrived = peer.do("small", 3000)
        assert len(arrived) == 3000 and arrived[2999].eq(2999).all()
        assert len(peer.do("echo", arrived)) == 3000
    assert descriptors() <= ours + 20 and peer.do("descriptors") <= theirs + 20


def test_many_large_values_are_held_with_few_descriptors(pair, monkeypatch):
    monkeypatch.setattr(shared, "KEEP_OPEN", 10)
    before = descriptors()
    held = [pair.to_host(torch.full((MIB // 4,), float(n))) for n in range(60)]
    assert descriptors() - before <= 2 * 11
    assert all(t.eq(n).all() for n, t in enumerate(held))


def test_hundreds_of_values_are_passed_on_at_once(pair):
    held = [pair.to_host(torch.full((MIB // 4,), float(n))) for n in range(40)]
    arrived = pair.to_worker(held)
    assert all(t.eq(n).all() for n, t in enumerate(arrived))


def test_both_ends_may_send_at_the_same_time(peer):
    answer = peer.do("previews", 10, wait=False)
    payload = "x" * (8 * MIB)
    for _ in range(2):
        assert peer.do("echo", payload) == payload
        assert peer.do("echo", torch.ones(2 * MIB)).sum() == 2 * MIB
    peer.result(answer)
    assert peer.previews == 10


def test_a_worker_that_is_sending_ends_with_its_host(peers):
    peer = peers()
    peer.do("previews", 10_000, wait=False)
    peer.close()
    assert peer.process.returncode is not None


# what cannot cross

def test_a_quantised_tensor_arrives_by_its_parts(peer):
    from comfy_kitchen.tensor import QuantizedTensor
    quantized = QuantizedTensor.from_float(torch.rand(64, 64), "TensorCoreFP8Layout")
    for arrived in (peer.do("echo", quantized), peer.do("echo", {"samples": quantized})["samples"]):
        assert type(arrived) is QuantizedTensor and arrived.shape == (64, 64)
        assert arrived.dequantize().equal(quantized.dequantize())
    assert peer.process.poll() is None


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize("value", [
    object(), threading.Lock(), len, int, torch.rand(3).as_subclass(Wrapped), torch.eye(3).to_sparse(), torch.empty(3, device="meta"),
    torch.nn.Linear(2, 2), np.array([object()]), type("Text", (str,), {})("a"),
], ids=lambda v: type(v).__name__)
def test_anything_else_stays_and_comes_home_as_itself(pair, value):
    handle = pair.to_host({"x": [value]})["x"][0]
    assert type(handle) is Handle and handle.type_name == type(value).__qualname__
    assert pair.to_worker((handle,))[0] is value


def test_nothing_of_a_model_is_in_the_message(pair):
    model = torch.nn.Linear(2048, 2048)
    packet = pair.worker.encode({"model": [model], "name": "x"})
    assert len(json.dumps(packet.body)) < 1000 and not packet.fds
    packet.cancel()


def test_a_value_within_itself_stays(pair):
    loop = [1]
    loop.append({"again": loop})
    deep = loop
    for _ in range(500):
        deep = [deep]
    for shape in (lambda a, b: (a, b), lambda a, b: {"ui": {}, "result": (a, b)}, lambda a, b: {"inputs": {"a": a, "b": b}}):
        arrived = pair.to_host(shape((deep, torch.ones(2)), 3))
        a, b = arrived if type(arrived) is tuple else list(arrived.values())[-1] if "result" in arrived else arrived["inputs"].values()
        assert b == 3 and type(a) is Handle     # a node's other results are not touched
        assert pair.to_worker((a,))[0][0] is deep


@pytest.mark.parametrize("body", [
    None, [], {}, {"v": {"$": "nothing"}}, {"v": {"$": []}}, {"v": {"$": "object", "of": "os:_wrap_close", "parts": {}}},
    {"v": {"$": "enum", "of": "signal:Signals", "name": "SIGINT"}}, {"v": {"$": "array", "dtype": "O", "shape": [1], "at": [0, 0, 8]}, "s": ["AAAAAAAAAAA="]},
    {"v": {"$": "tensor", "dtype": "float32", "shape": [4], "at": [0, 0, 8], "offset": 0}, "s": ["AAAAAAAAAAA="]},
    {"v": {"$": "tensor", "dtype": "float32", "shape": [1], "at": [0, -8, 8], "offset": 0}, "s": ["AAAAAAAAAAA="]},
    {"v": {"$": "tensor", "dtype": "float32", "shape": [2], "stride": [-1], "at": [0, 0, 8], "offset": 1}, "s": ["AAAAAAAAAAA="]},
    {"v": {"$": "tensor", "dtype": "float32", "shape": [1], "at": [3, 0, 8], "offset": 0}},
    {"v": {"$": "bytes", "at": [0, 0, 100]}, "s": ["AAAAAAAAAAA="]},
], ids=str)
def test_what_describes_no_value_is_refused(pair, body):
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(TransferError, match="no value"):
        pair.host.decode(body, [read])
    with pytest.raises(OSError):
        os.fstat(read)
