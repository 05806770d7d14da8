"""What a detector hands in: detections, optional window scores, and a card. Data only, never code or pickles.

A submission is a folder::

    card.yaml                            who, what, and the score threshold fixed on validation
    detections.parquet  or  .jsonl       {trace_id, pattern, lane, start_ns, end_ns, score}
    window_scores.parquet  or  .jsonl    {trace_id, window, lane, pattern, score}, optional

An empty detections file is a valid submission that reports nothing. Everything here is untrusted: sizes are
checked before anything is unpacked, and a bad row is named by its number (from 1) and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from torchtraceap.errors import UserError
from torchtraceap.files import replacing, write_text
from torchtraceap.labels.types import LANE_CLASSES, LaneClass

ANY_PATTERN: Final = "any"
"""As the pattern of a window score: something is wrong here, without saying what. Counts in the window scores
over all patterns (task 1), not in those by pattern and not in the classification (task 2)."""

MAX_ROWS = 2_000_000
MAX_BYTES = 512 * 2**20
"""Largest file, and largest unpacked size that a Parquet file may declare times four."""
MAX_CARD_BYTES = 16 * 2**10
MAX_TEXT = 200
"""Most characters of an id, pattern or lane."""
MAX_PROBLEMS = 20
"""So many bad rows are listed, the rest is counted."""

Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Detection(msgspec.Struct, frozen=True):
    """A place in a trace that a detector holds for an anti-pattern.

    Times are nanoseconds on the trace's clock. ``score`` is finite and at least 0, higher is surer; only its
    order and the card's threshold matter. For a pattern of step scope the row stands for each step that
    covers at least half of the row, or at least half of which the row covers; on a GPU lane, if at least half
    of it lies in labelled segments, for the steps that launched these.
    """

    trace_id: str
    pattern: str
    lane: LaneClass
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    score: float


class WindowScore(msgspec.Struct, frozen=True):
    """How sure a detector is of a pattern (or of :data:`ANY_PATTERN`) on a lane class in a window."""

    trace_id: str
    window: Index
    lane: LaneClass
    pattern: str
    score: float


DETECTIONS = pa.schema(
    {
        "trace_id": pa.string(),
        "pattern": pa.string(),
        "lane": pa.string(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
        "score": pa.float64(),
    }
)
WINDOW_SCORES = pa.schema(
    {
        "trace_id": pa.string(),
        "window": pa.int32(),
        "lane": pa.string(),
        "pattern": pa.string(),
        "score": pa.float64(),
    }
)

_Line = Annotated[str, Field(min_length=1, max_length=120)]
_Score = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SubmissionCard(BaseModel):
    """What a detector says of itself; untrusted text, to be escaped wherever it is shown.

    Attributes:
        name: Name of the detector, one line.
        version: Its version, one line.
        description: What it does, in a few sentences.
        threshold: Rows with at least this score are reported; fixed on validation, never on test.
        trained_on: Data that it has learnt from, for example ``"train split of release 1"`` or ``"nothing"``.
        url: Where its code is (http or https).
        tokens: Tokens that language models read and wrote for this submission.
        cost_usd: What they cost.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Line
    version: _Line
    description: Annotated[str, Field(min_length=1, max_length=4000)]
    threshold: _Score
    trained_on: Annotated[str, Field(min_length=1, max_length=1000)]
    url: Annotated[str, Field(pattern=r"^https?://\S+$", max_length=500)] | None = None
    tokens: Annotated[int, Field(ge=0)] | None = None
    cost_usd: _Score | None = None

    @field_validator("name", "version")
    @classmethod
    def _one_printable_line(cls, text: str) -> str:
        if not text.isprintable():
            raise ValueError("holds characters that cannot be printed")
        return text


@dataclass(frozen=True)
class Submission:
    """A submission in memory.

    Attributes:
        card: The detector's card.
        detections: Rows of schema :data:`DETECTIONS`.
        window_scores: Rows of schema :data:`WINDOW_SCORES`, possibly none.
    """

    card: SubmissionCard
    detections: pa.Table
    window_scores: pa.Table

    @classmethod
    def of(
        cls,
        card: SubmissionCard,
        detections: pa.Table | Iterable[Detection],
        window_scores: pa.Table | Iterable[WindowScore] | None = None,
    ) -> Submission:
        """Check rows made in memory.

        Raises:
            UserError: A column is missing or a row is impossible, as in :func:`read_submission`.
        """
        return cls(
            card,
            _table(detections, DETECTIONS, "detections"),
            _table(() if window_scores is None else window_scores, WINDOW_SCORES, "window scores"),
        )


def write_submission(
    folder: str | Path,
    detections: pa.Table | Iterable[Detection],
    window_scores: pa.Table | Iterable[WindowScore] | None,
    card: SubmissionCard,
) -> Submission:
    """Write a submission folder as Parquet, in the place of one that is there.

    Raises:
        UserError: A row is impossible, as in :func:`read_submission`; nothing is written.
    """
    folder = Path(folder)
    submission = Submission.of(card, detections, window_scores)
    # The card goes first and comes last: what is written half has none, and is not taken for a submission.
    (folder / "card.yaml").unlink(missing_ok=True)
    for stem in ("detections", "window_scores"):
        for suffix in _READERS:
            (folder / f"{stem}{suffix}").unlink(missing_ok=True)
    _write_parquet(folder / "detections.parquet", submission.detections)
    if window_scores is not None:
        _write_parquet(folder / "window_scores.parquet", submission.window_scores)
    fields = card.model_dump(exclude_none=True)
    write_text(folder / "card.yaml", yaml.safe_dump(fields, sort_keys=False, allow_unicode=True))
    return submission


def read_submission(path: str | Path, card: SubmissionCard | None = None) -> Submission:
    """Read a submission folder, or a single file of detections with its card beside it.

    What needs the truth (unknown traces and patterns, rows outside of a trace) is checked by the scorer.

    Args:
        path: The folder, or a ``.parquet`` or ``.jsonl`` file of detections.
        card: Stands for the ``card.yaml`` of the folder.

    Raises:
        UserError: A file is missing, too large or unreadable; a column is missing or of the wrong type; or
            rows are impossible (NaN, infinite or negative score, end before start, unknown lane). Names up to
            20 rows and how many there are.
    """
    path = Path(path)
    if path.is_dir():
        folder, detections = path, _find(path, "detections")
        if detections is None:
            raise UserError(f"{path}: no detections.parquet or detections.jsonl")
        windows = _find(path, "window_scores")
    elif path.is_file():
        folder, detections, windows = path.parent, path, None
    else:
        raise UserError(f"{path}: no such file or folder")
    return Submission(
        card=card or read_card(folder / "card.yaml"),
        detections=_read(detections, DETECTIONS, Detection),
        window_scores=_read(windows, WINDOW_SCORES, WindowScore) if windows else WINDOW_SCORES.empty_table(),
    )


def read_card(path: Path) -> SubmissionCard:
    """Read a card.

    Raises:
        UserError: It is missing, too large, no YAML mapping, or a field is missing, unknown or wrong.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; a submission needs a card")
    if path.stat().st_size > MAX_CARD_BYTES:
        raise UserError(f"{path}: larger than {MAX_CARD_BYTES} bytes")
    try:
        fields = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not YAML ({type(error).__name__})") from None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise UserError(f"{path}: not a mapping of field names; needed: {_required_fields()}")
    if isinstance(fields.get("version"), int | float):  # `version: 1.0` is what people write
        fields["version"] = str(fields["version"])
    try:
        return SubmissionCard.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{path}: field {where[:80]!r}: {first['msg']}; needed: {_required_fields()}"
        ) from None


def refuse(where: str, problems: Sequence[tuple[int, str]], total: int, kind: str = "row") -> None:
    """Raise when rows are bad.

    Args:
        where: The file or table.
        problems: Row index (from 0) and reason of the first bad rows.
        total: How many there are.
        kind: What a row is called.

    Raises:
        UserError: ``total`` is not 0.
    """
    if not total:
        return
    listed = "; ".join(f"{kind} {row + 1}: {reason}" for row, reason in problems[:MAX_PROBLEMS])
    more = total - min(len(problems), MAX_PROBLEMS)
    raise UserError(f"{where}: {total} bad {kind}(s): {listed}" + (f"; and {more} more" if more else ""))


Check = tuple[NDArray[np.bool_], Callable[[int], str]]
"""A mask of bad rows, and what is wrong with the row of an index."""


def refuse_rows(where: str, checks: Sequence[Check]) -> None:
    """Raise when any mask of ``checks`` is set; a row is counted once, with its first reason.

    Raises:
        UserError: Lists up to 20 rows.
    """
    bad = np.any([mask for mask, _ in checks], axis=0)
    rows = np.flatnonzero(bad)
    problems = []
    for row in rows[:MAX_PROBLEMS].tolist():
        reason = next(say for mask, say in checks if mask[row])
        problems.append((row, reason(row)))
    refuse(where, problems, len(rows))


def codes(column: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.int64]:
    """Position of each string of ``column`` in ``names``, -1 when it is none of them; shape (rows,)."""
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    position = {name: index for index, name in enumerate(names)}
    encoded = pa.concat_arrays(column.chunks).dictionary_encode()
    known = np.array([position.get(text, -1) for text in encoded.dictionary.to_pylist()], dtype=np.int64)
    return known[encoded.indices.to_numpy()]


def quoted(text: object) -> str:
    """Untrusted text for a message: shortened, without control characters."""
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _required_fields() -> str:
    return ", ".join(name for name, field in SubmissionCard.model_fields.items() if field.is_required())


def _find(folder: Path, stem: str) -> Path | None:
    found = [folder / f"{stem}{suffix}" for suffix in _READERS if (folder / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        raise UserError(f"{folder}: holds both {found[0].name} and {found[1].name}; keep one")
    return found[0] if found else None


def _read(path: Path, schema: pa.Schema, row_type: type[msgspec.Struct]) -> pa.Table:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: unknown kind of file; possible: {', '.join(_READERS)}")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES} bytes")
    return _conform(reader(path, schema, row_type), schema, str(path))


def _read_parquet(path: Path, schema: pa.Schema, _: type[msgspec.Struct]) -> pa.Table:
    strings = [field.name for field in schema if pa.types.is_string(field.type)]
    try:
        with pq.ParquetFile(path) as file:  # nothing is unpacked before its type is known
            _check_columns(file.schema_arrow, schema, file.metadata.num_rows, str(path))
            strings = [name for name in strings if _is_text(file.schema_arrow.field(name).type)]
        # Dictionaries stay dictionaries, so that a small file cannot unpack to gigabytes of one long string.
        with pq.ParquetFile(path, read_dictionary=strings) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if metadata.num_rows > MAX_ROWS:
                raise UserError(f"{path}: {metadata.num_rows} rows; at most {MAX_ROWS} are possible")
            if size > 4 * MAX_BYTES:
                raise UserError(f"{path}: unpacks to {size} bytes; at most {4 * MAX_BYTES} are possible")
            return file.read(columns=schema.names)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({quoted(str(error))})") from None


def _read_jsonl(path: Path, schema: pa.Schema, row_type: type[msgspec.Struct]) -> pa.Table:
    decode = msgspec.json.Decoder(row_type).decode
    columns: dict[str, list] = {name: [] for name in schema.names}
    problems: list[tuple[int, str]] = []
    bad = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number >= MAX_ROWS:
                raise UserError(f"{path}: more than {MAX_ROWS} rows")
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                bad += 1
                if len(problems) < MAX_PROBLEMS:
                    problems.append((number, str(error)[:120]))
                continue
            for name, column in columns.items():
                column.append(getattr(row, name))
    refuse(str(path), problems, bad)
    return pa.table(columns, schema=schema)


_READERS: dict[str, Callable[[Path, pa.Schema, type[msgspec.Struct]], pa.Table]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
}


def _table(rows: pa.Table | Iterable[msgspec.Struct], schema: pa.Schema, where: str) -> pa.Table:
    if not isinstance(rows, pa.Table):
        listed = list(rows)
        rows = pa.table(
            {name: [getattr(row, name) for row in listed] for name in schema.names}, schema=schema
        )
    return _conform(rows, schema, where)


def _conform(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """The columns of ``schema`` in its types; refuses what cannot be one."""
    _check_columns(table.schema, schema, table.num_rows, where)
    if table.num_rows > MAX_ROWS:
        raise UserError(f"{where}: {table.num_rows} rows; at most {MAX_ROWS} are possible")
    columns = [_cast(table[field.name], field, where) for field in schema]
    table = pa.table(columns, names=schema.names).combine_chunks()
    _check_rows(table, where)
    return table


def _check_columns(found: pa.Schema, wanted: pa.Schema, rows: int, where: str) -> None:
    """Refuse columns that are missing, there twice or, if there are rows, of a type that cannot be cast."""
    missing = [name for name in wanted.names if name not in found.names]
    if missing:
        raise UserError(f"{where}: no column {', '.join(missing)}; needed: {', '.join(wanted.names)}")
    if twice := [name for name in wanted.names if found.names.count(name) > 1]:
        raise UserError(f"{where}: more than one column {', '.join(twice)}")
    for field in wanted if rows else ():
        kind = _unpacked(found.field(field.name).type)
        if pa.types.is_string(field.type):
            fits = _is_text(kind)
        else:
            floats = pa.types.is_floating(field.type) and pa.types.is_floating(kind)
            fits = pa.types.is_integer(kind) or floats
        if not (fits or pa.types.is_null(kind)):
            raise UserError(f"{where}: column {field.name} holds {quoted(str(kind))}, not {field.type}")


def _unpacked(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    kind = _unpacked(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _cast(column: pa.ChunkedArray, field: pa.Field, where: str) -> pa.ChunkedArray:
    kind, wanted = _unpacked(column.type), field.type
    nulls = np.asarray(column.is_null(), dtype=bool)
    refuse_rows(where, [(nulls, lambda _: f"no {field.name}")])
    try:
        if pa.types.is_string(wanted) and len(column):
            # Looked at before a dictionary is unpacked: a long string repeated fills the memory.
            values = (chunk.dictionary if chunk.type != kind else chunk for chunk in column.chunks)
            if any(len(text) > MAX_TEXT for value in values for text in value.unique().to_pylist()):
                raise UserError(
                    f"{where}: column {field.name} holds more than {MAX_TEXT} characters in a row"
                )
        return column.cast(wanted, safe=pa.types.is_integer(wanted))
    except UnicodeDecodeError:
        raise UserError(f"{where}: column {field.name} holds bytes that are not UTF-8") from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{where}: column {field.name}: {quoted(str(error))}") from None


def _check_rows(table: pa.Table, where: str) -> None:
    lane = table["lane"]
    score = table["score"].to_numpy()
    checks: list[Check] = [
        (
            codes(lane, LANE_CLASSES) < 0,
            lambda row: f"lane {quoted(lane[row].as_py())}; possible: {', '.join(LANE_CLASSES)}",
        ),
        (~np.isfinite(score), lambda row: f"score is {score[row]}, not finite"),
        (score < 0, lambda row: f"score is {score[row]}, below 0 (the score of what is not reported)"),
    ]
    if "window" in table.column_names:
        window = table["window"].to_numpy()
        checks.append((window < 0, lambda row: f"window is {window[row]}, below 0"))
    else:
        start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
        checks.append((end < start, lambda row: f"ends at {end[row]} before it starts at {start[row]}"))
    refuse_rows(where, checks)


def _write_parquet(path: Path, table: pa.Table) -> None:
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
