"""A pack in ComfyUI's third node interface: an image in, an image out, in as many small steps as one likes."""
import time

import comfy.model_management
import comfy.utils
from comfy_api.latest import ComfyExtension, io
from typing_extensions import override


class TintPackTint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TintPackTint",
            display_name="Tint (step by step)",
            category="examples",
            inputs=[
                io.Image.Input("image"),
                io.Float.Input("strength", default=0.5, min=0.0, max=1.0, step=0.01),
                io.Int.Input("steps", default=1, min=1, max=10000),
                io.Float.Input("pause", default=0.0, min=0.0, max=10.0, step=0.01, tooltip="Seconds to wait in each step."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image, strength, steps, pause):
        progress = comfy.utils.ProgressBar(steps)
        tinted = image.clone()
        for _ in range(steps):
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(pause)
            tinted[..., 2] += (1.0 - tinted[..., 2]) * strength / steps
            progress.update(1)
        return io.NodeOutput(tinted)


class TintPack(ComfyExtension):
    @override
    async def get_node_list(self):
        return [TintPackTint]


async def comfy_entrypoint():
    return TintPack()
