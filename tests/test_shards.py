"""Shards of several files: how large they are, how they are read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from traces import random_record

from torchtraceap.dataset import schema, shards
from torchtraceap.dataset.parquet import read_traces, write_traces
from torchtraceap.dataset.shards import files_of, read_session, shards_of, traces_of, write_shard
from torchtraceap.errors import UserError

SESSION = json.dumps({"hardware": {}, "instances": [], "unpaired": ["x" * 2_000]})
LIMIT = 110_000


def write(run: Path, limit: int = LIMIT, seeds: range = range(6)) -> tuple[Path, list[str]]:
    path = run / "shards" / "a_b.parquet"
    records = [random_record(seed, events=4_000) for seed in seeds]
    assert write_shard(path, records, SESSION, limit) == len(list(path.parent.iterdir()))
    return path, [record.trace_id for record in records]


def test_a_small_shard_is_one_file_of_the_shards_name(tmp_path: Path) -> None:
    path, ids = write(tmp_path, 10_000_000)
    assert list(path.parent.iterdir()) == files_of(path) == [path]
    assert [record.trace_id for record in traces_of(path)] == ids


def test_a_large_shard_is_split_by_traces_and_read_as_one(tmp_path: Path) -> None:
    path, ids = write(tmp_path)
    files = files_of(path)
    assert [file.name for file in files] == [
        "a_b.parquet",
        *(f"a_b.part-{number}-of-{len(files)}.parquet" for number in range(2, len(files) + 1)),
    ]
    assert 2 <= len(files) < len(ids)
    assert sorted(path.parent.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= LIMIT for file in files)
    assert [record.trace_id for record in traces_of(path)] == ids
    assert shards_of([tmp_path]) == [path]
    assert read_session(path).unpaired == ["x" * 2_000]


def test_a_trace_above_the_bound_has_a_file_of_its_own(tmp_path: Path) -> None:
    path, ids = write(tmp_path, 1)
    assert [[record.trace_id for record in read_traces(file)] for file in files_of(path)] == [
        [i] for i in ids
    ]


@pytest.mark.parametrize(
    ("sizes", "used", "groups"),
    [
        ([4, 6, 1], 0, [[0, 1], [2]]),
        ([4, 6, 1], 1, [[0], [1, 2]]),
        ([11, 1, 9, 20, 1], 0, [[0], [1, 2], [3], [4]]),
        ([3], 50, [[0]]),
    ],
)
def test_files_are_filled_in_order(sizes: list[int], used: int, groups: list[list[int]]) -> None:
    assert shards._in_order(sizes, 10, used) == groups


def test_a_new_writing_removes_the_parts_of_the_old(tmp_path: Path) -> None:
    write(tmp_path)
    path, ids = write(tmp_path, 1, range(3))
    assert len(list(path.parent.iterdir())) == len(files_of(path)) == len(ids)


def test_parts_of_a_writer_that_was_killed_do_not_count(tmp_path: Path) -> None:
    """The whole shard is there before its parts are."""
    path, _ = write(tmp_path, 1, range(3))
    late = [(file, file.read_bytes()) for file in files_of(path)[1:]]
    _, ids = write(tmp_path, 10_000_000, range(3))
    for file, data in late:
        file.write_bytes(data)
    assert [record.trace_id for record in traces_of(path)] == ids
    assert shards_of([tmp_path]) == [path]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path, _ = write(tmp_path, 1, range(3))
    files_of(path)[2].unlink()
    with pytest.raises(UserError, match=r"a_b\.part-3-of-3\.parquet does not exist"):
        list(traces_of(path))


def test_parts_without_their_first_file_are_named(tmp_path: Path) -> None:
    path, _ = write(tmp_path, 1, range(3))
    path.unlink()
    with pytest.raises(
        UserError, match=r"a_b\.part-2-of-3\.parquet is a part of a_b\.parquet, which is missing"
    ):
        shards_of([tmp_path])


def test_a_part_of_another_writing_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path / "one", 1, range(3))
    other, _ = write(tmp_path / "two", 1, range(3))
    files_of(other)[1].replace(files_of(path)[1])
    with pytest.raises(UserError, match=r"part-2-of-3\.parquet does not belong to .*a_b\.parquet"):
        files_of(path)


@pytest.mark.parametrize("count", ["0", "-3", "2000000000", "1e3", "null"])
def test_a_count_of_parts_that_nobody_writes_is_refused(tmp_path: Path, count: str) -> None:
    path = tmp_path / "a.parquet"
    write_traces(path, [random_record(0)], {"part": f'{{"set_id":"a","number":1,"count":{count}}}'})
    with pytest.raises(UserError, match=r"a\.parquet: part in its metadata is broken: Expected `int"):
        files_of(path)


def test_a_session_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    deep = '{"instances":[],"hardware":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}"
    write_traces(path, [random_record(0)], {schema.SESSION_KEY: deep})
    with pytest.raises(UserError, match=r"a\.parquet: .+ in its metadata is broken: maximum recursion"):
        read_session(path)
