"""A process that does what tests/test_distributed.py looks at, and prints the outcome as JSON.

Ranks must be forked from a process that has not computed anything, which a process of tests has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchtraceap.collect import session
from torchtraceap.collect.distributed import World, distribute, join, leave, run_ranks
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.measure import step_seconds
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.plan import Injection, Job
from torchtraceap.collect.session import run_job
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import Cost, conclude
from torchtraceap.labels.pattern import PATTERNS, State, Variant

CPU = torch.device("cpu")
SEED = 1
VARIANTS = {
    f"{pattern.id}/{variant.name}": variant
    for pattern in PATTERNS
    if pattern.runtime == "distributed"
    for variant in (*pattern.variants, *pattern.lookalikes)
}


def build() -> nn.Module:
    """Buffers, and parameters of several buckets of 0.25 MiB."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 300),
        nn.ReLU(),
        nn.Linear(300, 300),
        nn.ReLU(),
        nn.Linear(300, 5),
    )


def build_with_unused() -> nn.Module:
    """A model one of whose layers the loss does not see."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(108, 5)
            self.spare = nn.Linear(108, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    return Unused()


SPEC = tiny.spec(build, "tiny/ranks")


def make_loop(rank: int, build: Callable[[], nn.Module] = build) -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(build), "train", 4, CPU, secret="s", seed=SEED, rank=rank)


def train(
    world: World, variant: Variant | None = None, *, armed: bool = False
) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """What three steps lead to, and the names of the events of a fourth, markers left out."""
    loop = make_loop(world.rank)
    distribute(loop, world)
    if variant is not None:
        sites = variant.sites(loop)
        loop.install(Placement(0, sites, frozenset(range(len(sites))), armed=armed))
    states = [loop.step() for _ in range(3)]
    reached = {name: value.clone() for name, value in loop.model.state_dict().items()}
    reached |= {"loss": states[-1].loss, "output": states[-1].output}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loop.step()
    loop.close()
    # What gloo's own threads do may end after the profile has.
    events = [event.name for event in profiler.events() or () if not event.name.startswith("gloo:")]
    return reached, Counter(events)


def difference(changed: dict[str, torch.Tensor], clean: dict[str, torch.Tensor]) -> str:
    try:
        torch.testing.assert_close(changed, clean, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return ""


def by_hand() -> dict[str, torch.Tensor]:
    """The parameters that :func:`train` should lead to without a pattern, from one process.

    Each rank's batch gives its gradient, the average goes into the step, and buffers are those of rank 0.
    """
    loops = [make_loop(rank) for rank in range(2)]
    first, second = (loop.model for loop in loops)
    for loop in loops:
        loop.stages["data"](State())  # the batch that is used up by looking for gradients
    for _ in range(3):
        second.load_state_dict(first.state_dict())
        for loop in loops:
            state = State()
            for stage in ("data", "h2d", "forward", "loss", "backward"):
                loop.stages[stage](state)
        for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            mine.grad.add_(theirs.grad).div_(2)
        for loop in loops:
            loop.stages["optimizer"](state)
            loop.stages["zero_grad"](state)
    return dict(first.state_dict())


def results(rank: int, store: Path) -> dict[str, Any]:
    """For each variant, on each rank: how results differ, and which events there are."""
    torch.set_num_threads(1)
    world = join(rank, 2, store, CPU)
    clean, clean_events = train(world)
    expected = by_hand()
    found: dict[str, Any] = {
        "by_hand": difference({name: clean[name] for name in expected}, expected),
        "clean": clean_events,
    }
    for name, variant in VARIANTS.items():
        off, off_events = train(world, variant)
        on, on_events = train(world, variant, armed=True)
        found[name] = {
            "on_and_off": difference(on, off),
            "off_and_clean": difference(off, clean),
            "off": off_events,
            "on": on_events,
        }
    loop = make_loop(rank)
    distribute(loop, world)
    if rank == 1:
        original = loop.stages["logging"]

        def slow(state: Any) -> None:
            time.sleep(0.02)
            original(state)

        loop.stages["logging"] = slow
    found["seconds"] = [step_seconds(loop, steps) for steps in (1, 3)]
    found["world"] = [world.smallest(rank + 5), world.largest(rank + 5), world.agreed(f"from {rank}")]
    every = world.gathered([found])
    leave()
    return {"ranks": every}


def late() -> str:
    """What goes wrong if rank 0, which waits for the device, comes after rank 1."""

    def main(rank: int, store: Path) -> dict[str, Any]:
        came = store.with_name("came")

        def init(*args: Any, **kwargs: Any) -> None:
            assert came.exists(), "rank 1 begins before rank 0 is there"
            original(*args, **kwargs)

        original, dist.init_process_group = dist.init_process_group, init
        if rank == 0:
            time.sleep(1)
            came.touch()
        assert join(rank, 2, store, CPU).largest(float(rank)) == 1.0
        leave()
        return {}

    return error_of(main)


def errors() -> dict[str, str]:
    """How a run of two ranks ends when something goes wrong on the second, or on both."""

    def unused(rank: int, store: Path) -> dict[str, Any]:
        distribute(make_loop(rank, build_with_unused), join(rank, 2, store, CPU))
        return {}

    def refuse() -> None:
        raise UserError("not here")

    def fail() -> None:
        raise TypeError("no such thing")

    def exhaust() -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_second(act: Callable[[], None]) -> Callable[[int, Path], dict[str, Any]]:
        def main(rank: int, store: Path) -> dict[str, Any]:
            world = join(rank, 2, store, CPU)
            if rank == 1:
                act()
            world.largest(0.0)
            return {}

        return main

    told = {}
    for act in (refuse, fail, exhaust, die):
        told[act.__name__] = error_of(on_second(act))
    told["unused"] = error_of(unused)
    return told


def error_of(main: Callable[[int, Path], dict[str, Any]]) -> str:
    try:
        run_ranks(2, main)
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def made_up_cost(loop: TrainingLoop, placement: Placement, **_: Any) -> Cost:
    """What ``measure_cost`` returns when all pairs are alike; steps in each arm, as it does."""
    for placement.armed in (True, False):
        for _step in range(3):
            loop.step()
    return conclude([(0.010, 0.012)] * 12, 6)


def sessions(folder: Path) -> list[dict[str, Any]]:
    """Two workloads into ``folder``/0.parquet and 1.parquet."""
    ZOO.names()
    ZOO.register(SPEC.name, SPEC)
    session.measure_cost = made_up_cost
    all_but_one = [
        Injection("tiny_buckets", "small_cap"),
        Injection("unoverlapped_allreduce", "per_tensor"),
        Injection("barrier_every_step", "barrier"),
        Injection("find_unused_parameters", "flag"),
        Injection("missing_no_sync", "two"),
    ]
    shared: dict[str, Any] = {"runtime": "distributed", "world_size": 2}
    jobs = [
        Job(SPEC.name, "train", 4, 3, all_but_one, [[0], [1, 2], [3], [4]], **shared),
        Job(SPEC.name, "train", 4, 4, all_but_one[4:], [[0]], **shared),
    ]
    return [
        run_job(job, folder / f"{i}.parquet", device="cpu", event_cap=60_000, progress=lambda text: None)
        for i, job in enumerate(jobs)
    ]


if __name__ == "__main__":
    session.TrainingLoop = tiny.WithoutWorkers
    outcome = {
        **run_ranks(2, results),
        "errors": errors(),
        "late": late(),
        "sessions": sessions(Path(sys.argv[1])),
    }
    json.dump(outcome, sys.stdout)
