"""Gradients are filled with zeros where they could be dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register

if TYPE_CHECKING:
    from torch import Tensor

FILLS = frozenset({"aten::_foreach_zero_", "aten::zero_", "aten::zeros_like"})
ACCUMULATES = frozenset({"aten::add_"})
"""Into a gradient that is there, the backward pass adds. Where there is none, it leaves its own."""


def _instead(loop: Loop, reset: Body) -> list[Site]:
    """``reset(parameters)`` stands for the stage."""

    def body(state: State, original: Body) -> None:
        optimizer = loop.optimizer
        assert optimizer is not None
        reset([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

    return [StageSite("zero_grad", body)] if loop.optimizer is not None else []


def _set_to_zero(loop: Loop) -> list[Site]:
    def body(state: State, original: Body) -> None:
        assert loop.optimizer is not None
        loop.optimizer.zero_grad(set_to_none=False)

    return [StageSite("zero_grad", body)]


def _for_loop(loop: Loop) -> list[Site]:
    def reset(parameters: list[Tensor]) -> None:
        for p in parameters:
            assert p.grad is not None
            p.grad.zero_()

    return _instead(loop, reset)


def _zeros_like(loop: Loop) -> list[Site]:
    import torch

    def reset(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p)

    return _instead(loop, reset)


def _metric_reset(loop: Loop) -> list[Site]:
    import torch

    sums = torch.zeros(8, device=loop.device)

    def body(state: State) -> None:
        sums.zero_()

    return [StageSite("zero_grad", body, where="after")]


register(
    Pattern(
        id="zero_grad_memset",
        title="Gradients set to zero",
        definition=(
            "Gradients are filled with zeros after a step instead of being set to None. Filling writes all "
            "of them, the next backward pass reads and writes them again to add to the zeros, and their "
            "memory is held through the forward pass."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="selector",
        selects=lambda name: name in FILLS | ACCUMULATES,
        belongs="The fills, and the additions to the zeros in the backward pass of the step behind them.",
        modes=frozenset({"train"}),
        precondition="A parameter that gets a gradient in one step gets one in every step.",
        variants=(
            Variant("set_to_zero", "optimizer.zero_grad(set_to_none=False).", _set_to_zero),
            Variant("for_loop", "p.grad.zero_() for every parameter.", _for_loop),
            Variant("zeros_like", "A new tensor of zeros for every parameter.", _zeros_like, heldout=True),
        ),
        lookalikes=(
            Variant(
                "metric_reset", "A few running sums start anew from zero.", _metric_reset, mechanism="marker"
            ),
        ),
        remedy="""\
optimizer.zero_grad()  # set_to_none=True is the default
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://github.com/meta-pytorch/torchfix/pull/92",
        ),
        native_risk=False,
    )
)
