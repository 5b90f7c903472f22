"""Nodes that look at the card from inside the server, for tests."""

import comfy.model_management as mm
import torch


class CardBooks:
    """The bytes of weights on the card by ComfyUI's own list, and the bytes that the card counts for this process."""

    RETURN_TYPES = ()
    FUNCTION = "look"
    OUTPUT_NODE = True
    CATEGORY = "testing"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"run": ("INT", {"default": 0})}}

    def look(self, run):
        books = sum(m.model.loaded_size() for m in mm.current_loaded_models)
        partial = sum(0 < m.model.loaded_size() < m.model.model_size() for m in mm.current_loaded_models)
        counted = torch.npu.memory_stats(mm.get_torch_device())["active_bytes.all.current"]
        return {"ui": {"books": [books], "counted": [counted], "partial": [partial]}}


class CardFill:
    """Allocates on the card and gives it back."""

    RETURN_TYPES = ()
    FUNCTION = "fill"
    OUTPUT_NODE = True
    CATEGORY = "testing"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"nbytes": ("INT", {"default": 0, "max": 1 << 60})}}

    def fill(self, nbytes):
        torch.empty(nbytes, dtype=torch.uint8, device=mm.get_torch_device())
        return {"ui": {"filled": [nbytes]}}


NODE_CLASS_MAPPINGS = {"CardBooks": CardBooks, "CardFill": CardFill}
