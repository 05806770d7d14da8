from __future__ import annotations

import gc
import itertools
import json
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Features, load_dataset
from traces import random_record

from torchtraceap.dataset import schema
from torchtraceap.dataset.features import card_yaml, shard_path
from torchtraceap.dataset.parquet import (
    read_metadata,
    read_table,
    read_traces,
    split_files,
    write_table,
    write_traces,
)
from torchtraceap.dataset.rows import record_from_row, row_from_record
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.types import Instance

RECORDS = [random_record(seed, events=60 + 40 * seed, gpu=seed % 3 > 0) for seed in range(11)]


def assert_same(found: TraceRecord, expected: TraceRecord) -> None:
    assert found.trace == expected.trace
    for name, kind in Events.DTYPES.items():
        assert found.trace.events.arrays()[name].dtype == kind
    # By repr, in which NaN equals itself.
    assert repr(found.meta) == repr(expected.meta)
    assert repr(found.instances) == repr(expected.instances)
    assert found.segments == expected.segments
    assert found.exhaustive == expected.exhaustive


def tiny() -> TraceRecord:
    """An op on a thread, its launch, and a kernel that is still running 3 s later."""
    record = random_record(0)
    record.trace = Trace(
        lanes=[Lane("cpu", "thread 0"), Lane("gpu", "stream 7", 0)],
        ops=[Op("<b>x</b>", "cpu_op"), Op("cudaLaunchKernel", "cuda_runtime"), Op("ядро", "kernel")],
        events=Events(
            lane=np.array([0, 0, 1], np.int16),
            op=np.array([0, 1, 2], np.int32),
            start_ns=np.array([0, 10, 25], np.int64),
            dur_ns=np.array([20, 5, 3_000_000_000], np.int64),
            parent=np.array([-1, 0, 0], np.int32),
            launch=np.array([-1, -1, 1], np.int32),
            forward=np.array([-1, -1, -1], np.int32),
        ),
    )
    record.instances, record.segments, record.exhaustive = [], [], []
    return record


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "traces.parquet"
    assert write_traces(path, RECORDS, {"build": json.dumps({"seed": 3})}) == 11
    return path


def test_records_survive_a_file(stored: Path):
    for found, expected in zip(read_traces(stored), RECORDS, strict=True):
        assert_same(found, expected)


def test_references_are_stored_as_distances():
    events = row_from_record(tiny())["events"]
    assert events["parent_offset"].tolist() == [0, 1, 2]
    assert events["launch_offset"].tolist() == [0, 0, 1]
    assert events["forward_offset"].tolist() == [0, 0, 0]


def test_a_reference_forward_in_the_table_survives(tmp_path: Path):
    record = tiny()
    record.trace.events.forward[0] = 2
    assert row_from_record(record)["events"]["forward_offset"].tolist() == [-2, 0, 0]
    write_traces(tmp_path / "x.parquet", [record])
    assert_same(next(read_traces(tmp_path / "x.parquet")), record)


def test_unmeasured_costs_stay_nan(tmp_path: Path):
    record = tiny()
    record.instances = [
        Instance(
            pattern="host_sync", variant="native", scope="local", source="native", state="undecided",
            every_step=True, sites=0,
        )
    ]  # fmt: skip
    write_traces(tmp_path / "x.parquet", [record])
    assert_same(next(read_traces(tmp_path / "x.parquet")), record)
    costs = pq.read_table(tmp_path / "x.parquet")["instances"].combine_chunks().field("cost_ms")
    assert np.isnan(costs[0].as_py()).all()


def test_an_empty_trace_survives(tmp_path: Path):
    record = tiny()
    empty = {name: np.empty(0, kind) for name, kind in Events.DTYPES.items()}
    record.trace = Trace(lanes=[], ops=[], events=Events(**empty))
    write_traces(tmp_path / "x.parquet", [record])
    assert_same(next(read_traces(tmp_path / "x.parquet")), record)


def test_event_columns_are_read_without_copying(stored: Path):
    file = pq.ParquetFile(stored).read_row_group(0)
    row = {name: file.column(name)[0] for name in file.column_names}
    start_ns = record_from_row(row).trace.events.start_ns
    assert np.shares_memory(start_ns, row["events"]["start_ns"].values.to_numpy())
    assert not start_ns.flags.writeable


def test_writer_holds_no_more_than_two_row_groups(tmp_path: Path):
    alive: list[weakref.ref[np.ndarray]] = []

    def records():
        for seed in range(36):
            record = random_record(seed, events=60)
            alive.append(weakref.ref(record.trace.events.start_ns))
            yield record
            del record
        gc.collect()
        assert sum(array() is not None for array in alive) <= 16

    path = tmp_path / "x.parquet"
    assert write_traces(path, records()) == 36
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [8, 8, 8, 8, 4]


def test_no_records_give_the_full_schema(tmp_path: Path):
    path = tmp_path / "x.parquet"
    assert write_traces(path, []) == 0
    assert pq.read_schema(path).remove_metadata().equals(schema.TRACES)
    assert list(read_traces(path)) == []


def test_a_failing_writer_leaves_the_old_file(stored: Path):
    before = stored.read_bytes()
    broken = tiny()
    broken.trace.events.dur_ns[0] = -1
    with pytest.raises(UserError, match="ends before it starts"):
        write_traces(stored, [*RECORDS[:9], broken])
    assert stored.read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == ["traces.parquet"]


def test_encodings(stored: Path):
    group = pq.read_metadata(stored).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "DELTA_BINARY_PACKED" in columns["events.start_ns.list.element"].encodings
    assert "BYTE_STREAM_SPLIT" in columns["events.dur_ns.list.element"].encodings
    assert "RLE_DICTIONARY" in columns["ops.name.list.element"].encodings
    assert columns["trace_id"].statistics.min == min(record.trace_id for record in RECORDS[:8])


def test_metadata(stored: Path):
    assert read_metadata(stored) == {
        "schema_version": str(schema.SCHEMA_VERSION),
        "canary": schema.CANARY,
        "build": '{"seed": 3}',
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.pop("task"), r"lacks \['task'\]"),
        (lambda meta: meta.update(step_ms=None), r"lacks \['step_ms'\]"),
        (lambda meta: meta.update(host="me"), r"unknown \['host'\]"),
    ],
)
def test_meta_must_be_complete(tmp_path: Path, change, message: str):
    record = random_record(0)
    change(record.meta)
    with pytest.raises(ValueError, match=message):
        write_traces(tmp_path / "x.parquet", [record])
    assert not list(tmp_path.iterdir())


def _row(**changes: object) -> dict[str, object]:
    return row_from_record(random_record(1)) | changes


def _with(column: str, **fields: object) -> dict[str, object]:
    row = _row()
    return row | {column: row[column] | fields}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"trace_id": "x"}, "lacks the columns pair_id"),
        (_row(steps=None), "has no value for steps"),
        (_row(events=None), "does not follow the schema"),
        (_with("events", lane=[0]), "column op has shape"),
        (_with("events", op=[None] * 200), "does not follow the schema"),
        (_with("events", op=[0.5] * 200), "column of int32 holds other values"),
        (_with("events", op=[1 << 40] * 200), "column of int32 holds other values"),
        (_with("events", op=[999] * 200), "an event names no op"),
        (_with("events", parent_offset=[2] * 200), "parent points outside"),
        (_with("instances", state=["dear"] * 3), "Invalid enum value 'dear'"),
        (_with("instances", state=["costly"]), "does not follow the schema"),
        (_with("segments", instance=[7] * 15), "names instance 7, which does not exist"),
        (_with("segments", lane=[9] * 15), "names lane 9, which does not exist"),
        (_with("segments", first_event=[200] * 15), "reaches outside of the 200 events"),
    ],
)
def test_bad_rows_are_refused(row: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        record_from_row(row)


def test_bad_row_of_a_file_names_the_file(tmp_path: Path):
    row = _with("segments", instance=np.full(15, 7))
    path = tmp_path / "x.parquet"
    write_table(path, pa.Table.from_pylist([row], schema=schema.TRACES), schema.TRACES)
    with pytest.raises(UserError, match=r"x\.parquet: trace [0-9a-f]{16}: a segment names instance 7"):
        list(read_traces(path))


def _rewrite(path: Path, table: pa.Table, **metadata: str) -> None:
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({f"torchtraceap.{key}": value for key, value in metadata.items()})


@pytest.mark.parametrize(("step", "advice"), [(1, "update it"), (-1, "with an older one, or collect")])
def test_another_schema_is_refused(stored: Path, step: int, advice: str):
    version = str(schema.SCHEMA_VERSION + step)
    _rewrite(stored, schema.TRACES.empty_table(), schema_version=version)
    with pytest.raises(UserError, match=f"has schema version {version}, .* reads .*: .*{advice}"):
        list(read_traces(stored))
    with pytest.raises(UserError, match=f"has schema version {version}"):
        read_metadata(stored)


def test_foreign_files_are_refused(tmp_path: Path, stored: Path):
    path = tmp_path / "x.parquet"
    with pytest.raises(UserError, match=r"x\.parquet does not exist"):
        list(read_traces(path))
    _rewrite(path, schema.TRACES.empty_table())
    with pytest.raises(UserError, match="holds no schema version"):
        list(read_traces(path))
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UserError, match=r"x\.parquet cannot be read as Parquet"):
        list(read_traces(path))


def test_other_columns_are_refused(tmp_path: Path):
    path = tmp_path / "x.parquet"
    table = (
        schema.SEGMENTS.empty_table().drop_columns("step").append_column("note", pa.array([], pa.string()))
    )
    table = table.set_column(0, "trace_id", pa.array([], pa.int64()))
    _rewrite(path, table, schema_version=str(schema.SCHEMA_VERSION))
    with pytest.raises(UserError, match="lacks step; has an unknown note; has trace_id as int64, not string"):
        read_table(path, schema.SEGMENTS)


def test_truncated_and_damaged_files_are_refused(stored: Path):
    data = stored.read_bytes()
    stored.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        list(read_traces(stored))
    group = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    column = columns["events.dur_ns.list.element"]
    place = column.data_page_offset + column.total_compressed_size // 2
    stored.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(UserError, match=r"cannot be read as Parquet: .*(checksum|CRC)"):
        list(read_traces(stored))


WINDOWS = pa.schema([*schema.WINDOW_KEYS, pa.field("kernels", pa.uint16()), pa.field("busy", pa.uint8())])


def _windows(count: int) -> pa.Table:
    values = {
        "trace_id": "a", "task": "pose", "hardware_id": "cpu", "split_unit": "u", "positive": True,
        "ignored": False, "cpu_patterns": ["host_sync"], "gpu_patterns": [], "cpu_ignored": [],
        "gpu_ignored": [], "busy": 255,
    }  # fmt: skip
    rows = [
        {**values, "window": i, "start_ns": i * 10, "end_ns": i * 10 + 10, "step": -1, "kernels": 60_000 + i}
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=WINDOWS)


def test_tables_survive_in_parts(tmp_path: Path):
    table = _windows(7)
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet", tmp_path / "c.parquet"]
    assert write_table(paths[0], table.slice(0, 3), WINDOWS, rows_per_group=2) == 3
    assert write_table(paths[1], (batch for batch in table.slice(3).to_batches()), WINDOWS) == 4
    assert write_table(paths[2], table.slice(7), WINDOWS) == 0
    assert pq.read_metadata(paths[0]).num_row_groups == 2
    assert read_table(paths, WINDOWS).equals(table)
    assert read_table(str(paths[1]), WINDOWS, ["busy", "window"]).equals(
        table.slice(3).select(["busy", "window"])
    )
    rows = table.to_batches(max_chunksize=1)
    assert write_table(paths[2], iter(rows), WINDOWS, rows_per_group=4) == 7
    groups = pq.read_metadata(paths[2])
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [4, 3]
    assert read_table(paths[2], WINDOWS).equals(table)
    assert read_table([], WINDOWS).equals(WINDOWS.empty_table())


def test_tables_must_match_their_schema(tmp_path: Path):
    table = _windows(2)
    with pytest.raises(ValueError, match="has the schema"):
        write_table(tmp_path / "x.parquet", table.drop_columns("busy"), WINDOWS)
    nulls = table.set_column(5, table.schema.field(5), pa.nulls(2, pa.string()))
    with pytest.raises(ValueError, match="nulls in task"):
        write_table(tmp_path / "x.parquet", nulls, WINDOWS)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three configs; two shards in train, nothing in test, no row at all of `segments`."""
    folder = tmp_path / "dataset"
    write_traces(folder / shard_path("traces", "train", 0, 2), RECORDS[:9])
    write_traces(folder / shard_path("traces", "train", 1, 2), RECORDS[9:10])
    write_traces(folder / shard_path("traces", "validation"), RECORDS[10:])
    write_traces(folder / shard_path("traces", "test"), [])
    for split, rows in {"train": 5, "validation": 0, "test": 2}.items():
        write_table(folder / shard_path("windows", split), _windows(rows), WINDOWS)
        write_table(folder / shard_path("segments", split), schema.SEGMENTS.empty_table(), schema.SEGMENTS)
    return folder


SCHEMAS = {"traces": schema.TRACES, "windows": WINDOWS, "segments": schema.SEGMENTS}


def _write_card(folder: Path) -> None:
    (folder / "README.md").write_text(f"---\nlicense: cc-by-4.0\n{card_yaml(folder, SCHEMAS)}---\n# Title\n")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", [None, "numpy"])
def test_datasets_reads_what_was_written(dataset: Path, streaming: bool, kind: str | None):
    _write_card(dataset)
    splits = load_dataset(str(dataset), streaming=streaming)
    assert list(splits) == ["train", "validation"]
    rows = itertools.chain(*(splits[split].with_format(kind) for split in splits))
    for row, expected in zip(rows, RECORDS, strict=True):
        assert_same(record_from_row(row), expected)


def test_card_names_configs_and_splits_with_rows(dataset: Path):
    _write_card(dataset)
    windows = load_dataset(str(dataset), "windows", split="test")
    assert windows.features == Features.from_arrow_schema(WINDOWS)
    assert windows["kernels"][:] == [60_000, 60_001]
    assert load_dataset(str(dataset), "windows", split="train").num_rows == 5
    card = yaml.safe_load(card_yaml(dataset, SCHEMAS))
    assert [config["config_name"] for config in card["configs"]] == ["traces", "windows"]
    assert card["configs"][0]["default"] is True
    info = card["dataset_info"][0]
    assert [(split["name"], split["num_examples"]) for split in info["splits"]] == [
        ("train", 10),
        ("validation", 1),
    ]
    files = [file for split in ("train", "validation") for file in dataset.glob(f"data/traces-{split}-*")]
    assert info["download_size"] == sum(file.stat().st_size for file in files)
    for entry in card["dataset_info"]:
        declared = Features._from_yaml_list(entry["features"])
        assert declared == Features.from_arrow_schema(SCHEMAS[entry["config_name"]])


def test_card_needs_exactly_one_build(dataset: Path):
    (dataset / shard_path("traces", "train", 0, 2)).unlink()
    with pytest.raises(
        UserError, match=r"exactly the shards of one build: traces-train-00001-of-00002\.parquet"
    ):
        card_yaml(dataset, SCHEMAS)
    write_traces(dataset / shard_path("traces", "train", 0, 1), [])
    with pytest.raises(UserError, match="exactly the shards of one build"):
        card_yaml(dataset, SCHEMAS)


def test_card_needs_files_and_a_row(dataset: Path):
    with pytest.raises(UserError, match="holds no file of the config hardware"):
        card_yaml(dataset, SCHEMAS | {"hardware": schema.HARDWARE})
    with pytest.raises(UserError, match="holds no row of the config segments"):
        card_yaml(dataset, SCHEMAS, default="segments")


def test_files_of_one_split_and_of_all(tmp_path):
    names = [
        "segments-test-0.parquet",
        "traces-test-0.parquet",
        "traces-test-1.parquet",
        "traces-train-0.parquet",
    ]
    (tmp_path / "data").mkdir()
    for name in names:
        (tmp_path / "data" / name).touch()

    def found(config, split):
        return [path.name for path in split_files(tmp_path, config, split)]

    assert found("traces", "test") == names[1:3]
    assert found("traces", "all") == [names[3], *names[1:3]]
    assert found("segments", "all") == names[:1]
    with pytest.raises(UserError, match="no data/traces-validation-"):
        found("traces", "validation")
    with pytest.raises(UserError, match="unknown split 'dev'; possible: train, validation, test, all"):
        found("traces", "dev")
