"""A module is called once a sample instead of once a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, ModuleCall, ModuleSite, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import input_sites, spread, writes_to_input

if TYPE_CHECKING:
    from torch import Tensor

MAX_LEAVES = 8
"""A block or a head; a loop around a whole network would be a batch size of one, which is another matter."""

MAX_BATCH = 64


def _computes(call: ModuleCall) -> bool:
    """Whether the module does more than return its input, as dropout does in inference."""
    from torch import nn

    idle = (nn.Identity, nn.modules.dropout._DropoutNd)
    leaves = [module for module in call.module.modules() if next(module.children(), None) is None]
    return not all(isinstance(leaf, idle) for leaf in leaves)  # a dropout that acts is stateful


def _can_loop(call: ModuleCall, batch_size: int) -> bool:
    return (
        not call.stateful
        and _computes(call)
        and call.leaves <= MAX_LEAVES
        and call.in_shape[0] == call.out_shape[0] == batch_size
        and not writes_to_input(call)
    )


def _sites(loop: Loop, body: Body) -> list[Site]:
    if not 2 <= loop.batch_size <= MAX_BATCH:
        return []
    calls = [call for call in loop.module_calls() if _can_loop(call, loop.batch_size)]
    return [ModuleSite(call, body) for call in spread(calls)]


def _index_and_cat(loop: Loop) -> list[Site]:
    import torch

    def body(original: Body, x: Tensor) -> Tensor:
        return torch.cat([original(x[i : i + 1]) for i in range(len(x))])

    return _sites(loop, body)


def _unbind_and_stack(loop: Loop) -> list[Site]:
    import torch

    def body(original: Body, x: Tensor) -> Tensor:
        outputs = [original(sample.unsqueeze(0)) for sample in x.unbind()]
        y = torch.stack([output.squeeze(0) for output in outputs])
        if outputs[0].ndim == 4 and outputs[0].is_contiguous(memory_format=torch.channels_last):
            # stack forgets the layout; without this the modules behind would run on another one.
            y = y.contiguous(memory_format=torch.channels_last)
        return y

    return _sites(loop, body)


def _views(loop: Loop) -> list[Site]:
    def body(x: Tensor) -> Tensor:
        for sample in x.detach().unbind():
            sample.unsqueeze(0)
        return x

    return input_sites(loop, body)


register(
    Pattern(
        id="python_loop_over_batch",
        title="Python loop over the batch",
        definition=(
            "A module that takes a whole batch is called once for each sample in a Python loop, and the "
            "outputs are put together again. It launches as many times more kernels, each too small to fill "
            "the GPU, and pays the host's overhead for every one of them."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs=(
            "The slicing, the calls for each sample, the concatenation, their backward operators, and the "
            "kernels of all of these."
        ),
        precondition=(
            f"2 to {MAX_BATCH} samples; the module has at most {MAX_LEAVES} leaves, keeps the batch as first "
            "dimension, updates no buffers, draws no random numbers, and does not write to its input."
        ),
        variants=(
            Variant("index_and_cat", "x[i : i + 1] and torch.cat.", _index_and_cat, max_sites=2),
            Variant(
                "unbind_and_stack",
                "x.unbind() and torch.stack.",
                _unbind_and_stack,
                heldout=True,
                max_sites=2,
            ),
        ),
        lookalikes=(Variant("views", "A loop over the samples that only takes views.", _views, max_sites=2),),
        remedy="""\
y = module(x)  # the whole batch at once

# A function of one sample that cannot take a batch:
y = torch.vmap(function)(x)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.vmap.html",
            # ForLoopIndexingPattern
            "https://github.com/pytorch/pytorch/blob/v2.9.0/torch/profiler/_pattern_matcher.py",
        ),
    )
)
