"""A load waits for processes that work on the same prompts, as it would have waited for the node before it."""

import threading

import pytest

from comfy_multiproc.testing import stub_patcher
from tests.fork import peers

MIB = 1 << 20
CARD = "cpu:0"


class Working:
    """Has a node of the peer running for a moment, which uses its model."""

    def __init__(self, peer):
        self.peer = peer
        self.claims = []

    def begin(self, seconds):
        self.peer.in_use, self.peer.busy = {"theirs"}, True
        timer = threading.Timer(seconds, self.end)
        timer.daemon = True
        timer.start()

    def end(self):
        from comfy import process_memory
        self.claims.append(process_memory.claims.current.own(CARD))
        self.peer.in_use, self.peer.busy = set(), False


@pytest.fixture
def peer(spawn, fork_tree):
    from comfy import process_memory
    peer = peers.make_peer("theirs", spawn(peers.FILE), patience=30.0)
    process_memory.register_process_memory_provider(peer)
    yield peer
    process_memory.unregister_process_memory_provider(peer)


def load(nbytes):
    import comfy.model_management as mm
    patcher = stub_patcher(nbytes)
    mm.load_models_gpu([patcher])
    return patcher


def test_a_load_waits_until_what_it_needs_is_no_longer_in_use(card, peer):
    peer.load("theirs", 160 * MIB)
    Working(peer).begin(0.5)
    mine = load(160 * MIB)
    assert mine.loaded_size() == 160 * MIB
    assert card.read().peak <= 256 * MIB


def test_a_load_waits_too_when_a_node_has_begun_between_its_look_and_its_question(card, peer, monkeypatch):
    from comfy import process_memory
    peer.load("theirs", 160 * MIB)
    working = Working(peer)
    release = peer.release

    def just_begun(request):
        monkeypatch.setattr(peer, "release", release)
        working.begin(1.5)      # longer than a question waits for a busy process
        return process_memory.Receipt(outcome=process_memory.Outcome.BUSY)

    monkeypatch.setattr(peer, "release", just_begun)
    mine = load(160 * MIB)
    assert mine.loaded_size() == 160 * MIB
    assert working.claims == [0], "it claims nothing that the other may need meanwhile"
    assert card.read().peak <= 256 * MIB


def test_it_waits_no_longer_than_the_other_asks_for(card, peer):
    from comfy.process_memory import registry
    peer.load("theirs", 160 * MIB)
    peer.in_use, peer.busy = {"theirs"}, True
    registry.entries[0].patience = 0.3
    mine = load(160 * MIB)
    assert 0 < mine.loaded_size() < 160 * MIB
    assert peer.said["devices"][CARD]["resident"] == 160 * MIB


def test_of_two_that_wait_for_each_other_one_goes_on(card, peer, monkeypatch):
    import os
    peer.load("theirs", 160 * MIB)
    peer.in_use, peer.busy, peer.waiting = {"theirs"}, True, lambda: True
    peer.pid = os.getpid() + 1      # who has the lower pid goes on
    mine = load(160 * MIB)
    assert mine.loaded_size() < 160 * MIB
