"""Intervals on one long line: overlaps, unions and shares, as whole-array operations.

Intervals of different groups must never meet, so :class:`Line` shifts each group to a stretch of its own;
then one sort serves all groups at once. Intervals are [start, end] in integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Line:
    """Where each group's stretch begins, shape (groups,)."""

    offset: Ints

    @classmethod
    def of(cls, span: Ints) -> Line:
        """A line on which group ``g`` may use times from 0 to ``span[g]``."""
        return cls(np.concatenate([[0], np.cumsum(span + 1)[:-1]]).astype(np.int64))

    def place(self, group: Ints, time: Ints) -> Ints:
        return self.offset[group] + time


def tiou(a_start: Ints, a_end: Ints, b_start: Ints, b_end: Ints) -> Floats:
    """Temporal intersection over union, elementwise.

    Two intervals of length zero have 1 at the same instant, else 0; one of length zero has 0 with any longer
    one, even inside of it.
    """
    intersection = np.maximum(np.minimum(a_end, b_end) - np.maximum(a_start, b_start), 0)
    union = (a_end - a_start) + (b_end - b_start) - intersection
    same = (a_start == b_start).astype(float)
    return np.where(union == 0, same, intersection / np.maximum(union, 1))


def ranges(low: Ints, high: Ints) -> Iterator[tuple[Ints, Ints]]:
    """For each i every j in [low[i], high[i]), as arrays (i, j), in parts of bounded size."""
    count = np.maximum(high - low, 0)
    total = np.concatenate([[0], np.cumsum(count)])
    first = 0
    while first < len(count):
        last = int(np.searchsorted(total, total[first] + _PAIRS_AT_ONCE, side="right")) - 1
        last = max(last, first + 1)
        part = count[first:last]
        i = np.repeat(np.arange(first, last), part)
        j = np.arange(len(i)) - np.repeat(total[first:last] - total[first], part) + low[i]
        yield i, j
        first = last


def pairs_above(
    start: Ints, end: Ints, other_start: Ints, other_end: Ints, least: float
) -> tuple[Ints, Ints, Floats]:
    """All pairs (i, j) of an interval and another whose tIoU is at least ``least`` (> 0), with the tIoU.

    Args:
        start, end: Shape (n,), on a line.
        other_start, other_end: Shape (m,), on the same line; they may overlap.
    """
    order = np.argsort(other_start, kind="stable")
    sorted_start = other_start[order]
    reach = np.maximum.accumulate(other_end[order]) if len(order) else other_end
    low = np.searchsorted(reach, start, side="left")
    high = np.searchsorted(sorted_start, end, side="right")
    found = []
    for i, j in ranges(low, high):
        j = order[j]
        value = tiou(start[i], end[i], other_start[j], other_end[j])
        keep = value >= least
        found.append((i[keep], j[keep], value[keep]))
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    i, j, value = (np.concatenate(part) for part in zip(*found, strict=True))
    return i, j, value


def union_length(group: Ints, start: Ints, end: Ints, groups: int) -> Floats:
    """Length of the union of each group's intervals, shape (groups,). ``start`` and ``end`` lie on a line."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    seen = np.concatenate([start[:1], reach[:-1]])
    new = np.maximum(end - np.maximum(start, seen), 0)
    return np.bincount(group[order], weights=new, minlength=groups).astype(float)


def covered_share(start: Ints, end: Ints, by_start: Ints, by_end: Ints) -> Floats:
    """Share of each interval that lies in the union of others; of an instant 1 if it lies in one, else 0."""
    if not len(by_start):
        return np.zeros(len(start))
    order = np.argsort(by_start, kind="stable")
    first, reach = by_start[order], np.maximum.accumulate(by_end[order])
    opens = np.concatenate([[True], first[1:] > reach[:-1]])
    first, last = first[opens], reach[np.concatenate([opens[1:], [True]])]
    before = np.concatenate([[0], np.cumsum(last - first)])

    def measure(x: Ints) -> Ints:
        """Length of the union up to x."""
        k = np.searchsorted(first, x, side="right")
        inside = np.minimum(x, last[k - 1]) - first[k - 1]
        return np.where(k > 0, before[k - 1] + inside, 0)

    length = end - start
    k = np.searchsorted(first, start, side="right")
    touches = (k > 0) & (start <= last[k - 1])
    return np.where(length > 0, (measure(end) - measure(start)) / np.maximum(length, 1), touches)
