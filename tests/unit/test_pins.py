"""Page-locked memory of several processes under one ceiling, in one container. Real processes, numbers for memory."""
from __future__ import annotations

import pathlib
import signal
import time
import uuid
from contextlib import contextmanager

import pytest

from comfy_multiproc.testing.card.capacity import CapacityFile, read_card
from tests.unit.pinning import FLOOR, PIECE, RESULT, contained, process
from tests.unit.processes import SECONDS, children, context
from tests.unit.small import MB


@contextmanager
def running(tmp_path, *names, container=1000 * MB, driver=1000 * MB, ceiling=900 * MB, barrier=None, kind=process):
    card = tmp_path / "card"
    CapacityFile.create(card, [container, driver]).close()
    with children(*((kind, tmp_path / "run", card, name, ceiling, barrier) for name in names)) as started:
        for child in started:
            assert child.hear() == "ready"
        for child, name in zip(started, names):
            deadline = time.monotonic() + SECONDS
            while child.call(("books",))["peers"] != sorted(set(names) - {name}):
                assert time.monotonic() < deadline, "they do not find each other"
                time.sleep(0.01)
        yield started


def ended_by_the_kernel(child):
    try:
        child.hear()
        return False
    except EOFError:
        child.process.join(SECONDS)
        return child.process.exitcode == -signal.SIGKILL


def peak(tmp_path):
    return read_card(tmp_path / "card").peak


@pytest.mark.row(42)
def test_together_they_lock_what_one_process_may(tmp_path):
    with running(tmp_path, "host", "a", "b", ceiling=300 * MB) as processes:
        for child in processes:
            assert child.call(("register", 90 * MB)) is True
        assert processes[0].call(("register", 90 * MB)) is True       # in place of its own: everything is in use
        assert [child.call(("pins",))["locked"] for child in processes] == [90 * MB] * 3


@pytest.mark.row(34)
@pytest.mark.row(42)
def test_an_idle_process_s_pins_go_before_own_active_ones(tmp_path):
    with running(tmp_path, "host", "a", ceiling=300 * MB) as [host, a]:
        assert a.call(("register", 200 * MB)) and a.call(("done",))
        assert host.call(("register", 90 * MB)) is True
        assert host.call(("register", 90 * MB)) is True               # 80 are missing
        assert host.call(("pins",))["locked"] == 180 * MB and a.call(("pins",))["locked"] == 0


@pytest.mark.row(34)
def test_own_idle_pins_go_before_those_of_others(tmp_path):
    with running(tmp_path, "host", "a", ceiling=300 * MB) as [host, a]:
        assert a.call(("register", 100 * MB)) and a.call(("done",))
        assert host.call(("register", 200 * MB)) and host.call(("done",))
        assert host.call(("register", 150 * MB)) is True
        assert a.call(("pins",))["locked"] == 100 * MB and host.call(("pins",))["locked"] == 150 * MB


@pytest.mark.row(42)
def test_what_one_does_not_use_another_may_borrow_until_it_is_wanted(tmp_path):
    with running(tmp_path, "host", "a", "b", ceiling=300 * MB) as [host, a, _]:
        assert a.call(("register", 280 * MB)) and a.call(("done",))   # nearly three shares
        assert host.call(("register", 100 * MB)) is True
        assert a.call(("pins",))["locked"] == 0


def test_two_that_reserve_at_the_same_instant_do_not_get_the_same_bytes(tmp_path):
    barrier = context.Barrier(2)
    with running(tmp_path, "a", "b", ceiling=100 * MB, driver=100 * MB, barrier=barrier) as [a, b]:
        a.tell(("at_once", 80 * MB))
        b.tell(("at_once", 80 * MB))
        assert sorted([a.hear(), b.hear()]) == [False, True]          # one of them goes on unlocked
        assert [child.call(("pins",))["refused"] for child in (a, b)] == [0, 0]


@pytest.mark.row(34)
def test_the_driver_s_refusal_is_tried_once_more_when_an_idle_process_has_given_some(tmp_path):
    with running(tmp_path, "host", "a", driver=100 * MB) as [host, a]:
        assert a.call(("register", 80 * MB)) and a.call(("done",))
        assert host.call(("register", 40 * MB)) is True
        assert host.call(("pins",)) == {"locked": 40 * MB, "reserved": 48 * MB, "refused": 1}
        assert a.call(("pins",))["locked"] == 0


def test_with_the_other_process_busy_it_goes_on_unlocked(tmp_path):
    with running(tmp_path, "host", "a", driver=100 * MB) as [host, a]:
        assert a.call(("register", 80 * MB))                          # in use
        assert host.call(("register", 40 * MB)) is False
        assert host.call(("pins",))["locked"] == 0 and a.call(("pins",))["locked"] == 80 * MB


def test_the_pins_of_a_process_that_is_killed_are_free_at_once(tmp_path):
    with running(tmp_path, "host", "a", ceiling=100 * MB, driver=100 * MB) as [host, a]:
        assert a.call(("register", 80 * MB))
        assert host.call(("register", 20 * MB)) is True
        a.kill()
        assert host.call(("register", 60 * MB)) is True
        assert host.call(("pins",))["locked"] == 80 * MB              # of its own none had to go


@pytest.mark.row(34)
def test_the_floor_is_the_same_in_host_and_worker(tmp_path):
    with running(tmp_path, "host", "worker") as [host, worker]:
        assert host.call(("keep_free", 400 * MB))
        # 1000 MB are free: each may lock down to 200, the half of what the host's cache keeps free.
        assert host.call(("shortfall", 10 * MB)) == worker.call(("shortfall", 10 * MB)) == 10 * MB + 200 * MB - 1000 * MB


def test_what_is_reserved_and_not_locked_yet_is_taken_from_what_is_available(tmp_path):
    with running(tmp_path, "a", "b", container=200 * MB) as [a, b]:
        assert a.call(("shortfall", 100 * MB)) <= 0                   # reserves 112
        assert b.call(("shortfall", 60 * MB)) == 60 * MB + FLOOR - (200 - 112) * MB


@pytest.mark.row(8)
@pytest.mark.row(34)
def test_five_processes_in_one_container_never_lock_more_than_the_limit_without_the_floor(tmp_path):
    names = ["host", "a", "b", "c", "d"]
    with running(tmp_path, *names, container=400 * MB) as processes:
        for seed, child in enumerate(processes):
            child.tell(("random", seed, 150))
        done = [child.hear() for child in processes]
        assert all(isinstance(count, int) and count > 20 for count in done), done
        assert 400 * MB - FLOOR - 5 * PIECE < peak(tmp_path) <= 400 * MB - FLOOR


@pytest.fixture
def group():
    """A real control group of 400 MB for memory."""
    folder = pathlib.Path("/sys/fs/cgroup/memory") / f"process-memory-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(400 * MB))
    except OSError:
        if folder.exists():
            folder.rmdir()
        pytest.skip("no version 1 memory control group can be made here")
    yield folder
    deadline = time.monotonic() + SECONDS
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.rmdir()


@pytest.mark.row(8)
@pytest.mark.row(34)
@pytest.mark.row(36)
def test_five_processes_in_a_real_container_lock_and_cache_no_more_than_it_has_without_the_floor(tmp_path, group):
    names = ["host", "a", "b", "c", "d"]
    with running(tmp_path, *names, kind=contained) as processes:
        for child in processes:
            (group / "cgroup.procs").write_text(str(child.pid))
            assert child.call(("contained", "group")) == 400
        for seed, child in enumerate(processes):
            child.tell(("work", seed, 60))
        done = [child.hear() for child in processes]
        assert all(isinstance(found, list) and found[0] > 0 for found in done), done
        # Results are there before the cache can let them go: one of each process at a time. The processes' own needs are small.
        least = min(lowest for _, lowest in done)
        assert FLOOR - len(names) * RESULT - 12 * MB < least < FLOOR + len(names) * PIECE
        assert (group / "memory.failcnt").read_text() == "0\n"


@pytest.mark.row(8)
def test_by_the_machine_s_figures_the_kernel_ends_one_of_them(tmp_path, group):
    with running(tmp_path, "host", "a", kind=contained) as processes:
        for child in processes:
            (group / "cgroup.procs").write_text(str(child.pid))
            child.call(("contained", "machine"))
        for seed, child in enumerate(processes):
            child.tell(("work", seed, 150))
        assert any(ended_by_the_kernel(child) for child in processes)


@pytest.mark.row(42)
def test_three_processes_on_windows_lock_the_share_that_is_safe_for_one(tmp_path):
    share = 640 * MB * 2 // 5
    with running(tmp_path, "host", "a", "b", container=640 * MB, ceiling=None) as processes:
        for child in processes:
            assert child.call(("register", 60 * MB)) is True
        for child in processes:
            child.call(("register", 60 * MB))                         # 360 of 256
        assert share - 60 * MB < sum(child.call(("pins",))["locked"] for child in processes) <= share


@pytest.mark.row(42)
def test_a_ceiling_that_shrinks_makes_idle_pins_go_own_first(tmp_path):
    with running(tmp_path, "host", "a", container=640 * MB, ceiling=None) as [host, a]:
        for child in (host, a):
            assert child.call(("register", 60 * MB)) and child.call(("done",))
        for child in (host, a):
            child.call(("ceiling", 100 * MB))
        assert host.call(("register", 30 * MB)) is True               # its own idle 60 go, which is enough
        assert [child.call(("pins",))["locked"] for child in (host, a)] == [30 * MB, 60 * MB]
        assert host.call(("register", 50 * MB)) is True               # the other one's go before its active ones
        assert [child.call(("pins",))["locked"] for child in (host, a)] == [80 * MB, 0]
