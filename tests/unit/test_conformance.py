"""The conformance kit catches what it is for, and lets a proper provider pass."""

import threading
import time

import pytest

from comfy.process_memory import Candidate, DeviceUsage, Outcome, Receipt, ReleaseRequest, registry
from comfy_multiproc.testing import conformance
from comfy_multiproc.testing.conformance import NotConforming, check_provider
from tests.unit.providers import CARD, Peer


class Proper(Peer):
    def __init__(self):
        super().__init__("proper", {"A": 300, "B": 200}, cache=50)


class SlowCount(Proper):
    def usage(self, device):
        time.sleep(0.02)
        return super().usage(device)


class BlockingCount(Proper):
    """Counts under the lock that it holds while it waits for the other process."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def usage(self, device):
        with self.lock:
            return super().usage(device)

    def release(self, request):
        with self.lock:
            time.sleep(0.6)
            return super().release(request)


class Liar(Proper):
    def release(self, request):
        return Receipt(outcome=Outcome.FREED, freed=request.bytes, resident=0)


class Raises(Proper):
    def release(self, request):
        raise ConnectionError("the server is away")


class Hangs(Proper):
    def release(self, request):
        time.sleep(8)
        return super().release(request)


class Reentrant(Proper):
    def release(self, request):
        registry.ask("release", [(entry, request) for entry in registry.entries])
        return super().release(request)


class BusyAsFreed(Proper):
    def release(self, request):
        return Receipt(outcome=Outcome.BUSY, freed=request.bytes)


class EveryDevice(Proper):
    def usage(self, device):
        return super().usage(CARD)

    def candidates(self, device):
        return super().candidates(CARD)


class CountRaises(Proper):
    def candidates(self, device):
        raise RuntimeError("no reply")


class Floats(Proper):
    def usage(self, device):
        return DeviceUsage(resident=1.5e9)


class SameIds(Proper):
    def candidates(self, device):
        return [Candidate(id="model", name="a", size=1), Candidate(id="model", name="b", size=1)] if device == CARD else []


class OddCandidate(Proper):
    def release(self, request):
        return super().release(ReleaseRequest(device=request.device, bytes=request.bytes))  # whatever was asked for


class TellingBlocks(Proper):
    def claim(self, device, size):
        time.sleep(0.2)


class NoSequence(Proper):
    def candidates(self, device):
        return None


class Nameless(Proper):
    @property
    def name(self):
        raise RuntimeError("not connected")


class NeverGives(Proper):
    def release(self, request):
        return Receipt(outcome=Outcome.NOTHING)


class GivesSilently(Proper):
    def release(self, request):
        super().release(request)
        return Receipt(outcome=Outcome.NOTHING)


class NoReceipt(Proper):
    def unload(self, request):
        return True


BROKEN = [
    (SlowCount, "counting is answered from local state", "usage takes"),
    (BlockingCount, "counting does not wait for a request", "while a request was running"),
    (Liar, "a receipt says what really left", "the usage has fallen by 0"),
    (Raises, "a request ends in a receipt", "release raised ConnectionError: the server is away"),
    (Hangs, "a request ends in a receipt", "release has not come back"),
    (Reentrant, "while it answers a request it makes none", "asked others for memory"),
    (BusyAsFreed, "a receipt says what really left", "only FREED has freed anything"),
    (EveryDevice, "on a device it does not know", "a device that does not exist"),
    (CountRaises, "candidates have ids of their own", "candidates raised RuntimeError: no reply"),
    (Floats, "counting gives whole", "resident=1500000000.0"),
    (SameIds, "candidates have ids of their own", "the same id"),
    (OddCandidate, "a candidate that does not exist", "freed something else"),
    (TellingBlocks, "what it is told", "claim takes"),
    (NoSequence, "candidates have ids of their own", "candidates returned NoneType, not list or tuple"),
    (Nameless, "it is a ProcessMemoryProvider", "RuntimeError: not connected"),
    (NeverGives, "a receipt says what really left", "the candidate A holds 300 bytes and is not in use"),
    (GivesSilently, "a receipt says what really left", "NOTHING, which means that all is still there"),
    (NoReceipt, "every other request ends in a receipt", "unload returned bool, not Receipt"),
]


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr(conformance, "DEADLINE", 0.5)
    monkeypatch.setattr(conformance, "GRACE", 0.3)


@pytest.mark.parametrize("make, rule, how", BROKEN, ids=[make.__name__ for make, _, _ in BROKEN])
def test_a_broken_provider_is_caught_by_the_rule_it_breaks(make, rule, how):
    said = []
    with pytest.raises(NotConforming) as caught:
        check_provider(make, device=CARD, say=said.append)
    lines = [line for line in str(caught.value).splitlines() if "BROKEN" in line and rule in line]
    assert lines and how in lines[0], str(caught.value)
    assert said == [], "the exception says it, and once is enough"


def test_a_proper_provider_passes_and_leaves_nobody_registered(capsys):
    closed = []
    report = check_provider(Proper, device=CARD, close=closed.append)
    assert report.ok and len(report.kept) == len(conformance.RULES) == len(closed)
    assert "Proper: 15 rules kept, 0 broken" in capsys.readouterr().out
    assert registry.entries == ()


def test_a_provider_that_holds_nothing_there_has_not_been_checked(capsys):
    with pytest.raises(NotConforming) as caught:
        check_provider(Proper, device="cpu:7")
    text = str(caught.value)
    assert "0 broken" in text and "  it holds nothing on cpu:7: " in text
    untried = [line for line in text.splitlines() if "NOT TRIED" in line]
    for rule in ("candidates have ids", "a receipt says what really left", "a request ends in a receipt", "a request for more", "it makes none"):
        assert any(rule in line for line in untried), text
    assert capsys.readouterr().out == ""


def test_something_that_is_no_provider_is_said_to_be_none():
    with pytest.raises(NotConforming, match="object is no subclass of ProcessMemoryProvider"):
        check_provider(object, say=lambda text: None)
