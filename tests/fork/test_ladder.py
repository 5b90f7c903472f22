"""The eviction ladder of real ComfyUI with models in real other processes, on one virtual card."""

import os

import pytest

from comfy_multiproc.testing import RemoteError, stub_patcher
from tests.fork import peers

MIB = 1 << 20
CARD = "cpu:0"


@pytest.fixture
def peer(spawn):
    """peer("W1", A=60, B=40): a process that has loaded models of so many MiB, registered."""
    import comfy.model_management as mm
    started = []

    def start(name, **models):
        found = peers.make_peer(name, spawn(peers.FILE))
        for model, size in models.items():
            found.load(model, size * MIB)
        mm.register_process_memory_provider(found)
        started.append(found)
        return found
    yield start
    for found in started:
        mm.unregister_process_memory_provider(found)


def used_by(card, pid):
    return card.read().process(pid).total // MIB


@pytest.mark.row(2)
@pytest.mark.row(17)
@pytest.mark.card(size="240M")
@pytest.mark.parametrize("in_parts", [True, False])
def test_idle_models_of_other_processes_leave_in_one_order_and_only_as_many_as_needed(card, peer, in_parts):
    import comfy.model_management as mm
    W1, W2 = peer("W1", A=60, B=40), peer("W2", C=80)
    W1.process.call("in_parts", model="A", can=in_parts)
    assert mm.get_free_memory(card.device) == 60 * MIB
    mm.free_memory(120 * MIB, card.device)
    assert [(model, pid) for model, _, pid in W1.said["done"]] == [("B", W1.pid), ("A", W1.pid)]
    assert W1.asked == [("B", 60 * MIB), ("A", 20 * MIB)] and W2.asked == []
    assert used_by(card, W2.pid) == 80
    if in_parts:
        assert 30 <= used_by(card, W1.pid) <= 40, "A went in part"
    else:
        assert used_by(card, W1.pid) == 0, "A went wholly, since it cannot go in part"
    assert mm.get_free_memory(card.device) >= 120 * MIB


@pytest.mark.row(2)
@pytest.mark.row(12)
@pytest.mark.card(size="240M", inference=8 * MIB, reserved=4 * MIB)
def test_own_and_others_models_are_one_list(card, peer):
    import comfy.model_management as mm
    own = stub_patcher(56 * MIB)
    mm.load_models_gpu([own])
    W1 = peer("W1", small=48, large=64)
    assert mm.get_free_memory(card.device) == 72 * MIB
    mm.free_memory(172 * MIB, card.device)
    assert W1.asked == [("small", 100 * MIB)], "then the own model of 56, and then nothing was missing"
    assert own.loaded_size() < 56 * MIB and W1.device(CARD)["resident"] == 64 * MIB
    assert card.read().free >= 172 * MIB


@pytest.mark.row(1)
@pytest.mark.row(11)
@pytest.mark.row(12)
@pytest.mark.card(size="240M", inference=8 * MIB, reserved=4 * MIB)
def test_a_load_gets_its_room_from_an_idle_process_and_is_whole(card, peer):
    import comfy.model_management as mm
    W1 = peer("W1", A=160)
    model = stub_patcher(128 * MIB)
    mm.load_models_gpu([model])
    assert model.loaded_size() == 128 * MIB
    assert 0 < W1.device(CARD)["resident"] < 160 * MIB, "it gave back as much as was missing, in its layers"
    assert card.read().peak <= 240 * MIB


@pytest.mark.row(12)
@pytest.mark.card(size="240M", inference=8 * MIB, reserved=4 * MIB)
def test_what_a_process_uses_just_now_stays_and_the_load_is_partial(card, peer):
    import comfy.model_management as mm
    W1 = peer("W1", A=160)
    W1.busy, W1.in_use = True, {"A"}
    model = stub_patcher(128 * MIB)
    mm.load_models_gpu([model])
    assert W1.asked == [] and used_by(card, W1.pid) == 160
    assert 0 < model.loaded_size() <= 80 * MIB - 12 * MIB


@pytest.mark.card(size="240M")
def test_a_request_that_fits_evicts_nobody(card, peer):
    import comfy.model_management as mm
    own, other = stub_patcher(80 * MIB), stub_patcher(32 * MIB)
    mm.load_models_gpu([own])
    W1 = peer("W1", A=40)
    for _ in range(10):
        mm.load_models_gpu([other])
        mm.free_memory(30 * MIB, card.device)
        assert (own.loaded_size(), other.loaded_size(), used_by(card, W1.pid)) == (80 * MIB, 32 * MIB, 40)
    assert W1.asked == [] and W1.said["done"] == []


@pytest.mark.row(35)
@pytest.mark.row(40)
@pytest.mark.card(size="240M")
def test_only_a_real_shortfall_reaches_others(card, peer, monkeypatch):
    import comfy.model_management as mm
    own, other = stub_patcher(40 * MIB), stub_patcher(48 * MIB)
    mm.load_models_gpu([own, other])
    W1 = peer("W1", A=80)
    mm.free_memory(0, None)
    assert W1.asked == [], "RAM alone"
    mm.unload_model_and_clones(own)
    assert (own.loaded_size(), other.loaded_size()) == (0, 48 * MIB) and W1.asked == [], "unload just this"
    with monkeypatch.context() as smart:
        smart.setattr(mm, "DISABLE_SMART_MEMORY", True)
        mm.load_models_gpu([own])
        mm.free_memory(150 * MIB, card.device)
        assert own.loaded_size() == other.loaded_size() == 0 and W1.asked == [], "without smart memory all own models go first"
        mm.free_memory(180 * MIB, card.device)
        assert W1.asked == [("A", 20 * MIB)]
    for sentinel in (1e30, 1e32):
        W1.load(str(sentinel), 80 * MIB)
        W1.asked.clear()
        held = card.read().used
        mm.free_memory(sentinel, card.device)
        assert card.read().used == 0
        assert max(nbytes for _, nbytes in W1.asked) == held, "what others hold, not 10^30 bytes"


@pytest.mark.row(2)
@pytest.mark.card(size="240M")
def test_a_process_that_dies_while_it_gives_back_is_gone_and_the_load_goes_on(card, peer):
    import comfy.model_management as mm
    from comfy.process_memory import registry
    W1, W2 = peer("W1", A=60), peer("W2", C=80)
    W1.function = "die"
    mm.free_memory(200 * MIB, card.device)
    assert not W1.process.alive and registry.entries[0].gone
    assert W2.asked == [("C", 40 * MIB)] and mm.get_free_memory(card.device) >= 200 * MIB


@pytest.mark.row(2)
@pytest.mark.card(size="240M")
def test_a_process_that_does_not_answer_costs_its_deadline_once_and_comes_back(card, peer, monkeypatch, tmp_path, caplog):
    import comfy.model_management as mm
    from comfy.process_memory import ladder, registry
    monkeypatch.setattr(ladder, "DEADLINE", 0.5)
    W1, W2 = peer("W1", A=60), peer("W2", C=80)
    monkeypatch.setattr(W1, "release", lambda request: W1.process.call("wait_until", path=str(tmp_path / "go")))
    mm.free_memory(160 * MIB, card.device)
    entry = registry.entries[0]
    assert entry.hung and W2.asked, "the other one was asked in its place"
    mm.free_memory(170 * MIB, card.device)
    assert entry.hung and [record for record in caplog.records if "W1" in record.getMessage()][1:] == [], "it is named once"
    monkeypatch.undo()
    (tmp_path / "go").touch()
    peers_wait(lambda: entry.ready)
    mm.free_memory(230 * MIB, card.device)
    assert W1.asked and card.read().free >= 230 * MIB


def peers_wait(condition):
    import time
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.row(19)
@pytest.mark.card(size="160M")
def test_between_a_failure_and_its_retry_other_processes_make_room(card, peer):
    import comfy.model_management as mm
    import torch
    from comfy import process_memory

    def decode():
        return torch.empty(60 * MIB, dtype=torch.uint8, device=card.device)

    def with_one_retry():
        try:
            return decode()
        except mm.OOM_EXCEPTION as e:
            mm.raise_non_oom(e)
            process_memory.make_room(card.device, 60 * MIB)
        return decode()

    W1 = peer("W1", A=120)
    assert with_one_retry().nbytes == 60 * MIB
    assert len(W1.asked) == 1 and 0 < used_by(card, W1.pid) <= 100
    mm.unregister_process_memory_provider(W1)
    filler = torch.empty(100 * MIB - used_by(card, W1.pid) * MIB + 1, dtype=torch.uint8, device=card.device)
    with pytest.raises(mm.OOM_EXCEPTION):
        with_one_retry()
    assert filler.nbytes and len(W1.asked) == 1, "with nobody to ask it is as it was"


@pytest.mark.row(18)
@pytest.mark.card(size="64M")
def test_after_running_out_of_memory_a_process_is_as_empty_as_before(card, peer):
    W1 = peer("W1", A=8)
    before = used_by(card, W1.pid)
    with pytest.raises(RemoteError) as caught:
        W1.process.call("run_out", first=30 * MIB, second=30 * MIB)
    assert caught.value.type == "OutOfMemoryError"
    assert used_by(card, W1.pid) == before == 8
    assert W1.process.call("run_out", first=30 * MIB, second=20 * MIB) == 50 * MIB


@pytest.mark.row(5)
@pytest.mark.card(size="240M")
def test_each_byte_of_the_card_counts_once(card, peer):
    import comfy.model_management as mm
    from comfy.process_memory import devices
    W1 = peer("W1", A=80)
    assert mm.get_free_memory(card.device) == 160 * MIB, "the driver sees what W1 holds"
    W1.claimed = 50 * MIB
    assert mm.get_free_memory(card.device) == 110 * MIB
    devices.cover(CARD, False)
    try:
        assert mm.get_free_memory(card.device) == 30 * MIB, "and where it does not, that is taken off"
    finally:
        devices.cover(CARD, None)
    assert mm.get_free_memory(mm.torch.device("cpu")) > 0


@pytest.mark.row(9)
@pytest.mark.row(41)
@pytest.mark.card(size="64M", count=2)
def test_unloading_everything_reaches_every_process_on_every_device_and_says_what_it_could_not(card, peer, monkeypatch, caplog, tmp_path):
    import comfy.model_management as mm
    from comfy import process_memory
    from comfy.process_memory import registry, unloading
    W1, W2, W3 = peer("W1", A=32), peer("W2"), peer("W3")
    W2.load("B", 40 * MIB, device="cpu:1")
    rows = {row["name"]: row for row in process_memory.processes()}
    assert [figures["resident"] for figures in rows["W2"]["devices"]] == [0, 40 * MIB]
    mm.unload_all_models()
    assert (card.read(0).used, card.read(1).used) == (0, 0) and not caplog.records
    assert W1.asked == [("unload", "cpu:0")] and W2.asked == [("unload", "cpu:1")] and W3.asked == [] and W3.said["done"] == []
    assert all(not figures["vram"] for row in process_memory.processes() for figures in row["devices"])

    W2.load("C", 40 * MIB, device="cpu:1")
    monkeypatch.setattr(unloading, "DEADLINE", 0.5)
    monkeypatch.setattr(W2, "unload", lambda request: W2.process.call("wait_until", path=str(tmp_path / "go")))
    mm.unload_all_models()
    assert any("W2" in record.getMessage() and "has not confirmed" in record.getMessage() for record in caplog.records)
    assert {row["name"]: row["state"] for row in process_memory.processes()}["W2"] == "not confirmed"
    (tmp_path / "go").touch()
    peers_wait(lambda: not registry.entries[1].hung)


@pytest.mark.row(18)
@pytest.mark.card(size="64M")
def test_the_memory_summary_has_a_line_for_each_process(card, peer):
    import comfy.model_management as mm
    before = mm.debug_memory_summary()
    peer("W1", A=32)
    lines = mm.debug_memory_summary().splitlines()
    assert lines[0] == before and f"(pid {os.getpid()}, idle) on cpu:0: 0 MB in use" in lines[1] and "W1" in lines[2] and "32 MB in use" in lines[2]


@pytest.mark.row(37)
@pytest.mark.card(size="128M", keep_freed=True)
def test_an_idle_process_s_allocator_cache_is_given_back_before_any_model_is_unloaded(card, peer):
    import comfy.model_management as mm
    own = stub_patcher(48 * MIB)
    mm.load_models_gpu([own])
    W1 = peer("W1", A=16)
    W1.process.call("run_out", first=20 * MIB, second=20 * MIB)
    W1.said = W1.process.call("report")
    assert W1.device(CARD)["cached"] == 40 * MIB and mm.get_free_memory(card.device) == 24 * MIB
    mm.free_memory(60 * MIB, card.device)
    assert W1.asked == [("cache", 36 * MIB)] and card.read().free == 64 * MIB
    assert own.loaded_size() == 48 * MIB and W1.device(CARD)["resident"] == 16 * MIB
