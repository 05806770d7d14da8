"""Several ranks of one workload: processes that train one model with DistributedDataParallel.

Each rank is a process of its own on a GPU of its own (NCCL), or all share the CPU (gloo), and runs the same
session with the same seed. So all ranks draw the same places, arms and orders, and step equally often; where
they decide on what they measured, they first agree on it (:class:`World`). Their batches differ, as a
distributed sampler would have it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from torchtraceap.collect.processes import die_with
from torchtraceap.errors import UserError
from torchtraceap.files import replacing
from torchtraceap.labels.pattern import STAGES, State

if TYPE_CHECKING:
    from torchtraceap.collect.loop import TrainingLoop

T = TypeVar("T")

TURN = "turn"
"""Key that rank 0 sets once it may use its device."""

WAIT = timedelta(days=1)
"""For so long others may have the device; the time limits of workloads end it sooner."""


@dataclass(frozen=True)
class World:
    """The ranks of a workload as one of them sees it; without any other, what it has is agreed already.

    ``control`` is a group of its own on the CPU: what ranks tell each other between blocks and profiles
    leaves no work on a GPU and no event in a trace.
    """

    rank: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None

    def largest(self, value: float) -> float:
        """The largest of the ranks' values. All ranks must call this, and all of the below, alike."""
        if self.control is None:
            return value
        agreed = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.control)
        return agreed.item()

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return int(-self.largest(-value))

    def agreed(self, value: T) -> T:
        """Rank 0's value."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gathered(self, items: Sequence[T]) -> list[T]:
        """All ranks' items on rank 0, in the order of ranks; nothing on the others."""
        if self.control is None:
            return list(items)
        boxes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(list(items), boxes, dst=0, group=self.control)
        return [item for box in boxes or [] for item in box]


class _Outcome(msgspec.Struct):
    """How a rank ended, if nobody killed it; ``error`` is an unforeseen one, of the time ``at``."""

    result: dict[str, Any] | None = None
    user_error: str = ""
    out_of_memory: str = ""
    error: str = ""
    at: float = 0.0


def run_ranks(size: int, main: Callable[[int, Path], dict[str, Any]]) -> dict[str, Any]:
    """Run ``main(rank, store)`` in ``size`` processes, and return what rank 0 returned.

    The ranks are forked, so this process must not have computed anything, and does not. ``store`` names the
    file through which they find each other. A rank that ends early ends all others; so does the end of this
    process, on Linux.

    Raises:
        UserError, torch.OutOfMemoryError: A rank raised it.
        RuntimeError: A rank raised anything else, or was killed; the message says which.
    """
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="traceap-") as folder:
        outcomes = [Path(folder) / f"rank{rank}.json" for rank in range(size)]

        def tell(rank: int, outcome: _Outcome) -> None:
            with replacing(outcomes[rank]) as temporary:  # a rank may be ended while it writes
                temporary.write_bytes(msgspec.json.encode(outcome))

        def run(rank: int) -> None:
            die_with(parent)
            try:
                tell(rank, _Outcome(result=main(rank, Path(folder) / "store")))
            except UserError as error:
                tell(rank, _Outcome(user_error=str(error)))
                raise
            except torch.OutOfMemoryError as error:
                tell(rank, _Outcome(out_of_memory=str(error)))
                raise
            except Exception as error:
                line = next(iter(str(error).strip().splitlines()), "no message")
                tell(rank, _Outcome(error=f"{type(error).__name__}: {line}", at=time.monotonic()))
                raise

        ranks = start_processes(run, nprocs=size, join=False, start_method="fork")
        try:
            while not ranks.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            ended = {
                rank: msgspec.json.decode(path.read_bytes(), type=_Outcome)
                for rank, path in enumerate(outcomes)
                if path.exists()
            }
            # A rank that raised takes others down, which then raise that their connection is gone.
            for one in ended.values():
                if one.user_error:
                    raise UserError(one.user_error) from None
                if one.out_of_memory:
                    raise torch.OutOfMemoryError(one.out_of_memory) from error
            why = _why(ended, [process.exitcode for process in ranks.processes])
            raise RuntimeError(why or f"rank {error.error_index}: {error}") from error
        result = msgspec.json.decode(outcomes[0].read_bytes(), type=_Outcome).result
    assert result is not None
    return result


def _why(ended: Mapping[int, _Outcome], exit_codes: Sequence[int | None]) -> str:
    """Which ranks were killed, and what the first to raise raised; empty if neither was.

    The rank whose end is noticed first need not be the one that began it: others end as soon as their
    connection to it is gone. SIGTERM is how they are ended.
    """
    reasons = [
        f"rank {rank}: killed by {signal.Signals(-code).name}"
        for rank, code in enumerate(exit_codes)
        if code is not None and code < 0 and -code != signal.SIGTERM
    ]
    if raised := [(one.at, rank, one.error) for rank, one in ended.items() if one.error]:
        _, rank, error = min(raised)
        reasons.append(f"rank {rank}: {error}")
    return "; ".join(reasons)


def share_cpu(size: int) -> None:
    """Give this rank its part of the CPU's cores, for which all ranks would else compete."""
    torch.set_num_threads(max(1, torch.get_num_threads() // size))


def join(rank: int, size: int, store: Path, device: torch.device) -> World:
    """Meet the other ranks. Threads start here, so loader workers must have been forked before.

    Rank 0 comes when it may use its device, for which others may take longer than any timeout of PyTorch's:
    a store waits for five minutes, NCCL for ten. So nobody begins before it is there.
    """
    on_gpu = device.type == "cuda"
    if sys.platform == "linux":
        # All ranks are on this machine, whose name need not lead to an address that it can be reached by.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = dist.FileStore(str(store), size)
    if rank == 0:
        meeting.set(TURN, "")
    meeting.wait([TURN], WAIT)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=meeting,
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)  # every rank is a member
    return World(rank, size, control)


def distribute(loop: TrainingLoop, world: World) -> None:
    """Let a training loop go through DistributedDataParallel.

    Raises:
        UserError: A parameter of the model gets no gradient, which DistributedDataParallel refuses.
    """
    _require_gradients(loop)
    loop.world = world
    loop.runtime = "distributed"
    loop.network = loop.make_network()


def leave() -> None:
    """Say goodbye to the other ranks; call at the end, and not where something went wrong."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _require_gradients(loop: TrainingLoop) -> None:
    """Run one step up to the backward pass, and see whether it reaches all parameters."""
    with loop.state_kept():
        state = State()
        for stage in STAGES[: STAGES.index("backward") + 1]:
            loop.stages[stage](state)
    without = [name for name, p in loop.model.named_parameters() if p.requires_grad and p.grad is None]
    loop.stages["zero_grad"](state)
    if without:
        raise UserError(
            f"{loop.spec.name}: {len(without)} parameters get no gradient ({without[0]} ...), which "
            "DistributedDataParallel refuses; choose another model"
        )
