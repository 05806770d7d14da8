"""What a check is, and the promises that there are checks of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

SHOWN = 5
"""Violations of a promise that are kept to be shown; all are counted."""

PROMISES: Mapping[str, str] = MappingProxyType(
    {
        # Files
        "layout": "README.md and all shards of every config and split lie there, and nothing else in data/",
        "checksums": "every file is the one that SHA256SUMS names",
        "schema": "every file has its config's columns, the schema version and the canary, and no more",
        "card": "README.md and the pages in cards/ have the numbers and features of the data",
        "croissant": "croissant.json names the files and the columns that are there",
        "audit": "leak_audit.json holds what an audit of these very data found",
        # Every trace, without its events
        "ids": "ids are random and unique; steps, threads and streams are numbered anew",
        "metadata": "metadata lie in their ranges and follow from each other",
        "hardware": "each split lists the hardware of its traces and no other",
        "markers": "no marker of the harness is left in any text",
        "privacy": "no path, address, host or user name is in any text",
        "instances": "instances are in the catalogue, and states, costs and quality agree",
        "costs": "states and costs follow from the measurements of exactly the instances that were measured",
        "exhaustive": "exhaustive lists known patterns, each once",
        "segments": "the table segments holds the segments of the traces",
        "tiles": "windows tile their traces, and their flags follow from their labels",
        "splits": "no split unit, workload or near-duplicate lies in two splits",
        "heldout": "held-out variants are in test alone",
        "ranks": "all ranks of a distributed workload are there, with as many traces each",
        # Events
        "traces": "traces are whole: sorted, nested, all references inside",
        "steps": "each profiled step occurs once, in order",
        "attribution": "segments hold exactly what belongs to their instances",
        "windows": "features and labels of windows are those computed from the traces",
    }
)
"""What is promised, by the name of its check, in the order of a report."""


class Check(msgspec.Struct, frozen=True):
    """One promise and how it is kept.

    Attributes:
        name: Key of :data:`PROMISES`.
        promise: What is promised.
        looked, of: Number of things that were looked at, and that there are.
        things: What is counted; empty if nothing was looked at.
        count: Number of violations.
        violations: The first of them, in words.
        note: What else is to be said.
    """

    name: str
    promise: str
    looked: int
    of: int
    things: str
    count: int = 0
    violations: list[str] = []
    note: str = ""

    @property
    def state(self) -> str:
        """ok, failed, or not made."""
        if self.count:
            return "failed"
        return "ok" if self.things else "not made"


class Report(msgspec.Struct, frozen=True):
    """All checks of a data set."""

    checks: list[Check]

    @property
    def failures(self) -> list[Check]:
        """The checks with violations; only if there are none has everything been looked at."""
        return [check for check in self.checks if check.count]


def judge(
    name: str, looked: int, things: str, violations: Iterable[str], *, of: int | None = None, note: str = ""
) -> Check:
    """The outcome of a check that was made."""
    found = list(violations)
    return Check(
        name, PROMISES[name], looked, looked if of is None else of, things, len(found), found[:SHOWN], note
    )


def unread(name: str) -> Check:
    """A check that could not be made."""
    return Check(name, PROMISES[name], 0, 0, "", note="not made, as other checks failed")
