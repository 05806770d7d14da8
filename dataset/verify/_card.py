"""Whether the card, the datasheet and the pages of the hardware say what the data hold.

They are made once more, from the data and the few facts of the build that no table holds, and compared: the
YAML as it is, tables row by row in the columns that both have, and in prose every number that the same two
words follow. So pages whose wording is older than this code are judged by their numbers.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from torchtraceap.dataset import schema
from torchtraceap.dataset.card import Facts, Released, render_card, render_datasheet, render_hardware
from torchtraceap.dataset.configs import SCHEMAS
from torchtraceap.dataset.description import CARD, CARDS, read_facts
from torchtraceap.dataset.verify._check import Check, judge
from torchtraceap.dataset.verify._survey import Seen
from torchtraceap.errors import UserError

_FRONT = re.compile(r"\A---\n(.*?\n)---\n(.*)\Z", re.DOTALL)
_RULE = re.compile(r"\|[-:| ]+\|")
_FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) (?=([^\W\d][\w*-]*(?:,? [^\W\d][\w*-]*)?))")

Table = tuple[list[str], list[list[str]]]
"""Headings and rows of cells."""


def card(
    folder: Path, seen: Sequence[Seen], windows: Mapping[str, pa.Table], hardware: Mapping[str, pa.Table]
) -> Check:
    """Compare README.md and the pages beside it with the data."""
    try:
        facts = read_facts(folder)
    except UserError as error:
        return judge("card", 0, "numbers and names", [str(error)])
    try:
        expected = _expected(folder, seen, windows, hardware, facts)
    except (UserError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Other checks say what is wrong with such data; the pages take it for granted that nothing is.
        return judge("card", 0, "numbers and names", [f"no card can be made of these data: {error}"])
    looked, found = 0, []
    for name, text in expected.items():
        if not (folder / name).is_file():
            found.append(f"{name} is missing")
            continue
        page = _Page(name, (folder / name).read_text("utf-8", "replace"), text)
        found += page.differences()
        looked += page.looked
    return judge("card", looked, "numbers and names", found)


def _expected(
    folder: Path,
    seen: Sequence[Seen],
    windows: Mapping[str, pa.Table],
    hardware: Mapping[str, pa.Table],
    facts: Facts,
) -> dict[str, str]:
    """The pages that follow from the data, by name."""
    flags = {split: _flags(table) for split, table in windows.items()}
    released = [_released(one, flags[one.split].get(one.trace_id, (0, 0, 0))) for one in seen]
    rows = {row["hardware_id"]: row for table in hardware.values() for row in table.to_pylist()}
    used = sorted({one.meta["hardware_id"] for one in seen} & rows.keys())
    table = pa.Table.from_pylist([rows[name] for name in used], schema=schema.HARDWARE)
    pages = {
        CARD: render_card(folder, SCHEMAS, released, table, facts),
        f"{CARDS}/datasheet.md": render_datasheet(folder, released, table, facts),
    }
    for row in table.to_pylist():
        pages[f"{CARDS}/hardware-{row['hardware_id']}.md"] = render_hardware(row, released, facts)
    return pages


def _flags(windows: pa.Table) -> dict[str, tuple[int, int, int]]:
    """Number of windows, of positive and of ignored ones, by trace."""
    rows = windows.group_by("trace_id").aggregate(
        [("positive", "count"), ("positive", "sum"), ("ignored", "sum")]
    )
    return {
        row["trace_id"]: (row["positive_count"], row["positive_sum"], row["ignored_sum"])
        for row in rows.to_pylist()
    }


def _released(one: Seen, windows: tuple[int, int, int]) -> Released:
    per_instance = [0] * len(one.record.instances)
    for segment in one.record.segments:
        per_instance[segment.instance] += 1
    return Released(
        split=one.split,
        meta=dict(one.meta),
        instances=one.record.instances,
        segments=per_instance,
        exhaustive=one.record.exhaustive,
        events=one.events,
        windows=windows[0],
        positive_windows=windows[1],
        ignored_windows=windows[2],
    )


class _Page:
    """A page against the expected one; ``looked`` counts what was compared."""

    def __init__(self, name: str, text: str, expected: str) -> None:
        self.name = name
        self.text = text
        self.expected = expected
        self.looked = 0

    def differences(self) -> Iterator[str]:
        """What the page says otherwise than the data."""
        body, expected_body = self.text, self.expected
        if expected_front := _FRONT.match(self.expected):
            front = _FRONT.match(self.text)
            if front is None:
                yield f"{self.name} does not begin with YAML between ---"
                return
            yield from self._yaml(front[1], expected_front[1])
            body, expected_body = front[2], expected_front[2]
        if schema.CANARY in expected_body and schema.CANARY not in body:
            yield f"{self.name} does not hold the canary"
        yield from self._tables(_tables(body), _tables(expected_body))
        yield from self._prose(_figures(body), _figures(expected_body))

    def _yaml(self, text: str, expected: str) -> Iterator[str]:
        try:
            said: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            yield f"the YAML of {self.name} is broken: {str(error).splitlines()[0]}"
            return
        if not isinstance(said, dict):
            yield f"the YAML of {self.name} is no mapping"
            return
        wanted: dict[str, Any] = yaml.safe_load(expected)
        for key in ("license", "size_categories", "configs", "dataset_info"):
            self.looked += 1
            if said.get(key) != wanted[key]:
                place = _where(said.get(key), wanted[key])
                yield f"{key} in the YAML of {self.name} is not that of the data{place}"

    def _tables(self, said: dict[str, Table], expected: dict[str, Table]) -> Iterator[str]:
        for name in sorted(expected.keys() - said.keys()):
            yield f"{self.name} has no table of each {name}"
        for name in expected.keys() & said.keys():
            (heads, rows), (wanted_heads, wanted_rows) = said[name], expected[name]
            both = [head for head in wanted_heads if head in heads]
            if len(rows) != len(wanted_rows):
                yield f"the table of each {name} has {len(rows)} rows, the data {len(wanted_rows)}"
                continue
            for row, wanted in zip(rows, wanted_rows, strict=True):
                if len(row) != len(heads):
                    yield f"a row of the table of each {name} has {len(row)} cells, not {len(heads)}"
                    continue
                for head in both:
                    self.looked += 1
                    cell, value = row[heads.index(head)], wanted[wanted_heads.index(head)]
                    if cell != value:
                        yield f"{name} {wanted[0]}: {head} is {cell} in {self.name}, {value} in the data"

    def _prose(self, said: dict[str, list[str]], expected: dict[str, list[str]]) -> Iterator[str]:
        for words in expected.keys() & said.keys():
            self.looked += 1
            if said[words] != expected[words]:
                one, other = ", ".join(said[words]), ", ".join(expected[words])
                yield f"{self.name} says {one} {words}, the data hold {other}"


def _where(said: Any, wanted: Any) -> str:
    """The place of the first difference of two YAML values, to be put behind a sentence."""
    if isinstance(said, dict) and isinstance(wanted, dict):
        for key in wanted:
            if said.get(key) != wanted[key]:
                return f", {key}{_where(said.get(key), wanted[key])}"
    if isinstance(said, list) and isinstance(wanted, list) and len(said) == len(wanted):
        for one, other in zip(said, wanted, strict=True):
            if one != other:
                name = other.get("config_name") or other.get("name") if isinstance(other, dict) else None
                return f"{f', {name}' if name else ''}{_where(one, other)}"
    return f": {said} for {wanted}" if isinstance(wanted, str | int) else ""


def _tables(body: str) -> dict[str, Table]:
    """The tables of a page, by their first heading, or by all where another has the same one."""
    lines = [line.strip() for line in body.splitlines() if line.startswith("|")]
    found: dict[str, Table] = {}
    rows: list[list[str]] = []
    for line, following in itertools.pairwise([*lines, ""]):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]
        if _RULE.fullmatch(following):
            rows = []
            name = cells[0] if cells[0] not in found else " ".join(filter(None, cells))
            found[name] = cells, rows
        elif not _RULE.fullmatch(line):
            rows.append(cells)
    return found


def _figures(body: str) -> dict[str, list[str]]:
    """Numbers in prose, in order, by the two words behind them."""
    prose = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    "))]
    found: dict[str, list[str]] = defaultdict(list)
    for number, words in _FIGURE.findall(" ".join(" ".join(lines).split())):
        found[words.rstrip(",.")].append(number.replace(",", ""))
    return dict(found)
