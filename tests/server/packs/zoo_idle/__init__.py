"""A pack whose worker ends when nobody has used it for a second."""

import os
import time

import torch


class Object:
    pass


class ZooIdle:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("IMAGE", "OBJECT")
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, seed):
        begun = time.time()
        while time.time() - begun < 0.5:
            pass
        return {"ui": {"pid": [os.getpid()], "span": [[begun, time.time()]]}, "result": (torch.full((1, 64, 64, 3), seed / 100), Object())}


class ZooIdleImage(ZooIdle):
    """Keeps nothing behind."""
    RETURN_TYPES = ("IMAGE",)

    def run(self, seed):
        return {"ui": {"pid": [os.getpid()]}, "result": (torch.full((1, 64, 64, 3), seed / 100),)}


class ZooIdleUse:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"thing": ("OBJECT",), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, thing, seed):
        return {"ui": {"class": [type(thing).__name__], "pid": [os.getpid()]}}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (ZooIdle, ZooIdleImage, ZooIdleUse)}
