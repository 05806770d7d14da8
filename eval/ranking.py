"""AUROC and average precision that can be resampled over units without sorting again.

Items are counted once into sparse tables (positive score, unit); a resample then is one product with the
weights and a cumulative sum. Items with equal scores form one block, so the order of rows never matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from torchtraceap.eval.bootstrap import Weights, in_parts
from torchtraceap.eval.intervals import Floats, Ints


@dataclass(frozen=True)
class Ranking:
    """Counts of ranked items by unit.

    A block is a distinct score of a positive item, highest first. A negative item belongs to the first block
    that does not lie above it: only there does it begin to count.

    Attributes:
        blocks: How many.
        positive: Positive items of each block, (blocks, units).
        above: Negative items that begin to count at each block, those tied with it included.
        tied: Negative items tied with each block.
        positives: All positive items of each unit, also those that were never reported, (units,).
        negatives: All negative items of each unit.
    """

    blocks: int
    positive: csr_array
    above: csr_array
    tied: csr_array
    positives: Floats
    negatives: Floats

    @classmethod
    def of(cls, score: Floats, is_positive: NDArray[np.bool_], unit: Ints, positives: Floats) -> Ranking:
        """Count items.

        Args:
            score: Of each item, shape (items,).
            is_positive: Shape (items,).
            unit: Unit of each item.
            positives: All positive items of each unit, shape (units,): items may be missing (never
                reported), and then rank behind everything.
        """
        blocks = np.unique(-score[is_positive])  # ascending in the negated score
        item = -score[~is_positive]
        begins = np.searchsorted(blocks, item, side="left")
        counts = begins < len(blocks)
        ties = np.zeros(len(item), dtype=bool)
        ties[counts] = blocks[begins[counts]] == item[counts]
        negative_unit = unit[~is_positive]
        shape = (len(blocks), len(positives))

        def table(block: Ints, of_unit: Ints) -> csr_array:
            return coo_array((np.ones(len(block)), (block, of_unit)), shape=shape).tocsr()

        return cls(
            blocks=len(blocks),
            positive=table(np.searchsorted(blocks, -score[is_positive]), unit[is_positive]),
            above=table(begins[counts], negative_unit[counts]),
            tied=table(begins[ties], negative_unit[ties]),
            positives=positives.astype(float),
            negatives=np.bincount(negative_unit, minlength=len(positives)).astype(float),
        )

    def auroc(self, weights: Weights) -> Floats:
        """Probability that a positive item outranks a negative one, ties half; NaN without both."""

        def part(w: Weights) -> Floats:
            hit, above, tied = self.positive @ w, np.cumsum(self.above @ w, axis=0), self.tied @ w
            n = self.negatives @ w
            won = (hit * (n - above + 0.5 * tied)).sum(axis=0)
            return _divide(won, (self.positives @ w) * n)

        return in_parts(part, self.blocks)(weights)

    def average_precision(self, weights: Weights) -> Floats:
        """Sum over blocks of the gain in recall times the precision there; NaN without a positive."""
        return in_parts(lambda w: self._area(w, interpolate=False), self.blocks)(weights)

    def interpolated_ap(self, weights: Weights) -> Floats:
        """As in detection benchmarks: the precision of a recall is the highest at that recall or beyond."""
        return in_parts(lambda w: self._area(w, interpolate=True), self.blocks)(weights)

    def _area(self, w: Weights, interpolate: bool) -> Floats:
        hit = self.positive @ w
        tp, fp = np.cumsum(hit, axis=0), np.cumsum(self.above @ w, axis=0)
        precision = tp / np.maximum(tp + fp, 1e-300)
        if interpolate and len(precision):
            precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
        return _divide((hit * precision).sum(axis=0), self.positives @ w)


def _divide(over: Floats, under: Floats) -> Floats:
    return np.where(under > 0, over / np.where(under > 0, under, 1), np.nan)
