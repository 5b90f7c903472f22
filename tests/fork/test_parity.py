"""With nobody registered the fork does what upstream does: the same calls, order, sizes and results."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACE = pathlib.Path(__file__).with_name("record_trace.py")
CHOICES = pathlib.Path(__file__).with_name("record_choices.py")


def record(recorder, trees, folder):
    """What a recorder writes of several trees, taken at the same time."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    running = []
    for number, tree in enumerate(trees):
        command = [sys.executable, str(recorder), str(tree), str(ROOT), str(folder / f"{number}.json")]
        with open(folder / f"{number}.log", "w") as log:
            running.append(subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        for number, process in enumerate(running):
            assert process.wait(1800) == 0, (folder / f"{number}.log").read_text()[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(running))]


@pytest.mark.row(2)
@pytest.mark.row(5)
@pytest.mark.row(11)
@pytest.mark.row(17)
@pytest.mark.row(22)
@pytest.mark.row(28)
@pytest.mark.row(29)
@pytest.mark.row(30)
@pytest.mark.row(38)
@pytest.mark.behaviour(1)
@pytest.mark.behaviour(3)
def test_hundreds_of_random_loads_and_unloads_leave_the_same_trace(fork_tree, upstream_tree, tmp_path):
    before, after = record(TRACE, [upstream_tree, fork_tree], tmp_path)
    assert before["process_memory"] is False and after["process_memory"] is True
    assert before["traces"].keys() == after["traces"].keys()
    for state, trace in before["traces"].items():
        for number, (theirs, ours) in enumerate(zip(trace, after["traces"][state], strict=True)):
            assert theirs == ours, f"{state}, step {number}"
    steps = [step for trace in before["traces"].values() for step in trace]
    loaded = [(size, whole) for step in steps for _, size, whole, _ in step["list"]]
    assert len(steps) >= 500
    assert any(0 < size < whole for size, whole in loaded), "nothing was ever loaded in part"
    assert sum(step["what"][0] == "load" and step["calls"].count("model_unload") > 0 for step in steps) > 20, "loads evicted nothing"


@pytest.mark.row(6)
@pytest.mark.row(7)
@pytest.mark.row(19)
@pytest.mark.row(34)
@pytest.mark.row(36)
@pytest.mark.row(42)
@pytest.mark.behaviour(13)
@pytest.mark.behaviour(20)
def test_dtypes_batches_retries_and_pins_are_chosen_as_upstream_chooses_them(fork_tree, upstream_tree, tmp_path):
    before, after = record(CHOICES, [upstream_tree, fork_tree], tmp_path)
    assert before["process_memory"] is False and after["process_memory"] is True
    before, after = before["choices"], after["choices"]
    for kind, choices in before.items():
        for number, (theirs, ours) in enumerate(zip(choices, after[kind], strict=True)):
            assert theirs == ours, f"{kind}, {number}"
    assert len({dtype for _, dtype, *_ in (choice for choice in before["dtypes"] if isinstance(choice, list))}) == 2, "no card was too small for 16 bits"
    assert {1, 2} <= {conds for _, forwards, _ in before["batches"][::2] for conds in forwards}, "conds were never or always done together"
    assert any(len(calls) > fails + 1 for _, fails, calls, _ in before["out_of_memory"]), "nothing was ever done in smaller steps"
    assert {what for name, what, *_ in before["locked"][:300] if name == "pin"} == {True, False}, "nothing was ever refused"
