"""The capacity file of the virtual card: what several processes see when they fill one card."""

import contextlib
import multiprocessing
import os
import signal
import struct

import pytest

from comfy_multiproc.testing.card.capacity import CapacityFile, CardError, CardFull, read_card
from comfy_multiproc.testing.card.settings import CardSettings, parse_bytes

MIB = 1 << 20
SECONDS = 60


@pytest.fixture
def path(tmp_path):
    return tmp_path / "card"


@contextlib.contextmanager
def process(target, *args):
    """A spawned process with one end of a pipe; killed if it has not ended by itself."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *args), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
        child.join(SECONDS)
        assert child.exitcode is not None, "the process did not end"
    finally:
        child.kill()
        child.join(SECONDS)
        ours.close()


def answer(pipe):
    assert pipe.poll(SECONDS), "no answer"
    return pipe.recv()


def hold(pipe, path, nbytes):
    """Allocate, say so, and hold it until told."""
    file = CapacityFile(path)
    file.allocate(0, nbytes)
    pipe.send("holding")
    pipe.poll(SECONDS)


def race(pipe, path, nbytes, rounds):
    """In every round, started by the test, try to allocate; say whether it fitted; give it back when told."""
    file = CapacityFile(path)
    pipe.send("ready")
    for _ in range(rounds):
        answer(pipe)
        try:
            file.allocate(0, nbytes)
            pipe.send(True)
        except CardFull:
            pipe.send(False)
        if answer(pipe):
            file.release(0, nbytes)


def churn(pipe, path, seed, steps):
    """Random allocations and releases; afterwards say what is held."""
    import random
    pick, file, held = random.Random(seed), CapacityFile(path), []
    pipe.send("ready")
    answer(pipe)
    for _ in range(steps):
        if held and pick.random() < 0.5:
            file.release(0, held.pop(pick.randrange(len(held))))
        else:
            size = pick.randrange(1, 4 * MIB)
            with contextlib.suppress(CardFull):
                file.allocate(0, size)
                held.append(size)
    pipe.send(sum(held))
    pipe.poll(SECONDS)


def test_allocations_are_counted_and_given_back(path):
    file = CapacityFile.create(path, [10 * MIB, 20 * MIB])
    file.allocate(0, 3 * MIB)
    file.allocate(1, 5 * MIB)
    assert (file.free(0), file.free(1)) == (7 * MIB, 15 * MIB)
    file.release(0, 3 * MIB)
    assert file.free(0) == 10 * MIB
    assert file.read(0).peak == 3 * MIB
    assert file.own(1).allocated == 5 * MIB


def test_what_does_not_fit_is_refused_and_leaves_no_trace(path):
    file = CapacityFile.create(path, [10 * MIB])
    file.allocate(0, 6 * MIB)
    with pytest.raises(CardFull, match="virtual card 0: 4194304 of 10485760 bytes are free") as refused:
        file.allocate(0, 4 * MIB + 1)
    assert (refused.value.requested, refused.value.free, refused.value.size) == (4 * MIB + 1, 4 * MIB, 10 * MIB)
    assert file.own(0).allocated == 6 * MIB and file.read(0).peak == 6 * MIB and file.read(0).refusals == 1
    file.allocate(0, 4 * MIB)       # to the last byte


def test_freed_bytes_stay_cached_until_the_cache_is_emptied(path):
    file = CapacityFile.create(path, [10 * MIB], keep_freed=True)
    file.allocate(0, 6 * MIB)
    file.release(0, 6 * MIB)
    assert file.own(0).cached == 6 * MIB and file.free(0) == 4 * MIB
    file.allocate(0, 8 * MIB)       # six from the cache, two from the card
    assert (file.own(0).allocated, file.own(0).cached, file.free(0)) == (8 * MIB, 0, 2 * MIB)
    file.release(0, 8 * MIB)
    file.empty_cache(0)
    assert file.free(0) == 10 * MIB


def test_a_tensor_that_dies_in_the_middle_of_a_reading_is_given_back(path, monkeypatch):
    """Garbage collection runs on whatever thread makes garbage, with that thread's locks held."""
    file = CapacityFile.create(path, [1000])
    file.allocate(0, 600)
    reclaim = file._reclaim

    def collecting(card):
        monkeypatch.setattr(file, "_reclaim", reclaim)
        file.release(0, 600)
    monkeypatch.setattr(file, "_reclaim", collecting)
    file.free(0)
    assert file.free(0) == 1000


def test_a_forked_child_gives_back_nothing_of_its_parent_s(path):
    file = CapacityFile.create(path, [1000])
    file.allocate(0, 600)
    if (child := os.fork()) == 0:
        status = 1
        try:
            file.release(0, 600)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert file.free(0) == 400


def test_another_process_cannot_use_what_one_keeps_cached(path):
    file = CapacityFile.create(path, [10 * MIB], keep_freed=True)
    file.allocate(0, 8 * MIB)
    file.release(0, 8 * MIB)
    with process(race, path, 4 * MIB, 2) as (_, pipe):
        assert answer(pipe) == "ready"
        pipe.send("go")
        assert answer(pipe) is False
        pipe.send(False)
        file.empty_cache(0)
        pipe.send("go")
        assert answer(pipe) is True
        pipe.send(True)


def test_a_context_costs_each_process_once_per_card(path):
    file = CapacityFile.create(path, [10 * MIB, 10 * MIB], context=2 * MIB)
    assert file.free(0) == 10 * MIB     # looking costs nothing
    file.allocate(0, MIB)
    file.allocate(0, MIB)
    assert (file.free(0), file.free(1)) == (6 * MIB, 10 * MIB)
    with process(hold, path, MIB) as (_, pipe):
        assert answer(pipe) == "holding"
        assert file.free(0) == 3 * MIB
        assert [p.fixed for p in file.read(0).processes] == [2 * MIB, 2 * MIB]
        pipe.send("end")


def test_a_killed_process_gives_everything_back(path):
    file = CapacityFile.create(path, [10 * MIB])
    with process(hold, path, 7 * MIB) as (child, pipe):
        assert answer(pipe) == "holding"
        assert file.read(0).process(child.pid).allocated == 7 * MIB
        os.kill(child.pid, signal.SIGKILL)
        child.join(SECONDS)
        assert file.free(0) == 10 * MIB and file.read(0).processes == ()
        file.allocate(0, 10 * MIB)


def test_a_killed_process_that_nobody_waits_for_gives_everything_back(path):
    """A zombie still has its pid and its start time, but no memory."""
    file = CapacityFile.create(path, [10 * MIB])
    with process(hold, path, 7 * MIB) as (child, pipe):
        assert answer(pipe) == "holding"
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        file.allocate(0, 10 * MIB)


def test_the_room_of_a_killed_process_does_not_raise_the_peak(path):
    file = CapacityFile.create(path, [10 * MIB])
    with process(hold, path, 7 * MIB) as (child, pipe):
        assert answer(pipe) == "holding"
        os.kill(child.pid, signal.SIGKILL)
        child.join(SECONDS)
        file.allocate(0, 2 * MIB)
    assert file.read(0).peak == 7 * MIB


def test_a_slot_whose_pid_was_given_to_another_process_is_not_that_process(path):
    file = CapacityFile.create(path, [10 * MIB])
    file.allocate(0, 4 * MIB)
    with open(path, "r+b") as f:        # the slot's start time, as if this pid had belonged to an earlier process
        f.seek((8 + 8 + 1) * 8)
        start, = struct.unpack("=Q", f.read(8))
        f.seek(-8, os.SEEK_CUR)
        f.write(struct.pack("=Q", start - 1))
    assert CapacityFile(path).free(0) == 10 * MIB


def test_two_processes_race_for_the_last_bytes_and_one_gets_them(path):
    rounds = 50
    CapacityFile.create(path, [10 * MIB])
    with process(race, path, 6 * MIB, rounds) as (_, one), process(race, path, 6 * MIB, rounds) as (_, two):
        assert answer(one) == answer(two) == "ready"
        for _ in range(rounds):
            one.send("go")
            two.send("go")
            won = answer(one), answer(two)
            assert sorted(won) == [False, True]
            one.send(won[0])
            two.send(won[1])
    assert read_card(path).peak == 6 * MIB


def test_a_full_card_is_never_more_than_full(path):
    size = 24 * MIB
    CapacityFile.create(path, [size])
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(process(churn, path, seed, 2000))[1] for seed in range(3)]
        assert [answer(pipe) for pipe in pipes] == ["ready"] * 3
        for pipe in pipes:
            pipe.send("go")
        held = [answer(pipe) for pipe in pipes]
        reading = read_card(path)
        for pipe in pipes:
            pipe.send("end")
    assert sorted(p.allocated for p in reading.processes) == sorted(held)
    assert reading.refusals > 0, "the card was never full: the test shows nothing"
    assert 0.8 * size < reading.peak <= size


def test_creating_a_file_that_is_there_opens_it(path):
    first = CapacityFile.create(path, [10 * MIB])
    first.allocate(0, MIB)
    again = CapacityFile.create(path, [99 * MIB])
    assert (again.size(0), again.free(0)) == (10 * MIB, 9 * MIB)


@pytest.mark.parametrize("content", [b"", b"x" * 8192, struct.pack("=8Q", 0x44524356464D4F43, 1, 1, 64, 0, 0, 0, 0)])
def test_a_file_that_is_none_is_refused_by_name(path, content):
    path.write_bytes(content)
    with pytest.raises(CardError, match=str(path)):
        CapacityFile(path)


def test_a_missing_file_and_a_missing_card_are_said(path):
    with pytest.raises(CardError, match="cannot open .*No such file"):
        read_card(path)
    with pytest.raises(CardError, match="virtual card 3: there are 2"):
        CapacityFile.create(path, [MIB, MIB]).allocate(3, 1)


def test_settings_survive_the_environment():
    settings = CardSettings(size=400 * MIB, count=2, state="low", inference=5 * MIB, reserved=0, weight_ratio=0.4, dtypes=(), context=MIB,
                            keep_freed=True, mixing="log")
    assert CardSettings.parse(settings.text()) == settings
    assert CardSettings.parse("size=1.5G, dtypes=fp16+fp8").dtypes == ("fp16", "fp8")
    assert parse_bytes("64K") == 65536


@pytest.mark.parametrize(("text", "message"), [
    ("count=2", "names no size"), ("size=big", "size=big: 'big' is no number of bytes"), ("size=1M,colour=red", "no setting 'colour'"),
    ("size=1M,state=lowest", "state=lowest is not one of normal, low, no, high"), ("size=0", "must be above 0"),
    ("size=1M,keep_freed=maybe", "keep_freed=maybe"), ("size=1M,form=npu,state=low", "belong to the Python form")])
def test_settings_that_are_wrong_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        CardSettings.parse(text)
