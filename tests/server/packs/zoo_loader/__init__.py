"""A pack that loads and changes models: what it gives out stays in its process."""

import os
import time

import comfy.sd
from comfy_execution.graph_utils import GraphBuilder
import folder_paths


class ZooLoadCheckpoint:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"),)}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    CATEGORY = "zoo"

    def load(self, ckpt_name):
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        return comfy.sd.load_checkpoint_guess_config(path, output_vae=True, output_clip=True)[:3]


class ZooShiftModel:
    """Takes a MODEL, from whichever process, and gives a changed one."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "scale": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 4.0})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "change"
    CATEGORY = "zoo"

    def change(self, model, scale):
        changed = model.clone()
        changed.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * scale)
        return (changed,)


class ZooWho:
    """The process that its pack runs in, and when it had it for itself."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}, "optional": {"anything": ("*",), "seconds": ("FLOAT", {"default": 0.0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "who"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def who(self, seed, anything=None, seconds=0.0):
        begun = time.time()
        while time.time() - begun < seconds:
            time.sleep(0.01)
        return {"ui": {"pid": [os.getpid()], "kind": [type(anything).__name__], "span": [[begun, time.time()]]}, "result": (os.getpid(),)}


class ZooExpandElsewhere:
    """Expands to nodes of another pack, with ids that it leaves to ComfyUI."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("INT", {"default": 0})}}

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "zoo"

    def run(self, value):
        graph = GraphBuilder()
        first = graph.node("ZooCounted", value=value + 1, again=0)
        second = graph.node("ZooCounted", value=first.out(0), again=1)
        return {"result": (second.out(0),), "expand": graph.finalize()}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (ZooLoadCheckpoint, ZooShiftModel, ZooWho, ZooExpandElsewhere)}
NODE_DISPLAY_NAME_MAPPINGS = {"ZooLoadCheckpoint": "Load Checkpoint (zoo)"}
