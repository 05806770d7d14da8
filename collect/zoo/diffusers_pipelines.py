"""Whole generation: denoising steps with a scheduler and guidance, then the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Batch, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, INFER_ONLY
from torchtraceap.collect.zoo._diffusers import Condition, Config, add, picture, prompt
from torchtraceap.collect.zoo._rows import Size
from torchtraceap.collect.zoo.diffusers_autoencoders import DC_F32, KL_16_CHANNELS, KL_F8
from torchtraceap.collect.zoo.diffusers_transformers import PIXART_512, SANA_SMALL, WAN_SMALL, mmdit
from torchtraceap.collect.zoo.diffusers_unets import (
    ANIMATE_DIFF,
    CONSISTENCY_IMAGENET64,
    LCM,
    SDXL,
    STABLE_DIFFUSION_1,
    STABLE_DIFFUSION_2,
    TINY_SD,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Part = tuple[str, Config]
"""A class of diffusers and its configuration."""


def build(pipeline: str, parts: Mapping[str, Part], scheduler: Part, absent: tuple[str, ...]) -> nn.Module:
    """A module that calls a pipeline of diffusers, whose networks are its children.

    Args:
        pipeline: The class.
        parts: Its networks, by the names that it has for them.
        scheduler: What takes the steps.
        absent: Parts that it is made without; prompts come encoded.
    """
    import diffusers
    import torch
    from torch import nn

    class Pipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            networks = {name: getattr(diffusers, kind)(**config) for name, (kind, config) in parts.items()}
            kind, config = scheduler
            with torch.device("cpu"):  # its tables stay there, whatever the default device
                steps = getattr(diffusers, kind)(**config)
            nothing = dict.fromkeys(absent)
            self.networks = nn.ModuleDict(networks)
            self.pipeline = getattr(diffusers, pipeline)(scheduler=steps, **networks, **nothing)
            self.pipeline.set_progress_bar_config(disable=True)

        def forward(self, **inputs: Any) -> Any:
            return self.pipeline(**inputs)

    return Pipeline()


@dataclass(frozen=True)
class Generation:
    """Encoded prompts and noise to images. Batch: fp32, under the pipeline's own names for its arguments.

    Attributes:
        conditions: Arguments that are a tensor beside the noise, ``latents``.
        options: Other arguments.
        scale: Pixels a position of a latent; 0: the pipeline is not told height and width by it.
        count: The argument that says how many to make, for a pipeline that has no prompt to tell it by.
    """

    conditions: tuple[Condition, ...]
    options: Mapping[str, Any]
    scale: int = 8
    count: str = ""

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        batch = {"latents": torch.randn(batch_size, *size, generator=generator)}
        for condition in self.conditions:
            batch[condition.name] = condition.make(batch_size, size, generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        inputs: dict[str, Any] = {**batch, **self.options, "output_type": "pt", "return_dict": False}
        latents = batch["latents"]
        if self.scale:
            inputs["height"], inputs["width"] = (self.scale * extent for extent in latents.shape[-2:])
        if self.count:
            inputs[self.count] = len(latents)
        return model(**inputs)[0]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        raise NotImplementedError("a pipeline generates; its network is trained by itself")


KL: Part = ("AutoencoderKL", KL_F8)
KL_SHIFTED: Part = (
    "AutoencoderKL",
    {**KL_16_CHANNELS, "scaling_factor": 1.5305, "shift_factor": 0.0609},
)
TINY: Part = ("AutoencoderTiny", {})
FLOW: Part = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
TEXT = ("text_encoder", "tokenizer")
STABLE = (*TEXT, "safety_checker", "feature_extractor", "requires_safety_checker")


def _prompts(tokens: int, width: int) -> tuple[Condition, Condition]:
    """What to show and what not, encoded."""
    return prompt(tokens, width, "prompt_embeds"), prompt(tokens, width, "negative_prompt_embeds")


def _summaries(width: int) -> tuple[Condition, Condition]:
    """The same in one vector each."""
    return Condition("pooled_prompt_embeds", (width,)), Condition("negative_pooled_prompt_embeds", (width,))


def _masks(tokens: int) -> tuple[Condition, Condition]:
    """No prompt is padded."""
    return (
        Condition("prompt_attention_mask", (tokens,), "mask"),
        Condition("negative_prompt_attention_mask", (tokens,), "mask"),
    )


def _steps(count: int, **options: Any) -> dict[str, Any]:
    return {"num_inference_steps": count, **options}


FROM_MASKED = {"negative_prompt": None, "use_resolution_binning": False}
"""Prompts come encoded, and images of the size asked for."""

# name, pipeline, networks, scheduler, what it is made without, family, parameters in millions, adapter,
# latent's size on a GPU and on a CPU, batches
ROWS: list[
    tuple[
        str, str, dict[str, Part], Part, tuple[str, ...], str, float, Generation, tuple[Size, Size],
        BatchSizes,
    ]
] = [
    ("generate-consistency-imagenet64", "ConsistencyModelPipeline",
     {"unet": ("UNet2DModel", CONSISTENCY_IMAGENET64)}, ("CMStochasticIterativeScheduler", {}), (),
     "diffusion_unet", 295.9, Generation((), _steps(2), scale=0, count="batch_size"),
     ((3, 64, 64), (3, 64, 64)), INFER_ONLY),
    ("generate-sd-tiny-dpm", "StableDiffusionPipeline",
     {"unet": ("UNet2DConditionModel", TINY_SD), "vae": TINY}, ("DPMSolverMultistepScheduler", {}), STABLE,
     "conditional_unet", 325.83, Generation(_prompts(77, 768), _steps(3)),
     ((4, 64, 64), (4, 16, 16)), INFER_ONLY),
    ("generate-sd-1.5-ddim", "StableDiffusionPipeline",
     {"unet": ("UNet2DConditionModel", STABLE_DIFFUSION_1), "vae": KL}, ("DDIMScheduler", {}), STABLE,
     "conditional_unet", 943.17, Generation(_prompts(77, 768), _steps(3)),
     ((4, 64, 64), (4, 16, 16)), GPU_ONLY),
    ("generate-sd-turbo", "StableDiffusionPipeline",
     {"unet": ("UNet2DConditionModel", STABLE_DIFFUSION_2), "vae": KL},
     ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}), STABLE,
     "conditional_unet", 949.56, Generation(_prompts(77, 1024)[:1], _steps(1, guidance_scale=0.0)),
     ((4, 64, 64), (4, 16, 16)), GPU_ONLY),
    ("generate-sd-lcm", "LatentConsistencyModelPipeline",
     {"unet": ("UNet2DConditionModel", LCM), "vae": KL}, ("LCMScheduler", {}), STABLE,
     "conditional_unet", 943.26, Generation(_prompts(77, 768)[:1], _steps(4)),
     ((4, 64, 64), (4, 16, 16)), GPU_ONLY),
    ("generate-sd-controlnet", "StableDiffusionControlNetPipeline",
     {
         "unet": ("UNet2DConditionModel", STABLE_DIFFUSION_1), "vae": KL,
         "controlnet": ("ControlNetModel", {"cross_attention_dim": 768}),
     },
     ("UniPCMultistepScheduler", {}), STABLE,
     "conditional_unet", 1304.45, Generation((*_prompts(77, 768), Condition("image", picture)), _steps(2)),
     ((4, 64, 64), (4, 16, 16)), GPU_ONLY),
    ("generate-animatediff", "AnimateDiffPipeline",
     {"unet": ("UNetMotionModel", ANIMATE_DIFF), "vae": KL}, ("DDIMScheduler", {}),
     (*TEXT, "motion_adapter"),
     "video_unet", 1360.31, Generation(_prompts(77, 768), _steps(1, num_frames=16)),
     ((4, 16, 64, 64), (4, 16, 16, 16)), GPU_ONLY),
    ("generate-sdxl-euler", "StableDiffusionXLPipeline",
     {"unet": ("UNet2DConditionModel", SDXL), "vae": KL}, ("EulerDiscreteScheduler", {}),
     (*TEXT, "text_encoder_2", "tokenizer_2"),
     "conditional_unet", 2651.12, Generation((*_prompts(77, 2048), *_summaries(1280)), _steps(2)),
     ((4, 128, 128), (4, 16, 16)), GPU_ONLY),
    ("generate-pixart-512", "PixArtAlphaPipeline",
     {"transformer": ("PixArtTransformer2DModel", PIXART_512), "vae": KL},
     ("DPMSolverMultistepScheduler", {}), TEXT,
     "pixart", 694.51, Generation((*_prompts(120, 4096), *_masks(120)), _steps(2, **FROM_MASKED)),
     ((4, 64, 64), (4, 16, 16)), INFER_ONLY),
    ("generate-sana-0.6b", "SanaPipeline",
     {"transformer": ("SanaTransformer2DModel", SANA_SMALL), "vae": ("AutoencoderDC", DC_F32)}, FLOW, TEXT,
     "sana", 904, Generation((*_prompts(300, 2304), *_masks(300)), _steps(2, **FROM_MASKED), scale=32),
     ((32, 32, 32), (32, 8, 8)), GPU_ONLY),
    ("generate-sd3-medium", "StableDiffusion3Pipeline",
     {"transformer": ("SD3Transformer2DModel", mmdit(24, 24)), "vae": KL_SHIFTED}, FLOW,
     (*TEXT, "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
     "mmdit", 2112.15, Generation((*_prompts(333, 4096), *_summaries(2048)), _steps(2)),
     ((16, 128, 128), (16, 16, 16)), GPU_ONLY),
    ("generate-wan-2.1-1.3b", "WanPipeline",
     {"transformer": ("WanTransformer3DModel", WAN_SMALL), "vae": ("AutoencoderKLWan", {})}, FLOW, TEXT,
     "wan", 1545.89, Generation(_prompts(512, 4096), _steps(1, num_frames=9)),
     ((16, 3, 60, 104), (16, 3, 8, 8)), GPU_ONLY),
]  # fmt: skip

for (
    _name, _pipeline, _parts, _scheduler, _absent, _family, _params, _adapter, _sizes, _batches,
) in ROWS:  # fmt: skip
    add(
        _name, partial(build, _pipeline, _parts, _scheduler, _absent), (_family, _family), _params, _adapter,
        _sizes, _batches,
    )  # fmt: skip
