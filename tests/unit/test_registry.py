"""Registering providers, and core's safety from them."""

import logging
import os
import threading
import time
from collections import deque

import pytest

from comfy import process_memory
from comfy.process_memory import Candidate, DeviceUsage, Outcome, RamUsage, Receipt, ReleaseRequest, registry
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


@pytest.mark.parametrize("name, value", [("patience", None), ("patience", "long"), ("patience", float("inf")), ("patience", float("nan")),
                                         ("patience", -1.0), ("pid", "7"), ("pid", -1), ("pid", True)])
def test_a_pid_or_a_patience_that_decisions_cannot_use_is_refused(name, value):
    peer = Peer("odd")
    setattr(peer, name, value)
    with pytest.raises(ValueError, match=f"odd: {name} must be"):
        register(peer)
    assert registry.entries == ()


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
        return super().usage(device)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held = threading.Event()


@pytest.mark.parametrize("how, times, said, inline", [
    ("raise", 1, "usage raised RuntimeError: no connection", False), ("raise", 1, "usage raised RuntimeError: no connection", True),
    ("slow", 3, "usage takes", False), ("slow", 3, "usage takes", True), ("exit", 1, "usage raised SystemExit", False)])
def test_a_bad_count_leaves_the_provider_out_says_so_once_and_it_comes_back(how, times, said, inline, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    clock = [1000.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(registry, "CROWDED", 60.0)      # whatever else this machine does just now
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


class Int(int):
    """A whole number of another library."""


@pytest.mark.parametrize("inline", [False, True], ids=["on a helper", "inline"])
@pytest.mark.parametrize("method, answer, said", [
    ("usage", 5, "returned int, not DeviceUsage"), ("usage", None, "returned NoneType, not DeviceUsage"), ("usage", {"resident": 5}, "returned dict"),
    ("usage", DeviceUsage(resident=-1), "resident=-1"), ("usage", DeviceUsage(resident=1.5), "resident=1.5"),
    ("usage", DeviceUsage(resident=0, claimed=True), "claimed=True"), ("usage", DeviceUsage(resident=0, cached=Int(5)), "cached=5"),
    ("usage", DeviceUsage(resident=0, claimed=float("nan")), "claimed=nan"), ("usage", DeviceUsage(resident=10**30), "resident=1000"),
    ("usage", DeviceUsage(resident=0, busy="no"), "busy='no'"), ("usage", DeviceUsage(resident=0, age=None), "age=None"),
    ("usage", DeviceUsage(resident=0, age=float("nan")), "age=nan"), ("usage", DeviceUsage(resident=0, age=float("inf")), "age=inf"),
    ("ram", RamUsage(pinned=-3), "pinned=-3"), ("waiting", None, "returned NoneType, not bool"),
    ("candidates", [5], "a sequence with int in it"), ("candidates", "text", "returned str, not list or tuple"),
    ("candidates", deque(), "returned deque, not list or tuple"), ("candidates", [Candidate(id=None, name="A")], "id=None"),
    ("candidates", [Candidate(id="A", name="A", resident=None)], "resident=None"),
    ("candidates", (Candidate(id="A", name="A", kind="model"),), "kind='model'"),
    ("candidates", [Candidate(id="A", name="A", in_use=None)], "in_use=None")])
def test_a_count_that_is_no_proper_answer_is_none(method, answer, said, inline, caplog):
    peer = Peer("odd", {"m": 4})
    peer.inline_counting = inline
    entry = register(peer)
    device = () if method in ("ram", "waiting") else (CARD,)
    before = registry.count(method, *device)[0].value
    setattr(peer, method, lambda *args: answer)
    assert registry.count(method, *device)[0].value == before
    assert not entry.ready and said in caplog.text


def test_a_list_that_a_provider_changes_in_place_is_looked_at_each_time():
    peer = Peer("odd")
    peer.inline_counting = True
    kept = [Candidate(id="A", name="A", resident=1)]
    peer.candidates = lambda device: kept
    entry = register(peer)
    assert registry.count("candidates", CARD)[0].age == 0.0
    kept[0] = None
    registry.count("candidates", CARD)
    assert not entry.ready


def test_a_count_is_not_slow_where_other_threads_keep_the_interpreter():
    class Looks(Peer):
        inline_counting = True

        def usage(self, device):
            for _ in range(3):
                time.sleep(0)       # as a look at a file: whoever lets the interpreter go waits for it
            return super().usage(device)
    entry = register(Looks())
    end = threading.Event()

    def work():
        while not end.is_set():
            sum(range(100))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        ages = [usage(entry).age for _ in range(6)]
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert ages == [0.0] * 6 and entry.ready


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


def test_several_requests_to_a_provider_that_hangs_cost_one_deadline(monkeypatch):
    monkeypatch.setattr(registry, "GRACE", 0.4)
    peer = Hanging("hanging", {"m": 4})
    entry = register(peer)
    began = time.monotonic()
    assert registry.ask("release", [(entry, request(0.1)) for _ in range(32)]) == [None] * 32
    assert time.monotonic() - began < 8, "32 candidates of one peer"
    peer.go.set()
    until(lambda: not entry.hung)
    assert len(peer.asked) == 1


def test_a_provider_that_counts_but_fails_at_every_request_is_named_once_and_tried_ever_later(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: clock[0])
    peer = Peer("counts well", {"m": 4})

    def fail(request):
        raise ConnectionError("no")
    peer.release = fail
    entry = register(peer)
    waits = []
    for _ in range(5):
        assert ask(entry, seconds=5) is None
        waits.append(entry.retry_at - clock[0])
        clock[0] = entry.retry_at
        assert usage(entry).age == 0.0
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert len(caplog.records) == 1
    del peer.release
    caplog.set_level(logging.INFO)
    assert ask(entry, seconds=5).outcome is Outcome.FREED and entry.failures == 0
    assert "answers again" in caplog.text


@pytest.mark.parametrize("answer", [None, True, {"outcome": "freed"}, Receipt(outcome=Outcome.FREED, freed=-1), Receipt(outcome="freed", freed=1),
                                    Receipt(outcome=Outcome.FREED, freed=None), Receipt(outcome=Outcome.FREED, freed=1.0)])
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


class Telling(Peer):
    """Takes note of claims, as slowly as `go` lets it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.go, self.entered, self.told = threading.Event(), threading.Event(), 0

    def claim(self, device, size):
        self.entered.set()
        self.go.wait(30)
        self.told += 1


def test_what_is_being_told_makes_no_count_old(monkeypatch):
    """Else a provider would not be asked for room by the very load whose claim it is told of."""
    monkeypatch.setattr(registry, "COUNT_DEADLINE", 20.0)
    peer = Telling("told", {"m": 4})
    entry = register(peer)
    registry.tell("claim", CARD, 7)
    assert peer.entered.wait(20)
    threading.Timer(0.05, peer.go.set).start()
    assert usage(entry).age == 0.0


def test_a_provider_that_does_not_come_back_from_what_it_is_told_is_left_out(caplog):
    peer = Telling("W2", {"m": 4})
    entry = register(peer)
    registry.tell("claim", CARD, 7)
    assert peer.entered.wait(20)
    assert ask(entry, seconds=0.05) is None and not entry.ready
    for _ in range(100):
        registry.tell("claim", CARD, 0)
    assert "W2 (pid" in caplog.text and "claim has not come back" in caplog.text
    peer.go.set()
    until(lambda: not entry.hung)
    assert peer.told == 1, "nothing is piled up on it"


def test_what_a_provider_raises_when_it_is_told_something_is_said(caplog):
    peer = Telling("W2")
    peer.claim = None       # is called all the same: its class has one
    entry = register(peer)
    registry.tell("claim", CARD, 7)
    until(lambda: not entry.ready)
    assert "W2 (pid" in caplog.text and "claim raised TypeError" in caplog.text


def test_interrupts_come_in_order_and_on_one_thread_however_slow_the_provider_is(caplog):
    class Slow(Telling):
        def interrupt(self, prompt_id, value):
            self.entered.set()
            self.go.wait(30)
            self.heard.append(value)
            if len(self.heard) == 1:
                raise OSError("the pipe is full")
    def threads():
        return [thread for thread in threading.enumerate() if "interrupt" in thread.name]
    peer = Slow("W2")
    peer.heard = []
    register(peer)
    process_memory.tell_interrupt(True)
    assert peer.entered.wait(20)
    for value in (True, False) * 20:
        process_memory.tell_interrupt(value)
    assert len(threads()) == 1
    peer.go.set()
    until(lambda: not threads())
    assert peer.heard == [True, *(True, False) * 4] and "the pipe is full" in caplog.text


def test_a_provider_that_counts_by_counting_others_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(registry, "COUNT_DEADLINE", 20.0)

    class Nosy(Peer):
        def usage(self, device):
            self.seen = [count.age for count in registry.count("usage", device)]
            return super().usage(device)
    register(Nosy("one"), Nosy("two"))
    began = time.monotonic()
    assert [count.age for count in registry.count("usage", CARD)] == [0.0, 0.0]
    assert time.monotonic() - began < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked on this system")
def test_what_is_forked_from_this_process_has_no_providers():
    entry = register(Peer("the parent's", {"m": 4}))
    assert usage(entry).age == 0.0
    child = os.fork()
    if not child:
        os._exit(0 if registry.entries == () and registry.count("usage", CARD) == [] else 1)
    assert os.waitpid(child, 0)[1] == 0 and registry.entries == (entry,)
