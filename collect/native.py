"""Native synchronisations: where a model makes the host wait by itself, and which pattern that is.

A trace says where: every call of the runtime that blocks, inside of a step and on a thread that runs
operators. Which pattern it is, the operators say that were seen to wait when a clean step was dispatched
(collect/dispatch.py); names and durations in the trace have no say. The two are matched operator by operator
and step by step. Where their counts differ, a wait still gets a label, the best one that there is, but the
patterns it may belong to count as unknown in that trace.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchtraceap.collect.dispatch import EXPLICIT, WAITING, Wait, one_name
from torchtraceap.collect.labelling import all_segments
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels import segments as runs_of
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import Instance, Segment

VARIANT = "native"
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver", "xpu_runtime")
BLOCKING = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream", "cuMemcpyDtoH", "cuMemcpyHtoD"})
"""Runtime calls that block, beside those whose name ends in ``Synchronize``."""

OPERATOR = re.compile(r"\w+::\w+")
"""``aten::item``; not ``autograd::engine::evaluate_function: ...`` or the name of a backward node."""


@dataclass(frozen=True)
class Natives:
    """What a trace holds by itself.

    Attributes:
        instances: One a pattern, undecided and without costs.
        segments: Theirs; ``segment.instance`` counts ``instances`` from 0.
        unknown: Patterns of which there may be more or fewer than these.
        disagreements: Where the trace and the surveyed steps differ, in words.
    """

    instances: list[Instance]
    segments: list[Segment]
    unknown: frozenset[str]
    disagreements: list[str]


def waits(trace: Trace) -> NDArray[np.bool_]:
    """Runtime calls inside a step that make the host wait for the device or the driver, shape (events,).

    Those that block by name, and those that launched a copy from or to pageable memory, which the driver
    stages before the call returns. Only threads that run operators count: the thread that pins batches
    waits, but nobody waits for it.
    """
    events = trace.events
    blocking = np.array(
        [
            op.category in RUNTIME_CATEGORIES and (op.name.endswith("Synchronize") or op.name in BLOCKING)
            for op in trace.ops
        ],
        dtype=bool,
    )[events.op]
    pageable = np.array(
        [op.category == "gpu_memcpy" and "Pageable" in op.name for op in trace.ops], dtype=bool
    )
    launch = events.launch[pageable[events.op]]
    blocking[launch[launch >= 0]] = True
    lanes = np.unique(events.lane[trace.categories == "cpu_op"])
    return blocking & (trace.step >= 0) & np.isin(events.lane, lanes)


def natives(
    surveyed: Sequence[Sequence[Wait]],
    trace: Trace,
    segments: Sequence[Segment],
    waiting: Sequence[Segment] | None = None,
) -> Natives:
    """Label every wait of a trace that lies in none of its segments.

    One that lies in a segment of a pattern that does not wait, as in a step without tensor cores, is labelled
    too if the survey needs it: it is the model's own.

    A native segment is the outermost operator that holds the waiting call, with all below it and all that it
    launched on the GPU; a call outside of any operator is one by itself.

    Args:
        surveyed: Waits of clean steps, each in order (``Survey.waits``). Empty if nothing was surveyed.
        trace: Labelled and without markers.
        segments: Of what was injected.
        waiting: Those of ``segments`` whose pattern is one of ``WAITING``; all if None.
    """
    return _Matching(surveyed, trace, segments, segments if waiting is None else waiting).result()


@dataclass(frozen=True)
class _Operator:
    """An operator of the trace that waits: ``key`` as in :class:`Wait`, and the events that stand for it.

    ``event`` is the operator that was dispatched, ``outermost`` what the program called. ``labelled`` is one
    in a given segment, ``explained`` one in that of a pattern that waits.
    """

    key: str
    event: int
    outermost: int
    step: int
    labelled: bool
    explained: bool


class _Matching:
    def __init__(
        self,
        surveyed: Sequence[Sequence[Wait]],
        trace: Trace,
        segments: Sequence[Segment],
        waiting: Sequence[Segment],
    ) -> None:
        self.surveyed = surveyed
        self.trace = trace
        self.known = {wait.operator for step in surveyed for wait in step}
        self.labelled = runs_of.covered(segments, len(trace))
        self.explained = runs_of.covered(waiting, len(trace))
        self.unknown: set[str] = set()
        self.disagreements: Counter[str] = Counter()

    def result(self) -> Natives:
        roots: dict[str, dict[int, int]] = defaultdict(dict)  # pattern -> root event -> step
        taken: set[int] = set()
        for operator, pattern in self._patterns():
            if operator.outermost not in taken:
                taken.add(operator.outermost)
                roots[pattern][operator.outermost] = operator.step
        instances: list[Instance] = []
        members: dict[int, NDArray[np.bool_]] = {}
        for pattern in sorted(roots.keys() & set(PATTERNS.names())):
            members[len(instances)] = self._members(roots[pattern])
            per_step = Counter(roots[pattern].values())
            instances.append(
                Instance(
                    pattern=pattern,
                    variant=VARIANT,
                    scope=PATTERNS[pattern].scope,
                    source="native",
                    state="undecided",
                    every_step=len(per_step) == len(self.trace.step_bounds),
                    sites=max(per_step.values()),
                )
            )
        segments = all_segments(self.trace, members)
        texts = [f"{text} ({count}x)" for text, count in sorted(self.disagreements.items())]
        return Natives(instances, segments, frozenset(self.unknown), texts)

    def _patterns(self) -> list[tuple[_Operator, str]]:
        """Operators that wait outside of the given segments, in order of time, with their pattern."""
        groups: dict[tuple[int, str], list[_Operator]] = defaultdict(list)
        for operator in self._operators():
            groups[operator.step, operator.key].append(operator)
        for step in range(len(self.trace.step_bounds)):
            for key in self.known:
                groups.setdefault((step, key), [])
        found = [pair for (_, key), group in groups.items() for pair in self._match(key, group)]
        return sorted(found, key=lambda pair: int(self.trace.events.start_ns[pair[0].event]))

    def _operators(self) -> list[_Operator]:
        events, names, found = self.trace.events, self.trace.names, {}
        is_operator = self.trace.categories == "cpu_op"
        for row in np.flatnonzero(waits(self.trace)).tolist():
            above, at = [], int(events.parent[row])
            while at >= 0:
                if is_operator[at] and OPERATOR.fullmatch(names[at]):
                    above.append(at)
                at = int(events.parent[at])
            # Outer operators were dispatched as their parts, inner ones within a kernel.
            dispatched = [at for at in above if one_name(names[at]) in self.known]
            outermost = above[-1] if above else row
            event = dispatched[-1] if dispatched else outermost
            if dispatched:
                key = one_name(names[event])
            else:
                key = f"{names[event]} (not surveyed)" if above else EXPLICIT
            found[event] = _Operator(
                key=key,
                event=event,
                outermost=outermost,
                step=int(self.trace.step[row]),
                labelled=bool(self.labelled[row]),
                explained=bool(self.explained[row]),
            )
        return sorted(found.values(), key=lambda operator: int(events.start_ns[operator.event]))

    def _match(self, key: str, group: list[_Operator]) -> list[tuple[_Operator, str]]:
        """Give the operators of one kind and step the patterns that a surveyed step has for them in turn.

        An injection may stand for clean work that waits by itself. So what lies in given segments counts
        only if the survey needs it.
        """
        bare = [operator for operator in group if not operator.labelled]
        steps = [[wait.pattern for wait in step if wait.operator == key] for step in self.surveyed]
        for counted in (bare, group):
            for patterns in steps:
                if len(patterns) == len(counted):
                    pairs = zip(counted, patterns, strict=True)
                    return [(operator, pattern) for operator, pattern in pairs if not operator.explained]
        common = Counter(pattern for step in steps for pattern in step)
        fits_in_part = any(len(bare) <= len(patterns) <= len(group) for patterns in steps)
        if (bare or common) and not fits_in_part:
            self._disagree(key, len(bare), sorted({len(patterns) for patterns in steps}), set(common))
        guess = "explicit_synchronize" if key == EXPLICIT else "host_sync"
        pattern = common.most_common(1)[0][0] if common else guess
        return [(operator, pattern) for operator in bare]

    def _disagree(self, key: str, traced: int, surveyed: list[int], patterns: set[str]) -> None:
        self.unknown |= patterns or WAITING
        times = " or ".join(map(str, surveyed)) or "0"
        self.disagreements[f"{key or 'synchronize'}: {traced} in a traced step, {times} surveyed"] += 1

    def _members(self, roots: Iterable[int]) -> NDArray[np.bool_]:
        events = self.trace.events
        is_root = np.zeros(len(events), dtype=bool)
        is_root[list(roots)] = True
        return runs_of.below(is_root, events.parent, events.launch)


def unpaired(trace: Trace, instances: Sequence[Instance], segments: Sequence[Segment]) -> list[str]:
    """What contradicts that waits and segments of waiting patterns go together, in words.

    Every wait inside a step lies in a segment, and every segment of a waiting pattern on a thread, injected
    or native, holds a wait. The call of a loader whose batch is not pinned is part of a pattern and does not
    wait.
    """
    wait = waits(trace)
    found = [
        f"{trace.names[row]} at {trace.events.start_ns[row]} ns lies in no segment"
        for row in np.flatnonzero(wait & ~runs_of.covered(segments, len(trace)))
    ]
    for segment in segments:
        one = instances[segment.instance]
        if one.pattern not in WAITING or one.source == "lookalike" or segment.lane_class == "gpu":
            continue
        if trace.names[segment.first_event].startswith("enumerate(DataLoader)"):
            continue
        if not wait[segment.rows].any():
            found.append(f"a segment of {one.pattern}/{one.variant} at {segment.start_ns} ns holds no wait")
    return found
