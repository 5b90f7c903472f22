"""Two real servers with the series on one virtual card: they find each other without an option and share it."""
from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from comfy_multiproc.testing import CardSettings, read_card
from comfy_multiproc.testing.workflows import txt2img_sd3

pytestmark = pytest.mark.xdist_group("two_servers")    # the servers are the module's: one process must run all of it

MIB = 1 << 20
# Enough for everything that one of them loads, not for both: decoding is thought to take 17 MiB, the models are 9 MiB.
SIZE = 30 * MIB
CARD = {"size": SIZE, "inference": 2 * MIB, "reserved": 0, "weight_ratio": 0.0}
NAMES = ("txt2img_sd3",)
SECONDS = float(os.environ.get("COMFY_MULTIPROC_SECONDS", "20"))    # of random prompts


@pytest.fixture(scope="module")
def runtime_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        patch.setenv("COMFY_MULTIPROC_RUNTIME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pair(serve, fork_tree, runtime_folder):
    one = serve(fork_tree, ("--process-memory-name", "one"), names=NAMES, card=CardSettings(**CARD))
    other = serve(fork_tree, ("--process-memory-name", "other"), names=NAMES, card=CardSettings(**CARD), card_file=one.card_path)
    until(lambda: all(len(processes(server)) == 2 for server in (one, other)))
    return one, other


@pytest.fixture(scope="module")
def expected(serve, upstream_tree):
    """The pixels of each workflow and seed, from a server without the series that has a card to itself."""
    alone = serve(upstream_tree, names=NAMES, card=CardSettings(**CARD))
    known = {}

    def pixels(seed, edge=64):
        if (seed, edge) not in known:
            result = alone.run(workflow(seed, edge))
            assert result.ok, result.error
            known[seed, edge] = result.images
        return known[seed, edge]
    return pixels


def workflow(seed, edge=64):
    prompt = txt2img_sd3()
    for node in prompt.values():
        for name, value in {"seed": seed, "width": edge, "height": edge, "cfg": 1.0}.items():
            # With two conds the pixels would depend on whether both fit into one batch.
            if name in node["inputs"]:
                node["inputs"][name] = value
    return prompt


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(server):
    return server.get("/system_stats")["processes"]


def held(server):
    return read_card(server.card_path).process(server.pid).allocated


def unload_all(*servers):
    for server in servers:
        server.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: read_card(servers[0].card_path).used == 0)


@pytest.mark.row(41)
def test_they_find_each_other_and_say_so(pair):
    one, other = pair
    assert {p["name"]: p["pid"] for p in processes(one)} == {"one": one.pid, "other": other.pid}
    assert {p["name"]: p["pid"] for p in processes(other)} == {"one": one.pid, "other": other.pid}
    assert f"shared with other (pid {other.pid})" in one.log() and f"shared with one (pid {one.pid})" in other.log()


@pytest.mark.row(1)
@pytest.mark.row(2)
def test_idle_models_of_one_make_room_for_the_other(pair, expected):
    one, other = pair
    unload_all(one, other)
    assert one.run(workflow(1)).images == expected(1)
    full, logged = held(one), len(other.log())
    assert full > 8 * MIB
    assert other.run(workflow(2)).images == expected(2)
    assert "loaded partially" not in other.log()[logged:] and held(other) > 0
    assert one.run(workflow(3)).images == expected(3), "what was taken comes back when it is needed"
    card = read_card(one.card_path)
    assert card.refusals == 0 and card.peak <= SIZE


def test_without_the_series_the_second_gets_what_the_first_has_left(serve, upstream_tree):
    one = serve(upstream_tree, names=("txt2img_sd3",), card=CardSettings(**CARD))
    other = serve(upstream_tree, names=("txt2img_sd3",), card=CardSettings(**CARD), card_file=one.card_path)
    assert one.run(workflow(1)).ok
    before = held(one)
    other.run(workflow(1))
    assert held(one) == before and held(other) < before, "this is the failure that the series cures"


@pytest.mark.row(9)
@pytest.mark.row(21)
def test_the_free_button_reaches_both(pair):
    one, other = pair
    assert one.run(workflow(5)).ok and other.run(workflow(6)).ok
    assert held(other) > 0
    one.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: read_card(one.card_path).used == 0)


def test_top_shows_every_device_and_process(pair, runtime_folder):
    one, other = pair
    assert one.run(workflow(7)).ok
    command = [sys.executable, "-m", "comfy_multiproc", "top", "--once"]
    root = Path(__file__).resolve().parents[2]
    text = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert text.returncode == 0, text.stderr
    assert all(word in text.stdout for word in (str(one.pid), str(other.pid), "one", "other", "idle"))
    rows = json.loads(subprocess.run([*command, "--json"], cwd=root, capture_output=True, text=True, timeout=60).stdout)["processes"]
    [row] = [row for row in rows if row["pid"] == one.pid]
    assert row["prompts"] >= 1 and row["devices"][0]["total"] == SIZE
    assert row["devices"][0]["weights"] == sum(m["resident"] for m in row["devices"][0]["models"] if m["kind"] == "model") > 0


@pytest.mark.row(1)
@pytest.mark.row(2)
def test_random_prompts_at_both_for_a_while(pair, expected):
    """Never over capacity, nothing out of memory, every prompt right, and both go on until the end."""
    one, other = pair
    unload_all(one, other)
    refusals = read_card(one.card_path).refusals
    choices = [(seed, edge) for seed in range(3) for edge in (48, 64, 80)]
    for choice in choices:
        expected(*choice)
    over, wrong, ran, done = [], [], [], threading.Event()

    def watch():
        while not done.is_set():
            reading = read_card(one.card_path)
            if reading.used > SIZE:
                over.append(reading)
            done.wait(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    until_then = time.monotonic() + SECONDS

    async def drive(server, rng):
        while time.monotonic() < until_then:
            choice = rng.choice(choices)
            result = await server.run_async(workflow(*choice))
            ran.append(choice)
            if not result.ok or result.images != expected(*choice):
                wrong.append((server is one, choice, result.error, result.images))

    async def both():
        await asyncio.gather(drive(one, random.Random(1)), drive(other, random.Random(2)))
    try:
        asyncio.run(both())
    finally:
        done.set()
        watcher.join()
    card = read_card(one.card_path)
    assert not wrong and not over and len(ran) >= 4
    assert card.refusals == refusals and card.peak <= SIZE
    for server in pair:
        assert all(d["claimed"] == 0 for p in processes(server) for d in p["devices"]), "nothing stays claimed"


def test_a_server_that_leaves_the_machine_alone(serve, fork_tree, pair, runtime_folder):
    before = sorted(path.name for path in runtime_folder.iterdir())
    alone = serve(fork_tree, ("--disable-process-memory",), names=("txt2img_sd3",), card=CardSettings(**CARD))
    assert [p["pid"] for p in processes(alone)] == [alone.pid]
    assert sorted(path.name for path in runtime_folder.iterdir()) == before and len(processes(pair[0])) == 2
    names = [Path(f"/proc/{alone.pid}/task/{task}/comm").read_text() for task in os.listdir(f"/proc/{alone.pid}/task")] \
        if os.path.isdir("/proc") else []
    assert not any("process memory" in name for name in names)


def test_one_is_killed_and_the_other_goes_on(pair, expected):
    one, other = pair
    assert other.run(workflow(8)).ok
    other.process.kill()
    other.process.wait(30)
    assert one.run(workflow(9)).images == expected(9)
    until(lambda: [p["pid"] for p in processes(one)] == [one.pid])
    assert read_card(one.card_path).process(other.pid).total == 0
