"""The Free button with several processes: who unloads when, as far as host memory has room for what is copied there."""

import threading

import pytest

from comfy import process_memory
from comfy.process_memory import Outcome, Reason, Receipt, limits, unloading
from tests.unit.providers import Peer
from tests.unit.test_consult import card  # noqa: F401  (a fixture)

GIB = 1 << 30


@pytest.mark.row(21)
def test_dropping_the_node_cache_reaches_what_others_remember(card, caplog):  # noqa: F811
    class Remembering(Peer):
        remembers = True

        def reset(self, request):
            if self.busy:
                return Receipt(outcome=Outcome.BUSY)
            self.remembers = False
            return Receipt(outcome=Outcome.NOTHING)

    idle, busy, other = Remembering("idle"), Remembering("busy", busy=True), Peer("remembers nothing")
    for provider in (idle, busy, other):
        process_memory.register_process_memory_provider(provider)
    process_memory.reset_peers()
    assert (idle.remembers, busy.remembers) == (False, True)
    assert [record.message for record in caplog.records if "keeps what it remembers" in record.message] == [
        f"Process memory: busy (pid {busy.pid}) keeps what it remembers: it is busy, or does not answer"]


class HostMemory:
    """What is available, and the least that ever was."""

    def __init__(self, available):
        self.available = self.least = available
        self.lock = threading.Lock()

    def take(self, size):
        with self.lock:
            self.available -= size
            self.least = min(self.least, self.available)


class Copying(Peer):
    """Its weights pass through host memory as they leave the card; `together` is where those meet that do so at once."""

    def __init__(self, name, size, memory, order, together):
        super().__init__(name, {"model": size})
        self.memory, self.order, self.together = memory, order, together

    def unload(self, request):
        size = sum(self.models.values())
        self.order.append(self.name)
        self.memory.take(size)
        try:
            self.together.wait(1)
        except threading.BrokenBarrierError:
            pass
        self.memory.take(-size)
        return super().unload(request)


@pytest.mark.row(9)
@pytest.mark.parametrize("available, least, order", [(31 * GIB, 11 * GIB, ["small", "middle", "large"]), (200 * GIB, 152 * GIB, None)])
def test_where_host_memory_is_short_they_unload_one_after_another(card, monkeypatch, available, least, order):  # noqa: F811
    from comfy import process_memory
    card.size = 80 * GIB
    memory, began, together = HostMemory(available), [], threading.Barrier(3)
    monkeypatch.setattr(limits, "available", lambda: memory.available)
    peers = [Copying(name, size * GIB, memory, began, together) for name, size in (("large", 20), ("small", 12), ("middle", 16))]
    for peer in peers:
        process_memory.register_process_memory_provider(peer)
    unloading.unload_peers(Reason.USER_FREE)
    assert memory.least == least                            # one model at a time; or all at once where there is room
    assert order is None or began == order
    assert [sum(peer.models.values()) for peer in peers] == [0, 0, 0]
