"""Nodes for workflows that use several processes: see who holds what, release a worker, load a checkpoint in one."""

import asyncio

import numpy
import torch
from comfy_multiproc import host, isolation, nodecall
from PIL import Image, ImageDraw

from comfy import process_memory

ALL = "all workers"
MIB = 1 << 20
WIDTH, BAR, LINE, MARGIN = 640, 28, 16, 12
PARTS = (("resident", (66, 133, 244)), ("cached", (154, 190, 250)), ("fixed", (120, 120, 130)), ("scratch", (244, 180, 66)), ("claimed", (219, 88, 96)))


class MultiprocMemory:
    DESCRIPTION = "What every process of ComfyUI on this machine holds, device by device, at the moment this node runs."
    CATEGORY = "multiproc"
    RETURN_TYPES = ("STRING", "IMAGE", "*")
    RETURN_NAMES = ("text", "picture", "passed")
    OUTPUT_NODE = True
    FUNCTION = "look"

    @classmethod
    def INPUT_TYPES(cls):
        return {"optional": {"after": ("*", {"tooltip": "Whatever is linked here is passed on, and made before this node looks."})}}

    @classmethod
    def IS_CHANGED(cls, **inputs):
        return float("nan")

    def look(self, after=None):
        rows = process_memory.processes()
        text = "\n".join(lines_of(rows))
        return {"ui": {"text": (text,)}, "result": (text, picture_of(rows), after)}


class MultiprocRelease:
    DESCRIPTION = "Gives the memory of a worker back: its models, or with \"process\" everything, by ending the process. The next call starts it again."
    CATEGORY = "multiproc"
    RETURN_TYPES = ("*",)
    RETURN_NAMES = ("passed",)
    OUTPUT_NODE = True
    FUNCTION = "release"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"worker": ([ALL, *sorted(worker.name for worker in host.workers())],), "what": (["models", "process"],)},
            "optional": {"after": ("*", {"tooltip": "Whatever is linked here is passed on, and made before the memory is released."})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, worker):
        return worker == ALL or problem_with(worker)    # a node before this one may be what starts it

    @classmethod
    def IS_CHANGED(cls, **inputs):
        return float("nan")

    async def release(self, worker, what, after=None):
        workers = host.workers()
        if worker != ALL and worker not in (names := [w.name for w in workers]):
            raise ValueError(f"there is no worker {worker}; there are: {', '.join(names) or 'none'}")
        chosen = [w for w in workers if w.pid is not None and worker in (ALL, w.name)]
        said = await asyncio.gather(*(release(w, what) for w in chosen))
        return {"ui": {"text": ("\n".join(said) or "no worker runs",)}, "result": (after,)}


class MultiprocLoadCheckpoint:
    DESCRIPTION = ("Loads a checkpoint in a worker of that name, which is started for it. Nodes that use the model, the text encoder or the VAE "
                   "run in that worker.")
    CATEGORY = "multiproc"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls):
        import nodes
        return {"required": {**nodes.CheckpointLoaderSimple.INPUT_TYPES()["required"],
                             "worker": ("STRING", {"default": "models", "tooltip": "Letters, digits, '-', '_' and '.'"})}}

    @classmethod
    def VALIDATE_INPUTS(cls, worker):
        return problem_with(worker)

    async def load(self, ckpt_name, worker):
        from comfy_execution.utils import get_executing_context
        from comfy_multiproc import calls
        context = get_executing_context()
        call = calls.described(nodecall.Call("CheckpointLoaderSimple", "load_checkpoint", 0, prompt=context.prompt_id, id=context.node_id, executes=True), 0)
        return await calls.answered(await calls.sent(isolation.named(worker), call, {"inputs": {"ckpt_name": ckpt_name}}))


def problem_with(name):
    """What is wrong with the name of a worker; True if nothing is."""
    try:
        isolation.check_name(name)
    except ValueError as error:
        return str(error)
    return True


async def release(worker, what):
    """Give a worker's memory back; a line about it."""
    pid = worker.pid
    if what == "process":
        await asyncio.to_thread(worker.stop)
        return f"worker {worker.name} (pid {pid}) was ended"
    link = worker.link
    if link is None:
        return f"worker {worker.name} has ended"
    await asyncio.wrap_future(link.request("unload", timeout=60))
    return f"worker {worker.name} (pid {pid}) has unloaded its models"


def lines_of(rows):
    for row in rows:
        ram = "unknown" if row["ram"] is None else f"{row['ram'] // MIB} MB"
        yield f"{row['name']} (pid {row['pid']}, {row['state']}): RAM {ram}"
        for figures in row["devices"]:
            parts = [f"{name} {figures[name] // MIB} MB" for name, _ in PARTS if figures[name]]
            yield f"    {figures['device']}: {', '.join(parts) or 'nothing'}"


def picture_of(rows):
    """A bar for each device and process, one scale for all, as an IMAGE of shape (1, height, width, 3)."""
    bars = [(f"{row['name']} (pid {row['pid']})  {figures['device']}", figures) for row in rows for figures in row["devices"]]
    bars = bars or [(f"{row['name']} (pid {row['pid']})  RAM", {"resident": row["ram"]}) for row in rows]
    largest = max([sum(figures.get(name) or 0 for name, _ in PARTS) for _, figures in bars] + [1])
    image = Image.new("RGB", (WIDTH, MARGIN + len(bars) * (LINE + BAR + MARGIN) + LINE), (28, 28, 32))
    draw = ImageDraw.Draw(image)
    y = MARGIN
    for label, figures in bars:
        total = sum(figures.get(name) or 0 for name, _ in PARTS)
        draw.text((MARGIN, y), f"{label}: {total // MIB} MB", fill=(230, 230, 235))
        x, y = MARGIN, y + LINE
        for name, colour in PARTS:
            wide = round((figures.get(name) or 0) / largest * (WIDTH - 2 * MARGIN))
            if wide:
                draw.rectangle((x, y, x + wide - 1, y + BAR - 1), fill=colour)
            x += wide
        y += BAR + MARGIN
    x = MARGIN
    for name, colour in PARTS:
        draw.rectangle((x, y, x + 10, y + 10), fill=colour)
        draw.text((x + 14, y), name, fill=(180, 180, 188))
        x += 90
    return torch.from_numpy(numpy.array(image).astype(numpy.float32) / 255.0)[None]


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (MultiprocMemory, MultiprocRelease, MultiprocLoadCheckpoint)}
NODE_DISPLAY_NAME_MAPPINGS = {
    "MultiprocMemory": "Memory by Process",
    "MultiprocRelease": "Release Worker",
    "MultiprocLoadCheckpoint": "Load Checkpoint in Worker",
}
