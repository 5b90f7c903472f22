"""At each site that goes on smaller when memory runs out: an idle model of another process goes first, and the same size is
tried once more, with the same result as where there was room from the start."""

import pytest

from comfy_multiproc.testing import stub_patcher, tiny_models

MIB = 1 << 20
HELD = 96 * MIB         # by the other process's model, of a card of 128 MiB
WORKSPACE = 64 * MIB    # what the operation at the site needs for a moment


@pytest.fixture
def other(other):
    """Another process with a model of 96 MiB."""
    assert other.call("load", model="idle", nbytes=HELD) == HELD
    return other


# the sites: what needs the workspace, and how to run it

def attention_inputs(card):
    import torch
    return [torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(seed)).to(card.device) for seed in range(3)]


def sub_quadratic(card, patch):
    import torch
    from comfy.ldm.modules import sub_quadratic_attention as module
    q, k, v = attention_inputs(card)
    return torch.Tensor, "softmax", lambda: module._get_attention_scores_no_kv_chunking(q, k, v, 0.125, False, None)


def vae_slices(card, patch):
    import torch
    from comfy.ldm.modules.diffusionmodules import model
    q, k, v = attention_inputs(card)
    return torch.nn.functional, "softmax", lambda: model.slice_attention(q, k, v)


def vae_attention(card, patch):
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules import model
    q, k, v = attention_inputs(card)
    return comfy.ops, "scaled_dot_product_attention", lambda: model.pytorch_attention(q, k, v)


def split_attention(card, patch):
    import torch
    from comfy.ldm.modules import attention
    q, k, v = attention_inputs(card)
    return torch.Tensor, "softmax", lambda: attention.attention_split(q, k, v, heads=1)


def vae(kind):
    import comfy.sd
    import comfy.utils
    path = tiny_models.ensure([kind]) / tiny_models.FILES[kind][0]
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))


def vae_decode(card, patch):
    import torch
    found = vae("taesd")
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    return found.first_stage_model, "decode", lambda: found.decode(latent)


def vae_decode_with_noise(card, patch):
    import torch
    owner, name, run = vae_decode(card, patch)
    plain = owner.decode
    owner.decode = lambda *args, **kwargs: plain(*args, **kwargs) + torch.rand(1).item()

    def seeded():
        torch.manual_seed(5)
        return run()
    return owner, name, seeded


def vae_encode(card, patch):
    import torch
    found = vae("taesd")
    pixels = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    return found.first_stage_model, "encode", lambda: found.encode(pixels)


class Twice:
    """An upscale model."""
    scale = 2

    def __init__(self):
        self.patcher = stub_patcher(MIB)

    def __call__(self, x):
        return x.repeat_interleave(2, -1).repeat_interleave(2, -2)


def upscale(card, patch):
    import comfy.model_management as mm
    import comfy.utils
    import torch
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel
    load = mm.load_models_gpu
    patch.setattr(mm, "load_models_gpu", lambda models, memory_required=0: load(models))    # the estimate is for a card of GiBs
    model, image = Twice(), torch.rand(1, 16, 16, 3, generator=torch.Generator().manual_seed(1))
    return comfy.utils, "tiled_scale", lambda: ImageUpscaleWithModel.execute(model, image).result[0]


def colour_transfer(card, patch):
    import torch
    from comfy_extras.nodes_seedvr import SeedVR2PostProcessing as node
    frames = [torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    return node, "_run_color_transfer_chunks", lambda: node._color_transfer_chunked(*frames, torch.device("cpu"), "wavelet")


def interpolate(card, several):
    import torch
    from comfy_extras.nodes_frame_interpolation import FrameInterpolate
    patcher = stub_patcher(MIB)
    model = patcher.model
    patcher.model_dtype = lambda: torch.float32
    model.memory_used_forward = lambda shape, dtype: MIB
    model.extract_features = lambda frame: frame.mean()

    def one(img0, img1, timestep, cache):
        return img0 * (1 - timestep) + img1 * timestep
    model.forward = one
    if several:
        model.forward_multi_timestep = lambda img0, img1, times, cache: torch.cat([img0 * (1 - t) + img1 * t for t in times])
    images = torch.rand(3, 16, 16, 3, generator=torch.Generator().manual_seed(1))
    return model, "forward_multi_timestep" if several else "forward", lambda: FrameInterpolate.execute(patcher, images, 4).result[0]


def interpolate_at_once(card, patch):
    return interpolate(card, True)


def interpolate_in_batches(card, patch):
    return interpolate(card, False)


SITES = [sub_quadratic, vae_slices, vae_attention, split_attention, vae_decode, vae_decode_with_noise, vae_encode, upscale, colour_transfer,
         interpolate_at_once, interpolate_in_batches]


SUCCEEDS = {"interpolate_at_once": 2, "interpolate_in_batches": 2}      # times without pressure: two pairs of frames


def needs_workspace(patch, card, owner, name):
    """From now on the operation takes the workspace from the card for a moment; gives the list of its calls."""
    import torch
    function, calls, inside = getattr(owner, name), [], []

    def operation(*args, **kwargs):
        if inside:      # the card's modes look functions up by name
            return function(*args, **kwargs)
        inside.append(True)
        try:
            calls.append(name)
            torch.empty(WORKSPACE, dtype=torch.uint8, device=card.device)
            return function(*args, **kwargs)
        finally:
            inside.pop()
    patch.setattr(owner, name, staticmethod(operation) if name.startswith("_run") else operation)
    return calls


@pytest.mark.row(19)
@pytest.mark.card(size="128M")
def test_with_an_idle_model_elsewhere_every_site_succeeds_at_the_same_size(card, other, tmp_path):
    """One after the other in one pair of processes, since importing ComfyUI takes longest."""
    import comfy.model_management as mm
    import torch

    from tests.fork.runtimes import at_rest
    for number, site in enumerate(SITES):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            owner, name, run = site(card, patch)
            unpressed = run()
            calls = needs_workspace(patch, card, owner, name)
            assert other.call("load", model="idle", nbytes=HELD) == HELD
            with at_rest(other, tmp_path / str(number)):
                result = run()
            assert torch.equal(result.to("cpu"), unpressed.to("cpu")), site
            assert len(calls) == SUCCEEDS.get(site.__name__, 1) + 1, site       # one failed, nothing was done smaller
            assert other.call("loaded", model="idle") < HELD, site
            mm.unload_all_models()


@pytest.mark.row(19)
@pytest.mark.card(size="128M")
def test_when_nobody_gives_the_site_goes_on_smaller_as_it_does_alone_and_asks_once(card, other, monkeypatch):
    import torch
    from comfy.process_memory import ladder, retry
    from comfy_multiproc import runtime
    monkeypatch.setattr(retry, "PAUSE", 0.0)
    monkeypatch.setattr(ladder, "patience", 0.2)
    asked = []
    make_room = ladder.make_room
    monkeypatch.setattr(ladder, "make_room", lambda *args: asked.append(args) or make_room(*args))
    with torch.inference_mode():
        owner, name, run = vae_slices(card, monkeypatch)
        calls = needs_workspace(monkeypatch, card, owner, name)
        # The other process is alive, at no safe point, and keeps its model.
        with pytest.raises(torch.OutOfMemoryError):
            run()
        assert len(asked) == 1 and other.call("loaded", model="idle") == HELD
        together = len(calls)
        runtime.stop()
        with pytest.raises(torch.OutOfMemoryError):
            run()
        assert len(calls) - together == together == 8       # whole, and 2, 4, 8, ... 128 slices
