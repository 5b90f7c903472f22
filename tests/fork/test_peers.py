"""The runtime around real ComfyUI managers: what is published is what is there, what is given back has left the card."""
from __future__ import annotations

import importlib.util
import os
import pathlib
import threading
import time

import pytest

from comfy.process_memory.provider import Kind, Outcome, ReleaseRequest
from comfy_multiproc.testing import stub_patcher

RUNTIMES = pathlib.Path(__file__).with_name("runtimes.py")
spec = importlib.util.spec_from_file_location("fork_runtimes", RUNTIMES)
runtimes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtimes)

# What the other process runs is this file.
start, load, loaded, serve = runtimes.start, runtimes.load, runtimes.loaded, runtimes.serve


def request_from(peer, nbytes):
    """Ask a peer, as the other process; its answer."""
    from comfy_multiproc import runtime
    runtime.current.peers.refresh()
    [found] = [found for found in runtime.current.peers if found.name == peer]
    receipt = found.release(ReleaseRequest(device=CARD, bytes=nbytes, deadline=time.monotonic() + 20))
    return [receipt.outcome.value, receipt.freed]


MIB = 1 << 20
CARD = "cpu:0"
SMALL = {"size": "240M", "inference": 8 * MIB, "reserved": 4 * MIB}
SECONDS = 60.0


@pytest.fixture
def here(card):
    """This process shares memory; the test's thread is its execution thread."""
    runtimes.start("here")
    from comfy_multiproc import runtime
    yield runtime.current
    runtimes.stop()
    import comfy.model_management as mm
    mm.unload_all_models()


@pytest.fixture
def other(here, spawn):
    """Another process that does."""
    process = spawn()
    process.call("start", who="other")
    deadline = time.monotonic() + SECONDS
    while [peer.name for peer in here.peers] != ["other"]:
        assert time.monotonic() < deadline
        here.peers.refresh()
        time.sleep(0.01)
    return process


@pytest.fixture
def idle(other, tmp_path):
    """idle(): inside, the other process waits for a prompt, and gives what is asked for."""
    import contextlib

    @contextlib.contextmanager
    def serving():
        path = tmp_path / "enough"
        answer = []
        thread = threading.Thread(target=lambda: answer.append(other.call("serve", path=str(path))))
        thread.start()
        try:
            yield
        finally:
            path.touch()
            thread.join(SECONDS)
            path.unlink()
        assert answer == [None]
    return serving


def peer_of(here):
    [peer] = here.peers
    return peer


def ask(peer, nbytes, candidate=None, seconds=20.0):
    return peer.release(ReleaseRequest(device=CARD, bytes=nbytes, candidate=candidate, deadline=time.monotonic() + seconds))


def known(here, resident):
    """Wait until the other process has written so many bytes of weights."""
    deadline = time.monotonic() + SECONDS
    while peer_of(here).usage(CARD).resident != resident:
        assert time.monotonic() < deadline, peer_of(here).usage(CARD)
        time.sleep(0.01)
    return peer_of(here)


@pytest.mark.row(12)
@pytest.mark.card(**SMALL)
def test_what_is_published_is_what_is_there(card, here, other):
    other.call("load", model="A", nbytes=64 * MIB)
    other.call("load", model="B", nbytes=32 * MIB)
    peer = known(here, 96 * MIB)
    usage = peer.usage(CARD)
    in_file = card.read().process(other.pid)
    assert usage.resident == in_file.allocated and usage.cached == in_file.cached
    assert (usage.committed, usage.claimed, usage.busy) == (96 * MIB, 0, False)
    models = [c for c in peer.candidates(CARD) if c.kind is Kind.MODEL]
    assert sorted((c.name, c.resident, c.size, c.in_use) for c in models) == [
        ("Stub", 32 * MIB, 32 * MIB, False), ("Stub", 64 * MIB, 64 * MIB, False)]
    assert all(c.refs >= 2 for c in models)
    report = here.ledger.read(peer.slot).devices[CARD]
    assert report.allocator + report.pager == in_file.allocated + in_file.cached, "each byte once"
    assert report.total == 240 * MIB and peer.ram().resident > 100 * MIB


@pytest.mark.row(17)
@pytest.mark.card(**SMALL)
def test_a_receipt_is_what_has_left_the_card(card, here, other, idle):
    other.call("load", model="A", nbytes=64 * MIB)
    other.call("load", model="B", nbytes=32 * MIB)
    peer = known(here, 96 * MIB)
    ids = {c.size: c.id for c in peer.candidates(CARD) if c.kind is Kind.MODEL}
    with idle():
        before = card.read().process(other.pid).total
        part = ask(peer, 10 * MIB, ids[64 * MIB])
        assert part.outcome is Outcome.FREED and 10 * MIB <= part.freed < 64 * MIB
        assert card.read().process(other.pid).total == before - part.freed
        assert part.resident == peer.usage(CARD).resident == 96 * MIB - part.freed, "the books are right when the answer is there"
        whole = ask(peer, 10 ** 12, ids[32 * MIB])
        assert (whole.outcome, whole.freed) == (Outcome.FREED, 32 * MIB)
        assert ask(peer, MIB, ids[32 * MIB]).outcome is Outcome.NOTHING
        peer.unload(ReleaseRequest(device=CARD, bytes=1))
    assert card.read().process(other.pid).allocated == 0
    assert other.call("loaded", model="A") == other.call("loaded", model="B") == 0
    assert other.call("load", model="A", nbytes=64 * MIB) == 64 * MIB, "and the process works as before"


@pytest.mark.row(1)
@pytest.mark.row(2)
@pytest.mark.row(11)
@pytest.mark.card(**SMALL)
def test_a_load_here_takes_an_idle_model_there_and_no_more_than_it_needs(card, here, other, idle):
    import comfy.model_management as mm
    other.call("load", model="A", nbytes=160 * MIB)
    known(here, 160 * MIB)
    model = stub_patcher(128 * MIB)
    with idle():
        mm.load_models_gpu([model])
    assert model.loaded_size() == 128 * MIB
    left = other.call("loaded", model="A")
    assert 0 < left < 160 * MIB and card.read().refusals == 0
    # 128 * 1.1 for the model and 8 + 4 for inference were asked for; a model goes in whole layers, of 20 here,
    # and ComfyUI keeps room for casting one more of them.
    assert left >= (240 - 128 * 1.1 - 12 - 40) * MIB
    assert here.claims.own(CARD) == 0


@pytest.mark.row(39)
@pytest.mark.card(**SMALL)
def test_at_an_interrupt_check_only_what_is_not_in_use(card, here, other):
    """This process is the one that is asked: it runs a node, and looks whether it is interrupted."""
    import comfy.model_management as mm
    used, unused = stub_patcher(32 * MIB), stub_patcher(48 * MIB)
    mm.load_models_gpu([unused])
    here.awake(True)
    here.before_node()
    mm.load_models_gpu([used])
    asked = []
    done = threading.Event()

    def ask_here():
        asked.append(other.call("request_from", peer="here", nbytes=10 ** 12))
        done.set()
    thread = threading.Thread(target=ask_here)
    thread.start()
    deadline = time.monotonic() + SECONDS
    while not done.is_set() and time.monotonic() < deadline:
        mm.throw_exception_if_processing_interrupted()
        done.wait(0.001)
    thread.join(SECONDS)
    assert asked == [["freed", 48 * MIB]]
    assert used.loaded_size() == 32 * MIB and unused.loaded_size() == 0
    assert [m.model is used for m in mm.current_loaded_models] == [True]
    here.after_node()
    here.idle()


@pytest.mark.row(2)
@pytest.mark.card(**SMALL)
def test_inside_a_load_nothing_is_given_and_the_list_stays_whole(card, here, other):
    """A request that arrives while a model is being unloaded, between the two loops that work by index."""
    import comfy.model_management as mm
    models = [stub_patcher(40 * MIB) for _ in range(3)]
    for model in models:
        mm.load_models_gpu([model])
    answers = []
    unload = models[0].detach

    def detach(*args, **kwargs):
        answers.append(other.call("request_from", peer="here", nbytes=10 ** 12))
        return unload(*args, **kwargs)
    models[0].detach = detach
    kept = next(m for m in mm.current_loaded_models if m.model is models[1])
    mm.free_memory(235 * MIB, card.device, [kept])
    del models[0].detach
    assert answers == [["busy", 0]]
    assert mm.current_loaded_models == [kept] and kept.model_loaded_memory() == card.read().process(os.getpid()).allocated == 40 * MIB


@pytest.mark.row(9)
@pytest.mark.row(21)
@pytest.mark.card(**SMALL)
def test_unloading_everything_reaches_the_other_process_and_does_not_come_back(card, here, other, idle):
    import comfy.model_management as mm
    other.call("load", model="A", nbytes=64 * MIB)
    known(here, 64 * MIB)
    mine = stub_patcher(32 * MIB)
    mm.load_models_gpu([mine])
    with idle():
        mm.unload_all_models()
    assert other.call("loaded", model="A") == 0 and mine.loaded_size() == 0
    assert card.read().used == 0


@pytest.mark.row(22)
@pytest.mark.row(28)
@pytest.mark.row(38)
@pytest.mark.card(**SMALL)
def test_nothing_of_another_process_is_ever_in_the_list(card, here, other, idle):
    import comfy.model_management as mm
    other.call("load", model="A", nbytes=160 * MIB)
    known(here, 160 * MIB)
    with idle():
        model = stub_patcher(96 * MIB)
        mm.load_models_gpu([model])
    assert len(mm.current_loaded_models) == 1 and len(mm.loaded_models()) == 1
