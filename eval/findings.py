"""A finding (a rule's claim about some events), the events it owns, and the segments these form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.eval.facts import GPU_WORK, Facts
from torchtraceap.labels.segments import bounds, runs
from torchtraceap.labels.types import LaneClass

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Finding:
    """One site of an anti-pattern in one step, before its cost is known.

    Attributes:
        pattern: Id of the pattern.
        roots: Indices of the topmost CPU events that make it up. What lies below them and what they
            launch belongs to it too.
        backward: Whether the backward ops of the forward ops among them belong to it as well.
        waited_ns: Time lost to waiting, where the site is a wait.
        avoidable: Share of the site's work that would go with the pattern, where the site is work.
    """

    pattern: str
    roots: tuple[int, ...]
    backward: bool = False
    waited_ns: int = 0
    avoidable: float = 0.0


@dataclass(frozen=True)
class Piece:
    """A run of one pattern's events on one lane in one step, as a segment is defined (labels/segments.py).

    ``share`` is the part of the step that the findings with events in the run lose, at most 1.
    """

    pattern: str
    lane: int
    lane_class: LaneClass
    step: int
    start_ns: int
    end_ns: int
    first_event: int
    event_count: int
    share: float


class Attribution:
    """Findings of one trace with the events they own and the time they lose.

    An event claimed by several findings of one pattern belongs to the first of them.

    Attributes:
        findings: As given.
        owner: For each pattern, the finding that owns each event, -1 for none, int32, shape (events,).
        lost_ns: Estimated time that each finding costs, int64, shape (findings,).
    """

    def __init__(self, facts: Facts, findings: Sequence[Finding]) -> None:
        self.facts = facts
        self.findings = list(findings)
        self.owner = {
            pattern: self._own(pattern) for pattern in sorted({finding.pattern for finding in findings})
        }
        self.lost_ns = self._lost()

    def _own(self, pattern: str) -> IntArray:
        events = self.facts.trace.events
        owner: IntArray = np.full(len(events), -1, dtype=np.int32)
        with_backward = np.zeros(len(self.findings) + 1, dtype=bool)  # the last entry stands for no owner
        for index, finding in enumerate(self.findings):
            if finding.pattern == pattern:
                roots = np.array(finding.roots, dtype=np.int64)
                owner[roots[owner[roots] < 0]] = index
                with_backward[index] = finding.backward
        above = np.where(events.launch >= 0, events.launch, events.parent)
        owner = _inherit(owner, above)
        grads = (owner < 0) & (events.forward >= 0) & with_backward[owner[events.forward]]
        owner[grads] = owner[events.forward[grads]]
        return _inherit(owner, above)

    def _lost(self) -> IntArray:
        facts, trace = self.facts, self.facts.trace
        cpu, gpu = np.zeros(len(self.findings)), np.zeros(len(self.findings))
        for owner in self.owner.values():
            mine = owner >= 0
            parent = trace.events.parent
            outermost = mine & ~trace.on_gpu & ((parent < 0) | (owner[parent] != owner))
            np.add.at(cpu, owner[outermost], trace.events.dur_ns[outermost])
            working = mine & np.isin(trace.categories, GPU_WORK)
            np.add.at(gpu, owner[working], trace.events.dur_ns[working])
        lost = [
            finding.waited_ns + finding.avoidable * facts.bound_ns(cpu[i], gpu[i], self.step(finding))
            for i, finding in enumerate(self.findings)
        ]
        return np.array(lost, dtype=np.int64).reshape(len(self.findings))

    def step(self, finding: Finding) -> int:
        return int(self.facts.trace.step[finding.roots[0]])

    def share(self, index: int) -> float:
        """Part of its step that a finding costs."""
        return float(self.lost_ns[index]) / self.facts.step_ns(self.step(self.findings[index]))

    def pieces(self) -> list[Piece]:
        """The runs of all patterns, in order of pattern, lane and time."""
        trace = self.facts.trace
        shares = np.array([self.share(index) for index in range(len(self.findings))])
        pieces = []
        for pattern, owner in self.owner.items():
            found = runs(owner >= 0, trace.events.lane, trace.step)
            for (first, count), (start, end) in zip(
                found, bounds(found, self.facts.start, self.facts.end), strict=True
            ):
                lane = int(trace.events.lane[first])
                involved = np.unique(owner[first : first + count])
                pieces.append(
                    Piece(
                        pattern=pattern,
                        lane=lane,
                        lane_class=trace.lanes[lane].kind,
                        step=int(trace.step[first]),
                        start_ns=int(start),
                        end_ns=int(end),
                        first_event=int(first),
                        event_count=int(count),
                        share=min(1.0, float(shares[involved].sum())),
                    )
                )
        return pieces


def _inherit(owner: IntArray, above: IntArray) -> IntArray:
    """Hand every owner down the tree, to events that have none."""
    while True:  # one round per level of the tree
        heirs = (owner < 0) & (above >= 0) & (owner[above] >= 0)
        if not heirs.any():
            return owner
        owner[heirs] = owner[above[heirs]]
