"""A pack that takes its time to be imported."""

import os
import sys
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
        import utils.install_util
        packs = sorted({name for name, module in list(sys.modules.items()) for place in [getattr(module, "__file__", None)]
                        if place and f"{os.sep}custom_nodes{os.sep}" in place})
        about = {"utils": utils.install_util.__file__, "main": getattr(sys.modules["__main__"], "__file__", None), "packs": packs,
                 "database": getattr(sys.modules.get("app.database.db"), "Session", None) is not None}
        return {"ui": {"pid": [os.getpid()], "about": [about]}, "result": (seed,)}


NODE_CLASS_MAPPINGS = {"ZooStart": ZooStart}
