"""A pack as background removers are written: a network of its own with a folder of its own, loaded through ComfyUI's memory manager."""

import os

import comfy.model_management as mm
import comfy.model_patcher
import folder_paths
import torch

folder_paths.folder_names_and_paths["matting"] = ([os.path.join(folder_paths.models_dir, "matting")], folder_paths.supported_pt_extensions)


class Matting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 3, padding=1), torch.nn.Sigmoid())

    def forward(self, image):
        return self.layers(image)


LOADED = {}     # as many packs keep their models


def patcher(seed):
    if seed not in LOADED:
        with torch.inference_mode(False), torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Matting().eval()
        LOADED[seed] = comfy.model_patcher.ModelPatcher(model, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device())
    return LOADED[seed]


class RemoveBackground:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",), "weights": (["random", *folder_paths.get_filename_list("matting")],), "seed": ("INT", {"default": 0, "min": 0})}}

    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "remove"
    OUTPUT_NODE = True
    CATEGORY = "style/matting"

    @torch.no_grad()
    def remove(self, image, weights, seed):
        model = patcher(seed)
        mm.load_models_gpu([model])
        mask = torch.cat([model.model(frame[None].movedim(-1, 1).to(model.load_device)).cpu()[:, 0] for frame in image])
        mm.soft_empty_cache()
        held = any(entry.model is model for entry in mm.current_loaded_models)
        return {"ui": {"pid": [os.getpid()], "held": [held], "models": [len(LOADED)]}, "result": (image * mask[..., None], mask)}


NODE_CLASS_MAPPINGS = {"StyleRemoveBackground": RemoveBackground}
NODE_DISPLAY_NAME_MAPPINGS = {"StyleRemoveBackground": "Remove Background"}
