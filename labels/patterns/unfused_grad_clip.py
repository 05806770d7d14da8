"""Gradients are clipped parameter by parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register

if TYPE_CHECKING:
    from torch import Tensor

MAX_NORM = 1e30
"""No gradient is that large, so that every way to clip multiplies by exactly one."""


def _sites(loop: Loop, clip: Body) -> list[Site]:
    """``clip(parameters)`` behind the backward pass, and where it is off the fused way.

    Not ahead of the optimizer: what stands for that stage would then hold it.
    """
    from torch.nn.utils import clip_grad_norm_

    def parameters() -> list[Tensor]:
        return [p for p in loop.model.parameters() if p.grad is not None]

    def body(state: State) -> None:
        clip(parameters())

    def otherwise(state: State) -> None:
        clip_grad_norm_(parameters(), MAX_NORM, foreach=True)

    return [StageSite("backward", body, where="after", otherwise=otherwise)]


def _coefficient(norm: Tensor) -> Tensor:
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def _for_loop(loop: Loop) -> list[Site]:
    from torch.nn.utils import clip_grad_norm_

    return _sites(loop, lambda parameters: clip_grad_norm_(parameters, MAX_NORM, foreach=False))


def _hand_written(loop: Loop) -> list[Site]:
    def clip(parameters: list[Tensor]) -> None:
        total = sum(p.grad.norm() ** 2 for p in parameters if p.grad is not None)
        coefficient = _coefficient(total**0.5)
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad * coefficient

    return _sites(loop, clip)


def _flat_copy(loop: Loop) -> list[Site]:
    import torch

    def clip(parameters: list[Tensor]) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        coefficient = _coefficient(torch.cat([grad.flatten() for grad in grads]).norm())
        for grad in grads:
            grad.mul_(coefficient)

    return _sites(loop, clip)


def _two_groups(loop: Loop) -> list[Site]:
    from torch.nn.utils import clip_grad_norm_

    def clip(parameters: list[Tensor]) -> None:
        half = (len(parameters) + 1) // 2
        for group in (parameters[:half], parameters[half:]):
            clip_grad_norm_(group, MAX_NORM, foreach=True)

    return _sites(loop, clip)


register(
    Pattern(
        id="unfused_grad_clip",
        title="Gradient clipping without fused kernels",
        definition=(
            "The norm of the gradients is computed and applied with small operators for each parameter "
            "instead of a few kernels for the list of them. Their number grows with that of the parameters, "
            "so that launches and passes over memory make up the time, not arithmetic."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs="The norms, the coefficient and the scaling behind the backward pass, with their kernels.",
        modes=frozenset({"train"}),
        precondition=(
            "All traces of the workload clip: where the pattern does not act, with foreach. The limit is so "
            "large that no gradient changes."
        ),
        variants=(
            Variant("for_loop", "clip_grad_norm_ with foreach=False.", _for_loop),
            Variant("hand_written", "A Python loop of p.grad.norm() and a product.", _hand_written),
            Variant(
                "flat_copy",
                "The norm of a copy of all gradients, and mul_ in a loop.",
                _flat_copy,
                heldout=True,
            ),
        ),
        lookalikes=(
            Variant("two_groups", "Two groups of parameters, each clipped with foreach.", _two_groups),
        ),
        remedy="""\
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
            "https://github.com/pytorch/pytorch/pull/91846",
            "https://github.com/pytorch/pytorch/issues/31474",
        ),
        native_risk=False,
    )
)
