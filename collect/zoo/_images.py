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
