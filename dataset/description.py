"""All that describes a data set, written beside its tables: card, pages, pictures, Croissant, checksums.

``traceap build`` writes it with the tables, ``traceap cards`` anew from them. It depends on the tables and on
the facts of the build alone: the same tables give the same pages to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import yaml

from torchtraceap.dataset import card, checksums, croissant
from torchtraceap.dataset.card import FACTS, Facts, Released
from torchtraceap.dataset.parquet import read_table, read_traces, split_files
from torchtraceap.dataset.pictures import Draw, costs_svg, shown_traces
from torchtraceap.dataset.schema import ALL_SPLITS, HARDWARE, SPLITS, TRACES
from torchtraceap.dataset.windows import WINDOWS
from torchtraceap.errors import UserError
from torchtraceap.files import write_text

CARD = "README.md"
CARDS = "cards"
PAGES = re.compile(r"(datasheet|hardware-[\w.+-]+)\.md|(costs|timeline-[\w-]+)\.svg")
"""Names of the files in the folder :data:`CARDS`."""

WRITTEN = (croissant.NAME, checksums.NAME)
"""Files beside the card that :func:`describe` writes."""

BESIDE = (*WRITTEN, "leak_audit.json")
"""Files beside the card that are replaced or removed with the tables that they were made of."""

LICENCE = "https://creativecommons.org/licenses/by/4.0/"
CITATION = (
    "@misc{torchtraceap, title = {TorchTraceAP}, eprint = {2512.14141}, archivePrefix = {arXiv}, "
    "url = {https://arxiv.org/abs/2512.14141}}"
)


def describe(
    folder: Path,
    schemas: Mapping[str, pa.Schema],
    released: Sequence[Released],
    hardware: pa.Table,
    facts: Facts,
    draw: Draw | None = None,
) -> None:
    """Write everything but the tables, the checksums last.

    Args:
        folder: Holds ``data/`` with all tables.
        schemas: Config to the schema of its files.
        released: All traces, in the order of the files.
        hardware: Rows of the table ``hardware``, sorted by id.
        facts: Of the build.
        draw: Draws a trace; without it there are no timelines.
    """
    timelines = _timelines(folder, released, draw) if draw else {}
    pages = _pages(folder, schemas, released, hardware, facts, sorted(timelines))
    pages |= {f"{CARDS}/timeline-{task}.svg": picture + "\n" for task, picture in timelines.items()}
    for name, text in pages.items():
        write_text(folder / name, text)
    for old in (folder / CARDS).iterdir():
        if f"{CARDS}/{old.name}" not in pages and PAGES.fullmatch(old.name):
            old.unlink()
    data = [f"data/{file.name}" for file in (folder / "data").glob("*.parquet")]
    kept = [name for name in BESIDE if name not in WRITTEN and (folder / name).exists()]
    checksums.write_checksums(folder, [*pages, *data, *kept])


def describe_again(
    folder: Path, schemas: Mapping[str, pa.Schema], facts: Facts | None = None, draw: Draw | None = None
) -> None:
    """:func:`describe` a data set from what is in its files; ``facts`` come from its card if not given.

    Raises:
        UserError: It is none, or its card does not say how it was built.
    """
    facts = facts or read_facts(folder)
    describe(folder, schemas, *read_released(folder), facts, draw)


def read_facts(folder: Path) -> Facts:
    """What the card says of the build.

    Raises:
        UserError: There is no card, or it does not say so.
    """
    path = folder / CARD
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        raise UserError(f"{path} is no card of a data set, as `traceap build` writes it") from None
    try:
        header = yaml.safe_load(text.split("---\n", 2)[1])
        return msgspec.convert(header[FACTS], Facts)
    except (IndexError, KeyError, TypeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UserError(
            f"{path} does not say how the data set was built (key {FACTS} of its YAML): build it again"
        ) from error


def read_released(folder: Path) -> tuple[list[Released], pa.Table]:
    """What the cards need of all traces, in the order of the files, and the rows of ``hardware``.

    Raises:
        UserError: Files are missing or cannot be read.
    """
    released: list[Released] = []
    for split in SPLITS:
        counts = _window_counts(read_table(split_files(folder, "windows", split), WINDOWS, _COUNTED))
        for record in read_traces(split_files(folder, "traces", split)):
            windows, positive, ignored = counts.get(record.trace_id, (0, 0, 0))
            released.append(Released.of(record, split, windows, positive, ignored))
    return released, _hardware(folder)


_COUNTED = ["trace_id", "positive", "ignored"]


def _window_counts(windows: pa.Table) -> dict[str, tuple[int, int, int]]:
    """Windows, positive and ignored ones, by trace id."""
    sums = [("positive", "count"), ("positive", "sum"), ("ignored", "sum")]
    rows = windows.group_by("trace_id").aggregate(sums)
    columns = ("trace_id", "positive_count", "positive_sum", "ignored_sum")
    table = zip(*(rows[name].to_pylist() for name in columns), strict=True)
    return {trace_id: (count, positive, ignored) for trace_id, count, positive, ignored in table}


def _hardware(folder: Path) -> pa.Table:
    rows = read_table(split_files(folder, "hardware", ALL_SPLITS), HARDWARE).to_pylist()
    once = {row["hardware_id"]: row for row in rows}
    return pa.Table.from_pylist([once[name] for name in sorted(once)], schema=HARDWARE)


def _pages(
    folder: Path,
    schemas: Mapping[str, pa.Schema],
    released: Sequence[Released],
    hardware: pa.Table,
    facts: Facts,
    tasks: Sequence[str],
) -> dict[str, str]:
    """Path to text of everything that needs no drawing of traces."""
    return {
        CARD: card.render_card(folder, schemas, released, hardware, facts, tasks),
        croissant.NAME: croissant.croissant(folder, schemas, _about(facts, released)),
        f"{CARDS}/datasheet.md": card.render_datasheet(folder, released, hardware, facts),
        f"{CARDS}/costs.svg": costs_svg(released),
        **{
            f"{CARDS}/hardware-{row['hardware_id']}.md": card.render_hardware(row, released, facts)
            for row in hardware.to_pylist()
        },
    }


def _timelines(folder: Path, released: Sequence[Released], draw: Draw) -> dict[str, str]:
    """Task to the picture of a trace."""
    shown = {trace_id: task for task, trace_id in shown_traces(released).items()}
    pictures = {}
    for split in SPLITS:
        for path in split_files(folder, "traces", split):
            for record in read_traces(path) if shown.keys() & _ids(path) else ():
                if record.trace_id in shown:
                    pictures[shown[record.trace_id]] = draw(record)
    return pictures


def _ids(path: Path) -> set[str]:
    """The traces in a file, without reading their events."""
    return set(read_table(path, TRACES, ["trace_id"])["trace_id"].to_pylist())


def _about(facts: Facts, released: Sequence[Released]) -> dict[str, Any]:
    """Croissant's properties of the data set as a whole."""
    return {
        "name": card.NAME,
        "description": (
            f"{card.PRETTY_NAME}. {len(released)} profiles with labelled anti-patterns and what they cost."
        ),
        "license": LICENCE,
        "url": "https://arxiv.org/abs/2512.14141",
        "creator": {"@type": "sc:Organization", "name": "The torchtraceap authors"},
        "version": facts.version,
        "citeAs": CITATION,
        "keywords": card.HEADER["tags"],
        **({"datePublished": facts.date} if facts.date else {}),
    }
