"""Task 3: where the anti-patterns of local scope are, and what finding them saves."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array

from torchtraceap.eval.bootstrap import Statistic, Weights, f1, in_parts, ratio, stack
from torchtraceap.eval.evidence import Evidence
from torchtraceap.eval.intervals import Floats, Ints, union_length
from torchtraceap.eval.located import THRESHOLDS
from torchtraceap.eval.ranking import Ranking
from torchtraceap.eval.truth import Bools
from torchtraceap.labels.types import LANE_CLASSES

ALLOWED_ALARMS = 0.5
"""False alarms a clean trace at which the recovered cost is read."""


def average_precision(evidence: Evidence, least: float) -> Statistic:
    """Interpolated average precision of each local class, rows matched greedily by score."""
    truth, located = evidence.truth, evidence.local
    rows = located.rows
    matched = located.greedy(least) >= 0
    counts = located.within_cap & (matched | ~located.droppable)
    segments = truth.by_class_and_unit(truth.segments.trace, truth.segments.pattern)

    def of(pattern: int) -> Statistic:
        keep = counts & (rows.pattern == pattern)
        unit = truth.unit[rows.trace[keep]]
        return Ranking.of(rows.score[keep], matched[keep], unit, segments[pattern]).interpolated_ap

    return stack([of(pattern) for pattern in evidence.local_classes.tolist()])


def segment_f1(evidence: Evidence, least: float) -> Statistic:
    """F1 of each local class at the card's threshold, by a maximum one-to-one matching.

    Which rows such a matching leaves over is not unique, but these numbers are: true positives are as many as
    can be matched, and of the rows that would count as false positives as many as possible are matched (the
    rows that can be matched together form a matroid, so the one does not stand in the way of the other).
    """
    truth, located = evidence.truth, evidence.local
    rows, classes = located.rows, evidence.local_classes
    reported = located.reported(evidence.threshold)
    countable = reported & ~located.droppable

    def table(keep: Bools) -> Floats:
        return truth.by_class_and_unit(rows.trace[keep], rows.pattern[keep])[classes]

    tp = table(located.most(least, reported))
    fp = table(countable) - table(located.most(least, countable))
    return f1(tp, fp, truth.by_class_and_unit(truth.segments.trace, truth.segments.pattern)[classes] - tp)


def time_f1(evidence: Evidence) -> Statistic:
    """F1 of each local class in time: unions of reported rows against unions of segments, by lane class.

    Reported time in ignored segments is left out, and so is, where a pattern is not exhaustive, all reported
    time outside of segments.
    """
    truth, located = evidence.truth, evidence.local
    rows = located.rows.where(located.reported(evidence.threshold))

    def length(*parts: tuple[Ints, Ints, Ints]) -> Floats:
        group, start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
        return union_length(group, start, end, truth.groups)

    reported, true, ignored = (
        (part.group, part.start, part.end) for part in (rows, truth.segments, truth.ignored)
    )
    all_true = length(true)
    tp = length(reported) + all_true - length(reported, true)
    fp = length(reported, true, ignored) - length(true, ignored)
    group = np.arange(truth.groups)
    patterns = len(truth.patterns)
    trace, pattern = group // (patterns * len(LANE_CLASSES)), group % patterns
    fp = fp * truth.exhaustive[trace, pattern]
    classes = evidence.local_classes
    sums = (truth.by_class_and_unit(trace, pattern, amount)[classes] for amount in (tp, fp, all_true - tp))
    return f1(*sums)


def trace_tables(evidence: Evidence) -> tuple[Floats, Floats, Floats]:
    """Pairs (trace, pattern) of all scopes found, falsely reported and missed: (patterns, units) each."""
    truth, rows = evidence.truth, evidence.reported
    predicted = np.zeros_like(truth.costly)
    predicted[rows.trace, rows.pattern] = True
    false = predicted & ~truth.costly & ~truth.uncertain & truth.exhaustive
    return (
        truth.by_class_and_unit(*_pairs(predicted & truth.costly)),
        truth.by_class_and_unit(*_pairs(false)),
        truth.by_class_and_unit(*_pairs(truth.costly & ~predicted)),
    )


def trace_class_f1(evidence: Evidence) -> Statistic:
    """F1 of each class over traces."""
    return f1(*(table[evidence.classes] for table in trace_tables(evidence)))


def trace_micro_f1(evidence: Evidence) -> Statistic:
    """F1 over all pairs of a trace and a pattern, those outside of the class list too."""
    return f1(*(table.sum(axis=0) for table in trace_tables(evidence)))


def false_alarms(evidence: Evidence) -> Statistic:
    """Reported rows a clean trace."""
    truth, located = evidence.truth, evidence.local
    alarm = located.reported(evidence.threshold) & ~located.droppable & truth.good[located.rows.trace]
    return ratio(truth.by_unit(located.rows.trace[alarm]), truth.by_unit(np.flatnonzero(truth.good)))


def recovered_cost(evidence: Evidence) -> Statistic:
    """Share of the measured cost that is found, at the lowest score with few enough false alarms.

    The credit of a (trace, pattern, step) is its cost a step, given as a whole once one of its segments is
    matched (greedily, at the lowest tIoU). What a GPU had left of a step before the first one earns nothing:
    the cost of that step lies outside of the trace. Rows count down to, and not with, the score at which the
    clean traces of the resample hold more than ``ALLOWED_ALARMS`` false alarms each.
    """
    truth, located = evidence.truth, evidence.local
    rows, segments = located.rows, truth.segments
    local = truth.local[segments.pattern] & ((segments.step >= 0) | ~truth.has_steps[segments.trace])
    keys = np.stack([segments.trace, segments.pattern, segments.step])[:, local]
    triples, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.reshape(-1)
    cost, best = np.zeros(triples.shape[1]), np.full(triples.shape[1], -np.inf)
    np.maximum.at(cost, which, segments.cost_ms[local])
    matched = located.greedy(THRESHOLDS[0])
    hit = matched >= 0
    of_segment = np.full(len(local), -np.inf)
    of_segment[matched[hit]] = rows.score[hit]
    np.maximum.at(best, which, of_segment[local])

    alarm = ~located.droppable & truth.good[rows.trace]
    alarm_score, alarms = _by_score(rows.score[alarm], truth.unit[rows.trace[alarm]], len(truth.units))
    found = best > -np.inf
    unit = truth.unit[triples[0]]
    credit_score, credits = _by_score(best[found], unit[found], len(truth.units), cost[found])
    total = truth.by_unit(triples[0], cost)
    clean = truth.by_unit(np.flatnonzero(truth.good))

    def values(weights: Weights) -> Floats:
        allowed = ALLOWED_ALARMS * (clean @ weights)
        within = (np.cumsum(alarms @ weights, axis=0) <= allowed).sum(axis=0)
        limit = np.append(alarm_score, -np.inf)[within]
        above = np.searchsorted(-credit_score, -limit, side="left")
        gained = np.cumsum(np.concatenate([np.zeros((1, weights.shape[1])), credits @ weights]), axis=0)
        whole = total @ weights
        defined = (whole > 0) & (allowed > 0)
        recovered = gained[above, np.arange(len(above))]
        return np.where(defined, recovered / np.where(defined, whole, 1), np.nan)

    return in_parts(values, len(alarm_score) + len(credit_score))


def dropped_rows(evidence: Evidence) -> dict[str, dict[str, int]]:
    """Rows that the average precision leaves out, by least tIoU and reason."""
    located = evidence.local
    result = {}
    for least in THRESHOLDS:
        left = located.within_cap & (located.greedy(least) < 0)
        result[f"{least}"] = {
            "ignored": int((left & located.in_ignored).sum()),
            "not_exhaustive": int((left & located.not_exhaustive & ~located.in_ignored).sum()),
            "beyond_100_a_group": int((~located.within_cap).sum()),
        }
    return result


def _pairs(marks: Bools) -> tuple[Ints, Ints]:
    trace, pattern = np.nonzero(marks)
    return trace, pattern


def _by_score(
    score: Floats, unit: Ints, units: int, amount: Floats | None = None
) -> tuple[Floats, csr_array]:
    """Distinct scores, highest first, and a sparse table (scores, units) of what they bring."""
    distinct, which = np.unique(-score, return_inverse=True)
    amount = np.ones(len(score)) if amount is None else amount
    return -distinct, coo_array((amount, (which, unit)), shape=(len(distinct), units)).tocsr()
