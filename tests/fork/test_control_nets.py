"""Control nets beside another process: the network that a ControlLora builds while sampling, and hints."""


import pytest

from comfy_multiproc.testing import tiny_models
from tests.fork import runtimes
from tests.fork.runtimes import at_rest

MIB = 1 << 20


def file(name):
    return str(tiny_models.ensure([name]) / tiny_models.FILES[name][0])


@pytest.mark.row(4)
@pytest.mark.card(size="96M", inference=MIB // 2, reserved=MIB // 4)
def test_the_network_of_a_control_lora_has_room_made_for_it_and_is_seen_until_it_is_gone(card, other, tmp_path):
    import comfy.controlnet
    import comfy.model_management as mm
    import comfy.sd
    import torch
    unet = comfy.sd.load_diffusion_model(file("unet"))
    control = comfy.controlnet.load_controlnet(file("control_lora"))
    mm.load_models_gpu([unet])
    assert other.call("load", model="idle", nbytes=64 * MIB) == 64 * MIB
    free = mm.get_free_memory(card.device)
    kept_here = unet.loaded_size()
    with at_rest(other, tmp_path / "enough"), torch.inference_mode():
        control.pre_run(unet.model, lambda percent: percent)
    shared = {p.data_ptr() for p in unet.model.parameters()}
    network = sum(p.nbytes for p in control.control_model.parameters() if p.data_ptr() not in shared)
    assert network > free > 0, "it would have fitted anyhow: the test shows little"
    assert 0 < other.call("loaded", model="idle") < 64 * MIB and unet.loaded_size() == kept_here    # the sampling model stays
    _, scratch, claimed, _ = other.call("seen")["here"]
    assert scratch > 0 and claimed == 0
    control.cleanup()
    assert other.call("seen")["here"][1] < scratch


@pytest.mark.row(4)
@pytest.mark.card(size="256M")
def test_hints_count_in_what_sampling_needs_beyond_weights(card, other, monkeypatch):
    import comfy.controlnet
    import comfy.model_management as mm
    import comfy.sampler_helpers
    import comfy.sd
    import torch
    unet = comfy.sd.load_diffusion_model(file("unet"))
    control = comfy.controlnet.load_controlnet(file("controlnet"))
    control.set_cond_hint(torch.zeros(1, 3, 40, 40), 1.0)
    conds = {"positive": [{"control": control, "model_conds": {}, "cross_attn": torch.zeros(1, 77, 768)}]}
    asked = []
    monkeypatch.setattr(mm, "load_models_gpu", lambda models, memory_required=0, **more: asked.append(memory_required))
    comfy.sampler_helpers._prepare_sampling(unet, [1, 4, 16, 16], conds)
    runtimes.stop()
    comfy.sampler_helpers._prepare_sampling(unet, [1, 4, 16, 16], conds)
    assert asked[0] - asked[1] == 2 * 3 * 128 * 128 * 2      # two conds, three channels, 8 pixels for each latent, 16 bits
