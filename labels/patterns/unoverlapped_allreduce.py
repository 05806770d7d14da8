"""Gradients are reduced after the backward pass instead of during it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register
from torchtraceap.labels.patterns._ddp import Mark, metric_sites, unreduced

if TYPE_CHECKING:
    from torch import Tensor


def _after_backward(loop: Loop, reduce: Callable[[Sequence[Tensor]], None]) -> list[Site]:
    """A step that keeps gradients local, and then has ``reduce(gradients)`` average them in place."""

    def forward(state: State, original: Body, mark: Mark) -> None:
        with unreduced(loop):
            original(state)

    def backward(state: State, original: Body, mark: Mark) -> None:
        with unreduced(loop):
            original(state)
        with mark():
            reduce([p.grad for p in loop.model.parameters() if p.grad is not None])

    return [
        StageSite("forward", forward, where="inside", exclusive=True),
        StageSite("backward", backward, where="inside"),
    ]


def _per_tensor(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    def reduce(gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.div_(dist.get_world_size())  # ahead of the sum, as the reducer does
            dist.all_reduce(gradient)

    return _after_backward(loop, reduce)


def _flattened(loop: Loop) -> list[Site]:
    import torch
    import torch.distributed as dist

    def reduce(gradients: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat.div_(dist.get_world_size())
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    return _after_backward(loop, reduce)


def _loss_sum(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    return metric_sites(loop, lambda loss: dist.all_reduce(loss))


register(
    Pattern(
        id="unoverlapped_allreduce",
        title="All-reduce after the backward pass",
        definition=(
            "The gradients are all-reduced when the backward pass is done, tensor by tensor or all in one. "
            "While they travel nothing is computed, where a reducer would send those of the last layers "
            "during the backward pass of the first."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "What averages the gradients behind the backward pass: divisions, copies and all-reduces, their "
            "runtime calls and kernels; not what gloo's own threads do."
        ),
        runtime="distributed",
        modes=frozenset({"train"}),
        variants=(
            Variant("per_tensor", "One all-reduce for each gradient, in a loop.", _per_tensor, together=True),
            Variant(
                "flattened",
                "All gradients copied into one tensor, reduced and copied back.",
                _flattened,
                heldout=True,
                together=True,
            ),
        ),
        lookalikes=(
            Variant("loss_sum", "One all-reduce of the loss, which stays on the device.", _loss_sum),
        ),
        remedy="""\
model = torch.nn.parallel.DistributedDataParallel(model)
model(batch).backward()  # reduces buckets of gradients while earlier layers are computed
optimizer.step()
""",
        references=(
            "https://docs.pytorch.org/docs/stable/notes/ddp.html",
            "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
            "https://arxiv.org/abs/2006.15704",
        ),
        native_risk=False,
    )
)
