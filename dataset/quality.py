"""How good labels are, over collected shards: verdicts, costs, profiler, attribution, null trials, by regime.

The states are those of a release of the same shards, if it leaves no trace out: costly verdicts that may be
chance among all tests are undecided (labels/multiplicity.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from torchtraceap.dataset.attribution import violations
from torchtraceap.dataset.shards import CostTests, Differing, read_session, shards_of, traces_of
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.catalogue import grouped
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import Instance, State

BUSY = 0.8
"""If the GPU works for at least this share of a clean step without the profiler, it decides the step time."""

REGIMES = ("GPU-busy", "launch-bound", "CPU")
FEW_COSTLY = 0.3
"""A smaller costly share in GPU-busy workloads asks for an explanation."""


class PatternRow(msgspec.Struct, frozen=True):
    """One pattern, or its look-alikes, in one regime.

    An instance is counted once a workload, though a look-alike is in several of its traces. ``ratio`` is
    the median of the cost ratios. ``violations`` counts in all traces with the pattern. ``extra`` and
    ``missing`` are medians of the events by which a trace differs from its clean twin outside of all labels,
    over the traces with no other pattern, if there are any; ``differ`` is what differs most in them. A median
    of nothing is NaN.
    """

    regime: str
    pattern: str
    instances: int
    costly: int
    benign: int
    undecided: int
    ratio_of_costly: float
    ratio: float
    profiler_ratio: float
    violations: int
    extra: float
    missing: float
    differ: dict[str, int]
    models: int
    heldout: int


class NullRow(msgspec.Struct, frozen=True):
    """Clean against clean in one regime: the share called costly, and its exact 95 % interval."""

    regime: str
    trials: int
    costly: int
    share: float
    low: float
    high: float


class LabelQuality(msgspec.Struct, frozen=True):
    """All that is known of the labels of some runs."""

    traces: int
    tests: int
    demoted: int
    violations: list[str]
    patterns: list[PatternRow]
    lookalikes: list[PatternRow]
    nulls: list[NullRow]


class _Seen(msgspec.Struct):
    """An instance in a trace."""

    key: tuple[str, int]
    workload: str
    model: str
    instance: Instance
    profiler_ratio: float
    violations: int
    difference: Differing | None
    is_alone: bool


def regime(gpu_busy: float, profiler_ratio: float) -> str:
    """What decides the step time of a workload, from two columns of its clean trace.

    The profiler slows the host and hardly the GPU, so that a trace shows the GPU less busy than it is
    without: by the factor by which the profiler lengthened the step.

    Args:
        gpu_busy: Share of the profiled steps in which the GPU worked; NaN without one.
        profiler_ratio: Step time with the profiler over that without.
    """
    if math.isnan(gpu_busy):
        return "CPU"
    return "GPU-busy" if gpu_busy * profiler_ratio >= BUSY else "launch-bound"


def _number(record: TraceRecord, column: str) -> float:
    return float(str(record.meta[column]))


def measure_quality(runs: Sequence[str | Path]) -> LabelQuality:
    """Read all shards of ``runs``.

    Raises:
        UserError: A run has no shards; or a shard is broken, has no clean trace or a pattern or variant that
            the catalogue has not.
    """
    from torchtraceap.labels.cost import Look  # scipy takes a second to import

    tests, traces, broken = CostTests(), 0, []
    seen: dict[str, list[_Seen]] = defaultdict(list)  # by regime
    nulls: dict[str, list[State]] = defaultdict(list)
    for shard in shards_of(runs):
        session = read_session(shard)
        differences = {one.trace_id: one for one in session.differences}
        found: list[_Seen] = []
        clean: list[tuple[float, float]] = []
        for record in traces_of(shard):
            where = f"{shard}: trace {record.trace_id}"
            tests.add(record, session.measurements, where)
            try:
                problems = [f"{where}: {problem}" for problem in violations(record)]
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            broken += problems
            traces += 1
            found += _instances(record, len(problems), differences.get(record.trace_id))
            if all(one.source != "injected" for one in record.instances):
                clean.append((_number(record, "gpu_busy"), _number(record, "profiler_ratio")))
        broken += [f"{shard}: {problem}" for problem in session.unpaired]
        if not clean:
            raise UserError(f"{shard} has no clean trace, which says how busy its GPU is")
        where_to = regime(*np.mean(clean, axis=0).tolist())
        seen[where_to] += found
        try:
            nulls[where_to] += [one.state for one in msgspec.convert(session.null_trials, list[Look])]
        except msgspec.ValidationError as error:
            raise UserError(f"{shard}: a null trial of its session is broken: {error}") from None
    demoted = tests.demoted()
    return LabelQuality(
        traces=traces,
        tests=tests.count,
        demoted=len(demoted),
        violations=broken,
        patterns=list(_rows(seen, "injected", demoted)),
        lookalikes=list(_rows(seen, "lookalike", demoted)),
        nulls=[_null_row(name, nulls[name]) for name in REGIMES if nulls[name]],
    )


def exact_interval(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share."""
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _instances(record: TraceRecord, problems: int, difference: Differing | None) -> Iterator[_Seen]:
    for index, instance in enumerate(record.instances):
        yield _Seen(
            key=(record.trace_id, index),
            workload=str(record.meta["pair_id"]),
            model=str(record.meta["model"]),
            instance=instance,
            profiler_ratio=_number(record, "profiler_ratio"),
            violations=problems,
            difference=difference,
            is_alone=sum(one.source == "injected" for one in record.instances) == 1,
        )


def _rows(
    seen: dict[str, list[_Seen]], source: str, demoted: frozenset[tuple[str, int]]
) -> Iterator[PatternRow]:
    order = [pattern.id for _, patterns in grouped() for pattern in patterns]
    for where in REGIMES:
        of_source = [one for one in seen[where] if one.instance.source == source]
        for pattern in order:
            if ours := [one for one in of_source if one.instance.pattern == pattern]:
                yield _row(where, pattern, ours, demoted)


def _row(where: str, pattern: str, seen: list[_Seen], demoted: frozenset[tuple[str, int]]) -> PatternRow:
    once = {(one.workload, one.instance.variant): one for one in seen}.values()
    states = Counter("undecided" if one.key in demoted else one.instance.state for one in once)
    costly = [one for one in once if one.instance.state == "costly" and one.key not in demoted]
    telling = [one for one in seen if one.is_alone] or seen
    differences = [one.difference for one in telling if one.difference is not None]
    names: Counter[str] = Counter()
    for difference in differences:
        names.update(difference.names)
    return PatternRow(
        regime=where,
        pattern=pattern,
        instances=len(once),
        costly=states["costly"],
        benign=states["benign"],
        undecided=states["undecided"],
        ratio_of_costly=_median([one.instance.cost_ratio for one in costly]),
        ratio=_median([one.instance.cost_ratio for one in once]),
        profiler_ratio=_median([one.profiler_ratio for one in seen]),
        violations=sum(one.violations for one in seen),
        extra=_median([one.extra for one in differences]),
        missing=_median([one.missing for one in differences]),
        differ=dict(sorted(names.items(), key=lambda item: (-abs(item[1]), item[0]))[:5]),
        models=len({one.model for one in once}),
        heldout=sum(PATTERNS[pattern].variant(one.instance.variant).heldout for one in once),
    )


def _null_row(where: str, states: list[State]) -> NullRow:
    costly = states.count("costly")
    return NullRow(where, len(states), costly, costly / len(states), *exact_interval(costly, len(states)))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else math.nan
