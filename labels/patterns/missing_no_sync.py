"""Gradient accumulation reduces the gradients of every micro-batch instead of once a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register
from torchtraceap.labels.patterns._ddp import Mark, is_reducing, metric_sites, through, unreduced

if TYPE_CHECKING:
    from torch import Tensor


def _accumulation(loop: Loop, micro_batches: int, **changes: Any) -> list[Site]:
    """A step of several micro-batches, with the pattern or under ``no_sync``.

    The forward stage takes all but the last through their forward and backward passes. The last goes through
    the step's own stages. ``changes`` are options of DistributedDataParallel in both cases.
    """
    from torch.utils._pytree import tree_flatten, tree_unflatten

    if loop.batch_size < micro_batches:
        return []
    network = loop.make_network(**changes) if changes else None

    def split(batch: Any) -> list[Any]:
        leaves, spec = tree_flatten(batch)
        parts = zip(*(leaf.tensor_split(micro_batches) for leaf in leaves), strict=True)
        return [tree_unflatten(part, spec) for part in parts]

    def forward(state: State, original: Body, mark: Mark | None = None) -> None:
        with through(loop, network or loop.network):
            *first, last = split(state.batch)
            for batch in first:
                micro = State(host=state.host, batch=batch)
                with nullcontext() if mark else unreduced(loop):
                    original(micro)
                    loop.stages["loss"](micro)
                    with mark() if mark else nullcontext():
                        loop.stages["backward"](micro)
            state.batch = last
            original(state)

    def scale(state: State) -> None:
        state.loss = state.loss / micro_batches

    return [
        StageSite("forward", forward, where="inside", otherwise=forward, exclusive=True),
        StageSite("loss", scale, where="after", otherwise=scale),
    ]


def _two(loop: Loop) -> list[Site]:
    return _accumulation(loop, 2)


def _four(loop: Loop) -> list[Site]:
    return _accumulation(loop, 4)


def _bucket_view(loop: Loop) -> list[Site]:
    return _accumulation(loop, 2, gradient_as_bucket_view=True)


def _averaged_loss(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    def reduce(loss: Tensor) -> None:
        dist.all_reduce(loss.div_(dist.get_world_size()))

    return metric_sites(loop, reduce)


register(
    Pattern(
        id="missing_no_sync",
        title="Reduction of every micro-batch",
        definition=(
            "A step accumulates the gradients of several micro-batches, and DistributedDataParallel reduces "
            "them after each instead of after the last. The same gradients travel several times, though only "
            "their sum is needed."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="meanwhile",
        selects=is_reducing,
        belongs=(
            "In the backward passes of all micro-batches but the last the all-reduces and the copies of "
            "gradients into buckets and back, their runtime calls and kernels."
        ),
        runtime="distributed",
        modes=frozenset({"train"}),
        precondition="The batch has a sample for each micro-batch.",
        variants=(
            Variant("two", "Two micro-batches, both reduced.", _two, together=True),
            Variant("four", "Four micro-batches, all reduced.", _four, together=True),
            Variant(
                "bucket_view",
                "Two micro-batches, with gradients that are views of the buckets.",
                _bucket_view,
                heldout=True,
                together=True,
            ),
        ),
        lookalikes=(
            Variant(
                "averaged_loss",
                "The loss is averaged over the ranks and stays on the device.",
                _averaged_loss,
                mechanism="marker",
            ),
        ),
        remedy="""\
*first, last = batch.split(micro_batch_size)
for micro_batch in first:
    with model.no_sync():
        loss(model(micro_batch)).backward()
loss(model(last)).backward()  # reduces the sum
optimizer.step()
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://arxiv.org/abs/2006.15704",
        ),
        alone=True,  # the loop accumulates gradients
        native_risk=False,
    )
)
