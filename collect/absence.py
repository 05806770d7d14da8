"""Which patterns a step is shown not to hold by the operators that it dispatched.

Each check takes the calls of a forward pass and loss (``dispatch.Call``) in order and returns True only where
nothing resembles the pattern. They err towards False: what they count is wider than the pattern is.

Most follow values: a fact about a tensor, under its number, that operators hand on from their inputs to their
outputs. A tensor that was met for the first time as an input (a parameter, a buffer, the batch) has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch._ops import OpOverload

from torchtraceap.collect.dispatch import COPIES, FEW, Call, Recording, Value

CAST_REACH = 2
"""Operators between a cast and the cast back that still count as one round trip."""

CHAIN = 4
"""So many elementwise operators in a row are a chain that a compiler would fuse with profit."""

ALIGNMENT = 8
"""Elements of a half-precision tensor in 16 bytes, which tensor cores read at once."""

HALF = (torch.bfloat16, torch.float16)

_MATRIX = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "linear", "_addmm_activation"}
)
_CONSTANTS = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


def lacks_same_copies(calls: Iterable[Call]) -> bool:
    """No copy has the type, strides and device of its source."""
    for call in calls:
        if _name(call) in ("_to_copy", "copy_", "clone") and call.inputs:
            source, out = call.inputs[-1], call.outputs[0]
            same = (source.dtype, source.strides, source.device) == (out.dtype, out.strides, out.device)
            if same and source.numel > 1:
                return False
    return True


def lacks_cast_round_trips(calls: Iterable[Call]) -> bool:
    """No floating value is cast back to the type that it had at most ``CAST_REACH`` operators before.

    A weight in a narrower type is no round trip of what is computed with it.
    """
    was: dict[int, tuple[torch.dtype, int]] = {}
    for call in calls:
        if not call.inputs or len(call.outputs) != 1:
            continue
        source, out = call.inputs[-1], call.outputs[0]
        if call.name in COPIES and _is_cast(source, out):
            if source.number in was and was[source.number][0] == out.dtype:
                return False
            if not source.parameter:
                was[out.number] = (source.dtype, 0)
            continue
        before = [was[value.number] for value in call.inputs if value.number in was]
        if before and before[0][1] < CAST_REACH:
            was[out.number] = (before[0][0], before[0][1] + 1)
    return True


def lacks_layout_round_trips(calls: Iterable[Call]) -> bool:
    """No value is copied into another order in memory twice, whatever happens to it in between."""
    changed: set[int] = set()
    for call in calls:
        reached = any(value.number in changed for value in call.inputs)
        if _name(call) in ("_to_copy", "copy_", "clone") and call.inputs:
            source, out = call.inputs[-1], call.outputs[0]
            if source.shape == out.shape and not source.parameter and _order(source) != _order(out):
                if reached:
                    return False
                reached = True
        if reached:
            changed.update(value.number for value in call.outputs)
    return True


def lacks_unaligned_channels(calls: Iterable[Call]) -> bool:
    """All matrix products and convolutions in half precision have channels that are multiples of 8.

    Channels are the inner dimension and the columns of a product, input and output channels of a convolution
    (a group's, unless it is depthwise), and the channels of a head of attention.
    """
    return all(channels % ALIGNMENT == 0 for call in calls for channels in _channels(call))


def lacks_fp32_products(calls: Iterable[Call]) -> bool:
    """All matrix products, convolutions and fused attention run in half precision."""
    return all(
        value.dtype in HALF
        for call in calls
        if _is_matrix(call) or _is_convolution(call) or _is_attention(call)
        for value in call.inputs[:2]
    )


def lacks_unfused_attention(calls: Iterable[Call]) -> bool:
    """No product takes what a softmax (or an exponential) gave, but for operators that are no products."""
    weights: set[int] = set()
    for call in calls:
        reached = any(value.number in weights for value in call.inputs)
        if reached and _is_matrix(call):
            return False
        if _name(call) in ("_softmax", "exp", "_safe_softmax", "exp_") or (
            reached and not _is_convolution(call)
        ):
            weights.update(value.number for value in call.outputs)
    return True


def lacks_elementwise_chains(calls: Iterable[Call]) -> bool:
    """Fewer than ``CHAIN`` elementwise operators on floating tensors follow from each other in a row.

    Casts, views and reductions between them neither count nor end a row; any other operator does. What
    a residual connection adds up over a whole network is no chain.
    """
    length: dict[int, int] = {}
    for call in calls:
        elementwise = _is_elementwise(call.func)
        if not (elementwise or _passes(call) or torch.Tag.reduction in call.func.tags):
            length.clear()
            continue
        before = max((length.get(value.number, 0) for value in call.inputs), default=0)
        out = call.outputs[0] if call.outputs else None
        if elementwise and out is not None:
            before = before + 1 if out.dtype.is_floating_point and out.numel > FEW else 0
        if before >= CHAIN:
            return False
        for value in call.outputs:
            length[value.number] = before
    return True


def lacks_growing_cats(calls: Iterable[Call]) -> bool:
    """No concatenation takes a tensor that another took or gave, views and elementwise operators aside."""
    taken: set[int] = set()
    for call in calls:
        reached = any(value.number in taken and value.numel > FEW for value in call.inputs)
        if _name(call) in ("cat", "stack"):
            if reached:
                return False
            taken.update(value.number for value in (*call.inputs, *call.outputs))
        elif reached and (_passes(call) or _is_elementwise(call.func)):
            taken.update(value.number for value in call.outputs)
    return True


def lacks_constants(calls: Iterable[Call], batch: Iterable[int]) -> bool:
    """Nothing of more than a few elements is computed of anything but the batch and random numbers.

    Neither factories (arange, zeros, full ...) nor work on parameters and buffers alone; their views and
    casts are no work.
    """
    varying = set(batch)
    for call in calls:
        drawn = torch.Tag.nondeterministic_seeded in call.func.tags
        depends = drawn or any(value.number in varying for value in call.inputs)
        if depends and _name(call) not in _CONSTANTS:
            varying.update(value.number for value in call.outputs)
        elif _is_work(call) and any(value.numel > FEW for value in call.outputs):
            return False
    return True


def absent(seen: Recording, doubled: Recording, device_type: str) -> frozenset[str]:
    """Patterns that a step does not hold, most of them looked for in its forward pass and loss.

    Args:
        seen: A step with its backward pass.
        doubled: The forward pass and loss of twice the batch.
        device_type: Where it ran; of types and alignments for tensor cores a CPU tells nothing.
    """
    calls = _forward(seen)
    evidence = {
        "cache_flush": not seen.empties_cache,
        "cat_in_loop": lacks_growing_cats(calls),
        "dtype_ping_pong": lacks_cast_round_trips(calls),
        "fp32_no_tensor_cores": device_type != "cpu" and lacks_fp32_products(calls),
        "layout_ping_pong": lacks_layout_round_trips(calls),
        "misaligned_channels": device_type != "cpu" and lacks_unaligned_channels(calls),
        "over_checkpointing": not seen.recomputes,
        "python_loop_over_batch": len(_forward(doubled)) == len(calls),
        "recomputed_constant": lacks_constants(calls, seen.batch),
        "redundant_copy": lacks_same_copies(calls),
        "unfused_attention": lacks_unfused_attention(calls),
        "unfused_elementwise": lacks_elementwise_chains(calls),
    }
    return frozenset(pattern for pattern, holds_none in evidence.items() if holds_none)


def _forward(seen: Recording) -> list[Call]:
    return [call for call in seen.calls if call.stage in ("forward", "loss")]


def _name(call: Call) -> str:
    """Without the library: ``add`` of ``aten::add``."""
    return call.name.partition("::")[2]


def _is_cast(source: Value, out: Value) -> bool:
    return source.dtype.is_floating_point and out.dtype.is_floating_point and source.dtype != out.dtype


def _order(value: Value) -> list[int]:
    """Dimensions longer than 1, from the one that is outermost in memory to the innermost."""
    dims = [dim for dim, size in enumerate(value.shape) if size > 1]
    return sorted(dims, key=lambda dim: -value.strides[dim]) if value.strides else []


def _is_matrix(call: Call) -> bool:
    return _name(call) in _MATRIX


def _is_convolution(call: Call) -> bool:
    return "conv" in _name(call) and "convert" not in _name(call)


def _is_attention(call: Call) -> bool:
    return "attention" in _name(call)


def _channels(call: Call) -> list[int]:
    """The dimensions of a product that tensor cores want aligned; none of a call that is no such product."""
    if not any(value.dtype in HALF for value in call.inputs):
        return []
    if _is_attention(call):
        return [call.inputs[0].shape[-1]]
    if _is_convolution(call):
        image, weight = call.inputs[:2]
        grouped = [] if weight.shape[1] == 1 else [weight.shape[1]]
        return [image.shape[1], weight.shape[0], *grouped]
    if _name(call) == "linear":
        return [*call.inputs[1].shape]
    if _is_matrix(call):
        left, right = call.inputs[-2:]  # ahead of them what is added
        return [left.shape[-1], *right.shape[-2:]]
    return []


def _is_work(call: Call) -> bool:
    """Whether it fills memory, other than with what was there in another type."""
    name = _name(call)
    return not (call.func.is_view or name in ("_to_copy", "lift_fresh", "detach_") or "empty" in name)


def _passes(call: Call) -> bool:
    """Whether the result is the input, in another shape, type or place."""
    return call.func.is_view or call.name in COPIES or _name(call) in ("clone", "_unsafe_view", "detach_")


@cache
def _is_elementwise(func: OpOverload) -> bool:
    """Whether PyTorch says so of the operator, or of what it is the in-place form of; copies are none."""
    name = func.overloadpacket.__name__
    if name in ("clone", "copy_", "_to_copy"):
        return False
    packets = [func.overloadpacket]
    if name.endswith("_"):
        packets.append(getattr(getattr(torch.ops, func.namespace), name.rstrip("_"), None))
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )
