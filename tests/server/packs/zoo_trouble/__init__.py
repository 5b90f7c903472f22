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
from server import PromptServer


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


class Text(str):
    pass


def ui_text():
    """A text of a class of its own is a text to the page."""
    return {"more": [Text("words")]}


def ui_object():
    return {"more": [object()]}


def ui_tensor():
    return {"more": [torch.ones(2)]}


def send_object():
    PromptServer.instance.send_sync("zoo", {"it": object()})


def send_preview():
    PromptServer.instance.send_sync(2, "no picture")


def send_bytes():
    PromptServer.instance.send_sync("zoo", b"bytes")


def send_to():
    PromptServer.instance.send_sync("zoo", {}, ["nobody"])


def progress_tensor():
    comfy.utils.ProgressBar(4).update_absolute(torch.tensor(4))


def fork_exit():
    """Forks as scripts do; the process that comes of it is not a second worker."""
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def fork_send():
    pid = os.fork()
    if pid == 0:
        try:
            PromptServer.instance.send_sync("zoo", {})
        except ConnectionError:
            os._exit(5)
        return
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def fork_on():
    """The child has no end of its own."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)


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
        more = globals()[how]()
        return {"ui": {"pid": [os.getpid()], **(more or {})}, "result": (seed,)}


TROUBLES = (kill, crash, leave, odd, hold, oom, fits, oom_text, oom_code, size, hang, loop, swallow, polite, child, fine, ui_text, ui_object, ui_tensor,
            send_object, send_preview, send_bytes, send_to, progress_tensor, fork_exit, fork_send, fork_on)
NODE_CLASS_MAPPINGS = {"ZooTrouble": ZooTrouble}
