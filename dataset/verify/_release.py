"""Checks of all traces together, and of the tables beside them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats

from torchtraceap.dataset import schema, splits
from torchtraceap.dataset.description import CARDS
from torchtraceap.dataset.rows import segment_table
from torchtraceap.dataset.verify import _texts
from torchtraceap.dataset.verify._check import Check, judge
from torchtraceap.dataset.verify._survey import Seen
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import MARGIN
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import Instance, quality

Tables = Mapping[str, pa.Table]
"""A table of each split."""

ID = re.compile(r"[0-9a-f]{16}")
SLUG = re.compile(r"[\w.+-]{1,80}(?:/[\w.+-]{1,80})?")
INPUT = re.compile(r"\d+(?:x\d+)*")
LANES = {"cpu": re.compile(r"thread \d{1,3}"), "gpu": re.compile(r"stream (-1|\d{1,5})")}
"""Names of lanes. Threads are counted, with gaps where one has no event left; streams have small numbers."""

DEVICES = ("cuda", "rocm", "xpu", "mps", "cpu")
BY_CHANCE = 0.025
"""Share of published intervals that lie on the wrong side of the truth: 95 % intervals miss it on each side
so often. They come from pairs that were run after the verdict, and may contradict it as often."""

SURE = 1e-3
"""What chance does more seldom fails: so many contradictions, or so uneven a bit of the ids."""


def checks(
    folder: Path, seen: Sequence[Seen], windows: Tables, segments: Tables, hardware: Tables
) -> Iterator[Check]:
    """All checks of this module."""

    def each(name: str, find: Callable[[Seen], Iterable[str]], *more: str) -> Check:
        found = [f"trace {one.trace_id}: {what}" for one in seen for what in find(one)]
        return judge(name, len(seen), "traces", [*found, *more])

    yield each("ids", _numbers, *_ids([one.trace_id for one in seen], [one.meta["pair_id"] for one in seen]))
    yield each("metadata", _metadata)
    yield _hardware(seen, hardware)
    beside = list(_beside(hardware))
    yield each("markers", lambda one: one.markers, *_texts.markers(beside))
    yield each("privacy", lambda one: one.private, *_texts.private(beside), *_private_pages(folder))
    yield each("instances", _instances, *_contradictions(seen))
    yield each("exhaustive", _exhaustive)
    yield _segments(seen, segments)
    yield _tiles(seen, windows)
    yield judge("splits", len(seen), "traces", _splits(seen))
    yield each("heldout", _heldout)
    yield _ranks(seen)


def _numbers(one: Seen) -> Iterator[str]:
    """What counts on from one profile to the next would tell their order, so all is numbered anew."""
    for name in ("trace_id", "pair_id"):
        if not ID.fullmatch(one.meta[name]):
            yield f"its {name} {one.meta[name]!r} is not 16 hex digits"
    steps = [f"ProfilerStep#{index}" for index in range(len(one.steps))]
    if sorted(one.steps) != sorted(steps):
        yield f"its steps are {', '.join(one.steps)}, not numbered from 0"
    for lane in one.record.trace.lanes:
        if not LANES[lane.kind].fullmatch(lane.name) or (lane.device < 0) != (lane.kind == "cpu"):
            yield f"it has a {lane.kind} lane {lane.name!r} on device {lane.device}"


def _ids(trace_ids: Sequence[str], pair_ids: Sequence[str]) -> Iterator[str]:
    for name, count in Counter(trace_ids).items():
        if count > 1:
            yield f"{count} traces have the id {name}"
    for what, ids in (("trace_id", set(trace_ids)), ("pair_id", set(pair_ids))):
        valid = [one for one in ids if ID.fullmatch(one)]
        bits = np.array([[int(bit) for bit in f"{int(one, 16):064b}"] for one in valid]).reshape(-1, 64)
        ones, n = bits.sum(axis=0), len(valid)
        # Two-sided, and divided among 64 bits: random ids fail as seldom as SURE says.
        p = 2 * stats.binom.cdf(np.minimum(ones, n - ones), n, 0.5)
        if n and 64 * p.min() < SURE:
            bit = int(p.argmin())
            yield f"{what} is not random: bit {63 - bit} is set in {ones[bit]} of {n}"


def _metadata(one: Seen) -> Iterator[str]:
    meta = one.meta
    gpu = any(lane.kind == "gpu" for lane in one.record.trace.lanes)
    in_range = {
        "task": meta["task"] in schema.TASKS,
        "mode": meta["mode"] in schema.MODES,
        "model": meta["model"].startswith(f"{meta['source']}/"),
        "input_shape": bool(INPUT.fullmatch(meta["input_shape"])),
        "batch_size": meta["batch_size"] >= 1,
        "rank": 0 <= meta["rank"] < meta["world_size"],
        "steps": meta["steps"] == len(one.steps) >= 1,
        "quality": meta["quality"] == quality(one.record.instances),
        "step_ms": 0 < meta["step_ms"] < math.inf,
        "profiler_ratio": 0 < meta["profiler_ratio"] < math.inf,
        "gpu_busy": 0 <= meta["gpu_busy"] <= 1 if gpu else math.isnan(meta["gpu_busy"]),
    }
    slugs = ("model", "source", "family", "split_unit", "hardware_id", "precision")
    in_range |= {name: in_range.get(name, True) and bool(SLUG.fullmatch(meta[name])) for name in slugs}
    in_range["backbone_family"] = not meta["backbone_family"] or bool(SLUG.fullmatch(meta["backbone_family"]))
    yield from (f"its {name} is {meta[name]!r}" for name, ok in in_range.items() if not ok)


def _hardware(seen: Sequence[Seen], tables: Tables) -> Check:
    found: list[str] = []
    known: dict[str, dict[str, Any]] = {}
    for split, table in tables.items():
        rows = table.to_pylist()
        listed = [row["hardware_id"] for row in rows]
        used = {one.meta["hardware_id"] for one in seen if one.split == split}
        found += [f"{split} lists {name} twice" for name, count in Counter(listed).items() if count > 1]
        found += [f"{split} lacks {name}" for name in sorted(used - set(listed))]
        found += [
            f"{split} lists {name}, on which no trace of it was made" for name in listed if name not in used
        ]
        for row in rows:
            if known.setdefault(row["hardware_id"], row) != row:
                found.append(f"{split} describes {row['hardware_id']} otherwise than another split")
    for name, row in known.items():
        found += [f"{name}: its {column} is {row[column]!r}" for column in _out_of_range(row)]
    return judge("hardware", len(known), "machines", found)


def _out_of_range(row: dict[str, Any]) -> Iterator[str]:
    if row["device_kind"] not in DEVICES:
        yield "device_kind"
    least = {"device_count": 1, "compute_units": 0, "cpu_cores": 1}
    yield from (name for name, bound in least.items() if row[name] < bound)
    yield from (name for name in ("memory_gib", "ram_gib") if not 0 < row[name] < math.inf)
    yield from (name for name in ("device_name", "os", "python", "torch") if not row[name])
    try:
        libraries = json.loads(row["libraries"])
        fine = isinstance(libraries, dict) and all(isinstance(value, str) for value in libraries.values())
    except ValueError:
        fine = False
    if not fine:
        yield "libraries"


def _beside(hardware: Tables) -> Iterator[str]:
    """The texts of the table ``hardware``."""
    for table in hardware.values():
        for row in table.to_pylist():
            yield from (value for value in row.values() if isinstance(value, str))


def _private_pages(folder: Path) -> Iterator[str]:
    """The card and all pages beside it; pictures are text, too."""
    pages = [*folder.glob("*.md"), *folder.glob("*.json"), *(folder / CARDS).glob("*")]
    for path in sorted(page for page in pages if page.is_file()):
        text = path.read_text("utf-8", "replace")
        name = path.relative_to(folder)
        yield from (f"{name}: {what}" for what in _texts.private(text.splitlines(), _texts.LINKS))


def _instances(one: Seen) -> Iterator[str]:
    for index, instance in enumerate(one.record.instances):
        name = f"instance {index} ({instance.pattern}/{instance.variant})"
        yield from (f"{name} {what}" for what in _misjudged(instance))


def _misjudged(one: Instance) -> Iterator[str]:
    numbers = (one.cost_ms, one.cost_ratio, one.cost_low, one.cost_high)
    if one.pattern not in PATTERNS.names():
        yield "is of no pattern of the catalogue"
        return
    pattern = PATTERNS[one.pattern]
    if one.scope != pattern.scope:
        yield f"has scope {one.scope}, its pattern {pattern.scope}"
    if one.sites < 1:
        yield f"has {one.sites} places"
    if one.source == "native":
        if not all(math.isnan(number) for number in numbers):
            yield "is native and has a cost"
        return
    twins = pattern.lookalikes if one.source == "lookalike" else pattern.variants
    if one.variant not in {variant.name for variant in twins}:
        yield f"is {one.source}, of which the catalogue has no such variant"
    if one.source == "lookalike" and one.state == "costly":
        yield "is a look-alike and costly"
    if all(math.isnan(number) for number in numbers) and one.source == "lookalike":
        return  # not measured: benign by construction
    if not all(math.isfinite(number) for number in numbers):
        yield "has no finite cost"
    elif not 0 < one.cost_low <= one.cost_ratio <= one.cost_high:
        yield f"costs {one.cost_ratio:g}, in [{one.cost_low:g}, {one.cost_high:g}]"
    elif (one.cost_ms > 0) != (one.cost_ratio > 1) and abs(one.cost_ratio - 1) > 1e-6:
        yield f"costs {one.cost_ms:g} ms and a factor of {one.cost_ratio:g}"


def _contradictions(seen: Sequence[Seen]) -> Iterator[str]:
    """States that published intervals contradict, if more than the intervals miss by chance.

    A measurement counts once a workload, however many of its traces show it.
    """
    margin = math.exp(MARGIN)
    for state in ("costly", "benign"):
        measured = {
            (one.meta["pair_id"], instance.pattern, instance.variant, instance.cost_ratio): instance
            for one in seen
            for instance in one.record.instances
            if instance.source == "injected" and instance.state == state
        }
        against = [
            name
            for name, one in measured.items()
            if (one.cost_high <= margin if state == "costly" else one.cost_low > margin)
        ]
        if len(against) > stats.binom.ppf(1 - SURE, len(measured), BY_CHANCE):
            yield (
                f"{len(against)} of {len(measured)} that are {state} have intervals on the other side of "
                f"{margin:g}, as {against[0][1]} of workload {against[0][0]}"
            )


def _exhaustive(one: Seen) -> Iterator[str]:
    names = one.record.exhaustive
    if len(set(names)) < len(names):
        yield "it lists a pattern twice"
    if strangers := sorted(set(names) - set(PATTERNS.names())):
        yield f"it lists {', '.join(strangers)}, which the catalogue has not"


def _segments(seen: Sequence[Seen], tables: Tables) -> Check:
    found: list[str] = []
    looked = 0
    for split, published in tables.items():
        rows = _rows_of(published)
        for one in seen:
            if one.split != split:
                continue
            expected = segment_table(one.record)
            looked += len(expected)
            mine = published.take(rows.pop(one.trace_id, np.empty(0, dtype=np.int64)))
            if wrong := [name for name in expected.column_names if not _equal(mine[name], expected[name])]:
                found.append(f"trace {one.trace_id}: its rows differ in {', '.join(wrong)}")
        found += [f"{split} has segments of {stranger}, which is no trace of it" for stranger in rows]
    return judge("segments", looked, "segments", found)


def _equal(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Equal, where NaN equals NaN."""
    if len(one) != len(other):
        return False
    if pa.types.is_floating(other.type):
        return bool(np.array_equal(one.to_numpy(), other.to_numpy(), equal_nan=True))
    return bool(one.equals(other))


def _rows_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Row numbers of each trace of a table, in order, by trace id."""
    ids = np.array(table["trace_id"].to_pylist(), dtype=object)
    order = np.argsort(ids, kind="stable")
    names, first = np.unique(ids[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, first[1:]), strict=True)) if len(ids) else {}


def _tiles(seen: Sequence[Seen], tables: Tables) -> Check:
    found: list[str] = []
    for split, table in tables.items():
        rows = _rows_of(table)
        for one in seen:
            if one.split != split:
                continue
            if (mine := rows.pop(one.trace_id, None)) is None:
                found.append(f"trace {one.trace_id} has no windows")
            else:
                found += [f"trace {one.trace_id}: {what}" for what in _mistiled(one, table.take(mine))]
        found += [f"{split} has windows of {stranger}, which is no trace of it" for stranger in rows]
    return judge("tiles", sum(map(len, tables.values())), "windows", found)


def _mistiled(one: Seen, table: pa.Table) -> Iterator[str]:
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    if table["window"].to_pylist() != list(range(len(table))):
        yield "its windows are not numbered in order"
    if start[0] != 0 or (start[1:] != end[:-1]).any() or (start >= end).any():
        yield "its windows do not tile it"
    for name in ("task", "hardware_id", "split_unit"):
        if set(table[name].to_pylist()) != {one.meta[name]}:
            yield f"its windows have another {name}"
    labels = {name: table[name].to_pylist() for name in schema.WINDOW_KEYS.names[-4:]}
    positive = [
        bool(cpu or gpu) for cpu, gpu in zip(labels["cpu_patterns"], labels["gpu_patterns"], strict=True)
    ]
    unknown = [
        bool(cpu or gpu) for cpu, gpu in zip(labels["cpu_ignored"], labels["gpu_ignored"], strict=True)
    ]
    if table["positive"].to_pylist() != positive:
        yield "positive is not where its windows have patterns"
    if table["ignored"].to_pylist() != [
        some and not yes for some, yes in zip(unknown, positive, strict=True)
    ]:
        yield "ignored is not where its windows have ignored patterns only"
    with_costly = {i.pattern for i in one.record.instances if i.state == "costly" and i.source != "native"}
    if (
        strangers := {
            name for key in labels if key.endswith("_patterns") for cell in labels[key] for name in cell
        }
        - with_costly
    ):
        yield f"its windows are positive for {', '.join(sorted(strangers))}, of which it has nothing costly"


def _splits(seen: Sequence[Seen]) -> Iterator[str]:
    for column in ("split_unit", "pair_id", "backbone_family"):
        where: dict[str, set[str]] = defaultdict(set)
        for one in seen:
            if one.meta[column]:
                where[one.meta[column]].add(one.split)
        yield from (
            f"{column} {name} is in {' and '.join(sorted(sides))}"
            for name, sides in where.items()
            if len(sides) > 1
        )
    yield from _alike(seen)


def _alike(seen: Sequence[Seen]) -> Iterator[str]:
    """Clean programs of different units that share more than half of their (op, shapes) counts."""
    for mode in schema.MODES:
        distinct: dict[tuple[str, frozenset[Any]], Seen] = {}
        for one in seen:
            if one.signature and one.meta["mode"] == mode:
                distinct.setdefault((one.meta["split_unit"], frozenset(one.signature.items())), one)
        programs = list(distinct.values())
        for a, b in splits.similar([one.signature for one in programs]):
            first, second = programs[a], programs[b]
            if first.meta["split_unit"] != second.meta["split_unit"]:
                yield (
                    f"traces {first.trace_id} ({first.split}) and {second.trace_id} ({second.split}) are "
                    f"alike, in units {first.meta['split_unit']} and {second.meta['split_unit']}"
                )


def _heldout(one: Seen) -> Iterator[str]:
    if one.split == "test":
        return
    try:
        if splits.has_heldout_variant(one.record):
            yield f"it is in {one.split} and has a held-out variant"
    except UserError:  # not in the catalogue, which is another check's
        return


def _ranks(seen: Sequence[Seen]) -> Check:
    workloads: dict[str, list[Seen]] = defaultdict(list)
    for one in seen:
        if one.meta["world_size"] > 1:
            workloads[one.meta["pair_id"]].append(one)
    found = []
    for name, traces in workloads.items():
        sizes = {one.meta["world_size"] for one in traces}
        count = Counter(one.meta["rank"] for one in traces)
        if len(sizes) > 1:
            found.append(f"workload {name} has traces of {' and '.join(map(str, sorted(sizes)))} ranks")
        elif set(count) != set(range(sizes.pop())) or len(set(count.values())) > 1:
            told = ", ".join(f"{traces_} of rank {rank}" for rank, traces_ in sorted(count.items()))
            found.append(f"workload {name} has {told}")
    return judge("ranks", len(workloads), "distributed workloads", found)
