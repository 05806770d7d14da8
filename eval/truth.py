"""What is true of a split's traces, as arrays of numbers: everything the scorer needs and nothing more.

Events are never read. Traces, patterns, lane classes and units are indices; ``group`` numbers the triples
(trace, lane class, pattern), within which rows and segments are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchtraceap.dataset import schema
from torchtraceap.dataset.parquet import read_table, split_files
from torchtraceap.dataset.windows import WINDOWS
from torchtraceap.errors import UserError
from torchtraceap.eval.intervals import Ints, Line
from torchtraceap.eval.submission import codes
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import LANE_CLASSES, QUALITIES, Scope

Bools = NDArray[np.bool_]

TRACE_COLUMNS: Final = (
    "trace_id", "task", "backbone_family", "split_unit", "hardware_id", "quality", "exhaustive", "instances",
)  # fmt: skip
SEGMENT_COLUMNS: Final = (
    "trace_id", "pattern", "source", "state", "lane_class", "step", "start_ns", "end_ns", "cost_ms",
)  # fmt: skip
WINDOW_COLUMNS: Final = (
    "trace_id", "window", "start_ns", "end_ns", "step",
    "cpu_patterns", "gpu_patterns", "cpu_ignored", "gpu_ignored",
)  # fmt: skip


@dataclass(frozen=True)
class Segments:
    """Parallel arrays sorted by group, start and end; ``start`` and ``end`` lie on the truth's line."""

    trace: Ints
    pattern: Ints
    group: Ints
    step: Ints
    start: Ints
    end: Ints
    cost_ms: NDArray[np.float64]

    def where(self, keep: Bools | Ints) -> Segments:
        return Segments(*(getattr(self, name)[keep] for name in Segments.__dataclass_fields__))


@dataclass(frozen=True)
class Windows:
    """Parallel arrays sorted by trace and start; times on the trace's clock.

    ``positive`` and ``ignored`` have the shape (windows, lane classes, patterns).
    """

    trace: Ints
    window: Ints
    start: Ints
    end: Ints
    step: Ints
    positive: Bools
    ignored: Bools

    def where(self, keep: Bools | Ints) -> Windows:
        return Windows(*(getattr(self, name)[keep] for name in Windows.__dataclass_fields__))


@dataclass(frozen=True)
class Truth:
    """Labels of the traces of a split.

    Attributes:
        patterns: Names of the whole catalogue, sorted.
        local: Which of them have local scope (the others have step scope), shape (patterns,).
        trace_ids: Of all traces, sorted.
        included: Traces of the slice that is scored; rows in the others are known and left out.
        good: Clean traces.
        end_ns: Where each trace ends.
        unit, units: Split unit of each trace, and their names, sorted.
        task_of_unit: Stratum of the bootstrap: the most frequent task of the unit's traces.
        costly: Pairs (trace, pattern) with a costly instance that is not native, shape (traces, patterns).
        uncertain: Pairs with an undecided or native instance.
        exhaustive: Pairs of which every instance is known.
        labels: Groups of trace attributes that slices are made of.
        segments: Costly ones.
        ignored: Undecided and native ones. All others, benign ones too, are negatives.
        windows: With their labels.
        name: Of the split and slice.
    """

    patterns: tuple[str, ...]
    local: Bools
    trace_ids: tuple[str, ...]
    included: Bools
    good: Bools
    end_ns: Ints
    unit: Ints
    units: tuple[str, ...]
    task_of_unit: Ints
    costly: Bools
    uncertain: Bools
    exhaustive: Bools
    labels: Mapping[str, Bools]
    segments: Segments
    ignored: Segments
    windows: Windows
    name: str = "test"

    @classmethod
    def load(cls, dataset: Path, split: str = "test") -> Truth:
        """Read the labels of a data set folder (README.md and data/).

        Raises:
            UserError: Files of the split are missing or unreadable, or its labels are withheld.
        """

        def files(config: str) -> list[Path]:
            return split_files(dataset, config, split)

        traces = read_table(files("traces"), schema.TRACES, list(TRACE_COLUMNS))
        learnt_from = sorted((dataset / "data").glob("traces-train-*.parquet"))
        seen = read_table(learnt_from, schema.TRACES, ["backbone_family"])
        truth = cls.from_tables(
            traces,
            read_table(files("segments"), schema.SEGMENTS, list(SEGMENT_COLUMNS)),
            read_table(files("windows"), WINDOWS, list(WINDOW_COLUMNS)),
            name=split,
        )
        families = set(seen["backbone_family"].to_pylist())
        new = np.array([family not in families for family in _column(traces, "backbone_family")], dtype=bool)
        order = np.argsort(np.array(_column(traces, "trace_id"), dtype=np.str_), kind="stable")
        return replace(truth, labels={**truth.labels, "unseen_backbone": new[order]})

    @classmethod
    def from_tables(
        cls,
        traces: pa.Table,
        segments: pa.Table,
        windows: pa.Table,
        *,
        catalogue: Mapping[str, Scope] | None = None,
        heldout: frozenset[tuple[str, str]] | None = None,
        name: str = "test",
    ) -> Truth:
        """Build from tables in memory.

        Args:
            traces: Columns ``TRACE_COLUMNS``.
            segments: Columns ``SEGMENT_COLUMNS``.
            windows: Columns ``WINDOW_COLUMNS``.
            catalogue: Scope of every pattern; the registry's by default.
            heldout: Pairs (pattern, variant) that train and validation never show; the registry's by default.
            name: Of the split.

        Raises:
            UserError: A trace appears twice, or a row names an unknown trace or pattern.
        """
        scopes = {pattern.id: pattern.scope for pattern in PATTERNS} if catalogue is None else catalogue
        if heldout is None:
            heldout = frozenset((p.id, v.name) for p in PATTERNS for v in p.variants if v.heldout)
        patterns = tuple(sorted(scopes))
        pattern_of = {pattern: index for index, pattern in enumerate(patterns)}
        rows = sorted(traces.select(TRACE_COLUMNS[:-2]).to_pylist(), key=lambda row: row["trace_id"])
        labels_of = {
            str(row["trace_id"]): (row["exhaustive"] or [], row["instances"])
            for row in traces.select(["trace_id", *TRACE_COLUMNS[-2:]]).to_pylist()
        }
        withheld = [row["trace_id"] for row in rows if row["quality"] not in QUALITIES]
        if withheld:
            raise UserError(
                f"{name}: the labels of trace {withheld[0]} are withheld; only their keeper can score"
            )
        ids = tuple(str(row["trace_id"]) for row in rows)
        if len(labels_of) != len(ids):
            raise UserError(f"{name}: a trace appears twice")
        units = tuple(sorted({str(row["split_unit"]) for row in rows}))
        unit_of = {unit: index for index, unit in enumerate(units)}
        unit = np.array([unit_of[str(row["split_unit"])] for row in rows], dtype=np.int64)

        shape = (len(ids), len(patterns))
        costly, uncertain, exhaustive = (np.zeros(shape, dtype=bool) for _ in range(3))
        headline, unseen_variant = np.ones(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
        for trace, trace_id in enumerate(ids):
            known, instances = labels_of[trace_id]
            for pattern in known:
                if pattern in pattern_of:
                    exhaustive[trace, pattern_of[pattern]] = True
            columns = ("pattern", "variant", "source", "state", "every_step")
            for pattern, variant, source, state, every_step in zip(
                *(instances[column] for column in columns), strict=True
            ):
                index = _index(pattern_of, pattern, f"{name}: trace {trace_id}: pattern")
                if source == "native" or state == "undecided":
                    uncertain[trace, index] = True
                elif state == "costly":
                    costly[trace, index] = True
                    headline[trace] &= bool(every_step)
                    unseen_variant[trace] |= (pattern, variant) in heldout
        good = np.array([row["quality"] == "good" for row in rows], dtype=bool)
        labels = {"headline": headline, "unseen_variant": unseen_variant | good}
        for hardware in sorted({str(row["hardware_id"]) for row in rows}):
            labels[f"hardware:{hardware}"] = np.array([row["hardware_id"] == hardware for row in rows])

        true_windows = _windows(windows, ids, patterns, name)
        segment_trace = _codes(segments["trace_id"], ids, f"{name}: segments: trace")
        end_ns = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(end_ns, true_windows.trace, true_windows.end)
        np.maximum.at(end_ns, segment_trace, segments["end_ns"].to_numpy())
        positives, ignored = _segments(segments, segment_trace, patterns, end_ns, name)
        return cls(
            patterns=patterns,
            local=np.array([scopes[pattern] == "local" for pattern in patterns], dtype=bool),
            trace_ids=ids,
            included=np.ones(len(ids), dtype=bool),
            good=good,
            end_ns=end_ns,
            unit=unit,
            units=units,
            task_of_unit=_most_frequent_task(unit, [str(row["task"]) for row in rows], len(units)),
            costly=costly,
            uncertain=uncertain,
            exhaustive=exhaustive,
            labels=labels,
            segments=positives,
            ignored=ignored,
            windows=true_windows,
            name=name,
        )

    @cached_property
    def line(self) -> Line:
        """A stretch for each group (trace, lane class, pattern)."""
        return _line(self.end_ns, len(self.patterns))

    @cached_property
    def has_steps(self) -> Bools:
        """Whether a trace has profiled steps, shape (traces,)."""
        has_steps = np.zeros(len(self.trace_ids), dtype=bool)
        has_steps[self.windows.trace[self.windows.step >= 0]] = True
        return has_steps

    @property
    def groups(self) -> int:
        return len(self.trace_ids) * len(LANE_CLASSES) * len(self.patterns)

    def group(self, trace: Ints, lane: Ints, pattern: Ints) -> Ints:
        return _group(trace, lane, pattern, len(self.patterns))

    @property
    def slices(self) -> list[str]:
        """Names that :meth:`slice` knows."""
        return ["all", *self.labels]

    def slice(self, name: str) -> Truth:
        """Only some traces.

        ``all``; ``headline`` (every costly instance acts in all steps); ``unseen_variant`` (an instance of a
        variant that is kept out of train, and all clean traces); ``unseen_backbone`` (backbone families that
        train lacks); ``hardware:<id>``.

        Raises:
            UserError: No such slice, or it is empty.
        """
        if name == "all":
            return self
        if name not in self.labels:
            raise UserError(f"unknown slice {name!r}; possible: {', '.join(self.slices)}")
        keep = self.labels[name]
        if not keep.any():
            raise UserError(
                f"slice {name!r} of {self.name} has no traces; possible: {', '.join(self.slices)}"
            )
        return replace(
            self,
            included=keep,
            good=self.good & keep,
            costly=self.costly & keep[:, None],
            uncertain=self.uncertain & keep[:, None],
            segments=self.segments.where(keep[self.segments.trace]),
            ignored=self.ignored.where(keep[self.ignored.trace]),
            windows=self.windows.where(keep[self.windows.trace]),
            name=f"{self.name}/{name}",
        )

    def without_ignoring(self) -> Truth:
        """As if nothing were uncertain: ignored segments are negatives, and every instance is known."""
        nothing = np.zeros_like(self.uncertain)
        return replace(
            self,
            uncertain=nothing,
            exhaustive=~nothing,
            ignored=self.ignored.where(np.zeros(len(self.ignored.trace), dtype=bool)),
            windows=replace(self.windows, ignored=np.zeros_like(self.windows.ignored)),
        )

    def by_unit(self, trace: Ints, amount: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Sum over the units of what belongs to traces, shape (units,)."""
        return np.bincount(self.unit[trace], weights=amount, minlength=len(self.units)).astype(float)

    def by_class_and_unit(
        self, trace: Ints, pattern: Ints, amount: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Sums of what belongs to pairs of a trace and a pattern, shape (patterns, units)."""
        size = len(self.units)
        sums = np.bincount(
            pattern * size + self.unit[trace], weights=amount, minlength=len(self.patterns) * size
        )
        return sums.astype(float).reshape(len(self.patterns), size)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the labels, so that two results are known to rest on the same truth."""
        digest = hashlib.sha256()
        digest.update("\0".join([*self.patterns, "", *self.trace_ids, "", *self.units]).encode())
        for array in (
            self.included, self.good, self.end_ns, self.unit, self.task_of_unit, self.costly, self.uncertain,
            self.exhaustive,
        ):  # fmt: skip
            digest.update(np.ascontiguousarray(array).tobytes())
        for table in (self.segments, self.ignored, self.windows):
            for name in table.__dataclass_fields__:
                digest.update(np.ascontiguousarray(getattr(table, name)).tobytes())
        return digest.hexdigest()


def _column(table: pa.Table, name: str) -> list[str]:
    return cast(list[str], table[name].to_pylist())


def _index(position: Mapping[str, int], name: str, what: str) -> int:
    if name not in position:
        raise UserError(f"{what} {name!r} is unknown; possible: {', '.join(position)}")
    return position[name]


def _codes(column: pa.ChunkedArray, names: tuple[str, ...], what: str) -> Ints:
    found = codes(column, names)
    if (found < 0).any():
        raise UserError(f"{what} {column[int(np.argmin(found))].as_py()!r} is unknown")
    return found


def _group(trace: Ints, lane: Ints, pattern: Ints, patterns: int) -> Ints:
    return (trace * len(LANE_CLASSES) + lane) * patterns + pattern


def _line(end_ns: Ints, patterns: int) -> Line:
    return Line.of(np.repeat(end_ns, len(LANE_CLASSES) * patterns))


def _segments(
    table: pa.Table, trace: Ints, patterns: tuple[str, ...], end_ns: Ints, name: str
) -> tuple[Segments, Segments]:
    pattern = _codes(table["pattern"], patterns, f"{name}: segments: pattern")
    lane = _codes(table["lane_class"], LANE_CLASSES, f"{name}: segments: lane class")
    native = codes(table["source"], ("native",)) == 0
    state = codes(table["state"], ("costly", "undecided"))
    group = _group(trace, lane, pattern, len(patterns))
    line = _line(end_ns, len(patterns))
    cost = np.nan_to_num(table["cost_ms"].to_numpy().astype(float), nan=0.0)
    every = Segments(
        trace=trace,
        pattern=pattern,
        group=group,
        step=table["step"].to_numpy().astype(np.int64),
        start=line.place(group, table["start_ns"].to_numpy()),
        end=line.place(group, table["end_ns"].to_numpy()),
        cost_ms=np.maximum(cost, 0.0),
    )
    order = np.lexsort((every.end, every.start))
    keep_positive, keep_ignored = (state == 0) & ~native, (state == 1) | native
    positive = every.where(order[keep_positive[order]])
    return positive, every.where(order[keep_ignored[order]])


def _windows(table: pa.Table, ids: tuple[str, ...], patterns: tuple[str, ...], name: str) -> Windows:
    trace = _codes(table["trace_id"], ids, f"{name}: windows: trace")

    def labels(*columns: str) -> Bools:
        marks = np.zeros((len(trace), len(LANE_CLASSES), len(patterns)), dtype=bool)
        for lane, column in enumerate(columns):
            lists = table[column].combine_chunks()
            count = np.array(
                [len(row) if row is not None else 0 for row in lists.to_pylist()], dtype=np.int64
            )
            flat = pa.chunked_array([lists.flatten().cast(pa.string())])
            row = np.repeat(np.arange(len(trace)), count)
            marks[row, lane, _codes(flat, patterns, f"{name}: windows: pattern")] = True
        return marks

    every = Windows(
        trace=trace,
        window=table["window"].to_numpy().astype(np.int64),
        start=table["start_ns"].to_numpy(),
        end=table["end_ns"].to_numpy(),
        step=table["step"].to_numpy().astype(np.int64),
        positive=labels("cpu_patterns", "gpu_patterns"),
        ignored=labels("cpu_ignored", "gpu_ignored"),
    )
    return every.where(np.lexsort((every.start, every.trace)))


def _most_frequent_task(unit: Ints, task: list[str], units: int) -> Ints:
    names, code = np.unique(np.array(task, dtype=np.str_), return_inverse=True)
    counts = np.zeros((units, len(names)), dtype=np.int64)
    np.add.at(counts, (unit, code), 1)
    return counts.argmax(axis=1) if len(names) else np.zeros(units, dtype=np.int64)
