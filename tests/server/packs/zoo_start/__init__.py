"""A pack that takes its time to be imported."""

import os
import time

if log := os.environ.get("ZOO_IMPORTS"):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
time.sleep(float(os.environ.get("ZOO_START_SECONDS", "0")))


class ZooStart:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, seed):
        return {"ui": {"pid": [os.getpid()]}, "result": (seed,)}


NODE_CLASS_MAPPINGS = {"ZooStart": ZooStart}
