"""Random object boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def random_boxes(batch_size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Centres and extents of boxes inside of the unit square, 0.1 to 0.5 wide and high.

    Returns:
        Two fp32 tensors of shape (batch, count, 2), the last dimension x, y.
    """
    import torch

    extents = 0.1 + 0.4 * torch.rand(batch_size, count, 2, generator=generator)
    centres = extents / 2 + (1 - extents) * torch.rand(batch_size, count, 2, generator=generator)
    return centres, extents
