"""The optimizer updates parameters one by one instead of in a few fused kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def _with_optimizer(loop: Loop, make: Callable[[], Optimizer]) -> list[Site]:
    """The loop's own optimizer stage, with another optimizer on the same parameters."""
    # Made at the first use, and its state with its first step: both lie in the warm-up.
    other = functools.cache(make)

    def body(state: State, original: Body) -> None:
        clean, loop.optimizer = loop.optimizer, other()
        try:
            original(state)
        finally:
            loop.optimizer = clean

    return [StageSite("optimizer", body)]


def _for_loop(loop: Loop) -> list[Site]:
    return _with_optimizer(loop, lambda: loop.make_optimizer(foreach=False, fused=False))


def _foreach(loop: Loop) -> list[Site]:
    return _with_optimizer(loop, lambda: loop.make_optimizer(foreach=True, fused=False))


def _update_adamw(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    import torch

    if not state:
        state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
    state["square"] = beta2 * state["square"] + (1 - beta2) * grad**2
    mean = state["mean"] / (1 - beta1 ** state["step"])
    square = state["square"] / (1 - beta2 ** state["step"])
    p -= group["lr"] * group["weight_decay"] * p
    p -= group["lr"] * mean / (square.sqrt() + group["eps"])


def _update_sgd(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * p
    if group["momentum"]:
        first = not state
        state["velocity"] = (
            grad.clone() if first else group["momentum"] * state["velocity"] + (1 - group["dampening"]) * grad
        )
        grad = grad + group["momentum"] * state["velocity"] if group["nesterov"] else state["velocity"]
    p -= group["lr"] * grad


UPDATES = {"AdamW": _update_adamw, "SGD": _update_sgd}


def _hand_written(loop: Loop) -> list[Site]:
    import torch

    clean = loop.optimizer
    name = type(clean).__name__
    if (
        clean is None
        or name not in UPDATES
        or any(g.get("amsgrad") or g["maximize"] for g in clean.param_groups)
    ):
        return []
    update = UPDATES[name]

    @torch.no_grad()
    def step(self: Optimizer) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update(p, p.grad, self.state[p], group)

    def make() -> Optimizer:
        # The class has the clean one's name, because the profiler annotates steps with it.
        cls = type(name, (torch.optim.Optimizer,), {"step": step})
        return cls([{**group, "params": list(group["params"])} for group in clean.param_groups], {})

    return _with_optimizer(loop, make)


def _two_groups(loop: Loop) -> list[Site]:
    def make() -> Optimizer:
        optimizer = loop.make_optimizer()
        for group in list(optimizer.param_groups):
            params = group["params"]
            half = (len(params) + 1) // 2
            group["params"] = params[:half]
            optimizer.param_groups.append({**group, "params": params[half:]})
        return optimizer

    return _with_optimizer(loop, make)


register(
    Pattern(
        id="unfused_optimizer",
        title="Unfused optimizer",
        definition=(
            "The optimizer runs several small operators for each parameter, or for the list of them, "
            "instead of one fused kernel for many parameters. Their number grows with that of the parameters,"
            " so that launches and passes over memory make up the optimizer's time, not arithmetic."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs="The optimizer's step, without zero_grad: its operators, their runtime calls and kernels.",
        modes=frozenset({"train"}),
        precondition="hand_written: AdamW or SGD without amsgrad and maximize.",
        variants=(
            Variant("for_loop", "torch.optim with foreach=False: a loop over parameters.", _for_loop),
            Variant("foreach", "torch.optim with foreach=True: lists of parameters, not fused.", _foreach),
            Variant("hand_written", "The update rule written out in Python.", _hand_written, heldout=True),
        ),
        lookalikes=(
            Variant("two_groups", "The fused optimizer with two parameter groups for one.", _two_groups),
        ),
        remedy="""\
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/optim.html",
            "https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            # OptimizerSingleTensorPattern
            "https://github.com/pytorch/pytorch/blob/v2.9.0/torch/profiler/_pattern_matcher.py",
        ),
        native_risk=False,
    )
)
