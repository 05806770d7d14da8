"""Parquet files of the published tables: how they are encoded, written, checked and read.

pyarrow writes them, not `datasets`, whose own metadata older versions of it cannot read. Every file holds the
whole schema of its config, also without rows: `datasets` fails on a column that one shard lacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchtraceap import __version__
from torchtraceap.dataset import schema as tables
from torchtraceap.dataset.rows import record_from_row, row_from_record
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.files import replacing

Paths = str | Path | Iterable[str | Path]

TRACES_PER_GROUP = 8
"""Rows of a row group of ``traces``: a reader holds one group, some 15 MB of events."""

_PREFIX = "torchtraceap."
_ROWS_PER_GROUP = 1 << 16

# Chosen by measurement (benchmarks/storage.py). Numbers that grow along a lane, or rarely change, pack well
# as differences; these and the window features as planes of bytes, where zstd finds the repeated steps.
_BYTE_STREAM_SPLIT = frozenset({"op", "dur_ns", "parent_offset", "forward_offset"})
_FEATURE_TYPES = frozenset({pa.uint8(), pa.uint16()})
_LEVEL = 19  # written once, and quick enough: 15 MB of events a second


def write_traces(
    path: str | Path, records: Iterable[TraceRecord], extra: Mapping[str, str] | None = None
) -> int:
    """Write a file of the config ``traces``, never with more than two row groups of records in memory.

    Args:
        path: Replaced as a whole when all is written; left as it was if anything fails.
        records: Any number; none gives a file with the full schema.
        extra: Further file metadata, see :func:`read_metadata`.

    Returns:
        The number of records.

    Raises:
        UserError: A record breaks a promise of its trace or labels.
        ValueError: A record lacks a column.
    """
    rows = (row_from_record(record) for record in records)
    groups = iter(lambda: list(itertools.islice(rows, TRACES_PER_GROUP)), [])
    batches = (pa.RecordBatch.from_pylist(group, schema=tables.TRACES) for group in groups)
    return write_table(path, batches, tables.TRACES, extra, rows_per_group=TRACES_PER_GROUP)


def write_table(
    path: str | Path,
    data: pa.Table | Iterable[pa.RecordBatch],
    schema: pa.Schema,
    extra: Mapping[str, str] | None = None,
    rows_per_group: int = _ROWS_PER_GROUP,
) -> int:
    """Write a file of any config.

    Args:
        path: Replaced as a whole when all is written; left as it was if anything fails.
        data: A table, or batches of any size; no more than a row group of them is held in memory.
        schema: What ``data`` must match exactly: the schema of the whole config.
        extra: Further file metadata, see :func:`read_metadata`.
        rows_per_group: Rows of every row group but the last.

    Returns:
        The number of rows.

    Raises:
        ValueError: ``data`` has another schema, or a null, which every table forbids at the top level.
    """
    metadata = {**(extra or {}), "schema_version": str(tables.SCHEMA_VERSION), "canary": tables.CANARY}
    batches = data.to_batches() if isinstance(data, pa.Table) else data
    count = 0
    with replacing(Path(path)) as temporary, _writer(temporary, schema) as writer:
        for group in _regrouped(_valid(path, batches, schema), schema, rows_per_group):
            writer.write_table(group)
            count += group.num_rows
        writer.add_key_value_metadata({_PREFIX + key: value for key, value in metadata.items()})
    return count


def split_files(dataset: Path, config: str, split: str) -> list[Path]:
    """The files of a config of a data set folder, in one split or in ``all`` of them.

    Raises:
        UserError: There is no such split, or no such file.
    """
    possible = (*tables.SPLITS, tables.ALL_SPLITS)
    if split not in possible:
        raise UserError(f"unknown split {split!r}; possible: {', '.join(possible)}")
    splits = tables.SPLITS if split == tables.ALL_SPLITS else (split,)
    found = [path for one in splits for path in sorted((dataset / "data").glob(f"{config}-{one}-*.parquet"))]
    if not found:
        name = f"data/{config}-{splits[-1]}-*.parquet"
        raise UserError(f"{dataset}: no {name}; a data set folder is needed, as `traceap build` makes it")
    return found


def read_traces(paths: Paths, ids: Collection[str] | None = None) -> Iterator[TraceRecord]:
    """The records of one or several files, in order, a row group at a time.

    Event arrays are views of the row group where possible, and read-only.

    Args:
        paths: The files.
        ids: Traces to read; row groups without any of them are passed over. All by default.

    Raises:
        UserError: A file is none of ours, damaged, of a newer schema, or lacks columns; the message names it.
    """
    for path in _each(paths):
        with _opened(path, tables.TRACES) as file:
            for group in range(file.num_row_groups):
                if ids is None or _ids(file, group) & set(ids):
                    yield from _records(path, file, group, ids)


def row_groups(paths: Paths) -> list[tuple[Path, int]]:
    """Every row group of the files: some traces each, which :func:`read_group` reads.

    Raises:
        UserError: As for :func:`read_traces`.
    """
    groups = []
    for path in _each(paths):
        with _opened(path, tables.TRACES) as file:
            groups += [(path, group) for group in range(file.num_row_groups)]
    return groups


def read_group(path: Path, group: int) -> Iterator[TraceRecord]:
    """The records of a row group of a file.

    Raises:
        UserError: As for :func:`read_traces`.
    """
    with _opened(path, tables.TRACES) as file:
        yield from _records(path, file, group)


def group_rows(path: Path, group: int, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a row group of a file, pyarrow scalars by column.

    Args:
        path: A file of traces.
        group: Number of the row group.
        columns: Those to read, ``events.op`` for one inside of another; all by default.

    Raises:
        UserError: As for :func:`read_traces`.
    """
    with _opened(path, tables.TRACES) as file:
        yield from _rows(file, group, columns)


def _rows(file: pq.ParquetFile, group: int, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    table = file.read_row_group(group, columns)
    for index in range(table.num_rows):
        yield {name: table.column(name)[index] for name in table.column_names}


def _ids(file: pq.ParquetFile, group: int) -> set[str]:
    return set(file.read_row_group(group, ["trace_id"])["trace_id"].to_pylist())


def _records(
    path: Path, file: pq.ParquetFile, group: int, ids: Collection[str] | None = None
) -> Iterator[TraceRecord]:
    for row in _rows(file, group):
        if ids is not None and row["trace_id"].as_py() not in ids:
            continue
        try:
            yield record_from_row(row)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def read_table(paths: Paths, schema: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    """The rows of one or several files of a config.

    Args:
        paths: Files; none gives an empty table.
        schema: Of the whole config.
        columns: Those to read; all by default.

    Raises:
        UserError: As for :func:`read_traces`.
    """
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    parts = [wanted.empty_table()]
    for path in _each(paths):
        with _opened(path, schema) as file:
            parts.append(file.read(columns=wanted.names).select(wanted.names).cast(wanted))
    return pa.concat_tables(parts)


def read_metadata(path: str | Path) -> dict[str, str]:
    """What the file says of itself: ``schema_version``, ``canary`` and the writer's ``extra``.

    Raises:
        UserError: The file is none of ours, damaged, or of a newer schema.
    """
    with _opened(Path(path), None) as file:
        return _metadata(file)


def _valid(
    path: str | Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not batch.schema.equals(schema):
            raise ValueError(f"a batch for {path} has the schema {batch.schema}, not {schema}")
        if nulls := [name for name in schema.names if batch.column(name).null_count]:
            raise ValueError(f"a batch for {path} has nulls in {', '.join(nulls)}")
        yield batch


def _regrouped(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Tables of ``rows`` rows, the last one of what is left: a row group costs 5 kB whatever it holds."""
    pending = schema.empty_table()
    for batch in batches:
        pending = pa.concat_tables([pending, pa.Table.from_batches([batch])])
        while pending.num_rows >= rows:
            yield pending.slice(0, rows)
            pending = pending.slice(rows)
    if pending.num_rows:
        yield pending


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    leaves = dict(_leaves(schema))
    dictionary, encodings = [], {}
    for leaf, kind in leaves.items():
        if pa.types.is_integer(kind):
            name = leaf.removesuffix(".list.element").rpartition(".")[2]
            split = name in _BYTE_STREAM_SPLIT or kind in _FEATURE_TYPES
            encodings[leaf] = "BYTE_STREAM_SPLIT" if split else "DELTA_BINARY_PACKED"
        elif not pa.types.is_boolean(kind):
            dictionary.append(leaf)
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=dictionary,
        column_encoding=encodings,
        write_statistics=[leaf for leaf in leaves if "." not in leaf],
        write_page_checksum=True,
    )


def _leaves(schema: pa.Schema | pa.StructType, prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Parquet's path and the type of each primitive column."""
    for field in schema:
        path, kind = prefix + field.name, field.type
        if pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pa.types.is_struct(kind):
            yield from _leaves(kind, f"{path}.")
        else:
            yield path, kind


def _each(paths: Paths) -> Iterator[Path]:
    return map(Path, [paths] if isinstance(paths, (str, Path)) else paths)


@contextmanager
def _opened(path: Path, schema: pa.Schema | None) -> Iterator[pq.ParquetFile]:
    """An open file that is ours, readable and, with ``schema``, of the right columns."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _require_version(path, _metadata(file).get("schema_version"))
            if schema is not None:
                _require_columns(path, file.schema_arrow, schema)
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _metadata(file: pq.ParquetFile) -> dict[str, str]:
    pairs = (file.metadata.metadata or {}).items()
    return {
        key.decode(errors="replace").removeprefix(_PREFIX): value.decode(errors="replace")
        for key, value in pairs
        if key.startswith(_PREFIX.encode())
    }


def _require_version(path: Path, version: str | None) -> None:
    if version is None or not version.isdecimal():
        raise UserError(f"{path} holds no schema version: torchtraceap did not write it")
    if int(version) != tables.SCHEMA_VERSION:
        newer = int(version) > tables.SCHEMA_VERSION
        advice = (
            "update it, or take a release of the data made for this one"
            if newer
            else "read it with an older one, or collect it again"
        )
        raise UserError(
            f"{path} has schema version {version}, this torchtraceap {__version__} reads "
            f"{tables.SCHEMA_VERSION}: {advice} (CHANGELOG.md says which version has which)"
        )


def _require_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    """Complain of missing, unknown and mistyped columns; their order does not matter."""
    complaints = [f"lacks {name}" for name in expected.names if name not in found.names]
    complaints += [f"has an unknown {name}" for name in found.names if name not in expected.names]
    complaints += [
        f"has {field.name} as {found.field(field.name).type}, not {field.type}"
        for field in expected
        if field.name in found.names and found.field(field.name).type != field.type
    ]
    if complaints:
        raise UserError(f"{path} has other columns than expected: {'; '.join(complaints)}")
