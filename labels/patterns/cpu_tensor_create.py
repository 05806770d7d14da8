"""A tensor is made on the CPU in the step, and then copied to the GPU.

Tables that stay the same have a good form that leaves no event, a look-up, so nothing stands for them where a
site is off; made on the device in every step they would be another pattern, recomputed_constant. Noise has to
be drawn in every step, so where a site is off it is drawn on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Stage, Variant, register
from torchtraceap.labels.patterns._common import Look, watching_sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[int, int], "Tensor"]
"""From rows and columns to a tensor on the CPU."""

STAGES: tuple[Stage, ...] = ("h2d", "forward")
"""Behind these a tensor of the input's size is made, and one of the output's."""


def grid(rows: int, columns: int) -> Tensor:
    """Coordinates of every position, as for anchors or sampling points: shape (rows, columns, 2)."""
    import torch

    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([y, x], -1).float()


def attention_mask(rows: int, columns: int) -> Tensor:
    """0 where row i may see column j <= i, else minus infinity: shape (rows, columns)."""
    import torch

    return torch.full((rows, columns), -math.inf).triu(1)


def sinusoids(rows: int, columns: int) -> Tensor:
    """Embeddings of positions: shape (rows, columns), with one column more if their number is odd."""
    import torch

    half = (columns + 1) // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10_000) / half))
    angles = torch.outer(torch.arange(rows).float(), rates)
    return torch.cat([angles.sin(), angles.cos()], 1)


def _sized(make: Callable[[int, int], Tensor]) -> Look:
    """``make`` for the size of a tensor's last two dimensions. What is then done with it is left out."""
    return lambda like: make(*(1, 1, *like.shape)[-2:])


def _table(loop: Loop, make: Make) -> list[Site]:
    return watching_sites(
        loop, _sized(lambda rows, columns: make(rows, columns).to(loop.device)), stages=STAGES
    )


def _grid(loop: Loop) -> list[Site]:
    return _table(loop, grid)


def _attention_mask(loop: Loop) -> list[Site]:
    return _table(loop, attention_mask)


def _sinusoids(loop: Loop) -> list[Site]:
    return _table(loop, sinusoids)


def _drawing(device: torch.device) -> Make:
    """Noise from a generator of its own: the model must draw the same numbers with and without."""
    import torch

    generator = torch.Generator(device)
    return lambda rows, columns: torch.randn(rows, columns, generator=generator, device=device)


def _noise(loop: Loop) -> list[Site]:
    import torch

    draw = _drawing(torch.device("cpu"))
    return watching_sites(
        loop,
        _sized(lambda rows, columns: draw(rows, columns).to(loop.device)),
        stages=STAGES,
        otherwise=_sized(_drawing(loop.device)),
    )


def _noise_on_device(loop: Loop) -> list[Site]:
    return watching_sites(loop, _sized(_drawing(loop.device)), stages=STAGES)


def _stays_on_cpu(loop: Loop) -> list[Site]:
    return watching_sites(loop, lambda like: grid(4, 4).sum(), stages=STAGES)


register(
    Pattern(
        id="cpu_tensor_create",
        title="Tensor made on the CPU",
        definition=(
            "A grid, a mask, noise or the like is made on the CPU in the middle of a step and copied to the "
            "device (pageable_h2d: the batch; scalar_h2d: a number). The host takes longer to make it than "
            "the device, and the copy from pageable memory makes it wait for all work queued so far."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators that make the tensor, and the runtime calls of the copy with the wait. "
            "GPU: the host-to-device copy."
        ),
        needs_gpu=True,
        variants=(
            Variant("grid", "Coordinates of every position, by meshgrid.", _grid, max_sites=6),
            Variant(
                "attention_mask",
                "Zeros and minus infinities, by full and triu.",
                _attention_mask,
                max_sites=6,
            ),
            Variant("noise", "Random numbers.", _noise, max_sites=6),
            Variant(
                "sinusoids",
                "Sines and cosines that embed positions.",
                _sinusoids,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant("noise_on_device", "Random numbers, drawn on the device.", _noise_on_device, max_sites=6),
            Variant(
                "stays_on_cpu",
                "A small grid is made on the CPU and not copied.",
                _stays_on_cpu,
                max_sites=6,
            ),
        ),
        remedy="""\
noise = torch.randn(x.shape, device=x.device)  # not torch.randn(x.shape).to(x.device)

# What stays the same: once, not in every step.
model.register_buffer("grid", make_grid(height, width), persistent=False)

# Where it has to be the CPU: drawn into pinned memory, and a copy that nobody waits for.
noise = torch.randn(shape, generator=cpu_generator, pin_memory=True).to(device, non_blocking=True)
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://github.com/open-mmlab/mmsegmentation/issues/3231",
            "https://github.com/Stability-AI/stablediffusion/pull/375",
        ),
    )
)
