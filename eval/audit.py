"""The leak audit: can a classifier tell from published traces where an injector was at work?

It is given the examples that ``collect/audit.py`` gathers (see ``dataset/sites.py``) and has two chances:

- ``off``: places that do not act, in traces as they are published, against the same places in traces of a
  loop in which nothing was ever installed;
- ``selected``: places drawn to act against places that were not, with bodies that do nothing.

It is a boosting of trees, tested on families of models that it was not trained on. AUROC is taken within each
family and averaged over them, so that a difference of level between families neither helps nor hides. The
interval is a bootstrap over families, as examples of one family are not independent. The audit passes if the
upper end is at most :data:`LIMIT` for both arms.

Beside it, without a verdict: what a classifier learns of a data set from the metadata of its traces, their
counts of events and their lengths alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.stats import rankdata

from torchtraceap.dataset.parquet import read_table, read_traces, split_files
from torchtraceap.dataset.schema import ALL_SPLITS, DETECTOR_META
from torchtraceap.dataset.sites import EXAMPLES, FEATURES
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError

LIMIT = 0.55
LEAST_EXAMPLES = 1000
"""Of each class of an arm."""

LEAST_FAMILIES = 5
"""With fewer, resamples of families say little of the spread."""

LEAST_TRACES = 10
"""Of each class, in at least :data:`LEAST_UNITS` split units, for a row on metadata."""

LEAST_UNITS = 4

FOLDS = 5
RESAMPLES = 2000
_PLACE = ("model", "mode", "step", "enter", "leave")
_NAMES = 60  # of boundaries, the most frequent; the others are one category

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Arm:
    """What came of one question.

    ``telling`` names the columns that the classifier's score depends on most, with the AUROC that is lost
    when a column is shuffled.
    """

    name: str
    positives: int
    negatives: int
    families: int
    auroc: float
    low: float
    high: float
    telling: dict[str, float]
    passed: bool
    reason: str


@dataclass(frozen=True)
class MetadataRow:
    """What a classifier can tell of traces from columns of the group ``given`` alone."""

    question: str
    given: str
    positives: int
    negatives: int
    units: int
    auroc: float
    low: float
    high: float
    telling: dict[str, float]


def audit_examples(paths: Iterable[Path], *, seed: int = 0) -> list[Arm]:
    """Both arms of the audit.

    Args:
        paths: Files of examples.
        seed: Of folds, trees and resamples.

    Raises:
        UserError: A file is no file of examples.
    """
    table = read_table(list(paths), EXAMPLES)
    selected = table.column("selected").to_numpy()
    off = selected == 0
    features, names = _example_matrix(table)
    family = table.column("family").to_numpy(zero_copy_only=False).astype(str)
    arms = []
    for name, label, asked in (
        ("off", off, off | _twins(table, off, seed)),
        ("selected", selected == 1, selected >= 0),
    ):
        arms.append(_judge(name, features[asked], names, label[asked], family[asked], seed))
    return arms


def _twins(table: pa.Table, off: BoolArray, seed: int) -> BoolArray:
    """As many bare examples of each place as there are of it off.

    With more, a place that several candidates share would be told by being seldom off.
    """
    place = list(zip(*(table.column(name).to_pylist() for name in _PLACE), strict=True))
    bare = table.column("arm").to_numpy(zero_copy_only=False) == "bare"
    missing = Counter(place[row] for row in np.flatnonzero(off))
    twins = np.zeros(len(table), dtype=bool)
    for row in np.random.default_rng(seed).permutation(np.flatnonzero(bare)):
        twins[row] = missing[place[row]] > 0
        missing[place[row]] -= 1
    return twins


def _judge(
    name: str, features: FloatArray, names: Sequence[str], label: BoolArray, family: NDArray[Any], seed: int
) -> Arm:
    positives, negatives = int(label.sum()), int((~label).sum())
    _, group = np.unique(family, return_inverse=True)
    families = len(np.unique(group))
    counts = {"positives": positives, "negatives": negatives, "families": families}
    few = min(positives, negatives) < LEAST_EXAMPLES
    if few or families < LEAST_FAMILIES:
        reason = (
            f"at least {LEAST_EXAMPLES} examples of each kind from {LEAST_FAMILIES} families are needed; "
            f"there are {min(positives, negatives)} from {families}"
        )
        return Arm(
            name, **counts, auroc=np.nan, low=np.nan, high=np.nan, telling={}, passed=False, reason=reason
        )
    scores, telling = _cross_validated(features, names, label, group, seed)
    auroc, low, high = grouped_auroc(scores, label, group, seed=seed)
    passed = high <= LIMIT
    reason = f"upper end of the 95 % interval {'at most' if passed else 'above'} {LIMIT}"
    return Arm(name, **counts, auroc=auroc, low=low, high=high, telling=telling, passed=passed, reason=reason)


def grouped_auroc(
    scores: FloatArray, label: BoolArray, group: IntArray, *, seed: int
) -> tuple[float, float, float]:
    """Mean over groups of the AUROC within each, and its 95 % interval by bootstrap over groups.

    Groups of one class only have no AUROC and are left out; NaN if none is left.
    """
    within = np.array([auroc(scores[group == g], label[group == g]) for g in np.unique(group)])
    within = within[np.isfinite(within)]
    if not len(within):
        return np.nan, np.nan, np.nan
    drawn = np.random.default_rng(seed).integers(0, len(within), (RESAMPLES, len(within)))
    low, high = np.quantile(within[drawn].mean(axis=1), [0.025, 0.975])
    return float(within.mean()), float(low), float(high)


def auroc(scores: FloatArray, label: BoolArray) -> float:
    """Chance that a positive has the higher score, ties half; NaN if a class is missing."""
    positives, negatives = int(label.sum()), int((~label).sum())
    if not positives or not negatives:
        return float("nan")
    ranks = float(rankdata(scores)[label].sum())
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives)


def _cross_validated(
    features: FloatArray, names: Sequence[str], label: BoolArray, group: IntArray, seed: int
) -> tuple[FloatArray, dict[str, float]]:
    """Scores of each example by a classifier that saw none of its group, and what these depend on.

    Columns whose name starts with ``=`` are categories.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedGroupKFold
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(seed)
    folds = StratifiedGroupKFold(min(FOLDS, len(np.unique(group))), shuffle=True, random_state=seed)
    scores = np.full(len(label), 0.0)
    lost = np.zeros(len(names))
    for train, test in folds.split(features, label, group):
        if label[train].all() or not label[train].any():
            continue
        # The trees cannot take a column without any value: what a GPU did, on a CPU.
        features = np.where(np.isfinite(features[train]).any(axis=0), features, 0.0)
        model = HistGradientBoostingClassifier(
            max_iter=60,
            max_leaf_nodes=8,
            min_samples_leaf=10,
            categorical_features=[name.startswith("=") for name in names],
            early_stopping=False,
            random_state=seed,
        )
        with threadpool_limits(1):  # threads that wait for each other took longer than the few rows need
            model.fit(features[train], label[train])
            scores[test] = model.decision_function(features[test])
            base = auroc(scores[test], label[test])
            for column in range(len(names)):
                shuffled = features[test].copy()
                rng.shuffle(shuffled[:, column])
                change = base - auroc(model.decision_function(shuffled), label[test])
                lost[column] += np.nan_to_num(change) * len(test) / len(label)
    most = np.argsort(-lost, kind="stable")[:3]
    return scores, {names[i].lstrip("="): float(lost[i]) for i in most if lost[i] > 0.001}


def _example_matrix(table: pa.Table) -> tuple[FloatArray, list[str]]:
    columns = {name: table.column(name).to_numpy().astype(np.float64) for name in FEATURES}
    for name in ("before", "after"):
        columns[f"={name}"] = _categories(table.column(name).to_pylist())
    return np.stack(list(columns.values()), axis=1) if len(table) else np.empty((0, 0)), list(columns)


def _categories(values: Sequence[str]) -> FloatArray:
    """A number for each of the most frequent values, from the most frequent on; one for all others."""
    distinct, inverse, count = np.unique(np.array(values), return_inverse=True, return_counts=True)
    rank = np.empty(len(distinct))
    rank[np.argsort(-count, kind="stable")] = np.arange(len(distinct))
    return np.minimum(rank, _NAMES)[inverse]


# -- what metadata, counts and lengths tell --------------------------------------------------------------


def audit_metadata(dataset: Path, *, seed: int = 0) -> list[MetadataRow]:
    """What a classifier tells of the traces of a data set from metadata, counts of events and lengths.

    The questions: is the trace bad or good; for each pattern, is a costly instance of it in the trace or is
    the trace good; and, of good traces alone, does it hold a look-alike. The last is to compare with: whoever
    can answer it sees that *something* was added and not that it does harm. The classifier is tested on split
    units that it was not trained on. Questions with too few traces are left out.

    Args:
        dataset: Folder that ``traceap build`` made.
        seed: Of folds, trees and resamples.

    Raises:
        UserError: The folder holds no traces.
    """
    facts = [_facts(record) for record in read_traces(split_files(dataset, "traces", ALL_SPLITS))]
    if not facts:
        raise UserError(f"{dataset} holds no traces")
    rows = []
    for question, label, asked in _questions(facts):
        for given in ("metadata", "counts and lengths", "all"):
            columns = _columns_given(facts, given)
            features = np.stack(list(columns.values()), axis=1)[asked]
            _, group = np.unique([fact.unit for fact in facts], return_inverse=True)
            group, names = group[asked], list(columns)
            truth = label[asked]
            scores, telling = _cross_validated(features, names, truth, group, seed)
            # Few traces a unit, and often of one class: units are drawn, but ranks are taken over all.
            value, low, high = _pooled_auroc(scores, truth, group, seed=seed)
            rows.append(
                MetadataRow(
                    question, given, int(truth.sum()), int((~truth).sum()), len(np.unique(group)),
                    value, low, high, telling,
                )
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class _Facts:
    unit: str
    quality: str
    costly: frozenset[str]
    lookalike: bool
    meta: dict[str, Any]
    counts: dict[str, float]


def _facts(record: TraceRecord) -> _Facts:
    trace = record.trace
    steps = max(1, len(trace.step_bounds))
    gpu = int(trace.on_gpu.sum())
    return _Facts(
        unit=str(record.meta["split_unit"]),
        quality=record.quality,
        costly=frozenset(one.pattern for one in record.instances if one.state == "costly"),
        lookalike=any(one.source == "lookalike" for one in record.instances),
        meta={key: record.meta[key] for key in DETECTOR_META},
        counts={
            "events a step": len(trace) / steps,
            "CPU events a step": (len(trace) - gpu) / steps,
            "GPU events a step": gpu / steps,
            "GPU events a CPU event": gpu / max(1, len(trace) - gpu),
            "distinct ops": len(trace.ops),
            "threads": sum(lane.kind == "cpu" for lane in trace.lanes),
            "streams": sum(lane.kind == "gpu" for lane in trace.lanes),
            "ms a step": trace.duration_ns / steps / 1e6,
            "us an event": trace.duration_ns / max(1, len(trace)) / 1e3,
        },
    )


def _questions(facts: Sequence[_Facts]) -> Iterator[tuple[str, BoolArray, BoolArray]]:
    """Name, answer and which traces are asked, of each question that enough traces answer either way."""
    quality = np.array([fact.quality for fact in facts])
    unit = np.array([fact.unit for fact in facts])
    lookalike = np.array([fact.lookalike for fact in facts], dtype=bool)
    good, bad = quality == "good", quality == "bad"
    questions = [("bad", bad, bad | good), ("good, with a look-alike", good & lookalike, good)]
    for pattern in sorted(set().union(*(fact.costly for fact in facts))):
        has = np.array([pattern in fact.costly for fact in facts], dtype=bool)
        questions.append((pattern, has, has | good))
    for name, label, asked in questions:
        sides = [label & asked, ~label & asked]
        if all(side.sum() >= LEAST_TRACES and len(set(unit[side])) >= LEAST_UNITS for side in sides):
            yield name, label, asked


def _columns_given(facts: Sequence[_Facts], given: str) -> dict[str, FloatArray]:
    columns: dict[str, FloatArray] = {}
    if given != "counts and lengths":
        for key in DETECTOR_META:
            values = [fact.meta[key] for fact in facts]
            if isinstance(values[0], str):
                columns[f"={key}"] = _categories(values)
            else:
                columns[key] = np.array(values, dtype=np.float64)
    if given != "metadata":
        for key in facts[0].counts:
            columns[key] = np.array([fact.counts[key] for fact in facts], dtype=np.float64)
    return columns


def _pooled_auroc(
    scores: FloatArray, label: BoolArray, group: IntArray, *, seed: int
) -> tuple[float, float, float]:
    """AUROC over all traces, with a bootstrap over groups."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(group == g) for g in np.unique(group)]
    samples = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([members[g] for g in rng.integers(0, len(members), len(members))])
        samples.append(auroc(scores[rows], label[rows]))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return auroc(scores, label), float(low), float(high)


def to_dict(arms: Sequence[Arm], metadata: Sequence[MetadataRow]) -> dict[str, Any]:
    """The audit as JSON values."""
    return {
        "passed": bool(arms) and all(arm.passed for arm in arms),
        "limit": LIMIT,
        "interval": "95 %, bootstrap over families (arms) or split units (metadata)",
        "arms": [asdict(arm) for arm in arms],
        "metadata": [asdict(row) for row in metadata],
    }
