"""A pack whose node stays busy with memory on the card: in Python, in native code that keeps the interpreter's lock, in Python with a
pool of processes. Each copy of it has a node of its own."""

import ctypes
import multiprocessing
import os
import pathlib
import time

import comfy.model_management
import torch

NAME = pathlib.Path(__file__).parent.name


class Life:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"how": (["fine", "loop", "native", "pool"],), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, how, seed):
        held = torch.ones(1 << 20, device=comfy.model_management.get_torch_device())
        pool = multiprocessing.Pool(2) if how == "pool" else None
        pids = [os.getpid(), *(pool.map(pid_of, range(2), 1) if pool else ())]
        os.write(1, f"{NAME} {how} {' '.join(map(str, pids))}\n".encode())
        if how in ("loop", "pool"):
            while True:
                time.time()
        if how == "native":
            ctypes.PyDLL(None).sleep(600)
        return {"ui": {"pid": [os.getpid()], "held": [held.nbytes]}, "result": (seed,)}


def pid_of(_):
    time.sleep(0.2)
    return os.getpid()


NODE_CLASS_MAPPINGS = {NAME: Life}
