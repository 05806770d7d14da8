"""Timing a loop with and without a pattern: alternating blocks of steps, synchronised at their ends only."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torchtraceap.collect.devices import synchronize
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.model import kind_of
from torchtraceap.labels.cost import LOOKS, Cost, Look, conclude, look, report_pairs

BLOCK_SECONDS = {"cpu": 0.05, "gpu": 0.01}
"""A block is as many steps as fit in this, within the bounds below.

Short on a GPU: what disturbs a host lasts for some steps (on a virtual machine with an H200 the times of
consecutive steps correlate by 0.7, those of every fourth by 0.5), so that what is compared has to lie close
together, and many short pairs say more than few long ones.
"""

MAX_BLOCK_STEPS = 10

TIME_BUDGET = {"cpu": 12.0, "gpu": 4.0}
"""Seconds for the pairs of a decision: a look that would come later is not waited for. Steps of a second, as
of a batch looped over sample by sample, differ so much that few pairs tell, and more would take minutes. On a
CPU steps are longer and differ more, and nobody else waits for the device."""


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
    synchronize(loop.device)
    start = time.perf_counter()
    for _ in range(3):
        loop.step()
    launched = time.perf_counter()
    synchronize(loop.device)
    done = time.perf_counter()
    seconds = loop.world.largest((done - start) / 3)
    # A GPU that still works on one step while the host launches the next: a single step would not show that.
    runs_ahead = loop.world.largest(done - launched) > seconds / 2
    wanted = math.ceil(BLOCK_SECONDS[kind_of(loop.device.type)] / max(seconds, 1e-6))
    return min(MAX_BLOCK_STEPS, max(2 if runs_ahead else 1, wanted))


def measure_cost(
    loop: TrainingLoop,
    placement: Placement,
    *,
    steps: int,
    settle: int,
    rng: random.Random,
    looks: Sequence[int] = LOOKS,
) -> Cost:
    """Compare the loop with and without ``placement`` armed, until decided or out of looks.

    Other placements that are armed stay so: the cost is then what ``placement`` adds to them.

    Args:
        loop: Warm in both arms, never profiled in this process.
        placement: What is toggled.
        steps: Steps a block.
        settle: Steps discarded after a toggle.
        rng: Draws which arm of a pair runs first.
        looks: Of ``LOOKS`` the first ones, after the last of which there is no other.
    """
    pairs: list[tuple[float, float]] = []
    with _toggled(loop, placement, pairs, steps, settle, rng) as run:
        decision = _until_settled(loop, pairs, run, looks)
        run(report_pairs(decision))
    return conclude(pairs, decision.pairs)


def null_trial(loop: TrainingLoop, *, steps: int, rng: random.Random) -> Look:
    """The verdict of :func:`measure_cost` on two arms that are the same: any "costly" is a false alarm."""
    nothing = Placement(index=-1, sites=[], acting=frozenset())
    pairs: list[tuple[float, float]] = []
    with _toggled(loop, nothing, pairs, steps, 1, rng) as run:
        return _until_settled(loop, pairs, run, LOOKS)


def _until_settled(
    loop: TrainingLoop, pairs: list[tuple[float, float]], run: Callable[[int], None], looks: Sequence[int]
) -> Look:
    """Add pairs up to each look in turn, until one settles the matter or the next is too far; the last one.

    Time is asked for at looks only: it is that of all pairs, whichever way they point. Ranks agree on it: one
    that went on alone would wait for the others in its next step.
    """
    begin = time.perf_counter()
    for pairs_at_look, next_look in zip(looks, (*looks[1:], math.inf), strict=True):
        run(pairs_at_look - len(pairs))
        seen = look(pairs)
        a_pair = loop.world.largest(time.perf_counter() - begin) / len(pairs)
        if seen.settled or next_look * a_pair > TIME_BUDGET[kind_of(loop.device.type)]:
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
    """A function that appends so many pairs (seconds a step without and with) to ``pairs``.

    Of two pairs the second runs in the opposite order of the first: a steady drift cancels, and what follows
    a block of its own arm need not settle.
    """
    order: list[bool] = []
    last: bool | None = None

    def block(armed: bool) -> float:
        nonlocal last
        placement.armed = armed
        settling, last = 0 if armed == last else settle, armed
        return step_seconds(loop, steps, settle=settling)

    def run(count: int) -> None:
        for _ in range(count):
            if not order:
                first = rng.random() < 0.5
                order.extend([first, not first, not first, first])
            seconds = {armed: block(armed) for armed in (order.pop(0), order.pop(0))}
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
