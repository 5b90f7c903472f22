"""Tiny random model files that ComfyUI loads as the real thing, made when they are first asked for.

    folder = tiny_models.ensure(["sd3"])        # give it to a server as --models-directory

The files are the same on every machine. `sd3` is a whole checkpoint of 9 MiB, made in a tenth of a second; a checkpoint with a
real text encoder (`sd15`) is 270 MiB long, 75 on disk, since ComfyUI fixes the size of CLIP-L.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import torch

from comfy_multiproc.testing import architectures as arch
from comfy_multiproc.cache import cache_folder

Tensors = dict[str, torch.Tensor]
Maker = Callable[[int], Tensors]

F8, F16, BF16, F32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
DTYPE_NAMES = {F32: "F32", F16: "F16", BF16: "BF16", F8: "F8_E4M3"}
PAGE = 4096


def ensure(names: Iterable[str], folder: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Make those of the files in FILES that are not there yet; returns the models directory that holds them.

    `folder`: that directory; by default one in the cache folder, which changes with the code that makes the models. Any number of
    processes may call at once. Raises KeyError for an unknown name.
    """
    if folder is None:
        here = pathlib.Path(__file__).parent
        source = b"".join((here / name).read_bytes() for name in ("architectures.py", "tiny_models.py"))
        folder = cache_folder() / "tiny-models" / hashlib.sha256(source).hexdigest()[:12]
    root = pathlib.Path(folder)
    for name in names:
        relative, make = FILES[name]
        path = root / relative
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as f:
                write_sparse(make(0), f)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    return root


def write_sparse(tensors: Mapping[str, torch.Tensor], f: BinaryIO) -> None:
    """Write a safetensors file (an 8-byte length, a JSON header, the raw tensors) with every page of zeros left as a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda k: (-tensors[k].element_size(), k))      # keeps every tensor aligned
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    f.write(len(head).to_bytes(8, "little") + head)
    base = f.tell()
    for name in order:
        raw = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        start, at = base + header[name]["data_offsets"][0], 0
        while at < raw.size:
            size = min(raw.size - at, PAGE - (start + at) % PAGE)
            piece = raw[at:at + size]
            if piece.any():
                f.seek(start + at)
                f.write(piece.tobytes())
            at += size
    f.truncate(base + end)


def _one(builder: Callable[..., None], dtype: torch.dtype, prefix: str = "", **options: Any) -> Maker:
    def make(seed: int) -> Tensors:
        d = arch.StateDict()
        builder(d, **options)
        return {prefix + name: tensor for name, tensor in d.build(seed, dtype).items()}
    return make


def _clip(dtype: torch.dtype, prefix: str = "text_model.") -> Maker:
    def make(seed: int) -> Tensors:
        tensors = _one(arch.clip_l, dtype, prefix)(seed)
        table = prefix + "embeddings.token_embedding.weight"
        tensors[table] = arch.clear_rare_tokens(tensors[table])
        return tensors
    return make


def _sd15(vae: Callable[..., None], levels: int = 1, dtype: torch.dtype = F16) -> Maker:
    def make(seed: int) -> Tensors:
        return {**_one(arch.unet, dtype, "model.diffusion_model.", levels=levels)(seed),
                **_clip(dtype, "cond_stage_model.transformer.text_model.")(seed),
                **_one(vae, F16, "first_stage_model.")(seed)}
    return make


def _sd3(seed: int) -> Tensors:
    """Diffusion model, VAE and a text encoder without a weight: one unused tensor under text_encoders. makes ComfyUI build an
    SD3 text encoder of no parts, which answers every prompt with zeros."""
    return {**_one(arch.mmdit, F16, "model.diffusion_model.")(seed), **_one(arch.taesd, F16, "first_stage_model.", latent=16)(seed),
            "text_encoders.none": torch.zeros(1, dtype=F16)}


def _reseeded(make: Maker) -> Maker:
    return lambda seed: make(seed + 1)


# name -> (path in the models directory, what makes it from a seed)
FILES: dict[str, tuple[str, Maker]] = {
    "sd15": ("checkpoints/tiny_sd15.safetensors", _sd15(arch.taesd)),
    "sd15_kl": ("checkpoints/tiny_sd15_kl.safetensors", _sd15(arch.kl_vae)),
    "sd15_2lv": ("checkpoints/tiny_sd15_2lv.safetensors", _sd15(arch.taesd, levels=2)),
    "sd15_fp8": ("checkpoints/tiny_sd15_fp8.safetensors", _sd15(arch.taesd, dtype=F8)),
    "sd3": ("checkpoints/tiny_sd3.safetensors", _sd3),
    "other": ("checkpoints/tiny_sd15_other.safetensors", _reseeded(_one(arch.unet, F16, "model.diffusion_model."))),   # model as LoRA
    "unet": ("diffusion_models/tiny_sd15_unet.safetensors", _one(arch.unet, F16)),
    "unet_fp8": ("diffusion_models/tiny_sd15_unet_fp8.safetensors", _one(arch.unet, F8)),
    "mmdit": ("diffusion_models/tiny_sd3.safetensors", _one(arch.mmdit, F16)),
    "flux": ("diffusion_models/tiny_flux.safetensors", _one(arch.flux, BF16)),
    "clip": ("text_encoders/tiny_clip_l.safetensors", _clip(F16)),
    "taesd": ("vae/tiny_taesd.safetensors", _one(arch.taesd, F16)),
    "taesd16": ("vae/tiny_taesd16.safetensors", _one(arch.taesd, F16, latent=16)),
    "kl": ("vae/tiny_kl.safetensors", _one(arch.kl_vae, F16)),
    "lora": ("loras/tiny_sd15_lora.safetensors", _one(arch.lora, F16, targets=arch.lora_targets())),
    "controlnet": ("controlnet/tiny_sd15_controlnet.safetensors", _one(arch.controlnet, F16)),
    "control_lora": ("controlnet/tiny_sd15_control_lora.safetensors", _one(arch.control_lora, F16)),
    "upscale": ("upscale_models/tiny_compact_x2.safetensors", _one(arch.compact_upscaler, F32)),
}
