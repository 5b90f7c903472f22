"""The two forms of the virtual card under an unpatched server: they agree, they count right, they run out, they are shared."""

import itertools
import os
import signal
import subprocess
import sys

import pytest

from comfy_multiproc.testing import CardSettings, read_card
from comfy_multiproc.testing.workflows import WORKFLOWS, txt2img_sd3

MIB = 1 << 20
RUNS = itertools.count()
# A checkpoint, a model that no patcher holds, three loaders, weights that are patched.
COMPARED = ("txt2img_sd3", "upscale", "flux", "lora")
# What is kept free and how much of a model must load are ComfyUI's figures for two kinds of card: compared at equal ones.
EQUAL = {"inference": 40 * MIB, "reserved": 20 * MIB, "weight_ratio": 0.4}


@pytest.fixture(scope="module")
def python_server(serve, upstream_tree):
    return serve(upstream_tree, names=COMPARED, card=CardSettings(size=420 * MIB, **EQUAL))


@pytest.fixture(scope="module")
def npu_server(serve, upstream_tree, cpp_card):
    return serve(upstream_tree, names=COMPARED, card=CardSettings(size=420 * MIB, form="npu", **EQUAL))


@pytest.fixture(params=["python_server", "npu_server"])
def server(request):
    return request.getfixturevalue(request.param)


def probe(server, class_type, **inputs):
    """Run one of the probing nodes by itself."""
    return server.run({"probe": {"class_type": class_type, "inputs": inputs}})


@pytest.mark.parametrize("name", COMPARED)
def test_the_two_forms_give_the_same_pixels_with_the_same_bytes(python_server, npu_server, name):
    one, other = python_server.run(WORKFLOWS[name]()), npu_server.run(WORKFLOWS[name]())
    assert one.ok and other.ok, one.error or other.error
    assert one.images == other.images and one.images
    one_card, other_card = read_card(python_server.card_path), read_card(npu_server.card_path)
    assert (one_card.used, one_card.peak) == (other_card.used, other_card.peak)


def test_counted_bytes_are_comfyui_s_own_books_at_rest(server):
    assert server.run(txt2img_sd3()).ok
    held = read_card(server.card_path).process(server.pid).allocated
    seen = probe(server, "CardBooks", run=next(RUNS)).outputs["probe"]
    assert seen["counted"] == [held] and held > 8 * MIB
    assert abs(held - seen["books"][0]) < 0.1 * MIB


def test_what_does_not_fit_is_out_of_memory_and_the_server_goes_on(server):
    refusals = read_card(server.card_path).refusals
    result = probe(server, "CardFill", nbytes=421 * MIB)
    assert result.error and result.error["exception_type"] == "torch.OutOfMemoryError", result.error
    assert "420.00 MiB" in result.error["exception_message"] or "420 MiB" in result.error["exception_message"]
    assert read_card(server.card_path).refusals == refusals + 1 and read_card(server.card_path).peak <= 420 * MIB
    assert server.run(txt2img_sd3()).ok


def test_free_gives_the_card_back(server):
    assert server.run(txt2img_sd3()).ok and read_card(server.card_path).used > 8 * MIB
    server.post("/free", {"unload_models": True, "free_memory": True})
    server.run({"probe": {"class_type": "CardBooks", "inputs": {"run": next(RUNS)}}})       # after it, in the same queue
    assert read_card(server.card_path).used == 0


def test_a_server_of_each_form_share_a_small_card(serve, upstream_tree, cpp_card, python_server):
    prompt = txt2img_sd3()
    prompt["sampler"]["inputs"]["cfg"] = 1.0        # with two conds the pixels depend on whether both fit into one batch
    expected = python_server.run(prompt).images
    size = 30 * MIB     # enough for one of them: decoding is thought to take 17 MiB
    card = {"size": size, "inference": 2 * MIB, "reserved": 0, "weight_ratio": 0.0}
    one = serve(upstream_tree, card=CardSettings(**card))
    other = serve(upstream_tree, card=CardSettings(form="npu", **card), card_file=one.card_path)
    free = lambda server: server.get("/system_stats")["devices"][0]["vram_free"]
    held = lambda server: read_card(one.card_path).process(server.pid).allocated

    assert one.run(prompt).images == expected
    assert held(one) > 8 * MIB and free(other) == size - held(one)
    assert other.run(prompt).images == expected, "a model loaded in part computes something else"
    assert "loaded partially" in other.log() and 0 < held(other) < held(one)
    assert free(one) == free(other) == size - held(one) - held(other)
    seen = probe(other, "CardBooks", run=next(RUNS)).outputs["probe"]
    assert seen["partial"][0] > 0 and abs(seen["counted"][0] - seen["books"][0]) < 0.1 * MIB

    os.kill(one.pid, signal.SIGKILL)
    one.process.wait(30)
    assert free(other) == size - held(other)
    assert read_card(one.card_path).peak <= size


CPP_FORM = """
import os, sys
import torch
from comfy_multiproc.testing.card.capacity import CapacityFile
from comfy_multiproc.testing.cpp import torch_npu

file = CapacityFile.create(sys.argv[1], [1 << 20] * 2)
torch_npu.register(file)
x, index = torch.zeros(4, device="npu:0"), torch.tensor([1, 2])
used = file.read(0).used
if (child := os.fork()) == 0:
    del x
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0 and file.read(0).used == used == 16, "a forked child gave back what is its parent's"
x[index] = torch.tensor(2.0)
x[index.to("npu:0")] += 1
assert x.cpu().tolist() == [0.0, 3.0, 3.0, 0.0]
for refused in (lambda: x[index.to("npu:1")], lambda: x.__setitem__(index, torch.ones(2)), lambda: torch.zeros(4)[index.to("npu:0")],
                lambda: x.index_select(0, index)):
    try:
        refused()
    except RuntimeError as error:
        assert "device" in str(error), error
    else:
        raise AssertionError("operands of two devices")
"""


def test_the_c_form_refuses_what_a_card_refuses_and_a_fork_changes_nothing(cpp_card, tmp_path):
    done = subprocess.run([sys.executable, "-c", CPP_FORM, tmp_path / "card"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
