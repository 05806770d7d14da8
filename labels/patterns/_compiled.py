"""Other versions of a compiled model that Dynamo keeps apart from the clean one.

Dynamo keeps what it compiled by code object, and takes the first version whose guards hold. A version that
was broken off half way has guards only for the half that it saw, so it would also be taken for the clean
model from then on. Therefore an injection runs a copy of the model's ``forward`` with a code object of its
own, and nothing of it is in sight while the clean model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import Body, StageSite, State

if TYPE_CHECKING:
    from torch import nn

Forward = Callable[..., Any]


def own_code(function: Forward) -> Forward:
    """A copy of a Python function or method for which Dynamo has compiled nothing yet."""
    original: Any = getattr(function, "__func__", function)
    copy = FunctionType(
        original.__code__.replace(),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    bound_to = getattr(function, "__self__", None)
    return copy if bound_to is None else MethodType(copy, bound_to)


def version_site(
    forwards: Mapping[nn.Module, Forward], prepare: Callable[[], object] = lambda: None
) -> StageSite:
    """A place at the forward stage that runs other ``forward`` functions of some modules.

    ``forwards`` must have one for the model itself, with code of its own. ``prepare`` is called ahead of the
    stage. It alone is marked: what is compiled cannot be.
    """

    def body(state: State, original: Body, mark: Any) -> None:
        with mark():
            prepare()
        with _in_place(forwards):
            original(state)

    return StageSite("forward", body, where="inside")


@contextmanager
def _in_place(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Set ``forward`` on the instances, and leave them afterwards as they were."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                del module.forward
            else:
                module.forward = earlier
