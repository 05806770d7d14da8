"""Timing a loop with and without a pattern: alternating blocks of steps, synchronised at their ends only."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchtraceap.collect.devices import synchronize
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.labels.cost import LOOKS, REPORT_PAIRS, Cost, Look, conclude, look

BLOCK_SECONDS = {"cpu": 0.12, "gpu": 0.06}
"""A block is as many steps as fit in this, within the bounds below."""

MAX_BLOCK_STEPS = 10


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the block runs: it would hit one arm and not the other."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def step_seconds(loop: TrainingLoop, steps: int, *, settle: int = 1) -> float:
    """Seconds a step over a block of ``steps``, after ``settle`` steps that are not timed.

    Of several ranks it is the slowest one's, on all of them: what follows from it must be the same.

    The first steps after a toggle pay for what the toggle changed: memory that the allocator held for the
    other arm, batches that its loader had prepared.
    """
    for _ in range(settle):
        loop.step()
    synchronize(loop.device)
    start = time.perf_counter()
    for _ in range(steps):
        loop.step()
    synchronize(loop.device)
    return loop.world.largest((time.perf_counter() - start) / steps)


def block_steps(loop: TrainingLoop) -> int:
    """Steps a block, from the time of three."""
    # A GPU still works on one step while the host launches the next: a single step would not show that.
    kind, least = ("cpu", 1) if loop.device.type == "cpu" else ("gpu", 2)
    wanted = math.ceil(BLOCK_SECONDS[kind] / max(step_seconds(loop, 3), 1e-6))
    return min(MAX_BLOCK_STEPS, max(least, wanted))


def measure_cost(
    loop: TrainingLoop, placement: Placement, *, steps: int, settle: int, rng: random.Random
) -> Cost:
    """Compare the loop with and without ``placement`` armed, until decided or out of looks.

    Other placements that are armed stay so: the cost is then what ``placement`` adds to them.

    Args:
        loop: Warm in both arms, never profiled in this process.
        placement: What is toggled.
        steps: Steps a block.
        settle: Steps discarded after a toggle.
        rng: Draws which arm of a pair runs first.
    """
    pairs: list[tuple[float, float]] = []
    with _toggled(loop, placement, pairs, steps, settle, rng) as run:
        _until_settled(pairs, run)
        decided_at = len(pairs)
        run(REPORT_PAIRS)
    return conclude(pairs, decided_at)


def null_trial(loop: TrainingLoop, *, steps: int, rng: random.Random) -> Look:
    """The verdict of :func:`measure_cost` on two arms that are the same: any "costly" is a false alarm."""
    nothing = Placement(index=-1, sites=[], acting=frozenset())
    pairs: list[tuple[float, float]] = []
    with _toggled(loop, nothing, pairs, steps, 1, rng) as run:
        return _until_settled(pairs, run)


def _until_settled(pairs: list[tuple[float, float]], run: Callable[[int], None]) -> Look:
    """Add pairs up to each look in turn, until one settles the matter; the last look taken."""
    for pairs_at_look in LOOKS:
        run(pairs_at_look - len(pairs))
        seen = look(pairs)
        if seen.settled:
            break
    return seen


@contextmanager
def _toggled(
    loop: TrainingLoop,
    placement: Placement,
    pairs: list[tuple[float, float]],
    steps: int,
    settle: int,
    rng: random.Random,
) -> Iterator[Callable[[int], None]]:
    """A function that appends so many pairs (seconds a step without and with) to ``pairs``."""

    def run(count: int) -> None:
        for _ in range(count):
            order = [False, True] if rng.random() < 0.5 else [True, False]
            seconds = {}
            for armed in order:
                placement.armed = armed
                seconds[armed] = step_seconds(loop, steps, settle=settle)
            pairs.append((seconds[False], seconds[True]))

    try:
        with quiet():
            yield run
    finally:
        placement.armed = False


def median_clean_ms(costs: list[Cost]) -> float:
    """Median step time without any pattern over all measurements, in milliseconds; NaN without any."""
    clean = [pair[0] for cost in costs for pair in cost.pairs]
    return statistics.median(clean) * 1e3 if clean else float("nan")
