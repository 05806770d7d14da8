"""Rows of a submission as numbers, checked against the truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchtraceap.eval.intervals import Floats, Ints
from torchtraceap.eval.submission import ANY_PATTERN, codes, quoted, refuse_rows
from torchtraceap.eval.truth import Bools, Truth
from torchtraceap.labels.types import LANE_CLASSES


@dataclass(frozen=True)
class Rows:
    """Detections in the scored slice; parallel arrays. ``start`` and ``end`` lie on the truth's line.

    They are sorted by group, then score (highest first), start and end, so nothing depends on their order in
    the submission.
    """

    trace: Ints
    pattern: Ints
    group: Ints
    start: Ints
    end: Ints
    score: Floats

    def __len__(self) -> int:
        return len(self.trace)

    def where(self, keep: Bools | Ints) -> Rows:
        return Rows(*(getattr(self, name)[keep] for name in Rows.__dataclass_fields__))


@dataclass(frozen=True)
class WindowRows:
    """Window scores in the scored slice; ``window`` indexes the truth's windows, pattern -1 is any."""

    window: Ints
    lane: Ints
    pattern: Ints
    score: Floats


def rows_of(table: pa.Table, truth: Truth) -> Rows:
    """Check detections and put them into numbers; one that reaches beyond its trace is cut to it.

    Raises:
        UserError: A row names an unknown trace or pattern, or lies outside of its trace entirely.
    """
    trace, pattern = codes(table["trace_id"], truth.trace_ids), codes(table["pattern"], truth.patterns)
    lane = codes(table["lane"], LANE_CLASSES)
    start, end = (table[name].to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    last = truth.end_ns[trace] if len(truth.end_ns) else np.zeros(len(trace), dtype=np.int64)
    refuse_rows(
        "detections",
        [
            (trace < 0, lambda row: f"unknown trace {quoted(table['trace_id'][row].as_py())}"),
            (pattern < 0, lambda row: f"unknown pattern {quoted(table['pattern'][row].as_py())}"),
            (
                (end < 0) | (start > last),
                lambda row: f"[{start[row]}, {end[row]}] ns lies outside of its trace, [0, {last[row]}]",
            ),
        ],
    )
    group = truth.group(trace, lane, pattern)
    rows = Rows(
        trace=trace,
        pattern=pattern,
        group=group,
        start=truth.line.place(group, np.clip(start, 0, last)),
        end=truth.line.place(group, np.clip(end, 0, last)),
        score=table["score"].to_numpy().astype(np.float64),
    )
    return rows.where(np.lexsort((rows.end, rows.start, -rows.score, rows.group)))


def window_rows_of(table: pa.Table, known: Truth, truth: Truth) -> WindowRows:
    """Check window scores against ``known`` and keep those in ``truth``.

    Raises:
        UserError: A row names an unknown trace, pattern or window.
    """
    trace = codes(table["trace_id"], known.trace_ids)
    pattern = codes(table["pattern"], (*known.patterns, ANY_PATTERN))
    window = table["window"].to_numpy().astype(np.int64)
    exists, _ = _find(known, trace, window)
    refuse_rows(
        "window scores",
        [
            (trace < 0, lambda row: f"unknown trace {quoted(table['trace_id'][row].as_py())}"),
            (pattern < 0, lambda row: f"unknown pattern {quoted(table['pattern'][row].as_py())}"),
            (~exists, lambda row: f"its trace has no window {window[row]}"),
        ],
    )
    included, index = _find(truth, trace, window)
    return WindowRows(
        window=index[included],
        lane=codes(table["lane"], LANE_CLASSES)[included],
        pattern=np.where(pattern == len(known.patterns), -1, pattern)[included],
        score=table["score"].to_numpy().astype(np.float64)[included],
    )


def _find(truth: Truth, trace: Ints, window: Ints) -> tuple[Bools, NDArray[np.int64]]:
    """Whether the truth has each window, and its index."""
    key = truth.windows.trace << 31 | truth.windows.window
    order = np.argsort(key, kind="stable")
    wanted = np.maximum(trace, 0) << 31 | window
    if not len(key):
        return np.zeros(len(wanted), dtype=bool), np.zeros(len(wanted), dtype=np.int64)
    index = order[np.minimum(np.searchsorted(key[order], wanted), len(key) - 1)]
    return key[index] == wanted, index
