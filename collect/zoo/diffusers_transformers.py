"""Transformers that denoise latents of images and clips, at their published sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, LARGE, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._diffusers import (
    Condition,
    Config,
    NoisePrediction,
    add,
    network,
    prompt,
)
from torchtraceap.collect.zoo._rows import Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class MaskedTokens:
    """Image tokens, some of them hidden, to logits of all; trained on what was hidden.

    Batch: tokens and target int64 [B, H, W], hidden bool [B, H, W], prompt fp32 [B, 77, 768], its summary
    fp32 [B, 768], sizes fp32 [B, 5].
    """

    codes: int = 8192

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        target = torch.randint(0, self.codes, (batch_size, *size), generator=generator)
        hidden = torch.rand(batch_size, *size, generator=generator) < 0.5
        return {
            "tokens": target.masked_fill(hidden, self.codes),
            "target": target,
            "hidden": hidden,
            "prompt": torch.randn(batch_size, 77, 768, generator=generator),
            "summary": torch.randn(batch_size, 768, generator=generator),
            "sizes": torch.rand(batch_size, 5, generator=generator) * 512,
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return model(
            input_ids=batch["tokens"],
            encoder_hidden_states=batch["prompt"],
            pooled_text_emb=batch["summary"],
            micro_conds=batch["sizes"],
        )

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        losses = cross_entropy(output, batch["target"], reduction="none")
        return (losses * batch["hidden"]).sum() / batch["hidden"].sum()


CLASS = NoisePrediction(
    sample_name="hidden_states", conditions=(Condition("class_labels", (), "label", 1000),)
)


def _text(*conditions: Condition, **changes: Any) -> NoisePrediction:
    """Latents under ``hidden_states``, beside a prompt and more."""
    return NoisePrediction(sample_name="hidden_states", conditions=conditions, **changes)


def _tokens(size: Size) -> Size:
    """Positions of a packed latent [C, H, W] or [C, F, H, W]."""
    count = 1
    for extent in size[1:]:
        count *= extent
    return (count,)


def _ids(dimensions: int) -> tuple[Condition, Condition]:
    """Places of image and text tokens; all the same, as they cost the same wherever they are."""
    image = Condition("img_ids", lambda size: (*_tokens(size), dimensions), "zeros", shared=True)
    return image, Condition("txt_ids", (512, dimensions), "zeros", shared=True)


PIXART = _text(
    prompt(120, 4096),
    constants=lambda size: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
)
PIXART_SIZED = _text(
    prompt(120, 4096),
    Condition("added_cond_kwargs.resolution", (2,)),
    Condition("added_cond_kwargs.aspect_ratio", (1,)),
)
SD3 = _text(
    prompt(333, 4096), Condition("pooled_projections", (2048,)), time_scale=1.0, flow=True
)  # 77 tokens of CLIP and 256 of T5
FLUX = _text(
    prompt(512, 4096),
    Condition("pooled_projections", (768,)),
    *_ids(3),
    time_scale=1e-3,
    flow=True,
    packed=True,
)
FLUX_GUIDED = replace(FLUX, conditions=(*FLUX.conditions, Condition("guidance", (), "ones")))
CHROMA = _text(prompt(512, 4096), *_ids(3), time_scale=1e-3, flow=True, packed=True)
AURA = _text(prompt(256, 2048), time_scale=1e-3, flow=True)
SANA = _text(prompt(300, 2304), time_scale=1.0, flow=True)
LUMINA = _text(
    prompt(256, 2304), Condition("encoder_attention_mask", (256,), "mask"), time_scale=1e-3, flow=True
)
COGVIEW = _text(
    prompt(224, 4096),
    Condition("original_size", (2,), "ones"),
    Condition("target_size", (2,), "ones"),
    Condition("crop_coords", (2,), "zeros"),
)
Z_IMAGE = NoisePrediction(
    sample_name="x",
    time_name="t",
    time_scale=1e-3,
    flow=True,
    conditions=(prompt(128, 2560, "cap_feats"),),
    lists=("x", "cap_feats"),
)
PRX = _text(prompt(256, 2304), time_scale=1e-3, flow=True)
COGVIDEO = _text(prompt(226, 4096))
WAN = _text(prompt(512, 4096), flow=True)
LTX = _text(
    prompt(128, 4096),
    Condition("encoder_attention_mask", (128,), "ones"),
    flow=True,
    packed=True,
    constants=lambda size: {"num_frames": size[1], "height": size[2], "width": size[3]},
)
MOCHI = _text(
    prompt(256, 4096), Condition("encoder_attention_mask", (256,), "ones"), time_scale=1.0, flow=True
)
LATTE = _text(prompt(120, 4096))
PRIOR = _text(Condition("proj_embedding", (1280,)), Condition("encoder_hidden_states", (77, 1280)))


def dit(width_heads: int, layers: int, patch: int = 2, head: int = 64) -> Config:
    return {
        "out_channels": 8,
        "sample_size": 32,
        "patch_size": patch,
        "num_layers": layers,
        "num_attention_heads": width_heads,
        "attention_head_dim": head,
    }


PIXART_512: Config = {"sample_size": 64, "caption_channels": 4096, "use_additional_conditions": False}
PIXART_1024: Config = {"sample_size": 128, "caption_channels": 4096}


def mmdit(heads: int, layers: int, **changes: Any) -> Config:
    return {
        "num_layers": layers,
        "num_attention_heads": heads,
        "caption_projection_dim": 64 * heads,
        "pos_embed_max_size": 192,
        **changes,
    }


SD35_MEDIUM = mmdit(
    24, 24, pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm"
)
SANA_SMALL: Config = {
    "num_layers": 28,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
COGVIEW4: Config = {"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32}
COGVIDEO_5B: Config = {
    "num_layers": 42,
    "num_attention_heads": 48,
}
WAN_SMALL: Config = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
LATTE_1: Config = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "attention_bias": True,
    "sample_size": 64,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 4096,
    "video_length": 16,
}
KANDINSKY_PRIOR: Config = {
    "num_attention_heads": 32,
    "attention_head_dim": 64,
    "num_layers": 20,
    "embedding_dim": 1280,
    "clip_embed_dim": 1280,
}

DIT_CLASS, PIXART_CLASS = "DiTTransformer2DModel", "PixArtTransformer2DModel"
SD3_CLASS, FLUX_CLASS = "SD3Transformer2DModel", "FluxTransformer2DModel"
SANA_CLASS, COGVIDEO_CLASS = "SanaTransformer2DModel", "CogVideoXTransformer3DModel"

# name, class, configuration, family, parameters in millions, adapter, latent's size on a GPU and on a CPU,
# batches
ROWS: list[tuple[str, str, Config, str, float, Adapter, tuple[Size, Size], BatchSizes]] = [
    ("dit-s-2", DIT_CLASS, dit(6, 12), "dit", 39.81, CLASS, ((4, 32, 32), (4, 32, 32)), MEDIUM),
    ("dit-b-2", DIT_CLASS, dit(12, 12), "dit", 147.44, CLASS, ((4, 32, 32), (4, 32, 32)), MEDIUM),
    ("dit-l-2", DIT_CLASS, dit(16, 24), "dit", 511.61, CLASS, ((4, 32, 32), (4, 32, 32)), NO_CPU_TRAINING),
    ("dit-xl-2", DIT_CLASS, dit(16, 28, head=72), "dit", 749.83,
     CLASS, ((4, 32, 32), (4, 32, 32)), NO_CPU_TRAINING),
    ("amused-512", "UVit2DModel", {"downsample": True, "upsample": True}, "uvit", 608.26,
     MaskedTokens(), ((32, 32), (16, 16)), NO_CPU_TRAINING),
    ("pixart-xl-2-512", PIXART_CLASS, PIXART_512, "pixart", 610.86,
     PIXART, ((4, 64, 64), (4, 16, 16)), NO_CPU_TRAINING),
    ("pixart-xl-2-1024", PIXART_CLASS, PIXART_1024, "pixart", 611.35,
     PIXART_SIZED, ((4, 128, 128), (4, 16, 16)), NO_CPU_TRAINING),
    ("sana-0.6b", SANA_CLASS, SANA_SMALL, "sana", 591.75, SANA, ((32, 32, 32), (32, 8, 8)), NO_CPU_TRAINING),
    ("sana-1.6b", SANA_CLASS, {}, "sana", 1604.46, SANA, ((32, 32, 32), (32, 8, 8)), LARGE),
    ("prx", "PRXTransformer2DModel", {}, "prx", 1170.69, PRX, ((16, 64, 64), (16, 16, 16)), LARGE),
    ("kandinsky-2.2-prior", "PriorTransformer", KANDINSKY_PRIOR, "prior_transformer", 1026.23,
     PRIOR, ((1280,), (1280,)), LARGE),
    ("sd3-medium", SD3_CLASS, mmdit(24, 24), "mmdit", 2028.33, SD3, ((16, 128, 128), (16, 16, 16)), LARGE),
    ("sd3.5-medium", SD3_CLASS, SD35_MEDIUM, "mmdit", 2243.17, SD3, ((16, 128, 128), (16, 16, 16)), LARGE),
    ("sd3.5-large", SD3_CLASS, mmdit(38, 38, qk_norm="rms_norm"), "mmdit", 8056.63,
     SD3, ((16, 128, 128), (16, 16, 16)), GPU_ONLY),
    ("flux.1-dev", FLUX_CLASS, {"guidance_embeds": True}, "flux", 11901.41,
     FLUX_GUIDED, ((64, 64, 64), (64, 8, 8)), GPU_ONLY),
    ("flux.1-schnell", FLUX_CLASS, {}, "flux", 11891.18, FLUX, ((64, 64, 64), (64, 8, 8)), GPU_ONLY),
    ("chroma", "ChromaTransformer2DModel", {}, "chroma", 8899.98,
     CHROMA, ((64, 64, 64), (64, 8, 8)), GPU_ONLY),
    ("auraflow", "AuraFlowTransformer2DModel", {}, "auraflow", 6833.44,
     AURA, ((4, 128, 128), (4, 16, 16)), GPU_ONLY),
    ("lumina-2", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304}, "lumina", 2609.77,
     LUMINA, ((16, 128, 128), (16, 16, 16)), LARGE),
    ("cogview-3-plus", "CogView3PlusTransformer2DModel", {}, "cogview", 2848.84,
     COGVIEW, ((16, 128, 128), (16, 16, 16)), LARGE),
    ("cogview-4", "CogView4Transformer2DModel", COGVIEW4, "cogview", 6369.12,
     COGVIEW, ((16, 128, 128), (16, 16, 16)), GPU_ONLY),
    ("z-image", "ZImageTransformer2DModel", {}, "z_image", 6154.91,
     Z_IMAGE, ((16, 1, 128, 128), (16, 1, 16, 16)), GPU_ONLY),
    ("latte-1", "LatteTransformer3DModel", LATTE_1, "latte", 1057.25,
     LATTE, ((4, 16, 64, 64), (4, 16, 16, 16)), LARGE),
    ("cogvideox-2b", COGVIDEO_CLASS, {}, "cogvideox", 1693.78,
     COGVIDEO, ((13, 16, 60, 90), (2, 16, 16, 16)), LARGE),
    ("cogvideox-5b", COGVIDEO_CLASS, COGVIDEO_5B, "cogvideox", 5570.28,
     COGVIDEO, ((13, 16, 60, 90), (2, 16, 16, 16)), GPU_ONLY),
    ("wan-2.1-1.3b", "WanTransformer3DModel", WAN_SMALL, "wan", 1419.00,
     WAN, ((16, 9, 60, 104), (16, 2, 16, 16)), LARGE),
    ("ltx-video", "LTXVideoTransformer3DModel", {}, "ltx", 1923.39,
     LTX, ((128, 21, 15, 22), (128, 2, 4, 4)), LARGE),
    ("mochi-1", "MochiTransformer3DModel", {}, "mochi", 10027.68,
     MOCHI, ((12, 7, 60, 106), (12, 1, 16, 16)), GPU_ONLY),
]  # fmt: skip

for _name, _class, _config, _family, _params, _adapter, _sizes, _batches in ROWS:
    add(_name, network(_class, _config), (_family, _family), _params, _adapter, _sizes, _batches)
