"""All ranks wait for each other in every step, with the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, StageSite, State, Variant, register
from torchtraceap.labels.patterns._ddp import metric_sites

if TYPE_CHECKING:
    from torch import Tensor


def _barrier(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    def body(state: State) -> None:
        dist.barrier()

    return [
        StageSite(stage, body, where="after")
        for stage in ("h2d", "forward", "loss", "backward", "optimizer", "logging")
    ]


def _reduced_loss(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    def reduce(loss: Tensor) -> None:
        dist.all_reduce(loss)
        loss.item()

    return metric_sites(loop, reduce)


def _gathered_losses(loop: Loop) -> list[Site]:
    import torch
    import torch.distributed as dist

    def gather(loss: Tensor) -> None:
        losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
        torch.stack(losses).tolist()

    return metric_sites(loop, gather)


def _asynchronous(loop: Loop) -> list[Site]:
    import torch.distributed as dist

    running: list[dist.Work] = []

    def reduce(loss: Tensor) -> None:
        if running:  # of the step before, and long done
            running.pop().wait()
        work = dist.all_reduce(loss, async_op=True)
        assert work is not None
        running.append(work)

    return metric_sites(loop, reduce)


register(
    Pattern(
        id="barrier_every_step",
        title="Barrier in every step",
        definition=(
            "In every step the host waits until all ranks have come to the same place, by a barrier or by "
            "reading a value that all of them contribute to. Every rank then waits for the slowest and for "
            "its own GPU, which idles until the host has launched work anew."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the collective, and the operators and runtime calls that wait for its outcome. GPU: the "
            "kernels and copies that they launch. Not what gloo's own threads do."
        ),
        runtime="distributed",
        modes=frozenset({"train"}),
        variants=(
            Variant("barrier", "torch.distributed.barrier().", _barrier, max_sites=2),
            Variant("reduced_loss", "The loss is all-reduced and read.", _reduced_loss, max_sites=2),
            Variant(
                "gathered_losses",
                "The losses of all ranks are gathered and read.",
                _gathered_losses,
                heldout=True,
                max_sites=2,
            ),
        ),
        lookalikes=(
            Variant(
                "asynchronous",
                "The loss is all-reduced asynchronously, and waited for a step later.",
                _asynchronous,
            ),
        ),
        remedy="""\
# Reduce and read metrics once in a while, and let the collectives of the gradients keep ranks in step.
running_loss += loss.detach()
if step % log_every == 0:
    torch.distributed.all_reduce(running_loss)
    log(running_loss.item() / log_every / torch.distributed.get_world_size())
    running_loss.zero_()
""",
        references=(
            "https://docs.pytorch.org/docs/stable/distributed.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
        native_risk=False,
    )
)
