"""Tandem repeats in a sequence: the same words again and again, as a loop leaves them in a trace."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Repeat(NamedTuple):
    """``sequence[start : start + length]`` has period ``period`` throughout."""

    start: int
    length: int
    period: int

    @property
    def times(self) -> int:
        """How many whole periods it holds."""
        return self.length // self.period


def tandem_repeats(sequence: NDArray[np.integer[Any]], least: int, longest_period: int = 512) -> list[Repeat]:
    """Maximal stretches in which a word is repeated at least ``least`` times, shortest periods first.

    A multiple of a stretch's period is not reported again. Takes time proportional to
    ``len(sequence) * longest_period``.

    Args:
        sequence: Integers, shape (n,).
        least: Fewest repetitions, at least 2.
        longest_period: Longest word looked for; the bound keeps traces of 100 k ops quick.
    """
    found: list[Repeat] = []
    for period in range(1, min(longest_period, len(sequence) // least) + 1):
        same = np.concatenate([[False], sequence[period:] == sequence[:-period], [False]])
        flips = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for first, last in flips[flips[:, 1] - flips[:, 0] >= (least - 1) * period].tolist():
            length = last - first + period
            if not any(
                period % other.period == 0
                and other.start <= first
                and first + length <= other.start + other.length
                for other in found
            ):
                found.append(Repeat(first, length, period))
    return found
