"""A layer has one channel more than tensor cores like."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import (
    Body,
    FunctionCall,
    FunctionSite,
    Loop,
    Pattern,
    Site,
    Variant,
    register,
)
from torchtraceap.labels.patterns._common import spread

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 8
"""Channels: 16 bytes, the widest load and store, hold so many numbers of 16 bits."""

TINY_MACS = 2**24
"""Multiplications of a layer below which it takes microseconds however badly its kernel runs."""


def _calls(loop: Loop) -> list[FunctionCall]:
    return [
        call
        for function in ("linear", "conv2d")
        for call in loop.function_calls(function)
        if _is_dense(call) and all(channels % ALIGNMENT == 0 for channels in call.shapes[1][:2])
    ]


def _is_dense(call: FunctionCall) -> bool:
    """Input and weight are given by position, with all channels in one group."""
    if len(call.shapes) < 2:
        return False
    x, weight = call.shapes[:2]
    if call.function == "linear":
        return len(weight) == 2 <= len(x)
    return len(weight) == len(x) == 4 and weight[1] == x[1]


def _macs(call: FunctionCall) -> int:
    """Multiplications of the layer; for a convolution with a stride, an upper bound."""
    x, weight = call.shapes[:2]
    positions = prod(x[:-1]) if call.function == "linear" else x[0] * x[2] * x[3]
    return positions * prod(weight)


def _sites(calls: list[FunctionCall], *, inputs: int = 0, outputs: int = 0) -> list[Site]:
    """Run the layers with so many more channels of zeros in their inputs and outputs."""
    return [FunctionSite(call, _widened(call.function, inputs, outputs)) for call in spread(calls)]


def _widened(function: str, inputs: int, outputs: int) -> Body:
    channels = -1 if function == "linear" else 1

    def body(
        original: Body, x: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if inputs:
            x, weight = _pad(x, channels, inputs), _pad(weight, 1, inputs)
        if outputs:
            weight = _pad(weight, 0, outputs)
            bias = None if bias is None else _pad(bias, 0, outputs)
        y = original(x, weight, bias, *args, **kwargs)
        if outputs:
            # A copy, because what follows may ask for the strides that it is used to.
            y = y.narrow(channels, 0, y.shape[channels] - outputs).clone()
        return y

    return body


def _pad(x: Tensor, dim: int, count: int) -> Tensor:
    """``x`` with ``count`` more entries of zero in dimension ``dim``."""
    from torch.nn.functional import pad

    behind = x.ndim - 1 - dim % x.ndim
    return pad(x, (0, 0) * behind + (0, count))


def _extra_output(loop: Loop) -> list[Site]:
    return _sites(_calls(loop), outputs=1)


def _extra_input(loop: Loop) -> list[Site]:
    return _sites(_calls(loop), inputs=1)


def _extra_both(loop: Loop) -> list[Site]:
    return _sites(_calls(loop), inputs=1, outputs=1)


def _eight_more(loop: Loop) -> list[Site]:
    return _sites(_calls(loop), outputs=ALIGNMENT)


def _tiny_layer(loop: Loop) -> list[Site]:
    return _sites([call for call in _calls(loop) if _macs(call) <= TINY_MACS], outputs=1)


register(
    Pattern(
        id="misaligned_channels",
        title="Channels no multiple of eight",
        definition=(
            "A linear layer or convolution has one input or output channel too many for its channels to be a "
            "multiple of eight, so that rows of its operands do not begin at multiples of 16 bytes. Its "
            "forward and backward products fall back to kernels that load a number at a time and use tensor "
            "cores badly or not at all."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs=(
            "The layer with its odd channel: the padding that brings the channel in, the product, the copy "
            "that takes it away, and their backward operators."
        ),
        needs_gpu=True,
        precondition=(
            "The layer's own channels are multiples of eight, in one group. The additional ones are zeros, "
            "so that sums differ by rounding at most."
        ),
        variants=(
            Variant(
                "extra_output",
                "One output channel more, which is cut off.",
                _extra_output,
                max_sites=8,
            ),
            Variant(
                "extra_input",
                "One input channel more, of zeros.",
                _extra_input,
                max_sites=8,
            ),
            Variant(
                "extra_both",
                "One input and one output channel more.",
                _extra_both,
                heldout=True,
                max_sites=8,
            ),
        ),
        lookalikes=(
            Variant("eight_more", "Eight output channels more: still aligned.", _eight_more, max_sites=2),
            Variant(
                "tiny_layer",
                "One output channel more in a layer too small to matter.",
                _tiny_layer,
                max_sites=2,
            ),
        ),
        remedy="""\
classes = 1001
head = nn.Linear(1024, -(-classes // 8) * 8)  # 1008: the last seven outputs are never a target
logits = head(features)[:, :classes]  # a view
""",
        references=(
            "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            # MatMulDimInFP16Pattern
            "https://github.com/pytorch/pytorch/blob/v2.9.0/torch/profiler/_pattern_matcher.py",
        ),
    )
)
