"""A pack whose nodes go wrong, one way each."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch

import comfy.model_management
import comfy.utils


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.file = open(os.devnull)


def kill():
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def leave():
    os._exit(7)


def odd():
    raise Odd("this", "that")


def oom():
    kept = torch.zeros(1 << 20)
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {kept.nbytes} bytes")


def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
    ctypes.CDLL(None).pause()


def loop():
    for _ in range(6000):
        time.sleep(0.01)


def swallow():
    bar = comfy.utils.ProgressBar(100)
    try:
        for i in range(3000):
            time.sleep(0.01)
            bar.update_absolute(i, 3000)
    except:
        pass


def polite():
    bar = comfy.utils.ProgressBar(100)
    try:
        for i in range(3000):
            time.sleep(0.01)
            bar.update_absolute(i, 3000)
    except Exception:
        pass


def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    os.write(1, f"zoo child {process.pid}\n".encode())
    process.wait()


def fine():
    pass


class ZooTrouble:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"how": ([f.__name__ for f in TROUBLES],), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, how, seed):
        globals()[how]()
        return {"ui": {"pid": [os.getpid()]}, "result": (seed,)}


TROUBLES = (kill, crash, leave, odd, oom, hang, loop, swallow, polite, child, fine)
NODE_CLASS_MAPPINGS = {"ZooTrouble": ZooTrouble}
