"""Collected shards as a whole: what their sessions say, and which of all their costs hold.

A shard is a Parquet file of the table ``traces`` with the JSON of its session in the metadata. One that would
be too large to travel is several files: the first has the shard's name and the session, the others are its
parts:

    <name>.parquet    <name>.part-2-of-3.parquet    <name>.part-3-of-3.parquet
"""

from __future__ import annotations

import glob
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from torchtraceap.dataset import schema
from torchtraceap.dataset.costs import InstanceKey, Measurement, Measurements
from torchtraceap.dataset.parquet import read_metadata, read_traces, write_traces
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.files import replacing
from torchtraceap.labels.multiplicity import discoveries

MEGABYTE = 1_000_000
PART_KEY = "part"
"""Key in the metadata of each file of a shard of several."""

MOST_FILES = 100_000
"""Of a shard; a file that speaks of more was not written by a collection."""

_PART_NAME = re.compile(r"(?P<shard>.+)\.part-\d+-of-\d+\.parquet")


class Part(msgspec.Struct, frozen=True):
    """Which file of a shard of several this is: ``number`` of ``count``, from 1, of one ``set_id``."""

    set_id: str
    number: Annotated[int, msgspec.Meta(ge=1)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_FILES)]


class Differing(msgspec.Struct):
    """Events outside of all labels that a trace has and its clean twin has not, and the other way round."""

    trace_id: str
    extra: int
    missing: int
    names: dict[str, int] = {}


class Session(msgspec.Struct):
    """The part of a session's JSON that is read again. The null trials are ``labels.cost.Look``."""

    hardware: dict[str, Any]
    instances: list[Measurement]
    differences: list[Differing] = []
    null_trials: list[dict[str, Any]] = []
    unpaired: list[str] = []

    @property
    def measurements(self) -> dict[InstanceKey, Measurement]:
        """What was measured, by instance."""
        return {(one.trace_id, one.instance): one for one in self.instances}


def shards_of(runs: Sequence[str | Path]) -> list[Path]:
    """The shards of all ``runs``, of those of several files the first.

    Raises:
        UserError: There is no run, or one has no shards, or only later parts of one.
    """
    shards: list[Path] = []
    for run in map(Path, runs):
        files = sorted((run / "shards").glob("*.parquet"))
        found = [path for path in files if not _PART_NAME.fullmatch(path.name)]
        for path in files:
            if (part := _PART_NAME.fullmatch(path.name)) and path.with_name(
                f"{part['shard']}.parquet"
            ) not in found:
                raise UserError(
                    f"{path} is a part of {part['shard']}.parquet, which is missing: bring that file too, or "
                    "finish the run with `traceap collect --resume`"
                )
        if not found:
            raise UserError(f"{run} holds no shards/*.parquet; give folders that `traceap collect` wrote to")
        shards += found
    if not shards:
        raise UserError("No run was given; a data set needs the folder of at least one")
    return shards


def write_shard(path: Path, records: Sequence[TraceRecord], session: str, limit: int) -> int:
    """Write a shard in as few files as its traces take that are of ``limit`` bytes at most.

    A trace is never cut: one that is larger by itself has a file of its own.

    Args:
        path: The shard's first file. It holds all traces until their parts are there too, so that a writer
            that is killed leaves a whole shard or none.
        records: Its traces.
        session: JSON of how they were made; goes into the first file.
        limit: Bytes of a file.

    Returns:
        The number of files.
    """
    for stale in path.parent.glob(f"{glob.escape(path.stem)}.part-*.parquet"):  # of one that was killed
        stale.unlink()
    metadata = {schema.SESSION_KEY: session}
    write_traces(path, records, metadata)
    if path.stat().st_size <= limit or len(records) < 2:
        return 1
    # Together they take no more than one by one: what is alike is compressed together.
    groups = _in_order([_size_alone(path, record) for record in records], limit, len(session.encode()))
    set_id = secrets.token_hex(8)
    with ExitStack() as renames:  # the last to enter is the first to be renamed
        for number, group in enumerate(groups, start=1):
            of_file = metadata if number == 1 else {}
            part = msgspec.json.encode(Part(set_id, number, len(groups))).decode()
            temporary = renames.enter_context(replacing(_file_name(path, number, len(groups))))
            write_traces(temporary, [records[index] for index in group], {**of_file, PART_KEY: part})
    return len(groups)


def _size_alone(beside: Path, record: TraceRecord) -> int:
    """Bytes of a file of this trace, which is written beside another and removed."""
    path = beside.with_name(f".{beside.name}.alone.tmp")
    try:
        write_traces(path, [record])
        return path.stat().st_size
    finally:
        path.unlink(missing_ok=True)


def _in_order(sizes: Sequence[int], limit: int, used: int) -> list[list[int]]:
    """Indices in runs whose sizes sum to ``limit`` at most, the first with ``used`` bytes less."""
    groups: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += size
    return groups


def _file_name(shard: Path, number: int, count: int) -> Path:
    return shard if number == 1 else shard.with_name(f"{shard.stem}.part-{number}-of-{count}.parquet")


def files_of(shard: Path) -> list[Path]:
    """The files of a shard, in order.

    Raises:
        UserError: One is missing, of another writing of the shard, or none of ours.
    """
    first = _part(shard)
    parts = parts_to_come(shard)
    for number, path in enumerate(parts, start=2):
        if first is None or _part(path) != msgspec.structs.replace(first, number=number):
            raise UserError(f"{path} does not belong to {shard}: collect the workload again")
    return [shard, *parts]


def parts_to_come(shard: Path) -> list[Path]:
    """The files of a shard after the first, whether they are there or not.

    Raises:
        UserError: The first is none of ours.
    """
    first = _part(shard)
    return [] if first is None else [_file_name(shard, k, first.count) for k in range(2, first.count + 1)]


def _part(path: Path) -> Part | None:
    text = read_metadata(path).get(PART_KEY)
    try:
        return None if text is None else msgspec.json.decode(text, type=Part)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{path}: {PART_KEY} in its metadata is broken: {error}") from None


def traces_of(shard: Path) -> Iterator[TraceRecord]:
    """The records of a shard, from all of its files.

    Raises:
        UserError: As for :func:`files_of` and ``read_traces``.
    """
    return read_traces(files_of(shard))


def read_session(shard: Path) -> Session:
    """What ``shard`` says of its making.

    Raises:
        UserError: It says nothing, or something else.
    """
    text = read_metadata(shard).get(schema.SESSION_KEY)
    if text is None:
        raise UserError(
            f"{shard} has no {schema.SESSION_KEY} in its metadata: it was not written by a collection"
        )
    try:
        return msgspec.json.decode(text, type=Session)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{shard}: {schema.SESSION_KEY} in its metadata is broken: {error}") from None


@dataclass
class CostTests:
    """The cost measurements of all injected instances of a release, taken together."""

    _costly: set[InstanceKey] = field(default_factory=set)  # by their own measurement
    _test_of: dict[InstanceKey, tuple[Any, ...]] = field(default_factory=dict)  # which measurement it was

    def add(self, record: TraceRecord, measurements: Measurements, where: str) -> None:
        """Take up the injected instances of a trace.

        Raises:
            UserError: One has no p-value; names ``where``.
        """
        for index, instance in enumerate(record.instances):
            if instance.source != "injected":
                continue
            key = record.trace_id, index
            one = measurements.get(key)
            p = one.p_costly if one else None
            if p is None or not 0 <= p <= 1:
                raise UserError(f"{where}: no p-value in [0, 1] was measured for instance {index}")
            # Traces of one workload may share a measurement: it is one test, however many traces show it.
            self._test_of[key] = (record.meta["pair_id"], instance.pattern, instance.variant, p)
            if instance.state == "costly":
                self._costly.add(key)

    def update(self, other: CostTests) -> None:
        """Take up what ``other`` has."""
        self._costly |= other._costly
        self._test_of |= other._test_of

    def of(self, trace_ids: Collection[str]) -> CostTests:
        """Those of some traces."""
        return CostTests(
            {key for key in self._costly if key[0] in trace_ids},
            {key: test for key, test in self._test_of.items() if key[0] in trace_ids},
        )

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(set(self._test_of.values()))

    def demoted(self) -> frozenset[InstanceKey]:
        """Instances that are costly by their own measurement, but may be so by chance among all tests."""
        tests = sorted(set(self._test_of.values()))
        holds = dict(zip(tests, discoveries([test[-1] for test in tests]).tolist(), strict=True))
        return frozenset(key for key in self._costly if not holds[self._test_of[key]])
