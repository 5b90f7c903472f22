"""Nodes in a worker that go wrong: what the page is told, and that the server and the next prompt do not suffer."""

import asyncio
import re
import time

import pytest

from comfy_multiproc.testing.workflows import Graph

GRACE = 5.0
SOON = GRACE + 10       # generous: the machine that runs this may be busy


@pytest.fixture(scope="module")
def server(serve, fork_tree):
    return serve(fork_tree, ["--cpu", "--isolate", "zoo_trouble"], packs=("zoo_trouble",))


def trouble(how, seed=None):
    graph = Graph()
    graph.add("n", "ZooTrouble", how=how, seed=time.time_ns() % 10 ** 9 if seed is None else seed)
    return graph


def run_and_cancel(server, how, *, after=1.0):
    """The result of a prompt that is cancelled once its node has run for some time, and how long the end took."""
    async def both():
        running = asyncio.create_task(server.run_async(trouble(how)))
        deadline = time.monotonic() + 60
        while not server.get("/queue")["queue_running"] and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(after)
        pressed = time.monotonic()
        await asyncio.to_thread(server.post, "/interrupt", {})
        return await running, time.monotonic() - pressed
    return asyncio.run(both())


def pid(server):
    result = server.run(trouble("fine"))
    assert result.ok, result.error
    return result.outputs["n"]["pid"][0]


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid, within):
    deadline = time.monotonic() + within
    while running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("how, words", [("kill", ("signal 9", "RAM", "the last words")), ("crash", ("signal 11",)), ("leave", ("exit code 7",))])
def test_a_worker_that_dies_fails_its_node_and_nothing_else(server, how, words):
    before = pid(server)
    result = server.run(trouble(how))
    assert result.error["node_type"] == "ZooTrouble" and result.error["node_id"] == "n"
    for word in (*words, f"pid {before}", "ZooTrouble"):
        assert word in result.error["exception_message"]
    assert pid(server) not in (before, server.pid)


def test_an_exception_that_only_the_worker_knows(server):
    before = pid(server)
    result = server.run(trouble("odd"))
    assert result.error["exception_type"].endswith("Odd") and "this and that" in result.error["exception_message"]
    assert any("zoo_trouble" in line and "odd" in line for line in result.error["traceback"])
    assert result.error["current_inputs"]["how"] == ["odd"]
    assert pid(server) == before


@pytest.mark.behaviour(20)
@pytest.mark.row(18)
def test_out_of_memory_in_a_worker_is_known_as_that(server):
    result = server.run(trouble("oom"))
    assert result.error["exception_type"] == "torch.OutOfMemoryError" and "ran out of memory on your GPU" in result.error["exception_message"]
    assert "Got an OOM, unloading all loaded models" in server.log()


@pytest.mark.row(39)
@pytest.mark.behaviour(21)
@pytest.mark.parametrize("how, same_process", [("polite", True), ("swallow", True), ("loop", False), ("hang", False)])
def test_cancel_ends_the_prompt_whatever_the_node_does(server, how, same_process):
    before = pid(server)
    result, seconds = run_and_cancel(server, how)
    assert result.error and "exception_type" not in result.error and "n" not in result.outputs
    assert result.events[-1]["type"] == "execution_interrupted"
    assert seconds < SOON
    after = pid(server)
    assert (after == before) is same_process
    if not same_process:
        assert gone(before, SOON)


def test_cancel_ends_what_a_node_has_started(server):
    result, _ = run_and_cancel(server, "child", after=2.0)
    assert result.events[-1]["type"] == "execution_interrupted"
    child = int(re.findall(r"zoo child (\d+)", server.log())[-1])
    assert gone(child, SOON)


def test_nothing_cancelled_is_taken_for_a_result(server):
    graph = trouble("swallow", seed=77)
    async def both():
        first = asyncio.create_task(server.run_async(graph))
        while not server.get("/queue")["queue_running"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.post, "/interrupt", {})
        await first
        second = asyncio.create_task(server.run_async(graph))
        while not server.get("/queue")["queue_running"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert server.get("/queue")["queue_running"]       # it runs again instead of being served from the cache
        await asyncio.to_thread(server.post, "/interrupt", {})
        return await second
    assert asyncio.run(both()).events[-1]["type"] == "execution_interrupted"
