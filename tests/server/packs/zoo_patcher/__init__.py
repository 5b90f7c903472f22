"""A pack that changes ComfyUI itself at import, which another process would not see."""

import asyncio
import os
import sys

import comfy.sample
import comfy.samplers
import comfy.utils

comfy.samplers.SCHEDULER_NAMES.append("zoo_schedule")
original = comfy.sample.prepare_noise
comfy.sample.prepare_noise = lambda *args, **kwargs: original(*args, **kwargs)


class ZooPatched:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, seed):
        return {"ui": {"pid": [os.getpid()]}}


class ZooPass:
    """Gives on what it gets, whatever that is, and says which modules of a pack its process has imported."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*",), "pack": ("STRING", {"default": ""})}}

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, value, pack):
        return {"ui": {"imported": [[name for name in sys.modules if pack in name]], "pid": [os.getpid()]}, "result": (value,)}


class ZooPatientProgress:
    """Reports while others do."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"steps": ("INT", {"default": 10}), "pause": ("FLOAT", {"default": 0.1}), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    async def run(self, steps, pause, seed):
        bar = comfy.utils.ProgressBar(steps)
        for step in range(steps):
            await asyncio.sleep(pause)
            bar.update_absolute(step + 1, steps)
        return {"ui": {"done": [True]}}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (ZooPatched, ZooPass, ZooPatientProgress)}
