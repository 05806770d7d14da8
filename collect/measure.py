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
from torchtraceap.labels.cost import LOOKS, REPORT_PAIRS, Cost, conclude, look

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
    return (time.perf_counter() - start) / steps


def block_steps(loop: TrainingLoop) -> int:
    """Steps a block, from the time of three."""
    # A GPU still works on one step while the host launches the next: a single step would not show that.
    kind, least = ("cpu", 1) if loop.device.type == "cpu" else ("gpu", 2)
    wanted = math.ceil(BLOCK_SECONDS[kind] / max(step_seconds(loop, 3), 1e-6))
    return min(MAX_BLOCK_STEPS, max(least, wanted))


def measure_cost(
    loop: TrainingLoop,
    placement: Placement,
    *,
    steps: int,
    settle: int,
    rng: random.Random,
    progress: Callable[[int], None] = lambda pairs: None,
) -> Cost:
    """Compare the loop with and without ``placement`` armed, until decided or out of looks.

    Args:
        loop: Warm in both arms, no other placement armed, never profiled in this process.
        placement: What is toggled.
        steps: Steps a block.
        settle: Steps discarded after a toggle.
        rng: Draws which arm of a pair runs first.
        progress: Called with the number of pairs done.
    """
    pairs: list[tuple[float, float]] = []

    def run(count: int) -> None:
        for _ in range(count):
            order = [False, True] if rng.random() < 0.5 else [True, False]
            seconds = {}
            for armed in order:
                placement.armed = armed
                seconds[armed] = step_seconds(loop, steps, settle=settle)
            pairs.append((seconds[False], seconds[True]))
            progress(len(pairs))

    try:
        with quiet():
            for pairs_at_look in LOOKS:
                run(pairs_at_look - len(pairs))
                if look(pairs).settled:
                    break
            decided_at = len(pairs)
            run(REPORT_PAIRS)
    finally:
        placement.armed = False
    return conclude(pairs, decided_at)


def median_clean_ms(costs: list[Cost]) -> float:
    """Median step time without any pattern over all measurements, in milliseconds; NaN without any."""
    clean = [pair[0] for cost in costs for pair in cost.pairs]
    return statistics.median(clean) * 1e3 if clean else float("nan")
