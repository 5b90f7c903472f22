"""A pack as upscalers are written: a model from ComfyUI's folders, tiles, a progress bar, smaller tiles when memory runs out."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
