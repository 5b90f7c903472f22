"""How many images are done at once beside another process, and what it has given for it by then."""

import contextlib
import sys
import types

import pytest

from comfy_multiproc.testing import tiny_models
from tests.fork.runtimes import at_rest

MIB = 1 << 20


def sample(side):
    """One step of a tiny SD3 at cfg 4 with latents of side x side; what was in each forward: (conds, bytes free before it)."""
    import comfy.model_management as mm
    import comfy.sample
    import comfy.sd
    import torch
    name = "mmdit"
    patcher = comfy.sd.load_diffusion_model(str(tiny_models.ensure([name]) / tiny_models.FILES[name][0]))
    model, forwards = patcher.model, []
    apply_model = model.apply_model

    def counted(x, *args, **kwargs):
        forwards.append((x.shape[0], mm.get_free_memory(patcher.load_device)))
        return apply_model(x, *args, **kwargs)
    model.apply_model = counted
    cond = [[torch.zeros(1, 8, 4096), {"pooled_output": torch.zeros(1, 2048)}]]
    latent = torch.zeros(1, 16, side, side)
    with torch.inference_mode():
        comfy.sample.sample(patcher, torch.randn(latent.shape), 1, 4.0, "euler", "normal", cond, cond, latent, seed=1)
    return forwards, model.memory_required([2, 16, side, side], cond_shapes={}) * 1.5


@pytest.mark.row(6)
@pytest.mark.row(20)
@pytest.mark.card(size="64M")
def test_both_conds_are_one_batch_since_the_idle_model_elsewhere_makes_room_before_the_forward(card, other, tmp_path):
    other.call("load", model="idle", nbytes=48 * MIB)
    with at_rest(other, tmp_path / "enough"):
        forwards, needed = sample(24)
    assert [conds for conds, _ in forwards] == [2]
    assert all(free >= needed for _, free in forwards)
    assert other.call("loaded", model="idle") < 48 * MIB


@pytest.mark.row(6)
@pytest.mark.card(size="64M")
def test_what_a_busy_process_uses_is_not_counted(card, other, tmp_path):
    other.call("load", model="used", nbytes=48 * MIB)
    other.call("busy", value=True)
    forwards, needed = sample(24)
    assert [conds for conds, _ in forwards] == [1, 1]
    assert other.call("loaded", model="used") == 48 * MIB


@pytest.mark.row(6)
@pytest.mark.card(size="64M")
def test_a_promise_that_is_not_kept_makes_the_batch_smaller_instead_of_running_out(card, other, monkeypatch):
    from comfy.process_memory import ladder
    monkeypatch.setattr(ladder, "patience", 0.2)
    other.call("load", model="idle", nbytes=48 * MIB)
    # Its figures say idle, and it comes to no safe point.
    forwards, needed = sample(24)
    assert [conds for conds, _ in forwards] == [1, 1]
    assert other.call("loaded", model="idle") == 48 * MIB


@pytest.mark.row(6)
@pytest.mark.card(size="64M")
def test_the_vae_decodes_as_many_at_once_as_the_idle_process_makes_room_for(card, other, tmp_path):
    import comfy.sd
    import comfy.utils
    import torch
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(tiny_models.ensure(["taesd"]) / tiny_models.FILES["taesd"][0])))
    vae.memory_used_decode = lambda shape, dtype: 10 * MIB
    batches = []
    decode = vae.first_stage_model.decode
    vae.first_stage_model.decode = lambda samples, **kwargs: batches.append(samples.shape[0]) or decode(samples, **kwargs)
    other.call("load", model="idle", nbytes=48 * MIB)
    with at_rest(other, tmp_path / "enough"), torch.inference_mode():
        vae.decode(torch.zeros(4, 4, 8, 8))
    assert batches == [4]       # 40 MiB; 16 were free
    assert other.call("loaded", model="idle") <= 24 * MIB


@pytest.mark.row(6)
@pytest.mark.row(11)
@pytest.mark.card(size="24M")
def test_tiles_and_chunks_are_sized_by_what_the_other_process_leaves(card, other, monkeypatch):
    from comfy.ldm.lightricks.vae import causal_video_autoencoder as ltx

    from comfy import process_memory
    monkeypatch.setattr(ltx, "MIN_VRAM_FOR_CHUNK_SCALING", 6 * MIB)
    monkeypatch.setattr(ltx, "MAX_VRAM_FOR_CHUNK_SCALING", 24 * MIB)
    wanted = card.settings.size * 0.8
    assert process_memory.obtainable(card.device, wanted) == wanted and ltx.get_max_chunk_size(card.device) == ltx.MAX_CHUNK_SIZE
    other.call("load", model="used", nbytes=16 * MIB)
    other.call("busy", value=True)
    budget = process_memory.obtainable(card.device, wanted)
    assert 6 * MIB < budget <= 8 * MIB - card.settings.size // 20       # 24 - 16 without the reserve
    # From 32 MiB for a card of 6 to 128 for one of 24: 6.8 are left.
    assert ltx.MIN_CHUNK_SIZE < ltx.get_max_chunk_size(card.device) <= ltx.MIN_CHUNK_SIZE + 0.81 / 18 * 96 * MIB


@pytest.mark.row(6)
@pytest.mark.row(33)
@pytest.mark.card(size="64M", count=2)
@pytest.mark.parametrize("idle, batches", [(True, [2, 2]), (False, [1, 1, 1, 1])])
def test_on_two_gpus_each_does_as_many_conds_at_once_as_the_idle_process_makes_room_for(card, other, tmp_path, idle, batches):
    import comfy.model_management as mm
    import comfy.sample
    import comfy.sd
    import torch
    for device in card.devices:
        other.call("load", model=f"on {device}", nbytes=48 * MIB, device=str(device))
    other.call("busy", value=not idle)
    patcher = comfy.sd.load_diffusion_model(str(tiny_models.ensure(["mmdit"]) / tiny_models.FILES["mmdit"][0]))
    clone = patcher.deepclone_multigpu(new_load_device=card.devices[1])
    clone.is_multigpu_base_clone = True
    patcher.set_additional_models("multigpu", [clone])
    forwards = []

    def count(model, device):
        apply_model = model.apply_model

        def counted(x, *args, **kwargs):
            forwards.append((str(device), x.shape[0], mm.get_free_memory(device)))
            return apply_model(x, *args, **kwargs)
        model.apply_model = counted
    for owner in (patcher, clone):
        count(owner.model, owner.load_device)
    cond = [[torch.zeros(1, 8, 4096), {"pooled_output": torch.zeros(1, 2048)}]]
    latent = torch.zeros(1, 16, 24, 24)
    with at_rest(other, tmp_path / "enough") if idle else contextlib.nullcontext(), torch.inference_mode():
        comfy.sample.sample(patcher, torch.randn(latent.shape), 1, 4.0, "euler", "normal", cond + cond, cond + cond, latent, seed=1)
    needed = patcher.model.memory_required([2, 16, 24, 24], cond_shapes={}) * 1.5
    assert [conds for _, conds, _ in forwards] == batches and {device for device, *_ in forwards} == {str(device) for device in card.devices}
    assert not idle or all(free >= needed for *_, free in forwards)


@pytest.mark.row(6)
@pytest.mark.card(size="40M", inference=MIB, reserved=MIB)
@pytest.mark.parametrize("idle", [True, False])
def test_a_splat_is_meshed_on_the_card_if_the_idle_process_makes_room(card, other, tmp_path, monkeypatch, idle):
    import comfy.model_management as mm
    import torch
    monkeypatch.setitem(sys.modules, "server", types.SimpleNamespace(PromptServer=None))
    from comfy_extras import nodes_gaussian_splat as nodes
    density, nets, colours, meshed_on, coloured_on = nodes._splat_density, nodes._surface_nets, nodes._sample_vertex_colours_gpu, [], []
    at_work = contextlib.ExitStack()

    def then_the_card_fills(*args, **kwargs):
        grid = density(*args, **kwargs)
        other.call("load", model="more", nbytes=26 * MIB)
        other.call("busy", value=not idle)
        if idle:
            at_work.enter_context(at_rest(other, tmp_path / "enough"))
        assert mm.get_free_memory(card.device) < 6 * 4 * grid[0].numel()        # what ComfyUI wants to be free
        return grid
    monkeypatch.setattr(nodes, "_splat_density", then_the_card_fills)
    monkeypatch.setattr(nodes, "_surface_nets", lambda *args: meshed_on.append(args[-1]) or nets(*args))
    monkeypatch.setattr(nodes, "_sample_vertex_colours_gpu", lambda *args: coloured_on.append(args[-1]) or colours(*args))
    # A ball in the middle of a grid that two faint splats make large.
    chance = torch.Generator().manual_seed(1)
    points = torch.nn.functional.normalize(torch.randn(1, 300, 3, generator=chance), dim=-1) * 0.25
    points[0, 0], points[0, 1], opacities = -1.0, 1.0, torch.ones(1, 300, 1)
    opacities[0, :2] = 0.01
    splat = types.SimpleNamespace(positions=points, scales=torch.full_like(points, 0.04), rotations=torch.tensor([1.0, 0, 0, 0]).expand(1, 300, 4),
                                  opacities=opacities, sh=torch.rand(1, 300, 1, 3, generator=chance), counts=None)
    with at_work, torch.inference_mode():
        _, faces, _ = nodes._gaussian_to_mesh(splat, 0, 80, 2, 0, 0.4, 10, 0.0, 1.0, card.device)
    assert len(faces) > 1000
    assert (meshed_on, coloured_on) == (([card.device], [card.device]) if idle else ([torch.device("cpu")], []))
    assert (other.call("loaded", model="more") < 26 * MIB) is idle
