"""Processes that find each other, ask each other, and go on when one of them does not answer. Real processes, a shared card."""
from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from comfy.process_memory import Outcome
from comfy_multiproc.channel import auth_key
from comfy_multiproc.claims import LedgerClaims
from comfy_multiproc.ledger import SLOTS, Ledger
from comfy_multiproc.peer import PeerProcess
from comfy_multiproc.testing import check_provider
from comfy_multiproc.testing.card.capacity import CapacityFile, read_card
from tests.unit.processes import SECONDS, children, context, meet
from tests.unit.small import KEY, MB, process

CARD = 1000 * MB
ROUNDS = int(os.environ.get("COMFY_MULTIPROC_ROUNDS", "50"))        # of four loads at once
STOPPED = float(os.environ.get("COMFY_MULTIPROC_STOPPED", "0"))     # seconds for which a process stays stopped


@contextmanager
def running(tmp_path, *names, patience=1.0, keep_freed=False, barrier=None):
    """Small ComfyUI processes on one card of 1000 MB, each knowing all others."""
    card = tmp_path / "card"
    CapacityFile.create(card, [CARD], keep_freed=keep_freed).close()
    with children(*((process, tmp_path / "run", card, name, patience, barrier) for name in names)) as started:
        meet(started, list(names))
        yield started


def used(tmp_path):
    return read_card(tmp_path / "card").used


def known(child, peer, **figures):
    """Wait until `child` reads these figures of `peer`."""
    deadline = time.monotonic() + SECONDS
    while True:
        usage = child.call(("usage", peer))
        if all(usage[name] == value for name, value in figures.items()):
            return usage
        assert time.monotonic() < deadline, f"{peer} is seen as {usage}, not {figures}"
        time.sleep(0.005)


def test_they_find_each_other_and_see_what_each_holds(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        assert b.call(("load", "Unet", 300 * MB)) == 300 * MB
        usage = known(a, "b", busy=False)
        assert (usage["resident"], usage["committed"], usage["claimed"]) == (300 * MB, 300 * MB, 0)
        [(name, _, resident, in_use)] = a.call(("candidates", "b"))
        assert (name, resident, in_use) == ("Unet", 300 * MB, False)


def test_a_load_evicts_the_idle_model_of_another_process_and_no_more_than_is_missing(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 700 * MB))
        assert a.call(("load", "Other", 500 * MB)) == 500 * MB, "there was room to be had"
        assert b.call(("books",))["resident"] == {"Unet": 500 * MB}, "200 MB were missing"
        assert used(tmp_path) == CARD
        assert b.call(("load", "Unet", 700 * MB)) == 700 * MB
        assert a.call(("books",))["resident"] == {"Other": 300 * MB}
        assert a.call(("books",))["ooms"] == b.call(("books",))["ooms"] == 0


def test_an_allocators_cache_is_given_back_before_any_model(tmp_path):
    with running(tmp_path, "a", "b", keep_freed=True) as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        b.call(("work", 250 * MB))
        assert known(a, "b", cached=250 * MB)["resident"] == 300 * MB
        assert a.call(("load", "Other", 700 * MB)) == 700 * MB
        assert b.call(("books",))["resident"] == {"Unet": 300 * MB} and used(tmp_path) == CARD
        # A model that is unloaded leaves the card too, not only the books: the receipt counts what the allocator let go.
        assert a.call(("ask", "b", "release", 100 * MB))[:3] == (Outcome.FREED, 100 * MB, 200 * MB)
        assert used(tmp_path) == 900 * MB


def test_a_receipt_says_what_has_left_the_card(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        [(_, id_, _, _)] = a.call(("candidates", "b"))
        assert a.call(("ask", "b", "release", 100 * MB, id_))[:3] == (Outcome.FREED, 100 * MB, 200 * MB)
        assert a.call(("ask", "b", "release", 900 * MB, id_))[:3] == (Outcome.FREED, 200 * MB, 0)
        assert used(tmp_path) == 0
        assert a.call(("ask", "b", "release", MB, id_))[0] is Outcome.NOTHING, "that model is no longer there"
        assert a.call(("ask", "b", "release", MB, None))[0] is Outcome.NOTHING
        assert a.call(("ask", "b", "release", MB, None, 5.0, "t", "cuda:other"))[0] is Outcome.NOTHING


def test_unload_and_reset(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        b.call(("load", "Clip", 200 * MB))
        assert a.call(("ask", "b", "unload", 0))[:3] == (Outcome.FREED, 500 * MB, 0)
        assert b.call(("books",))["resident"] == {} and used(tmp_path) == 0
        a.call(("ask", "b", "reset", 0))
        assert b.call(("books",))["resets"] == 1


def test_what_a_node_needs_counts_once_whether_it_is_claimed_or_kept_by_its_allocator(tmp_path):
    with running(tmp_path, "a", "b", keep_freed=True) as [a, b]:
        b.tell(("step", "Unet", 300 * MB, 250 * MB))
        assert b.hear() == "stepped"
        known(a, "b", busy=True, claimed=0)
        assert a.call(("load", "Other", 400 * MB)) == 400 * MB, "1000 - 300 - 250 were free"
        assert a.call(("ask", "b", "release", 250 * MB, "0"))[:2] == (Outcome.FREED, 250 * MB)
        assert known(a, "b", claimed=250 * MB), "it has been taken from the next step, and is kept for it"
        b.tell(("let go",))
        assert b.hear() == "sampled"
        known(a, "b", claimed=0)


@pytest.mark.parametrize("steps", [True, False], ids=["with steps", "without"])
def test_a_busy_process_gives_at_a_step_what_it_does_not_use_and_nothing_else(tmp_path, steps):
    with running(tmp_path, "a", "b", patience=0.3) as [a, b]:
        b.call(("load", "Clip", 200 * MB))
        b.tell(("sample", "Unet", 300 * MB, steps))
        assert b.hear() == "sampling"
        known(a, "b", busy=True)
        offered = {name: (id_, in_use) for name, id_, _, in_use in a.call(("candidates", "b"))}
        assert offered["Unet"][1] is True and offered["Clip"][1] is False
        outcome, freed, _, took = a.call(("ask", "b", "release", 100 * MB, offered["Clip"][0]))
        assert (outcome, freed) == ((Outcome.FREED, 100 * MB) if steps else (Outcome.BUSY, 0)) and took < 10
        outcome, freed, _, took = a.call(("ask", "b", "release", 100 * MB, offered["Unet"][0]))
        assert (outcome, freed) == (Outcome.BUSY, 0) and took < 10, "never what is in use, and always an answer"
        assert a.call(("ask", "b", "unload", 0))[0] is Outcome.BUSY
        b.tell(("let go",))
        assert b.hear() == "sampled"
        assert a.call(("ask", "b", "release", 100 * MB, offered["Unet"][0]))[0] is Outcome.FREED


def test_what_waits_for_the_end_of_a_node_is_served_there(tmp_path):
    with running(tmp_path, "a", "b", patience=10.0) as [a, b]:
        b.tell(("sample", "Unet", 300 * MB, True))
        assert b.hear() == "sampling"
        known(a, "b", busy=True)
        a.tell(("ask", "b", "unload", 0, None, 20.0))
        b.tell(("let go",))
        assert b.hear() == "sampled"
        assert a.hear()[:3] == (Outcome.FREED, 300 * MB, 0)


def test_inside_memory_management_the_answer_is_busy_at_once(tmp_path):
    with running(tmp_path, "a", "b", patience=20.0) as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        b.tell(("move",))
        assert b.hear() == "moving"
        outcome, _, _, took = a.call(("ask", "b", "release", MB, None, 25.0))
        assert outcome is Outcome.BUSY and took < 10, "it does not use up the patience"
        b.tell(("let go",))
        assert b.hear() == "moved"
        assert a.call(("ask", "b", "release", MB))[0] is Outcome.FREED


def test_a_model_that_cannot_be_unloaded_is_nothing_to_give_and_the_books_say_what_is_left(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        b.call(("fail_in_unload", 100 * MB))
        assert a.call(("ask", "b", "release", 250 * MB))[:2] == (Outcome.NOTHING, 0)
        known(a, "b", resident=200 * MB)
        assert a.call(("ask", "b", "release", 150 * MB))[:2] == (Outcome.FREED, 150 * MB)


def test_what_a_process_forks_gives_nothing_of_it_back(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        assert b.call(("fork",)) == 0
        assert {p.name for p in Ledger(tmp_path / "run", create=False).processes(exact=True)} == {"a", "b"}
        assert known(a, "b", resident=300 * MB)
        assert a.call(("ask", "b", "release", 100 * MB))[:2] == (Outcome.FREED, 100 * MB)


def test_a_patience_without_end_waits_and_ends_no_load(tmp_path):
    with running(tmp_path, "a", "b", patience=float("inf")) as [a, b]:
        b.call(("load", "Clip", 600 * MB))
        b.tell(("sample", "Unet", 100 * MB, False))
        assert b.hear() == "sampling"
        known(a, "b", busy=True, resident=700 * MB)
        a.tell(("load", "Other", 900 * MB))
        known(b, "a", claimed=300 * MB)
        b.tell(("let go",))
        assert b.hear() == "sampled" and a.hear() == 900 * MB


def test_while_a_graph_is_captured_nothing_is_given_and_others_know(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        b.call(("capture", True))
        assert known(a, "b", capturing=True)
        assert a.call(("ask", "b", "release", MB))[0] is Outcome.BUSY
        b.call(("capture", False))
        known(a, "b", capturing=False)
        assert a.call(("ask", "b", "release", MB))[0] is Outcome.FREED


def test_a_request_that_comes_back_is_answered_nothing(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        a.call(("load", "Other", 600 * MB))
        ticket = b.call(("fan_out", "a", 50 * MB))
        assert a.call(("books",))["resident"] == {"Other": 550 * MB}
        assert a.call(("ask", "b", "release", MB, None, 5.0, ticket))[0] is Outcome.NOTHING, "it is b's own request"
        assert a.call(("ask", "b", "release", MB, None, 5.0, "another"))[0] is Outcome.FREED


def test_both_ask_each_other_at_once_and_both_are_answered(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        a.call(("load", "A", 300 * MB))
        b.call(("load", "B", 300 * MB))
        for _ in range(20):
            a.tell(("load", "A", 800 * MB))
            b.tell(("load", "B", 800 * MB))
            a.hear(), b.hear()
            assert used(tmp_path) <= CARD
        assert a.call(("books",))["ooms"] + b.call(("books",))["ooms"] == 0
        assert a.call(("books",))["claimed"] == b.call(("books",))["claimed"] == 0


def test_a_peer_keeps_the_rules_of_a_provider(tmp_path):
    said = []
    with running(tmp_path, "a") as [a]:
        ledger = Ledger(tmp_path / "run")
        with ledger.lock():
            key = auth_key(ledger.folder)

        def make():
            a.call(("load", "Unet", 100 * MB))
            [written] = ledger.processes()
            return PeerProcess(ledger, written, key)
        check_provider(make, device=KEY, close=PeerProcess.close, say=said.append)
        ledger.close()
    assert said


# death and silence

def gone_everywhere(tmp_path, others, name, pid):
    for other in others:
        deadline = time.monotonic() + SECONDS
        while name in other.call(("books",))["peers"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert pid not in [p.pid for p in Ledger(tmp_path / "run", create=False).processes(exact=True)]


WHERE = ["idle", "claiming", "claimed", "loading", "serving", "writing", "lock", "sampling"]


def bring(a, b, where, seconds=20.0):
    """Bring b, which has nothing to do and 600 MB, to where it is to be struck; a may wait for it there."""
    if where == "claiming":
        b.call(("hold_lock", 300 * MB))
    elif where in ("claimed", "loading"):
        b.tell(("stop_at", where, "More", 300 * MB))
        assert b.hear() == where
    elif where == "serving":
        b.call(("wait_in_unload",))
        a.tell(("ask", "b", "release", 100 * MB, None, seconds))
        assert b.hear() == "unloading"
    elif where == "writing":
        b.call(("half",))
    elif where == "lock":
        b.call(("hold_lock",))
    elif where == "sampling":
        b.tell(("sample", "Unet", 600 * MB, True))
        assert b.hear() == "sampling"
    if where in ("claiming", "claimed", "loading"):
        assert known(a, "b", claimed=150 * MB if where == "loading" else 300 * MB)


@pytest.mark.parametrize("where", WHERE)
def test_killed_wherever_it_is_nothing_of_it_is_left(tmp_path, where):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 600 * MB))
        bring(a, b, where)
        b.kill()
        if where == "serving":
            assert a.hear()[:2] == (Outcome.GONE, 0), "whoever waits for it learns so at once"
        # The very next load counts on nothing of the dead.
        assert a.call(("load", "Other", 900 * MB)) == 900 * MB
        gone_everywhere(tmp_path, [a], "b", b.pid)
        assert used(tmp_path) == 900 * MB and a.call(("books",))["claimed"] == 0


@pytest.mark.parametrize("where", WHERE)
def test_stopped_wherever_it_is_others_go_on_and_the_books_are_right_when_it_continues(tmp_path, where):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 600 * MB))
        bring(a, b, where, seconds=1.0)
        b.stop()
        if where == "serving":
            assert a.hear()[0] is Outcome.BUSY, "whoever waits for it is answered at the deadline"
        until = time.monotonic() + STOPPED
        rounds = 0
        while time.monotonic() < until or not rounds:
            outcome, freed, _, took = a.call(("ask", "b", "release", MB))
            assert (outcome, freed) == (Outcome.BUSY, 0) and took < 10
            # What a stopped process holds is held, what it claims is claimed, and there is nobody to wait for.
            held = read_card(tmp_path / "card").process(b.pid).total + a.call(("usage", "b"))["claimed"]
            assert 0 < a.call(("load", "Other", 900 * MB)) <= CARD - held
            a.call(("free", CARD))
            rounds += 1
        a.call(("load", "Other", 900 * MB))
        b.resume()
        if where == "writing":
            b.call(("whole",))
        elif where != "idle":
            b.tell(("let go",))
        if where in ("claimed", "loading", "sampling"):
            b.hear()
        b.call(("free", 1))
        books = b.call(("books",))
        assert sum(books["resident"].values()) == books["allocated"] and books["claimed"] == books["ooms"] == 0
        known(a, "b", resident=books["allocated"], claimed=0, busy=False)
        assert a.call(("load", "Other", 900 * MB)) == 900 * MB, "and it gives as before"
        assert used(tmp_path) == CARD and read_card(tmp_path / "card").refusals == 0


def test_stopped_while_it_holds_a_devices_lock_costs_others_a_bound(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("hold_lock",))
        b.stop()
        assert a.call(("load", "Other", 500 * MB)) == 500 * MB
        b.resume()


def test_a_new_process_is_seen_by_the_next_load_of_another(tmp_path):
    with running(tmp_path, "a") as [a]:
        with children((process, tmp_path / "run", tmp_path / "card", "late")) as [late]:
            assert late.hear() == "ready"
            late.tell(("stop_at", "claimed", "Unet", 700 * MB))
            assert late.hear() == "claimed"
            assert a.call(("load", "Other", 500 * MB)) == 300 * MB, "what has been promised to somebody else is not free"


def test_the_folder_is_deleted_while_they_run(tmp_path):
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        shutil.rmtree(tmp_path / "run")
        deadline = time.monotonic() + SECONDS
        while not (a.call(("books",))["peers"] == ["b"] and (tmp_path / "run").exists()
                   and len(list(Ledger(tmp_path / "run", create=False).processes())) == 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        known(a, "b", resident=300 * MB)
        assert a.call(("ask", "b", "release", 100 * MB))[:2] == (Outcome.FREED, 100 * MB)


def test_they_go_where_processes_that_start_now_would_look(tmp_path):
    """A session's folder goes with the session, and comes back with the next."""
    with running(tmp_path, "a", "b") as [a, b]:
        b.call(("load", "Unet", 300 * MB))
        for child in (a, b):
            child.call(("use_folder", tmp_path / "next"))
        deadline = time.monotonic() + SECONDS
        while not ((tmp_path / "next").exists() and {p.name for p in Ledger(tmp_path / "next").processes()} == {"a", "b"}
                   and a.call(("books",))["peers"] == ["b"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(Ledger(tmp_path / "run", create=False).processes(exact=True)) == []
        assert a.call(("load", "Other", 900 * MB)) == 900 * MB
        assert list((tmp_path / "next").glob("device-*.lock")), "what is free is looked at under a lock that all of them know"


def test_the_sixty_fifth_process_goes_on_unlisted_until_a_slot_is_free(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    ledger = Ledger(tmp_path / "run")
    for i in range(SLOTS - 1):
        assert ledger.take(f"process {i}") is not None      # of this process, which lives
    card = tmp_path / "card"
    CapacityFile.create(card, [CARD]).close()
    with children((process, tmp_path / "run", card, "last")) as [last]:
        assert last.hear() == "ready"
        last.call(("load", "Unet", 600 * MB))
        with children((process, tmp_path / "run", card, "more")) as [more]:
            assert more.hear() == "ready"
            listed = {p.name for p in ledger.processes(exact=True)}
            assert len(listed) == SLOTS and "last" in listed and "more" not in listed
            assert more.call(("load", "Other", 900 * MB)) == 900 * MB, "it asks others, though none can ask it"
            assert any("goes on unlisted" in line for line in more.call(("said",)))
            last.kill()
            deadline = time.monotonic() + SECONDS
            while more.pid not in {p.pid for p in ledger.processes(exact=True)}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    ledger.close()


def test_nothing_is_left_to_clean_up_after_all_have_been_killed(tmp_path):
    with running(tmp_path, "a", "b") as both:
        for child in both:
            child.kill()
    with children((process, tmp_path / "run", tmp_path / "card", "next")) as [after]:
        assert after.hear() == "ready"
        assert after.call(("books",))["peers"] == []
        assert after.call(("load", "Unet", CARD)) == CARD
        assert len(list((tmp_path / "run").glob("*.sock"))) == 1, "the sockets of the dead are gone"
        after.tell(("end",))
        after.process.join(SECONDS)
    assert not list((tmp_path / "run").glob("*.sock")) and list(Ledger(tmp_path / "run", create=False).processes()) == []


class Samples:
    """What is resident and what is claimed on the card, together, read over and over while the block runs."""

    def __init__(self, tmp_path):
        self._card = CapacityFile(tmp_path / "card")
        self._ledger = Ledger(tmp_path / "run", create=False)
        self._claims = LedgerClaims(tmp_path / "run", lambda: None, lambda: None)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.taken: list[tuple[int, int]] = []
        self.blind = 0

    def __enter__(self):
        self._thread.start()
        return self.taken

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self._ledger.close()
        self._card.close()
        assert not self.blind, "the device's lock was not to be had"

    def _run(self):
        while not self._done.is_set():
            # Nobody claims or brings claimed bytes while the device's lock is held here.
            with self._claims.hold(KEY, SECONDS) as held:
                self.blind += not held
                self.taken.append((self._card.read(0).used, sum(self._ledger.claimed(p.slot, KEY) for p in self._ledger.processes(exact=True))))
            self._done.wait(0.002)


@pytest.mark.row(1)
def test_four_processes_load_at_the_same_instant(tmp_path):
    """Nobody is out of memory, and at every sample what is resident and what is claimed fit on the card together."""
    sizes = [300 * MB, 450 * MB, 150 * MB, 800 * MB]
    barrier = context.Barrier(4)
    with running(tmp_path, "a", "b", "c", "d", barrier=barrier) as started:
        loaded = []
        with Samples(tmp_path) as samples:
            for r in range(ROUNDS):
                for i, child in enumerate(started):
                    child.tell(("load_with_others", f"model{(r + i) % 4}", sizes[(r + i) % 4]))
                loaded.append([child.hear() for child in started])
        reading = read_card(tmp_path / "card")
        assert all(type(size) is int for answers in loaded for size in answers), loaded
        assert not [sample for sample in samples if sum(sample) > CARD]
        assert reading.refusals == 0 and reading.peak <= CARD
        assert len(samples) > ROUNDS and sum(claimed > 0 for _, claimed in samples) > ROUNDS // 4, "loads were looked at while they ran"
        assert sum(size > 0 for answers in loaded for size in answers) > ROUNDS, "and they do load"
        for child in started:
            assert child.call(("books",))["claimed"] == 0
        sys.stdout.write(f"{ROUNDS} rounds, {len(samples)} samples, {sum(c > 0 for _, c in samples)} with claims, at most "
                         f"{max(map(sum, samples)) // MB} of {CARD // MB} MB resident and claimed\n")
