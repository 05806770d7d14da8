"""The size of a result depends on values, so the host has to ask the GPU for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import Look, output_of, watching_sites

if TYPE_CHECKING:
    from torch import Tensor

Compute = Callable[["Tensor"], "Tensor"]
"""From scores, shape (samples, positions), to something."""

LEVELS = 65
STATIC_SIZE = 256


def by_mask(scores: Tensor) -> Tensor:
    """Sum of the positive scores: they are picked first."""
    return scores[scores > 0].sum()


def by_index(scores: Tensor) -> Tensor:
    """Sum of the positive scores: their indices are computed first."""
    import torch

    return scores[torch.where(scores > 0)].sum()


def masked_sum(scores: Tensor) -> Tensor:
    """The same as :func:`by_mask` and :func:`by_index` at a fixed size."""
    import torch

    return torch.where(scores > 0, scores, 0).sum()


def distinct_levels(scores: Tensor) -> Tensor:
    """The levels that occur, in order."""
    return _levels(scores).unique()


def level_occurs(scores: Tensor) -> Tensor:
    """The same at a fixed size: whether each level occurs, bool, shape (LEVELS,)."""
    import torch

    occurs = torch.zeros(LEVELS, dtype=torch.bool, device=scores.device)
    return occurs.scatter_(0, _levels(scores), True)


def _levels(scores: Tensor) -> Tensor:
    """Scores from -1 to 1 in steps, as whole numbers from 0 to ``LEVELS`` - 1, flat."""
    half = LEVELS // 2
    level = scores.float().nan_to_num(0).clamp(-1, 1).mul(half).round() + half
    return level.long().flatten()


def owners(scores: Tensor) -> Tensor:
    """For each positive score the number of its sample."""
    import torch

    return torch.repeat_interleave((scores > 0).sum(1))


def owner_or_none(scores: Tensor) -> Tensor:
    """The same at a fixed size: shape (samples, positions), -1 where a score is not positive."""
    import torch

    samples = torch.arange(len(scores), device=scores.device)
    return torch.where(scores > 0, samples.unsqueeze(1), -1)


def first_positive(scores: Tensor) -> Tensor:
    """Indices of the first ``STATIC_SIZE`` positive scores, filled up with -1."""
    import torch

    return torch.nonzero_static(scores > 0, size=STATIC_SIZE)


def scores_of(x: Tensor) -> Tensor:
    """One channel or token of each sample, shape (samples, positions)."""
    x = x.detach()
    if x.ndim > 2 and x.numel():
        x = x[:, 0]
    return x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)


def _sites(loop: Loop, compute: Compute, otherwise: Compute | None = None) -> list[Site]:
    def with_scores(compute: Compute) -> Look:
        return lambda x: compute(scores_of(x))

    return watching_sites(
        loop,
        with_scores(compute),
        stages=("forward", "logging"),
        otherwise=None if otherwise is None else with_scores(otherwise),
        read=output_of,
    )


def _by_mask(loop: Loop) -> list[Site]:
    return _sites(loop, by_mask, masked_sum)


def _by_index(loop: Loop) -> list[Site]:
    return _sites(loop, by_index, masked_sum)


def _distinct_levels(loop: Loop) -> list[Site]:
    return _sites(loop, distinct_levels, level_occurs)


def _owners(loop: Loop) -> list[Site]:
    return _sites(loop, owners, owner_or_none)


def _masked_sum(loop: Loop) -> list[Site]:
    return _sites(loop, masked_sum)


def _first_positive(loop: Loop) -> list[Site]:
    # Few backends have the operator.
    return _sites(loop, first_positive) if loop.device.type in ("cpu", "cuda") else []


register(
    Pattern(
        id="dynamic_shape_sync",
        title="Size that depends on values",
        definition=(
            "An operator runs in the middle of a step whose result has as many elements as the values of its "
            "input say: a boolean mask as an index, nonzero, unique, repeat_interleave. To allocate it the "
            "host must know that number, so it waits for the device inside of the operator (in host_sync the "
            "program itself asks for a value), and the GPU idles until it launches again."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators that compute the condition and what is picked by it, and the runtime calls "
            "in them with the wait. GPU: their kernels and the device-to-host copy of the size."
        ),
        needs_gpu=True,
        variants=(
            Variant("by_mask", "scores[scores > 0].", _by_mask, max_sites=6),
            Variant("by_index", "scores[torch.where(scores > 0)].", _by_index, max_sites=6),
            Variant("distinct_levels", "levels.unique().", _distinct_levels, max_sites=6),
            Variant(
                "owners",
                "torch.repeat_interleave(counts), with the counts on the device.",
                _owners,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant("masked_sum", "torch.where(scores > 0, scores, 0).", _masked_sum, max_sites=6),
            Variant(
                "first_positive",
                "torch.nonzero_static, which is told the size.",
                _first_positive,
                max_sites=6,
            ),
        ),
        remedy="""\
total = torch.where(scores > 0, scores, 0).sum()  # not scores[scores > 0].sum()
best, where = scores.flatten(1).topk(k)  # a number of boxes that does not depend on scores
index = torch.nonzero_static(mask, size=limit)  # filled up with -1
owner = torch.repeat_interleave(counts, output_size=total_count)  # where the host knows the sum
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nonzero.html",
            "https://docs.pytorch.org/docs/stable/generated/torch.nonzero_static.html",
            "https://github.com/pytorch/pytorch/issues/12461",
            "https://github.com/pytorch/pytorch/issues/131256",
        ),
    )
)
