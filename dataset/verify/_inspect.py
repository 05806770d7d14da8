"""Checks of the events of traces, one trace at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchtraceap.dataset.attribution import violations
from torchtraceap.dataset.parquet import group_rows, read_table, split_files
from torchtraceap.dataset.rows import record_from_row
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.windows import WINDOWS, window_table
from torchtraceap.errors import UserError

CHECKS = ("traces", "steps", "attribution", "windows")

Inspected = dict[str, list[str]]
"""Violations found in a trace, by check."""


@dataclass(frozen=True)
class Item:
    """A row group of a data set's split, and the traces in it that are looked at."""

    folder: Path
    split: str
    path: Path
    group: int
    ids: frozenset[str]


def inspect_group(item: Item) -> list[Inspected]:
    """Look at the traces of an item."""
    found: list[Inspected] = []
    try:
        for row in group_rows(item.path, item.group):
            if row["trace_id"].as_py() in item.ids:
                try:
                    record = record_from_row(row)
                except UserError as error:
                    found.append({"traces": [str(error)]})
                    continue
                found.append(_inspect(record, _published_windows(item.folder, item.split)))
    except UserError as error:
        found.append({"traces": [str(error)]})
    return found


def _inspect(record: TraceRecord, windows: pa.Table) -> Inspected:
    where = f"trace {record.trace_id}"
    found = {
        "traces": list(_unnested(record)),
        "steps": list(_misstepped(record)),
        "attribution": list(_unlawful(record)),
        "windows": [],
    }
    if not any(found.values()):  # else windows follow from what is wrong
        found["windows"] = list(_differing(record, windows))
    return {name: [f"{where}: {what}" for what in problems] for name, problems in found.items()}


def _unnested(record: TraceRecord) -> Iterator[str]:
    """What ``Trace.check`` leaves open: parents of CPU events enclose them, and launches come before."""
    trace, events = record.trace, record.trace.events
    if not len(trace):
        yield "it has no events"
        return
    rows = np.flatnonzero(~trace.on_gpu & (events.parent >= 0))
    above = events.parent[rows]
    outside = (
        (events.lane[above] != events.lane[rows])
        | (events.start_ns[above] > events.start_ns[rows])
        | (events.end_ns[above] < events.end_ns[rows])
    )
    if outside.any():
        yield f"event {rows[outside][0]} is not within its parent (the first of {outside.sum()})"


def _misstepped(record: TraceRecord) -> Iterator[str]:
    trace = record.trace
    steps = np.flatnonzero([op.name.startswith("ProfilerStep#") for op in trace.ops])
    rows = np.flatnonzero(np.isin(trace.events.op, steps))
    rows = rows[np.argsort(trace.events.start_ns[rows], kind="stable")]
    names = [trace.ops[op].name for op in trace.events.op[rows]]
    expected = [f"ProfilerStep#{step}" for step in range(int(str(record.meta["steps"])))]
    if names != expected:
        yield f"its steps are {', '.join(names) or 'none'}, not {', '.join(expected)}"


def _unlawful(record: TraceRecord) -> Iterator[str]:
    try:
        yield from violations(record)
    except UserError:  # of a pattern or variant that the catalogue has not, which is another check's
        return


def _differing(record: TraceRecord, published: pa.Table) -> Iterator[str]:
    expected = window_table(record)
    mine = published.filter(pc.equal(published["trace_id"], record.trace_id))
    if mine.num_rows != expected.num_rows:
        yield f"{mine.num_rows} windows are published, {expected.num_rows} follow from it"
    elif not mine.equals(expected):
        for name in WINDOWS.names:
            one, other = mine[name].to_pylist(), expected[name].to_pylist()
            if one != other:
                first = next(
                    row for row, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
                )
                yield f"{name} of window {first} is {one[first]}, computed {other[first]}"


@lru_cache(maxsize=1)
def _published_windows(folder: Path, split: str) -> pa.Table:
    """All windows of a split; a process goes through one split after the other."""
    return read_table(split_files(folder, "windows", split), WINDOWS)
