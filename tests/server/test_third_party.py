"""A pack that knows only the provider API, in the real server: its language model makes room for ComfyUI, and is seen and freed."""

import os
import pathlib
import re
import shutil
import signal
import sys
import time

import pytest

from comfy_multiproc.testing import CardSettings, read_card, start_server, tiny_models, workflows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals drive the pack's server")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACK = pathlib.Path(__file__).parent / "packs" / "language_model"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(fork_tree, tmp_path_factory):
    """A server on a card of 30 MiB, of which the pack's language model holds 16."""
    folder = tmp_path_factory.mktemp("pack")
    pack = pathlib.Path(shutil.copytree(PACK, folder / "language_model"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/provider-api.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (pack / "language_model.py").write_text(code, "utf-8")
    models = tiny_models.ensure(set(workflows.models_of(workflows.txt2img_sd3())))
    with start_server(fork_tree, ["--disable-process-memory"], models=models, packs=[pack], card_file=folder / "card",
                      card=CardSettings(size=30 * MIB, inference=2 * MIB, reserved=0)) as server:
        server.card_path = folder / "card"
        yield server


def row(server):
    return next(row for row in server.get("/system_stats")["processes"] if row["name"] == "language model")


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def holds(server):
    return read_card(server.card_path).process(row(server)["pid"]).allocated // MIB


def ask_something(server):
    os.kill(row(server)["pid"], signal.SIGUSR1)
    until(lambda: row(server)["devices"][0]["resident"])


@pytest.mark.row(41)
def test_system_stats_lists_it_and_the_server_itself(server):
    stats = server.get("/system_stats")
    assert {"system", "devices"} <= stats.keys()
    assert [(row["pid"], row["state"]) for row in stats["processes"]][0] == (server.pid, "idle")
    (figures,) = row(server)["devices"]
    assert (figures["vram"], figures["resident"], figures["reclaimable"]) == (16 * MIB, 16 * MIB, 16 * MIB) and row(server)["state"] == "idle"


@pytest.mark.row(2)
@pytest.mark.row(9)
def test_it_makes_room_for_a_workflow_and_the_free_button_reaches_it(server):
    assert holds(server) == 16
    result = server.run(workflows.txt2img_sd3())
    assert result.ok, result.error
    assert holds(server) == 0, "the workflow needed the card"
    card = read_card(server.card_path)
    assert card.peak <= 30 * MIB
    server.post("/free", {"unload_models": True})
    until(lambda: read_card(server.card_path).used == 0)
    ask_something(server)
    assert holds(server) == 16
    server.post("/free", {"unload_models": True})
    until(lambda: holds(server) == 0)


@pytest.mark.row(9)
@pytest.mark.row(41)
def test_when_it_does_not_answer_the_free_button_says_so_and_nothing_waits_for_it(server):
    """B008"""
    ask_something(server)
    pid = row(server)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        server.post("/free", {"unload_models": True})
        assert time.monotonic() - began < 5, "the answer does not wait"
        until(lambda: row(server)["state"] == "not confirmed")
        began = time.monotonic()
        assert row(server)["devices"][0]["resident"] == 16 * MIB
        assert time.monotonic() - began < 5
        assert re.search(r"language model \(pid \d+\) is busy and keeps its models on cpu:0", server.log())
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: holds(server) == 0 and row(server)["state"] == "idle")
    assert server.run(workflows.txt2img_sd3()).ok
