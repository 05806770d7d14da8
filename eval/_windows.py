"""Tasks 1 and 2: which windows are positive, and for what."""

from __future__ import annotations

import numpy as np

from torchtraceap.eval.bootstrap import Statistic, f1, ratio, stack
from torchtraceap.eval.cells import Question
from torchtraceap.eval.evidence import Evidence
from torchtraceap.eval.ranking import Ranking
from torchtraceap.eval.truth import Bools

LANES: dict[str, list[int]] = {"any": [0, 1], "cpu": [0], "gpu": [1]}
"""Positions in ``LANE_CLASSES``."""


def rank(evidence: Evidence, question: Question) -> Ranking:
    """The windows that a question is asked of, counted by unit."""
    asked = np.flatnonzero(question.asked)
    trace = evidence.truth.windows.trace[asked]
    positive = question.positive[asked]
    unit = evidence.truth.unit[trace]
    return Ranking.of(question.score[asked], positive, unit, evidence.truth.by_unit(trace[positive]))


def anything(evidence: Evidence, lanes: str, patterns: Bools) -> Ranking:
    """Windows ranked by any of ``patterns`` on ``any``, ``cpu`` or ``gpu`` lanes."""
    return rank(evidence, evidence.cells.anything(LANES[lanes], patterns))


def by_pattern(evidence: Evidence) -> list[Ranking]:
    """Windows ranked for each local class."""
    return [rank(evidence, evidence.cells.pattern(pattern)) for pattern in evidence.local_classes.tolist()]


def accuracy(evidence: Evidence, patterns: Bools) -> Statistic:
    """Share of the positive windows whose highest pattern is in the label set; ties count in part."""
    window, labels, share = evidence.cells.top(patterns)
    trace = evidence.truth.windows.trace[window]
    hit = (share * labels).sum(axis=1)
    return ratio(evidence.truth.by_unit(trace, hit), evidence.truth.by_unit(trace))


def classification_f1(evidence: Evidence) -> Statistic:
    """F1 of each local class over positive windows.

    A window is a true positive of the pattern it is held for if that is in its label set, else a false
    positive of it; and a false negative of all its labels unless it is held for one of them.
    """
    truth = evidence.truth
    window, labels, share = evidence.cells.top(truth.local)
    trace = truth.windows.trace[window]
    missed = 1 - (share * labels).sum(axis=1)

    def of(pattern: int) -> Statistic:
        label = labels[:, pattern]
        return f1(
            truth.by_unit(trace, share[:, pattern] * label),
            truth.by_unit(trace, share[:, pattern] * ~label),
            truth.by_unit(trace, missed * label),
        )

    return stack([of(pattern) for pattern in evidence.local_classes.tolist()])
