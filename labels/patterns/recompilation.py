"""A compiled model is compiled anew in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import TYPE_CHECKING, Any, cast

from torchtraceap.labels.pattern import (
    Body,
    Loop,
    ModuleCall,
    Pattern,
    Site,
    StageSite,
    State,
    Variant,
    register,
)
from torchtraceap.labels.patterns._common import spread
from torchtraceap.labels.patterns._compiled import own_code, version_site

if TYPE_CHECKING:
    from torch import Tensor, nn


def _counter(loop: Loop) -> list[Site]:
    """A module counts its calls and asks for the count: a guard on an ``int`` that no later step passes."""
    root = own_code(loop.model.forward)

    def site(call: ModuleCall) -> StageSite:
        module: Any = call.module
        original = module.forward
        module.calls_seen = 0

        def forward(x: Tensor) -> Tensor:
            y = original(x)
            return y if module.calls_seen > 0 else y.view_as(y)

        def call_again() -> None:
            module.calls_seen += 1

        return version_site({loop.model: root, module: own_code(forward)}, call_again)

    return [site(call) for call in spread(loop.module_calls())]


def _tensor_counter(loop: Loop) -> list[Site]:
    """The same count in a tensor, which is an input of the compiled code."""
    import torch

    root = own_code(loop.model.forward)

    def site(call: ModuleCall) -> StageSite:
        original = call.module.forward
        seen = torch.zeros((), device=loop.device)

        def forward(x: Tensor) -> Tensor:
            y = original(x)
            return y * (seen > 0).to(y.dtype)  # by one

        return version_site({loop.model: root, call.module: own_code(forward)}, lambda: seen.add_(1))

    return [site(call) for call in spread(loop.module_calls())]


def _on_first_image(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with the first floating tensor of at least two dimensions changed."""
    import torch

    values = [*args, *kwargs.values()]
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
            values[index] = change(value)
            break
    return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))


def _padding(loop: Loop, columns: Iterator[int], mark_shape: Callable[[Tensor], None]) -> list[Site]:
    """The batch is padded in each step by the next of ``columns``, and cropped inside of the compiled code.

    So the model computes what it computes without padding. The padding is marked.
    """
    from torch.nn import functional

    original = loop.model.forward
    width = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        args_, kwargs_ = _on_first_image(args, kwargs, lambda x: functional.pad(x, (0, width - x.shape[-1])))
        return original(*args_, **kwargs_)

    site = version_site({loop.model: own_code(forward)})

    def body(state: State, stage: Body, mark: Any) -> None:
        network = loop.network

        def pad(x: Tensor) -> Tensor:
            nonlocal width
            width = x.shape[-1]
            with mark():
                padded = functional.pad(x, (0, next(columns)))
            mark_shape(padded)
            return padded

        def padded_network(*args: Any, **kwargs: Any) -> Any:
            args_, kwargs_ = _on_first_image(args, kwargs, pad)
            return network(*args_, **kwargs_)

        loop.network = cast("nn.Module", padded_network)  # it is called, and nothing else
        try:
            site.body(state, stage, mark)
        finally:
            loop.network = network

    return [StageSite("forward", body, where="inside")]


def _padded(loop: Loop) -> list[Site]:
    return _padding(loop, count(1), lambda padded: None)


def _dynamic_shape(loop: Loop) -> list[Site]:
    import torch._dynamo

    return _padding(
        loop, cycle(range(1, 9)), lambda padded: torch._dynamo.mark_dynamic(padded, padded.dim() - 1)
    )


def _selects(name: str) -> bool:
    # What Dynamo records of its own phases, on the thread of the forward or of the backward pass.
    return name in ("dynamo", "entire_frame_compile", "entire_backward_compile") or name.endswith(
        "(dynamo_timed)"
    )


def _variant(
    name: str, summary: str, sites: Callable[[Loop], list[Site]], *, heldout: bool = False
) -> Variant:
    # A step takes seconds, and one that is settled by compiling is as long as the next.
    return Variant(name, summary, sites, heldout=heldout, max_block_steps=1, settle_steps=0)


register(
    Pattern(
        id="recompilation",
        title="Recompilation in each step",
        definition=(
            "A compiled model depends on a Python value or a shape that is another one in each step, so that "
            "its guards fail and it is compiled anew. Tracing and code generation take the host a second or "
            "more, for which the GPU waits."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="selector",
        belongs=(
            "Tracing, lowering and code generation of the forward and the backward graph, with all operators "
            "and runtime calls in them, and the kernels that tuning launches. Not the new version's run."
        ),
        selects=_selects,
        runtime="compiled",
        precondition="Inputs are floating tensors; shapes are static (dynamic=False).",
        variants=(
            _variant("counter", "A module's int attribute, which it asks for, counts its calls.", _counter),
            _variant("padded", "The batch is padded to another width in each step.", _padded, heldout=True),
        ),
        lookalikes=(
            Variant(
                "tensor_counter",
                "A counter that is a tensor, and so an input of the compiled code.",
                _tensor_counter,
                settle_steps=2,
                mechanism="marker",
            ),
            Variant(
                "dynamic_shape",
                "Another width in each step, which mark_dynamic announces.",
                _dynamic_shape,
                settle_steps=2,
                mechanism="marker",
            ),
        ),
        remedy="""\
# A value that changes goes in as a tensor, not as a Python number or an attribute of a module.
self.register_buffer("calls_seen", torch.zeros((), dtype=torch.int64))

# A shape that changes is announced, or padded to a few sizes.
torch._dynamo.mark_dynamic(images, 3)
model = torch.compile(model, dynamic=None)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html",
            "https://github.com/pytorch/pytorch/issues/128319",
        ),
    )
)
