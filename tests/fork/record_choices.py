"""What one ComfyUI tree chooses where nobody else is known: dtypes, batches, what it does when memory runs out, what it locks.

    python record_choices.py TREE PROJECT OUT.json
"""

import gc
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import sys
import types

tree, project, out = sys.argv[1:]
sys.path[:0] = [tree, project]

from comfy_multiproc.testing import stub_patcher, tiny_models, virtual_card

MIB = 1 << 20
GIB = 1 << 30


def file(name):
    return str(tiny_models.ensure([name]) / tiny_models.FILES[name][0])


def digest(tensor):
    return hashlib.sha256(tensor.detach().to("cpu").contiguous().view(-1).float().numpy().tobytes()).hexdigest()


def dtypes():
    """The dtype of an 8-bit file and of made-up models on cards of several sizes."""
    import comfy.model_management as mm
    import comfy.sd
    import torch
    found = []
    for size in (24, 40, 48):
        with virtual_card(size * MIB):
            patcher = comfy.sd.load_diffusion_model(file("unet_fp8"))
            found.append((size, str(patcher.model.get_dtype()), patcher.model_size(), mm.maximum_vram_for_weights()))
            for params in (-1, MIB, 12 * MIB, 40 * MIB):
                for weights in (None, torch.float8_e4m3fn, torch.bfloat16):
                    found.append(str(mm.unet_dtype(model_params=params, weight_dtype=weights)))
            del patcher
            gc.collect()
    return found


def batches():
    """How many conds and latents are done at once, and the results."""
    import comfy.model_management as mm
    import comfy.sample
    import comfy.sd
    import comfy.utils
    import torch
    found = []
    for size in (24, 64):
        with virtual_card(size * MIB), torch.inference_mode():
            patcher = comfy.sd.load_diffusion_model(file("mmdit"))
            forwards, apply_model = [], patcher.model.apply_model
            patcher.model.apply_model = lambda x, *args, forwards=forwards, apply_model=apply_model, **kwargs: forwards.append(x.shape[0]) or apply_model(x, *args, **kwargs)
            cond = [[torch.ones(1, 8, 4096), {"pooled_output": torch.ones(1, 2048)}]]
            noise = torch.randn(1, 16, 24, 24, generator=torch.Generator().manual_seed(1))
            sampled = comfy.sample.sample(patcher, noise, 1, 4.0, "euler", "normal", cond, cond, torch.zeros_like(noise), seed=1)
            found.append((size, forwards, digest(sampled)))
            vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(file("taesd")))
            vae.memory_used_decode = vae.memory_used_encode = lambda shape, dtype: 10 * MIB
            decoded, decode = [], vae.first_stage_model.decode
            vae.first_stage_model.decode = lambda x, decoded=decoded, decode=decode, **kwargs: decoded.append(x.shape[0]) or decode(x, **kwargs)
            latents = torch.rand(6, 4, 8, 8, generator=torch.Generator().manual_seed(2))
            found.append((decoded, digest(vae.decode(latents)), digest(vae.encode(torch.rand(3, 64, 64, 3, generator=torch.Generator().manual_seed(3))))))
            del patcher, vae, forwards, apply_model, decoded, decode
            mm.unload_all_models()
            gc.collect()
    return found


def out_of_memory():
    """At each site that goes on smaller: how often it tries, and its result, when the first try or two run out of memory."""
    import comfy.model_management as mm
    import pytest
    import torch
    spec = importlib.util.spec_from_file_location("sites", pathlib.Path(__file__).with_name("test_oom_retries.py"))
    sites = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sites)
    found = []
    for site in sites.SITES:
        for fails in (1, 2):
            with virtual_card("128M") as card, pytest.MonkeyPatch.context() as patch, torch.inference_mode():
                owner, name, run = site(card, patch)
                function, calls, inside = getattr(owner, name), [], []

                def operation(*args, function=function, calls=calls, inside=inside, fails=fails, **kwargs):
                    if inside:
                        return function(*args, **kwargs)
                    inside.append(True)
                    try:
                        calls.append([list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)])
                        if len(calls) <= fails:
                            raise mm.OOM_EXCEPTION("CUDA out of memory. Tried to allocate 64.00 MiB.")
                        return function(*args, **kwargs)
                    finally:
                        inside.pop()
                patch.setattr(owner, name, staticmethod(operation) if name.startswith("_run") else operation)
                try:
                    result = digest(run())
                except RuntimeError as error:       # out of memory, or a node's own word for it
                    result = str(error)
                found.append((site.__name__, fails, calls, result))
                mm.unload_all_models()
    return found


def locked():
    """A random sequence of locking and unlocking memory under a driver with a quota, with little left; and the output cache's."""
    import comfy.model_management as mm
    import psutil
    import torch
    from comfy_execution.caching import CacheKeySetID, RAMPressureCache
    chance, found, ranges = random.Random(7), [], {}

    def register(address, size, flags):
        if sum(ranges.values()) + size > 16 * MIB:
            return 2
        ranges[address] = size
        return 0
    left = [8 * GIB]
    mm.discard_cuda_async_error = lambda: None
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0 if ranges.pop(address, 0) else 713)
    psutil.virtual_memory = lambda: types.SimpleNamespace(total=64 * GIB, available=left[0])
    mm.MAX_PINNED_MEMORY = 48 * MIB
    with virtual_card("256M"):
        patchers = []
        for number in range(4):
            patcher, tensor = stub_patcher(MIB), torch.zeros((number + 2) * 4 * MIB, dtype=torch.uint8)
            mm.load_models_gpu([patcher])
            patcher.is_dynamic = lambda: True
            patcher.model.dynamic_pins = {patcher.load_device: {"active": number == 3, "current_prompt": number > 1}}

            def let_go(size, subsets=None, tensor=tensor):
                return tensor.nbytes if mm.unpin_memory(tensor) else 0
            patcher.partially_unload_ram = patcher.unregister_inactive_pins = let_go
            patchers.append((patcher, tensor))
        for _ in range(300):
            left[0] = chance.randrange(4 * GIB)
            patcher, tensor = chance.choice(patchers)
            size = chance.randrange(64 * MIB)
            name, what = chance.choice([
                ("pin", lambda tensor=tensor: mm.pin_memory(tensor)), ("unpin", lambda tensor=tensor: mm.unpin_memory(tensor)),
                ("budget", lambda size=size: mm.ensure_pin_budget(size, evict_active=size % 2 == 0)), ("free", lambda size=size: mm.free_pins(size, evict_active=size % 2 == 0)),
                ("registrations", lambda size=size: mm.free_registrations(size)), ("registerable", lambda size=size: mm.ensure_pin_registerable(size)),
                ("ram", lambda: (mm.get_free_memory(torch.device("cpu")), mm.get_total_memory(torch.device("cpu"))))])
            found.append((name, what(), mm.TOTAL_PINNED_MEMORY, sorted(ranges.values())))
        for _ in range(40):
            cache = RAMPressureCache(CacheKeySetID)
            cache.generation = 5
            for number in range(6):
                key = str(number)
                tensor = torch.zeros(chance.randrange(MIB))
                cache.cache[key] = types.SimpleNamespace(outputs=chance.choice([[[tensor]], [[{"samples": tensor}]], [["text"]], [[tensor, [tensor]]]]))
                cache.used_generation[key], cache.timestamps[key], cache.children[key] = chance.randrange(6), float(chance.randrange(4)), []
            left[0] = 3 * GIB
            freed = cache.ram_release(chance.randrange(6 * GIB), free_active=chance.random() < 0.5)
            found.append((freed, sorted(cache.cache)))
    return found


def main():
    import comfy.cli_args
    comfy.cli_args.args.cpu = True
    import comfy.model_management as mm
    gc.disable()
    gc.freeze()
    choices = {function.__name__: function() for function in (dtypes, batches, out_of_memory, locked)}
    with open(out, "w") as f:
        json.dump({"process_memory": hasattr(mm, "process_memory"), "choices": choices}, f)
    sys.stdout.flush()
    os._exit(0)


main()
