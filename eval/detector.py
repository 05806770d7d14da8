"""What a detector is: it sees one trace at a time and says where which anti-pattern lies.

A new detector is one new file in eval/detectors/ that calls :func:`register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torchtraceap
from torchtraceap.dataset.parquet import read_group, read_table, row_groups, split_files
from torchtraceap.dataset.schema import DETECTOR_META, HARDWARE
from torchtraceap.dataset.trace import Trace, TraceRecord
from torchtraceap.eval.submission import Detection, Submission, SubmissionCard, WindowScore
from torchtraceap.parallel import HERE, Where, map_on
from torchtraceap.registry import Registry


@dataclass(frozen=True)
class TraceView:
    """What a detector may see of a trace.

    Built from a whitelist, so that labels, costs, pair ids and the plan cannot reach a detector by way of
    a column added later.

    Attributes:
        trace_id: Random; to be copied into the detections.
        trace: Lanes, ops and events.
        meta: The columns ``schema.DETECTOR_META`` as far as they are known.
        hardware: The row of the table ``hardware``, empty if unknown.
    """

    trace_id: str
    trace: Trace
    meta: dict[str, object] = field(default_factory=dict)
    hardware: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, record: TraceRecord, hardware: dict[str, object] | None = None) -> TraceView:
        """The part of a record that a detector may see."""
        meta = {name: record.meta[name] for name in DETECTOR_META if name in record.meta}
        return cls(record.trace_id, record.trace, meta, dict(hardware or {}))


class Detector(ABC):
    """Finds anti-patterns in a trace. It keeps nothing of one trace for the next."""

    name: str

    @abstractmethod
    def card(self) -> SubmissionCard:
        """What the detector says of itself, with its score threshold."""

    @abstractmethod
    def detect(self, view: TraceView) -> list[Detection]:
        """Where which anti-pattern lies. The scorer looks at the best 100 a lane class and pattern."""

    def window_scores(self, view: TraceView) -> list[WindowScore] | None:
        """Scores of the trace's windows; None leaves it to the scorer to take them from the detections."""
        return None


DETECTORS: Registry[Detector] = Registry("detector", Detector, "torchtraceap.eval.detectors")


def register(detector: Detector) -> Detector:
    """Add a detector under its name."""
    return DETECTORS.register(detector.name, detector)


def builtin_card(name: str, description: str, threshold: float) -> SubmissionCard:
    """The card of a detector that ships with this package and learns nothing."""
    return SubmissionCard(
        name=name,
        version=torchtraceap.__version__,
        description=description,
        threshold=threshold,
        trained_on="nothing",
    )


def run(
    detector: Detector,
    records: Iterable[TraceRecord],
    hardware: Mapping[str, dict[str, object]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Submission:
    """Let a detector loose on records, one trace at a time, and collect what it says.

    Args:
        detector: The detector.
        records: Labelled or not; the detector gets a :class:`TraceView` of each.
        hardware: Rows of the table ``hardware`` by ``hardware_id``.
        progress: Called after each trace with how many are done.

    Raises:
        UserError: The detector returned an impossible row.
    """
    found = []
    for done, record in enumerate(records, start=1):
        found.append(_found(detector, record, hardware or {}))
        if progress:
            progress(done)
    return _submission(detector, found)


Found = tuple[list[Detection], list[WindowScore] | None]
"""What a detector says of a trace."""


def _found(detector: Detector, record: TraceRecord, hardware: Mapping[str, dict[str, object]]) -> Found:
    view = TraceView.of(record, hardware.get(str(record.meta.get("hardware_id", ""))))
    return detector.detect(view), detector.window_scores(view)


def _submission(detector: Detector, found: Sequence[Found]) -> Submission:
    detections = [detection for of_trace, _ in found for detection in of_trace]
    scored = [scores for _, scores in found if scores is not None]
    window_scores = [score for scores in scored for score in scores] if scored else None
    return Submission.of(detector.card(), detections, window_scores)


def run_split(
    detector: Detector,
    dataset: Path,
    split: str,
    *,
    where: Where = HERE,
    progress: Callable[[int], None] | None = None,
) -> Submission:
    """Let a detector loose on a split of a dataset folder; see :func:`run`.

    Args:
        detector: The detector.
        dataset: The folder.
        split: One of its splits, or all.
        where: Processes that do the work; others find the detector under its name.
        progress: Called with how many traces are done.

    Raises:
        UserError: There is no such split or no such data, or the detector returned an impossible row.
    """
    traces = split_files(dataset, "traces", split)
    rows = read_table(sorted((dataset / "data").glob("hardware-*.parquet")), HARDWARE).to_pylist()
    hardware = {str(row["hardware_id"]): row for row in rows}
    groups = [(path.resolve(), group) for path, group in row_groups(traces)]
    done = 0
    found: list[Found] = []
    look = partial(_look, detector if where == HERE else detector.name, hardware)
    for of_group in map_on(where, look, groups):
        found += of_group
        done += len(of_group)
        if progress:
            progress(done)
    return _submission(detector, found)


def _look(
    detector: Detector | str, hardware: Mapping[str, dict[str, object]], group: tuple[Path, int]
) -> list[Found]:
    """What a detector, or the one of that name, says of the traces of a row group."""
    chosen = DETECTORS[detector] if isinstance(detector, str) else detector
    return [_found(chosen, record, hardware) for record in read_group(*group)]
