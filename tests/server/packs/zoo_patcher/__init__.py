"""A pack that changes ComfyUI itself at import, which another process would not see."""

import os

import comfy.sample
import comfy.samplers

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


NODE_CLASS_MAPPINGS = {"ZooPatched": ZooPatched}
