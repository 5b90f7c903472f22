"""A pack whose node stays busy, in Python or in native code that keeps the interpreter's lock. Each copy of it has a node of its own."""

import ctypes
import os
import pathlib
import time

NAME = pathlib.Path(__file__).parent.name


class Life:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"how": (["fine", "loop", "native"],), "seed": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, how, seed):
        os.write(1, f"{NAME} {how} {os.getpid()}\n".encode())
        if how == "loop":
            while True:
                time.time()
        if how == "native":
            ctypes.PyDLL(None).sleep(600)
        return {"ui": {"pid": [os.getpid()]}, "result": (seed,)}


NODE_CLASS_MAPPINGS = {NAME: Life}
