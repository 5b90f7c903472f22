import os

import comfy.model_management
import comfy.utils
import folder_paths
from spandrel import ModelLoader


class LoadUpscaler:
    @classmethod
    def INPUT_TYPES(s):
        return {"required": {"model_name": (folder_paths.get_filename_list("upscale_models"),)}}

    RETURN_TYPES = ("UPSCALER",)
    FUNCTION = "load"
    CATEGORY = "style/upscale"

    def load(self, model_name):
        path = folder_paths.get_full_path("upscale_models", model_name)
        weights = comfy.utils.load_torch_file(path, safe_load=True)
        return (ModelLoader().load_from_state_dict(weights).eval(),)


class UpscaleInTiles:
    @classmethod
    def INPUT_TYPES(s):
        return {
            "required": {
                "upscaler": ("UPSCALER",),
                "image": ("IMAGE",),
                "tile": ("INT", {"default": 64, "min": 32, "max": 1024, "step": 32}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("upscaled",)
    FUNCTION = "upscale"
    OUTPUT_NODE = True
    CATEGORY = "style/upscale"

    def upscale(self, upscaler, image, tile, unique_id=None):
        device = comfy.model_management.get_torch_device()
        upscaler.to(device)
        pixels = image.movedim(-1, -3).to(device)
        while True:
            try:
                steps = pixels.shape[0] * comfy.utils.get_tiled_scale_steps(pixels.shape[3], pixels.shape[2], tile_x=tile, tile_y=tile, overlap=8)
                bar = comfy.utils.ProgressBar(steps)
                result = comfy.utils.tiled_scale(pixels, lambda part: upscaler(part), tile_x=tile, tile_y=tile, overlap=8,
                                                 upscale_amount=upscaler.scale, pbar=bar)
                break
            except comfy.model_management.OOM_EXCEPTION as e:
                tile //= 2
                if tile < 32:
                    raise e
        upscaler.to("cpu")
        return {"ui": {"pid": [os.getpid()], "steps": [steps]}, "result": (result.movedim(-3, -1).clamp(0, 1),)}


NODE_CLASS_MAPPINGS = {"StyleLoadUpscaler": LoadUpscaler, "StyleUpscaleInTiles": UpscaleInTiles}
NODE_DISPLAY_NAME_MAPPINGS = {"StyleLoadUpscaler": "Load Upscaler", "StyleUpscaleInTiles": "Upscale in Tiles"}
