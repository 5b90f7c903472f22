"""The inbox: every request is answered once, on the right thread, at a moment that is right for it."""
from __future__ import annotations

import threading
import time

import pytest

from comfy.process_memory.provider import Outcome, Receipt
from comfy_multiproc.safepoint import Ask, Inbox, Moment, waits_until

FREED = Receipt(outcome=Outcome.FREED, freed=1)
SECONDS = 30.0


class Asked:
    """Requests with what became of them."""

    def __init__(self):
        self.answers = []
        self.answered = threading.Event()
        self.gone = False

    def ask(self, kind="release", patience=SECONDS, **more):
        def answer(receipt):
            self.answers.append((receipt, threading.get_ident()))
            self.answered.set()
        return Ask(kind=kind, answer=answer, patience=time.monotonic() + patience, wanted=lambda: not self.gone, **more)

    @property
    def outcomes(self):
        return [receipt.outcome for receipt, _ in self.answers]


@pytest.fixture
def inbox():
    made = Inbox(lambda ask, moment: FREED)
    made.bind()
    return made


def in_thread(function):
    """Run on another thread; what it returns."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(SECONDS)
    assert result, "it hangs"
    return result[0]


def test_served_on_the_execution_thread_and_on_no_other(inbox):
    asked = Asked()
    inbox.submit(asked.ask())
    assert in_thread(lambda: inbox.serve(Moment.IDLE)) == 0 and not asked.answers
    assert inbox.serve(Moment.STEP) == 1
    assert asked.answers == [(FREED, threading.get_ident())]
    assert inbox.serve(Moment.IDLE) == 0 and len(asked.answers) == 1, "answered once"


def test_without_an_execution_thread_the_answer_is_busy_at_once():
    asked = Asked()
    Inbox(lambda ask, moment: FREED).submit(asked.ask())
    assert asked.outcomes == [Outcome.BUSY]


def test_what_cannot_be_done_at_one_moment_waits_for_a_better_one():
    tried = []

    def work(ask, moment):
        tried.append(moment)
        return FREED if moment >= Moment.BOUNDARY else Moment.BOUNDARY
    inbox = Inbox(work)
    inbox.bind()
    asked = Asked()
    inbox.submit(asked.ask())
    for _ in range(5):
        inbox.serve(Moment.STEP)
    assert tried == [Moment.STEP] and not asked.answers, "an operation of a model costs nothing while nothing can be given"
    inbox.serve(Moment.BOUNDARY)
    assert asked.outcomes == [Outcome.FREED]


def test_out_of_patience(inbox):
    asked, patient = Asked(), Asked()
    inbox.submit(asked.ask(patience=0.5))
    inbox.submit(patient.ask(patience=20))
    assert 0 < inbox.tick(time.monotonic()) <= 0.5 and not asked.answers
    assert 1 < inbox.tick(time.monotonic() + 1) <= 20
    assert asked.outcomes == [Outcome.BUSY] and not patient.answers
    inbox.serve(Moment.IDLE)
    assert asked.outcomes == [Outcome.BUSY] and patient.outcomes == [Outcome.FREED]
    assert inbox.tick(time.monotonic()) is None


def test_memory_management_refuses_what_waits_and_what_comes(inbox):
    waiting, coming, later = Asked(), Asked(), Asked()
    inbox.submit(waiting.ask())
    inbox.closed()
    inbox.closed()
    assert waiting.outcomes == [Outcome.BUSY]
    inbox.submit(coming.ask())
    assert coming.outcomes == [Outcome.BUSY] and inbox.serve(Moment.IDLE) == 0
    assert inbox.opened() is False and inbox.opened() is True
    inbox.submit(later.ask())
    assert inbox.serve(Moment.STEP) == 1 and later.outcomes == [Outcome.FREED]


def test_memory_management_of_another_thread_waits_for_the_one_request_that_is_being_done():
    began, go_on, order = threading.Event(), threading.Event(), []

    def work(ask, moment):
        began.set()
        go_on.wait(SECONDS)
        order.append("done")
        return FREED
    inbox = Inbox(work)

    def execute():
        inbox.bind()
        inbox.submit(Asked().ask())
        return inbox.serve(Moment.IDLE)

    def load():
        inbox.closed()
        order.append("load")
        inbox.opened()
    executing = threading.Thread(target=execute)
    executing.start()
    assert began.wait(SECONDS)
    loading = threading.Thread(target=load)
    loading.start()
    go_on.set()
    for thread in (executing, loading):
        thread.join(SECONDS)
    assert order == ["done", "load"]


def test_what_comes_while_one_is_being_done_is_done_next_even_if_the_first_uses_the_manager():
    second = Asked()

    def work(ask, moment):
        if ask.kind == "unload":
            inbox.closed()          # its own free_memory
            inbox.submit(second.ask())
            assert inbox.serve(Moment.IDLE) == 0, "never one inside another"
            inbox.opened()
        return FREED
    inbox = Inbox(work)
    inbox.bind()
    first = Asked()
    inbox.submit(first.ask("unload"))
    assert inbox.serve(Moment.IDLE) == 2
    assert first.outcomes == second.outcomes == [Outcome.FREED]


def test_an_error_is_answered_and_the_next_request_is_served(caplog):
    def work(ask, moment):
        if ask.kind == "unload":
            raise RuntimeError("no")
        return FREED
    inbox = Inbox(work)
    inbox.bind()
    bad, good = Asked(), Asked()
    inbox.submit(bad.ask("unload", origin="somebody"))
    inbox.submit(good.ask())
    assert inbox.serve(Moment.IDLE) == 2
    assert bad.outcomes == [Outcome.NOTHING] and good.outcomes == [Outcome.FREED], "busy would mean to ask again"
    assert "somebody" in caplog.text


def test_an_interrupt_goes_through_and_the_request_is_answered():
    class Interrupt(BaseException):
        pass

    def work(ask, moment):
        raise Interrupt
    inbox = Inbox(work)
    inbox.bind()
    asked, next_one = Asked(), Asked()
    inbox.submit(asked.ask())
    with pytest.raises(Interrupt):
        inbox.serve(Moment.STEP)
    assert asked.outcomes == [Outcome.BUSY]
    inbox._work = lambda ask, moment: FREED
    inbox.submit(next_one.ask())
    assert inbox.serve(Moment.STEP) == 1


def test_a_request_that_nobody_waits_for_any_more_is_not_done():
    done = []
    inbox = Inbox(lambda ask, moment: done.append(ask) or FREED)
    inbox.bind()
    asked = Asked()
    inbox.submit(asked.ask())
    asked.gone = True
    inbox.serve(Moment.IDLE)
    assert not done


def test_a_sleeping_execution_thread_is_woken_even_if_it_goes_to_sleep_just_after_the_wake_up(inbox):
    """It looks, finds nothing, and only then begins to wait: the notification in between is lost, and comes again."""
    condition = threading.Condition()
    served = threading.Event()
    looked, submitted = threading.Event(), threading.Event()

    def wake():
        with condition:
            condition.notify()

    def execute():
        inbox.bind()
        with inbox.waking(wake):
            inbox.serve(Moment.IDLE)
            looked.set()
            submitted.wait(SECONDS)
            with condition:
                condition.wait(SECONDS)
            inbox.serve(Moment.IDLE)
        served.set()
    asked = Asked()
    thread = threading.Thread(target=execute)
    thread.start()
    assert looked.wait(SECONDS)
    inbox.submit(asked.ask())
    submitted.set()
    deadline = time.monotonic() + SECONDS
    while not served.is_set() and time.monotonic() < deadline:
        again = inbox.tick(time.monotonic())
        served.wait(0.001 if again is None else again)
    thread.join(SECONDS)
    assert asked.outcomes == [Outcome.FREED]


def test_at_the_end_nobody_is_left_waiting(inbox):
    waiting, coming = Asked(), Asked()
    inbox.submit(waiting.ask())
    inbox.refuse_all()
    inbox.submit(coming.ask())
    assert waiting.outcomes == coming.outcomes == [Outcome.BUSY]


@pytest.mark.parametrize("patience, least, most", [(1, 0.5, 1), (1e9, 4, 5), (-3, 0, 0), (float("nan"), 0, 0), (float("inf"), 4, 5),
                                                   ("long", 0, 0), (None, 0, 0), (True, 0, 1)])
def test_a_patience_that_another_process_sent_is_bounded(patience, least, most):
    left = waits_until(patience, 5.0) - time.monotonic()
    assert least - 0.2 <= left <= most
