"""Random processes, loads, requests, deaths and stops against what must always hold. Real processes on one card.

A short run by default. A long one, of at least 100,000 steps that did something, in four parts side by side, with what was
done at the end:

    COMFY_MULTIPROC_STEPS=100000 python -m pytest -n 4 -rP tests/unit/test_ledger_model.py
"""
from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from comfy.process_memory import Outcome
from comfy_multiproc.ledger import Ledger
from comfy_multiproc.testing.card.capacity import CapacityFile, read_card
from tests.unit.processes import SECONDS, Child
from tests.unit.small import KEY, MB, process

STEPS = int(os.environ.get("COMFY_MULTIPROC_STEPS", "150"))
PARTS = 1 if STEPS < 1000 else 4
STEPS_EACH = 50
CARD = 1000 * MB
PROCESSES = 3
PATIENCE = 0.05

who = st.integers(0, PROCESSES - 1)
sizes = st.integers(1, 900).map(lambda n: n * MB)
models = st.sampled_from(["Unet", "Clip", "Vae"])


class World:
    """The processes of one run; they live on from one example to the next."""

    def __init__(self, folder: Path):
        self.folder = folder
        CapacityFile.create(folder / "card", [CARD]).close()
        self.started = 0
        self.children = [self.start() for _ in range(PROCESSES)]

    def start(self) -> Child:
        self.started += 1
        child = Child(process, self.folder / "run", self.folder / "card", f"p{self.started}", PATIENCE)
        child.name = f"p{self.started}"
        assert child.hear() == "ready"
        return child

    def end(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.join(SECONDS)


world: World
failures: list[str] = []
history: deque[str] = deque(maxlen=2 * STEPS_EACH)     # what was done, and what came of it
did: Counter[str] = Counter()                          # steps that did something, by rule


def told(function):
    """Keep how it failed: a run that depends on timing may go well when Hypothesis repeats it, and then it says only that."""
    name = function.__name__

    @functools.wraps(function)
    def call(self, **kwargs):
        try:
            came = function(self, **kwargs)
        except Exception:
            failures.append("\n".join([*history, f"{name} {kwargs}", traceback.format_exc()]))
            raise
        if came is None:
            return
        history.append(f"{name} {kwargs}: {came}")
        did[name] += 1
    return call


def nth(among, n):
    return sorted(among)[n % len(among)]


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sampling: set[int] = set()
        self.stopped: set[int] = set()
        self.capturing: set[int] = set()

    # A rule gives what came of it, None if there was nothing to do.

    def free(self, i):
        """Whether a prompt can be sent to it and an answer waited for."""
        return i not in self.sampling and i not in self.stopped

    @rule(orders=st.lists(st.tuples(who, models, sizes), min_size=1, max_size=PROCESSES, unique_by=lambda order: order[0]))
    @told
    def load(self, orders):
        """One process loads, or several at the same time."""
        sent = [i for i, _, _ in orders if self.free(i)]
        for i, model, size in orders:
            if i in sent:
                world.children[i].tell(("load", f"{model}{size}", size))
        answers = [world.children[i].hear() for i in sent]
        assert all(type(loaded) is int for loaded in answers), answers
        return answers or None

    @rule(i=who, size=sizes)
    @told
    def make_room(self, i, size):
        return world.children[i].call(("free", size)) if self.free(i) else None

    @rule(i=who, j=who, size=sizes, kind=st.sampled_from(["release", "unload", "reset", "release_ram", "release_pins"]))
    @told
    def ask(self, i, j, size, kind):
        """A request has an answer within its deadline, whatever the other one does, and it is a true one."""
        if i == j or i in self.stopped:
            return None
        before = read_card(world.folder / "card").process(world.children[j].pid).total
        if world.children[j].name not in world.children[i].call(("books",))["peers"]:
            return None
        outcome, freed, resident, took = world.children[i].call(("ask", world.children[j].name, kind, size, None, 2.0, f"t{time.monotonic()}"))
        assert took < 10
        after = read_card(world.folder / "card").process(world.children[j].pid).total
        if kind in ("release", "unload"):
            assert freed == before - after, "the receipt is what has left the card"
        if j in self.stopped or j in self.capturing:
            assert outcome is Outcome.BUSY
        return outcome.value, freed

    @rule(i=who, model=models, size=sizes, steps=st.booleans())
    @told
    def begin_to_sample(self, i, model, size, steps):
        if not self.free(i):
            return None
        world.children[i].tell(("sample", f"{model}{size}", size, steps))
        assert world.children[i].hear() == "sampling"
        self.sampling.add(i)
        return True

    @precondition(lambda self: self.sampling - self.stopped)
    @rule(n=who)
    @told
    def end_sampling(self, n):
        i = nth(self.sampling - self.stopped, n)
        self.let_go(i)
        return i

    def let_go(self, i):
        world.children[i].tell(("let go",))
        assert world.children[i].hear() == "sampled"
        self.sampling.discard(i)

    @rule(i=who)
    @told
    def stop(self, i):
        if i in self.stopped or len(self.stopped) == PROCESSES - 1:
            return None
        world.children[i].stop()
        self.stopped.add(i)
        return True

    @precondition(lambda self: self.stopped)
    @rule(n=who)
    @told
    def go_on(self, n):
        i = nth(self.stopped, n)
        self.resume(i)
        return i

    def resume(self, i):
        world.children[i].resume()
        self.stopped.discard(i)

    @rule(i=who)
    @told
    def capture(self, i):
        if i in self.stopped or i in self.sampling:
            return None
        self.capturing ^= {i}
        return world.children[i].call(("capture", i in self.capturing))

    @rule(i=who, luck=st.integers(0, 9))
    @told
    def die(self, i, luck):
        if luck:
            return None
        world.children[i].kill()
        for among in (self.sampling, self.stopped, self.capturing):
            among.discard(i)
        world.children[i] = world.start()
        return world.children[i].name

    @invariant()
    @told
    def the_card_is_never_over_committed(self):
        card = read_card(world.folder / "card")
        assert card.used <= CARD and card.peak <= CARD and card.refusals == 0

    @told
    def teardown(self):
        """Once nothing goes on any more, the books are what is there, and nothing is claimed."""
        for i in sorted(self.stopped):
            self.resume(i)
        for i in sorted(self.capturing):
            world.children[i].call(("capture", False))
        for i in sorted(self.sampling):
            self.let_go(i)
        reader = Ledger(world.folder / "run", create=False)
        for child in world.children:
            child.call(("free", 1))
            books = child.call(("books",))
            [written] = [p for p in reader.processes(exact=True) if p.pid == child.pid]
            usage = written.devices[KEY].usage
            assert usage.resident == sum(books["resident"].values()) == books["allocated"]
            assert books["claimed"] == reader.claimed(written.slot, KEY) == 0 and books["ooms"] == 0 and not written.busy
        reader.close()
        self.the_card_is_never_over_committed()


# Other processes' timing is part of every run, so a failure is shown as it happened, not made smaller.
Machine.TestCase.settings = settings(
    max_examples=min(20, max(1, STEPS // STEPS_EACH)), stateful_step_count=STEPS_EACH, deadline=None, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.row(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_they_do(part):
    global world
    for kept in (failures, history, did):
        kept.clear()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            while did.total() * PARTS < STEPS:
                run_state_machine_as_test(Machine, settings=Machine.TestCase.settings)
            sys.stdout.write(f"{did.total()} steps: {dict(did.most_common())}; {world.started} processes\n")
        except Exception as e:
            raise AssertionError("".join(failures[:1]) or str(e)) from e
        finally:
            world.end()
