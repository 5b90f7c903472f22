"""What workers hold on the card and in RAM: seen, given back by /free and by nodes, and by ending a worker that is idle."""

import contextlib
import os
import shutil
import signal
import time

import pytest

from comfy_multiproc.testing import CardSettings, read_card, workflows
from comfy_multiproc.testing.workflows import Graph, out

MIB = 1 << 20
SOON = 30.0


@pytest.fixture(scope="module")
def server(serve, fork_tree, packs, tmp_path_factory):
    limited = tmp_path_factory.mktemp("packs") / "zoo_limited"
    shutil.copytree(packs / "zoo_life", limited)
    (limited / "pyproject.toml").write_text('[tool.comfyui-multiproc]\nisolate = true\nram_limit = "1M"\n')
    return serve(fork_tree, ["--isolate", "zoo_loader", "--isolate", "zoo_nodes"], packs=("zoo_loader", "zoo_nodes", "zoo_idle", limited),
                 card=CardSettings(size=400 * MIB, count=2))


def eventually(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def worker(server, pack):
    return next(pack_ for pack_ in server.get("/system_stats")["packs"] if pack_["name"] == pack)


def process(server, pid):
    return next(row for row in server.get("/system_stats")["processes"] if row["pid"] == pid)


def on_card(server):
    """Bytes of live tensors on the card, by pid."""
    return {process.pid: process.allocated for process in read_card(server.card_path).processes}


def isolated_checkpoint(seed=1):
    graph = workflows.txt2img_sd3()
    graph["ckpt"]["class_type"] = "ZooLoadCheckpoint"
    graph["sampler"]["inputs"]["seed"] = seed
    return graph


def one(kind, **inputs):
    graph = Graph()
    graph.add("n", kind, **inputs)
    return graph


@pytest.mark.row(9)
@pytest.mark.row(21)
def test_free_reaches_models_and_memories_of_workers(server):
    graph = isolated_checkpoint()
    graph.add("count", "ZooCounted", value=1, again=1)
    assert server.run(graph).ok
    pid = worker(server, "zoo_loader")["pid"]
    assert on_card(server)[pid] > 5 * MIB and not on_card(server).get(server.pid)
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert eventually(lambda: not on_card(server).get(pid))
    graph["count"]["inputs"]["again"] = 2
    assert server.run(graph).outputs["count"]["runs"] == [1]       # the instance was forgotten too


@pytest.mark.behaviour(9)
def test_a_file_that_two_nodes_of_a_worker_load_is_loaded_once(server):
    server.post("/free", {"unload_models": True, "free_memory": True})
    pid = worker(server, "zoo_loader")["pid"]
    assert eventually(lambda: not on_card(server).get(pid))
    assert server.run(isolated_checkpoint(21)).ok
    pid = worker(server, "zoo_loader")["pid"]
    once = on_card(server)[pid]
    graph = isolated_checkpoint(22)
    graph["again"] = graph["ckpt"]
    graph.add("second", "KSampler", **{**graph["sampler"]["inputs"], "model": out("again"), "latent_image": out("sampler")})
    graph["decode"]["inputs"].update(samples=out("second"), vae=out("again", 2))
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert eventually(lambda: not on_card(server).get(pid))
    result = server.run(graph)
    assert result.ok, result.error
    assert on_card(server)[pid] == once


@pytest.mark.row(9)
@pytest.mark.row(41)
def test_when_a_worker_does_not_answer_the_free_button_does_and_says_so(server):
    """Three processes on two cards: one has a model on the first, one has one on the second, one has none."""
    assert server.run(one("ZooHold", seed=time.time_ns() % 10 ** 9, device="cpu:1")).ok and server.run(isolated_checkpoint(23)).ok
    first, second, third = (worker(server, pack)["pid"] for pack in ("zoo_loader", "zoo_nodes", "zoo_idle"))
    second_card = lambda: read_card(server.card_path, 1).process(second).allocated
    server.post("/free", {"unload_models": True})
    assert eventually(lambda: not on_card(server).get(first) and not second_card())
    shown = server.get("/system_stats")
    assert [device["vram_free"] for device in shown["devices"][:1]] == [400 * MIB]
    assert "not confirmed" not in [row["state"] for row in shown["processes"]] and worker(server, "zoo_idle")["pid"] == third

    assert server.run(one("ZooHold", seed=time.time_ns() % 10 ** 9, device="cpu:1")).ok
    assert eventually(lambda: process(server, second)["state"] == "idle")
    os.kill(second, signal.SIGSTOP)
    try:
        began = time.monotonic()
        server.post("/free", {"unload_models": True})
        assert time.monotonic() - began < SOON
        assert eventually(lambda: [row["state"] for row in server.get("/system_stats")["processes"] if row["pid"] == second] == ["not confirmed"])
        assert f"worker zoo (pid {second}) is busy and keeps its models on cpu:1" in server.log()
    finally:
        os.kill(second, signal.SIGCONT)
    server.post("/free", {"unload_models": True})       # it was not asked again
    assert eventually(lambda: not second_card())


@pytest.mark.row(41)
def test_system_stats_lists_the_workers(server):
    assert server.run(isolated_checkpoint(5)).ok
    pid = worker(server, "zoo_loader")["pid"]
    stats = server.get("/system_stats")
    row = next(row for row in stats["processes"] if row["pid"] == pid)
    assert row["devices"][0]["vram"] > 5 * MIB and "zoo_loader" in row["name"]
    assert row["ram"] > MIB and {"pinned", "age", "state"} <= row.keys() and {"resident", "cached", "fixed", "scratch", "claimed"} <= row["devices"][0].keys()
    os.kill(pid, signal.SIGSTOP)
    try:
        # Whoever says nothing for ten seconds is marked, and nobody waits for it.
        assert eventually(lambda: process(server, pid)["state"] == "silent")
        began = time.monotonic()
        row = process(server, pid)
        assert time.monotonic() - began < 5
        assert row["age"] > 5 and row["devices"][0]["vram"] > 5 * MIB
        assert process(server, worker(server, "zoo_nodes")["pid"])["state"] == "idle"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: process(server, pid)["state"] == "idle")


def test_a_worker_that_was_killed_is_replaced_and_its_cached_objects_are_made_again(server):
    first = server.run(isolated_checkpoint(7))
    os.kill(worker(server, "zoo_loader")["pid"], signal.SIGKILL)
    graph = isolated_checkpoint(8)
    assert eventually(lambda: worker(server, "zoo_loader")["state"] == "stopped")
    second = server.run(graph)
    assert first.ok and second.ok, second.error
    assert second.images != first.images and server.run(isolated_checkpoint(7)).images == first.images


def test_independent_nodes_of_different_workers_run_at_the_same_time(server):
    seed = time.time_ns() % 10 ** 6
    graph = Graph()
    graph.add("a", "ZooWho", seed=seed, seconds=1.0)
    graph.add("b", "ZooBusy", seed=seed, seconds=1.0)
    server.run(graph)       # so that no start is measured
    graph["a"]["inputs"]["seed"] = graph["b"]["inputs"]["seed"] = seed + 1
    result = server.run(graph)
    assert result.ok, result.error
    (a0, a1), (b0, b1) = result.outputs["a"]["span"][0], result.outputs["b"]["span"][0]
    assert max(a0, b0) < min(a1, b1)


@pytest.mark.parametrize("killed", [False, True])
def test_the_results_of_a_worker_that_ends_or_is_killed_stay(server, killed):
    seed = time.time_ns() % 50 + 50 * killed
    graph = one("ZooIdleImage", seed=seed)
    graph.add("mean", "ZooMean", image=out("n"), seed=1)
    first = server.run(graph)
    pid = first.outputs["n"]["pid"][0]
    # Whatever earlier prompts left in it is let go with the executor's cache: which is said, and may be after a prompt that comes at once.
    begun = server.log().count("Using RAM pressure cache")
    server.post("/free", {"free_memory": True})
    assert eventually(lambda: server.log().count("Using RAM pressure cache") > begun)
    graph["n"]["inputs"]["seed"] = seed + 1
    first = server.run(graph)
    if killed:
        with contextlib.suppress(ProcessLookupError):       # it had ended by itself already
            os.kill(first.outputs["n"]["pid"][0], signal.SIGKILL)
    assert eventually(lambda: worker(server, "zoo_idle")["state"] == "stopped")
    graph["mean"]["inputs"]["seed"] = 2
    second = server.run(graph)
    assert second.ok and second.outputs["mean"]["mean"] == pytest.approx([(seed + 1) / 100])
    assert worker(server, "zoo_idle")["state"] == "stopped"       # the cached image did not need it
    graph["n"]["inputs"]["seed"] = seed + 2
    third = server.run(graph)
    assert third.ok and third.outputs["n"]["pid"][0] not in (pid, None)


def test_a_worker_above_its_limit_of_ram_ends_after_the_call_and_its_results_stay(server):
    seed = time.time_ns() % 10 ** 9
    graph = one("zoo_limited", how="fine", seed=seed)
    graph.add("use", "ZooCounted", value=out("n"), again=1)
    first = server.run(graph)
    assert first.ok, first.error
    assert eventually(lambda: worker(server, "zoo_limited")["state"] == "stopped")
    assert "more than its limit of 1 MB" in server.log()
    graph["use"]["inputs"]["again"] = 2
    assert server.run(graph).ok and worker(server, "zoo_limited")["state"] == "stopped"        # the cached number did not need it
    graph["n"]["inputs"]["seed"] = seed + 1
    assert server.run(graph).outputs["n"]["pid"] != first.outputs["n"]["pid"]


def test_a_worker_whose_objects_are_in_use_is_not_ended(server):
    graph = one("ZooIdle", seed=time.time_ns() % 50)
    graph.add("use", "ZooIdleUse", thing=out("n", 1), seed=1)
    first = server.run(graph)
    assert first.ok, first.error
    pid = first.outputs["use"]["pid"][0]
    assert eventually(lambda: "objects in it are in use" in server.log())
    graph["use"]["inputs"]["seed"] = 2
    second = server.run(graph)
    assert second.outputs["use"] == {"class": ["Object"], "pid": [pid]}


def test_whoever_is_idle_for_long_gives_the_card_back_and_a_running_prompt_is_not_idle(serve, fork_tree):
    """Host and worker; the results are the same when the models come back."""
    server = serve(fork_tree, ["--process-memory-idle", "1", "--isolate", "zoo_loader"], packs=("zoo_loader", "zoo_nodes"), card=CardSettings(size=400 * MIB))
    graph = isolated_checkpoint()
    for id, node in workflows.txt2img_sd3().items():
        inputs = {name: out(f"host_{value[0]}", value[1]) if isinstance(value, list) else value for name, value in node["inputs"].items()}
        graph.add(f"host_{id}", node["class_type"], **inputs)
    graph.add("worker_works", "ZooWho", seed=1, anything=out("host_decode"), seconds=3.0)
    graph.add("host_works", "ZooBusy", seed=out("worker_works"), seconds=3.0)
    first = server.run(graph)
    assert first.ok, first.error
    log = server.log()
    assert "Prompt executed" in log.partition("without work")[0]
    pid = worker(server, "zoo_loader")["pid"]
    assert eventually(lambda: not read_card(server.card_path).used)
    for number in (pid, server.pid):
        assert read_card(server.card_path).process(number).peak > 5 * MIB
        assert process(server, number)["devices"][0]["vram"] == 0
    assert worker(server, "zoo_loader")["pid"] == pid and server.log().count("after 1 s without work") >= 2
    graph["sampler"]["inputs"]["seed"] += 1
    graph["host_sampler"]["inputs"]["seed"] += 1
    again = server.run(graph)
    assert again.ok and again.images != first.images


@pytest.mark.row(36)
def test_a_cached_object_of_a_dead_worker_leaves_under_pressure_and_its_node_runs_again(serve, fork_tree):
    server = serve(fork_tree, ["--isolate", "zoo_idle", "--cache-ram", "1", "1000000"], packs=("zoo_idle",),
                   card=CardSettings(size=400 * MIB))       # results of other prompts leave
    graph = one("ZooIdle", seed=1)
    graph.add("use", "ZooIdleUse", thing=out("n", 1), seed=1)
    pid = server.run(graph).outputs["use"]["pid"][0]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: worker(server, "zoo_idle")["state"] == "stopped")
    before = len(server.log())
    other = Graph()
    other.add("image", "EmptyImage", width=64, height=64, batch_size=1, color=0)
    other.add("preview", "PreviewImage", images=out("image"))
    assert server.run(other).ok
    said = server.log()[before:]
    assert "Traceback" not in said and said.count("cannot be measured") <= 1
    again = server.run(graph)
    assert again.ok, again.error
    assert again.outputs["use"]["class"] == ["Object"] and again.outputs["use"]["pid"] != [pid]


# the nodes for workflow authors

def test_a_checkpoint_in_a_named_worker(server):
    graph = workflows.txt2img_sd3()
    native = server.run(graph)
    graph["ckpt"] = {"class_type": "MultiprocLoadCheckpoint", "inputs": {"ckpt_name": graph["ckpt"]["inputs"]["ckpt_name"], "worker": "mine"}}
    graph.add("look", "MultiprocMemory", after=out("decode"))
    graph.add("see", "PreviewImage", images=out("look", 1))
    graph.add("free", "MultiprocRelease", worker="mine", what="models", after=out("look", 2))
    result = server.run(graph)
    assert result.ok, result.error
    assert "has unloaded its models" in result.outputs["free"]["text"][0], "the worker was not there when the prompt was queued"
    assert result.images[0] == native.images[0] or native.images[0] in result.images
    assert "worker mine" in result.outputs["look"]["text"][0]


def test_a_name_that_is_none_is_refused(server):
    from comfy_multiproc.testing.server import ServerError
    with pytest.raises(ServerError, match="'../x' is no name of a worker: letters, digits"):
        graph = workflows.txt2img_sd3()
        graph["ckpt"] = {"class_type": "MultiprocLoadCheckpoint", "inputs": {"ckpt_name": "tiny_sd3.safetensors", "worker": "../x"}}
        server.run(graph)
    with pytest.raises(ServerError, match="not in"):
        graph["ckpt"]["inputs"] = {"ckpt_name": "there is none", "worker": "nobodys"}
        server.run(graph)
    assert "worker nobodys" not in [row["name"] for row in server.get("/process_memory")["processes"]], "a prompt that is refused makes no worker"


def test_releasing_workers(server):
    assert "there is no worker nobody; there are: " in server.run(one("MultiprocRelease", worker="nobody", what="models")).error["exception_message"]
    assert server.run(isolated_checkpoint(11)).ok
    pid = worker(server, "zoo_loader")["pid"]
    result = server.run(one("MultiprocRelease", worker="zoo_loader", what="models"))
    assert result.ok and not on_card(server).get(pid)
    result = server.run(one("MultiprocRelease", worker="all workers", what="process"))
    assert f"(pid {pid}) was ended" in result.outputs["n"]["text"][0]
    assert server.run(isolated_checkpoint(12)).ok and worker(server, "zoo_loader")["pid"] != pid
