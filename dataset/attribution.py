"""Whether the segments of a trace hold exactly what belongs to their instances, as far as the trace can tell.

An instance's *members* are the events of its segments. The labelling (labels/segments.py) makes them from
markers, which a published trace does not have any more; what is left to check are the laws that members obey
wherever the markers were. Each function finds the events that break one of them.

Not laws, because honest traces break them:

* A member's parent need not be a member: above the first event of a place there was a marker, and above a
  backward op autograd.
* A GPU event without a launch call belongs to no step. It is the backlog of steps that were cut away
  (collect/cutting.py), and its label cannot be derived any more.
* With the mechanism "selector" a kernel may be a member and the call that launched it not: the same call
  launched another kernel in the clean trace. What lies below a member may belong to another instance
  instead, as markers come first.
* Native instances have no backward law: their evidence is about calls, whatever the mechanism of the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace, TraceRecord
from torchtraceap.labels.pattern import PATTERNS, Mechanism
from torchtraceap.labels.segments import bounds, covered, runs
from torchtraceap.labels.types import Instance, Segment

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer[Any]]


def violations(record: TraceRecord) -> Iterator[str]:
    """Every broken law, in words; references of the trace and of its segments must resolve.

    A segment that is not what it says of itself hides what follows from it: then only that is reported.
    """
    trace = record.trace
    broken = [f"segment {i} {what}" for i, s in enumerate(record.segments) if (what := misfit(trace, s))]
    if broken:
        yield from broken
        return
    events = trace.events
    own = [members(record.segments, index, len(trace)) for index in range(len(record.instances))]
    labelled = np.any(own, axis=0) if own else np.zeros(len(trace), dtype=bool)
    for index, (instance, member) in enumerate(zip(record.instances, own, strict=True)):
        name = f"instance {index} ({instance.pattern}/{instance.variant})"
        if not _are_runs(record.segments, index, runs(member, events.lane, trace.step)):
            yield f"the segments of {name} are not the maximal runs of their events"
        mechanism = _mechanism(instance)
        left = left_below(member, events.parent, events.launch)
        yield from _told(
            trace,
            left & ~labelled if mechanism == "selector" else left,
            f"lies below a member of {name} or was launched by one, but is in no segment of it",
        )
        if mechanism != "selector":
            yield from _told(
                trace,
                launched_elsewhere(member, events.launch),
                f"is in a segment of {name}, but what launched it is not",
            )
        if mechanism == "marker+backward":
            yield from _told(
                trace,
                left_backward(member, events.forward),
                f"is the backward op of a member of {name}, but is in no segment of it",
            )


def _mechanism(instance: Instance) -> Mechanism:
    """How its events were found: a look-alike may be of another mechanism than its pattern."""
    if instance.source == "native":
        return "marker"
    pattern = PATTERNS[instance.pattern]
    return pattern.mechanism_of(pattern.variant(instance.variant))


def members(segments: Iterable[Segment], instance: int, events: int) -> BoolArray:
    """Which of ``events`` events lie in the segments of ``instance``, bool, shape (events,)."""
    return covered((one for one in segments if one.instance == instance), events)


def misfit(trace: Trace, segment: Segment) -> str | None:
    """What a segment says of itself and its events do not bear out, or None."""
    if segment.event_count < 1:
        return "has no events"
    events = trace.events
    rows = segment.rows
    run = np.array([[segment.first_event, segment.event_count]])
    if not (events.lane[rows] == segment.lane).all():
        return "has events of another lane"
    if trace.lanes[segment.lane].kind != segment.lane_class:
        return "has the wrong lane class"
    if not (trace.step[rows] == segment.step).all():
        return "has events of another step"
    if bounds(run, events.start_ns, events.end_ns).tolist() != [[segment.start_ns, segment.end_ns]]:
        return "does not begin and end with its events"
    return None


def left_below(member: BoolArray, parent: IntArray, launch: IntArray) -> BoolArray:
    """Events that are no members, though what they lie below or were launched by is one, shape (events,)."""
    above = np.where(launch >= 0, launch, parent)
    return (above >= 0) & member[above] & ~member


def launched_elsewhere(member: BoolArray, launch: IntArray) -> BoolArray:
    """Members on a GPU whose launch call is in the trace and no member, shape (events,)."""
    return member & (launch >= 0) & ~member[launch]


def left_backward(member: BoolArray, forward: IntArray) -> BoolArray:
    """Backward ops that are no members, though their forward op is one, shape (events,)."""
    return (forward >= 0) & member[forward] & ~member


def _are_runs(segments: Iterable[Segment], instance: int, run: IntArray) -> bool:
    found = sorted((s.first_event, s.event_count) for s in segments if s.instance == instance)
    return found == [tuple(one) for one in run.tolist()]


def _told(trace: Trace, broken: BoolArray, what: str) -> Iterator[str]:
    """One sentence about the first of the events that break a law, and how many there are; none if none."""
    rows = np.flatnonzero(broken)
    if len(rows):
        others = f" (the first of {len(rows)})" if len(rows) > 1 else ""
        yield f"event {rows[0]} ({trace.names[rows[0]]}) {what}{others}"
