"""From paired step times to a verdict: costly, benign or undecided.

A pair is the time of a block of steps with the pattern and of one without, run one after the other in random
order. The statistic is the log of their ratio; its mean gets a Student interval at a fixed number of looks,
and the error of 5 % is divided evenly among them, so that looking early costs nothing in validity. What is
reported as the cost comes from further pairs, run after the decision: an estimate that stopped the test is
biased towards having stopped it. Where nothing stopped it, which leaves it undecided, all pairs serve.

The mean is a trimmed one and its interval Yuen's (1974): where the host decides the step time, one pair in
ten is off by a third because something else ran, and an interval from all pairs would never close.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

from torchtraceap.labels.types import State

MARGIN = math.log(1.01)
"""A step that becomes at most 1 % slower is not called slower."""

LOOKS = (4, 8, 24)
"""Numbers of pairs after which a decision may be taken. The last look ends the test.

The first is for loops that the GPU decides, whose step times repeat to a thousandth; where the host does,
only the last can tell a few per cent.
"""

BEYOND_DOUBT = 0.001
"""A costly verdict ends the test early only below this: a release, which controls the false discoveries among
all of its tests, would take a larger p-value for chance."""

ALPHA = 0.05
REPORT_PAIRS = (4, 8)
"""Pairs run after a decision, from which the cost is reported: half as many as it took, at least and at most
so many."""

TRIM = 0.2
"""Share of pairs left out at each end."""


class Look(msgspec.Struct, frozen=True):
    """The interval of the mean log ratio at one look, and the p-values of both one-sided tests."""

    pairs: int
    low: float
    high: float
    p_costly: float
    p_benign: float

    @property
    def state(self) -> State:
        if self.low > MARGIN:
            return "costly"
        return "benign" if self.high <= MARGIN else "undecided"

    @property
    def settled(self) -> bool:
        """Whether further pairs can be spared: benign, or costly beyond doubt."""
        return self.state == "benign" or (self.state == "costly" and self.p_costly <= BEYOND_DOUBT)


class Cost(msgspec.Struct, frozen=True):
    """Verdict and estimate for one pattern in one workload.

    ``ratio``, ``low`` and ``high`` are step time with over without and the bounds of its 95 % interval;
    ``ms`` the milliseconds a step. ``p_costly`` and ``p_benign`` are p-values against "at most 1 % slower"
    and "more than 1 % slower", corrected for the number of looks. ``pairs`` are seconds a step, without and
    with the pattern, in the order of measurement: ``decided_at`` of them for the verdict, the rest for the
    estimate; all for both if there is no rest.
    """

    state: State
    ratio: float
    low: float
    high: float
    ms: float
    p_costly: float
    p_benign: float
    decided_at: int
    pairs: list[tuple[float, float]]

    @property
    def median_with_ms(self) -> float:
        """Median step time with the pattern, milliseconds."""
        return float(np.median([seconds for _, seconds in self.pairs])) * 1e3


def log_ratios(pairs: Sequence[tuple[float, float]]) -> np.ndarray:
    """log(with / without) of each pair, shape (pairs,).

    Raises:
        ValueError: A time is not a positive finite number.
    """
    times = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError("step times must be positive and finite")
    return np.log(times[:, 1] / times[:, 0])


def report_pairs(decision: Look) -> int:
    """How many pairs to run after the decision."""
    low, high = REPORT_PAIRS
    return 0 if decision.state == "undecided" else min(max(low, decision.pairs // 2), high)


def look(pairs: Sequence[tuple[float, float]]) -> Look:
    """Interval and p-values after ``pairs`` (at least two), at the level that one look is entitled to."""
    ratios = log_ratios(pairs)
    mean, error, freedom = _trimmed(ratios)
    margin = float(stats.t.ppf(1 - ALPHA / len(LOOKS) / 2, freedom)) * error
    t = (mean - MARGIN) / error
    p_costly, p_benign = (
        min(1.0, len(LOOKS) * float(p)) for p in (stats.t.sf(t, freedom), stats.t.cdf(t, freedom))
    )
    return Look(len(ratios), mean - margin, mean + margin, p_costly, p_benign)


def conclude(pairs: Sequence[tuple[float, float]], decided_at: int) -> Cost:
    """The cost from all pairs of a finished measurement, of which the first ``decided_at`` decided it."""
    decision = look(pairs[:decided_at])
    report = pairs[decided_at:] or pairs
    mean, error, freedom = _trimmed(log_ratios(report))
    margin = float(stats.t.ppf(0.975, freedom)) * error
    without = float(np.median(np.asarray(report, dtype=np.float64)[:, 0]))
    return Cost(
        state=decision.state,
        ratio=math.exp(mean),
        low=math.exp(mean - margin),
        high=math.exp(mean + margin),
        ms=without * math.expm1(mean) * 1e3,
        p_costly=decision.p_costly,
        p_benign=decision.p_benign,
        decided_at=decided_at,
        pairs=[(float(a), float(b)) for a, b in pairs],
    )


def _trimmed(ratios: np.ndarray) -> tuple[float, float, int]:
    """Trimmed mean, its standard error from the winsorised variance, and its degrees of freedom.

    The error has a floor of 1e-6, which stands for the clock's resolution when all ratios are equal.
    """
    count = len(ratios)
    if count < 2:
        raise ValueError("an interval needs at least two pairs")
    cut = int(TRIM * count)
    middle = np.sort(ratios)[cut : count - cut]
    deviation = float(np.clip(ratios, middle[0], middle[-1]).std(ddof=1))
    error = deviation / ((1 - 2 * cut / count) * math.sqrt(count))
    return float(middle.mean()), max(error, 1e-6), len(middle) - 1
