"""Denoising networks and autoencoders of diffusers, built from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes, ModelSpec, register
from torchtraceap.collect.zoo._batches import HEAVY, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._images import normalised, random_images

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TIMESTEPS = 1000


def _build(architecture: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, architecture)(**config)


@dataclass(frozen=True)
class NoisePrediction:
    """Predict the noise in a sample: training on all noise levels, or one denoising step at inference.

    Batch: sample (uint8 images, or fp32 latents as an autoencoder would leave them) and fp32 noise, both
    [B, *size]; timestep int64 [B]; and, where the model takes it, the encoded prompt
    ``encoder_hidden_states`` fp32 [B, tokens, width] or ``class_labels`` int64 [B]. The noise comes with the
    batch, so that a step is a function of its batch.

    Attributes:
        latent: The sample is a latent, not an image.
        prompt: Shape of an encoded prompt, or None.
        classes: Number of classes, or None.
    """

    latent: bool = True
    prompt: tuple[int, int] | None = None
    classes: int | None = None

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, *size)
        if self.latent:
            sample = torch.randn(shape, generator=generator)
        else:
            sample = random_images(batch_size, size, generator)
        batch = {
            "sample": sample,
            "noise": torch.randn(shape, generator=generator),
            "timestep": torch.randint(0, TIMESTEPS, (batch_size,), generator=generator),
        }
        if self.prompt is not None:
            batch["encoder_hidden_states"] = torch.randn(batch_size, *self.prompt, generator=generator)
        if self.classes is not None:
            batch["class_labels"] = torch.randint(0, self.classes, (batch_size,), generator=generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        noise, timestep = batch["noise"], batch["timestep"]
        noisy = self._add_noise(batch) if training else noise
        conditions = {k: batch[k] for k in ("encoder_hidden_states", "class_labels") if k in batch}
        predicted = model(noisy, timestep=timestep, return_dict=False, **conditions)[0]
        return predicted[:, : noise.shape[1]]  # some predict the variance in further channels

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(output, batch["noise"])

    def _add_noise(self, batch: Batch) -> Tensor:
        """Cosine schedule, computed on the device: a table of it would be copied there in every step."""
        sample = batch["sample"] if self.latent else normalised(batch["sample"])
        angle = batch["timestep"].float().mul(pi / 2 / TIMESTEPS).view(-1, 1, 1, 1)
        return angle.cos() * sample + angle.sin() * batch["noise"]


@dataclass(frozen=True)
class Reconstruction:
    """Encode and decode an image. Batch: image uint8 [B, 3, H, W]."""

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        return {"image": random_images(batch_size, size, generator)}

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        pixels = normalised(batch["image"])
        return {"pixels": pixels, "reconstruction": model(pixels, return_dict=False)[0]}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(output["reconstruction"], output["pixels"])


DDPM = {
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
}
DOWN, DOWN_ATTENTION, UP, UP_ATTENTION = "DownBlock2D", "AttnDownBlock2D", "UpBlock2D", "AttnUpBlock2D"

DDPM_SMALL = {
    "sample_size": 32,
    "block_out_channels": (32, 64, 64),
    "down_block_types": (DOWN, DOWN_ATTENTION, DOWN),
    "up_block_types": (UP, UP_ATTENTION, UP),
    **DDPM,
}
DDPM_CIFAR10 = {
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "down_block_types": (DOWN, DOWN_ATTENTION, DOWN, DOWN),
    "up_block_types": (UP, UP, UP_ATTENTION, UP),
    **DDPM,
}
DDPM_CHURCH = {
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "down_block_types": (DOWN, DOWN, DOWN, DOWN, DOWN_ATTENTION, DOWN),
    "up_block_types": (UP, UP_ATTENTION, UP, UP, UP, UP),
    **DDPM,
}
CONDITIONED_SMALL = {
    "sample_size": 32,
    "block_out_channels": (64, 128, 256),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", DOWN),
    "up_block_types": (UP, "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 256,
}
STABLE_DIFFUSION_1 = {"sample_size": 64, "cross_attention_dim": 768}
DIT_S = {
    "out_channels": 8,
    "sample_size": 32,
    "patch_size": 2,
    "num_layers": 12,
    "num_attention_heads": 6,
    "attention_head_dim": 64,
}
KL_F8 = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}

# name, class, configuration, family, parameters in millions, adapter, input size on a GPU, on a CPU, batches,
# demo tier
ROWS: list[
    tuple[str, str, dict[str, Any], str, float, Adapter, tuple[int, ...], tuple[int, ...], BatchSizes, bool]
] = [
    ("ddpm-small", "UNet2DModel", DDPM_SMALL, "diffusion_unet", 1.62,
     NoisePrediction(latent=False), (3, 32, 32), (3, 32, 32), MEDIUM, True),
    ("ddpm-cifar10", "UNet2DModel", DDPM_CIFAR10, "diffusion_unet", 35.75,
     NoisePrediction(latent=False), (3, 32, 32), (3, 32, 32), MEDIUM, False),
    ("ddpm-church-256", "UNet2DModel", DDPM_CHURCH, "diffusion_unet", 113.67,
     NoisePrediction(latent=False), (3, 256, 256), (3, 64, 64), HEAVY, False),
    ("unet-condition-small", "UNet2DConditionModel", CONDITIONED_SMALL, "conditional_unet", 18.15,
     NoisePrediction(prompt=(77, 256)), (4, 32, 32), (4, 16, 16), MEDIUM, False),
    ("stable-diffusion-1.5", "UNet2DConditionModel", STABLE_DIFFUSION_1, "conditional_unet", 859.52,
     NoisePrediction(prompt=(77, 768)), (4, 64, 64), (4, 16, 16), NO_CPU_TRAINING, False),
    ("dit-s-2", "DiTTransformer2DModel", DIT_S, "dit", 39.81,
     NoisePrediction(classes=1000), (4, 32, 32), (4, 32, 32), MEDIUM, False),
    ("autoencoder-kl-f8", "AutoencoderKL", KL_F8, "autoencoder_kl", 83.65, Reconstruction(),
     (3, 256, 256), (3, 64, 64), HEAVY, False),
]  # fmt: skip

for _name, _class, _config, _family, _params, _adapter, _gpu, _cpu, _batches, _small in ROWS:
    register(
        ModelSpec(
            name=f"diffusers/{_name}",
            source="diffusers",
            task="generation",
            family=_family,
            backbone_family=_family,
            licence="Apache-2.0",
            params_m=_params,
            build=partial(_build, _class, _config),
            adapter=_adapter,
            gpu_size=_gpu,
            cpu_size=_cpu,
            batch_sizes=_batches,
            small=_small,
        )
    )
