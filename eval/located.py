"""Detections laid on the true segments that they overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from torchtraceap.eval.intervals import Ints, covered_share, pairs_above
from torchtraceap.eval.matching import Pairs, match_greedily, match_most
from torchtraceap.eval.rows import Rows
from torchtraceap.eval.truth import Bools, Truth

THRESHOLDS: Final = (0.3, 0.5, 0.7)
"""Least tIoU of a match."""

MAX_ROWS_A_GROUP: Final = 100
"""Rows of a trace, lane class and pattern that the average precision looks at, highest scores first."""

IGNORED_SHARE: Final = 0.5
"""An unmatched row with at least this share in ignored segments is dropped."""


@dataclass(frozen=True)
class Located:
    """Rows, and the segments that they overlap."""

    truth: Truth
    rows: Rows

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs of a row and a costly segment with at least the lowest tIoU."""
        rows, segments = self.rows, self.truth.segments
        return Pairs(*pairs_above(rows.start, rows.end, segments.start, segments.end, THRESHOLDS[0]))

    @cached_property
    def in_ignored(self) -> Bools:
        """Rows of which at least half lies in (the union of) ignored segments of their group."""
        rows, ignored = self.rows, self.truth.ignored
        return covered_share(rows.start, rows.end, ignored.start, ignored.end) >= IGNORED_SHARE

    @cached_property
    def not_exhaustive(self) -> Bools:
        """Rows of a pattern that may have unknown instances in their trace."""
        return ~self.truth.exhaustive[self.rows.trace, self.rows.pattern]

    @cached_property
    def droppable(self) -> Bools:
        """Rows that are no false alarms when nothing matches them."""
        return self.in_ignored | self.not_exhaustive

    @cached_property
    def within_cap(self) -> Bools:
        """The first rows of each group, by score."""
        group = self.rows.group
        return np.arange(len(group)) - np.searchsorted(group, group) < MAX_ROWS_A_GROUP

    def greedy(self, least: float) -> Ints:
        """Segment that each row within the cap matches, taken by score; -1 for none, shape (rows,)."""
        keep = (self.pairs.tiou >= least) & self.within_cap[self.pairs.row]
        # Matching never crosses groups, so the order within each group, which is that of the rows, is enough.
        return match_greedily(self.pairs.where(keep), np.arange(len(self.rows)))

    def reported(self, threshold: float) -> Bools:
        return self.rows.score >= threshold

    def most(self, least: float, among: Bools) -> Bools:
        """Rows ``among`` some that a maximum one-to-one matching matches, shape (rows,)."""
        keep = (self.pairs.tiou >= least) & among[self.pairs.row]
        return match_most(self.pairs.where(keep), len(self.rows))
