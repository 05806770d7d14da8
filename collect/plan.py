"""What to collect: one job a workload, with the patterns that go into it."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from torchtraceap.collect.model import ZOO, DeviceKind, ModelSpec
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS, Mode, Pattern

HELDOUT_SHARE = 0.25
"""Share of injections that use a held-out variant, which only test may keep."""


class Injection(msgspec.Struct, frozen=True):
    """A pattern with one of its variants or look-alikes."""

    pattern: str
    variant: str


class Job(msgspec.Struct, frozen=True):
    """One workload: a model in one mode at one batch size, and what is injected into it.

    Each injection gives a trace of its own beside the clean one; the look-alike appears in some of them.
    ``spares`` stand in, in their order, for injections that find no place in the model.
    """

    model: str
    mode: Mode
    batch_size: int
    seed: int
    injections: list[Injection]
    spares: list[Injection] = []
    lookalike: Injection | None = None

    @property
    def name(self) -> str:
        """A file name without its ending. ``a_b`` and ``a-b`` differ in it, ``a/b`` and ``a-b`` do not."""
        model = re.sub(r"[^A-Za-z0-9._]+", "-", self.model)
        return f"{model}_{self.mode}_b{self.batch_size}"


def make_plan(
    models: Sequence[str],
    *,
    device_type: str,
    modes: Iterable[Mode] = ("train", "infer"),
    patterns: Sequence[str] | None = None,
    per_workload: int = 2,
    seed: int = 0,
) -> list[Job]:
    """Spread the patterns evenly over the workloads.

    A workload is a model in a mode at one of its batch sizes (drawn by seed). It takes the patterns that
    apply there and have been used least so far; ties are broken by seed, and so is the variant.

    Args:
        models: Names from the zoo.
        device_type: ``cpu``, ``cuda``, ...
        modes: Loops to run.
        patterns: Pattern ids to draw from; all when None.
        per_workload: Injected traces a workload, beside the clean one.
        seed: Equal seeds give equal plans.

    Raises:
        UserError: A model or pattern is unknown, or nothing is left to run or to inject.
    """
    specs = [ZOO[name] for name in dict.fromkeys(models)]
    catalogue = [PATTERNS[name] for name in dict.fromkeys(patterns)] if patterns else list(PATTERNS)
    kind: DeviceKind = "cpu" if device_type == "cpu" else "gpu"
    used: Counter[str] = Counter()
    lookalikes: Counter[tuple[str, str]] = Counter()
    jobs = []
    for spec in specs:
        for mode in modes:
            sizes = spec.batch_sizes[kind][mode]
            if not sizes:
                continue
            rng = random.Random(_digest(seed, spec, mode))
            usable = [p for p in catalogue if p.applies(device_type, mode) is None]
            ordered = sorted(usable, key=lambda p: (used[p.id], rng.random()))
            chosen, spare = ordered[:per_workload], ordered[per_workload:]
            used.update(p.id for p in chosen)
            twins = sorted(
                ((p.id, twin.name) for p in usable for twin in p.lookalikes),
                key=lambda twin: (lookalikes[twin], rng.random()),
            )
            lookalikes.update(twins[:1])
            jobs.append(
                Job(
                    model=spec.name,
                    mode=mode,
                    batch_size=rng.choice(list(sizes)),
                    seed=rng.getrandbits(31),
                    injections=[Injection(p.id, _variant(p, rng)) for p in chosen],
                    spares=[Injection(p.id, _variant(p, rng)) for p in spare],
                    lookalike=Injection(*twins[0]) if twins else None,
                )
            )
    if not jobs:
        raise UserError(
            f"nothing to collect: none of {len(specs)} models runs on {device_type} in the modes asked for"
        )
    if per_workload and not any(job.injections for job in jobs):
        reasons = {p.applies(device_type, job.mode) for p in catalogue for job in jobs}
        raise UserError(f"nothing to inject: {'; '.join(sorted(map(str, reasons)))}")
    return jobs


def _digest(seed: int, spec: ModelSpec, mode: Mode) -> int:
    """A seed that does not depend on which other models are in the plan."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{spec.name}/{mode}".encode()).digest()[:8], "big")


def _variant(pattern: Pattern, rng: random.Random) -> str:
    heldout = rng.random() < HELDOUT_SHARE
    return rng.choice(
        [v.name for v in pattern.variants if v.heldout == heldout] or [pattern.variants[0].name]
    )
