"""The examples that the demonstration does not run: a program that is no ComfyUI and holds memory on the card, and the nodes of the fork.

The program's pack knows only the provider API. Both run on the C++ card, because the program is not ComfyUI either there.
"""

import itertools
import json
import os
import pathlib
import re
import signal
import sys
import time

import pytest

from comfy_multiproc.testing import CardSettings, read_card

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a stopped process")

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
WORKFLOWS = {path.stem: path for path in EXAMPLES.glob("workflows/*.json")}
MIB = 1 << 20
CARD = 270 * MIB
NAME = "language model"
RUNS = itertools.count()


@pytest.fixture(scope="module")
def server(serve, fork_tree, cpp_card):
    """On a card that does not hold the workflows' checkpoint beside the language model."""
    return serve(fork_tree, names=("txt2img",), packs=[EXAMPLES / "packs" / "language_model_pack"],
                 card=CardSettings(size=CARD, form="npu", inference=10 * MIB, reserved=0))


def workflow(name):
    return json.loads(WORKFLOWS[name].read_text("utf-8"))


def row(server):
    return next(row for row in server.get("/system_stats")["processes"] if row["name"] == NAME)


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def holds(server):
    """MiB of tensors of the language model's process on the card, as the card has counted them."""
    process = read_card(server.card_path).process(row(server)["pid"])
    return process.allocated // MIB if process else 0


def ask(server):
    """Ask it something, so that its weights are on the card; its answer."""
    result = server.run({"ask": {"class_type": "LanguageModelAsk", "inputs": {"text": f"cat {next(RUNS)}"}},
                         "show": {"class_type": "PreviewAny", "inputs": {"source": ["ask", 0]}}})
    assert result.ok, result.error
    assert holds(server) == 16
    return result.outputs["show"]["text"][0]


def test_every_file_is_named_in_the_readme():
    said = (EXAMPLES / "README.md").read_text("utf-8")
    there = [path.relative_to(EXAMPLES).as_posix() for path in [*WORKFLOWS.values(), *EXAMPLES.glob("packs/*/")] if path.name != "__pycache__"]
    assert len(there) >= 8 and [name for name in there if name not in said] == []


@pytest.mark.row(41)
def test_it_is_listed_with_what_it_holds(server):
    ask(server)
    stats = server.get("/system_stats")
    assert {"system", "devices"} <= stats.keys()
    assert [(row["pid"], row["state"]) for row in stats["processes"]][0] == (server.pid, "idle")
    (figures,) = row(server)["devices"]
    assert row(server)["state"] == "idle" and {figures[name] // MIB for name in ("vram", "resident", "reclaimable")} == {16}
    (shown,) = (row for row in server.get("/process_memory")["processes"] if row["name"] == NAME)
    assert shown["kind"] == "provider" and shown["devices"][0]["vram"] // MIB == 16


@pytest.mark.row(2)
@pytest.mark.row(9)
def test_its_weights_make_room_for_a_workflow_and_are_back_when_it_is_asked_again(server):
    result = server.run(workflow("language_model"))
    assert result.ok, result.error
    (said,) = result.outputs["9"]["text"]
    assert len(said.split()) > 10 and len(result.images) == 1
    assert holds(server) == 0 and row(server)["devices"][0]["resident"] == 0, "the workflow needed the card after it had its answer"
    ask(server)
    assert read_card(server.card_path).peak <= CARD and read_card(server.card_path).refusals == 0
    server.post("/free", {"unload_models": True})
    until(lambda: holds(server) == 0)
    assert server.post("/process_memory/release", {"pid": row(server)["pid"]})["outcome"] == "nothing"


@pytest.mark.row(9)
@pytest.mark.row(41)
def test_when_it_does_not_answer_the_free_button_says_so_and_nothing_waits_for_it(server):
    ask(server)
    pid = row(server)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        server.post("/free", {"unload_models": True})
        assert time.monotonic() - began < 5, "the answer does not wait"
        until(lambda: row(server)["state"] == "not confirmed")
        began = time.monotonic()
        assert row(server)["devices"][0]["resident"] // MIB == 16
        assert time.monotonic() - began < 5
        assert re.search(r"language model \(pid \d+\) is busy and keeps its models on npu:", server.log())
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: holds(server) == 0 and row(server)["state"] == "idle")
    ask(server)


@pytest.mark.row(9)
def test_the_nodes_of_the_fork_see_and_release_a_worker(server):
    result = server.run(workflow("memory"))
    assert result.ok, result.error
    before, after = (result.outputs[node]["text"][0] for node in ("8", "11"))
    worker = r"worker models \(pid \d+, \w+\): RAM \d+ MB\n +npu:\S+: (.*)"
    assert re.search(worker, before)[1].startswith("resident ") and NAME in before
    assert "resident" not in re.search(worker, after)[1]
    assert "worker models" in result.outputs["10"]["text"][0] and len(result.images) == 3
