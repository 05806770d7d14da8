"""Places in a published trace, and all that could give one away: the material of the leak audit.

A place is known by its position in the operator sequence of the main thread. Two profiles of one loop have
equal sequences, so a place that a marker showed in one of them can be looked at in all others. What is looked
at are the columns :data:`FEATURES`: gaps, durations, references, order, and facts of the whole trace, in
absolute terms and against the same operators elsewhere in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FEATURES: dict[str, str] = {
    "gap_in": "from the last boundary ahead of the place to the next, log2 of ns",
    "gap_out": "the same where the place ends, if it is not empty",
    "gap_in_elsewhere": "gap_in against the median gap between the same two boundaries elsewhere, log2",
    "gap_out_elsewhere": "the same of gap_out",
    "gap_in_trace": "gap_in against the median gap of the trace, log2",
    "gap_out_trace": "the same of gap_out",
    "gap_before": "gap ahead of gap_in against the same gap elsewhere, log2",
    "gap_after": "gap behind gap_out against the same gap elsewhere, log2",
    "span": "from the boundary ahead of the place to the one behind it, log2 of ns",
    "dur_before": "duration of the event at the boundary ahead against the same op elsewhere, log2",
    "dur_after": "duration of the event at the boundary behind against the same op elsewhere, log2",
    "dur_outer": "duration of the innermost event around the place against the same op elsewhere, log2",
    "index_step": "events between the two boundaries' events, by index",
    "parent_offset": "index of the next event less that of its parent",
    "forward_offset": "index of the next event less that of its forward op",
    "op_jump": "op index of the next event less the highest one before it, 0 if it is lower",
    "depth": "events around the place",
    "position": "boundaries of the step ahead of the place, as a share",
    "empty": "1 if no event lies in the place",
    "gpu_gap": "between the last GPU event launched ahead and the first behind, log2 of ns",
    "launch_gap": "between their launch calls, log2 of ns",
    "gpu_lag": "from the launch call to the start of the latter, log2 of ns",
    "events": "events of the trace, log2",
    "ops": "ops of the trace, log2",
    "lanes": "lanes of the trace",
}
"""Columns of a place and what they mean. NaN where there is no such thing.

Sums of time over a whole step are left out: they are one number for all of its places, so they can tell at
most that a trace has places, not where, and few profiles differ in them by chance.
"""

ARMS = ("wrapped", "bare")
"""As published, with an injector's wrappers at the places, and of a loop that never had any."""

EXAMPLES = pa.schema(
    [
        pa.field("model", pa.string()),
        pa.field("family", pa.string()),
        pa.field("mode", pa.string()),
        pa.field("profile", pa.string()),  # random
        pa.field("arm", pa.string()),
        pa.field("selected", pa.int8()),  # 1 drawn to act, 0 not, -1: bare, or both at one place
        pa.field("step", pa.int16()),
        pa.field("enter", pa.int32()),
        pa.field("leave", pa.int32()),
        pa.field("before", pa.string()),  # op and boundary ahead of the place
        pa.field("after", pa.string()),
        *(pa.field(name, pa.float32()) for name in FEATURES),
    ]
)
"""A row a place, profile and step."""

_OPS = frozenset({"cpu_op", "user_annotation"})
_LEAST_NS = 100  # added to times before their logarithm is taken: shorter ones are all the same
_NAME_LENGTH = 60


class Place(NamedTuple):
    """So many boundaries of its step lie ahead of where it begins, and ahead of where it ends."""

    enter: int
    leave: int


@dataclass(frozen=True, eq=False)
class Step:
    """Starts and ends of the ops of the main thread in one step, nested, in order; shape (boundaries,).

    The first is the start of ``ProfilerStep``, the last its end. Calls of the runtime are no ops: how many
    there are (allocations) differs between equal steps.
    """

    event: IntArray
    ends: BoolArray

    def __len__(self) -> int:
        return len(self.event)


def steps(trace: Trace) -> list[Step]:
    """The steps of a trace, in order; markers that it still has are ops like others."""
    events = trace.events
    is_step = np.array([op.name.startswith("ProfilerStep#") for op in trace.ops], dtype=bool)[events.op]
    is_op = np.array([op.category in _OPS for op in trace.ops], dtype=bool)[events.op]
    if not is_step.any():
        return []
    main = events.lane[np.argmax(is_step)]
    parent = events.parent.tolist()
    event: list[int] = []
    ends: list[bool] = []
    around: list[int] = []

    def close_until(above: int) -> None:
        while around and around[-1] != above:
            event.append(around.pop())
            ends.append(True)

    for i in np.flatnonzero((events.lane == main) & is_op).tolist():
        close_until(parent[i])
        event.append(i)
        ends.append(False)
        around.append(i)
    close_until(-1)
    all_events, all_ends = np.array(event), np.array(ends)
    edges = np.flatnonzero(is_step[all_events]).reshape(-1, 2)  # a start and an end each
    return [Step(all_events[a : b + 1], all_ends[a : b + 1]) for a, b in edges]


def sequence(trace: Trace, step: Step) -> tuple[str, ...]:
    """What equal steps share: the names of the ops in order of their boundaries."""
    names = ["" if name.startswith("ProfilerStep#") else name for name in trace.names[step.event]]
    return tuple(f"{name}{'<>'[end]}" for name, end in zip(names, step.ends.tolist(), strict=True))


def places(trace: Trace, marker: BoolArray) -> list[list[tuple[Place, int]]]:
    """Where markers lie, for each step, in terms of the boundaries of the trace without them.

    Args:
        trace: With its markers.
        marker: Whether an event is one, shape (events,).

    Returns:
        For each step its places, each with the index of its marker event.
    """
    found = []
    for step in steps(trace):
        ahead = 0
        entered: dict[int, int] = {}
        here: list[tuple[Place, int]] = []
        for i, end in zip(step.event.tolist(), step.ends.tolist(), strict=True):
            if not marker[i]:
                ahead += 1
            elif not end:
                entered[i] = ahead
            else:
                here.append((Place(entered[i], ahead), i))
        found.append(here)
    return found


def describe(trace: Trace, of_steps: Sequence[Step], where: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """Columns ``step``, ``enter``, ``leave``, ``before``, ``after`` and :data:`FEATURES`, a row a place.

    Args:
        trace: As it is published.
        of_steps: Its steps, see :func:`steps`.
        where: The places of each step; those of equal sequences must be equal, so that "elsewhere" means
            the same in all traces.
    """
    events = trace.events
    offset = np.cumsum([0, *(len(step) for step in of_steps)])
    event = np.concatenate([step.event for step in of_steps])
    ends = np.concatenate([step.ends for step in of_steps])
    number = np.concatenate([np.full(len(here), s, dtype=np.int16) for s, here in enumerate(where)])
    enter_at = np.array([p.enter for here in where for p in here], dtype=np.int64)
    leave_at = np.array([p.leave for here in where for p in here], dtype=np.int64)
    enter, leave = enter_at + offset[number], leave_at + offset[number]

    time = np.where(ends, events.end_ns[event], events.start_ns[event])
    gap = np.diff(time, prepend=time[0])
    gap[offset[:-1]] = 0  # between two steps
    _, name = np.unique(trace.names, return_inverse=True)
    kind = 2 * name[event] + ends
    pair = kind * (kind.max() + 1) + np.roll(kind, 1)
    edge = np.zeros(len(event), dtype=bool)
    edge[enter] = edge[leave] = True
    usual_gap = _median_by(pair, gap, ~edge)
    median_gap = float(np.median(gap))

    def gap_ratio(at: IntArray) -> FloatArray:
        ratio = _ratio(gap[at], usual_gap[at])
        return np.where((at > 0) & (at < len(gap)), ratio, np.nan)

    before, after = event[enter - 1], event[leave]
    outer = np.where(ends[enter - 1], events.parent[before], before)
    touched = np.zeros(len(events), dtype=bool)
    touched[before] = touched[after] = touched[outer] = True
    usual_dur = _median_by(events.op.astype(np.int64), events.dur_ns, ~touched)

    def dur_ratio(which: IntArray) -> FloatArray:
        return np.where(which >= 0, _ratio(events.dur_ns[which], usual_dur[which]), np.nan)

    started = np.where(ends[leave], after + 1, after).clip(max=len(events) - 1)  # the next event to start
    forward = events.forward[started]
    highest = np.maximum.accumulate(np.concatenate([[-1], events.op[:-1]]))
    gpu = _gpu(trace, time[enter])
    depth = np.cumsum(np.where(ends, -1, 1))
    features = {
        "gap_in": _log(gap[enter]),
        "gap_out": np.where(enter < leave, _log(gap[leave]), np.nan),
        "gap_in_elsewhere": gap_ratio(enter),
        "gap_out_elsewhere": np.where(enter < leave, gap_ratio(leave), np.nan),
        "gap_in_trace": _ratio(gap[enter], median_gap),
        "gap_out_trace": np.where(enter < leave, _ratio(gap[leave], median_gap), np.nan),
        "gap_before": gap_ratio(enter - 1),
        "gap_after": gap_ratio(np.minimum(leave + 1, len(gap) - 1)),
        "span": _log(time[leave] - time[enter - 1]),
        "dur_before": dur_ratio(before),
        "dur_after": dur_ratio(after),
        "dur_outer": dur_ratio(outer),
        "index_step": after - before,
        "parent_offset": started - events.parent[started],
        "forward_offset": np.where(forward >= 0, started - forward, np.nan),
        "op_jump": np.maximum(events.op[started] - highest[started], 0),
        "depth": depth[enter - 1],
        "position": enter_at / np.diff(offset)[number],
        "empty": enter == leave,
        **gpu,
        "events": np.full(len(enter), np.log2(len(events))),
        "ops": np.full(len(enter), np.log2(len(trace.ops))),
        "lanes": np.full(len(enter), len(trace.lanes)),
    }
    names = trace.names
    label = [f"{names[e][:_NAME_LENGTH]}{'<>'[end]}" for e, end in zip(event, ends.tolist(), strict=True)]
    return {
        "step": number,
        "enter": enter_at.astype(np.int32),
        "leave": leave_at.astype(np.int32),
        "before": [label[i] for i in (enter - 1).tolist()],
        "after": [label[i] for i in leave.tolist()],
        **{key: np.asarray(features[key], dtype=np.float32) for key in FEATURES},
    }


def _log(ns: NDArray[Any]) -> FloatArray:
    return np.log2(np.maximum(ns, 0) + _LEAST_NS)


def _ratio(ns: NDArray[Any], usual: NDArray[Any] | float) -> FloatArray:
    return _log(ns) - np.log2(np.asarray(usual, dtype=np.float64) + _LEAST_NS)


def _median_by(key: IntArray, value: IntArray, use: BoolArray) -> FloatArray:
    """The (upper) median of the used values of equal keys, NaN where there is none; shape of ``key``."""
    keys, group = np.unique(key, return_inverse=True)
    rows = np.flatnonzero(use)
    rows = rows[np.lexsort((value[rows], group[rows]))]
    count = np.bincount(group[rows], minlength=len(keys))
    middle = np.cumsum(count) - count + count // 2
    median = np.full(len(keys), np.nan)
    some = count > 0
    median[some] = value[rows[middle[some]]]
    return median[group]


def _gpu(trace: Trace, at: IntArray) -> dict[str, FloatArray]:
    """What the GPU was given around the times ``at``, shape (places,)."""
    events = trace.events
    rows = np.flatnonzero(trace.on_gpu & (events.launch >= 0))
    called = events.start_ns[events.launch[rows]]
    order = np.argsort(called, kind="stable")
    rows, called = rows[order], called[order]
    behind = np.searchsorted(called, at)
    known = (behind > 0) & (behind < len(rows))
    if not known.any():
        nothing = np.full(len(at), np.nan)
        return {"gpu_gap": nothing, "launch_gap": nothing, "gpu_lag": nothing}
    behind = np.where(known, behind, 1)
    last, first = rows[behind - 1], rows[behind]
    values = {
        "gpu_gap": events.start_ns[first] - events.end_ns[last],
        "launch_gap": called[behind] - called[behind - 1],
        "gpu_lag": events.start_ns[first] - called[behind],
    }
    return {key: np.where(known, _log(ns), np.nan) for key, ns in values.items()}
