"""Reading and refusing submissions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtraceap.errors import UserError
from torchtraceap.eval import submission as module
from torchtraceap.eval.submission import (
    DETECTIONS,
    Detection,
    Submission,
    SubmissionCard,
    WindowScore,
    read_card,
    read_submission,
    write_submission,
)

CARD = SubmissionCard(
    name="rules", version="1", description="Statistics.", threshold=0.5, trained_on="nothing", tokens=12
)
ROW = Detection("a", "host_sync", "cpu", 10, 20, 0.75)
LINE = '{"trace_id":"a","pattern":"host_sync","lane":"cpu","start_ns":10,"end_ns":20,"score":0.75}\n'


def columns(**changes: object) -> dict[str, object]:
    """Three good rows by column, some columns changed."""
    return {
        "trace_id": ["a", "a", "b"],
        "pattern": ["host_sync"] * 3,
        "lane": ["cpu", "gpu", "cpu"],
        "start_ns": [0, 5, 9],
        "end_ns": [1, 5, 11],
        "score": [0.1, 0.2, 0.3],
    } | changes


def folder(tmp_path: Path, content: str = LINE) -> Path:
    write_submission(tmp_path, [], None, CARD)
    (tmp_path / "detections.parquet").unlink()
    (tmp_path / "detections.jsonl").write_text(content)
    return tmp_path


def test_round_trip(tmp_path: Path) -> None:
    windows = [WindowScore("a", 3, "gpu", "any", 0.5)]
    write_submission(tmp_path, [ROW], windows, CARD)
    read = read_submission(tmp_path)
    assert read.card == CARD
    assert read.detections.to_pylist() == [
        {"trace_id": "a", "pattern": "host_sync", "lane": "cpu", "start_ns": 10, "end_ns": 20, "score": 0.75}
    ]
    assert read.window_scores.to_pylist() == [
        {"trace_id": "a", "window": 3, "lane": "gpu", "pattern": "any", "score": 0.5}
    ]


def test_nothing_of_an_older_submission_remains(tmp_path: Path) -> None:
    old = WindowScore("a", 3, "gpu", "any", 0.5)
    write_submission(tmp_path, [ROW, ROW], [old], CARD)
    (tmp_path / "detections.parquet").rename(tmp_path / "detections.jsonl")
    write_submission(tmp_path, [ROW], None, CARD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.yaml", "detections.parquet"]
    assert read_submission(tmp_path).detections.num_rows == 1


def test_jsonl_equals_parquet(tmp_path: Path) -> None:
    write_submission(tmp_path / "parquet", [ROW], None, CARD)
    lines = read_submission(str(folder(tmp_path / "jsonl")))
    assert lines.detections.equals(read_submission(tmp_path / "parquet").detections)


@pytest.mark.parametrize("name", ["detections.parquet", "detections.jsonl"])
def test_empty_file_is_a_valid_submission(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        write_submission(tmp_path, [], None, CARD)
    else:
        folder(tmp_path, "")
    assert read_submission(tmp_path).detections.num_rows == 0
    assert read_submission(tmp_path / name).detections.schema.equals(DETECTIONS)  # a file, the card beside it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": [0.1, float("nan"), 0.3]}, r"1 bad row\(s\): row 2: score is nan, not finite"),
        ({"score": [0.1, 0.2, float("inf")]}, "row 3: score is inf, not finite"),
        ({"score": [-0.5, 0.2, 0.3]}, "row 1: score is -0.5, below 0"),
        ({"end_ns": [1, 4, 11]}, "row 2: ends at 4 before it starts at 5"),
        ({"lane": ["cpu", "tpu", "cpu"]}, "row 2: lane 'tpu'; possible: cpu, gpu"),
        ({"start_ns": ["0", "5", "9"]}, "column start_ns holds 'string', not int64"),
        ({"start_ns": [0.0, 5.0, 9.0]}, "column start_ns holds 'double', not int64"),
        ({"trace_id": [1, 2, 3]}, "column trace_id holds 'int64', not string"),
        ({"score": [0.1, None, 0.3]}, "row 2: no score"),
        ({"trace_id": ["a", "a", "b" * 201]}, "column trace_id holds more than 200 characters"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_submission(tmp_path, [], None, CARD)
    pq.write_table(pa.table(columns(**changes)), tmp_path / "detections.parquet")
    with pytest.raises(UserError, match=message):
        read_submission(tmp_path)


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 4], np.int32)), pa.py_buffer(b"ab\xff\xfe")]
)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("trace_id", [{"a": 1}] * 3, "column trace_id holds 'struct<a: int64>', not string"),
        ("score", [[0.5]] * 3, "column score holds 'list<element: double>', not double"),
        ("trace_id", NOT_UTF8, "column trace_id holds bytes that are not UTF-8"),
        ("lane", NOT_UTF8, "column lane holds bytes that are not UTF-8"),
    ],
)
def test_parquet_of_other_makers(tmp_path: Path, name: str, column: object, message: str) -> None:
    write_submission(tmp_path, [], None, CARD)
    pq.write_table(pa.table(columns(**{name: column})), tmp_path / "detections.parquet")
    with pytest.raises(UserError, match=message):
        read_submission(tmp_path)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    table = pa.table(columns())
    table = table.append_column("score", table["score"])
    write_submission(tmp_path, [], None, CARD)
    pq.write_table(table, tmp_path / "detections.parquet")
    with pytest.raises(UserError, match="more than one column score"):
        read_submission(tmp_path)
    with pytest.raises(UserError, match="more than one column score"):
        Submission.of(CARD, table)


def test_at_most_twenty_bad_rows_are_listed() -> None:
    rows = [Detection("a", "host_sync", "cpu", 2, 1, 0.5)] * 25
    with pytest.raises(UserError) as error:
        Submission.of(CARD, rows)
    assert str(error.value).count("before it starts") == 20
    assert "25 bad row(s)" in str(error.value)
    assert str(error.value).endswith("and 5 more")


def test_missing_column_and_extra_column() -> None:
    table = pa.table(columns())
    with pytest.raises(UserError, match="no column lane, score; needed: trace_id"):
        Submission.of(CARD, table.drop_columns(["lane", "score"]))
    assert Submission.of(CARD, table.append_column("note", pa.array([1, 2, 3]))).detections.num_rows == 3


def test_other_integer_float_and_dictionary_types_are_cast(tmp_path: Path) -> None:
    table = pa.table(
        columns(
            trace_id=pa.array(["a", "a", "b"]).dictionary_encode(),
            start_ns=np.array([0, 5, 9], dtype=np.uint16),
            score=np.array([0, 1, 1], dtype=np.float32),
        )
    )
    assert Submission.of(CARD, table).detections.schema.equals(DETECTIONS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE.replace("0.75", "NaN"), "row 2: JSON is malformed"),
        (LINE.replace('"start_ns":10,', ""), "row 2: Object missing required field `start_ns`"),
        (LINE.replace("10", '"10"'), "row 2: Expected `int`, got `str`"),
        (LINE.replace("10", "9" * 30), "row 2: "),
        (LINE.replace("cpu", "tpu"), "row 2: Invalid enum value 'tpu'"),
        ("\n", "row 2: "),
        ("[" * 100_000 + "\n", "row 2: "),
        ("\x00\xff\n", "row 2: "),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_submission(folder(tmp_path, LINE + line))


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_submission(tmp_path / "p", [ROW] * 4, None, CARD)
    folder(tmp_path / "j", LINE * 4)
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    for name in "pj":
        with pytest.raises(UserError, match="3"):
            read_submission(tmp_path / name)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    for name in "pj":
        with pytest.raises(UserError, match="larger than 10 bytes"):
            read_submission(tmp_path / name)


def test_missing_and_doubled_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        read_submission(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no detections\.parquet or detections\.jsonl"):
        read_submission(tmp_path)
    write_submission(tmp_path, [ROW], None, CARD)
    (tmp_path / "detections.jsonl").write_text(LINE)
    with pytest.raises(UserError, match="holds both"):
        read_submission(tmp_path)
    (tmp_path / "detections.parquet").write_text("PAR1 not at all")
    (tmp_path / "detections.jsonl").unlink()
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_submission(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(UserError, match="unknown kind of file"):
        read_submission(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "field 'version'"),
        ("- a\n- b\n", "not a mapping"),
        ("{1: 2}", "not a mapping"),
        ("name: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("a: " + "[" * 500, "not YAML"),
        ("threshold: .nan", "field 'threshold'"),
        ("threshold: -1", "field 'threshold'"),
        ('name: "a\\e[31mb"', "field 'name'"),
        ("url: javascript:alert(1)", "field 'url'"),
        ("password: x", "field 'password'"),
        ("name: " + "x" * 70_000, "larger than"),
    ],
)
def test_bad_cards(tmp_path: Path, text: str, message: str) -> None:
    good = "name: x\nversion: 1.0\ndescription: d\nthreshold: 0.5\ntrained_on: nothing\n"
    path = tmp_path / "card.yaml"
    path.write_text(good)
    assert read_card(path).version == "1.0"
    key = text.partition(":")[0]
    lines = [line for line in good.splitlines() if line.partition(":")[0] != key]
    whole = text == "name: x\n" or message.startswith("not")
    path.write_text(text if whole else "\n".join([*lines, text]))
    with pytest.raises(UserError, match=message):
        read_card(path)


def test_nothing_is_written_when_a_row_is_bad(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_submission(tmp_path, [Detection("a", "p", "cpu", 2, 1, 0.5)], None, CARD)
    assert list(tmp_path.iterdir()) == []
