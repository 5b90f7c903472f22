"""Tensors on a card: which of them are taken over on the card, that nobody sees another's memory, and that it is given back."""

import ast
import inspect
import logging
import os
import platform
import sys
import threading
import time

import pytest
import torch

from comfy_multiproc import gpu
from comfy_multiproc.handles import Handle, HandleTable
from comfy_multiproc.shared import SharedPool
from comfy_multiproc.values import TransferError
from tests.unit.shared_card import FileCard
from tests.unit.value_peer import LONG, Pair, Peer

NUMBERS = 1 << 11
SIZE = 8 * NUMBERS


def tensor(value=1.0, numbers=NUMBERS):
    return torch.full((numbers,), float(value), dtype=torch.float64)


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(gpu, "_warned", threading.Event())
    monkeypatch.setattr(gpu, "SHARE_FROM", SIZE)
    yield caplog


def said(log, level):
    return [record.getMessage() for record in log.records if record.levelno == level and "Tensors on" in record.getMessage()]


@pytest.fixture
def card(tmp_path):
    card = FileCard(tmp_path)
    yield card
    card.go_on.set()


@pytest.fixture
def pair(card):
    """Two ends that both have the card."""
    pair = Pair(drivers=(card, card))
    yield pair
    pair.close()
    assert not card.occupied


@pytest.fixture
def shared(pair):
    """The same after the probe: tensors of the card go to the worker on the card."""
    pair.to_worker(tensor())
    pair.until(lambda: pair.host._cards.card(tensor()))
    return pair


def test_the_first_tensor_is_copied_and_once_the_other_end_has_found_a_pattern_the_next_are_shared(pair, card, log):
    assert pair.to_host(tensor(1)).equal(tensor(1)) and card.exported == gpu.PATTERN
    pair.until(lambda: not card.occupied)
    assert pair.to_host(tensor(2)).equal(tensor(2)) and card.exported == gpu.PATTERN + SIZE
    assert [line for line in said(log, logging.DEBUG) if "shared" in line] and not said(log, logging.WARNING)


def test_neither_end_sees_the_others_edits_and_the_memory_goes_back(shared, card):
    sent = tensor()
    arrived = shared.to_worker(sent)
    sent.fill_(2)
    assert arrived.eq(1).all()
    arrived.fill_(3)
    assert sent.eq(2).all()
    shared.until(lambda: not card.occupied)
    assert arrived.eq(3).all()


def test_a_value_changes_after_it_was_encoded_and_before_it_is_received(shared):
    sent = tensor()
    packet = shared.host.encode(sent)
    sent.zero_()
    assert shared.worker.decode(packet.body).eq(1).all()


def test_a_value_of_everything_arrives_whole(shared):
    thing = threading.Event()
    base = torch.arange(4 * NUMBERS, dtype=torch.float64)
    value = {"card": [base[:3 * NUMBERS], base[2 * NUMBERS:], base[::2], base.clone()], "small": base[:9], "host": torch.rand(1 << 20),
             "bytes": b"x" * (1 << 20), "thing": thing}
    arrived = shared.to_worker(value)
    for ours, theirs in zip([*value["card"], value["small"], value["host"]], [*arrived["card"], arrived["small"], arrived["host"]], strict=True):
        assert theirs.equal(ours) and theirs.dtype == ours.dtype
    assert arrived["bytes"] == value["bytes"] and type(arrived["thing"]) is Handle
    left, right, _, apart = arrived["card"]
    left[2 * NUMBERS] = -1
    assert right[0] == -1 and apart[2 * NUMBERS] == 2 * NUMBERS


def test_a_frame_brings_neither_its_batch_nor_what_came_with_it(shared, card):
    batch = tensor().expand(8, -1).clone()
    before = card.exported
    frame, other = shared.to_worker([batch[3], tensor(2)])
    assert card.exported - before == 2 * SIZE and frame.eq(1).all()
    assert frame.untyped_storage().nbytes() == SIZE and other.untyped_storage().data_ptr() != frame.untyped_storage().data_ptr()


def test_five_hundred_received_tensors_are_held_and_none_of_them_is_the_senders(shared, card):
    files = len(os.listdir("/dev/fd"))
    held = [shared.to_worker(tensor(n)) for n in range(500)]
    shared.until(lambda: not card.occupied)
    assert all(t[0] == n for n, t in enumerate(held)) and len(os.listdir("/dev/fd")) <= files
    with open("/proc/self/maps") as maps:
        assert str(card.folder) not in maps.read()


# what does not work

@pytest.mark.parametrize("way", ["to_worker", "to_host"])
@pytest.mark.parametrize(("fails", "exports", "warning"), [
    ("export", 1, None), ("open", 1, "pidfd_getfd: Operation not permitted"), ("pattern", 1, "something else"), ("absent", 1, None), ("hang", 1, None),
    ("room", 0, None),
])
def test_what_cannot_be_shared_is_copied_from_then_on(pair, card, log, way, fails, exports, warning):
    card.fails.add(fails)
    held = [getattr(pair, way)(tensor(n)) for n in range(3)]
    if fails not in ("export", "hang", "room"):
        pair.until(lambda: not card.occupied)
    held += [getattr(pair, way)(tensor(n)) for n in range(3, 20)]
    assert all(t.eq(n).all() for n, t in enumerate(held)) and card.exports == exports
    warnings, lines = said(log, logging.WARNING), said(log, logging.DEBUG)
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1 and warning in warnings[0] and "--ipc=host" in warnings[0]
    assert len(lines) == (fails not in ("hang", "room")) and all("copied" in line for line in lines)
    card.go_on.set()
    pair.until(lambda: not card.occupied)


def test_both_directions_and_all_links_have_one_warning(card, log):
    card.fails.add("open")
    for _ in range(2):
        pair = Pair(drivers=(card, card))
        pair.to_worker(tensor())
        pair.to_host(tensor())
        pair.until(lambda: not card.occupied)
        pair.close()
    assert len(said(log, logging.WARNING)) == 1


def test_what_finds_no_room_on_the_card_is_copied_and_the_next_shared(shared, card, log):
    card.fails.add("room")
    before = card.exports
    assert shared.to_worker(tensor(5)).eq(5).all() and card.exports == before
    card.fails.clear()
    assert shared.to_worker(tensor(6)).eq(6).all() and card.exports == before + 1
    assert not said(log, logging.WARNING)


def test_memory_that_can_no_longer_be_exported_is_copied(shared, card, log):
    card.fails.add("export")
    before = card.exports
    assert [shared.to_worker(tensor(n))[0] for n in range(3)] == [0, 1, 2]
    assert card.exports == before + 1 and len(said(log, logging.WARNING)) == 1


def test_memory_that_can_no_longer_be_opened_fails_one_message_and_is_copied_from_then_on(shared, card, log):
    card.fails.add("open")
    with pytest.raises(TransferError, match="Operation not permitted.*run it again"):
        shared.to_worker(tensor())
    shared.until(lambda: not card.occupied and not shared.host._cards.card(tensor()))
    assert shared.to_worker([tensor(2)])[0].eq(2).all() and len(said(log, logging.WARNING)) == 1


def test_what_is_not_sent_or_never_received_is_given_back(shared, card):
    shared.host.encode(tensor()).cancel()
    assert not card.occupied
    packet = shared.host.encode([tensor(), tensor()])
    shared.worker.discard(packet.body)
    shared.until(lambda: not card.occupied)
    shared.host.encode(tensor())
    assert card.occupied
    shared.host.close("the worker has died")
    assert not card.occupied


def asked_until(condition, peer, value):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        peer.do("echo", value)


def test_a_sender_is_back_where_it_was_and_what_it_sent_outlives_it(card):
    peer = Peer(HandleTable("host"), SharedPool(), driver=card)
    numbers = 1 << 17
    try:
        asked_until(lambda: card.opened >= 2 and card.exports >= 2, peer, tensor(7, numbers))
        opened, results = card.opened, [peer.do("echo", tensor(n, numbers)) for n in range(50)]
        assert all(t[0] == n for n, t in enumerate(results)) and card.opened == opened + 50
        asked_until(lambda: not card.occupied, peer, None)
        peer.kill()
        assert results[9].eq(9).all()
    finally:
        peer.close()


# where it must not be tried

@pytest.mark.parametrize("where", ["windows", "mac", "wsl", "wsl with a kernel of its own"])
def test_nothing_of_a_card_is_exported_where_that_hangs_or_corrupts(pair, card, log, monkeypatch, where):
    if where in ("windows", "mac"):
        monkeypatch.setattr(sys, "platform", {"windows": "win32", "mac": "darwin"}[where])
    elif where == "wsl":
        monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    else:
        exists = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/dxg" or exists(path))
    packets = [pair.host.encode(tensor(n)) for n in range(3)]
    with pytest.raises(AssertionError, match="not exported on this platform"):
        gpu.CudaIPC().export(torch.zeros(8, dtype=torch.uint8))
    monkeypatch.undo()
    assert card.exports == 0 and len(said(log, logging.DEBUG)) == 1
    assert [pair.worker.decode(p.body, [os.dup(fd) for fd in p.fds])[0] for p in packets] == [0, 1, 2]


# torch

@pytest.mark.parametrize("exported", [
    {}, {"handle": "", "size": 1, "offset": 0}, {"handle": "AAAA", "size": -1, "offset": 0}, {"handle": "AAAA", "size": 1, "offset": 1 << 60},
    {"handle": "AAAA", "size": True, "offset": 0}, {"handle": "?", "size": 1, "offset": 0}, {"handle": 5, "size": 1, "offset": 0}, "text", None,
], ids=str)
def test_what_describes_no_memory_is_refused(pair, exported):
    pair.worker._cards._driver = gpu.CudaIPC()
    body = {"v": 1, "s": [{"card": "cuda:x", "name": "y", "exported": exported}]}
    with pytest.raises(TransferError, match="no value"):
        pair.worker.decode(body)


@pytest.mark.parametrize("value", [
    {"$": "bytes", "at": [0, 0, 8]}, {"$": "array", "dtype": "<f8", "shape": [1], "at": [0, 0, 8]},
    {"$": "tensor", "dtype": "float64", "shape": [NUMBERS + 1], "at": [0, 0, SIZE], "offset": 0},
    {"$": "tensor", "dtype": "float64", "shape": [1], "at": [0, SIZE, 8], "offset": 0},
], ids=str)
def test_what_lies_beyond_memory_of_a_card_or_is_no_tensor_is_refused_and_the_memory_given_back(shared, value):
    packet = shared.host.encode(tensor())
    with pytest.raises(TransferError, match="no value"):
        shared.worker.decode({**packet.body, "v": value})


def test_memory_of_a_card_that_is_not_there_is_refused():
    with pytest.raises(gpu.NoCard, match="GPU-of-another"):
        gpu.CudaIPC().open("cuda:GPU-of-another", {"handle": "AAAA", "size": 1, "offset": 0})


def test_torch_exports_and_opens_memory_with_what_is_expected_here():
    """The order that torch itself uses: nothing else says it."""
    from torch.multiprocessing import reductions
    order = ["device", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"]

    def names(nodes):
        return [node.id.removeprefix("storage_") for node in nodes]
    exporting = next(node for node in ast.walk(ast.parse(inspect.getsource(reductions.reduce_tensor)))
                     if isinstance(node, ast.Assign) and "_share_cuda_" in ast.unparse(node.value))
    opening = next(node for node in ast.walk(ast.parse(inspect.getsource(reductions.rebuild_cuda_tensor)))
                   if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_new_shared_cuda"))
    assert [names(exporting.targets[0].elts), names(opening.args)] == [order, order]


def test_torch_takes_a_counter_that_is_not_there_for_that_of_a_process_that_has_ended():
    assert torch.UntypedStorage._release_ipc_counter_cuda(gpu.NO_COUNTER, 0) is None
