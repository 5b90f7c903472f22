"""Tensors of a card between processes: shared where the allocator and the container allow it, copied where not, and the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu")]

BEGIN = """
import logging, time
import torch
from comfy_multiproc.handles import HandleTable
from comfy_multiproc.shared import SharedPool
from tests.unit.value_peer import Peer

logging.basicConfig(format="%(message)s", level=logging.DEBUG)
MIB = 1 << 20

def start(**environment):
    return Peer(HandleTable("host"), SharedPool(), environment=environment)

def until(condition, peer, value=None):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        peer.do("echo", value)

def decide(peer, value):
    # The first value of each direction is copied while the other end examines a probe; a few more give it the time.
    peer.do("echo", value)
    until(lambda: not peer.codec._cards._probes, peer, value)
    for _ in range(20):
        peer.do("echo", value)
"""

CROSS = """
peer = start()
sent = torch.arange(MIB, device="cuda", dtype=torch.float32)
decide(peer, sent)
value = {"samples": sent, "every other": sent[::2], "small": sent[:5], "host": sent.cpu(), "half": sent.half(), "both": [sent[:700_000], sent[300_000:]]}
back = peer.do("echo", value)
pairs = [(back[k], value[k]) for k in ("samples", "every other", "small", "half", "host")] + list(zip(back["both"], value["both"]))
assert all(ours.device == theirs.device and ours.equal(theirs) for ours, theirs in pairs)
back["samples"].zero_()
assert sent[7] == 7
assert abs(peer.do("edit", sent) - MIB / 2) < MIB / 1000 and sent[7] == 7
del back, value, pairs

sent = torch.arange(MIB // 4, device="cuda", dtype=torch.float32)
until(lambda: not peer.codec._cards._under_way, peer)
before = torch.cuda.memory_allocated()
held = [peer.do("echo", sent) for _ in range(500)]
assert all(t.equal(sent) for t in held)
until(lambda: not peer.codec._cards._under_way, peer)
assert torch.cuda.memory_allocated() - before < 510 * sent.nbytes
peer.kill()
assert all(t.equal(sent) for t in held)
del held
assert torch.cuda.memory_allocated() <= before
peer.codec.close()
"""

BACK = """
peer = start()
decide(peer, torch.ones(MIB, device="cuda"))
at_start = min(peer.do("allocated") for _ in range(20))
for n in range(200):
    result = peer.do("on the card", n)
    assert result.is_cuda and result.nbytes == 4 * MIB and bool(result.eq(n).all())
deadline = time.monotonic() + 60
while peer.do("allocated") > at_start:
    assert time.monotonic() < deadline, (peer.do("allocated"), at_start)
peer.kill()
assert bool(result.eq(199).all()) and bool(result.add_(1).eq(200).all())
peer.codec.close()
"""

CARDS = """
sent = torch.arange(MIB, device="cuda:1", dtype=torch.float32)
for environment, there, here in [
        ({}, "cuda:1", "cuda:1"), ({"VALUE_PEER_DEVICE": "cuda:0"}, "cuda:0", "cuda:0"), ({"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0", "cuda:1"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cpu", "cpu"), ({"CUDA_VISIBLE_DEVICES": ""}, "cpu", "cpu")]:
    peer = start(**environment)
    decide(peer, sent)
    back = peer.do("echo", sent)
    assert (peer.do("device", sent), str(back.device)) == (there, here), environment
    assert back.cpu().equal(sent.cpu())
    assert sent.cpu().equal(torch.arange(MIB, dtype=torch.float32))
    peer.close()
"""

ALLOCATORS = ["backend:native", "expandable_segments:True", "backend:cudaMallocAsync"]


def run(script, allocator="backend:native", **environment):
    """Run it in a process of its own; the lines that say how tensors go to the other process, and the warnings."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", BEGIN + script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("Tensors on ")]
    return [line for line in lines if "through host memory" not in line], [line for line in lines if "through host memory" in line]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_tensor_of_the_card_arrives_on_it_whole_and_is_the_receivers_own(allocator):
    (line,), warnings = run(CROSS, allocator)
    assert len(warnings) <= 1
    if allocator == "backend:cudaMallocAsync":
        assert "are copied" in line and not warnings
    else:
        # A container may forbid it, which the warning says then.
        assert "are shared" in line or warnings, line


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_sender_is_back_where_it_was_and_what_it_sent_outlives_it(allocator):
    run(BACK, allocator)


def test_a_tensor_of_a_card_goes_where_the_receiver_has_its_place():
    import torch
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(CARDS, CUDA_VISIBLE_DEVICES="0,1", CUDA_LAUNCH_BLOCKING="1")
