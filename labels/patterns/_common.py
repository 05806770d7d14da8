"""Where injectors act: candidate places, spread through a step and few enough that markers stay cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchtraceap.labels.pattern import (
    Body,
    Loop,
    ModuleCall,
    ModuleSite,
    Site,
    Stage,
    StageSite,
    State,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Look = Callable[["Tensor"], object]
"""Something that is done with a tensor and leaves it as it is."""

MAX_CANDIDATES = 12
"""Each candidate costs one marker in every trace of a workload."""


def spread(items: Sequence[T], limit: int = MAX_CANDIDATES) -> list[T]:
    """At most ``limit`` (> 1) of ``items``, at even distances from the first to the last, in order."""
    if len(items) <= limit:
        return list(items)
    return [items[i * (len(items) - 1) // (limit - 1)] for i in range(limit)]


def writes_to_input(call: ModuleCall) -> bool:
    """Whether the module may overwrite its input: the first module to run in it works in place.

    Such a module must get the tensor itself. A copy or a view in its stead would hide the write from other
    readers of the tensor, or make autograd record it as a write through a view.
    """
    first = next(module for module in call.module.modules() if next(module.children(), None) is None)
    return bool(getattr(first, "inplace", False))


def input_sites(loop: Loop, body: Body) -> list[Site]:
    """``x = body(x)`` ahead of modules spread through the model that leave their input as it is."""
    calls = [call for call in loop.module_calls() if not writes_to_input(call)]
    return [ModuleSite(call, body, where="before") for call in spread(calls)]


def activation_sites(
    loop: Loop, body: Body, suits: Callable[[ModuleCall], bool] = lambda call: True
) -> list[Site]:
    """``body`` on the input or the output, by turns, of modules spread through those that suit.

    A module that may overwrite its input has the place behind it.
    """
    calls = [call for call in loop.module_calls() if suits(call)]
    return [
        ModuleSite(call, body, where="after" if index % 2 or writes_to_input(call) else "before")
        for index, call in enumerate(spread(calls))
    ]


def newest_result(state: State) -> Any:
    """The loss if the step has one by now, else the output, else the batch on the device."""
    if state.loss is not None:
        return state.loss
    return state.batch if state.output is None else state.output


def output_of(state: State) -> Any:
    """What the model returned."""
    return state.output


def watching_sites(
    loop: Loop,
    look: Look,
    *,
    stages: Sequence[Stage],
    otherwise: Look | None = None,
    read: Callable[[State], Any] = newest_result,
    suits: Callable[[ModuleCall], bool] = lambda call: True,
) -> list[Site]:
    """``look(tensor)``, which changes nothing, behind modules spread through the model and behind stages.

    Args:
        loop: The loop.
        look: Gets the output of a module, or the first tensor of what ``read`` finds after a stage.
        stages: Stages behind which there is a place.
        otherwise: What runs in the place of ``look`` where the site is off.
        read: Picks a pytree with a tensor from the state of a step after a stage.
        suits: Which modules have a place behind them.
    """
    import torch
    from torch.utils._pytree import tree_iter

    def at_module(act: Look) -> Body:
        def body(y: Tensor) -> Tensor:
            act(y)
            return y

        return body

    def at_stage(act: Look) -> Body:
        def body(state: State) -> None:
            act(next(leaf for leaf in tree_iter(read(state)) if isinstance(leaf, torch.Tensor)))

        return body

    def both(wrap: Callable[[Look], Body]) -> tuple[Body, Body | None]:
        return wrap(look), None if otherwise is None else wrap(otherwise)

    calls = [call for call in loop.module_calls() if suits(call)]
    on, off = both(at_module)
    sites: list[Site] = [
        ModuleSite(call, on, where="after", otherwise=off)
        for call in spread(calls, MAX_CANDIDATES - len(stages))
    ]
    on, off = both(at_stage)
    return [*sites, *(StageSite(stage, on, where="after", otherwise=off) for stage in stages)]


def call_sites(loop: Loop, act: Callable[[], object]) -> list[Site]:
    """``act()``, a call to the accelerator's runtime, behind modules and behind the stages of a step.

    A CPU has no such runtime: there nothing happens at these places.
    """
    stages: tuple[Stage, ...] = ("forward", "logging")
    if loop.mode == "train":
        stages = ("forward", "loss", "backward", "optimizer", "logging")
    on_cpu = loop.device.type == "cpu"
    return watching_sites(loop, lambda tensor: None if on_cpu else act(), stages=stages)
