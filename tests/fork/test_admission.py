"""Several real processes load on one virtual card at the same moment. They know each other through the runtime."""

import os
import pathlib
import random
import time

import pytest

from comfy_multiproc.testing import stub_patcher

MIB = 1 << 20
CARD = "cpu:0"
BARRIER_SECONDS = 0.3       # who waits under the lock waits in vain: the other one is kept out


# ---- in the other processes

held = {}


def start(who):
    """Be one of several processes, with little patience for the others."""
    from comfy_multiproc import runtime
    runtime.start(who, patience=0.2).execution_thread(None, None)
    return reserve()


def reserve():
    import comfy.model_management as mm
    return int(mm.extra_reserved_memory())


def in_a_prompt():
    """What is loaded from now on is in use, as while a prompt runs."""
    from comfy_multiproc import runtime
    runtime.current._loaded = True
    runtime.current._set_busy(True, prompt=True)


def load(model, nbytes, delay=0.0):
    import comfy.model_management as mm
    held[model] = stub_patcher(nbytes)
    time.sleep(delay)
    mm.load_models_gpu([held[model]])
    return held[model].loaded_size()


def race(model, nbytes, delay, reading, mine, others):
    """Load, and at one reading of what is free wait until the others have read it too."""
    import comfy.model_management as mm
    original = mm.get_free_memory
    count = 0

    def get_free_memory(*args, **kwargs):
        nonlocal count
        free = original(*args, **kwargs)
        count += 1
        if count == reading:
            pathlib.Path(mine).touch()
            deadline = time.monotonic() + BARRIER_SECONDS
            while not os.path.exists(others) and time.monotonic() < deadline:
                time.sleep(0.001)
        return free

    mm.get_free_memory = get_free_memory
    try:
        return load(model, nbytes, delay)
    finally:
        mm.get_free_memory = original


def unload():
    import comfy.model_management as mm
    from comfy import process_memory
    with process_memory.serving():      # this process alone
        mm.unload_all_models()
    held.clear()
    process_memory.changed()


def load_and_hang(nbytes, path):
    """Be admitted, and then never load."""
    import comfy.model_management as mm

    def model_load(self, *args, **kwargs):
        pathlib.Path(path).touch()
        time.sleep(60)

    mm.LoadedModel.model_load = model_load
    load("never", nbytes)


def free_here():
    import comfy.model_management as mm
    return int(mm.get_free_memory())


def claimed():
    from comfy import process_memory
    return process_memory.claims.current.own(CARD)


# ---- the tests

@pytest.fixture
def processes(spawn, monkeypatch, tmp_path):
    """processes(3): so many processes that have found each other."""
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path / "runtime"))

    def begin(number, **arguments):
        started = [spawn(**arguments) for _ in range(number)]
        for index, process in enumerate(started):
            process.begin("start", who=f"W{index}")
        reserves = [process.result() for process in started]
        assert len(set(reserves)) == 1, "each reads the same reserve"
        return started
    return begin


@pytest.mark.row(1)
@pytest.mark.row(10)
@pytest.mark.card(size="160M", inference=4 * MIB, reserved=2 * MIB)
def test_two_that_load_at_the_same_moment_never_take_more_than_there_is(card, processes, tmp_path):
    W = processes(2)
    chance = random.Random(3)
    sums = []
    for number in range(15):
        for index, process in enumerate(W):
            process.begin("race", model=f"m{number}", nbytes=96 * MIB, delay=chance.random() / 50, reading=chance.randint(1, 6),
                          mine=str(tmp_path / f"{number}-{index}"), others=str(tmp_path / f"{number}-{1 - index}"))
        sums.append(sum(process.result() for process in W))
        assert [process.call("claimed") for process in W] == [0, 0]
        assert card.read().used == sums[-1]
        for process in W:
            process.call("unload")
    assert card.read().refusals == 0, "no allocation was ever refused: nobody was admitted for what was not there"
    assert max(sums) <= 154 * MIB and card.read().peak <= 160 * MIB
    assert all(total >= 96 * MIB for total in sums), "one of them always had what it needed"


@pytest.mark.row(3)
@pytest.mark.card(size="240M", inference=8 * MIB, reserved=20 * MIB)
def test_the_reserve_is_left_free_once_for_the_card(card, processes):
    W = processes(4)
    for process in W:
        process.call("in_a_prompt")
    # One after the other: of loads at the same moment one may find claimed what another then does not take.
    loaded = [process.call("load", model="m", nbytes=96 * MIB) for process in W]
    left = 240 * MIB - sum(loaded)
    assert card.read().free == left and card.read().refusals == 0
    assert 28 * MIB <= left <= 28 * MIB + 3 * 12 * MIB, f"{[size // MIB for size in loaded]}: the reserve and inference once, and no layer that would still fit"


@pytest.mark.row(1)
@pytest.mark.card(size="160M", inference=4 * MIB, reserved=2 * MIB)
def test_who_dies_between_admission_and_load_gives_its_claim_back(card, processes, tmp_path):
    W1, W2 = processes(2)
    W1.begin("load_and_hang", nbytes=96 * MIB, path=str(tmp_path / "admitted"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "admitted").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert card.read().used == 0 and W2.call("free_here") == 64 * MIB
    W1.kill()
    assert W2.call("free_here") == 160 * MIB
    assert W2.call("load", model="m", nbytes=96 * MIB) == 96 * MIB
