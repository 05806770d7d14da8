"""The step runs with deterministic algorithms, which nobody needs after debugging."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, Stage, StageSite, State, Variant, register
from torchtraceap.labels.patterns._common import watching_sites

if TYPE_CHECKING:
    from torch import Tensor

DEVICE_STAGES: tuple[Stage, ...] = (
    "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "logging",
)  # fmt: skip
"""All but the loader's, where workers have settings of their own."""

RANKED = 256

HOUSEKEEPING = re.compile(
    r"(cuda|cu|hip)(?!.*(Launch|Memset|Memcpy))[A-Z]"  # allocations, queries and waits come as they will
    r"|ProfilerStep#|Optimizer\.|enumerate\(DataLoader"  # annotations
)


def _selects(name: str) -> bool:
    """Operators, launches and GPU work: what a setting of PyTorch can bring about."""
    return HOUSEKEEPING.match(name) is None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms where there are any, and new memory is filled."""
    import torch
    from torch.utils import deterministic

    settings: Any = deterministic  # its setting is a property, which its types do not show
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with _deterministic_cudnn(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one an operator that has no deterministic algorithm
            yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    from torch.backends import cudnn

    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.deterministic = before


def _sites(stages: Sequence[Stage]) -> list[Site]:
    """Each of ``stages`` runs with deterministic algorithms; nothing of it is marked."""

    def body(state: State, original: Body, mark: Body) -> None:
        with _deterministic():
            original(state)

    return [StageSite(stage, body, where="inside") for stage in stages]


def _whole_step(loop: Loop) -> list[Site]:
    return _sites(DEVICE_STAGES)


def _forward_backward(loop: Loop) -> list[Site]:
    return _sites(("forward", "backward"))


def _filled_mask(loop: Loop) -> list[Site]:
    import torch

    def look(x: Tensor) -> object:
        return torch.full(x.shape[:1], fill_value=True, dtype=torch.bool, device=x.device)

    return watching_sites(loop, look, stages=("forward", "logging"))


def _sorted_values(loop: Loop) -> list[Site]:
    def look(x: Tensor) -> object:
        return x.detach().flatten()[:RANKED].sort()

    return watching_sites(loop, look, stages=("forward", "logging"))


register(
    Pattern(
        id="deterministic_algorithms",
        title="Deterministic algorithms",
        definition=(
            "A model runs with torch.use_deterministic_algorithms, though its results need not be equal to "
            "the bit. Every tensor that is made empty is filled first, and operators whose fast kernel adds "
            "up in any order take slower ones, such as sorts."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="selector",
        selects=_selects,
        belongs=(
            "What has no counterpart in the clean trace: the filling of empty tensors, and the operators and "
            "kernels of deterministic algorithms."
        ),
        precondition=(
            "none; but where a deterministic algorithm is made of other operators, autocast picks the types "
            "of these, so that an interpolation may return another type and be as exact as that."
        ),
        variants=(
            Variant("whole_step", "All stages but the loader's.", _whole_step, together=True),
            Variant(
                "forward_backward",
                "Forward and backward pass only.",
                _forward_backward,
                heldout=True,
                together=True,
            ),
        ),
        lookalikes=(
            Variant(
                "filled_mask",
                "A mask over the batch is made and filled.",
                _filled_mask,
                max_sites=3,
                mechanism="marker",
            ),
            Variant(
                "sorted_values",
                "A few values are sorted, as for a ranking.",
                _sorted_values,
                max_sites=3,
                mechanism="marker",
            ),
        ),
        remedy="""\
torch.use_deterministic_algorithms(False)
torch.backends.cudnn.deterministic = False
# Where it must stay: new memory need not be filled by a program that never reads it.
torch.utils.deterministic.fill_uninitialized_memory = False
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
            "https://docs.pytorch.org/docs/stable/deterministic.html",
            "https://docs.pytorch.org/docs/stable/notes/randomness.html",
        ),
        native_risk=False,
    )
)
