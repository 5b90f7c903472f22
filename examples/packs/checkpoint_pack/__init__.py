"""A pack in ComfyUI's first node interface whose models live in its worker.

What the loader gives to the host is a handle: core nodes that get it (KSampler, VAEDecode) run in the worker too, so the
weights never cross.
"""
import comfy.sd
import folder_paths


class CheckpointPackLoader:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"),)}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    CATEGORY = "examples"

    def load(self, ckpt_name):
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        return comfy.sd.load_checkpoint_guess_config(path, output_vae=True, output_clip=True)[:3]


NODE_CLASS_MAPPINGS = {"CheckpointPackLoader": CheckpointPackLoader}
NODE_DISPLAY_NAME_MAPPINGS = {"CheckpointPackLoader": "Load Checkpoint (in a worker)"}
