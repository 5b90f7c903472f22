"""The smallest networks that ComfyUI's model detection takes for the real architectures.

Shapes are written out from the public layouts (LDM UNet and ControlNet, CLIP text model, KL autoencoder, TAESD, MMDiT, Flux,
SRVGGNetCompact), shrunk as far as the detection allows. Weights are random, a function of the seed and the tensor's name alone,
so adding a tensor does not change the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

class StateDict:
    """The tensors of one file: names, shapes and fills. Nothing is drawn before build()."""

    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.items: dict[str, tuple[tuple[int, ...], str | torch.Tensor, float]] = {}

    def at(self, prefix: str) -> StateDict:
        """The same dict seen below a longer prefix."""
        child = StateDict(self.prefix + prefix)
        child.items = self.items
        return child

    # Weights are drawn with variance gain^2 / fan_in, which keeps activations near unit size through a random network, in fp16 too.
    def put(self, name: str, shape: Sequence[int], fill: str | torch.Tensor = "normal", gain: float = 1.0) -> None:
        self.items[self.prefix + name] = (tuple(shape), fill, gain)

    def linear(self, name: str, n_out: int, n_in: int, bias: bool = True, gain: float = 1.0) -> None:
        self.put(name + ".weight", (n_out, n_in), gain=gain)
        if bias:
            self.put(name + ".bias", (n_out,), "bias")

    def conv(self, name: str, n_out: int, n_in: int, k: int = 3, bias: bool = True, gain: float = 1.0) -> None:
        self.put(name + ".weight", (n_out, n_in, k, k), gain=gain)
        if bias:
            self.put(name + ".bias", (n_out,), "bias")

    def norm(self, name: str, n: int) -> None:
        self.put(name + ".weight", (n,), "one")
        self.put(name + ".bias", (n,), "bias")

    def build(self, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: draw(seed, name, *spec).to(dtype).contiguous() for name, spec in self.items.items()}


def draw(seed: int, name: str, shape: tuple[int, ...], fill: str | torch.Tensor, gain: float) -> torch.Tensor:
    """fill: a tensor to be taken as it is, or one of zero, one, bias, embed, normal."""
    if isinstance(fill, torch.Tensor):
        return fill
    if fill == "zero":
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    t = torch.from_numpy(np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(shape, dtype=np.float32))
    if fill == "one":
        return 1.0 + 0.05 * t
    if fill == "bias":
        return 0.02 * t
    if fill == "embed":
        return gain * t
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else 1
    return t * (gain / math.sqrt(fan_in))


# ---- LDM UNet family

CH = 320            # the detector asks for exactly this many
EMB = 4 * CH
CTX = 768           # ... and for this, which is CLIP-L's width


def res_block(d, n_in, n_out):
    d.norm("in_layers.0", n_in)
    d.conv("in_layers.2", n_out, n_in)
    d.linear("emb_layers.1", n_out, EMB)
    d.norm("out_layers.0", n_out)
    d.conv("out_layers.3", n_out, n_out, gain=0.5)
    if n_in != n_out:
        d.conv("skip_connection", n_out, n_in, k=1)


def spatial_transformer(d, n, ctx=CTX):
    d.norm("norm", n)
    d.conv("proj_in", n, n, k=1)
    b = d.at("transformer_blocks.0.")
    for name, width in (("attn1", n), ("attn2", ctx)):
        b.linear(name + ".to_q", n, n, bias=False)
        b.linear(name + ".to_k", n, width, bias=False)
        b.linear(name + ".to_v", n, width, bias=False)
        b.linear(name + ".to_out.0", n, n, gain=0.5)
    b.linear("ff.net.0.proj", 8 * n, n)
    b.linear("ff.net.2", n, 4 * n, gain=0.5)
    for i in (1, 2, 3):
        b.norm(f"norm{i}", n)
    d.conv("proj_out", n, n, k=1, gain=0.5)


def time_embed(d):
    d.linear("time_embed.0", EMB, CH)
    d.linear("time_embed.2", EMB, EMB)


def encoder_half(d, levels, in_channels=4):
    """Input blocks. Returns the channel count after each of them."""
    d.conv("input_blocks.0.0", CH, in_channels)
    chans, i = [CH], 1
    for level in range(levels):
        b = d.at(f"input_blocks.{i}.")
        res_block(b.at("0."), CH, CH)
        if level == 0:
            spatial_transformer(b.at("1."), CH)
        chans.append(CH)
        i += 1
        if level != levels - 1:
            d.conv(f"input_blocks.{i}.0.op", CH, CH)
            chans.append(CH)
            i += 1
    res_block(d.at("middle_block.0."), CH, CH)
    return chans


def unet(d, levels=1, in_channels=4):
    time_embed(d)
    chans = encoder_half(d, levels, in_channels)
    i = 0
    for level in reversed(range(levels)):
        for nr in range(2):
            b = d.at(f"output_blocks.{i}.")
            res_block(b.at("0."), CH + chans.pop(), CH)
            if nr == 1 and level != 0:
                b.conv("1.conv", CH, CH)
            i += 1
    d.norm("out.0", CH)
    d.conv("out.2", 4, CH)


HINT = [(16, 3), (16, 16), (32, 16), (32, 32), (96, 32), (96, 96), (256, 96), (CH, 256)]


def hint_and_zero_convs(d, levels):
    for i, (n_out, n_in) in enumerate(HINT):
        d.conv(f"input_hint_block.{2 * i}", n_out, n_in, gain=1.4)
    for i in range(2 * levels):
        d.conv(f"zero_convs.{i}.0", CH, CH, k=1, gain=0.3)
    d.conv("middle_block_out.0", CH, CH, k=1, gain=0.3)


def controlnet(d, levels=1):
    time_embed(d)
    encoder_half(d, levels)
    hint_and_zero_convs(d, levels)


def control_lora(d, levels=1, rank=4):
    """The hint half in full, the UNet half as low-rank differences."""
    d.put("lora_controlnet", (), "zero")
    hint_and_zero_convs(d, levels)
    base = StateDict()
    time_embed(base)
    encoder_half(base, levels)
    for name, (shape, _, _) in base.items.items():
        if len(shape) < 2:
            continue
        stem = name[:-len(".weight")]
        d.put(stem + ".up", (shape[0], rank), gain=0.3)
        d.put(stem + ".down", (rank,) + shape[1:], gain=0.3)


# ---- Text encoder: CLIP-L, whose size ComfyUI fixes

def clip_l(d, live_layers=2, width=768, inner=3072, layers=12, vocab=49408, positions=77):
    """Layers beyond live_layers are all zero: they pass the residual stream on unchanged and cost no disk in a sparse file."""
    d.put("embeddings.token_embedding.weight", (vocab, width), "embed", 0.5)
    d.put("embeddings.position_embedding.weight", (positions, width), "embed", 0.1)
    for i in range(layers):
        fill = "normal" if i < live_layers else "zero"
        b = d.at(f"encoder.layers.{i}.")
        for p in ("q", "k", "v", "out"):
            b.put(f"self_attn.{p}_proj.weight", (width, width), fill, 0.7)
            b.put(f"self_attn.{p}_proj.bias", (width,), "bias" if fill == "normal" else fill)
        b.put("mlp.fc1.weight", (inner, width), fill)
        b.put("mlp.fc1.bias", (inner,), "bias" if fill == "normal" else fill)
        b.put("mlp.fc2.weight", (width, inner), fill, 0.7)
        b.put("mlp.fc2.bias", (width,), "bias" if fill == "normal" else fill)
        b.norm("layer_norm1", width)
        b.norm("layer_norm2", width)
    d.norm("final_layer_norm", width)


def clear_rare_tokens(table, first=8192, last=256):
    """Clear a token embedding but for its first and last rows; a cleared page is a hole in the file and costs no disk.

    Ids follow how common a word is, so the first rows hold what prompts are made of and the last ones the special tokens. A rarer
    word gives a zero vector: it works, but two such words are the same one."""
    table = table.clone()
    table[first:table.shape[0] - last] = 0
    return table


# ---- VAEs

def taesd(d, latent=4, width=64):
    def block(b):
        for i in (0, 2, 4):
            b.conv(f"conv.{i}", width, width, gain=0.8)

    e = d.at("taesd_encoder.")
    e.conv("0", width, 3)
    block(e.at("1."))
    i = 2
    for _ in range(3):
        e.conv(str(i), width, width, bias=False)
        for j in range(3):
            block(e.at(f"{i + 1 + j}."))
        i += 4
    e.conv(str(i), latent, width, gain=0.5)

    g = d.at("taesd_decoder.")
    g.conv("1", width, latent)
    i = 3
    for _ in range(3):
        for j in range(3):
            block(g.at(f"{i + j}."))
        g.conv(str(i + 4), width, width, bias=False)      # i + 3 is the upsampler
        i += 5
    block(g.at(f"{i}."))
    g.conv(str(i + 1), 3, width, gain=0.5)
    d.put("vae_scale", (), torch.tensor(1.0))
    d.put("vae_shift", (), torch.tensor(0.0))


def kl_vae(d, latent=4, enc=128, dec=32, mult=(1, 2, 4, 4), blocks=2):
    """The ordinary SD autoencoder. ComfyUI fixes the encoder's width at 128 but reads the decoder's; group norm asks for a multiple of 32."""
    def res(b, n_in, n_out):
        b.norm("norm1", n_in)
        b.conv("conv1", n_out, n_in)
        b.norm("norm2", n_out)
        b.conv("conv2", n_out, n_out, gain=0.5)
        if n_in != n_out:
            b.conv("nin_shortcut", n_out, n_in, k=1)

    def mid(b, n):
        res(b.at("block_1."), n, n)
        b.norm("attn_1.norm", n)
        for p in ("q", "k", "v"):
            b.conv("attn_1." + p, n, n, k=1)
        b.conv("attn_1.proj_out", n, n, k=1, gain=0.5)
        res(b.at("block_2."), n, n)

    e = d.at("encoder.")
    e.conv("conv_in", enc, 3)
    n = enc
    for i, m in enumerate(mult):
        for j in range(blocks):
            res(e.at(f"down.{i}.block.{j}."), n, enc * m)
            n = enc * m
        if i != len(mult) - 1:
            e.conv(f"down.{i}.downsample.conv", n, n)
    mid(e.at("mid."), n)
    e.norm("norm_out", n)
    e.conv("conv_out", 2 * latent, n)

    g = d.at("decoder.")
    n = dec * mult[-1]
    g.conv("conv_in", n, latent)
    mid(g.at("mid."), n)
    for i in reversed(range(len(mult))):
        for j in range(blocks + 1):
            res(g.at(f"up.{i}.block.{j}."), n, dec * mult[i])
            n = dec * mult[i]
        if i != 0:
            g.conv(f"up.{i}.upsample.conv", n, n)
    g.norm("norm_out", n)
    g.conv("conv_out", 3, n)
    d.conv("quant_conv", 2 * latent, 2 * latent, k=1)
    d.conv("post_quant_conv", latent, latent, k=1)


# ---- Transformers whose size the detector reads from the weights

def sincos(n_side, width):
    """A fixed 2-d sine-cosine position table, n_side^2 by width."""
    def axis(pos, w):
        omega = 1.0 / 10000 ** (np.arange(w // 2) / (w / 2.0))
        a = np.outer(pos.reshape(-1), omega)
        return np.concatenate([np.sin(a), np.cos(a)], axis=1)
    y, x = np.mgrid[:n_side, :n_side].astype(np.float64)
    t = np.concatenate([axis(x, width // 2), axis(y, width // 2)], axis=1)
    return torch.from_numpy(t.astype(np.float32)).unsqueeze(0)


def mmdit(d, depth=2, latent=16, side=64, pooled=2048, ctx=4096):
    """SD3. Width is 64 times the depth, and the depth is read from the width."""
    w = 64 * depth
    d.put("pos_embed", (1, side * side, w), sincos(side, w))
    d.conv("x_embedder.proj", w, latent, k=2)
    for name, n_in in (("t_embedder", 256), ("y_embedder", pooled)):
        d.linear(name + ".mlp.0", w, n_in)
        d.linear(name + ".mlp.2", w, w)
    d.linear("context_embedder", w, ctx)
    for i in range(depth):
        last = i == depth - 1
        for name in ("context_block", "x_block"):
            b = d.at(f"joint_blocks.{i}.{name}.")
            half = last and name == "context_block"     # the last one only feeds attention
            b.linear("attn.qkv", 3 * w, w)
            b.linear("adaLN_modulation.1", (2 if half else 6) * w, w, gain=0.5)
            if not half:
                b.linear("attn.proj", w, w)
                b.linear("mlp.fc1", 4 * w, w)
                b.linear("mlp.fc2", w, 4 * w)
    d.linear("final_layer.linear", 4 * latent, w)
    d.linear("final_layer.adaLN_modulation.1", 2 * w, w, gain=0.5)


def flux(d, depth=1, single=1, heads=1, latent=16, ctx=CTX, pooled=CTX):
    """Width is 128 times the heads, and the heads are read from the width. The widths of the conditioning are read too: these
    are CLIP-L's, in place of T5's."""
    w, head = 128 * heads, 128
    d.linear("img_in", w, 4 * latent)
    d.linear("txt_in", w, ctx)
    for name, n_in in (("time_in", 256), ("vector_in", pooled), ("guidance_in", 256)):
        d.linear(name + ".in_layer", w, n_in)
        d.linear(name + ".out_layer", w, w)
    for i in range(depth):
        for s in ("img", "txt"):
            b = d.at(f"double_blocks.{i}.{s}_")
            b.linear("mod.lin", 6 * w, w, gain=0.5)
            b.linear("attn.qkv", 3 * w, w)
            b.put("attn.norm.query_norm.scale", (head,), "one")
            b.put("attn.norm.key_norm.scale", (head,), "one")
            b.linear("attn.proj", w, w)
            b.linear("mlp.0", 4 * w, w)
            b.linear("mlp.2", w, 4 * w)
    for i in range(single):
        b = d.at(f"single_blocks.{i}.")
        b.linear("linear1", 7 * w, w)
        b.linear("linear2", w, 5 * w)
        b.put("norm.query_norm.scale", (head,), "one")
        b.put("norm.key_norm.scale", (head,), "one")
        b.linear("modulation.lin", 3 * w, w, gain=0.5)
    d.linear("final_layer.linear", 4 * latent, w)
    d.linear("final_layer.adaLN_modulation.1", 2 * w, w, gain=0.5)


# ---- Small things

def lora(d, targets, rank=4, alpha=4.0):
    """targets: {file key stem: weight shape}, written in the kohya naming."""
    for stem, shape in targets.items():
        d.put(stem + ".lora_down.weight", (rank,) + tuple(shape[1:]))
        up = (shape[0], rank) + (1, 1) * (len(shape) == 4)
        d.put(stem + ".lora_up.weight", up, gain=0.5)
        d.put(stem + ".alpha", (), torch.tensor(alpha))


def lora_targets(levels=1, unet_part=True, clip_part=True):
    out = {}
    if unet_part:
        base = StateDict()
        unet(base, levels)
        for name, (shape, _, _) in base.items.items():
            if name.endswith(".weight") and (".transformer_blocks." in name or ".proj_" in name) and len(shape) > 1:
                out["lora_unet_" + name[:-len(".weight")].replace(".", "_")] = shape
    if clip_part:
        base = StateDict()
        clip_l(base)
        for name, (shape, _, _) in base.items.items():
            if name.startswith("encoder.") and ".layers.0." in name and name.endswith(".weight") and len(shape) > 1:
                out["lora_te_text_model_" + name[:-len(".weight")].replace(".", "_")] = shape
    return out


def compact_upscaler(d, width=16, convs=2, scale=2):
    d.conv("body.0", width, 3)
    d.put("body.1.weight", (width,), "bias")
    for i in range(convs):
        d.conv(f"body.{2 + 2 * i}", width, width)
        d.put(f"body.{3 + 2 * i}.weight", (width,), "bias")
    d.conv(f"body.{2 + 2 * convs}", 3 * scale * scale, width, gain=0.1)
