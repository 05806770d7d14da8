"""The model computes in full float32, which tensor cores do not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import (
    Body,
    Loop,
    ModuleCall,
    ModuleSite,
    Pattern,
    Site,
    StageSite,
    State,
    Variant,
    register,
)
from torchtraceap.labels.patterns._common import MAX_CANDIDATES, writes_to_input

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Float32 products and convolutions use all bits of their operands while the block runs."""
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def _no_autocast(loop: Loop) -> Iterator[None]:
    """The loop's stages run without autocast while the block runs."""
    autocast, loop.autocast = loop.autocast, False
    try:
        yield
    finally:
        loop.autocast = autocast


def _in_float32(loop: Loop, call: ModuleCall) -> ModuleSite:
    """A module without autocast, whose output is cast to the type that it has while the site is off."""
    import torch

    own: torch.dtype | None = None

    def body(original: Body, x: Tensor) -> Tensor:
        with torch.autocast(loop.device.type, enabled=False):
            return original(x.float()).to(own or x.dtype)

    def otherwise(original: Body, x: Tensor) -> Tensor:
        nonlocal own
        y = original(x)
        own = y.dtype  # known before the site is ever on: a session warms up with all sites off
        return y

    return ModuleSite(call, body, otherwise=otherwise)


def _whole_step(loop: Loop) -> list[Site]:
    def body(state: State, original: Body) -> None:
        with _no_autocast(loop), _no_tf32():
            original(state)

    return [StageSite("forward", body), StageSite("loss", body), StageSite("backward", body)]


def _multiplies(call: ModuleCall) -> bool:
    """The module holds a matrix or a kernel, and can be given a copy of its input."""
    return any(p.ndim >= 2 for p in call.module.parameters()) and not writes_to_input(call)


def _outermost(calls: list[ModuleCall]) -> list[ModuleCall]:
    """Those of ``calls`` whose module lies in no other's."""
    names = {call.name for call in calls}

    def is_inner(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:count]) in names for count in range(1, len(parts)))

    return [call for call in calls if not is_inner(call.name)]


def _blocks(loop: Loop) -> list[Site]:
    def stage(state: State, original: Body, mark: Body) -> None:
        with _no_tf32():
            original(state)

    def size(call: ModuleCall) -> int:
        return sum(p.numel() for p in call.module.parameters())

    stages: list[Site] = [StageSite(name, stage, where="inside") for name in ("forward", "backward")]
    calls = _outermost([call for call in loop.module_calls() if _multiplies(call)])
    largest = sorted(calls, key=size, reverse=True)[: MAX_CANDIDATES - len(stages)]
    return [*stages, *(_in_float32(loop, call) for call in largest)] if largest else []


def _head(loop: Loop) -> list[Site]:
    layers = [call for call in loop.module_calls() if call.leaves == 1 and _multiplies(call)]
    return [_in_float32(loop, call) for call in layers[-1:]]


def _loss(loop: Loop) -> list[Site]:
    import torch
    from torch.utils._pytree import tree_map

    def wide(leaf: Any) -> Any:
        is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.float() if is_floating else leaf

    def body(state: State, original: Body) -> None:
        output = state.output
        state.output = tree_map(wide, output)
        try:
            with _no_autocast(loop):
                original(state)
        finally:
            state.output = output

    return [StageSite("loss", body)]


register(
    Pattern(
        id="fp32_no_tensor_cores",
        title="Full float32, no tensor cores",
        definition=(
            "Forward and backward pass compute in float32 with TensorFloat-32 off, where autocast to "
            "bfloat16 would do. Products and convolutions then run on the ordinary cores at a fraction of "
            "the speed of tensor cores, and activations take twice the memory and bandwidth."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs=(
            "The stages or blocks that run in float32 instead of in a narrower type, with the casts at their "
            "borders, their backward operators, and the kernels of all of these. What lies in them and is "
            "float32 under autocast too belongs as well."
        ),
        needs_gpu=True,
        precondition="The device has tensor cores. blocks: the modules do not write to their input.",
        variants=(
            Variant(
                "whole_step",
                "No autocast, TensorFloat-32 off for products and convolutions.",
                _whole_step,
                together=True,
            ),
            Variant(
                "blocks",
                "Autocast is on, but the model's largest parts leave it, with casts at their borders.",
                _blocks,
                heldout=True,
                together=True,
            ),
        ),
        lookalikes=(
            Variant("head", "The last layer alone in float32, for the precision of the logits.", _head),
            Variant("loss", "The output is cast to float32 ahead of the loss.", _loss),
        ),
        remedy="""\
torch.set_float32_matmul_precision("high")  # TensorFloat-32 for what stays in float32
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = criterion(model(images), targets)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html",
            "https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html",
            "https://docs.pytorch.org/docs/stable/amp.html",
            # FP32MatMulPattern
            "https://github.com/pytorch/pytorch/blob/v2.9.0/torch/profiler/_pattern_matcher.py",
        ),
    )
)
