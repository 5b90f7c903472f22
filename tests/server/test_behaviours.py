"""What works in ComfyUI's one process works in a worker as it does there, dynamic VRAM included, on a card and a pager without a GPU.

Two servers with the same pack: unpatched ComfyUI, which runs it in its own process, and the fork, which runs it in a worker.
"""

import itertools
import os
import time
from pathlib import Path

import pytest

from comfy_multiproc.testing import CardSettings, read_card, workflows
from comfy_multiproc.testing.card.virtual import server_environment
from comfy_multiproc.testing.workflows import Graph, out

pytestmark = pytest.mark.xdist_group("behaviours")      # the servers are the module's: one process must run all of it

MIB = 1 << 20
GIB = 1 << 30
PAGER = Path(__file__).with_name("pager")
PAGED = 2 * MIB         # of the weights of each process are on the card, of 4.6
CARD = CardSettings(size=400 * MIB, form="npu", inference=40 * MIB, reserved=20 * MIB)
ARGS = ("--enable-dynamic-vram", "--async-offload", "3", "--reserve-vram", "0.5", "--vram-headroom", "0.25", "--cuda-malloc", "--cache-ram", "5",
        "--fast", "fp16_accumulation", "--fp16-intermediates", "--bf16-vae")
CHECKPOINT = "tiny_sd3.safetensors"
SEEDS = itertools.count(1)
STOOD_IN = "with aimdo itself, which needs a real GPU"


@pytest.fixture(scope="module")
def begin(serve, cpp_card, tmp_path_factory):
    def begin(tree, args, packs):
        file = tmp_path_factory.mktemp("card") / "card"
        path = server_environment(CARD, file, tree=tree)["PYTHONPATH"] + os.pathsep + str(PAGER)
        return serve(tree, (*ARGS, *args), packs=packs, card=CARD, card_file=file,
                     environment={"PYTHONPATH": path, "PAGER_LIMIT": str(PAGED), "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})
    return begin


@pytest.fixture(scope="module")
def native(begin, upstream_tree):
    return begin(upstream_tree, (), ("zoo_behaviours", "zoo_host"))


@pytest.fixture(scope="module")
def isolated(begin, fork_tree):
    """zoo_behaviours runs in a worker; its nodes with the prefix ZooHost run in the server itself."""
    return begin(fork_tree, ("--isolate", "zoo_behaviours"), ("zoo_behaviours", "zoo_host"))


def ask(server, kind, **inputs):
    """Run one node by itself; what it says."""
    graph = Graph()
    graph.add("n", kind, seed=next(SEEDS), **inputs)
    return said(server.run(graph))


def said(result, id="n"):
    assert result.ok, result.error
    return result.outputs[id]["said"][0]


def sampled(*, patched=None, loader="ZooLoad"):
    """Sample with a model that the pack has loaded, patched or not. Nothing is decoded: a tiny VAE's weights are not paged."""
    graph = workflows.txt2img_sd3()
    del graph["decode"], graph["save"]
    graph["ckpt"] = {"class_type": loader, "inputs": {"ckpt_name": CHECKPOINT, "seed": 0}}
    graph["sampler"]["inputs"].update(cfg=1.0, steps=1)
    graph["latent"]["inputs"].update(width=32, height=32)
    if patched is not None:
        graph["sampler"]["inputs"]["model"] = graph.add("patch", "ZooPatch", model=out("ckpt"), seed=7, baked=patched == "baked")
    graph.add("digest", "ZooDigest", latent=out("sampler"), seed=next(SEEDS))
    return graph


def latent(result):
    """What was sampled, as a digest."""
    return said(result, "digest")["digest"]


def worker(server):
    """The row of its worker in what the server says of every process."""
    stats = server.get("/system_stats")
    [pid] = {pack["pid"] for pack in stats["packs"] if pack["isolated"]}
    return next(row for row in stats["processes"] if row["pid"] == pid)


def free(server):
    """Everything is unloaded and forgotten. ComfyUI misses a request that comes while it collects garbage after a prompt."""
    def freed():
        server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.2)
        return not read_card(server.card_path).used
    until(freed)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# models

@pytest.mark.behaviour(2)
@pytest.mark.behaviour(3)
@pytest.mark.parametrize("how", ["forward", "baked"])
def test_a_patched_model_samples_the_same(isolated, native, how):
    plain = latent(native.run(sampled()))
    assert latent(isolated.run(sampled(patched=how))) == latent(native.run(sampled(patched=how))) != plain


@pytest.mark.behaviour(4, partial=STOOD_IN)
@pytest.mark.behaviour(6, partial=STOOD_IN)
def test_a_model_that_does_not_fit_is_paged_to_the_same_latent(isolated, native):
    found = []
    for server in (isolated, native):
        free(server)
        graph = sampled(patched="forward")
        graph.add("paged", "ZooPaged", model=out("patch"), after=out("sampler"), seed=next(SEEDS))
        result = server.run(graph)
        found.append((latent(result), said(result, "paged")))
    (ours, mine), (theirs, before) = found
    assert ours == theirs
    for paged in (mine, before):
        assert paged["dynamic"] and 0 < paged["loaded"] < paged["size"] and paged["paged"] <= PAGED
        assert paged["counts"]["fault refused"] > 0
        assert paged["pinned"][0] == paged["pinned"][1] > 0
    assert {key: mine[key] for key in ("loaded", "size", "paged", "pinned", "patched")} == {
        key: before[key] for key in ("loaded", "size", "paged", "pinned", "patched")}


@pytest.mark.behaviour(4, partial=STOOD_IN)
@pytest.mark.behaviour(5, partial=STOOD_IN)
@pytest.mark.behaviour(6, partial=STOOD_IN)
def test_what_is_paged_is_published_and_given_back_when_another_process_needs_it(isolated):
    graph = sampled()
    graph.add("paged", "ZooPaged", model=out("ckpt"), after=out("sampler"), seed=next(SEEDS))
    paged = said(isolated.run(graph), "paged")
    pid = paged["pid"]
    until(lambda: worker(isolated)["state"] == "idle")
    row = worker(isolated)
    held = read_card(isolated.card_path).process(pid).allocated
    assert row["pid"] == pid and row["devices"][0]["vram"] == held >= paged["paged"] > 0
    assert row["pinned"] == paged["pinned"][0] > 0
    graph.add("room", "ZooHostMakeRoom", seed=next(SEEDS))
    result = isolated.run(graph)
    assert said(result, "room")["free"] == CARD.size and said(result, "room")["pid"] == isolated.pid
    assert read_card(isolated.card_path).process(pid).allocated == 0
    graph["sampler"]["inputs"]["seed"] += 1
    again = isolated.run(graph)
    assert again.ok and 0 < said(again, "room")["free"], "the model that was cached is paged in again"


@pytest.mark.row(2)
@pytest.mark.behaviour(5, partial=STOOD_IN)
@pytest.mark.behaviour(6, partial=STOOD_IN)
@pytest.mark.parametrize("holder, asker", [("Host", ""), ("", "Host")])
def test_what_there_is_room_for_takes_nothing_from_anybody(isolated, holder, asker):
    """A paged model with locked memory in one process, plain ones in the other, which loads and asks ten times."""
    graph = sampled(loader=f"Zoo{holder}Load")

    def with_node(kind, **inputs):
        """In the same prompt, or the model would not stay."""
        return said(isolated.run({**graph, "n": {"class_type": kind, "inputs": {**inputs, "seed": next(SEEDS)}}}))

    def look():
        now = with_node(f"Zoo{holder}Paged", model=out("ckpt"), after=out("sampler"))
        return now["paged"], now["pinned"], [now["counts"].get(name, 0) for name in ("free_memory", "cudaHostUnregister", "ModelVBAR")]
    before = look()
    assert before[0] > 0 and before[1][0] > 0
    assert with_node(f"Zoo{asker}Fits", mib=32)["sizes"] == [[32, 32]]
    assert look() == before


@pytest.mark.row(16, partial=STOOD_IN)
def test_the_pager_is_entered_by_the_execution_thread_only(isolated):
    """It has no lock, and its state is the thread's."""
    for loader in ("ZooHostLoad", "ZooLoad"):
        graph = sampled(loader=loader)
        assert isolated.run(graph).ok
        until(lambda: worker(isolated)["state"] == "idle")
        graph.add("room", "ZooHostMakeRoom", seed=next(SEEDS))      # the second time the worker gives back
        assert said(isolated.run(graph), "room")["free"] == CARD.size
    assert isolated.run(sampled(patched="forward")).ok
    free(isolated)
    for kind in ("ZooThreads", "ZooHostThreads"):
        threads = ask(isolated, kind)
        assert {"fault", "free_memory", "prioritize", "ModelVBAR", "cudaHostRegister"} <= set(threads["called"])
        assert threads["elsewhere"] == []


@pytest.mark.behaviour(9)
def test_two_processes_that_have_loaded_one_file_hold_its_pages_once(isolated):
    graph = Graph()
    for kind in ("", "Host"):
        graph.add(f"n{kind}", f"Zoo{kind}Touch", ckpt_name=CHECKPOINT, seed=next(SEEDS))
    result = isolated.run(graph)
    worker, host = said(result), said(result, "nHost")
    assert worker["total"] == host["total"] and worker["pid"] != host["pid"] == isolated.pid
    file = (isolated.home / "models" / "checkpoints" / CHECKPOINT).resolve()
    size = file.stat().st_size
    held = [mapped(pid, file) for pid in (worker["pid"], host["pid"])]
    assert all(0.9 * size < resident for resident, _, _ in held)
    assert sum(share for _, share, _ in held) <= 1.1 * size
    assert [dirty for _, _, dirty in held] == [0, 0]


@pytest.mark.behaviour(10)
def test_tensors_are_read_from_their_file_to_the_card_and_to_host_memory(isolated, native):
    ours, theirs = (ask(server, "ZooSlices", ckpt_name=CHECKPOINT) for server in (isolated, native))
    assert ours["card"] == ours["both"] == ours["tensors"] > 50
    assert [ours[key] for key in ("card", "both", "tensors")] == [theirs[key] for key in ("card", "both", "tensors")]


@pytest.mark.row(18)
def test_running_out_of_memory_in_the_host_unloads_what_a_worker_holds(isolated):
    graph = sampled()
    graph.add("n", "ZooHostOutOfMemory", after=out("sampler"), seed=next(SEEDS))
    result = isolated.run(graph)
    assert result.error["exception_type"] == "torch.OutOfMemoryError"
    until(lambda: not read_card(isolated.card_path).used)
    assert "worker zoo_behaviours (pid" in isolated.log(), "the memory summary has a line for it"


# nodes and prompts

@pytest.mark.row(27)
@pytest.mark.behaviour(11)
@pytest.mark.parametrize("fail", [False, True])
def test_what_a_node_leaves_on_the_card_and_of_files_is_gone_after_it(isolated, native, fail):
    for server in (isolated, native):
        before = ask(server, "ZooLeft")["bounced"]
        graph = Graph()
        graph.add("n", "ZooDirty", ckpt_name=CHECKPOINT, fail=fail, seed=next(SEEDS))
        result = server.run(graph)
        if fail:
            assert "as asked" in result.error["exception_message"]
        else:
            during = said(result)
            assert (during["dirty"], during["buffers"], during["queues"], during["in memory"]) == (1, 1, 1, True)
        after = ask(server, "ZooLeft")
        assert (after["dirty"], after["buffers"], after["queues"], after["in memory"]) == (0, 0, 0, False)
        assert after["bounced"] > before
    assert worker(isolated)["devices"][0]["scratch"] == 0


@pytest.mark.row(25)
@pytest.mark.behaviour(12)
def test_models_of_the_running_prompt_are_marked_until_it_ends(isolated, native, tmp_path):
    for number, server in enumerate((isolated, native)):
        graph = Graph()
        graph.add("ckpt", "ZooLoad", ckpt_name=CHECKPOINT, seed=next(SEEDS))
        graph.add("n", "ZooKeep", model=out("ckpt"), path=str(tmp_path / str(number)), seed=next(SEEDS))
        assert said(server.run(graph))["marked"] is True
        until((tmp_path / str(number)).exists)      # without another prompt


@pytest.mark.behaviour(19)
def test_the_results_cache_is_the_host_s_and_a_worker_is_not_asked_again(isolated):
    graph = Graph()
    graph.add("n", "ZooLeft", seed=next(SEEDS))
    first, second = isolated.run(graph), isolated.run(graph)
    assert said(first)["pid"] != isolated.pid and second.outputs == first.outputs
    assert [event["data"]["nodes"] for event in second.events if event["type"] == "execution_cached"] == [["n"]]


# settings

@pytest.mark.behaviour(7)
def test_the_floor_of_free_memory_is_the_host_s(isolated, native):
    floors = [ask(isolated, "ZooFloor"), ask(isolated, "ZooHostFloor"), ask(native, "ZooFloor")]
    assert [floor["floor"] for floor in floors] == [2.5 * GIB] * 3
    assert not any(floor["granted"] for floor in floors)


@pytest.mark.behaviour(8)
def test_the_cache_that_is_asked_before_memory_is_locked_is_a_process_s_own(isolated, native):
    cache = [5 * GIB, "RAMPressureCache.ram_release"]
    assert ask(native, "ZooHeadroom", own=False)["here"] == cache
    ours = ask(isolated, "ZooHeadroom", own=True)
    assert ours["here"] == [0, None] and ours["given"] == 5 and ours["asked"] == [[7, False]] and ours["set"] == 123 * MIB
    assert ask(isolated, "ZooHostHeadroom", own=False)["here"] == cache
    assert ask(isolated, "ZooHeadroom", own=False)["here"] == [0, None]


@pytest.mark.row(23)
@pytest.mark.row(24)
@pytest.mark.behaviour(13)
@pytest.mark.behaviour(14)
@pytest.mark.behaviour(15)
@pytest.mark.behaviour(16)
@pytest.mark.behaviour(17)
@pytest.mark.behaviour(18)
@pytest.mark.behaviour(19)
def test_a_worker_has_what_the_host_has_made_of_its_arguments(isolated, native):
    worker, host, alone = ask(isolated, "ZooResolved"), ask(isolated, "ZooHostResolved"), ask(native, "ZooResolved")
    assert worker["pid"] != host["pid"]
    for found in (worker, host, alone):
        del found["pid"]
        assert found["streams"] == 3 and found["allocator"] == "max_split_size_mb:512,backend:cudaMallocAsync"
        assert found["dynamic"] == [True, "ModelPatcherDynamic"] and found["args"]["cache_ram"] == "[5.0]"
        assert found["pager"] == [["init", [None, GIB // 2, True], False], ["init_devices", [[0, GIB // 4]], True]]
    assert worker == host
    differ = {name for name in alone["args"] if alone["args"][name] != worker["args"][name]}
    assert differ <= {"port", "base_directory"}
    assert {key: value for key, value in alone.items() if key != "args"} == {key: value for key, value in worker.items() if key != "args"}


@pytest.mark.behaviour(22)
@pytest.mark.behaviour(23)
def test_what_a_pack_has_changed_at_its_import_is_set_right(isolated, native):
    for found in (ask(isolated, "ZooResolved"), ask(isolated, "ZooHostResolved"), ask(native, "ZooResolved")):
        assert found["benchmark"] is False and found["cast_to"] is True
    assert worker(isolated)["name"] == "worker zoo_behaviours", "and the hooks of the series are still there"


@pytest.mark.behaviour(23)
def test_what_a_node_has_replaced_is_set_right_after_the_prompt(isolated, native):
    """By the server some time after the prompt, in a worker at once."""
    for _ in range(2):
        said = ask(isolated, "ZooHook")
        assert said["pid"] != isolated.pid and (said["before"], said["after"]) == (True, False)
    for server, kind in ((isolated, "ZooHost"), (native, "Zoo")):
        assert ask(server, f"{kind}Hook")["after"] is False
        until(lambda: ask(server, f"{kind}Resolved")["cast_to"])


@pytest.mark.row(41)
def test_what_system_stats_said_before_it_says_as_before(isolated, native):
    ours, theirs = isolated.get("/system_stats"), native.get("/system_stats")
    assert set(ours) - set(theirs) == {"processes", "packs"}
    assert ours["system"].keys() == theirs["system"].keys() and [d.keys() for d in ours["devices"]] == [d.keys() for d in theirs["devices"]]
    assert ours["devices"][0]["vram_total"] == theirs["devices"][0]["vram_total"] == CARD.size
    assert {row["pid"] for row in ours["processes"]} >= {isolated.pid, worker(isolated)["pid"]}


@pytest.mark.row(35)
def test_without_smart_memory_a_worker_s_models_leave_at_the_end_of_the_prompt(serve, fork_tree):
    server = serve(fork_tree, ["--isolate", "zoo_loader", "--disable-smart-memory"], packs=("zoo_loader",), card=CardSettings(size=400 * MIB))
    graph = workflows.txt2img_sd3()
    graph["ckpt"]["class_type"] = "ZooLoadCheckpoint"
    assert server.run(graph).ok
    until(lambda: not read_card(server.card_path).used)
    assert read_card(server.card_path).process(worker(server)["pid"]).peak > 5 * MIB


def mapped(pid, file):
    """Of a process's mappings of a file: bytes in memory, its share of them, and bytes that are its alone."""
    rss = pss = dirty = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            inside = line.endswith(str(file))
        elif inside:
            size = int(line.split()[1]) * 1024 if word in ("Rss:", "Pss:", "Private_Dirty:") else 0
            rss, pss, dirty = rss + size * (word == "Rss:"), pss + size * (word == "Pss:"), dirty + size * (word == "Private_Dirty:")
    return rss, pss, dirty
