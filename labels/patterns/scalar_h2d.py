"""A Python number becomes a tensor by way of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Stage, Variant, register
from torchtraceap.labels.patterns._common import watching_sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Make = Callable[[float, "torch.device"], "Tensor"]
"""From a number and a device to a tensor there, the first element of which is the number."""

PERIOD = 64


def full(value: float, device: torch.device) -> Tensor:
    """The number is an argument of the kernel that fills the tensor."""
    import torch

    return torch.full((), value, device=device)


def from_number(value: float, device: torch.device) -> Tensor:
    import torch

    return torch.tensor(value, device=device)


def from_list(value: float, device: torch.device) -> Tensor:
    import torch

    return torch.as_tensor([value], dtype=torch.float32, device=device)


def assigned(value: float, device: torch.device) -> Tensor:
    import torch

    vector = torch.empty(4, device=device)
    vector[0] = value
    return vector


def _sites(loop: Loop, make: Make, otherwise: Make | None = full) -> list[Site]:
    """Places where a schedule's number for this step (a temperature, a weight) is needed on the device.

    What is then done with it is the same in both arms, and left out.
    """
    numbers = count()

    def with_next(make: Make) -> Callable[[Tensor], object]:
        return lambda tensor: make(next(numbers) % PERIOD / PERIOD, loop.device)

    stages: tuple[Stage, ...] = ("forward", "loss") if loop.mode == "train" else ("h2d", "forward")
    return watching_sites(
        loop, with_next(make), stages=stages, otherwise=None if otherwise is None else with_next(otherwise)
    )


def _from_number(loop: Loop) -> list[Site]:
    return _sites(loop, from_number)


def _from_list(loop: Loop) -> list[Site]:
    return _sites(loop, from_list)


def _assigned(loop: Loop) -> list[Site]:
    return _sites(loop, assigned)


def _full(loop: Loop) -> list[Site]:
    return _sites(loop, full, otherwise=None)


def _cpu_operand(loop: Loop) -> list[Site]:
    import torch

    # A CPU tensor without dimensions is an argument of the kernel, like a Python number.
    on_device = torch.ones(8, device=loop.device)
    return _sites(loop, lambda value, device: on_device * torch.tensor(value, device="cpu"), otherwise=None)


register(
    Pattern(
        id="scalar_h2d",
        title="Number copied to the device",
        definition=(
            "A Python number, or a list of a few, is made a CPU tensor and copied to the device, where a "
            "kernel could have had it as an argument (cpu_tensor_create: whole tensors that are computed on "
            "the CPU). A few bytes take no time, but the copy is from pageable memory and blocks: it stands "
            "in the queue behind all work launched so far, and the host waits for it."
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
            Variant("from_number", "torch.tensor(value, device=device).", _from_number, max_sites=6),
            Variant("from_list", "torch.as_tensor([value], device=device).", _from_list, max_sites=6),
            Variant(
                "assigned",
                "vector[0] = value, with the vector on the device.",
                _assigned,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant("full", "torch.full((), value, device=device).", _full, max_sites=6),
            Variant(
                "cpu_operand",
                "A device tensor times a CPU tensor without dimensions, which is not copied.",
                _cpu_operand,
                max_sites=6,
            ),
        ),
        remedy="""\
temperature = torch.full((), value, device=device)  # not torch.tensor(value, device=device)
y = x / value  # or no tensor at all: operators take Python numbers

# What does not change is made once.
model.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]), persistent=False)
""",
        references=(
            "https://github.com/pytorch/pytorch/issues/190217",
            "https://github.com/pytorch/pytorch/issues/120996",
            "https://github.com/pytorch/pytorch/pull/143928",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
    )
)
