"""Every score by name: what it is, which direction is better, how it is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from torchtraceap.eval import _segments, _steps, _windows
from torchtraceap.eval.bootstrap import Statistic, mean, mean_defined, stack
from torchtraceap.eval.evidence import Evidence
from torchtraceap.eval.intervals import Ints
from torchtraceap.eval.located import THRESHOLDS
from torchtraceap.eval.truth import Bools

Classes = Literal["local", "step", "all"]


@dataclass(frozen=True)
class Metric:
    """One score.

    Attributes:
        name: In results.
        task: Under which heading it is shown.
        doc: One sentence.
        compute: From the evidence, a function of the weights of split units.
        higher_is_better: Its direction.
        by_class: Classes that ``compute`` returns a row each for, whose mean is the score; None if it is one
            number.
    """

    name: str
    task: Literal["windows", "classification", "steps", "segments", "traces"]
    doc: str
    compute: Callable[[Evidence], Statistic]
    higher_is_better: bool = True
    by_class: Classes | None = None

    def classes(self, evidence: Evidence) -> Ints:
        """Patterns of the rows of a score by class."""
        if self.by_class is None:
            return np.zeros(0, dtype=np.int64)
        every = {"local": evidence.local_classes, "step": evidence.step_classes}
        return every.get(self.by_class, np.flatnonzero(evidence.classes))

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The score itself, shape (resamples,), from values of what ``compute`` returned."""
        return values if self.by_class is None else mean_defined(values)


RANKING_METRIC: Final = "segment_map"
"""Detectors are ranked by this one."""


def _window_auroc(evidence: Evidence, lanes: str, scope: str) -> Statistic:
    return _windows.anything(evidence, lanes, _asked(evidence, scope)).auroc


def _window_ap(evidence: Evidence, lanes: str, scope: str) -> Statistic:
    return _windows.anything(evidence, lanes, _asked(evidence, scope)).average_precision


def _patterns(evidence: Evidence, scope: str) -> Bools:
    local = evidence.truth.local
    return local if scope == "local" else np.ones_like(local)


def _asked(evidence: Evidence, scope: str) -> Bools:
    """The classes of the slice, of local scope or of all.

    Not all of the catalogue: hardly a trace is exhaustive for every pattern, and a pattern that the slice
    holds too little of to be a class would then cost it its negatives.
    """
    return evidence.classes & _patterns(evidence, scope)


def _mean_over_tiou(compute: Callable[[Evidence, float], Statistic]) -> Callable[[Evidence], Statistic]:
    return lambda evidence: mean([compute(evidence, least) for least in THRESHOLDS])


def _at_tiou(
    compute: Callable[[Evidence, float], Statistic], least: float
) -> Callable[[Evidence], Statistic]:
    return lambda evidence: compute(evidence, least)


def _window_metrics() -> list[Metric]:
    metrics = []
    for scope, suffix, meant in (("local", "", "of local scope"), ("all", "_all_scopes", "of any scope")):
        for lanes in _windows.LANES:
            where = "on any lane" if lanes == "any" else f"on {lanes} lanes"
            doc = f"of windows with an anti-pattern {meant} {where}."
            auroc = partial(_window_auroc, lanes=lanes, scope=scope)
            ap = partial(_window_ap, lanes=lanes, scope=scope)
            metrics += [
                Metric(f"window_auroc_{lanes}{suffix}", "windows", f"AUROC {doc}", auroc),
                Metric(f"window_ap_{lanes}{suffix}", "windows", f"Average precision {doc}", ap),
            ]
    return metrics


METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        "segment_map",
        "segments",
        "Mean of segment_ap_30, _50 and _70: the ranking metric.",
        _mean_over_tiou(_segments.average_precision),
        by_class="local",
    ),
    *(
        Metric(
            f"segment_ap_{least * 100:.0f}",
            "segments",
            f"Interpolated average precision at tIoU {least}, macro over local classes.",
            _at_tiou(_segments.average_precision, least),
            by_class="local",
        )
        for least in THRESHOLDS
    ),
    Metric(
        "segment_f1",
        "segments",
        "Mean of segment_f1_30, _50 and _70.",
        _mean_over_tiou(_segments.segment_f1),
        by_class="local",
    ),
    *(
        Metric(
            f"segment_f1_{least * 100:.0f}",
            "segments",
            f"F1 at the card's threshold, maximum matching at tIoU {least}, macro over local classes.",
            _at_tiou(_segments.segment_f1, least),
            by_class="local",
        )
        for least in THRESHOLDS
    ),
    Metric(
        "time_f1",
        "segments",
        "F1 in time at the card's threshold, macro over local classes.",
        _segments.time_f1,
        by_class="local",
    ),
    Metric(
        "recovered_cost",
        "segments",
        "Share of the measured cost that is found at 0.5 or fewer false alarms a clean trace, local scope.",
        _segments.recovered_cost,
    ),
    Metric(
        "false_alarms",
        "segments",
        "Rows of local scope reported a clean trace, at the card's threshold.",
        _segments.false_alarms,
        higher_is_better=False,
    ),
    Metric(
        "trace_macro_f1",
        "traces",
        "F1 of (trace, pattern) at the card's threshold, macro over classes of both scopes.",
        _segments.trace_class_f1,
        by_class="all",
    ),
    Metric(
        "trace_micro_f1",
        "traces",
        "F1 of (trace, pattern) at the card's threshold, over the whole catalogue.",
        _segments.trace_micro_f1,
    ),
    *_window_metrics(),
    Metric(
        "window_auroc_pattern",
        "windows",
        "AUROC of windows by pattern, macro over local classes.",
        lambda evidence: stack([ranking.auroc for ranking in _windows.by_pattern(evidence)]),
        by_class="local",
    ),
    Metric(
        "window_ap_pattern",
        "windows",
        "Average precision of windows by pattern, macro over local classes.",
        lambda evidence: stack([ranking.average_precision for ranking in _windows.by_pattern(evidence)]),
        by_class="local",
    ),
    Metric(
        "window_accuracy",
        "classification",
        "Share of positive windows whose top pattern is in the label set, local scope.",
        lambda evidence: _windows.accuracy(evidence, _patterns(evidence, "local")),
    ),
    Metric(
        "window_accuracy_all_scopes",
        "classification",
        "Share of positive windows whose top pattern is in the label set, any scope.",
        lambda evidence: _windows.accuracy(evidence, _patterns(evidence, "all")),
    ),
    Metric(
        "window_macro_f1",
        "classification",
        "F1 of the top pattern of positive windows, macro over local classes.",
        _windows.classification_f1,
        by_class="local",
    ),
    Metric(
        "step_f1",
        "steps",
        "F1 of (trace, step, pattern) of step scope at the card's threshold, over the whole catalogue.",
        _steps.micro_f1,
    ),
    Metric(
        "step_macro_f1",
        "steps",
        "F1 of (trace, step, pattern) at the card's threshold, macro over classes of step scope.",
        _steps.class_f1,
        by_class="step",
    ),
    Metric(
        "step_false_alarms",
        "steps",
        "Pairs (step, pattern) of step scope reported a clean trace.",
        _steps.false_alarms,
        higher_is_better=False,
    ),
)

METRIC_BY_NAME: Final = {metric.name: metric for metric in METRICS}
