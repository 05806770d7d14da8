"""What patterns of DistributedDataParallel share.

Several wrappers of one model can stand side by side: a reducer acts only in a backward pass that its own
wrapper's forward pass has announced, and all others leave the gradients alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torchtraceap.labels.pattern import Body, Loop, Site, StageSite, State

if TYPE_CHECKING:
    from torch import Tensor

Mark = Callable[[], AbstractContextManager[Any]]

REDUCTIONS = frozenset({"c10d::allreduce_", "gloo:all_reduce"})
"""Names of what all-reduces: the operator that every backend has, and what gloo's threads show of it. What
NCCL does lies below the operator."""


COPIES = frozenset(
    {"torch::distributed::reducer::mul_out", "torch.distributed.ddp.reducer::copy_bucket_to_grad"}
)
"""Names under which a reducer copies gradients into its buckets, averaging them, and back."""


def is_reduction(name: str) -> bool:
    """Whether an event of this name is an all-reduce."""
    return name in REDUCTIONS


def is_reducing(name: str) -> bool:
    """Whether an event of this name is an all-reduce, or a copy of a gradient for the sake of one."""
    return name in REDUCTIONS | COPIES


@contextmanager
def through(loop: Loop, network: Any) -> Iterator[None]:
    """Forward passes in here go through ``network``."""
    clean, loop.network = loop.network, network
    try:
        yield
    finally:
        loop.network = clean


def network_sites(loop: Loop, **changes: Any) -> list[Site]:
    """The step with a DistributedDataParallel of other options; all of its backward pass is marked."""
    other = loop.make_network(**changes)  # now, because all ranks must make it at the same time

    def forward(state: State, original: Body, mark: Mark) -> None:
        with through(loop, other):
            original(state)

    def backward(state: State, original: Body, mark: Mark) -> None:
        with mark():
            original(state)

    return [
        StageSite("forward", forward, where="inside", exclusive=True),
        StageSite("backward", backward, where="inside"),
    ]


@contextmanager
def unreduced(loop: Loop) -> Iterator[None]:
    """A forward or backward pass in here leaves its gradients as they are on each rank.

    Buffers are still those of rank 0 in the next forward pass. ``no_sync`` by itself leaves that out too, and
    then what other ranks hold in theirs would depend on how often it is used.
    """
    network: Any = loop.network
    with network.no_sync():
        yield
    network.require_forward_param_sync = True


def metric_sites(loop: Loop, reduce: Callable[[Tensor], object]) -> list[Site]:
    """``reduce`` of a copy of the loss, once there is one, at each stage behind it."""

    def body(state: State) -> None:
        reduce(state.loss.detach().clone())

    return [StageSite(stage, body, where="after") for stage in ("loss", "backward", "optimizer", "logging")]
