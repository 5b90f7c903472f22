"""How the pager was started, what it was called for, and on which thread."""

import os
import sys
import threading

lib = None
devctxs = []
LIMIT = int(os.environ.get("PAGER_LIMIT", 2 << 20))     # bytes of weights that a process keeps on the card
started = []            # [function, arguments, whether torch was there]
counts = {}             # function -> calls
threads = {}            # function -> ids of the threads that called it


def note(function):
    counts[function] = counts.get(function, 0) + 1
    threads.setdefault(function, set()).add(threading.get_ident())


def init(implementation=None, simple_vram_headroom=None, nvml_pressure=False):
    global lib
    started.append(["init", [implementation, simple_vram_headroom, nvml_pressure], "torch" in sys.modules])
    lib = object()
    return True


def init_devices(device_ids):
    if lib is None:
        return False
    devctxs[:] = [list(device) if isinstance(device, tuple) else [device, 0] for device in device_ids]
    started.append(["init_devices", list(devctxs), "torch" in sys.modules])
    _be_the_driver()
    return True


def get_devctx(device_id):
    return next(context for context in devctxs if context[0] == device_id)


def get_total_vram_usage():
    from . import model_vbar
    return sum(vbar.loaded_size() for vbar in model_vbar.vbars)


def analyze():
    note("analyze")


def deinit():
    pass


def _level():
    pass


set_log_none = set_log_critical = set_log_error = set_log_warning = set_log_info = set_log_debug = set_log_detail = _level
registered = {}         # address -> bytes that are page-locked


class Driver:
    def cudaHostRegister(self, address, size, flags):
        note("cudaHostRegister")
        registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        note("cudaHostUnregister")
        registered.pop(address)
        return 0


def _be_the_driver():
    """Host memory can be page-locked, and what is paged is beside torch's allocator."""
    import comfy.model_management
    import torch
    driver, stats = Driver(), torch.npu.memory_stats
    torch.cuda.cudart = lambda: driver
    comfy.model_management.MAX_PINNED_MEMORY = 512 << 20

    def memory_stats(device=None):
        paged = get_total_vram_usage()
        return {name: value - paged if name.endswith(".current") else value for name, value in stats(device).items()}
    torch.npu.memory_stats = memory_stats
