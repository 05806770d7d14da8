"""From collected shards to the published data set: checked, decided, split, written as a whole or not at all.

A source is a shard, or a file of a data set that was built before (dataset/sources.py). Sources are read
twice, a few traces at a time: once to check them and to decide what depends on all of them (which costs hold,
who is on which side of the split), once to write. The first is a task a source, the second a task a file of
traces, in this process or in many (``parallel.map_on``). The outcome depends on the contents of the sources
and on the seed, not on names or order, and not on where it was made.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import platform
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from torchtraceap import __version__
from torchtraceap.dataset import schema, splits
from torchtraceap.dataset.attribution import violations
from torchtraceap.dataset.card import Facts, Released
from torchtraceap.dataset.configs import DATA_FILE, SCHEMAS
from torchtraceap.dataset.costs import InstanceKey, cost_table
from torchtraceap.dataset.description import BESIDE, CARD, CARDS, PAGES, WRITTEN, describe
from torchtraceap.dataset.features import shard_path
from torchtraceap.dataset.parquet import write_table, write_traces
from torchtraceap.dataset.pictures import Draw
from torchtraceap.dataset.rows import segment_table
from torchtraceap.dataset.shards import CostTests
from torchtraceap.dataset.sources import hardware_of, measurements_of, records_of, sources_of
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.verify import Report, verify
from torchtraceap.dataset.windows import WINDOWS, window_table
from torchtraceap.errors import UserError
from torchtraceap.labels.markers import PREFIX
from torchtraceap.parallel import HERE, Where, map_on

MEMORY = ("memory_gib", "ram_gib")
"""Columns of the hardware that may grow between visits to one machine: virtual ones get theirs by and by."""

TRACES_PER_FILE = 256
LATER = ("audit",)
"""Promises that are kept once the data set is there. Those about events have been checked shard by shard."""

WORK = (".build-", ".tmp")
"""How the names of folders begin and end in which a build writes, within the data set's."""

Progress = Callable[[str, int, int], None]
"""Told the stage (``checking`` shards, ``writing`` traces, ``verifying``), how many are done, of how many."""


@dataclass(frozen=True)
class BuildReport:
    """What a build wrote.

    Attributes:
        traces: Number by split.
        units: Number of split units by split.
        left_out: Traces with a held-out variant whose unit is not in test.
        tested: Cost measurements of injected instances.
        demoted: Instances called costly by their own measurement that became undecided, as too many of all
            might be so by chance.
        unplaced: Instances without any segment in their trace.
        windows, segments: Number of rows.
        size_bytes: Of all data files.
    """

    traces: dict[str, int]
    units: dict[str, int]
    left_out: int
    tested: int
    demoted: int
    unplaced: int
    windows: int
    segments: int
    size_bytes: int


def build(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    seed: int,
    where: Where = HERE,
    progress: Progress | None = None,
    date: str = "",
    draw: Draw | None = None,
) -> BuildReport:
    """Make the published data set out of the shards of ``runs`` and the traces of data sets among them.

    Args:
        runs: Folders that hold ``shards/*.parquet``, or a data set. Splits and states of a data set are not
            kept: both depend on all traces of the new one.
        out: The data set's folder. Its ``data/`` and all that describes it are replaced, anything else stays.
        seed: Orders the units of the split.
        where: Processes that do the work; those of a cluster must see all folders under the same paths.
        progress: See :data:`Progress`.
        date: Of the release, as 2026-11-30, for the card and Croissant.
        draw: Draws a trace, for a timeline of each task (dataset/pictures.py).

    Raises:
        UserError: A run has no shards, a shard is broken or holds what cannot be published, two disagree,
            ``out`` holds others' files under our names, or another build writes to ``out``. Nothing has been
            changed then.
    """
    tell = progress or (lambda stage, done, total: None)
    out = Path(out)
    sources = sources_of(runs)
    if where.ray:
        # Not resolved: a file of a data set in the cache of the Hub is a link to one without a name.
        out, sources = out.resolve(), [source.absolute() for source in sources]
    with _claimed(out):
        _require_ours(out)
        return _build(sources, out, seed, where, tell, date, draw)


def _build(
    sources: Sequence[Path], out: Path, seed: int, where: Where, tell: Progress, date: str, draw: Draw | None
) -> BuildReport:
    survey = _Survey()
    tell("checking", 0, len(sources))
    for done, (source, seen) in enumerate(
        zip(sources, map_on(where, examine, sources), strict=True), start=1
    ):
        survey.add(source, seen)
        tell("checking", done, len(sources))
    decisions = _decide(survey, seed)

    work = Path(tempfile.mkdtemp(prefix=WORK[0], suffix=WORK[1], dir=out))
    writer = _Writer(work, survey, decisions, tell)
    writer.run(where)
    left_out = len(survey.members) - len(writer.released)
    facts = Facts(
        version=__version__, schema_version=schema.SCHEMA_VERSION, seed=seed, left_out=left_out, date=date
    )
    describe(work, SCHEMAS, writer.released, survey.hardware_rows(writer.released), facts, draw)
    report = BuildReport(
        traces={split: writer.count(split) for split in schema.SPLITS},
        units={split: len(writer.units(split)) for split in schema.SPLITS},
        left_out=left_out,
        tested=decisions.tested,
        demoted=len(decisions.demoted),
        unplaced=sum(released.unplaced for released in writer.released),
        windows=writer.windows,
        segments=writer.segments,
        size_bytes=sum(path.stat().st_size for path in (work / "data").iterdir()),
    )
    tell("verifying", 0, 1)
    _require_kept(verify(work, 0, where=where, leave_out=LATER))
    tell("verifying", 1, 1)
    _swap(work, out)
    return report


def _require_kept(report: Report) -> None:
    """Refuse to publish what breaks a promise.

    Raises:
        UserError: A check failed; names it, and what it found first.
    """
    for check in report.failures:
        raise UserError(
            f"the data set would not keep what it promises, {check.name}: {check.violations[0]}; remove the "
            "shards that this comes from and collect their workloads again"
        )


@dataclass(frozen=True)
class Examined:
    """What is known of a source that has been read and checked; no events."""

    hardware: pa.Table
    members: list[splits.Member]
    tests: CostTests


def examine(source: Path) -> Examined:
    """Read and check a source.

    Raises:
        UserError: It is broken or holds what cannot be published.
    """
    hardware = pa.concat_tables([_hardware_table(row, source) for row in hardware_of(source)])
    machines = hardware["hardware_id"].to_pylist()
    measurements = measurements_of(source)
    members, tests = [], CostTests()
    for record in records_of(source):
        where = f"{source}: trace {record.trace_id}"
        check(record, where)
        if record.meta["hardware_id"] not in machines:
            known = ", ".join(machines)
            raise UserError(f"{where} was made on {record.meta['hardware_id']}, what is known is {known}")
        members.append(splits.member(record))
        tests.add(record, measurements, where)
    return Examined(hardware, members, tests)


def _hardware_table(row: dict[str, Any], shard: Path) -> pa.Table:
    if wrong := sorted(row.keys() ^ set(schema.HARDWARE.names)):
        raise UserError(f"{shard}: its hardware lacks or has unknown: {', '.join(wrong)}")
    if nulls := sorted(name for name, value in row.items() if value is None):
        raise UserError(f"{shard}: its hardware has null for: {', '.join(nulls)}")
    try:
        return pa.Table.from_pylist([row], schema=schema.HARDWARE)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{shard}: its hardware does not follow the schema: {error}") from None


@dataclass
class _Survey:
    """What is known after each source has been read once; no events."""

    members: dict[str, splits.Member] = field(default_factory=dict)
    source_of: dict[str, Path] = field(default_factory=dict)
    hardware: dict[str, tuple[pa.Table, Path]] = field(default_factory=dict)
    tests: CostTests = field(default_factory=CostTests)
    _signatures: dict[frozenset[Any], splits.Signature] = field(default_factory=dict)

    def add(self, source: Path, seen: Examined) -> None:
        """Take up what was seen in a source, if it agrees with the others."""
        for row in range(len(seen.hardware)):
            self._add_hardware(seen.hardware.slice(row, 1), source)
        for member in seen.members:
            if other := self.source_of.get(member.trace_id):
                raise UserError(
                    f"{source}: trace {member.trace_id} is also in {other}; give each run once, and no data "
                    "set beside a run that it was made of"
                )
            self.source_of[member.trace_id] = source
            # Most of what is known of a trace; the same for all traces of a program, and so kept once.
            signature = self._signatures.setdefault(frozenset(member.signature.items()), member.signature)
            self.members[member.trace_id] = replace(member, signature=signature)
        self.tests.update(seen.tests)

    def hardware_rows(self, traces: Iterable[Released]) -> pa.Table:
        """The hardware that ``traces`` were made on, sorted by id."""
        used = {str(one.meta["hardware_id"]) for one in traces}
        tables = [self.hardware[name][0] for name in sorted(used)]
        return pa.concat_tables([schema.HARDWARE.empty_table(), *tables])

    def _add_hardware(self, table: pa.Table, source: Path) -> None:
        hardware_id = table["hardware_id"][0].as_py()
        known, other = self.hardware.setdefault(hardware_id, (table, source))
        old, new = known.to_pylist()[0], table.to_pylist()[0]
        grown = [name for name in MEMORY if new[name] > old[name]]
        if grown:
            self.hardware[hardware_id] = (table, source)
        if differing := [
            f"{name} {old[name]} / {new[name]}"
            for name in old
            if name not in MEMORY and old[name] != new[name]
        ]:
            raise UserError(
                f"{source} and {other} disagree on hardware {hardware_id}: {'; '.join(differing)}. "
                "Build them apart, or collect one of them again"
            )


@dataclass(frozen=True)
class _Decisions:
    unit: dict[str, str]  # by trace id
    split: dict[str, str]  # by trace id, of those that are released
    demoted: frozenset[InstanceKey]
    tested: int


def _decide(survey: _Survey, seed: int) -> _Decisions:
    members = survey.members.values()
    unit = splits.split_units(members)
    split_of_unit = splits.assign(members, unit, seed)
    placed = {m.trace_id: splits.placement(split_of_unit[unit[m.trace_id]], m.heldout) for m in members}
    split = {trace_id: split for trace_id, split in placed.items() if split}
    # Of what is released alone, so that it can be derived from the release.
    tests = survey.tests.of(split.keys())
    return _Decisions(unit=unit, split=split, demoted=tests.demoted(), tested=tests.count)


@dataclass(frozen=True)
class FileOfTraces:
    """A file to write, number ``index`` of ``count`` of its split, with what belongs to them beside it.

    Attributes:
        folder: Of the data set.
        sources: Sources with the ids to take from each, in the order of the file.
        unit: Split unit by trace id.
        demoted: Instances that become undecided.
    """

    folder: Path
    split: str
    index: int
    count: int
    sources: list[tuple[Path, list[str]]]
    unit: dict[str, str]
    demoted: frozenset[InstanceKey]

    def path(self, config: str) -> Path:
        """Where its rows of a config go."""
        return self.folder / shard_path(config, self.split, self.index, self.count)

    def records(self) -> Iterator[tuple[TraceRecord, pa.Table]]:
        """The records, labelled for release, with their rows of ``costs``."""
        for source, ids in self.sources:
            measurements = measurements_of(source)
            wanted = {record.trace_id: record for record in records_of(source, ids)}
            for trace_id in ids:
                record = self._decided(wanted.pop(trace_id))
                yield record, cost_table(record, measurements)

    def _decided(self, record: TraceRecord) -> TraceRecord:
        record.instances = [
            msgspec.structs.replace(instance, state="undecided")
            if (record.trace_id, index) in self.demoted
            else instance
            for index, instance in enumerate(record.instances)
        ]
        record.meta |= {"split_unit": self.unit[record.trace_id], "quality": record.quality}
        return record


def write_file(file: FileOfTraces) -> list[Released]:
    """Write the traces of a file, their windows, their segments and their costs.

    Raises:
        UserError: The folder is not there, which another machine should see.
    """
    if not file.folder.is_dir():
        raise UserError(
            f"{platform.node()} does not see {file.folder}: choose an output that all nodes share"
        )
    tables = {"windows": [WINDOWS.empty_table()], "segments": [schema.SEGMENTS.empty_table()]}
    tables["costs"] = [schema.COSTS.empty_table()]
    released: list[Released] = []

    def seen() -> Iterator[TraceRecord]:
        for record, costs in file.records():
            windows = window_table(record)
            tables["windows"].append(windows)
            tables["segments"].append(segment_table(record))
            tables["costs"].append(costs)
            flags = (windows[name].to_numpy().sum().item() for name in ("positive", "ignored"))
            released.append(Released.of(record, file.split, len(windows), *flags))
            yield record

    write_traces(file.path("traces"), seen())
    for config, parts in tables.items():
        table = pa.concat_tables(parts).combine_chunks()  # an empty first row group breaks `datasets`
        write_table(file.path(config), table, SCHEMAS[config])
    return released


class _Writer:
    """Second pass: writes all tables of all splits under ``folder``/data."""

    def __init__(self, folder: Path, survey: _Survey, decisions: _Decisions, tell: Progress) -> None:
        self.folder = folder
        self.survey = survey
        self.decisions = decisions
        self.tell = tell
        self.released: list[Released] = []

    def run(self, where: Where) -> None:
        total = len(self.decisions.split)
        self.tell("writing", 0, total)
        files = [file for split in schema.SPLITS for file in self._files(split)]
        for released in map_on(where, write_file, files):
            self.released += released
            self.tell("writing", len(self.released), total)
        for split in schema.SPLITS:
            rows = self.survey.hardware_rows(one for one in self.released if one.split == split)
            write_table(self.folder / shard_path("hardware", split), rows, schema.HARDWARE)

    def count(self, split: str) -> int:
        return sum(released.split == split for released in self.released)

    def units(self, split: str) -> set[str]:
        return {r.meta["split_unit"] for r in self.released if r.split == split}

    @property
    def windows(self) -> int:
        return sum(released.windows for released in self.released)

    @property
    def segments(self) -> int:
        return sum(sum(released.segments) for released in self.released)

    def _files(self, split: str) -> Iterator[FileOfTraces]:
        """The files of a split; one without traces if it has none."""
        order = self._order(split)
        count = max(1, -(-len(order) // TRACES_PER_FILE))
        for index in range(count):
            part = order[index * TRACES_PER_FILE : (index + 1) * TRACES_PER_FILE]
            ids = {trace_id for _, trace_id in part}
            yield FileOfTraces(
                folder=self.folder,
                split=split,
                index=index,
                count=count,
                sources=[
                    (source, [trace_id for _, trace_id in pairs])
                    for source, pairs in itertools.groupby(part, lambda pair: pair[0])
                ],
                unit={trace_id: self.decisions.unit[trace_id] for trace_id in ids},
                demoted=frozenset(key for key in self.decisions.demoted if key[0] in ids),
            )

    def _order(self, split: str) -> list[tuple[Path, str]]:
        """The traces of a split with their sources.

        Workloads come in the order of their first trace id, and traces in the order of their ids. These are
        random, so the order says nothing of when a trace was made.
        """
        workloads: dict[str, list[str]] = defaultdict(list)
        for trace_id, side in self.decisions.split.items():
            if side == split:
                workloads[self.survey.members[trace_id].pair_id].append(trace_id)
        return [
            (self.survey.source_of[trace_id], trace_id)
            for trace_ids in sorted(workloads.values(), key=min)
            for trace_id in sorted(trace_ids)
        ]


def check(record: TraceRecord, where: str) -> None:
    """Check what a published trace promises beyond ``Trace.check`` and the reader's own checks.

    Raises:
        UserError: Names ``where`` and the first broken promise.
    """
    trace = record.trace

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise UserError(f"{where}: {what}; remove the shard and collect its workload again")

    require(len(trace) > 0, "it has no events")
    require(record.meta["task"] in schema.TASKS, f"its task is none of {', '.join(schema.TASKS)}")
    require(record.meta["mode"] in schema.MODES, f"its mode is none of {', '.join(schema.MODES)}")
    rank, size = record.meta["rank"], record.meta["world_size"]
    require(isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size, f"it has no rank {rank}")
    for name in itertools.chain((op.name for op in trace.ops), (lane.name for lane in trace.lanes)):
        require(PREFIX not in name, "a marker of the harness is left in it, which gives the labels away")
    for name in ("step_ms", "profiler_ratio"):
        require(0 < float(str(record.meta[name])) < math.inf, f"its {name} is no positive number")
    for index, one in enumerate(record.instances):
        ratios = (one.cost_ratio, one.cost_low, one.cost_high)
        measured = math.isfinite(one.cost_ms) and all(0 < ratio < math.inf for ratio in ratios)
        require(
            measured or one.source != "injected", f"the cost of instance {index} is no number or negative"
        )
    try:
        problem = next(violations(record), None)
    except UserError as error:  # of a pattern or variant that the catalogue has not
        raise UserError(f"{where}: {error}") from None
    require(problem is None, f"{problem}")


def _require_ours(out: Path) -> None:
    """Refuse to replace anything but a data set's files and card."""
    for folder, names in ((out / "data", DATA_FILE), (out / CARDS, PAGES)):
        strangers = []
        if folder.is_dir():
            strangers = [
                path for path in folder.iterdir() if not (names.fullmatch(path.name) and path.is_file())
            ]
        elif folder.exists() or folder.is_symlink():
            strangers = [folder]
        if strangers:
            raise UserError(
                f"{folder} would be replaced, but is no data set: {strangers[0].name} does not belong there"
            )
    card = out / CARD
    if card.exists() and not (card.is_file() and schema.CANARY in card.read_text("utf-8", "replace")):
        raise UserError(
            f"{card} would be replaced, but is no data set's card; move it or choose another folder"
        )
    for path in (out / name for name in BESIDE):
        if path.is_dir() or (path.exists() and not card.exists()):
            raise UserError(f"{path} would be replaced, but belongs to no data set; move it")


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Make ``out`` and keep it ours alone while the block runs; what was there stays if the block fails.

    That holds for a build that was killed, too: the next one first puts right what it left.
    """
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes when this process does, however it ends
        except BlockingIOError:
            raise UserError(f"{out} is in use: another process builds into it") from None
        _settle(out)
        try:
            yield
        finally:
            _settle(out)
            if is_new and not any(out.iterdir()):
                out.rmdir()
    finally:
        os.close(folder)


def _settle(out: Path) -> None:
    """Finish or undo the swap of a build that ended in the middle of it, and remove its folder."""
    for work in out.glob("*".join(WORK)):
        if (work / "old").exists() and not (out / "data").exists():
            (work / "old").rename(out / "data")
        elif (work / CARD).exists() and not (work / "data").exists():
            _describe_new(work, out)
        shutil.rmtree(work, ignore_errors=True)


def _swap(work: Path, out: Path) -> None:
    """Put what is in ``work`` in the place of what is in ``out``; :func:`_settle` knows each state."""
    if (out / "data").exists():
        (out / "data").rename(work / "old")
    (work / "data").rename(out / "data")
    _describe_new(work, out)


def _describe_new(work: Path, out: Path) -> None:
    """Replace what describes the old data, the card last; may be done again after it was interrupted."""
    if (work / CARDS).exists():
        shutil.rmtree(out / CARDS, ignore_errors=True)
        (work / CARDS).rename(out / CARDS)
    for name in BESIDE:
        if (work / name).exists():
            (work / name).replace(out / name)
        elif name not in WRITTEN:  # of the old data
            (out / name).unlink(missing_ok=True)
    (work / CARD).replace(out / CARD)
