"""What runs in a second process that shares memory through the runtime, and in the test's own: both are real ComfyUI managers.

Name `FILE` to spawn().
"""

import contextlib
import gc
import os
import pathlib
import threading

from comfy_multiproc.testing import stub_patcher, tiny_models

FILE = pathlib.Path(__file__)
kept = {}       # name -> what the test holds


def start(who):
    """Be one of several processes from now on; the calling thread is the execution thread."""
    from comfy_multiproc import runtime
    runtime.start(who).execution_thread(None, None)


def stop():
    from comfy_multiproc import runtime
    runtime.stop()


def load(model, nbytes, device=None):
    import comfy.model_management as mm
    kept[model] = stub_patcher(nbytes, device)
    mm.load_models_gpu([kept[model]])
    return kept[model].loaded_size()


def loaded(model):
    return kept[model].loaded_size()


def serve(path, seconds=60):
    """Be idle until a file appears: what others ask for is given."""
    from comfy_multiproc import runtime
    from comfy_multiproc.safepoint import Moment
    here = runtime.current
    woken = threading.Event()
    with here.inbox.waking(woken.set):
        here._set_busy(False)
        for _ in range(int(seconds / 0.05)):
            if os.path.exists(path):
                return
            here.inbox.serve(Moment.IDLE)
            woken.wait(0.05)
            woken.clear()
    raise TimeoutError(f"{path} has not appeared")


# dtype gates

def load_file(file):
    """Load a tiny UNet as UNETLoader does; its weights' dtype and bytes."""
    import comfy.sd
    models = tiny_models.ensure([file])
    patcher = kept[file] = comfy.sd.load_diffusion_model(str(models / tiny_models.FILES[file][0]))
    return str(patcher.model.get_dtype()), patcher.model_size()


def load_12b():
    """Load a checkpoint of twelve thousand million 8-bit weights, of which only the shapes are there; their dtype and bytes."""
    import comfy.model_management as mm
    import comfy.model_patcher
    import torch
    from comfy import process_memory

    @process_memory.for_file
    def load_checkpoint(path):
        dtype = mm.unet_dtype(model_params=12_000_000_000, weight_dtype=torch.float8_e4m3fn)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(12_000_000_000, dtype=dtype, device="meta"), requires_grad=False)
        return comfy.model_patcher.ModelPatcher(model, mm.get_torch_device(), torch.device("cpu"))
    patcher = kept["12b"] = load_checkpoint("12b.safetensors")
    return str(patcher.model.weight.dtype), patcher.model_size()


def drop(model):
    from comfy import process_memory
    del kept[model]
    gc.collect()
    process_memory.changed()


def busy(value):
    """From now on a prompt runs here, or none; it uses what is loaded."""
    from comfy_multiproc import runtime
    runtime.current._loaded = value
    runtime.current._set_busy(value, prompt=value)


# page-locked memory

def driver(path, quota, ceiling):
    """From now on the driver locks `quota` bytes for all processes, and ComfyUI's ceiling for one is `ceiling`."""
    import types

    import comfy.model_management as mm
    import torch
    from comfy.process_memory import limits, pins

    from comfy_multiproc.testing.card.capacity import CapacityFile, CardFull
    file = CapacityFile(path) if os.path.exists(path) else CapacityFile.create(path, [quota])
    sizes = {}

    def register(address, size, flags):
        try:
            file.allocate(0, size)
        except CardFull:
            return 2
        sizes[address] = size
        return 0

    def unregister(address):
        file.release(0, sizes.pop(address))
        return 0
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    limits.groups = types.SimpleNamespace(total=lambda machine: machine, available=lambda machine: machine)
    mm.MAX_PINNED_MEMORY, pins.PIECE = ceiling, 1 << 20
    mm.discard_cuda_async_error = lambda: None


def pin(model, nbytes, active=False):
    """A paged model of which ComfyUI locks one tensor; whether it could."""
    import comfy.model_management as mm
    import torch
    patcher, tensor = stub_patcher(1 << 20), torch.zeros(nbytes, dtype=torch.uint8)
    mm.load_models_gpu([patcher])
    kept[model] = patcher, tensor
    patcher.is_dynamic = lambda: True
    patcher.model.dynamic_pins = {patcher.load_device: {"active": active, "current_prompt": active}}

    def let_go(size, subsets=None):
        if tensor.data_ptr() not in mm.PINNED_MEMORY:
            return 0
        mm.unpin_memory(tensor)
        return nbytes
    patcher.partially_unload_ram = patcher.unregister_inactive_pins = let_go
    return mm.pin_memory(tensor)


def pinned():
    import comfy.model_management as mm
    return [mm.TOTAL_PINNED_MEMORY, len(mm.PINNED_MEMORY)]


# what others see

def seen(device="cpu:0"):
    """What this process reads of each other one: name -> (weights, scratch, claimed, backups) in bytes."""
    from comfy.process_memory import registry
    ram = {entry: held for entry, held, _ in registry.count("ram")}
    return {entry.name: [usage.resident, usage.scratch, usage.claimed, ram[entry].backups] for entry, usage, _ in registry.count("usage", device)}


def outputs():
    """What this process reads of each other one's cached results: name -> bytes."""
    from comfy.process_memory import registry
    return {entry.name: held.outputs for entry, held, _ in registry.count("ram")}


# in the test's own

@contextlib.contextmanager
def at_rest(process, enough):
    """Until the file `enough` appears at the end, the other process is idle and gives what it is asked for."""
    process.begin("serve", path=str(enough))
    yield
    enough.touch()
    process.result()
