"""What a process holds beside models, as another process sees it, and copies for a second GPU."""

import time

import pytest

from comfy_multiproc.testing import stub_patcher, tiny_models
from tests.fork.runtimes import at_rest

MIB = 1 << 20


@pytest.mark.row(10)
@pytest.mark.card(size="64M")
def test_cast_buffers_are_seen_and_so_is_their_end(card, other, monkeypatch):
    import comfy.model_management as mm
    import torch
    from comfy import process_memory
    from comfy.process_memory import own
    buffers = {"stream": torch.empty(8 * MIB, dtype=torch.int8, device=card.device)}
    monkeypatch.setattr(mm, "STREAM_CAST_BUFFERS", buffers)
    process_memory.changed()
    assert own.usage(card.device).scratch == 8 * MIB and other.call("seen")["here"][1] == 8 * MIB
    buffers.clear()
    process_memory.changed()
    assert own.usage(card.device).scratch == 0 and other.call("seen")["here"][1] == 0


@pytest.mark.row(31)
@pytest.mark.card(size="256M")
@pytest.mark.parametrize("taken", [False, True])
def test_weights_are_cached_for_hooks_only_as_long_as_there_is_room_on_the_card_by_then(card, other, taken):
    import comfy.hooks
    import comfy.model_management as mm
    import comfy.model_patcher
    import torch
    patcher = stub_patcher(64 * MIB)
    patcher.hook_mode = comfy.hooks.EnumHookMode.MaxSpeed
    mm.load_models_gpu([patcher])
    hook = comfy.hooks.WeightHook()
    group = comfy.hooks.HookGroup()
    group.add(hook)
    key = "layers.0.weight"
    patcher.add_hook_patches(hook, {key: (torch.ones_like(patcher.model.layers[0].weight, device="cpu"),)})
    patcher.register_all_hook_patches(group, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    patch_weight, load = comfy.model_patcher.ModelPatcher.patch_hook_weight_to_device, taken

    def after_the_count(*args, **kwargs):
        nonlocal load
        if load:
            load = False
            other.call("load", model="more", nbytes=120 * MIB)
        return patch_weight(*args, **kwargs)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(comfy.model_patcher.ModelPatcher, "patch_hook_weight_to_device", after_the_count)
        patcher.patch_hooks(group)
    [(cached, _)] = patcher.cached_hook_patches[group].values()
    # 192 MiB were free when it was counted, and 77 are to be left; with 120 gone there is no room.
    assert cached.device == (torch.device("cpu") if taken else card.device)
    assert float(patcher.model.layers[0].weight.flatten()[0]) == 1.0


@pytest.mark.row(32)
@pytest.mark.card(size="256M")
def test_originals_of_patched_weights_are_seen_in_host_memory(card, other):
    import comfy.model_management as mm
    import torch
    patcher = stub_patcher(64 * MIB)
    patcher.weight_inplace_update = True
    patcher.add_patches({"layers.0.weight": (torch.ones_like(patcher.model.layers[0].weight),)})
    mm.load_models_gpu([patcher])
    assert other.call("seen")["here"][3] == 8 * MIB         # one of eight layers


@pytest.mark.row(33)
@pytest.mark.card(size="64M", count=2)
def test_a_copy_for_the_second_gpu_is_admitted_and_seen_there(card, other, tmp_path):
    import comfy.model_management as mm
    import comfy.sd
    first, second = card.devices
    other.call("load", model="idle", nbytes=60 * MIB, device=str(second))
    unet = comfy.sd.load_diffusion_model(str(tiny_models.ensure(["unet"]) / tiny_models.FILES["unet"][0]))
    clone = unet.deepclone_multigpu(new_load_device=second)
    assert other.call("seen", device=f"{second}+meant")["here"][2] == unet.model_size()       # not loaded yet, and no longer free for others' dtypes
    with at_rest(other, tmp_path / "enough"):
        mm.load_models_gpu([unet, clone])
    size = unet.model_size()
    assert (unet.loaded_size(), clone.loaded_size()) == (size, size)
    assert other.call("seen", device=str(first))["here"][0] == size == other.call("seen", device=str(second))["here"][0]
    assert other.call("loaded", model="idle") <= 64 * MIB - size
    assert card.read(0).process(other.pid) is None or card.read(0).process(other.pid).total == 0


@pytest.mark.row(33)
@pytest.mark.card(size="64M", count=2)
def test_a_second_copy_asks_others_for_host_memory_that_is_missing(card, other, tmp_path, monkeypatch):
    import comfy.sd
    from comfy.process_memory import limits, ram, registry
    unet = comfy.sd.load_diffusion_model(str(tiny_models.ensure(["unet"]) / tiny_models.FILES["unet"][0]))
    deadline = time.monotonic() + 60
    while not registry.entries:
        assert time.monotonic() < deadline, "the other process is not found"
        time.sleep(0.01)
    asked = []
    monkeypatch.setattr(ram, "ask", lambda method, missing: asked.append((method, missing)) or 0)
    monkeypatch.setattr(limits, "available", lambda: limits.FLOOR + 10 * MIB)
    unet.deepclone_multigpu(new_load_device=card.devices[1])
    assert asked == [("release_pins", unet.model_size() - 10 * MIB), ("release_ram", unet.model_size() - 10 * MIB)]
