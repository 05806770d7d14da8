"""A result grows by concatenation in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, ModuleCall, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import activation_sites, input_sites

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIECES = 16


def _has_pieces(call: ModuleCall) -> bool:
    return max(call.in_shape) > 1 and max(call.out_shape) > 1


def _sites(loop: Loop, gather: Callable[[Tensor, int], Tensor]) -> list[Site]:
    """``gather(x, dim)`` puts an activation together again from pieces along ``dim``.

    The samples are the pieces, or what else has several entries. A careful loop collects them in a list and
    copies them once. Nothing stands for that where a site is off: an activation that is there already needs
    no copy, and one in clean code would be a redundant_copy.
    """

    def body(x: Tensor) -> Tensor:
        # In the order of its strides, in which the copies keep the layout.
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        in_order = order == list(range(x.ndim)) or _is_channels_last(x)
        dense = x if in_order else x.permute(order)
        dim = next(dim for dim in range(x.ndim) if dense.shape[dim] > 1)
        y = gather(dense, dim)
        return y if in_order else y.permute([order.index(dim) for dim in range(x.ndim)])

    return activation_sites(loop, body, suits=_has_pieces)


def _is_channels_last(x: Tensor) -> bool:
    import torch

    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _cat(loop: Loop) -> list[Site]:
    import torch

    def gather(x: Tensor, dim: int) -> Tensor:
        y, *others = x.chunk(MAX_PIECES, dim)
        for piece in others:
            y = torch.cat((y, piece), dim)
        return y

    return _sites(loop, gather)


def _copy_into(loop: Loop) -> list[Site]:
    import torch

    def gather(x: Tensor, dim: int) -> Tensor:
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        y, *others = x.chunk(MAX_PIECES, dim)
        for piece in others:
            old, new = y.shape[dim], piece.shape[dim]
            shape = [*y.shape[:dim], old + new, *y.shape[dim + 1 :]]
            grown = torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=layout)
            grown.narrow(dim, 0, old).copy_(y)
            grown.narrow(dim, old, new).copy_(piece)
            y = grown
        return y

    return _sites(loop, gather)


def _one_cat(loop: Loop) -> list[Site]:
    import torch

    def body(x: Tensor) -> Tensor:
        first_of_samples = x.detach().movedim(0, -1)[(0,) * (x.ndim - 1)]
        torch.cat(first_of_samples.chunk(MAX_PIECES))
        return x

    return input_sites(loop, body)


register(
    Pattern(
        id="cat_in_loop",
        title="Concatenation in a loop",
        definition=(
            "A result is gathered piece by piece, and each piece is joined to what is there by a "
            "concatenation of its own. Each of them copies everything gathered so far again, so that the "
            "traffic grows with the square of the number of pieces."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs=(
            "The views of the pieces, the copies, their backward operators, and the kernels of all. One copy "
            "of the whole is among them that a careful loop needs, too: what is measured is so much too dear."
        ),
        precondition=(
            f"A dimension of the activation has two entries or more; there are at most {MAX_PIECES} pieces; "
            "ahead of a module that writes to its input there is no place."
        ),
        variants=(
            Variant("cat", "y = torch.cat((y, piece)).", _cat, max_sites=3),
            Variant(
                "copy_into",
                "A larger tensor for each piece, which y and the piece are copied into.",
                _copy_into,
                heldout=True,
                max_sites=3,
            ),
        ),
        lookalikes=(
            Variant("one_cat", "One value a sample, gathered with one torch.cat.", _one_cat, max_sites=3),
        ),
        remedy="""\
results = []
for piece in pieces:
    results.append(function(piece))
y = torch.cat(results)  # once, behind the loop
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.cat.html",
            "https://github.com/pytorch/audio/pull/1850",
        ),
    )
)
