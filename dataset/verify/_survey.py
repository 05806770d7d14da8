"""Every trace without its events: little to read, and enough for all checks that are not about events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from torchtraceap.dataset import schema, splits
from torchtraceap.dataset.parquet import group_rows
from torchtraceap.dataset.rows import plain, structs
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.dataset.verify import _texts
from torchtraceap.errors import UserError
from torchtraceap.labels.types import Instance, Segment

COLUMNS = [name for name in schema.TRACES.names if name != "events"] + ["events.op"]


@dataclass(frozen=True)
class Seen:
    """What is known of a trace; of its trace ``record`` has the lanes alone.

    ``steps`` holds the names of its ProfilerSteps, ``markers`` and ``private`` what is wrong with its texts.
    """

    split: str
    path: Path
    group: int
    record: TraceRecord
    events: int
    signature: splits.Signature
    steps: list[str]
    markers: list[str]
    private: list[str]

    @property
    def trace_id(self) -> str:
        return self.record.trace_id

    @property
    def meta(self) -> dict[str, Any]:
        return self.record.meta


Surveyed = Seen | str
"""A trace, or why it cannot be read."""


def survey_group(item: tuple[str, Path, int]) -> list[Surveyed]:
    """The traces of a row group, given as split, file and number."""
    split, path, group = item
    try:
        return [_survey(row, split, path, group) for row in group_rows(path, group, COLUMNS)]
    except UserError as error:
        return [str(error)]


def _survey(row: dict[str, Any], split: str, path: Path, group: int) -> Surveyed:
    meta = {name: plain(row[name]) for name in schema.TRACE_META.names}
    where = f"trace {meta['trace_id']}"
    if unknown := [name for name, value in meta.items() if value is None]:
        return f"{where} has no value for {', '.join(unknown)}"
    try:
        lanes = structs(row["lanes"], schema.LANES, Lane)
        ops = structs(row["ops"], schema.OPS, Op)
        op_of_event = np.array(plain(row["events"]["op"]), dtype=np.int64)
        record = TraceRecord(
            trace=Trace(lanes, ops, _no_events()),
            meta=meta,
            instances=structs(row["instances"], schema.INSTANCES, Instance),
            segments=structs(row["segments"], schema.SEGMENTS_OF_TRACE, Segment),
            exhaustive=msgspec.convert(plain(row["exhaustive"]), list[str]),
        )
        clean = all(one.source != "injected" for one in record.instances)
        signature = splits.signature_of(ops, op_of_event) if clean else {}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return f"{where} does not follow the schema: {error}"
    if any(not 0 <= s.instance < len(record.instances) for s in record.segments):
        return f"{where}: a segment names an instance that does not exist"
    if any(not 0 <= s.lane < len(lanes) for s in record.segments):
        return f"{where}: a segment names a lane that does not exist"
    texts = list(_texts_of(record))
    record.trace = Trace(lanes, [], _no_events())  # operators of all traces would take most of the memory
    return Seen(
        split=split,
        path=path,
        group=group,
        record=record,
        events=len(op_of_event),
        signature=signature,
        steps=[op.name for op in ops if op.category == "user_annotation" and "ProfilerStep" in op.name],
        markers=list(_texts.markers(texts)),
        private=list(_texts.private(texts)),
    )


def _texts_of(record: TraceRecord) -> Iterator[str]:
    """Every text in a row."""
    for op in record.trace.ops:
        yield from (op.name, op.category, op.shapes, op.types, op.grid, op.block)
    yield from (lane.name for lane in record.trace.lanes)
    yield from (value for value in record.meta.values() if isinstance(value, str))
    yield from (text for one in record.instances for text in (one.pattern, one.variant))
    yield from record.exhaustive


def _no_events() -> Events:
    return Events(**{name: np.empty(0, dtype=kind) for name, kind in Events.DTYPES.items()})
