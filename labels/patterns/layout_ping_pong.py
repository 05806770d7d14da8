"""An activation is copied into another memory order and straight back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, ModuleCall, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import activation_sites, input_sites

if TYPE_CHECKING:
    from torch import Tensor

Order = tuple[int, ...]
"""Dimensions from the one with the largest stride to the one with the smallest."""


def _is_image(call: ModuleCall) -> bool:
    """Input and output are (N, C, H, W) or (N, H, W, C), and the two orders differ in memory."""
    return all(
        len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1
        for shape in (call.in_shape, call.out_shape)
    )


def _is_sequence(call: ModuleCall) -> bool:
    """Input and output are (batch, tokens, channels), and swapping the last two moves something."""
    return all(len(shape) == 3 and min(shape[1:]) > 1 for shape in (call.in_shape, call.out_shape))


def _sites(loop: Loop, body: Body) -> list[Site]:
    return activation_sites(loop, body, suits=lambda call: _is_image(call) or _is_sequence(call))


def _order(x: Tensor) -> Order:
    strides = x.stride()
    return tuple(sorted(range(x.ndim), key=lambda dim: -strides[dim]))


def _other(x: Tensor) -> Order:
    """Dimension 1 innermost (channels last, for an image) if ``x`` lies in the plain order, else that one."""
    plain = tuple(range(x.ndim))
    return (0, *plain[2:], 1) if _order(x) == plain or x.is_contiguous() else plain


def _inverse(order: Order) -> Order:
    return tuple(sorted(range(len(order)), key=lambda dim: order[dim]))


def _is_channels_last(x: Tensor) -> bool:
    """Whether ``to`` and convolutions take an image for channels last.

    They go by the strides of all dimensions, where ``is_contiguous`` leaves out those of one entry.
    """
    least = 1
    for dim in (1, 3, 2, 0):
        if x.stride(dim) < least:
            return False
        least = x.stride(dim) * x.shape[dim]
    return True


def _is_unnamed(x: Tensor) -> bool:
    """Whether it is an image that lies in memory as channels last, and yet is not taken for it.

    So are tokens of one sample that were made an image: the stride of the batch is that of a token. A copy
    with the usual strides would have the convolutions behind it run in another layout.
    """
    import torch

    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not _is_channels_last(x)


def _copied(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the memory order of ``like``; a copy, if it is not.

    No view of a copy, where the order has a name: autograd records a write to a view in other operators than
    one to the activation itself, and a module behind this may write in place.
    """
    import torch

    if _is_unnamed(like):
        return torch.empty_like(like, requires_grad=False).copy_(x)
    order = _order(like)
    if order == (0, 2, 3, 1):
        return x.contiguous(memory_format=torch.channels_last)
    if order == tuple(range(len(order))):
        return x.contiguous()
    return x.permute(order).contiguous().permute(_inverse(order))


def _permute(loop: Loop) -> list[Site]:
    def body(x: Tensor) -> Tensor:
        other = _other(x)
        return _copied(x.permute(other).contiguous().permute(_inverse(other)), x)

    return _sites(loop, body)


def _memory_format(loop: Loop) -> list[Site]:
    import torch

    def body(x: Tensor) -> Tensor:
        if _is_channels_last(x):
            return x.to(memory_format=torch.contiguous_format).to(memory_format=torch.channels_last)
        # ``to`` takes any order but channels last for contiguous; a permuted view gets back its own.
        if _is_unnamed(x):
            return _copied(x.contiguous(), x)
        y = x.to(memory_format=torch.channels_last)
        plain = _order(x) == (0, 1, 2, 3)
        return y.to(memory_format=torch.contiguous_format) if plain else _copied(y, x)

    return activation_sites(loop, body, suits=_is_image)


def _copy_into(loop: Loop) -> list[Site]:
    import torch

    def body(x: Tensor) -> Tensor:
        other = _other(x)
        source = x.permute(other)
        # Not into a permuted view: the backward of a write through a view copies the gradient once more.
        there = torch.empty(source.shape, dtype=x.dtype, device=x.device).copy_(source)
        return torch.empty_like(x, requires_grad=False).copy_(there.permute(_inverse(other)))

    return _sites(loop, body)


def _same_format(loop: Loop) -> list[Site]:
    import torch

    def body(x: Tensor) -> Tensor:
        own = next(
            (f for f in (torch.contiguous_format, torch.channels_last) if x.is_contiguous(memory_format=f)),
            torch.preserve_format,
        )
        return x.to(memory_format=own)

    return activation_sites(loop, body, suits=_is_image)


def _views(loop: Loop) -> list[Site]:
    # Only ahead of modules that leave their input alone; redundant_copy says why.
    return input_sites(loop, lambda x: x.movedim(1, -1).movedim(-1, 1))


register(
    Pattern(
        id="layout_ping_pong",
        title="Layout there and back",
        definition=(
            "An activation is copied into another memory order (channels last, or tokens and channels "
            "swapped) and straight back, though nothing in between needs that order. Each of the two copies "
            "reads or writes the whole tensor with a stride, which wastes more bandwidth than a plain copy."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs="The two copies with the permutations around them, and their backward operators.",
        precondition=(
            "The activation has three or four dimensions, and more than one channel and position. A copy "
            "never stands ahead of a module that writes to its input."
        ),
        variants=(
            Variant("permute", "x.permute(...).contiguous(), twice.", _permute, max_sites=8),
            Variant(
                "memory_format", "x.to(memory_format=...), twice; images only.", _memory_format, max_sites=8
            ),
            Variant(
                "copy_into",
                "copy_ into an empty tensor of the other order, and back.",
                _copy_into,
                heldout=True,
                max_sites=8,
            ),
        ),
        lookalikes=(
            Variant(
                "same_format",
                "Converted to the memory format that it has: no copy.",
                _same_format,
                max_sites=8,
            ),
            Variant("views", "Dimensions are moved there and back: views, no copy.", _views, max_sites=8),
        ),
        remedy="""\
model = model.to(memory_format=torch.channels_last)  # once: convolutions pass the format on
images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
output = model(images)  # no .contiguous() and no permute(...).contiguous() between the layers
""",
        references=(
            "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://docs.pytorch.org/docs/stable/tensor_view.html",
        ),
    )
)
