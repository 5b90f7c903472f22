"""What a process holds beside models, by its bytes."""

import pytest

from comfy.process_memory import scratch
from comfy_multiproc import held

torch = pytest.importorskip("torch")
quantised = pytest.importorskip("comfy_kitchen.tensor")


def test_quantised_weights_weigh_what_they_are_made_of():
    """A tensor that wraps others has no storage: asking for it ended the publishing of all that a process holds."""
    weight = quantised.QuantizedTensor.from_float(torch.zeros(64, 64), "TensorCoreFP8Layout")
    plain = torch.zeros(100, dtype=torch.int8)
    size = 64 * 64 + weight._params.scale.nbytes
    assert scratch.in_ram([weight, plain, weight, plain[:50]]) == size + 100
    assert held.in_ram({"weights": [weight]}) == size
