"""API-format prompts for the tiny models, one function each; `WORKFLOWS` names them.

All run in about a second on two CPU cores. LoadImage nodes name an input image, which the server needs first (`image_names`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_multiproc.testing.tiny_models import FILES

Link = list[Any]


class Graph(dict[str, dict[str, Any]]):
    """A prompt. `add` puts a node in and returns its first output."""

    def add(self, id: str, class_type: str, **inputs: Any) -> Link:
        self[id] = {"class_type": class_type, "inputs": inputs}
        return out(id)


def out(id: str, n: int = 0) -> Link:
    return [id, n]


def models_of(prompt: dict[str, Any]) -> list[str]:
    """The names in tiny_models.FILES of the models that a prompt loads."""
    wanted = {value for node in prompt.values() for value in node["inputs"].values() if isinstance(value, str)}
    return [name for name, (path, _) in FILES.items() if path.partition("/")[2] in wanted
            and any(path.startswith(folder) for node in prompt.values() for folder in _FOLDERS.get(node["class_type"], ()))]


def image_names(prompt: dict[str, Any]) -> list[str]:
    """The input images that a prompt loads."""
    return [node["inputs"]["image"] for node in prompt.values() if node["class_type"] == "LoadImage"]


_FOLDERS = {"CheckpointLoaderSimple": ("checkpoints",), "CreateHookModelAsLora": ("checkpoints",), "UNETLoader": ("diffusion_models",),
            "CLIPLoader": ("text_encoders",), "VAELoader": ("vae",), "LoraLoader": ("loras",), "CreateHookLora": ("loras",),
            "ControlNetLoader": ("controlnet",), "UpscaleModelLoader": ("upscale_models",)}


def _checkpoint(g: Graph, name: str = "tiny_sd15.safetensors") -> tuple[Link, Link, Link]:
    g.add("ckpt", "CheckpointLoaderSimple", ckpt_name=name)
    return out("ckpt", 0), out("ckpt", 1), out("ckpt", 2)


def _prompts(g: Graph, clip: Link, positive_clip: Link | None = None) -> tuple[Link, Link]:
    return (g.add("pos", "CLIPTextEncode", text="a photo of a red cat", clip=positive_clip or clip),
            g.add("neg", "CLIPTextEncode", text="blurry, bad", clip=clip))


def _empty(g: Graph, kind: str = "EmptyLatentImage", size: int = 64) -> Link:
    return g.add("latent", kind, width=size, height=size, batch_size=1)


def _sample(g: Graph, model: Link, prompts: tuple[Link, Link], latent: Link, *, steps: int = 2, denoise: float = 1.0, cfg: float = 4.0) -> Link:
    return g.add("sampler", "KSampler", model=model, positive=prompts[0], negative=prompts[1], latent_image=latent, seed=1, steps=steps,
                 cfg=cfg, sampler_name="euler", scheduler="normal", denoise=denoise)


def _save(g: Graph, latent: Link, vae: Link, name: str) -> Graph:
    g.add("save", "SaveImage", images=g.add("decode", "VAEDecode", samples=latent, vae=vae), filename_prefix=name)
    return g


def txt2img(name: str = "txt2img", checkpoint: str = "tiny_sd15.safetensors", latent: str = "EmptyLatentImage", size: int = 64) -> Graph:
    g = Graph()
    model, clip, vae = _checkpoint(g, checkpoint)
    return _save(g, _sample(g, model, _prompts(g, clip), _empty(g, latent, size)), vae, name)


def txt2img_sd3(size: int = 64) -> Graph:
    """The quickest whole workflow: a checkpoint of 9 MiB."""
    return txt2img("txt2img_sd3", "tiny_sd3.safetensors", "EmptySD3LatentImage", size)


def txt2img_parts(unet: str = "tiny_sd15_unet.safetensors", vae: str = "tiny_taesd.safetensors", dtype: str = "default",
                  latent: str = "EmptyLatentImage", cfg: float = 4.0, name: str = "parts") -> Graph:
    """The three parts loaded each from a file of its own."""
    g = Graph()
    model = g.add("unet", "UNETLoader", unet_name=unet, weight_dtype=dtype)
    clip = g.add("clip", "CLIPLoader", clip_name="tiny_clip_l.safetensors", type="stable_diffusion")
    decoder = g.add("vae", "VAELoader", vae_name=vae)
    return _save(g, _sample(g, model, _prompts(g, clip), _empty(g, latent), cfg=cfg), decoder, name)


def flux() -> Graph:
    return txt2img_parts("tiny_flux.safetensors", "tiny_taesd16.safetensors", latent="EmptySD3LatentImage", cfg=1.0, name="flux")


def img2img(name: str = "img2img", checkpoint: str = "tiny_sd15.safetensors") -> Graph:
    g = Graph()
    model, clip, vae = _checkpoint(g, checkpoint)
    image = g.add("image", "LoadImage", image="tiny_in.png")
    latent = g.add("encode", "VAEEncode", pixels=image, vae=vae)
    return _save(g, _sample(g, model, _prompts(g, clip), latent, denoise=0.6, steps=4), vae, name)


def lora() -> Graph:
    g = Graph()
    model, clip, vae = _checkpoint(g)
    g.add("lora", "LoraLoader", model=model, clip=clip, lora_name="tiny_sd15_lora.safetensors", strength_model=1.0, strength_clip=1.0)
    return _save(g, _sample(g, out("lora", 0), _prompts(g, out("lora", 1)), _empty(g)), vae, "lora")


def controlnet(name: str = "controlnet", file: str = "tiny_sd15_controlnet.safetensors") -> Graph:
    g = Graph()
    model, clip, vae = _checkpoint(g)
    positive, negative = _prompts(g, clip)
    g.add("apply", "ControlNetApplyAdvanced", positive=positive, negative=negative,
          control_net=g.add("cn", "ControlNetLoader", control_net_name=file), image=g.add("image", "LoadImage", image="tiny_in.png"),
          strength=1.0, start_percent=0.0, end_percent=1.0)
    return _save(g, _sample(g, model, (out("apply", 0), out("apply", 1)), _empty(g)), vae, name)


def upscale() -> Graph:
    g = Graph()
    model = g.add("model", "UpscaleModelLoader", model_name="tiny_compact_x2.safetensors")
    image = g.add("up", "ImageUpscaleWithModel", upscale_model=model, image=g.add("image", "LoadImage", image="tiny_in.png"))
    g.add("save", "SaveImage", images=image, filename_prefix="upscale")
    return g


def hires() -> Graph:
    """txt2img, enlarged by the upscale model, encoded and sampled again: every kind of model in one prompt."""
    g = txt2img("hires")
    model = g.add("model", "UpscaleModelLoader", model_name="tiny_compact_x2.safetensors")
    image = g.add("up", "ImageUpscaleWithModel", upscale_model=model, image=out("decode"))
    latent = g.add("encode", "VAEEncode", pixels=image, vae=out("ckpt", 2))
    g.add("again", "KSampler", **{**g["sampler"]["inputs"], "latent_image": latent, "denoise": 0.5, "seed": 2})
    g["save"]["inputs"]["images"] = g.add("decode2", "VAEDecode", samples=out("again"), vae=out("ckpt", 2))
    return g


def vae_only(size: int = 768) -> Graph:
    """Encode and decode without sampling: for running out of memory in the VAE."""
    g = Graph()
    _, _, vae = _checkpoint(g)
    image = g.add("image", "EmptyImage", width=size, height=size, batch_size=1, color=0x804020)
    return _save(g, g.add("encode", "VAEEncode", pixels=image, vae=vae), vae, "vae_only")


def hooks_lora() -> Graph:
    """A LoRA as a hook, on the model through the conditioning and on the text encoder, with a strength that changes over the steps."""
    g = Graph()
    model, clip, vae = _checkpoint(g)
    hook = g.add("hook", "CreateHookLora", lora_name="tiny_sd15_lora.safetensors", strength_model=1.0, strength_clip=1.0)
    weak = g.add("kf0", "CreateHookKeyframe", strength_mult=0.2, start_percent=0.0)
    strong = g.add("kf1", "CreateHookKeyframe", strength_mult=1.0, start_percent=0.5, prev_hook_kf=weak)
    hooks = g.add("hooks", "SetHookKeyframes", hooks=hook, hook_kf=strong)
    hooked = g.add("hclip", "SetClipHooks", clip=clip, apply_to_conds=True, schedule_clip=False, hooks=hooks)
    return _save(g, _sample(g, model, _prompts(g, clip, hooked), _empty(g), steps=4), vae, "hooks_lora")


def hooks_model() -> Graph:
    """A whole second checkpoint as a weight hook, for part of the run only."""
    g = Graph()
    model, clip, vae = _checkpoint(g)
    hook = g.add("hook", "CreateHookModelAsLora", ckpt_name="tiny_sd15_other.safetensors", strength_model=0.7, strength_clip=0.0)
    positive, negative = _prompts(g, clip)
    part = g.add("range", "ConditioningTimestepsRange", start_percent=0.0, end_percent=0.6)
    g.add("props", "PairConditioningSetProperties", positive_NEW=positive, negative_NEW=negative, strength=1.0, set_cond_area="default",
          hooks=hook, timesteps=part)
    g.add("default", "PairConditioningSetDefaultCombine", positive=out("props", 0), negative=out("props", 1), positive_DEFAULT=positive,
          negative_DEFAULT=negative)
    return _save(g, _sample(g, model, (out("default", 0), out("default", 1)), _empty(g), steps=4), vae, "hooks_model")


WORKFLOWS: dict[str, Callable[[], Graph]] = {
    "txt2img": txt2img,
    "txt2img_2lv": lambda: txt2img("txt2img_2lv", "tiny_sd15_2lv.safetensors"),
    "txt2img_fp8": lambda: txt2img("txt2img_fp8", "tiny_sd15_fp8.safetensors"),
    "txt2img_kl": lambda: txt2img("txt2img_kl", "tiny_sd15_kl.safetensors"),
    "txt2img_sd3": txt2img_sd3,
    "txt2img_parts": txt2img_parts,
    "unet_fp8": lambda: txt2img_parts("tiny_sd15_unet_fp8.safetensors", dtype="fp8_e4m3fn", name="unet_fp8"),
    "flux": flux,
    "img2img": img2img,
    "img2img_kl": lambda: img2img("img2img_kl", "tiny_sd15_kl.safetensors"),
    "lora": lora,
    "controlnet": controlnet,
    "control_lora": lambda: controlnet("control_lora", "tiny_sd15_control_lora.safetensors"),
    "vae_only": vae_only,
    "upscale": upscale,
    "hires": hires,
    "hooks_lora": hooks_lora,
    "hooks_model": hooks_model,
}
