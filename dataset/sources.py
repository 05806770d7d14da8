"""What a build reads: shards of runs, and files of data sets, whose traces are taken as if from shards.

A source is a Parquet file of traces. Beside a shard's lies its session, in the file itself. Of a data set's
the same is in the tables ``costs`` and ``hardware``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtraceap.dataset import checksums
from torchtraceap.dataset.configs import DATA_FILE
from torchtraceap.dataset.costs import InstanceKey, Measurement, own_states, read_costs
from torchtraceap.dataset.parquet import read_table, read_traces, split_files
from torchtraceap.dataset.schema import ALL_SPLITS, HARDWARE
from torchtraceap.dataset.shards import files_of, read_session, shards_of
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError


def sources_of(folders: Sequence[str | Path]) -> list[Path]:
    """The shards of all runs, and the files of traces of all data sets, in ``folders``.

    A folder with ``shards`` is a run, whatever else is in it.

    Raises:
        UserError: As for ``shards_of``; or a data set is not whole, or does not hold its costs.
    """
    if not folders:
        return shards_of([])  # says what is needed
    return [source for folder in map(Path, folders) for source in _sources(folder)]


def _sources(folder: Path) -> list[Path]:
    if (folder / "shards").exists() or not any((folder / "data").glob("traces-*.parquet")):
        return shards_of([folder])
    if problem := next(checksums.differing(folder), None):
        raise UserError(f"{folder}: {problem}, so it cannot be built on; take a whole data set, or its runs")
    files = split_files(folder, "traces", ALL_SPLITS)
    for path in files:
        if not _beside(path, "costs").is_file():
            raise UserError(
                f"{folder} holds no data/{_beside(path, 'costs').name}: its measurements were not published; "
                "build from the runs that it was made of"
            )
    return files


def _is_released(source: Path) -> bool:
    return source.parent.name == "data" and DATA_FILE.fullmatch(source.name) is not None


def _beside(traces: Path, config: str) -> Path:
    """The file of another config that belongs to one of traces."""
    return traces.with_name(f"{config}-{traces.name.removeprefix('traces-')}")


def hardware_of(source: Path) -> list[dict[str, Any]]:
    """The hardware that its traces were made on, and maybe more.

    Raises:
        UserError: It cannot be read.
    """
    if not _is_released(source):
        return [read_session(source).hardware]
    rows = read_table(split_files(source.parent.parent, "hardware", ALL_SPLITS), HARDWARE).to_pylist()
    return list({row["hardware_id"]: row for row in rows}.values())


def measurements_of(source: Path) -> dict[InstanceKey, Measurement]:
    """What was measured of the instances of its traces.

    Raises:
        UserError: It cannot be read.
    """
    if _is_released(source):
        return read_costs(_beside(source, "costs"))
    return read_session(source).measurements


def records_of(source: Path, ids: Collection[str] | None = None) -> Iterator[TraceRecord]:
    """Its traces, or those of ``ids``, with the states of their own measurements.

    Raises:
        UserError: It cannot be read.
    """
    if not _is_released(source):
        yield from read_traces(files_of(source), ids)
        return
    measurements = measurements_of(source)
    for record in read_traces(source, ids):
        record.instances = own_states(record, measurements)
        yield record
