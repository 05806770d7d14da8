"""A record in memory as a row of the table ``traces``, and back; and as rows of the table ``segments``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from torchtraceap.dataset import schema
from torchtraceap.dataset.trace import Events, IntArray, Lane, Op, Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.types import Instance, Segment

T = TypeVar("T", bound=msgspec.Struct)

# Rows hold a reference as the distance back to the event that it names: the absolute indices of neighbours
# all differ and cost 5 times as much (benchmarks/storage.py).
_REFERENCES = ("parent", "launch", "forward")


def row_from_record(record: TraceRecord) -> dict[str, Any]:
    """The row of ``record``: event columns are numpy arrays, everything else plain Python.

    Raises:
        ValueError: ``record.meta`` is not exactly the columns of ``schema.TRACE_META``, or one is None.
        UserError: The trace or the labels break a promise.
    """
    missing = [name for name in schema.TRACE_META.names if record.meta.get(name) is None]
    unknown = sorted(record.meta.keys() - set(schema.TRACE_META.names))
    if missing or unknown:
        raise ValueError(f"meta of a trace lacks {missing} and has unknown {unknown}")
    _check(record)
    events: dict[str, IntArray] = {}
    for name, column in record.trace.events.arrays().items():
        if name in _REFERENCES:
            events[f"{name}_offset"] = _distance(column)
        else:
            events[name] = column
    return {
        **record.meta,
        "exhaustive": record.exhaustive,
        "lanes": _columns(record.trace.lanes, schema.LANES),
        "ops": _columns(record.trace.ops, schema.OPS),
        "events": events,
        "instances": _columns(record.instances, schema.INSTANCES),
        "segments": _columns(record.segments, schema.SEGMENTS_OF_TRACE),
    }


def record_from_row(row: Mapping[str, Any]) -> TraceRecord:
    """The record in a row of ``traces``.

    Args:
        row: A row of `datasets` (plain or ``with_format("numpy")``), or a mapping of column names to pyarrow
            scalars, whose event columns are then used without copying (and are read-only).

    Raises:
        UserError: A column is missing or holds what the schema forbids.
    """
    missing = [name for name in schema.TRACES.names if name not in row]
    if missing:
        raise UserError(f"A row of traces lacks the columns {', '.join(missing)}")
    meta: dict[str, object] = {name: plain(row[name]) for name in schema.TRACE_META.names}
    where = f"trace {meta['trace_id']}"
    if unknown := [name for name, value in meta.items() if value is None]:
        raise UserError(f"{where} has no value for {', '.join(unknown)}")
    try:
        events: dict[str, IntArray] = {}
        for name, kind in Events.DTYPES.items():
            if name in _REFERENCES:
                events[name] = _index(_integers(row["events"][f"{name}_offset"], np.dtype(kind)))
            else:
                events[name] = _integers(row["events"][name], np.dtype(kind))
        record = TraceRecord(
            trace=Trace(
                lanes=structs(row["lanes"], schema.LANES, Lane),
                ops=structs(row["ops"], schema.OPS, Op),
                events=Events(**events),
            ),
            meta=meta,
            instances=structs(row["instances"], schema.INSTANCES, Instance),
            segments=structs(row["segments"], schema.SEGMENTS_OF_TRACE, Segment),
            exhaustive=msgspec.convert(plain(row["exhaustive"]), list[str]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowInvalid) as error:
        raise UserError(f"{where} does not follow the schema: {error}") from error
    _check(record)
    return record


def segment_table(record: TraceRecord) -> pa.Table:
    """Rows of the table ``segments`` of one trace; its events are not needed."""
    rows: list[dict[str, Any]] = []
    of_trace = {name: record.meta[name] for name in ("trace_id", "task", "hardware_id", "split_unit")}
    for segment in record.segments:
        instance = record.instances[segment.instance]
        # The fields that the table shares with instances and segments; `lane` becomes readable.
        fields = {**of_trace, **msgspec.structs.asdict(instance), **msgspec.structs.asdict(segment)}
        fields["lane"] = record.trace.lanes[segment.lane].name
        rows.append({name: fields[name] for name in schema.SEGMENTS.names})
    return pa.Table.from_pylist(rows, schema=schema.SEGMENTS)


def _check(record: TraceRecord) -> None:
    where = f"trace {record.trace_id}"
    record.trace.check(where)
    events = len(record.trace)
    for segment in record.segments:
        if not 0 <= segment.instance < len(record.instances):
            raise UserError(f"{where}: a segment names instance {segment.instance}, which does not exist")
        if not 0 <= segment.lane < len(record.trace.lanes):
            raise UserError(f"{where}: a segment names lane {segment.lane}, which does not exist")
        if segment.first_event < 0 or segment.first_event + segment.event_count > events:
            raise UserError(f"{where}: a segment reaches outside of the {events} events")


def _distance(index: IntArray) -> IntArray:
    """How far back each event's reference lies; 0 for none, as no event refers to itself."""
    here = np.arange(len(index), dtype=np.int32)
    return np.where(index >= 0, here - index, 0).astype(np.int32)


def _index(distance: IntArray) -> IntArray:
    here = np.arange(len(distance), dtype=np.int32)
    return np.where(distance != 0, here - distance, -1)


def _columns(structs: Sequence[msgspec.Struct], kind: pa.StructType) -> dict[str, list[Any]]:
    return {field.name: [getattr(struct, field.name) for struct in structs] for field in kind}


def structs(columns: Any, kind: pa.StructType, type_: type[T]) -> list[T]:
    """The structs in a struct of parallel lists.

    Raises:
        ValueError: Lists of several lengths, or a value that ``type_`` does not take.
    """
    names = [field.name for field in kind]
    values = zip(*(plain(columns[name]) for name in names), strict=True)
    return [msgspec.convert(dict(zip(names, row, strict=True)), type_) for row in values]


def _integers(value: Any, kind: np.dtype[Any]) -> IntArray:
    """An array of ``kind``, without copying if it is one.

    Raises:
        ValueError: It holds nulls, fractions or numbers out of range.
    """
    if isinstance(value, pa.ListScalar):
        value = pa.array([], pa.int64()) if value.values is None else value.values
        value = value.to_numpy(zero_copy_only=True)
    array = np.asarray(value)
    if array.dtype == kind:
        return array
    narrow = array.astype(kind)
    if not np.array_equal(narrow, array):
        raise ValueError(f"a column of {kind} holds other values")
    return narrow


def plain(value: Any) -> Any:
    """A Python scalar or list out of one of pyarrow or numpy."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
