"""Patterns of step scope: which steps of which traces they affect."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtraceap.eval.bootstrap import Statistic, f1, ratio
from torchtraceap.eval.evidence import Evidence
from torchtraceap.eval.intervals import Ints, Line, covered_share, pairs_above, ranges
from torchtraceap.eval.rows import Rows
from torchtraceap.eval.truth import Bools, Segments, Truth
from torchtraceap.labels.types import LANE_CLASSES


@dataclass(frozen=True)
class Triples:
    """Outcome of each (trace, step, pattern): the distinct triples of each kind."""

    trace: Ints
    pattern: Ints

    @classmethod
    def of(cls, key: Ints, truth: Truth, steps: int) -> Triples:
        pair = key // steps
        return cls(pair // len(truth.patterns), pair % len(truth.patterns))


@dataclass(frozen=True)
class Steps:
    """Time of each step; a trace without steps is one step, -1. Parallel arrays in time order, on a line."""

    line: Line
    trace: Ints
    step: Ints
    start: Ints
    end: Ints

    @classmethod
    def of(cls, truth: Truth) -> Steps:
        windows = truth.windows
        line = Line.of(truth.end_ns)
        inside = (windows.step >= 0) | ~truth.has_steps[windows.trace]
        trace, step = windows.trace[inside], windows.step[inside]
        keys, first, which = np.unique(
            np.stack([trace, step]), axis=1, return_index=True, return_inverse=True
        )
        start = line.place(keys[0], windows.start[inside][first])
        end = np.zeros(keys.shape[1], dtype=np.int64)
        np.maximum.at(end, which.reshape(-1), line.place(trace, windows.end[inside]))
        return cls(line, keys[0], keys[1], start, end)


def outcomes(evidence: Evidence) -> tuple[Triples, Triples, Triples]:
    """Triples (trace, step, pattern) that are found, falsely reported, and missed.

    A row stands for each step that covers at least half of the row, or at least half of which the row
    covers; on which lane it lies does not matter. But a GPU runs work later than the step that launched it,
    so a row on a GPU lane, at least half of which lies in costly or ignored segments, stands for their steps.
    A step with an undecided or native segment of the pattern is left out unless it has a costly one.
    """
    truth = evidence.truth
    steps = Steps.of(truth)
    size = int(steps.step.max(initial=0)) + 2
    rows = evidence.reported.where(~truth.local[evidence.reported.pattern])
    known = _key(steps.trace, np.zeros_like(steps.trace), steps.step, truth, size)

    def existing(trace: Ints, pattern: Ints, step: Ints) -> Ints:
        """Keys of the triples whose step the trace has; work from before the first one has none."""
        trace, pattern, step = (column[step < size - 1] for column in (trace, pattern, step))
        exists = np.isin(_key(trace, np.zeros_like(trace), step, truth, size), known)
        return np.unique(_key(trace, pattern, step, truth, size)[exists])

    def labelled(segments: Segments) -> Ints:
        of_step = segments.where(~truth.local[segments.pattern])
        return existing(of_step.trace, of_step.pattern, of_step.step)

    late, segment = _late(rows, truth)
    found = [existing(segment.trace, segment.pattern, segment.step)]
    rows = rows.where(~late)
    shift = steps.line.offset[rows.trace] - truth.line.offset[rows.group]
    start, end = rows.start + shift, rows.end + shift
    low = np.searchsorted(steps.end, start, side="right")
    for row, index in ranges(low, np.searchsorted(steps.start, end, side="right")):
        shared = np.minimum(end[row], steps.end[index]) - np.maximum(start[row], steps.start[index])
        shorter = np.minimum(end[row] - start[row], steps.end[index] - steps.start[index])
        held = 2 * shared >= shorter
        found.append(_key(steps.trace[index], rows.pattern[row], steps.step[index], truth, size)[held])
    predicted = np.unique(np.concatenate(found))

    true = labelled(truth.segments)
    false = np.setdiff1d(np.setdiff1d(predicted, true), labelled(truth.ignored))
    wrong = Triples.of(false, truth, size)
    counts = truth.exhaustive[wrong.trace, wrong.pattern]
    return (
        Triples.of(np.intersect1d(predicted, true), truth, size),
        Triples(wrong.trace[counts], wrong.pattern[counts]),
        Triples.of(np.setdiff1d(true, predicted), truth, size),
    )


def _late(rows: Rows, truth: Truth) -> tuple[Bools, Segments]:
    """Rows on a GPU lane that lie in labelled segments for the most part, and the segments they lie in."""
    both = zip(*(vars(part).values() for part in (truth.segments, truth.ignored)), strict=True)
    labelled = Segments(*map(np.concatenate, both))
    on_gpu = rows.group // len(truth.patterns) % len(LANE_CLASSES) == LANE_CLASSES.index("gpu")
    inside = on_gpu & (2 * covered_share(rows.start, rows.end, labelled.start, labelled.end) >= 1)
    any_overlap = np.finfo(float).tiny
    row, segment, _ = pairs_above(rows.start, rows.end, labelled.start, labelled.end, any_overlap)
    keep = inside[row]
    late = np.zeros(len(rows), dtype=bool)
    late[row[keep]] = True  # an instant overlaps nothing, and so stands for the step that it lies in
    return late, labelled.where(segment[keep])


def micro_f1(evidence: Evidence) -> Statistic:
    """F1 over all triples of all patterns of step scope."""
    return f1(*(evidence.truth.by_unit(triples.trace) for triples in outcomes(evidence)))


def class_f1(evidence: Evidence) -> Statistic:
    """F1 of each class of step scope."""
    tables = (evidence.truth.by_class_and_unit(t.trace, t.pattern) for t in outcomes(evidence))
    return f1(*(table[evidence.step_classes] for table in tables))


def false_alarms(evidence: Evidence) -> Statistic:
    """Falsely reported triples a clean trace."""
    truth = evidence.truth
    _, false, _ = outcomes(evidence)
    clean = np.flatnonzero(truth.good)
    return ratio(truth.by_unit(false.trace[truth.good[false.trace]]), truth.by_unit(clean))


def _key(trace: Ints, pattern: Ints, step: Ints, truth: Truth, size: int) -> Ints:
    return (trace * len(truth.patterns) + pattern) * size + step + 1
