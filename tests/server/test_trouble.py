"""Nodes in a worker that go wrong: what the page is told, and that the server and the next prompt do not suffer."""

import asyncio
import os
import re
import time

import pytest

from comfy_multiproc.testing import CardSettings, read_card
from comfy_multiproc.testing.workflows import Graph, out
from tests.server.family import running, until, workers

GRACE = 5.0
SOON = GRACE + 10       # generous: the machine that runs this may be busy
MIB = 1 << 20
HELD = 32 * MIB         # by the pack's node "hold"


@pytest.fixture(scope="module")
def server(serve, fork_tree):
    return serve(fork_tree, ["--isolate", "zoo_trouble"], packs=("zoo_trouble",), card=CardSettings(size=400 * MIB))


def trouble(how, seed=None):
    """A prompt of a node that does that, and of two that would follow it."""
    graph = Graph()
    graph.add("n", "ZooTrouble", how=how, seed=time.time_ns() % 10 ** 9 if seed is None else seed)
    graph.add("after", "ZooTrouble", how="fine", seed=out("n"))
    graph.add("last", "ZooTrouble", how="fine", seed=out("after"))
    return graph


async def begun(server, after):
    """Wait until a prompt has run for some time."""
    deadline = time.monotonic() + 60
    while not (await asyncio.to_thread(server.get, "/queue"))["queue_running"]:
        assert time.monotonic() < deadline, "no prompt runs"
        await asyncio.sleep(0.05)
    await asyncio.sleep(after)


def run_and_cancel(server, how, *, after=1.0):
    """The result of a prompt that is cancelled once its node has run for some time, that of one that waits behind it, and how long
    the end of the first took."""
    async def both():
        first = asyncio.create_task(server.run_async(trouble(how)))
        await begun(server, after)
        waiting = asyncio.create_task(server.run_async(trouble("fine")))
        while not (await asyncio.to_thread(server.get, "/queue"))["queue_pending"]:
            await asyncio.sleep(0.05)
        pressed = time.monotonic()
        await asyncio.to_thread(server.post, "/interrupt", {})
        cancelled = await first
        seconds = time.monotonic() - pressed
        return cancelled, await waiting, seconds
    return asyncio.run(both())


def pid_of(result):
    assert result.ok, result.error
    return result.outputs["n"]["pid"][0]


def pid(server, how="fine"):
    """The pack's process, which has done that."""
    return pid_of(server.run(trouble(how)))


def row(server, pid):
    return next((row for row in server.get("/system_stats")["processes"] if row["pid"] == pid), None)


def on_card(server, pid):
    return read_card(server.card_path).process(pid).total


def executed(result):
    """The nodes that were begun."""
    return {event["data"]["node"] for event in result.events if event["type"] == "executing"} - {None}


def in_the_books(server, pid):
    """Its model is on the card and known to the server."""
    until(lambda: (found := row(server, pid)) and found["devices"][0]["resident"] == HELD == on_card(server, pid))


def out_of_the_books(server, pid):
    until(lambda: not running(pid), within=SOON)
    until(lambda: row(server, pid) is None)
    assert on_card(server, pid) == 0


@pytest.mark.parametrize("how, words", [("kill", ("signal 9", "RAM", "the last words")), ("crash", ("signal 11",)), ("leave", ("exit code 7",))])
def test_a_worker_that_dies_fails_its_node_and_nothing_else(server, how, words):
    before = pid(server, "hold")
    in_the_books(server, before)

    async def both():
        first = asyncio.create_task(server.run_async(trouble(how)))
        await begun(server, 0)
        return await asyncio.gather(first, server.run_async(trouble("fine")))
    result, behind = asyncio.run(both())
    assert result.error["node_type"] == "ZooTrouble" and result.error["node_id"] == "n"
    for word in (*words, f"worker zoo_trouble (pid {before})", "node n (ZooTrouble)"):
        assert word in result.error["exception_message"]
    assert pid_of(behind) not in (before, server.pid)
    out_of_the_books(server, before)


def test_an_exception_that_only_the_worker_knows(server):
    before = pid(server)
    result = server.run(trouble("odd"))
    assert result.error["exception_type"].endswith("Odd") and "this and that" in result.error["exception_message"]
    assert any("zoo_trouble" in line and "odd" in line for line in result.error["traceback"])
    assert not any("comfy_multiproc/" in line.split('",')[0] for line in result.error["traceback"]), "the way to the worker is nobody's concern"
    assert result.error["current_inputs"]["how"] == ["odd"]
    assert pid(server) == before


@pytest.mark.parametrize("how, word", [("ui_object", "as ui"), ("ui_tensor", "as ui"), ("send_object", "'zoo'"), ("send_preview", "preview"),
                                       ("send_bytes", "number"), ("send_to", "list")])
def test_what_no_page_can_be_sent_fails_its_node_alone(server, how, word):
    before = pid(server)
    result = server.run(trouble(how))
    assert result.error["exception_type"] == "TypeError" and word in result.error["exception_message"]
    assert pid(server) == before


def test_what_the_page_takes_need_not_be_plain(server):
    result = server.run(trouble("ui_text"))
    assert result.ok and result.outputs["n"]["more"] == ["words"]
    result = server.run(trouble("progress_tensor"))
    assert result.ok and [event["data"]["value"] for event in result.events if event["type"] == "progress"] == [4.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("how", ["fork_exit", "fork_send", "fork_on"])
def test_what_a_node_forks_is_no_second_worker(server, how):
    before = pid(server)
    assert pid(server, how) == before == pid(server)
    assert workers(server) == {before}


@pytest.mark.behaviour(20)
@pytest.mark.row(18)
@pytest.mark.parametrize("how, kind, oom", [("oom", "torch.OutOfMemoryError", True), ("oom_text", "torch.OutOfMemoryError", True),
                                            ("oom_code", "torch.AcceleratorError", True), ("size", "RuntimeError", False)])
def test_out_of_memory_in_a_worker_is_known_as_that(server, how, kind, oom):
    before = pid(server, "hold")
    in_the_books(server, before)
    unloaded = server.log().count("Got an OOM, unloading all loaded models")
    result = server.run(trouble(how))
    assert result.error["exception_type"] == kind
    assert ("ran out of memory on your GPU" in result.error["exception_message"]) is oom
    assert server.log().count("Got an OOM, unloading all loaded models") == unloaded + oom
    if oom:
        until(lambda: not on_card(server, before))      # the model too: the worker has been told
        assert pid(server, "fits") == before
        assert not on_card(server, before)
    else:
        assert on_card(server, before) == HELD


@pytest.mark.row(39)
@pytest.mark.behaviour(21)
@pytest.mark.parametrize("how, same_process", [("polite", True), ("swallow", True), ("loop", False), ("hang", False)])
def test_cancel_ends_the_prompt_whatever_the_node_does(server, how, same_process):
    before = pid(server, "hold")
    in_the_books(server, before)
    result, waiting, seconds = run_and_cancel(server, how)
    assert result.error and "exception_type" not in result.error and "n" not in result.outputs
    assert result.events[-1]["type"] == "execution_interrupted" and executed(result) == {"n"}
    assert seconds < SOON
    after = pid_of(waiting)
    assert (after == before) is same_process
    assert workers(server) == {after}
    if not same_process:
        assert f"zoo_trouble (pid {before}) did not stop" in server.log()
        out_of_the_books(server, before)


def test_cancel_ends_what_a_node_has_started(server):
    result, _, _ = run_and_cancel(server, "child", after=2.0)
    assert result.events[-1]["type"] == "execution_interrupted"
    child = int(re.findall(r"zoo child (\d+)", server.log())[-1])
    until(lambda: not running(child), within=SOON)


def test_nothing_cancelled_is_taken_for_a_result(server):
    graph = trouble("swallow", seed=77)

    async def cancelled():
        running = asyncio.create_task(server.run_async(graph))
        await begun(server, 0.5)      # the second time, it runs again instead of being served from the cache
        await asyncio.to_thread(server.post, "/interrupt", {})
        return await running

    async def twice():
        return [await cancelled(), await cancelled()]
    for result in asyncio.run(twice()):
        assert result.events[-1]["type"] == "execution_interrupted" and executed(result) == {"n"}
