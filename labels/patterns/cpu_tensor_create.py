"""A tensor is computed on the CPU in the step, and then copied to the GPU.

The values change from call to call, like those of a grid that is jittered or a schedule of noise levels, so
that the remedy is to compute them on the device. What never changes should not be computed in the step at
all, wherever: that is recomputed_constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Stage, Variant, register
from torchtraceap.labels.patterns._common import Look, watching_sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[int, int, int, "torch.device"], "Tensor"]
"""From rows, columns, a whole number that changes from call to call, and a device to a tensor there."""

PERIOD = 8

STAGES: tuple[Stage, ...] = ("h2d", "forward")
"""Behind these a tensor of the input's size is made, and one of the output's."""


def grid(rows: int, columns: int, start: int, device: torch.device) -> Tensor:
    """Coordinates of every position, as for anchors or sampling points: shape (rows, columns, 2)."""
    import torch

    y = torch.arange(start, start + rows, dtype=torch.float32, device=device)
    x = torch.arange(start, start + columns, dtype=torch.float32, device=device)
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), -1)


def attention_mask(rows: int, columns: int, start: int, device: torch.device) -> Tensor:
    """0 where row i may see column j <= i + start, else minus infinity: shape (rows, columns)."""
    import torch

    return torch.full((rows, columns), -math.inf, device=device).triu(1 + start)


def sinusoids(rows: int, columns: int, start: int, device: torch.device) -> Tensor:
    """Embeddings of the positions from ``start``: shape (rows, columns), one column more if they are odd."""
    import torch

    half = (columns + 1) // 2
    positions = torch.arange(start, start + rows, dtype=torch.float32, device=device)
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / half))
    angles = torch.outer(positions, rates)
    return torch.cat([angles.sin(), angles.cos()], 1)


def _looks(loop: Loop, make: Make) -> tuple[Look, Look]:
    """Make a tensor of the size of a tensor's last two dimensions: by way of the CPU, and on the device.

    What is then done with it is the same in both arms, and left out.
    """
    import torch

    calls = count()

    def make_on(device: torch.device, like: Tensor) -> Tensor:
        rows, columns = (1, 1, *like.shape)[-2:]
        return make(rows, columns, next(calls) % PERIOD, device)

    cpu = torch.device("cpu")
    return lambda like: make_on(cpu, like).to(loop.device), lambda like: make_on(loop.device, like)


def _sites(loop: Loop, make: Make) -> list[Site]:
    by_way_of_cpu, on_device = _looks(loop, make)
    return watching_sites(loop, by_way_of_cpu, stages=STAGES, otherwise=on_device)


def _grid(loop: Loop) -> list[Site]:
    return _sites(loop, grid)


def _attention_mask(loop: Loop) -> list[Site]:
    return _sites(loop, attention_mask)


def _sinusoids(loop: Loop) -> list[Site]:
    return _sites(loop, sinusoids)


def _on_device(loop: Loop) -> list[Site]:
    _, on_device = _looks(loop, grid)
    return watching_sites(loop, on_device, stages=STAGES)


def _stays_on_cpu(loop: Loop) -> list[Site]:
    import torch

    cpu = torch.device("cpu")
    return watching_sites(loop, lambda like: grid(4, 4, like.ndim, cpu), stages=STAGES)


register(
    Pattern(
        id="cpu_tensor_create",
        title="Tensor made on the CPU",
        definition=(
            "A grid, a mask, an embedding of positions or the like is computed on the CPU in the middle of a "
            "step and copied to the device (pageable_h2d: the batch; scalar_h2d: a number). The host takes "
            "longer to compute it than the device, and the copy from pageable memory makes it wait until all "
            "work queued so far is done."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators that compute the tensor, and the runtime calls of the copy with the wait. "
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
            Variant(
                "sinusoids",
                "Sines and cosines that embed positions.",
                _sinusoids,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant("on_device", "The grid is made on the device.", _on_device, max_sites=6),
            Variant(
                "stays_on_cpu",
                "A small grid is made on the CPU for the host's own use.",
                _stays_on_cpu,
                max_sites=6,
            ),
        ),
        remedy="""\
grid = torch.stack(torch.meshgrid(
    torch.arange(height, device=x.device),  # not torch.arange(height), and .to(x.device) at the end
    torch.arange(width, device=x.device),
    indexing="ij",
), -1)

# Where it has to be the CPU: pinned memory, and a copy that nobody waits for.
noise = torch.randn(shape, generator=cpu_generator, pin_memory=True).to(device, non_blocking=True)
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://github.com/Stability-AI/stablediffusion/pull/375",
            "https://github.com/CompVis/stable-diffusion/pull/477",
        ),
    )
)
