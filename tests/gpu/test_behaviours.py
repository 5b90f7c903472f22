"""A worker with aimdo itself: the same latents as native, the same switches, what it maps is published and given back."""

import time
from pathlib import Path

import pytest

from comfy_multiproc.testing import start_server, tiny_models, workflows
from comfy_multiproc.testing.workflows import Graph, out

PACKS = Path(__file__).resolve().parents[1] / "server" / "packs"
CHECKPOINT = "tiny_sd3.safetensors"
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu")]


@pytest.fixture(scope="module")
def servers(upstream_tree, fork_tree):
    """The fork with the pack in a worker, and unpatched ComfyUI with the same pack."""
    packs, models = [PACKS / "zoo_behaviours", PACKS / "zoo_host"], tiny_models.ensure(["sd3"])
    with start_server(fork_tree, ["--isolate", "zoo_behaviours"], models=models, packs=packs) as isolated, \
            start_server(upstream_tree, models=models, packs=packs) as native:
        yield isolated, native


def sampled(patched):
    graph = workflows.txt2img_sd3()
    del graph["decode"], graph["save"]
    graph.add("ckpt", "ZooLoad", ckpt_name=CHECKPOINT, seed=0)
    graph["sampler"]["inputs"].update(cfg=1.0, model=graph.add("patch", "ZooPatch", model=out("ckpt"), seed=7, baked=patched == "baked"))
    graph.add("digest", "ZooDigest", latent=out("sampler"), seed=0)
    graph.add("paged", "ZooPaged", model=out("ckpt"), after=out("sampler"), seed=time.time_ns() % 10 ** 9)
    return graph


def said(result, id):
    assert result.ok, result.error
    return result.outputs[id]["said"][0]


def ask(server, kind):
    graph = Graph()
    graph.add("n", kind, seed=time.time_ns() % 10 ** 9)
    return said(server.run(graph), "n")


@pytest.mark.parametrize("patched", ["forward", "baked"])
def test_a_patched_model_samples_the_same(servers, patched):
    results = [server.run(sampled(patched)) for server in servers]
    ours, theirs = (said(result, "digest")["digest"] for result in results)
    assert ours == theirs
    assert said(results[0], "paged")["dynamic"] is said(results[1], "paged")["dynamic"]


def test_the_worker_s_switches_are_the_host_s(servers):
    isolated, _ = servers
    worker, host = ask(isolated, "ZooResolved"), ask(isolated, "ZooHostResolved")
    assert worker.pop("pid") != host.pop("pid")
    assert worker == host


def test_what_is_paged_is_published_and_leaves_with_the_free_button(servers):
    isolated, _ = servers
    paged = said(isolated.run(sampled("forward")), "paged")

    def row():
        return next(row for row in isolated.get("/system_stats")["processes"] if row["pid"] == paged["pid"])
    assert 0 < paged["loaded"] <= row()["devices"][0]["resident"]
    deadline = time.monotonic() + 60
    while row()["devices"][0]["resident"]:
        assert time.monotonic() < deadline
        isolated.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.5)
