"""A small data set that keeps every promise, and ways to change it so that all of its files agree again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
from measured import measurements
from msgspec import convert
from test_build import shard
from traces import random_record

from torchtraceap.dataset.audited import record_audit
from torchtraceap.dataset.build import build
from torchtraceap.dataset.configs import SCHEMAS
from torchtraceap.dataset.costs import Measurement, cost_table
from torchtraceap.dataset.description import describe_again
from torchtraceap.dataset.features import shard_path
from torchtraceap.dataset.parquet import read_table, read_traces, write_table, write_traces
from torchtraceap.dataset.rows import segment_table
from torchtraceap.dataset.schema import SPLITS
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.windows import window_table

WORKLOADS = range(6)
OUTCOME = {"passed": False, "arms": [], "metadata": []}


def publishable(workload: int, clean: bool) -> TraceRecord:
    """A record as a collection makes them; of a workload there are a clean one and one with a pattern."""
    record = random_record(2 * workload + clean)
    if clean:
        kept = [index for index, one in enumerate(record.instances) if one.source == "lookalike"]
        record.segments = [
            msgspec.structs.replace(one, instance=kept.index(one.instance))
            for one in record.segments
            if one.instance in kept
        ]
        record.instances = [record.instances[index] for index in kept]
    record.meta |= {
        "backbone_family": f"backbone{workload}",
        "task": "classification" if workload < 4 else "detection",
        "quality": record.quality,
    }
    return record


def release(folder: Path) -> Path:
    """Build the data set in ``folder``/release, with the record of an audit."""
    run, out = folder / "run", folder / "release"
    for workload in WORKLOADS:
        shard(run, f"job{workload}", [publishable(workload, clean) for clean in (True, False)])
    build([run], out, seed=7)
    record_audit(out, OUTCOME)
    return out


def change_records(folder: Path, change: Callable[[str, list[TraceRecord]], None]) -> None:
    """Let ``change`` edit the records of each split, and write all that follows from them."""
    for split in SPLITS:
        path = folder / shard_path("traces", split)
        records = list(read_traces(path))
        change(split, records)
        write_traces(path, records)
        tables_of = {"windows": window_table, "segments": segment_table, "costs": measured_table}
        for config, table_of in tables_of.items():
            tables = [SCHEMAS[config].empty_table(), *map(table_of, records)]
            write_table(
                folder / shard_path(config, split), pa.concat_tables(tables).combine_chunks(), SCHEMAS[config]
            )
    seal(folder)


def measured_table(record: TraceRecord, p: float | None = None) -> pa.Table:
    """Rows of ``costs`` from which the states and costs of a record follow."""
    found = convert(measurements(record, p), list[Measurement])
    return cost_table(record, {(one.trace_id, one.instance): one for one in found})


def change_table(folder: Path, config: str, split: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Let ``change`` make another table of one of a split, and write what describes it."""
    path = folder / shard_path(config, split)
    write_table(path, change(read_table(path, SCHEMAS[config])).combine_chunks(), SCHEMAS[config])
    seal(folder)


def seal(folder: Path) -> None:
    """Describe the tables as they are now."""
    describe_again(folder, SCHEMAS)
    record_audit(folder, OUTCOME)
