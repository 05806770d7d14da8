"""Which reported rows are which true segments, one to one, at a least overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from torchtraceap.eval.intervals import Floats, Ints


@dataclass(frozen=True)
class Pairs:
    """Candidate pairs of a row and a segment with their tIoU; parallel arrays."""

    row: Ints
    segment: Ints
    tiou: Floats

    def where(self, keep: NDArray[np.bool_]) -> Pairs:
        return Pairs(self.row[keep], self.segment[keep], self.tiou[keep])


def match_greedily(pairs: Pairs, rank: Ints) -> Ints:
    """Rows in the order of ``rank`` each take the free segment that they overlap most.

    Of equal overlaps the earlier segment (lower index) is taken. The matching is prefix-consistent: without
    the rows of the highest ranks the others keep their segments.

    Args:
        pairs: Only pairs with enough overlap.
        rank: Distinct position of each row, shape (rows,).

    Returns:
        Segment of each row, -1 for none, shape (rows,).
    """
    matched = np.full(len(rank), -1, dtype=np.int64)
    order = np.lexsort((pairs.segment, -pairs.tiou, rank[pairs.row]))
    taken: set[int] = set()
    done = -1
    for row, segment in zip(pairs.row[order].tolist(), pairs.segment[order].tolist(), strict=True):
        if row != done and segment not in taken:
            taken.add(segment)
            matched[row] = segment
            done = row
    return matched


def match_most(pairs: Pairs, rows: int) -> NDArray[np.bool_]:
    """Which rows have a segment in a matching with as many pairs as possible, shape (rows,).

    Several such matchings may exist; only the number of rows in each connected group of pairs is unique.
    """
    matched = np.zeros(rows, dtype=bool)
    if not len(pairs.row):
        return matched
    row_ids, row = np.unique(pairs.row, return_inverse=True)
    segment_ids, segment = np.unique(pairs.segment, return_inverse=True)
    graph = csr_array(
        (np.ones(len(row), dtype=np.int8), (row, segment)), shape=(len(row_ids), len(segment_ids))
    )
    partner = maximum_bipartite_matching(graph, perm_type="column")
    matched[row_ids[partner >= 0]] = True
    return matched
