"""Tensors of a card between processes: always by a copy, whatever the allocator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu

CROSS = """
import torch
from comfy_multiproc.handles import HandleTable
from comfy_multiproc.shared import SharedPool
from tests.unit.value_peer import Peer

peer = Peer(HandleTable("host"), SharedPool())
sent = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
views = peer.do("echo", {"samples": sent, "every other": sent[::2]})
assert all(t.device == sent.device for t in views.values())
assert views["samples"].equal(sent) and views["every other"].equal(sent[::2])
before = torch.cuda.memory_allocated()
held = [peer.do("echo", sent) for _ in range(50)]
peer.kill()
assert all(t.equal(sent) for t in held)
del held
assert torch.cuda.memory_allocated() == before
peer.codec.close()
"""


@pytest.mark.parametrize("allocator", ["backend:native", "backend:cudaMallocAsync", "expandable_segments:True"])
def test_a_tensor_of_the_card_arrives_on_it_and_outlives_its_sender(allocator):
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CROSS], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
