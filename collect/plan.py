"""What to collect: one job a workload, with the patterns that go into it."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import msgspec

from torchtraceap.collect.model import ZOO, ModelSpec, kind_of
from torchtraceap.dataset.splits import meant_for_test
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS, Mode, Pattern, Runtime

HELDOUT_SHARE = 0.3
"""Share of held-out variants, which only test may keep, among the injections into families meant for it."""

LOOKALIKE_SHARE = 0.3
"""Look-alikes of a workload for each of its patterns; as each is in half of the traces, and a pattern in one,
both occur about equally often."""

ARM_SIZES = (0.7, 0.2, 0.1)
"""Shares of traces with one, two and three patterns."""


class Injection(msgspec.Struct, frozen=True):
    """A pattern with one of its variants or look-alikes."""

    pattern: str
    variant: str


class Job(msgspec.Struct, frozen=True):
    """One workload: a model in one mode at one batch size, and what is injected into it.

    Each arm gives a trace beside the clean one, with the injections that it lists by index; no injection is
    in two arms. Look-alikes appear in half of all traces. ``spares`` stand in, in their order, for injections
    that find no place in the model. ``null_trials`` compare the clean loop with itself. ``world_size`` is the
    number of ranks, above 1 in distributed workloads alone. ``planned_batch_size`` is that of the plan, where
    it did not fit and ``batch_size`` is run instead.
    """

    model: str
    mode: Mode
    batch_size: int
    seed: int
    injections: list[Injection]
    arms: list[list[int]]
    spares: list[Injection] = []
    lookalikes: list[Injection] = []
    runtime: Runtime = "eager"
    null_trials: int = 0
    world_size: int = 1
    planned_batch_size: int | None = None

    @property
    def name(self) -> str:
        """A file name without its ending, which stays the same if a smaller batch is run than was planned.

        ``a_b`` and ``a-b`` differ in it, ``a/b`` and ``a-b`` do not.
        """
        model = re.sub(r"[^A-Za-z0-9._]+", "-", self.model)
        runtime = "" if self.runtime == "eager" else f"_{self.runtime}"
        return f"{model}_{self.mode}_b{self.planned_batch_size or self.batch_size}{runtime}"

    def at_batch(self, batch_size: int) -> Job:
        """The job at another batch size than the planned one."""
        if batch_size == self.batch_size:
            return self
        planned = self.planned_batch_size or self.batch_size
        return msgspec.structs.replace(self, batch_size=batch_size, planned_batch_size=planned)


class Order(msgspec.Struct, frozen=True):
    """What the process of a job is told: see ``session.run_job`` for the fields."""

    job: Job
    out: str
    event_cap: int
    shard_mb: float


def make_plan(
    models: Sequence[str],
    *,
    device_type: str,
    modes: Iterable[Mode] = ("train", "infer"),
    patterns: Sequence[str] | None = None,
    per_workload: int = 2,
    per_test_workload: int | None = None,
    null_trials: int = 0,
    runtime: Runtime = "eager",
    world_size: int = 2,
    seed: int = 0,
) -> list[Job]:
    """Spread the patterns evenly over the workloads.

    A workload is a model in a mode at one of its batch sizes (drawn by seed). It takes the patterns that
    apply there and have been used least so far; ties are broken by seed, and so are the variant and how
    many patterns share a trace. The order is such that every part of it that a run may end with holds tasks
    and modes evenly.

    Args:
        models: Names from the zoo.
        device_type: ``cpu``, ``cuda``, ...
        modes: Loops to run.
        patterns: Pattern ids to draw from; all when None.
        per_workload: Patterns a workload, in traces of one to three of them beside the clean one.
        per_test_workload: The same for models of the families that are meant for test, which alone get
            held-out variants (dataset/splits.py); as many as the others when None.
        null_trials: Measurements of the clean loop against itself, a workload.
        runtime: The kind of workload; patterns of other kinds are left out. Distributed ones only train.
        world_size: Ranks of a distributed workload.
        seed: Equal seeds give equal plans.

    Raises:
        UserError: A model or pattern is unknown, or nothing is left to run or to inject.
    """
    specs = [ZOO[name] for name in dict.fromkeys(models)]
    if runtime == "compiled":
        _require_compilable(specs)
    catalogue = [PATTERNS[name] for name in dict.fromkeys(patterns)] if patterns else list(PATTERNS)
    kind = kind_of(device_type)
    used: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    jobs = []
    for spec, mode in _with_modes(in_turns(specs), list(dict.fromkeys(modes))):
        sizes = spec.batch_sizes[kind][mode]
        if not sizes or (runtime == "distributed" and mode != "train"):
            continue
        rng = random.Random(_digest(seed, spec, mode))
        for_test = meant_for_test(spec.backbone_family)
        count = per_workload if per_test_workload is None or not for_test else per_test_workload
        usable = [p for p in catalogue if p.applies(device_type, mode, runtime) is None]
        ordered = sorted(usable, key=lambda p: (used[p.id], rng.random()))
        if ordered and ordered[0].alone:
            chosen, spare = ordered[: min(1, count)], []
        else:
            ordered = [p for p in ordered if not p.alone]
            chosen, spare = ordered[:count], ordered[count:]
        used.update(p.id for p in chosen)
        twins = sorted(
            ((p.id, twin.name) for p in usable for twin in p.lookalikes),
            key=lambda twin: (seen[twin], rng.random()),
        )[: math.ceil(count * LOOKALIKE_SHARE)]
        seen.update(twins)
        rng.shuffle(chosen)  # or the patterns used least would always share a trace
        injections = [Injection(p.id, _variant(p, rng, for_test)) for p in chosen]
        jobs.append(
            Job(
                model=spec.name,
                mode=mode,
                batch_size=rng.choice(list(sizes)),
                seed=rng.getrandbits(31),
                injections=injections,
                arms=_arms(injections, rng),
                spares=[Injection(p.id, _variant(p, rng, for_test)) for p in spare],
                lookalikes=[Injection(*twin) for twin in twins],
                runtime=runtime,
                null_trials=null_trials,
                world_size=world_size if runtime == "distributed" else 1,
            )
        )
    if not jobs:
        raise UserError(
            f"nothing to collect: none of {len(specs)} models runs on {device_type} in the modes asked for"
            + (", of which distributed workloads have train alone" if runtime == "distributed" else "")
        )
    if (per_workload or per_test_workload) and not any(job.injections for job in jobs):
        reasons = {p.applies(device_type, job.mode, runtime) for p in catalogue for job in jobs}
        raise UserError(f"nothing to inject: {'; '.join(sorted(map(str, reasons)))}")
    return jobs


def part_of(plan: Sequence[Job], index: int, count: int) -> list[Job]:
    """Part ``index`` of ``count`` (from 1) of a plan: every ``count``-th job.

    The parts are disjoint, hold tasks and modes as evenly as the plan, and are the jobs of the whole plan
    unchanged, so that they may be built together. A part may be empty.
    """
    return list(plan[index - 1 :: count])


def _require_compilable(specs: Sequence[ModelSpec]) -> None:
    from torchtraceap.collect.compiled import MODELS  # imports torch

    if unfit := [spec.name for spec in specs if spec.name not in MODELS]:
        raise UserError(
            f"{', '.join(unfit)} cannot be collected compiled: known to compile to one graph are "
            f"{', '.join(MODELS)}"
        )


def in_turns(specs: Iterable[ModelSpec]) -> list[ModelSpec]:
    """The models with tasks by turns."""
    by_task: dict[str, list[ModelSpec]] = {}
    for spec in specs:
        by_task.setdefault(spec.task, []).append(spec)
    return [spec for turn in zip_longest(*by_task.values()) for spec in turn if spec is not None]


def _with_modes(turns: Sequence[ModelSpec], modes: Sequence[Mode]) -> Iterator[tuple[ModelSpec, Mode]]:
    """Every model in every mode, each in one mode before any is in its second."""
    for shift in range(len(modes)):
        for place, spec in enumerate(turns):
            yield spec, modes[(place + shift) % len(modes)]


def _digest(seed: int, spec: ModelSpec, mode: Mode) -> int:
    """A seed that does not depend on which other models are in the plan."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{spec.name}/{mode}".encode()).digest()[:8], "big")


def _arms(injections: Sequence[Injection], rng: random.Random) -> list[list[int]]:
    """Deal the injections out by index into traces of one to three.

    What takes long to settle has a trace to itself: such steps are long and uneven, and what another pattern
    adds to them could not be told.
    """
    slow = [settles_slowly(one) for one in injections]
    arms = [[index] for index, alone in enumerate(slow) if alone]
    left = [index for index, alone in enumerate(slow) if not alone]
    while left:
        (size,) = rng.choices((1, 2, 3), ARM_SIZES)
        arms.append(left[:size])
        left = left[size:]
    return arms


def settles_slowly(one: Injection) -> bool:
    """Whether it takes more steps than one until a toggle shows."""
    return PATTERNS[one.pattern].variant(one.variant).settle_steps > 1


def _variant(pattern: Pattern, rng: random.Random, for_test: bool) -> str:
    heldout = rng.random() < HELDOUT_SHARE and for_test
    return rng.choice(
        [v.name for v in pattern.variants if v.heldout == heldout] or [pattern.variants[0].name]
    )
