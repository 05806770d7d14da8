"""The pages that describe a data set: its card (README.md), a datasheet, and a page for each hardware.

Every number in them is computed from what was written, so that they cannot drift. What is no number is in the
templates (``cards/``).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import yaml

from torchtraceap import cards
from torchtraceap.dataset import schema
from torchtraceap.dataset.features import card_yaml
from torchtraceap.dataset.quality import REGIMES, regime
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.windows import FEATURES
from torchtraceap.labels.multiplicity import FALSE_DISCOVERY_RATE
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import QUALITIES, SOURCES, STATES, Instance

NAME = "torchtraceap"
PRETTY_NAME = "torchtraceap: PyTorch profiler traces of vision models with measured anti-patterns"
SLOWING = (0.1, 0.5, 0.9)
"""Quantiles of the profiler's slowing that are shown by hardware."""

LOOPS = {"train": "training", "infer": "inference"}
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"))
HEADER: dict[str, Any] = {
    "license": "cc-by-4.0",
    "pretty_name": PRETTY_NAME,
    "task_categories": ["tabular-classification", "other"],
    "tags": [
        "performance",
        "profiling",
        "pytorch",
        "gpu",
        "computer-vision",
        "anti-patterns",
        "anomaly-detection",
        "benchmark",
    ],
}


FACTS = "torchtraceap"
"""The key of the card's YAML that holds :class:`Facts`."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of a build and cannot be computed from its tables; kept in the card's YAML.

    Attributes:
        version: Of the data set: that of the torchtraceap that built it.
        schema_version: Of its files.
        seed: Orders the units of the split.
        left_out: Traces that were left out for a held-out variant.
        date: Of the release, as 2026-11-30; empty for a build that is none.
    """

    version: str
    schema_version: int
    seed: int
    left_out: int
    date: str = ""


@dataclass(frozen=True)
class Released:
    """What the card needs to know of a trace that was written."""

    split: str
    meta: dict[str, Any]
    instances: list[Instance]
    segments: list[int]  # number by instance
    exhaustive: list[str]
    events: int
    windows: int
    positive_windows: int
    ignored_windows: int

    @classmethod
    def of(cls, record: TraceRecord, split: str, windows: int, positive: int, ignored: int) -> Released:
        """Sum up ``record``, which has so many ``windows``."""
        per_instance = Counter(segment.instance for segment in record.segments)
        return cls(
            split=split,
            meta=dict(record.meta),
            instances=record.instances,
            segments=[per_instance[index] for index in range(len(record.instances))],
            exhaustive=record.exhaustive,
            events=len(record.trace),
            windows=windows,
            positive_windows=positive,
            ignored_windows=ignored,
        )

    @property
    def unplaced(self) -> int:
        """Instances without a segment."""
        return self.segments.count(0)


def render_card(
    folder: Path,
    schemas: Mapping[str, pa.Schema],
    released: Sequence[Released],
    hardware: pa.Table,
    facts: Facts,
    pictures: Sequence[str] = (),
) -> str:
    """README.md of the data set in ``folder``.

    Args:
        folder: Holds ``data/`` with all files.
        schemas: Config to the schema of its files.
        released: All traces in it.
        hardware: Rows of the table ``hardware``.
        facts: Of the build.
        pictures: Tasks that have a timeline (dataset/description.py).
    """
    header = {
        **HEADER,
        "size_categories": [_size_category(len(released))],
        FACTS: msgspec.to_builtins(facts),
    }
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True) + card_yaml(folder, schemas)
    return cards.render(
        "dataset.md.j2",
        **_common(released, facts),
        front=front,
        splits=[_by_split(split, released) for split in schema.SPLITS],
        hardware=[_hardware(row, released) for row in hardware.to_pylist()],
        known=_known(released),
        features=FEATURES,
        pictures=pictures,
    )


def render_datasheet(folder: Path, released: Sequence[Released], hardware: pa.Table, facts: Facts) -> str:
    """The datasheet of the data set in ``folder``; arguments as for :func:`render_card`."""
    return cards.render(
        "datasheet.md.j2",
        **_common(released, facts),
        splits=[_by_split(split, released) for split in schema.SPLITS],
        hardware=[_hardware(row, released) for row in hardware.to_pylist()],
        megabytes=sum(file.stat().st_size for file in (folder / "data").iterdir()) / 1e6,
        undecided=sum(
            instance.state == "undecided" and instance.source == "injected"
            for one in released
            for instance in one.instances
        ),
        ranks=sum(int(one.meta["world_size"]) > 1 for one in released),
    )


def render_hardware(row: Mapping[str, Any], released: Sequence[Released], facts: Facts) -> str:
    """The page of one hardware.

    Args:
        row: Of the table ``hardware``.
        released: All traces of the data set.
        facts: Of the build.
    """
    here = [one for one in released if one.meta["hardware_id"] == row["hardware_id"]]
    return cards.render(
        "hardware.md.j2",
        **_common(here, facts),
        row=_hardware(row, released),
        libraries=sorted(json.loads(row["libraries"]).items()),
        regimes=_regimes(here),
    )


def _common(released: Sequence[Released], facts: Facts) -> dict[str, Any]:
    """What several templates refer to."""
    return {
        "name": NAME,
        "pretty_name": PRETTY_NAME,
        "canary": schema.CANARY,
        "facts": facts,
        "false_discovery_percent": 100 * FALSE_DISCOVERY_RATE,
        "totals": _totals(released),
        "tasks": _by(released, lambda one: one.meta["task"]),
        "modes": _by(released, lambda one: one.meta["mode"]),
        "loops": [LOOPS[mode] for mode in schema.MODES if any(one.meta["mode"] == mode for one in released)],
        "patterns": _by_pattern(released),
        "qualities": QUALITIES,
        "states": STATES,
        "slowing": SLOWING,
    }


def _regimes(released: Sequence[Released]) -> list[dict[str, Any]]:
    """What decides the step time of the workloads, by the mean of their clean traces."""
    workloads: dict[str, list[Released]] = defaultdict(list)
    for one in released:
        if all(instance.source != "injected" for instance in one.instances):
            workloads[str(one.meta["pair_id"])].append(one)
    found: dict[str, list[str]] = defaultdict(list)
    for pair_id, clean in workloads.items():
        numbers = [(float(one.meta["gpu_busy"]), float(one.meta["profiler_ratio"])) for one in clean]
        found[regime(*np.mean(numbers, axis=0).tolist())].append(pair_id)
    rows = []
    for name in REGIMES:
        ids = set(found[name])
        ratios = [float(one.meta["profiler_ratio"]) for one in released if one.meta["pair_id"] in ids]
        if ids:
            quantiles = np.quantile(ratios, SLOWING).tolist()
            share = len(ids) / len(workloads)
            rows.append({"name": name, "workloads": len(ids), "share": share, "profiler_ratio": quantiles})
    return rows


def _totals(released: Sequence[Released]) -> dict[str, Any]:
    return {
        "traces": len(released),
        "workloads": len({one.meta["pair_id"] for one in released}),
        "models": len({one.meta["model"] for one in released}),
        "units": len({one.meta["split_unit"] for one in released}),
        "events": sum(one.events for one in released),
        "windows": sum(one.windows for one in released),
        "segments": sum(sum(one.segments) for one in released),
        "unplaced": sum(one.unplaced for one in released),
        "quality": Counter(one.meta["quality"] for one in released),
        "sources": ", ".join(sorted({one.meta["source"] for one in released})),
    }


def _by_split(split: str, released: Sequence[Released]) -> dict[str, Any]:
    traces = [one for one in released if one.split == split]
    return {
        "name": split,
        **_totals(traces),
        "positive": sum(one.positive_windows for one in traces),
        "ignored": sum(one.ignored_windows for one in traces),
    }


def _by(released: Iterable[Released], key: Callable[[Released], str]) -> list[dict[str, Any]]:
    groups: dict[str, list[Released]] = defaultdict(list)
    for one in released:
        groups[key(one)].append(one)
    return [{"name": name, **_totals(groups[name])} for name in sorted(groups)]


def _hardware(row: Mapping[str, Any], released: Iterable[Released]) -> dict[str, Any]:
    traces = [one for one in released if one.meta["hardware_id"] == row["hardware_id"]]
    ratios = [float(one.meta["profiler_ratio"]) for one in traces]
    return {**row, **_totals(traces), "profiler_ratio": np.quantile(ratios, SLOWING).tolist()}


def _by_pattern(released: Iterable[Released]) -> list[dict[str, Any]]:
    """A row a (pattern, source): instances and segments by state."""
    instances: Counter[tuple[str, str, str]] = Counter()
    segments: Counter[tuple[str, str, str]] = Counter()
    for one in released:
        for instance, count in zip(one.instances, one.segments, strict=True):
            key = instance.pattern, instance.source, instance.state
            instances[key] += 1
            segments[key] += count
    pairs = sorted({key[:2] for key in instances}, key=lambda pair: (pair[0], SOURCES.index(pair[1])))
    return [
        {
            "pattern": pattern,
            "source": source,
            "instances": [instances[pattern, source, state] for state in STATES],
            "segments": [segments[pattern, source, state] for state in STATES],
        }
        for pattern, source in pairs
    ]


def _known(released: Sequence[Released]) -> list[dict[str, Any]]:
    """By pattern, the number of traces in which all of its instances are known."""
    known = Counter(pattern for one in released for pattern in set(one.exhaustive))
    names = known.keys() | {instance.pattern for one in released for instance in one.instances}
    return [{"pattern": PATTERNS[name], "traces": known[name]} for name in sorted(names)]


def _size_category(traces: int) -> str:
    return next((name for limit, name in SIZES if traces < limit), "100K<n<1M")
