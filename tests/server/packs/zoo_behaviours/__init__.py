"""Nodes that do, in whichever process they are in, what ComfyUI's memory management does there, and say how it went."""

import contextlib
import hashlib
import os
import sys
import threading
import time
import types

import comfy.cli_args
import comfy.memory_management
import comfy.model_management as mm
import comfy.model_patcher
import comfy.model_prefetch
import comfy.sd
import comfy.utils
import comfy_aimdo.control as pager
import folder_paths
import torch

torch.backends.cudnn.benchmark = True       # as careless packs do it at their import


def _replace_cast_to():
    original = mm.cast_to
    mm.cast_to = lambda *args, **kwargs: original(*args, **kwargs)


_replace_cast_to()      # which ComfyUI does not let packs do


def _as_on_a_card(name, module):
    """Let ComfyUI's policy for cuDNN find a card, and nothing else."""
    function = getattr(module, name)
    setattr(module, name, lambda: sys._getframe(1).f_code.co_name == "set_cudnn_benchmark" or function())


_as_on_a_card("is_available", torch.cuda)
_as_on_a_card("is_available", torch.backends.cudnn)

kept = types.SimpleNamespace(mapping=None)


class Node:
    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "zoo"
    OUTPUT_NODE = True
    INPUTS = {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), **cls.INPUTS}, "optional": {"after": ("*",)}}

    def run(self, seed, after=None, **inputs):
        return {"ui": {"said": [{"pid": os.getpid(), **self.say(**inputs)}]}}


class ZooLoad(Node):
    INPUTS = {"ckpt_name": ("STRING", {"default": ""})}
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    OUTPUT_NODE = False

    def run(self, seed, ckpt_name, after=None):
        return comfy.sd.load_checkpoint_guess_config(checkpoint(ckpt_name), output_vae=True, output_clip=True)[:3]


class ZooPatch(Node):
    """A LoRA for every weight of the diffusion model, in forwards or baked into the weights."""
    INPUTS = {"model": ("MODEL",), "baked": ("BOOLEAN", {"default": False})}
    RETURN_TYPES = ("MODEL",)
    OUTPUT_NODE = False

    def run(self, seed, model, baked, after=None):
        model = model.get_non_dynamic_delegate() if baked else model.clone()
        random = torch.Generator().manual_seed(seed)
        weights = {name: w for name, w in model.model_state_dict().items() if name.startswith("diffusion_model.") and name.endswith(".weight")}
        model.add_patches({name: ("diff", (torch.randn(w.shape, generator=random) * 0.05,)) for name, w in weights.items() if w.ndim == 2}, 0.7)
        return (model,)


class ZooDigest(Node):
    INPUTS = {"latent": ("LATENT",)}

    def say(self, latent):
        return {"digest": hashlib.sha256(latent["samples"].cpu().contiguous().numpy().tobytes()).hexdigest()[:16]}


class ZooPaged(Node):
    """How a model that has been sampled is paged."""
    INPUTS = {"model": ("MODEL",)}

    def say(self, model):
        return {"dynamic": model.is_dynamic(), "loaded": model.loaded_size(), "size": model.model_size(),
                "paged": pager.get_total_vram_usage(), "counts": getattr(pager, "counts", {}),
                "pinned": [mm.TOTAL_PINNED_MEMORY, sum(getattr(pager, "registered", {}).values())],
                "patched": sum(getattr(m, "weight_lowvram_function", None) is not None for m in model.model.modules())}


class ZooThreads(Node):
    """Which functions of the pager were called on another thread than this one."""

    def say(self):
        here = threading.get_ident()
        return {"called": sorted(pager.threads), "elsewhere": sorted(name for name, ids in pager.threads.items() if ids - {here})}


class ZooResolved(Node):
    """What has become of the command line and the environment."""

    def say(self):
        args = {name: repr(sorted(map(str, value)) if isinstance(value, set) else value) for name, value in vars(comfy.cli_args.args).items()}
        return {"args": args, "streams": mm.NUM_STREAMS, "pinning": mm.MAX_PINNED_MEMORY, "vram_state": mm.vram_state.name,
                "reserved": mm.EXTRA_RESERVED_VRAM, "dynamic": [comfy.memory_management.aimdo_enabled, comfy.model_patcher.CoreModelPatcher.__name__],
                "smart": not mm.DISABLE_SMART_MEMORY, "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "pager": getattr(pager, "started", None),
                "total": mm.get_total_memory(mm.get_torch_device()), "places": places(), "dtypes": dtypes(), "attention": [mm.pytorch_attention_enabled(), mm.pytorch_attention_flash_attention()],
                "benchmark": torch.backends.cudnn.benchmark, "cast_to": own_cast_to()}


class ZooHook(Node):
    """Replace a function of ComfyUI that it guards, while a prompt runs; what it was before, and is then."""

    def say(self):
        before = own_cast_to()
        _replace_cast_to()
        return {"before": before, "after": own_cast_to()}


class ZooDirty(Node):
    """Leave behind what is to be gone after a node: a mapping whose pages are in memory, cast buffers, a prefetch queue."""
    INPUTS = {"ckpt_name": ("STRING", {"default": ""}), "fail": ("BOOLEAN", {"default": False})}

    def say(self, ckpt_name, fail):
        kept.tensors = comfy.utils.load_torch_file(checkpoint(ckpt_name))
        storage = next(t.untyped_storage() for t in kept.tensors.values() if hasattr(t.untyped_storage(), "_comfy_tensor_mmap_refs"))
        kept.mapping = storage._comfy_tensor_mmap_refs[0].get()
        sum(float(t.float().sum()) for t in kept.tensors.values())
        mm.mark_mmap_dirty(storage)
        mm.STREAM_CAST_BUFFERS[None] = torch.empty(1 << 20, dtype=torch.int8, device=mm.get_torch_device())
        comfy.model_prefetch.PREFETCH_QUEUES.append([None])
        if fail:
            raise RuntimeError("as asked")
        return left_behind()


class ZooTouch(Node):
    """Load a file, read all of it and keep it."""
    INPUTS = {"ckpt_name": ("STRING", {"default": ""})}

    def say(self, ckpt_name):
        kept.touched = comfy.utils.load_torch_file(checkpoint(ckpt_name))
        return {"total": sum(float(t.float().sum()) for t in kept.touched.values())}


class ZooLeft(Node):
    """What an earlier node has left behind."""

    def say(self):
        return left_behind()


class ZooKeep(Node):
    """Whether a model counts as one of the running prompt; `path` appears when it does not any more."""
    INPUTS = {"model": ("MODEL",), "path": ("STRING", {"default": ""})}

    def say(self, model, path):
        state = model.model.dynamic_pins[model.load_device]

        def watch():
            deadline = time.monotonic() + 60
            while state["current_prompt"] and time.monotonic() < deadline:
                time.sleep(0.01)
            if not state["current_prompt"]:
                open(path, "w").close()
        threading.Thread(target=watch, daemon=True).start()
        return {"marked": state["current_prompt"]}


class ZooFloor(Node):
    """Bytes that stay free when memory is page-locked."""

    def say(self):
        asked = []
        plenty = 1 << 40
        memory = types.SimpleNamespace(total=plenty, available=plenty, percent=0)
        with contextlib.ExitStack() as stack:
            change = lambda owner, name, value: stack.enter_context(changed(owner, name, value))
            change(mm.psutil, "virtual_memory", lambda: memory)
            change(mm, "free_pins", lambda size, **kwargs: asked.append(size) or 0)
            change(mm, "MAX_PINNED_MEMORY", plenty * 4)
            if "comfy.process_memory.limits" in sys.modules:
                from comfy.process_memory import limits, pins, ram
                change(limits, "groups", types.SimpleNamespace(total=lambda machine: machine, available=lambda machine: machine))
                change(ram, "FRESH", -1.0)
                change(pins, "elsewhere", lambda: (0, 0))       # what others have reserved is beside the floor
            granted = mm.ensure_pin_budget(plenty)
        return {"granted": granted, "floor": asked[0] - mm.PIN_PRESSURE_HYSTERESIS if asked else None}


class ZooHeadroom(Node):
    """The results cache that is asked before memory is locked; `own`: set one, ask it, and take it away again."""
    INPUTS = {"own": ("BOOLEAN", {"default": False})}

    def say(self, own):
        memory = comfy.memory_management
        before = [memory.RAM_CACHE_HEADROOM, getattr(memory.extra_ram_release_callback, "__qualname__", None)]
        if not own:
            return {"here": before}
        asked = []
        memory.set_ram_cache_release_state(lambda target, free_active: asked.append([target, free_active]) or 5, 123 << 20)
        try:
            given = memory.extra_ram_release(7)
            return {"here": before, "asked": asked, "given": given, "set": memory.RAM_CACHE_HEADROOM}
        finally:
            memory.set_ram_cache_release_state(None, 0)


class ZooSlices(Node):
    """Read every tensor of a file straight to the card and to host memory; how many were read so, and whether they are the same."""
    INPUTS = {"ckpt_name": ("STRING", {"default": ""})}

    def say(self, ckpt_name):
        import comfy_aimdo.host_buffer
        import comfy_aimdo.torch
        tensors = comfy.utils.load_torch_file(checkpoint(ckpt_name))
        read = {"card": 0, "both": 0}
        for tensor in tensors.values():
            expected = tensor.clone()
            card = torch.empty_like(tensor, device=mm.get_torch_device())
            read["card"] += comfy.memory_management.read_tensor_file_slice_into(tensor, None, destination2=card) and card.cpu().equal(expected)
            card.zero_()
            buffer = comfy_aimdo.host_buffer.HostBuffer(0, 0, tensor.nbytes)
            buffer.extend(tensor.nbytes)
            host = comfy_aimdo.torch.hostbuf_to_tensor(buffer)
            host.untyped_storage()._comfy_hostbuf = buffer
            host = host.view(tensor.dtype).view(tensor.shape)
            done = comfy.memory_management.read_tensor_file_slice_into(tensor, host, destination2=card)
            read["both"] += done and host.equal(expected) and card.cpu().equal(expected)
        return {**read, "tensors": len(tensors)}


class ZooMakeRoom(Node):
    """Have everything on the card make room, as a load of that size would."""

    def say(self):
        device = mm.get_torch_device()
        mm.free_memory(mm.get_total_memory(device), device)
        return {"free": mm.get_free_memory(device)}


class ZooFits(Node):
    """Load and ask for what there is room for, many times."""
    INPUTS = {"mib": ("INT", {"default": 32})}

    def say(self, mib):
        from comfy_multiproc.testing import stub_patcher
        device = mm.get_torch_device()
        kept.first = stub_patcher(mib << 20)
        mm.load_models_gpu([kept.first])
        sizes = set()
        for _ in range(10):
            kept.second = stub_patcher(mib << 20)
            mm.load_models_gpu([kept.second])
            mm.free_memory(mib << 20, device)
            sizes.add((kept.first.loaded_size() >> 20, kept.second.loaded_size() >> 20))
        return {"sizes": sorted(sizes)}


class ZooOutOfMemory(Node):
    def say(self):
        device = mm.get_torch_device()
        return {"got": torch.empty(2 * mm.get_total_memory(device), dtype=torch.uint8, device=device).nbytes}


def own_cast_to():
    """Whether it is ComfyUI's own."""
    return mm.cast_to.__code__.co_filename.endswith("model_management.py")


def places():
    """Where ComfyUI puts what, by the name of the function that says so."""
    names = ("get_torch_device", "unet_offload_device", "text_encoder_device", "text_encoder_offload_device", "text_encoder_initial_device",
             "vae_device", "vae_offload_device", "intermediate_device")
    arguments = {"text_encoder_initial_device": (mm.text_encoder_device(), mm.text_encoder_offload_device(), 1 << 20)}
    return {**{name: str(getattr(mm, name)(*arguments.get(name, ()))) for name in names},
            "unet_inital_load_device": [str(mm.unet_inital_load_device(size, torch.float16)) for size in (1 << 20, 1 << 40)]}


def dtypes():
    """What ComfyUI computes in and keeps weights in, for a small and a huge model."""
    device = mm.get_torch_device()
    every = [torch.float16, torch.bfloat16, torch.float32]
    return {name: [str(choice) for choice in choices] for name, choices in {
        "unet": [mm.unet_dtype(device, size, every, weight_dtype=dtype) for size in (1 << 20, 1 << 40) for dtype in (*every, torch.float8_e4m3fn)],
        "cast": [mm.unet_manual_cast(dtype, device, every) for dtype in (*every, torch.float8_e4m3fn)],
        "vae": [mm.vae_dtype(device, every)], "text encoder": [mm.text_encoder_dtype(device)], "intermediate": [mm.intermediate_dtype()],
        "gates": [mm.should_use_fp16(device), mm.should_use_bf16(device), mm.supports_fp8_compute(device)]}.items()}


def checkpoint(name):
    return folder_paths.get_full_path_or_raise("checkpoints", name)


def left_behind():
    return {"dirty": len(mm.DIRTY_MMAPS), "buffers": len(mm.STREAM_CAST_BUFFERS), "queues": len(comfy.model_prefetch.PREFETCH_QUEUES),
            "bounced": pager.counts.get("bounce", 0), "in memory": resident(kept.mapping) > 0}


def resident(address):
    """Bytes of the mapping at an address that are in memory."""
    if address is None:
        return 0
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                inside = begin <= address < end
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


NODE_CLASS_MAPPINGS = {name: cls for name, cls in list(globals().items()) if name.startswith("Zoo")}
