"""Checks of files as files: which there are, their sums and columns, and what is published beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from torchtraceap.dataset import audited, checksums, schema
from torchtraceap.dataset.configs import DATA_FILE, SCHEMAS
from torchtraceap.dataset.croissant import NAME as CROISSANT
from torchtraceap.dataset.description import CARD, CARDS
from torchtraceap.dataset.features import shard_path
from torchtraceap.dataset.parquet import TRACES_PER_GROUP, read_metadata, read_table
from torchtraceap.dataset.verify._check import PROMISES, Check, judge
from torchtraceap.errors import UserError

FOOTER = {"torchtraceap.schema_version", "torchtraceap.canary", "ARROW:schema"}
"""Keys that the footer of a file may have: anything more may tell what nobody checks."""

_WRITERS = re.compile(r"parquet-(cpp-arrow|rs|mr|go) version [\w.+-]{1,30}( \(build [0-9a-f]*\))?$")


def data_files(folder: Path) -> list[Path]:
    """All Parquet files of a data set, sorted by name."""
    return sorted((folder / "data").glob("*.parquet"))


def layout(folder: Path) -> Check:
    """Whether the files of one build are there, and no others."""
    files = sorted((folder / "data").iterdir())
    return judge("layout", len(files), "files", _misplaced(folder, files))


def _misplaced(folder: Path, files: list[Path]) -> Iterator[str]:
    if not (folder / CARD).is_file():
        yield f"{CARD} is missing"
    for path in files:
        if not (DATA_FILE.fullmatch(path.name) and path.is_file()):
            yield f"data/{path.name} does not belong to a data set"
    names = {path.name for path in files}
    for config in SCHEMAS:
        for split in schema.SPLITS:
            mine = {name for name in names if name.startswith(f"{config}-{split}-")}
            count = max(1, len(mine))
            expected = {shard_path(config, split, index, count).name for index in range(count)}
            for name in sorted(expected - mine):
                yield f"data/{name} is missing"
            for name in sorted(mine - expected):
                yield f"data/{name} is of another build than the rest, or the rest is missing"


def _to_be_named(folder: Path) -> set[str]:
    """Files that must be in SHA256SUMS, relative to ``folder``."""
    beside = {name for name in (CARD, CROISSANT, audited.NAME) if (folder / name).exists()}
    pages = {f"{CARDS}/{path.name}" for path in (folder / CARDS).glob("*")}
    return beside | pages | {f"data/{path.name}" for path in data_files(folder)}


def sums(folder: Path) -> Check:
    """Whether each file is the one that SHA256SUMS names."""
    try:
        named = checksums.read_checksums(folder)
    except UserError as error:
        return judge("checksums", 0, "files", [str(error)])
    missing = (f"{name} is not named" for name in sorted(_to_be_named(folder) - named.keys()))
    return judge("checksums", len(named), "files", [*checksums.differing(folder), *missing])


def columns(folder: Path) -> Check:
    """Whether each file has the columns of its config and says of itself what it may."""
    found: list[str] = []
    files = [path for path in data_files(folder) if DATA_FILE.fullmatch(path.name)]
    for path in files:
        try:
            found += [f"data/{path.name} {what}" for what in _misshapen(path)]
        except UserError as error:
            found.append(str(error))
    return judge("schema", len(files), "files", found)


def _misshapen(path: Path) -> Iterator[str]:
    config = path.name.partition("-")[0]
    said = read_metadata(path)
    if said.get("canary") != schema.CANARY:
        yield "has no canary, or another one"
    with pq.ParquetFile(path) as file:
        expected = SCHEMAS[config]
        found = file.schema_arrow.remove_metadata()  # the footer, which has its own check
        if not found.equals(expected):
            yield f"has other columns than the config {config}: {_difference(found, expected)}"
            return
        if noted := [field.name for field in found if any(_notes(field))]:
            yield f"has notes at {', '.join(noted)}"
        keys = {key.decode("utf-8", "replace") for key in file.metadata.metadata or {}}
        if more := sorted(keys - FOOTER):
            yield f"says more of itself than it may: {', '.join(more)}"
        if not _WRITERS.match(file.metadata.created_by):
            yield f"says that {file.metadata.created_by} wrote it, no known writer"
        rows = [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]
    if config == "traces":
        if max(rows, default=0) > TRACES_PER_GROUP:
            yield f"has row groups of {max(rows)} traces, more than {TRACES_PER_GROUP}"
        return
    table = read_table(path, expected)
    if nulls := [name for name in expected.names if table.column(name).null_count]:
        yield f"has nulls in {', '.join(nulls)}"


def _notes(field: pa.Field) -> Iterator[bytes]:
    """Keys of what is said of a column, or inside of one, but for the number that Parquet gives it."""
    yield from (key for key in field.metadata or {} if key != b"PARQUET:field_id")
    kind = field.type
    for index in range(kind.num_fields):
        yield from _notes(kind.field(index))


def _difference(found: Any, expected: Any) -> str:
    """The columns in which two schemas differ."""
    names = [name for name in expected.names if name not in found.names]
    names += [name for name in found.names if name not in expected.names]
    names += [f.name for f in expected if f.name in found.names and found.field(f.name).type != f.type]
    return ", ".join(names) or "their order, or whether they may be null"


class _Object(msgspec.Struct, rename={"content_url": "contentUrl"}):
    content_url: str | None = None
    sha256: str | None = None


class _Field(msgspec.Struct):
    name: str


class _RecordSet(msgspec.Struct, rename={"id": "@id"}):
    id: str
    field: list[_Field] = []


class _Croissant(msgspec.Struct, rename={"record_set": "recordSet"}):
    distribution: list[_Object]
    record_set: list[_RecordSet]


def croissant(folder: Path) -> Check:
    """Whether croissant.json, if there is one, describes these files."""
    path = folder / CROISSANT
    if not path.exists():
        return Check("croissant", PROMISES["croissant"], 0, 0, "", note=f"there is no {CROISSANT}")
    try:
        said = msgspec.json.decode(path.read_bytes(), type=_Croissant)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return judge("croissant", 0, "files", [f"{CROISSANT} is broken: {error}"])
    named = {one.content_url: one.sha256 for one in said.distribution if one.content_url is not None}
    return judge("croissant", len(named), "files", _misdescribed(folder, named, said.record_set))


def _misdescribed(folder: Path, named: dict[str, str | None], record_sets: list[_RecordSet]) -> Iterator[str]:
    there = {f"data/{path.name}": path for path in data_files(folder)}
    for name in sorted(there.keys() ^ named.keys()):
        yield f"{name} is {'not described' if name in there else 'described and not there'}"
    for name in sorted(there.keys() & named.keys()):
        if named[name] != checksums.sha256(there[name]):
            yield f"{name} has another digest than {CROISSANT} says"
    described = {one.id: {field.name for field in one.field} for one in record_sets}
    for config, columns in SCHEMAS.items():
        if lacking := sorted(set(columns.names) - described.get(config, set())):
            yield f"the config {config} is described without {', '.join(lacking)}"


def audit(folder: Path) -> Check:
    """Whether the outcome of an audit of these data is recorded, whatever it is."""
    try:
        said = audited.read_audit(folder)
    except UserError as error:
        return judge("audit", 0, "audits", [str(error)])
    found = []
    if said.data != audited.data_digest(folder):
        found.append(f"{audited.NAME} is of other data; audit these")
    if said.passed != (bool(said.arms) and all(arm.passed for arm in said.arms)):
        found.append(f"{audited.NAME} says {said.passed} of passed, and its arms say otherwise")
    arms = ", ".join(f"{arm.name} {'passed' if arm.passed else 'not passed'}" for arm in said.arms)
    return judge("audit", 1, "audits", found, note=arms or "places were not audited")
