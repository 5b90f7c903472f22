"""The host's side of a pack's worker, with the other side in this process: nothing that belongs to a call or a process stays behind."""
from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from comfy_multiproc import host, link, station
from comfy_multiproc.handles import Handle, HandleTable
from comfy_multiproc.nodecall import Call
from comfy_multiproc.shared import SharedPool
from comfy_multiproc.values import Codec
from tests.unit.workers import SECONDS, until

MIB = 1 << 20
CALL = Call("Node", "run", None, prompt="one", id="7")
numbers = itertools.count()


class Far:
    """The worker's side; its process is a part of this one that ends when its link does."""

    exitcode = 0
    pid = None

    def __init__(self, sock: object):
        self.link = link.Link(sock, name="far", lost=self._lost)    # type: ignore[arg-type]
        self.codec = Codec(HandleTable(f"far {next(numbers)}"), SharedPool(), lambda notice: self.link.notify("values", notice), private=True)
        self.calls: list[link.Request] = []
        self.told: list[tuple[str, object]] = []
        self.link.on("values", lambda r: self.codec.receive(r.body))
        self.link.on("node", self.calls.append)
        self.link.otherwise(lambda r: self.told.append((r.kind, r.body)))
        self.link.start()

    def _lost(self, why: str) -> BaseException:
        self.codec.close(why)
        return link.LinkClosed(why)

    def answer(self, value: object) -> object:
        """Answer the oldest call; what it brought."""
        until(lambda: self.calls)
        request = self.calls.pop(0)
        brought = self.codec.decode(request.body["values"], request.take_fds())
        packet = self.codec.encode(value)
        request.reply(packet.body, packet.fds)
        return brought

    def join(self, timeout: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def fars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Far]]:
    started: list[Far] = []
    before = set(threading.enumerate())

    def spawn(worker: host.Worker) -> host._Run:
        ours, theirs = link.pair()
        run = host._Run()
        run.link = link.Link(ours, name="worker", lost=lambda why: worker._lost(run, why))
        for kind, handler in worker._handlers.items():
            run.link.on(kind, handler)
        run.process = far = Far(theirs)     # type: ignore[assignment]
        run.ready.set_result(link.Message("ready", None, []))
        worker._run = run
        run.link.start()
        started.append(far)
        return run
    monkeypatch.setattr(host.Worker, "_spawn", spawn)
    monkeypatch.setattr(station, "_host", None)
    yield started
    for far in started:
        far.link.close()
        assert far.link.join(SECONDS)
    until(lambda: not [t for t in threading.enumerate() if t not in before and t.name == "comfy_multiproc: values"])


@pytest.fixture
def packs(fars: list[Far]) -> station.PackStation:
    return station.PackStation("packs", ())


def lent() -> int:
    return station.of_host()[1].usage().lent


def collected(condition: Callable[[], object]) -> Callable[[], bool]:
    return lambda: gc.collect() >= 0 and bool(condition())


def test_a_process_that_is_ending_does_not_disturb_the_next_one(packs, fars):
    first = packs.send(CALL, {"thing": threading.Event(), "data": torch.ones(MIB)})
    fars[0].answer("done")
    assert first.result(SECONDS) == "done"
    old = packs.worker._run
    ending = threading.Thread(target=packs.worker.retire)
    ending.start()
    until(lambda: packs.worker.pid is None and packs.worker._run is None)
    second = packs.send(CALL, {"data": torch.ones(MIB)})
    brought = fars[1].answer(threading.Event())
    handle = second.result(SECONDS)
    assert isinstance(handle, Handle) and packs.owns(handle)
    fars[0].link.notify("values", {"returned": {}})
    assert fars[0].link.request("nonsense").exception(SECONDS) is not None      # so that has arrived
    assert packs.owns(handle) and handle.lost is None
    fars[0].link.close()
    assert old.over.wait(SECONDS)
    ending.join(SECONDS)
    until(lambda: station.of_host()[0].count == 0)      # what only the old one held
    del brought
    until(collected(lambda: lent() == 0))
    assert packs.owns(handle) and not packs.lost_handles
    third = packs.send(CALL, {"model": handle})
    assert isinstance(fars[1].answer("same")["model"], threading.Event)
    assert third.result(SECONDS) == "same"
    fars[1].link.close()
    until(lambda: packs.lost_handles and handle.lost is not None)


def test_an_answer_that_nobody_waits_for_keeps_nothing(packs, fars):
    result = packs.send(CALL, {})
    until(lambda: fars[0].calls)
    assert result.cancel()
    fars[0].answer([torch.ones(MIB), threading.Event()])
    until(lambda: fars[0].codec.pool.usage().lent == 0 and fars[0].codec.handles.count == 0)


def test_the_result_of_an_interrupted_call_keeps_nothing(packs, fars):
    result = packs.send(CALL, {})
    until(lambda: fars[0].calls)
    packs.worker.interrupt("one")
    fars[0].answer([torch.ones(MIB), threading.Event()])
    assert type(result.exception(SECONDS)).__name__ == "InterruptProcessingException"
    until(lambda: fars[0].codec.pool.usage().lent == 0 and fars[0].codec.handles.count == 0)


def test_a_finalizer_may_run_while_its_thread_sends(packs, fars):
    packs.send(CALL, {})
    done = threading.Event()

    def within() -> None:
        with packs.worker.link._sending:
            packs.drop(3)
            packs.forget(4)
            done.set()
    threading.Thread(target=within, daemon=True).start()
    assert done.wait(SECONDS)
    until(lambda: [told for told in fars[0].told if told[0] != "values"] == [("drop", 3), ("forget", 4)])


def test_a_call_that_meets_the_end_of_its_process_says_so(packs, fars):
    """It dies while the values are made ready; nothing of them stays."""
    packs.worker.start()
    encode = Codec.encode

    def dies(codec: Codec, value: object) -> object:
        packet = encode(codec, value)
        fars[0].link.close()
        until(lambda: packs.worker.link is None)
        return packet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codec, "encode", dies)
        with pytest.raises(link.LinkClosed, match="has ended before the call"):
            packs.send(CALL, {"data": torch.ones(MIB), "thing": threading.Event()})
    until(lambda: lent() == 0 and station.of_host()[0].count == 0)
    again = packs.send(CALL, {})
    fars[1].answer(1)
    assert again.result(SECONDS) == 1
