"""How rows of diffusers are built, registered and fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any, Literal

from torchtraceap.collect.model import Batch
from torchtraceap.collect.zoo import _rows
from torchtraceap.collect.zoo._images import normalised, random_images
from torchtraceap.collect.zoo._rows import Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TIMESTEPS = 1000

Config = dict[str, Any]
Kind = Literal["normal", "zeros", "ones", "mask", "label"]


def network(architecture: str, config: Config) -> Callable[[], nn.Module]:
    """Makes a network of random weights, from the class and its configuration."""

    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, architecture)(**config)

    return build


add = partial(_rows.add, "diffusers", "Apache-2.0", "generation")

SDXL_COMMON: Config = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""What the U-Net of Stable Diffusion XL and the network that steers it have in common."""


@dataclass(frozen=True)
class Condition:
    """A further input of a denoising network.

    Attributes:
        name: Keyword that the network takes it by; with a dot, an entry of a dictionary.
        shape: Of one sample's, or a function of the size of a sample's latent.
        kind: Random normal or constant fp32; ``mask``: ones int64; ``label``: int64 below ``high``.
        high: Number of labels.
        shared: The same for all samples, and the network takes it without a batch dimension.
    """

    name: str
    shape: Size | Callable[[Size], Size]
    kind: Kind = "normal"
    high: int = 0
    shared: bool = False

    def make(self, batch_size: int, size: Size, generator: torch.Generator) -> Tensor:
        import torch

        shape = (batch_size, *(self.shape(size) if callable(self.shape) else self.shape))
        match self.kind:
            case "normal":
                return torch.randn(shape, generator=generator)
            case "zeros":
                return torch.zeros(shape)
            case "ones":
                return torch.ones(shape)
            case "mask":
                return torch.ones(shape, dtype=torch.int64)
            case "label":
                return torch.randint(0, self.high, shape, generator=generator)


def prompt(tokens: int, width: int, name: str = "encoder_hidden_states") -> Condition:
    """An encoded prompt."""
    return Condition(name, (tokens, width))


def picture(size: Size) -> Size:
    """The image that belongs to a latent."""
    return (3, 8 * size[1], 8 * size[2])


@dataclass(frozen=True)
class NoisePrediction:
    """Predict the noise in a sample: training on all noise levels, or one denoising step at inference.

    Batch: sample (uint8 images, or fp32 latents as an autoencoder would leave them) and fp32 noise, both
    [B, *size]; timestep int64 [B]; and the conditions. The noise comes with the batch, so that a step is a
    function of its batch.

    Attributes:
        latent: The sample is a latent, not an image.
        conditions: What else the network takes.
        sample_name: Keyword of the noisy sample.
        time_name: Keyword of the time.
        time_scale: The network takes the time as a float, so many a step; None: as it is.
        flow: Flow matching: samples and noise mix linearly, and their difference is predicted.
        packed: The network takes positions as a sequence, [B, positions, channels].
        per_frame: The network takes a prompt for each frame of a clip [C, F, H, W].
        lists: Keywords of inputs that the network takes as a list of samples.
        constants: Further arguments, a function of the size of a latent.
    """

    latent: bool = True
    conditions: tuple[Condition, ...] = ()
    sample_name: str = "sample"
    time_name: str = "timestep"
    time_scale: float | None = None
    flow: bool = False
    packed: bool = False
    per_frame: bool = False
    lists: tuple[str, ...] = ()
    constants: Callable[[Size], Mapping[str, Any]] | None = None

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
        for condition in self.conditions:
            batch[condition.name] = condition.make(batch_size, size, generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        noise = batch["noise"]
        return self._predict(model, batch, self._add_noise(batch) if training else noise)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import mse_loss

        target = batch["noise"] - batch["sample"] if self.flow else batch["noise"]
        return mse_loss(output, target[:, : output.shape[1]])

    def call(self, model: nn.Module, batch: Batch, noisy: Tensor) -> Any:
        """The network's outputs, for a noisy sample [B, *size]."""
        size = tuple(noisy.shape[1:])
        if self.packed:
            noisy = noisy.flatten(2).transpose(1, 2)
        time: Tensor = batch["timestep"]
        if self.time_scale is not None:
            time = time.float() * self.time_scale
        inputs: dict[str, Any] = {self.sample_name: noisy, self.time_name: time, "return_dict": False}
        for condition in self.conditions:
            value = batch[condition.name]
            _put(inputs, condition.name, value[0] if condition.shared else value)
        if self.per_frame:
            prompts: Tensor = inputs["encoder_hidden_states"]
            inputs["encoder_hidden_states"] = prompts.repeat_interleave(size[1], dim=0)
        for name in self.lists:
            inputs[name] = list(inputs[name].unbind())
        if self.constants is not None:
            inputs.update(self.constants(size))
        return model(**inputs)

    def _predict(self, model: nn.Module, batch: Batch, noisy: Tensor) -> Tensor:
        import torch

        predicted = self.call(model, batch, noisy)[0]
        if isinstance(predicted, list):
            predicted = torch.stack(predicted)
        if self.packed:
            return predicted.transpose(1, 2).reshape(noisy.shape)
        return predicted[:, : noisy.shape[1]]  # some predict the variance in further channels

    def _add_noise(self, batch: Batch) -> Tensor:
        """Both schedules are computed on the device: a table would be copied there in every step."""
        sample = batch["sample"] if self.latent else normalised(batch["sample"])
        time = batch["timestep"].float().div(TIMESTEPS).view(-1, *[1] * (sample.dim() - 1))
        if self.flow:
            return sample + time * (batch["noise"] - sample)
        angle = time * (pi / 2)
        return angle.cos() * sample + angle.sin() * batch["noise"]


def _put(inputs: dict[str, Any], name: str, value: Tensor) -> None:
    """Set ``inputs["a"]``, or ``inputs["a"]["b"]`` for the name "a.b"."""
    *outer, last = name.split(".")
    for key in outer:
        inputs = inputs.setdefault(key, {})
    inputs[last] = value


@dataclass(frozen=True)
class Control(NoisePrediction):
    """A network that steers another: its outputs are features to be added there. It is not trained alone."""

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        return self.call(model, batch, batch["noise"])

    def loss(self, output: Any, batch: Batch) -> Tensor:
        raise NotImplementedError("a control network is trained with the network that it steers")


@dataclass(frozen=True)
class Reconstruction:
    """Encode and decode an image or a clip. Batch: image uint8 [B, *size].

    Attributes:
        frames_first: A clip is [F, 3, H, W], and the network takes its frames as a batch.
    """

    frames_first: bool = False

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        return {"image": random_images(batch_size, size, generator)}

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        pixels = normalised(batch["image"])
        options: dict[str, Any] = {"return_dict": False}
        if self.frames_first:
            options["num_frames"] = pixels.shape[1]
            pixels = pixels.flatten(0, 1)
        return {"pixels": pixels, "reconstruction": model(pixels, **options)[0]}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(output["reconstruction"], output["pixels"])
