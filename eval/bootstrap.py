"""Resamples of split units, and what a statistic of units is.

Traces of one split unit are not independent (the same backbone, the same workload), so the unit is what is
drawn, with replacement, within the units of its task.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]
"""How often each unit is drawn, shape (units, resamples)."""

Statistic = Callable[[Weights], NDArray[np.float64]]
"""A score as a function of weights of units: shape (resamples,), or (classes, resamples) if it is by class.

NaN where it is not defined (nothing of the class was drawn). With all weights 1 it is the plain score."""

_CELLS_AT_ONCE = 2_000_000


def whole(units: int) -> Weights:
    """Every unit once, shape (units, 1)."""
    return np.ones((units, 1))


def resample(stratum: NDArray[np.int64], resamples: int, seed: int) -> Weights:
    """Draw units with replacement, as many from each stratum as it has.

    The result depends on nothing but the arguments: all detectors scored with the same ones see the same
    resamples, so that their differences can be taken resample by resample.

    Args:
        stratum: Stratum of each unit, shape (units,).
        resamples: How many.
        seed: Of the generator.
    """
    rng = np.random.default_rng(seed)
    weights = np.zeros((len(stratum), resamples))
    for value in np.unique(stratum):
        members = np.flatnonzero(stratum == value)
        share = np.full(len(members), 1 / len(members))
        weights[members] = rng.multinomial(len(members), share, size=resamples).T
    return weights


def pool_singletons(stratum: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put all units that are alone in their stratum into one, -1: drawn alone they would show no spread."""
    _, which, size = np.unique(stratum, return_inverse=True, return_counts=True)
    return np.where(size[which] == 1, -1, stratum)


def interval(samples: NDArray[np.float64], level: float = 0.95) -> tuple[float, float] | None:
    """Percentile interval of the defined samples; None without any."""
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        return None
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_defined(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the first axis without NaN; NaN where nothing is defined."""
    defined = ~np.isnan(values)
    count = defined.sum(axis=0)
    total = np.where(defined, values, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def mean(statistics: list[Statistic]) -> Statistic:
    """Mean of several statistics of equal shape."""
    return lambda weights: np.mean([statistic(weights) for statistic in statistics], axis=0)


def stack(statistics: list[Statistic]) -> Statistic:
    """Statistics of single classes as one by class."""

    def values(weights: Weights) -> NDArray[np.float64]:
        rows = [statistic(weights) for statistic in statistics]
        return np.stack(rows) if rows else np.zeros((0, weights.shape[1]))

    return values


def in_parts(statistic: Statistic, rows: int) -> Statistic:
    """The same statistic, a few resamples at a time, where it makes arrays of shape (``rows``, resamples)."""
    size = max(1, _CELLS_AT_ONCE // max(rows, 1))

    def values(weights: Weights) -> NDArray[np.float64]:
        parts = range(0, max(weights.shape[1], 1), size)
        return np.concatenate([statistic(weights[:, i : i + size]) for i in parts], axis=-1)

    return values


def ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> Statistic:
    """Sum over units of one quantity by that of another, both of shape (units,) or (classes, units)."""

    def values(weights: Weights) -> NDArray[np.float64]:
        over, under = numerator @ weights, denominator @ weights
        return np.where(under > 0, over / np.where(under > 0, under, 1), np.nan)

    return values


def f1(tp: NDArray[np.float64], fp: NDArray[np.float64], fn: NDArray[np.float64]) -> Statistic:
    """F1 = 2 TP / (2 TP + FP + FN) of sums over units, each of shape (units,) or (classes, units).

    NaN only where there is no truth (TP + FN = 0): what is never predicted scores 0.
    """

    def values(weights: Weights) -> NDArray[np.float64]:
        hit, false, missed = tp @ weights, fp @ weights, fn @ weights
        true = hit + missed > 0
        return np.where(true, 2 * hit / np.where(true, 2 * hit + false + missed, 1), np.nan)

    return values
