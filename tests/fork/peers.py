"""Both ends of a peer for tests: what runs in the other process, and the provider that stands for it here.

The other process is a real ComfyUI manager on the same virtual card. It does nothing by itself, so what it said last is
what it holds: that is the provider's local state. Name `FILE` to spawn().
"""

import os
import pathlib
import sys
import threading
import time

from comfy_multiproc.testing import ProcessError, stub_patcher

FILE = pathlib.Path(__file__)

# ---- in the other process

held = {}       # name -> patcher
done = []       # what was unloaded here: (name, bytes asked for, pid)


def load(model, nbytes, device=None):
    import comfy.model_management as mm
    held[model] = stub_patcher(nbytes, device)
    mm.load_models_gpu([held[model]])
    return report()


def in_parts(model, can):
    """Whether this model's patcher gives back parts of it."""
    if not can:
        held[model].partially_unload = lambda *args, **kwargs: 0


def report():
    import comfy.model_management as mm
    devices = {}
    for device in getattr(mm, "get_all_torch_devices", lambda: [mm.get_torch_device()])():
        models = [entry for entry in mm.current_loaded_models if entry.device == device]
        cached = int(mm.get_free_memory(device, torch_free_too=True)[1])
        candidates = [{"id": name_of(entry.model), "resident": int(entry.model_loaded_memory()), "size": int(entry.model_memory()),
                       "refs": sys.getrefcount(entry.model)} for entry in models]
        candidates += [{"id": "cache", "kind": "cache", "resident": cached, "size": cached}] if cached else []
        devices[str(device)] = {"resident": sum(int(entry.model_loaded_memory()) for entry in models), "cached": cached, "candidates": candidates}
    return {"devices": devices, "done": done, "listed": [type(entry).__name__ for entry in mm.current_loaded_models]}


def name_of(patcher):
    return next(name for name, known in held.items() if known is patcher)


def release(device, candidate, nbytes):
    import comfy.model_management as mm
    before = driver_free(device)
    done.append((candidate, nbytes, os.getpid()))
    for entry in mm.current_loaded_models[:]:
        if str(entry.device) == device and name_of(entry.model) == candidate and entry.model_unload(nbytes):
            mm.current_loaded_models.remove(entry)
    mm.soft_empty_cache()
    return {"freed": driver_free(device) - before, "report": report()}


def driver_free(device):
    """What every process sees as free: without what this one's allocator keeps."""
    import comfy.model_management as mm
    total, cached = mm.get_free_memory(mm.torch.device(device), torch_free_too=True)
    return int(total - cached)


def unload(device):
    import comfy.model_management as mm
    before = driver_free(device)
    done.append(("unload", device, os.getpid()))
    mm.free_memory(1e30, mm.torch.device(device))
    return {"freed": driver_free(device) - before, "report": report()}


def die(device, candidate, nbytes):
    os._exit(1)


def run_out(first, second):
    """What a node does that runs out of memory."""
    import comfy.model_management as mm
    import torch
    keep = torch.empty(first, dtype=torch.uint8, device=mm.get_torch_device())
    more = torch.empty(second, dtype=torch.uint8, device=mm.get_torch_device())
    return keep.nbytes + more.nbytes


def wait_until(path):
    """Stay in a call, as a process does whose node runs, until a file appears."""
    deadline = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)


# ---- here

def make_peer(name, process, **more):
    """A provider for a CardProcess that runs this file. A function, since the fork's comfy is importable only in a test."""
    from comfy import process_memory as pm

    class CardPeer(pm.ProcessMemoryProvider):
        def __init__(self):
            self.process = process
            self.pid = process.pid
            self.busy = False
            self.claimed = 0
            self.in_use = set()
            self.function = "release"
            self.asked = []
            self._lock = threading.Lock()
            self.said = {"devices": {}, "done": [], "listed": []}
            vars(self).update(more)

        @property
        def name(self):
            return name

        def load(self, model, nbytes, device=None):
            self.said = self.process.call("load", model=model, nbytes=nbytes, **({"device": device} if device else {}))

        def device(self, key):
            return self.said["devices"].get(key, {"resident": 0, "cached": 0, "candidates": []})

        def usage(self, device):
            known = self.device(device)
            return pm.DeviceUsage(resident=known["resident"], cached=known["cached"], fixed=0, scratch=0, claimed=self.claimed,
                                  committed=known["resident"],
                                  reclaimable=known["resident"] + known["cached"], busy=self.busy)

        def candidates(self, device):
            return [pm.Candidate(**{**found, "kind": pm.Kind(found.get("kind", "model"))}, name=found["id"], in_use=found["id"] in self.in_use)
                    for found in self.device(device)["candidates"] if found["resident"]]

        def release(self, request):
            self.asked.append((request.candidate, request.bytes))
            return self._do(request, self.function, candidate=request.candidate, nbytes=request.bytes)

        def unload(self, request):
            self.asked.append(("unload", request.device))
            return self._do(request, "unload")

        def _do(self, request, function, **arguments):
            with self._lock:
                try:
                    answer = self.process.call(function, timeout=request.remaining(), device=request.device, **arguments)
                except ProcessError:
                    if self.process.alive:
                        return pm.Receipt(outcome=pm.Outcome.BUSY)
                    self.said = {**self.said, "devices": {}}
                    return pm.Receipt(outcome=pm.Outcome.GONE)
            self.said = answer["report"]
            outcome = pm.Outcome.FREED if answer["freed"] else pm.Outcome.NOTHING
            return pm.Receipt(outcome=outcome, freed=answer["freed"], resident=self.device(request.device)["resident"])

    return CardPeer()
