"""How many bytes the hints of control nets take on the card."""

import sys
import types

import pytest

from comfy.process_memory import claims, control


class Hint:
    def __init__(self, *shape):
        self.shape = shape


def net(**more):
    return types.SimpleNamespace(**{"cond_hint_original": Hint(1, 3, 640, 480), "compression_ratio": 8, "vae": None, "previous_controlnet": None, **more})


@pytest.mark.row(4)
@pytest.mark.parametrize("found, size", [
    (net(), 2 * 3 * 512 * 512 * 2),                                   # two conds, RGB, at pixel resolution, 16 bits
    (net(t2i_model=object()), 2 * 3 * 512 * 512 * 4),                 # an adapter keeps it at 32 bits
    (net(vae=object()), 2 * 16 * 64 * 64 * 2),                        # encoded, it has the size of the latents
    (net(cond_hint_original=None), 0)])
def test_a_hint_is_as_large_as_what_it_is_scaled_to(found, size):
    assert control.hint_size(found, (1, 16, 64, 64), 2) == size


@pytest.mark.row(4)
def test_each_net_of_a_chain_counts_once_however_many_conds_use_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy.model_management", types.SimpleNamespace(dtype_size=lambda dtype: 2))
    monkeypatch.setattr(claims.current, "shared", True, raising=False)
    first = net()
    second = net(previous_controlnet=first)
    conds = {"positive": [{"control": second}, {"control": first}], "negative": [{"control": second}, {}]}
    one = 2 * 3 * 512 * 512 * 2
    assert control.hint_memory(conds, (1, 16, 64, 64), None) == 2 * one


def test_alone_nothing_is_added():
    assert control.hint_memory({"positive": [{"control": net()}]}, (1, 16, 64, 64), None) == 0
