"""Scores of windows by lane class and pattern, from window scores and, where these are silent, detections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtraceap.eval.intervals import Floats, Ints, Line, ranges
from torchtraceap.eval.rows import Rows, WindowRows
from torchtraceap.eval.truth import Bools, Truth
from torchtraceap.labels.types import LANE_CLASSES

_SILENT = -np.inf


@dataclass(frozen=True)
class Question:
    """Windows ranked for one question, such as "is anything wrong here?".

    Attributes:
        score: Of each window, shape (windows,).
        positive: Its label.
        asked: Windows that are positive or negative; the others are left out.
    """

    score: Floats
    positive: Bools
    asked: Bools


@dataclass(frozen=True)
class Cells:
    """Scores of windows; ``-inf`` where nothing is said.

    The score of a window for a question is the highest of its window scores that answer it; without any, the
    highest score of a detection that overlaps it and answers; else 0.

    Attributes:
        truth: Its windows.
        stated: Window scores, shape (windows, lane classes, patterns); of repeated ones the highest.
        stated_any: Those that name no pattern, shape (windows, lane classes).
        detected: Highest score of an overlapping detection, shaped as ``stated``.
    """

    truth: Truth
    stated: Floats
    stated_any: Floats
    detected: Floats

    @classmethod
    def of(cls, truth: Truth, rows: Rows, window_rows: WindowRows) -> Cells:
        shape = truth.windows.positive.shape
        stated = np.full(shape, _SILENT)
        stated_any = np.full(shape[:2], _SILENT)
        names = window_rows.pattern >= 0
        at = (window_rows.window, window_rows.lane, window_rows.pattern)
        np.maximum.at(stated, tuple(index[names] for index in at), window_rows.score[names])
        np.maximum.at(stated_any, tuple(index[~names] for index in at[:2]), window_rows.score[~names])
        return cls(truth, stated, stated_any, _detected(truth, rows))

    def anything(self, lanes: list[int], patterns: Bools) -> Question:
        """Is any of these patterns on any of these lane classes?

        A window without a label is a negative only where the trace is exhaustive for all of the patterns:
        elsewhere one of them may be there unlabelled. No score depends on the labels, so that a constant one
        has an AUROC of 0.5. Windows that only ignored segments or other patterns touch are left out.
        """
        windows = self.truth.windows
        labelled, ignored = windows.positive[:, lanes], windows.ignored[:, lanes]
        positive: Bools = np.logical_or.reduce(labelled & patterns, axis=(1, 2))
        unclear: Bools = np.logical_or.reduce(ignored | (labelled & ~patterns), axis=(1, 2))
        known = np.logical_and.reduce(self.truth.exhaustive | ~patterns, axis=1)[windows.trace]
        stated, detected = (
            scores[:, lanes][:, :, patterns].max(axis=(1, 2), initial=_SILENT)
            for scores in (self.stated, self.detected)
        )
        stated = np.maximum(stated, self.stated_any[:, lanes].max(axis=1))
        return Question(_first_said(stated, detected), positive, positive | (known & ~unclear))

    def pattern(self, pattern: int) -> Question:
        """Is this pattern on any lane class? Traces that are not exhaustive for it have no negatives."""
        windows = self.truth.windows
        positive: Bools = np.logical_or.reduce(windows.positive[:, :, pattern], axis=1)
        negative = ~windows.ignored[:, :, pattern].any(axis=1) & self.truth.exhaustive[windows.trace, pattern]
        stated, detected = (scores[:, :, pattern].max(axis=1) for scores in (self.stated, self.detected))
        return Question(_first_said(stated, detected), positive, positive | negative)

    def top(self, patterns: Bools) -> tuple[Ints, Bools, Floats]:
        """The pattern that each positive window is held for.

        Candidates are the given patterns, without those that the trace is not exhaustive for or the window
        is ignored for (unless it is labelled with them). Equal highest scores share the window evenly, and
        with no score above 0 it is held for nothing.

        Returns:
            Indices of the windows that are positive for one of the patterns, shape (n,); their label sets,
            shape (n, patterns); the share of each pattern, shape (n, patterns), 1 or 0 a window in total.
        """
        windows = self.truth.windows
        labels = windows.positive.any(axis=1) & patterns
        index = np.flatnonzero(labels.any(axis=1))
        labels = labels[index]
        certain = self.truth.exhaustive[windows.trace[index]] & ~windows.ignored[index].any(axis=1)
        stated, detected = (scores[index].max(axis=1) for scores in (self.stated, self.detected))
        score = np.where((certain | labels) & patterns, _first_said(stated, detected), 0.0)
        best = score.max(axis=1, initial=0.0, keepdims=True)
        ties = (score == best) & (best > 0)
        return index, labels, ties / np.maximum(ties.sum(axis=1, keepdims=True), 1)


def _first_said(stated: Floats, detected: Floats) -> Floats:
    score = np.where(stated > _SILENT, stated, detected)
    return np.where(score > _SILENT, score, 0.0)


def _detected(truth: Truth, rows: Rows) -> Floats:
    windows = truth.windows
    best = np.full(windows.positive.shape, _SILENT)
    if not len(windows.trace):
        return best
    line = Line.of(truth.end_ns)
    opens, closes = line.place(windows.trace, windows.start), line.place(windows.trace, windows.end)
    shift = line.offset[rows.trace] - truth.line.offset[rows.group]
    start, end = rows.start + shift, rows.end + shift
    low = np.searchsorted(closes, start, side="right")
    # An instant at the very end of a trace belongs to its last window, as in labels/windows.py.
    low -= (low == len(closes)) | (windows.trace[np.minimum(low, len(closes) - 1)] > rows.trace)
    high = np.maximum(np.searchsorted(opens, end, side="left"), low + 1)
    patterns = len(truth.patterns)
    lane = rows.group // patterns % len(LANE_CLASSES)
    for row, window in ranges(low, high):
        own = windows.trace[window] == rows.trace[row]
        row, window = row[own], window[own]
        np.maximum.at(best, (window, lane[row], rows.pattern[row]), rows.score[row])
    return best
