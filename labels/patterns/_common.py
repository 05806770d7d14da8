"""Where injectors act: candidate places, spread through a step and few enough that markers stay cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torchtraceap.labels.pattern import Body, Loop, ModuleCall, ModuleSite, Site

T = TypeVar("T")

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


def output_sites(loop: Loop, body: Body) -> list[Site]:
    """``y = body(y)`` behind modules spread through the model."""
    return [ModuleSite(call, body, where="after") for call in spread(loop.module_calls())]


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
