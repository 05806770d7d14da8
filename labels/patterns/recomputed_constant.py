"""A table that is the same in every step is computed in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, ModuleCall, ModuleSite, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import input_sites, spread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Table = Callable[[int, int, int, "torch.device"], "Tensor"]
"""``table(height, width, channels, device)``, as a model has it for a feature map."""

MAX_TOKENS = 2048
ANCHORS = ((1.0, 1.0), (1.4, 0.7), (0.7, 1.4), (2.0, 2.0), (2.8, 1.4), (1.4, 2.8), (4.0, 4.0))
"""Heights and widths of boxes, in cells."""

WINDOW = 7


def _map_size(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Height, width and channels of a feature map or, of width one, of a sequence; None of anything else."""
    if len(shape) == 4:
        return shape[2], shape[3], shape[1]
    if len(shape) == 3:
        return shape[1], 1, shape[2]
    return None


def _sites(loop: Loop, table: Table, max_tokens: int | None = None) -> list[Site]:
    """``table`` for the input of modules spread through the model.

    The model has no use for it, and adding it would change results. In the good form it is looked up, which
    leaves no event, so nothing stands for that where a site is off.
    """

    def site(call: ModuleCall) -> Site | None:
        size = _map_size(call.in_shape)
        if size is None or (max_tokens is not None and size[0] * size[1] > max_tokens):
            return None

        def body(x: Tensor) -> Tensor:
            table(*size, x.device)
            return x

        return ModuleSite(call, body, where="before")

    return spread([found for call in loop.module_calls() if (found := site(call)) is not None])


def _waves(positions: Tensor, channels: int) -> Tensor:
    """Sines and cosines of positions, shape (positions, 2 * (channels // 2)); at least one of each."""
    import torch

    half = max(1, channels // 2)
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[:, None] * torch.exp(steps * (-math.log(10_000.0) / half))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _position_table(loop: Loop) -> list[Site]:
    import torch

    def table(height: int, width: int, channels: int, device: torch.device) -> Tensor:
        rows = _waves(torch.arange(height, device=device, dtype=torch.float32), channels // 2)
        columns = _waves(torch.arange(width, device=device, dtype=torch.float32), channels // 2)
        shape = (height, width, rows.shape[1])
        parts = rows[:, None].expand(shape), columns[None].expand(shape)
        return torch.cat(parts, dim=2).permute(2, 0, 1).contiguous()

    return _sites(loop, table)


def _anchor_grid(loop: Loop) -> list[Site]:
    import torch

    def table(height: int, width: int, channels: int, device: torch.device) -> Tensor:
        rows = (torch.arange(height, device=device) + 0.5) / height
        columns = (torch.arange(width, device=device) + 0.5) / width
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        centers = torch.stack((x, y, x, y), dim=2).view(-1, 4)
        boxes = []
        for tall, wide in ANCHORS:
            half = torch.ones_like(centers)
            half[:, 0::2] *= 0.5 * wide / width
            half[:, 1::2] *= 0.5 * tall / height
            half[:, :2].neg_()
            boxes.append(centers + half)
        return torch.cat(boxes).clamp_(0.0, 1.0)

    return _sites(loop, table)


def _window_mask(loop: Loop) -> list[Site]:
    import torch

    def table(height: int, width: int, channels: int, device: torch.device) -> Tensor:
        tokens = torch.arange(height * width, device=device)
        row, column = tokens.div(width, rounding_mode="floor"), tokens.remainder(width)
        far = (row[:, None] - row).abs().gt(WINDOW) | (column[:, None] - column).abs().gt(WINDOW)
        return torch.zeros(far.shape, device=device).masked_fill(far, -math.inf)

    return _sites(loop, table, MAX_TOKENS)


def _of_the_data(loop: Loop) -> list[Site]:
    def body(x: Tensor) -> Tensor:
        first_of_samples = x.detach().movedim(0, -1)[(0,) * (x.ndim - 1)]
        _waves(first_of_samples.float(), x.shape[1])
        return x

    return input_sites(loop, body)


register(
    Pattern(
        id="recomputed_constant",
        title="Constant computed in every step",
        definition=(
            "A table that depends on nothing but shapes (positions, anchors, a mask) is computed on the "
            "device in every step. It takes a chain of small operators whose result was there before, and "
            "which the layer that needs it waits for."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs="The operators that compute the table, and their kernels.",
        precondition=(
            "The input of the module at the place is a sequence or a feature map; for a mask, of at most "
            f"{MAX_TOKENS} tokens."
        ),
        variants=(
            Variant("position_table", "Sines and cosines of positions.", _position_table, max_sites=6),
            Variant("anchor_grid", "Boxes around the centers of cells.", _anchor_grid, max_sites=6),
            Variant(
                "window_mask",
                "A mask of the tokens near to each other.",
                _window_mask,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant(
                "of_the_data",
                "Sines and cosines of one value a sample, which differs from step to step.",
                _of_the_data,
            ),
        ),
        remedy="""\
class Positions(torch.nn.Module):
    def __init__(self, height, width, channels):
        super().__init__()
        self.register_buffer("table", position_table(height, width, channels), persistent=False)

    def forward(self, x):
        return x + self.table


# Or, if sizes vary:
position_table = functools.lru_cache(maxsize=1)(position_table)
""",
        references=(
            "https://github.com/huggingface/transformers/pull/40007",
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
        ),
    )
)
