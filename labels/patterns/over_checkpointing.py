"""Blocks are recomputed in the backward pass although their activations would fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, ModuleCall, ModuleSite, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import output_of, spread, watching_sites, writes_to_input

if TYPE_CHECKING:
    from torch import Tensor

MIN_LEAVES, MAX_LEAVES = 2, 32
"""A block or a part of one, as checkpoints are set: not a single layer, not the whole network."""

Checkpoint = Callable[[Callable[["Tensor"], "Tensor"], "Tensor"], "Tensor"]


def _is_repeatable(call: ModuleCall) -> bool:
    """A second call gives the same and leaves nothing behind."""
    return not call.stateful and not writes_to_input(call)


def _is_block(call: ModuleCall) -> bool:
    learns = any(p.requires_grad for p in call.module.parameters())  # else nothing may need recomputing
    return _is_repeatable(call) and learns and MIN_LEAVES <= call.leaves <= MAX_LEAVES


def _sites(loop: Loop, checkpoint: Checkpoint) -> list[Site]:
    def body(original: Body, x: Tensor, mark: Body) -> Tensor:
        calls = 0

        def run(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return original(x)  # the forward pass, which happens without a checkpoint too
            with mark():
                return original(x)

        return checkpoint(run, x)

    return [
        ModuleSite(call, body, where="inside")
        for call in spread([call for call in loop.module_calls() if _is_block(call)])
    ]


def _checkpoint(run: Callable[[Tensor], Tensor], x: Tensor, *, reentrant: bool = False) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    # Nothing that is recomputed here draws random numbers; keeping their state would only add unmarked calls.
    return checkpoint(run, x, use_reentrant=reentrant, preserve_rng_state=False)


def _reentrant_checkpoint(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    import torch

    def no_view(x: Tensor) -> Tensor:
        # In the forward pass nothing of ``run`` is recorded. A view that comes out of it may not be written
        # to in place, as the model may do next; ``data`` is the same memory, and no view for autograd.
        y = run(x)
        return y if torch.is_grad_enabled() else y.data

    # The older kind gives no gradients at all if its input needs none, as at the first block of a model.
    return _checkpoint(no_view, x, reentrant=True) if x.requires_grad else _checkpoint(run, x)


def _blocks(loop: Loop) -> list[Site]:
    return _sites(loop, _checkpoint)


def _reentrant(loop: Loop) -> list[Site]:
    return _sites(loop, _reentrant_checkpoint)


def _metric(loop: Loop) -> list[Site]:
    from torch.nn import functional

    def look(output: Tensor) -> None:
        output = output.detach()
        functional.gelu((output[:1] if output.ndim else output).float())

    return watching_sites(
        loop, look, stages=("backward", "optimizer"), read=output_of, suits=lambda call: False
    )


register(
    Pattern(
        id="over_checkpointing",
        title="Needless checkpointing",
        definition=(
            "Blocks run under activation checkpointing although their activations would fit into memory. The "
            "backward pass runs the forward pass of each such block once more."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "The forward operators that the backward pass repeats, and their kernels. Neither the backward "
            "operators, which use what was recomputed, nor the few calls with which the forward pass sets a "
            "checkpoint."
        ),
        modes=frozenset({"train"}),
        precondition=(
            f"A block of {MIN_LEAVES} to {MAX_LEAVES} leaves, with trained parameters, that updates no "
            "buffers, draws no random numbers and does not write to its input."
        ),
        variants=(
            Variant("blocks", "checkpoint(block, x, use_reentrant=False).", _blocks, max_sites=12),
            Variant(
                "reentrant",
                "The older checkpoint, use_reentrant=True, wherever the input needs a gradient.",
                _reentrant,
                heldout=True,
                max_sites=12,
            ),
        ),
        lookalikes=(
            Variant(
                "metric",
                "An activation of one sample's output behind the backward pass, as for a metric.",
                _metric,
                max_sites=2,
            ),
        ),
        remedy="""\
y = block(x)  # checkpoint(block, x) only once torch.cuda.max_memory_allocated() nears what the device has
""",
        references=(
            "https://docs.pytorch.org/docs/stable/checkpoint.html",
            "https://huggingface.co/docs/transformers/en/grad_checkpointing",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
    )
)
