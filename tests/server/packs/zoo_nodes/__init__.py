"""Nodes in the older style, with everything that such nodes do to ComfyUI's types and scheduler."""

import asyncio
import os
import threading
import time
from dataclasses import dataclass

import torch
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder

import comfy.utils

from . import helper


class Anything(str):
    def __ne__(self, other):
        return False


class EveryInput(dict):
    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return (Anything("*"),)


class EveryOutput(tuple):
    def __getitem__(self, index):
        return tuple.__getitem__(self, min(index, len(self) - 1)) if isinstance(index, int) else tuple.__getitem__(self, index)


ANY = Anything("*")


class Node:
    FUNCTION = "run"
    CATEGORY = "zoo/older"
    RETURN_TYPES = ()


def node(**inputs):
    return classmethod(lambda cls: inputs)


class ZooTricks(Node):
    """Any number of inputs and outputs of any type."""
    DESCRIPTION = "Accepts whatever is linked to it."
    DEPRECATED = True
    INPUT_TYPES = node(required={"mode": (["a", "b"], {"default": "b", "tooltip": "which"}), "big": ("INT", {"max": 0xffffffffffffffff})},
                       optional=EveryInput({"first": ("IMAGE",)}), hidden={"id": "UNIQUE_ID"})
    RETURN_TYPES = EveryOutput((ANY,))
    RETURN_NAMES = ("whatever",)
    OUTPUT_TOOLTIPS = ("Whatever comes.",)
    OUTPUT_NODE = True

    def run(self, mode, big, id=None, **kwargs):
        shapes = {k: list(getattr(v, "shape", [])) for k, v in kwargs.items()}
        return {"ui": {"inputs": [sorted(kwargs)], "shapes": [shapes], "id": [id], "pid": [os.getpid()]}, "result": (mode,) * 8}


class ZooChanged(Node):
    INPUT_TYPES = node(required={"seed": ("INT", {"default": 0}), "how": (["seed", "nan", "raise"],)}, optional={"image": ("IMAGE",)})
    RETURN_TYPES = ("INT",)
    OUTPUT_NODE = True
    asked = []

    @classmethod
    def IS_CHANGED(cls, seed, how, **kwargs):
        cls.asked.append({"seed": seed, "how": how, **{k: repr(v) for k, v in kwargs.items()}})
        if how == "raise":
            raise RuntimeError("does not know")
        return float("nan") if how == "nan" else seed

    def run(self, seed, how, image=None):
        asked, ZooChanged.asked = ZooChanged.asked, []
        return {"ui": {"asked": [asked]}, "result": (seed,)}


class ZooValidated(Node):
    INPUT_TYPES = node(required={"seed": ("INT", {"default": 0, "max": 5}), "name": ("STRING", {"default": ""})})
    OUTPUT_NODE = True

    @classmethod
    def VALIDATE_INPUTS(cls, seed, name):
        return True if seed != 13 else f"13 is unlucky for {name}"

    def run(self, seed, name):
        return {"ui": {"seed": [seed]}}


class ZooLazySwitch(Node):
    INPUT_TYPES = node(required={"pick": (["a", "b"],), "a": ("INT", {"lazy": True}), "b": ("INT", {"lazy": True})})
    RETURN_TYPES = ("INT",)
    OUTPUT_NODE = True
    seen = []

    def check_lazy_status(self, pick, a, b):
        self.seen.append([a, b])
        return [pick] if {"a": a, "b": b}[pick] is None else []

    def run(self, pick, a, b):
        seen, ZooLazySwitch.seen = ZooLazySwitch.seen, []
        return {"ui": {"seen": [seen], "values": [[a, b]]}, "result": (a if pick == "a" else b,)}


class ZooCounted(Node):
    """Counts the runs of every instance and of the pack."""
    INPUT_TYPES = node(required={"value": ("INT", {"default": 0}), "again": ("INT", {"default": 0})})
    RETURN_TYPES = ("INT",)
    OUTPUT_NODE = True

    def __init__(self):
        self.runs = 0

    def run(self, value, again):
        self.runs += 1
        helper.calls.append(value)
        return {"ui": {"runs": [self.runs], "calls": [len(helper.calls)], "who": [helper.WHO], "pid": [os.getpid()], "value": [value]}, "result": (value,)}


class ZooSilent(ZooCounted):
    """Runs only if something needs it."""
    OUTPUT_NODE = False


class ZooText(Node):
    INPUT_TYPES = node(required={"value": ("INT", {"forceInput": True})})
    RETURN_TYPES = ("STRING",)

    def run(self, value):
        return (str(value),)


class ZooExpand(Node):
    INPUT_TYPES = node(required={"value": ("INT", {"default": 0})})
    RETURN_TYPES = ("INT",)

    def run(self, value):
        graph = GraphBuilder()
        first = graph.node("ZooCounted", value=value + 1, again=0)
        second = graph.node("ZooCounted", value=first.out(0), again=1)
        return {"result": (second.out(0),), "expand": graph.finalize()}


class ZooLoop(Node):
    """Counts down by expanding itself."""
    INPUT_TYPES = node(required={"left": ("INT", {"default": 3}), "total": ("INT", {"default": 0})}, hidden={"dynprompt": "DYNPROMPT", "id": "UNIQUE_ID"})
    RETURN_TYPES = ("INT",)

    def run(self, left, total, dynprompt=None, id=None):
        assert dynprompt.get_node(id)["class_type"] == "ZooLoop"
        if left == 0:
            return (total,)
        graph = GraphBuilder()
        again = graph.node("ZooLoop", left=left - 1, total=total + left)
        return {"result": (again.out(0),), "expand": graph.finalize()}


class ZooAsync(Node):
    INPUT_TYPES = node(required={"seconds": ("FLOAT", {"default": 0.1}), "seed": ("INT", {"default": 0})})
    RETURN_TYPES = ("FLOAT", "FLOAT")
    OUTPUT_NODE = True

    async def run(self, seconds, seed):
        begun = time.time()
        await asyncio.sleep(seconds)
        return {"ui": {"span": [[begun, time.time()]]}, "result": (begun, time.time())}


class ZooBusy(Node):
    """Holds its process for some time."""
    INPUT_TYPES = node(required={"seconds": ("FLOAT", {"default": 0.5}), "seed": ("INT", {"default": 0})})
    RETURN_TYPES = ("FLOAT",)
    OUTPUT_NODE = True

    def run(self, seconds, seed):
        begun = time.time()
        while time.time() - begun < seconds:
            pass
        return {"ui": {"span": [[begun, time.time()]]}, "result": (begun,)}


class ZooSource(Node):
    """A list with equal items and a blocker."""
    INPUT_TYPES = node(required={"message": ("STRING", {"default": ""})})
    RETURN_TYPES = ("STRING",)
    OUTPUT_IS_LIST = (True,)

    def run(self, message):
        return (["x", "x", ExecutionBlocker(message or None)],)


class ZooEach(Node):
    INPUT_TYPES = node(required={"text": ("STRING", {"forceInput": True})})
    RETURN_TYPES = ("STRING",)
    OUTPUT_NODE = True

    def run(self, text):
        return {"ui": {"text": [text]}, "result": (text + "!",)}


class ZooWhole(Node):
    INPUT_TYPES = node(required={"text": ("STRING", {"forceInput": True})})
    RETURN_TYPES = ("STRING",)
    INPUT_IS_LIST = True
    OUTPUT_IS_LIST = (True,)
    OUTPUT_NODE = True

    def run(self, text):
        return {"ui": {"whole": [text]}, "result": (["y"] * 3,)}


class ZooInPlace(Node):
    INPUT_TYPES = node(required={"image": ("IMAGE",), "seed": ("INT", {"default": 0})})
    RETURN_TYPES = ("IMAGE",)
    OUTPUT_NODE = True

    def run(self, image, seed):
        image.add_(1)
        return {"ui": {"mean": [float(image.mean())], "inference": [torch.is_inference_mode_enabled()]}, "result": (image,)}


class ZooMean(Node):
    INPUT_TYPES = node(required={"image": ("IMAGE",), "seed": ("INT", {"default": 0})})
    OUTPUT_NODE = True

    def run(self, image, seed):
        return {"ui": {"mean": [float(image.mean())], "shape": [list(image.shape)]}}


class ZooProgress(Node):
    """`helper`: the second half is reported by a thread of the pack's own, which knows no node."""
    INPUT_TYPES = node(required={"steps": ("INT", {"default": 10}), "pause": ("FLOAT", {"default": 0.03}), "seed": ("INT", {"default": 0})},
                       optional={"helper": ("BOOLEAN", {"default": False})})
    OUTPUT_NODE = True

    def run(self, steps, pause, seed, helper=False):
        begun = time.time()
        bar = comfy.utils.ProgressBar(steps)
        self.work(bar, steps, pause, range(steps // 2 if helper else steps))
        if helper:
            thread = threading.Thread(target=self.work, args=(bar, steps, pause, range(steps // 2, steps)))
            thread.start()
            thread.join()
        return {"ui": {"seconds": [time.time() - begun]}}

    def work(self, bar, steps, pause, numbers):
        from PIL import Image
        for step in numbers:
            time.sleep(pause)
            preview = ("PNG", Image.new("RGB", (8, 8), (step, 0, 0)), None) if step == 4 else None
            bar.update_absolute(step + 1, steps, preview)


@dataclass
class Thing:
    text: str


kept = []


class ZooMakeThing(Node):
    INPUT_TYPES = node(required={"text": ("STRING", {"default": "thing"})})
    RETURN_TYPES = ("THING",)

    def run(self, text):
        kept.append(Thing(text))
        return (kept[-1],)


class ZooUseThing(Node):
    INPUT_TYPES = node(required={"thing": ("THING",)})
    OUTPUT_NODE = True

    def run(self, thing):
        return {"ui": {"text": [thing.text], "same": [any(thing is k for k in kept)]}}


class ZooPrints(Node):
    INPUT_TYPES = node(required={"lines": ("INT", {"default": 3})})
    OUTPUT_NODE = True

    def run(self, lines):
        for i in range(lines):
            os.write(1, f"zoo says {i} é\n".encode())
        return {"ui": {"lines": [lines]}}


class ZooHidden(Node):
    INPUT_TYPES = node(required={"seed": ("INT", {"default": 0})}, hidden={"prompt": "PROMPT", "info": "EXTRA_PNGINFO", "id": "UNIQUE_ID"})
    OUTPUT_NODE = True

    def run(self, seed, prompt=None, info=None, id=None):
        return {"ui": {"nodes": [sorted(prompt)], "info": [info], "id": [id]}}


class ZooRemark(Node):
    """Writes into what is saved with pictures."""
    INPUT_TYPES = node(required={"image": ("IMAGE",), "text": ("STRING", {"default": ""})}, hidden={"info": "EXTRA_PNGINFO", "prompt": "PROMPT"})
    RETURN_TYPES = ("IMAGE",)

    def run(self, image, text, info=None, prompt=None):
        info.setdefault("remarks", {"zoo": []})[text] = len(text)
        prompt[text]["seen"] = True
        return (image,)


class ZooTally(Node):
    """Counts how often nodes with a name have run in this process."""
    INPUT_TYPES = node(required={"name": ("STRING", {"default": ""}), "seconds": ("FLOAT", {"default": 0.0})})
    RETURN_TYPES = ("INT",)
    OUTPUT_NODE = True
    tally = {}

    def run(self, name, seconds):
        time.sleep(seconds)
        self.tally[name] = self.tally.get(name, 0) + 1
        return {"ui": {"runs": [self.tally[name]]}, "result": (self.tally[name],)}


class ZooHold(Node):
    """Has a model loaded on a card."""
    INPUT_TYPES = node(required={"seed": ("INT", {"default": 0}), "device": ("STRING", {"default": ""})})
    OUTPUT_NODE = True
    model = None

    def run(self, seed, device):
        import comfy.model_management
        from comfy_multiproc.testing import stub_patcher
        ZooHold.model = stub_patcher(32 << 20, device)
        comfy.model_management.load_models_gpu([ZooHold.model])
        return {"ui": {"pid": [os.getpid()]}}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Node) and cls is not Node}
NODE_DISPLAY_NAME_MAPPINGS = {"ZooTricks": "Tricks (zoo)"}
