"""Score a submission against the truth, and compare two that were scored alike."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchtraceap import __version__
from torchtraceap.dataset.schema import SCHEMA_VERSION
from torchtraceap.errors import UserError
from torchtraceap.eval._segments import dropped_rows
from torchtraceap.eval.bootstrap import interval, pool_singletons, resample, whole
from torchtraceap.eval.evidence import Evidence
from torchtraceap.eval.metrics import METRIC_BY_NAME, METRICS
from torchtraceap.eval.rows import rows_of, window_rows_of
from torchtraceap.eval.submission import Submission, SubmissionCard
from torchtraceap.eval.truth import Bools, Truth
from torchtraceap.files import write_text

LEVEL: Final = 0.95
MAX_RESAMPLES: Final = 100_000


@dataclass(frozen=True)
class ClassRule:
    """Which patterns macro scores average over; the data decide, never a submission.

    Those with at least ``min_instances`` costly instances in at least ``min_units`` split units of the slice.
    Where no pattern of a scope has so many, all of that scope with at least one costly instance.
    """

    min_instances: int = 30
    min_units: int = 8

    def apply(self, truth: Truth) -> tuple[Bools, dict[str, str]]:
        """The classes, shape (patterns,), and for each scope ``rule``, ``fallback`` or ``none``."""
        instances = truth.costly.sum(axis=0)
        trace, pattern = np.nonzero(truth.costly)
        units = (truth.by_class_and_unit(trace, pattern) > 0).sum(axis=1)
        enough = (instances >= self.min_instances) & (units >= self.min_units)
        classes = np.zeros_like(truth.local)
        how: dict[str, str] = {}
        for scope, of_scope in (("local", truth.local), ("step", ~truth.local)):
            for name, chosen in (("rule", enough & of_scope), ("fallback", (instances > 0) & of_scope)):
                if chosen.any():
                    classes |= chosen
                    how[scope] = name
                    break
            else:
                how[scope] = "none"
        return classes, how


@dataclass(frozen=True)
class Score:
    """A score with the bounds of its 95 % interval; None where it is not defined (no truth of the kind)."""

    value: float | None
    low: float | None
    high: float | None
    by_pattern: dict[str, Score] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"value": self.value, "low": self.low, "high": self.high}
        if self.by_pattern:
            fields["by_pattern"] = {name: score.to_dict() for name, score in self.by_pattern.items()}
        return fields


@dataclass(frozen=True)
class ScoreResult:
    """Everything that scoring one submission gives.

    Attributes:
        card: Of the detector; untrusted text.
        scores: By name of the metric.
        without_ignoring: The same scores if undecided and native segments were negatives and every instance
            were known.
        classes: Patterns that macro scores average over, by scope.
        class_rule: How they were chosen: the two numbers, and ``rule``, ``fallback`` or ``none`` by scope.
        dropped: Rows that were left out, by least tIoU and reason.
        counts: Sizes of the truth and the submission.
        provenance: What the numbers depend on; results with equal ones can be compared.
        samples: Value of each score in each resample, shape (resamples,); not part of the JSON.
    """

    card: SubmissionCard
    scores: dict[str, Score]
    without_ignoring: dict[str, float | None]
    classes: dict[str, list[str]]
    class_rule: dict[str, Any]
    dropped: dict[str, dict[str, int]]
    counts: dict[str, int]
    provenance: dict[str, Any]
    samples: dict[str, NDArray[np.float64]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: no NaN, no arrays."""
        return {
            "card": self.card.model_dump(exclude_none=True),
            "scores": {name: score.to_dict() for name, score in self.scores.items()},
            "without_ignoring": self.without_ignoring,
            "classes": self.classes,
            "class_rule": self.class_rule,
            "dropped": self.dropped,
            "counts": self.counts,
            "provenance": self.provenance,
        }

    def write(self, path: Path) -> None:
        """Write :meth:`to_dict` as JSON."""
        write_json(path, self.to_dict())


def score(
    truth: Truth,
    submission: Submission,
    *,
    slice: str = "all",
    resamples: int = 1000,
    seed: int = 0,
    class_rule: ClassRule | None = None,
) -> ScoreResult:
    """Compute every metric with its interval.

    Matching is done once: a resample draws split units, and every score is a function of sums over units or
    of rows that keep their score and outcome. Only average precision, AUROC and the recovered cost must run
    through the distinct scores of a resample.

    Args:
        truth: A whole split.
        submission: Its rows may lie in any trace of the split.
        slice: Traces to score, see :meth:`Truth.slice`.
        resamples: Of the bootstrap over split units, stratified by task (tasks of a single unit count as
            one). Without any, and for a single unit, there are no intervals.
        seed: Of the bootstrap. Results with equal truth, seed and resamples are paired.
        class_rule: Which patterns macro scores average over.

    Raises:
        UserError: The submission names unknown traces, patterns or windows, or the slice is unknown or empty.
    """
    if not 0 <= resamples <= MAX_RESAMPLES:
        raise UserError(f"{resamples} resamples; possible: 0 to {MAX_RESAMPLES}")
    class_rule = class_rule or ClassRule()
    rows = rows_of(submission.detections, truth)
    part = truth.slice(slice)
    if not part.included.any():
        raise UserError(f"{part.name} has no traces to score")
    classes, how = class_rule.apply(part)
    evidence = Evidence(
        truth=part,
        rows=rows.where(part.included[rows.trace]),
        window_rows=window_rows_of(submission.window_scores, truth, part),
        threshold=submission.card.threshold,
        classes=classes,
    )
    present = np.unique(part.unit[part.included])
    draws = resamples if len(present) > 1 else 0  # of one unit there is no spread
    weights = np.zeros((len(part.units), draws))
    weights[present] = resample(pool_singletons(part.task_of_unit[present]), draws, seed)
    every = whole(len(part.units))

    scores: dict[str, Score] = {}
    samples: dict[str, NDArray[np.float64]] = {}
    for metric in METRICS:
        statistic = metric.compute(evidence)
        plain, drawn = statistic(every), statistic(weights)
        by_pattern = {
            part.patterns[pattern]: _score(plain[row], drawn[row])
            for row, pattern in enumerate(metric.classes(evidence).tolist())
        }
        samples[metric.name] = metric.total(drawn)
        scores[metric.name] = _score(metric.total(plain), samples[metric.name], by_pattern)

    strict = evidence.without_ignoring()
    return ScoreResult(
        card=submission.card,
        scores=scores,
        without_ignoring={m.name: _number(m.total(m.compute(strict)(every))) for m in METRICS},
        classes={
            "local": [part.patterns[i] for i in evidence.local_classes],
            "step": [part.patterns[i] for i in evidence.step_classes],
        },
        class_rule={
            "min_instances": class_rule.min_instances,
            "min_units": class_rule.min_units,
            **how,
        },
        dropped=dropped_rows(evidence),
        counts={
            "traces": int(part.included.sum()),
            "clean_traces": int(part.good.sum()),
            "split_units": len(present),
            "windows": len(part.windows.trace),
            "segments": len(part.segments.trace),
            "ignored_segments": len(part.ignored.trace),
            "rows": len(evidence.rows),
            "reported_rows": len(evidence.reported),
            "window_rows": len(evidence.window_rows.window),
        },
        provenance={
            "torchtraceap": __version__,
            "split": part.name,
            "schema_version": SCHEMA_VERSION,
            "labels_sha256": part.fingerprint,
            "seed": seed,
            "resamples": resamples,
            "level": LEVEL,
        },
        samples=samples,
    )


@dataclass(frozen=True)
class Difference:
    """First minus second, with the bounds of its 95 % interval.

    ``better`` is the share of resamples in which the first is better (in the metric's direction), ties half.
    """

    value: float | None
    low: float | None
    high: float | None
    better: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "better": self.better}


def compare(first: ScoreResult, second: ScoreResult) -> dict[str, Difference]:
    """Differences of all metrics, taken resample by resample.

    Raises:
        UserError: The two were not scored on the same labels, classes and resamples.
    """
    for name in ("labels_sha256", "split", "seed", "resamples"):
        one, other = first.provenance[name], second.provenance[name]
        if one != other:
            raise UserError(f"the two results differ in {name} ({one} and {other}); score both alike")
    if first.classes != second.classes:
        raise UserError("the two results average over different classes; score both by the same rule")
    differences: dict[str, Difference] = {}
    for name, samples in first.samples.items():
        a, b = first.scores[name].value, second.scores[name].value
        drawn = samples - second.samples[name]
        drawn = drawn[np.isfinite(drawn)]
        sign = 1 if METRIC_BY_NAME[name].higher_is_better else -1
        bounds = interval(drawn, LEVEL)
        differences[name] = Difference(
            value=None if a is None or b is None else a - b,
            low=bounds and bounds[0],
            high=bounds and bounds[1],
            better=float((sign * drawn > 0).mean() + 0.5 * (drawn == 0).mean()) if len(drawn) else None,
        )
    return differences


def write_json(path: Path, content: object) -> None:
    """Write indented JSON, as a whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _score(
    plain: NDArray[np.float64], drawn: NDArray[np.float64], by_pattern: dict[str, Score] | None = None
) -> Score:
    bounds = interval(drawn, LEVEL)
    return Score(
        value=_number(plain), low=bounds and bounds[0], high=bounds and bounds[1], by_pattern=by_pattern or {}
    )


def _number(plain: NDArray[np.float64]) -> float | None:
    value = float(plain[0])
    return value if math.isfinite(value) else None
