"""Registering providers, and core's safety from them."""

import logging
import threading
import time

import pytest

from comfy import process_memory
from comfy.process_memory import Outcome, Receipt, ReleaseRequest, registry
from tests.unit.providers import CARD, Hanging, Peer, until


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Nobody is registered before and after, and what takes seconds takes less."""
    assert registry.entries == ()
    monkeypatch.setattr(registry, "GRACE", 0.05)
    yield
    for entry in registry.entries:
        registry.unregister(entry.provider)


def register(*providers):
    for provider in providers:
        process_memory.register_process_memory_provider(provider)
    return registry.entries[-1]


def request(seconds=5.0, size=1, **more):
    return ReleaseRequest(device=CARD, bytes=size, deadline=time.monotonic() + seconds, **more)


def ask(entry, **more):
    return registry.ask("release", [(entry, request(**more))])[0]


def usage(entry):
    return next(count for count in registry.count("usage", CARD) if count.entry is entry)


# registering

def test_registering_and_unregistering_twice_is_fine():
    peer = Peer()
    register(peer, peer)
    assert [entry.provider for entry in registry.entries] == [peer]
    process_memory.unregister_process_memory_provider(peer)
    process_memory.unregister_process_memory_provider(peer)
    assert registry.entries == ()


@pytest.mark.parametrize("wrong", [object(), Peer, None, "peer"])
def test_an_object_that_is_no_provider_is_refused_with_what_is_needed(wrong):
    with pytest.raises(TypeError, match="an instance of a subclass of ProcessMemoryProvider"):
        register(wrong)
    assert registry.entries == ()


@pytest.mark.parametrize("version, advice", [((2, 0), "update ComfyUI"), ((0, 9), "update the provider")])
def test_another_major_version_is_refused_with_what_to_do(version, advice):
    peer = Peer("from the future")
    peer.api_version = version
    with pytest.raises(ValueError, match=rf"from the future .*version {version[0]}.*{advice}"):
        register(peer)


def test_a_newer_minor_version_is_welcome():
    peer = Peer()
    peer.api_version = (1, 99)
    register(peer)


def test_an_api_version_that_is_none_is_refused():
    peer = Peer("odd")
    peer.api_version = "1.0"
    with pytest.raises(TypeError, match="odd: api_version"):
        register(peer)


def test_registering_while_others_iterate_changes_nothing_for_them():
    register(Peer("first"))
    seen = []
    for entry in registry.entries:
        register(Peer("second"))
        seen.append(entry.name)
    assert seen == ["first"] and len(registry.entries) == 2


def test_many_threads_registering_at_once_lose_nobody():
    peers = [Peer(str(i)) for i in range(40)]
    go = threading.Barrier(8)

    def some(mine):
        go.wait()
        for peer in mine:
            registry.register(peer)

    threads = [threading.Thread(target=some, args=(peers[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.provider for entry in registry.entries} == set(peers)


def test_a_helper_thread_ends_with_its_provider():
    before = threading.active_count()
    peer = Peer()
    entry = register(peer)
    assert usage(entry).value.resident == 0
    assert threading.active_count() == before + 1
    registry.unregister(peer)
    until(lambda: threading.active_count() == before)
    assert ask(entry) is None and threading.active_count() == before, "who held on to it gets no answer and starts no thread"


# safety

class Broken(Peer):
    """Does what `how` says until it is None."""

    how = None

    def usage(self, device):
        if self.how == "raise":
            raise RuntimeError("no connection")
        if self.how == "exit":
            raise SystemExit
        if self.how == "slow":
            time.sleep(registry.SLOW_COUNT * 2)
        if self.how == "hang":
            self.held.wait(30)
        if self.how == "type":
            return 5
        if self.how == "negative":
            return process_memory.DeviceUsage(resident=-1)
        if self.how == "float":
            return process_memory.DeviceUsage(resident=1.5)
        return super().usage(device)

    def candidates(self, device):
        return super().candidates(device) if self.how != "items" else [5]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held = threading.Event()


@pytest.mark.parametrize("how, times, said, inline", [
    ("raise", 1, "usage raised RuntimeError: no connection", False), ("raise", 1, "usage raised RuntimeError: no connection", True),
    ("slow", 3, "usage takes", False), ("slow", 3, "usage takes", True), ("exit", 1, "usage raised SystemExit", False),
    ("type", 1, "usage returned int, not DeviceUsage", False), ("negative", 1, "resident=-1", False), ("float", 1, "resident=1.5", False)])
def test_a_bad_count_leaves_the_provider_out_says_so_once_and_it_comes_back(how, times, said, inline, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    clock = [1000.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: clock[0])
    peer = Broken("the broken one", {"m": 4}, busy=False)
    peer.inline_counting = inline
    entry = register(peer)
    assert usage(entry).value.resident == 4
    peer.how = how
    for _ in range(times):
        usage(entry)
    assert not entry.ready
    clock[0] += 0.5
    count = usage(entry)
    assert count.value.resident == 4 and count.age > 0, "what it counted last is all that is known"
    clock[0] += registry.BACK_OFF
    usage(entry)
    assert entry.retry_at - clock[0] == 2 * registry.BACK_OFF, "the second try comes later"
    peer.how = None
    clock[0] += 2 * registry.BACK_OFF
    assert usage(entry).age == 0.0 and entry.ready
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "the broken one" in lines[0] and said in lines[0] and "the broken one" in lines[1] and "answers again" in lines[1]


def test_a_sequence_of_something_else_is_no_list_of_candidates():
    peer = Broken()
    entry = register(peer)
    peer.how = "items"
    assert registry.count("candidates", CARD)[0].value is None
    assert not entry.ready


def test_a_count_that_hangs_costs_one_bounded_wait_and_nothing_is_piled_up_on_it(monkeypatch):
    monkeypatch.setattr(registry, "BACK_OFF", 0.0)
    peer = Broken()
    entry = register(peer)
    peer.how = "hang"
    began = time.monotonic()
    assert usage(entry).value is None
    assert time.monotonic() - began < 10
    assert entry.hung and not entry.ready, "though its back-off is over"
    threads = threading.active_count()
    for _ in range(20):
        assert usage(entry).value is None and ask(entry) is None
    assert threading.active_count() == threads
    peer.how = None
    peer.held.set()
    until(lambda: usage(entry).value is not None)


def test_a_request_that_hangs_costs_one_deadline_and_the_provider_comes_back(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(registry, "BACK_OFF", 0.01)
    peer = Hanging("W2", {"m": 4})
    entry = register(peer)
    began = time.monotonic()
    assert ask(entry, seconds=0.2, size=4) is None
    took = time.monotonic() - began
    assert took < 10
    assert ask(entry, seconds=60) is None, "at once: the hung call is not waited for again"
    assert usage(entry).value is None
    peer.go.set()
    until(lambda: entry.ready)
    assert ask(entry, size=4).outcome is Outcome.NOTHING, "it has been given back, though late"
    assert ["W2" in record.getMessage() for record in caplog.records] == [True, True]


def test_a_hanging_provider_does_not_hold_up_the_others():
    hanging, fine = Hanging("hanging", {"m": 4}), Peer("fine", {"m": 4})
    register(hanging, fine)
    first, second = registry.entries
    receipts = registry.ask("unload", [(first, request(0.3)), (second, request(0.3))])
    assert receipts[0] is None and receipts[1].freed == 4
    hanging.go.set()


@pytest.mark.parametrize("answer", [None, True, {"outcome": "freed"}, Receipt(outcome=Outcome.FREED, freed=-1)])
def test_what_is_no_receipt_is_no_answer(answer):
    peer = Peer()
    peer.release = lambda request: answer
    entry = register(peer)
    assert ask(entry) is None
    assert not entry.ready


def test_counting_goes_on_with_what_is_known_while_a_request_runs():
    peer = Hanging("W", {"m": 4})
    entry = register(peer)
    assert usage(entry).value.resident == 4
    receipts = []
    thread = threading.Thread(target=lambda: receipts.append(ask(entry, seconds=20, size=4)))
    thread.start()
    assert peer.entered.wait(10)
    count = usage(entry)
    assert count.value.resident == 4 and count.age > 0
    peer.go.set()
    thread.join(20)
    assert receipts[0].freed == 4 and usage(entry).value.resident == 0


# who answers does not ask

def test_a_provider_that_answers_a_request_makes_none():
    other = Peer("other", {"m": 4})

    class Reentrant(Peer):
        def release(self, request):
            self.seen = registry.ask("release", [(entry, request) for entry in registry.entries])
            return super().release(request)

    peer = Reentrant("re-entrant", {"m": 4})
    register(other, peer)
    assert ask(registry.entries[-1]).outcome is Outcome.FREED
    assert peer.seen == [None, None] and other.asked == []


def test_a_ticket_that_comes_back_is_known():
    tickets = []

    class Echo(Peer):
        def release(self, request):
            tickets.append(request.ticket)
            with process_memory.serving(request.ticket) as first_time:
                tickets.append(first_time)
            return super().release(request)

    register(Echo())
    ask(registry.entries[0], ticket="round trip")
    assert tickets == ["round trip", False]
    with process_memory.serving("somebody else's") as first_time:
        assert first_time
        assert ask(registry.entries[0]) is None, "on the thread that answers, nothing is asked"
    assert ask(registry.entries[0]) is not None


def test_telling_reaches_only_who_listens_and_does_not_wait():
    class Listener(Peer):
        def claim(self, device, size):
            self.held.wait(30)
            self.told.append((device, size))

    listener, deaf = Listener("listener"), Peer("deaf")
    listener.held, listener.told = threading.Event(), []
    register(listener, deaf)
    registry.tell("claim", CARD, 7)
    registry.tell("claim", CARD, 0)
    listener.held.set()
    until(lambda: listener.told == [(CARD, 7), (CARD, 0)])
