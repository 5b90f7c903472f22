"""What the workers of test_worker_life.py do, in a real ComfyUI process."""

import os
import sys


def load(context):
    for name, job in JOBS.items():
        context.on_execution(name, lambda request, job=job: request.reply(job(request.body)))
    return os.getpid()


def about(_):
    import comfy.model_management as mm
    import folder_paths
    import nodes
    import torch
    import utils.install_util
    from comfy.cli_args import args
    return {
        "args": {name: getattr(args, name) for name in ("cpu", "reserve_vram", "disable_smart_memory", "base_directory")},
        "reserved": mm.EXTRA_RESERVED_VRAM, "vram_state": mm.vram_state.name, "device": str(mm.get_torch_device()),
        "folders": [folder_paths.base_path, folder_paths.get_folder_paths("checkpoints")],
        "nodes": [name in nodes.NODE_CLASS_MAPPINGS for name in ("KSampler", "UpscaleModelLoader")],
        "utils": utils.install_util.__file__, "main": getattr(sys.modules["__main__"], "__file__", None),
        "inference": torch.is_inference_mode_enabled(), "total": mm.get_total_memory(mm.get_torch_device()), "pid": os.getpid(),
    }


def oom(how):
    import torch
    if how == "class":
        raise torch.cuda.OutOfMemoryError("x")
    if how == "code":
        error = torch.AcceleratorError("the device is unhappy")
        error.error_code = 2
        raise error
    raise RuntimeError("needs 2.00 GiB")


def hold(mib):
    """Models of so many MiB, loaded with ComfyUI's own manager."""
    import comfy.model_management as mm
    from comfy_multiproc.testing import stub_patcher
    JOBS["held"] = stub_patcher(mib << 20)
    mm.load_models_gpu([JOBS["held"]])
    return os.getpid()


def allocate(mib):
    """Fails with the last of several tensors; what the earlier ones hold hangs on the frame."""
    import comfy.model_management as mm
    import torch
    made = []
    for size in mib:
        made.append(torch.ones(size << 20, dtype=torch.uint8, device=mm.get_torch_device()))
    return len(made)


def wait_for_interrupt(began):
    import time

    import comfy.model_management as mm
    open(began, "w").close()
    for _ in range(3000):
        time.sleep(0.01)
        try:
            mm.throw_exception_if_processing_interrupted()
        except Exception:
            pass    # as packs do it; the interrupt is not one
    return "nobody interrupted it"


JOBS = {f.__name__: f for f in (about, oom, hold, allocate, wait_for_interrupt)}
