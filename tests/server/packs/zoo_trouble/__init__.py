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
    time.sleep(0.5)
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    time.sleep(0.5)
    ctypes.string_at(0)


def leave():
    time.sleep(0.5)
    os._exit(7)


def odd():
    raise Odd("this", "that")


def hold():
    """Have a model on the card that stays there."""
    from comfy_multiproc.testing import stub_patcher
    hold.model = stub_patcher(32 << 20)
    comfy.model_management.load_models_gpu([hold.model])


def oom():
    device = comfy.model_management.get_torch_device()
    kept = [torch.zeros(200 << 20, dtype=torch.uint8, device=device)]
    kept.append(torch.zeros(200 << 20, dtype=torch.uint8, device=device))


def fits():
    device = comfy.model_management.get_torch_device()
    kept = [torch.zeros(size << 20, dtype=torch.uint8, device=device) for size in (200, 100)]
    assert len(kept) == 2


def oom_text():
    raise torch.cuda.OutOfMemoryError("x")


def oom_code():
    error = torch.AcceleratorError("the device is unhappy")
    error.error_code = 2
    raise error


def size():
    raise RuntimeError("the model needs 2.00 GiB")


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
        time.sleep(1)


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


TROUBLES = (kill, crash, leave, odd, hold, oom, fits, oom_text, oom_code, size, hang, loop, swallow, polite, child, fine)
NODE_CLASS_MAPPINGS = {"ZooTrouble": ZooTrouble}
