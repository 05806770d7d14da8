"""An activation is copied for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import activation_sites, input_sites

if TYPE_CHECKING:
    from torch import Tensor


def _clone(loop: Loop) -> list[Site]:
    return activation_sites(loop, lambda x: x.clone())


def _split_and_cat(loop: Loop) -> list[Site]:
    import torch

    def body(x: Tensor) -> Tensor:
        longest = max(range(x.ndim), key=lambda dim: x.shape[dim])
        return torch.cat(x.chunk(2, longest), longest)

    return activation_sites(loop, body)


def _views(loop: Loop) -> list[Site]:
    # Only ahead of modules that leave their input alone: behind one, an in-place operator of the model would
    # write through the view, which costs a copy in the backward pass.
    return input_sites(loop, lambda x: x.unsqueeze(0).squeeze(0))


register(
    Pattern(
        id="redundant_copy",
        title="Needless copy",
        definition=(
            "An activation is copied, type and layout unchanged, although nobody writes to the original. The "
            "copy reads and writes the whole tensor and takes memory, and its backward may copy the "
            "gradient."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs="The copy or the split and concatenation, and their backward operators.",
        precondition="A copy never stands ahead of a module that writes to its input.",
        variants=(
            Variant("clone", "x.clone().", _clone, max_sites=8),
            Variant(
                "split_and_cat",
                "The tensor is split in two and concatenated again.",
                _split_and_cat,
                heldout=True,
                max_sites=8,
            ),
        ),
        lookalikes=(
            Variant("views", "A dimension is added and removed: views, no copy.", _views, max_sites=8),
        ),
        remedy="""\
y = module(x)  # not module(x.clone()), nor module(torch.cat(x.chunk(2, 1), 1))
x = x.view(batch, tokens, channels)  # a view where strides allow it, instead of a copy
""",
        references=(
            "https://docs.pytorch.org/docs/stable/tensor_view.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
    )
)
