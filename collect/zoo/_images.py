"""Adapters of models that map an image to a class or to a map of values, whatever library they are from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def random_images(batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Images (or clips) as a decoder leaves them: uint8, shape (batch, *size)."""
    import torch

    return torch.randint(0, 256, (batch_size, *size), dtype=torch.uint8, generator=generator)


def normalised(images: Tensor) -> Tensor:
    """uint8 in 0..255 to fp32 in -1..1 on the images' device.

    Python scalars only: per-channel constants would be built on the host and copied in every step, which is
    an anti-pattern of ours.
    """
    return images.float().mul_(2 / 255).sub_(1)


def _same(output: Any) -> Any:
    return output


@dataclass(frozen=True)
class Classification:
    """Image or clip to class logits. Batch: image uint8 [B, *size], label int64 [B]."""

    classes: int = 1000
    logits: Callable[[Any], Any] = _same

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        return {
            "image": random_images(batch_size, size, generator),
            "label": torch.randint(0, self.classes, (batch_size,), generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return self.logits(model(normalised(batch["image"])))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(output, batch["label"])


def _resized(output: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bilinear upsampling [B, C, h, w] -> [B, C, *shape]; nothing when it fits already."""
    from torch.nn.functional import interpolate

    if output.shape[-2:] == shape:
        return output
    return interpolate(output, size=shape, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Segmentation:
    """Image to class logits a pixel. Batch: image uint8 [B, 3, H, W], mask uint8 [B, H, W]."""

    classes: int
    logits: Callable[[Any], Any] = _same

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, *size[-2:])
        return {
            "image": random_images(batch_size, size, generator),
            "mask": torch.randint(0, self.classes, shape, dtype=torch.uint8, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        image = batch["image"]
        return _resized(self.logits(model(normalised(image))), image.shape[-2:])

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(output, batch["mask"].long())


@dataclass(frozen=True)
class Depth:
    """Image to depth. Batch: image uint8 [B, 3, H, W], depth in metres fp32 [B, H, W]."""

    depth: Callable[[Any], Any] = _same
    max_depth: float = 10.0

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        return {
            "image": random_images(batch_size, size, generator),
            "depth": torch.rand(batch_size, *size[-2:], generator=generator) * self.max_depth,
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        image = batch["image"]
        depth = self.depth(model(normalised(image)))
        return _resized(depth.unsqueeze(1), image.shape[-2:]).squeeze(1)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import l1_loss

        return l1_loss(output, batch["depth"])


@dataclass(frozen=True)
class Pose:
    """Crop of a person to keypoint heatmaps at a quarter of its size.

    Batch: image uint8 [B, 3, H, W], heatmap fp32 [B, keypoints, H / 4, W / 4].
    """

    heatmaps: Callable[[Any], Any] = _same
    keypoints: int = 17

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        shape = (batch_size, self.keypoints, height // 4, width // 4)
        return {
            "image": random_images(batch_size, size, generator),
            "heatmap": torch.rand(shape, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return self.heatmaps(model(normalised(batch["image"])))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(output, batch["heatmap"])
