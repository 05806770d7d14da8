"""Cutting a labelled profile down to some of its steps."""

from __future__ import annotations

import msgspec
import numpy as np

from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.types import Segment


def keep_steps(trace: Trace, segments: list[Segment], first: int, count: int) -> tuple[Trace, list[Segment]]:
    """Profiled steps ``first`` to ``first + count`` alone.

    What the GPU ran for them stays, though it may run later, and so does the work of earlier steps that it
    still had to do when they began: a host that runs ahead leaves a backlog, and without it the GPU would
    look idle. Such work has no launch call in the trace any more, but it keeps its label, in step -1.

    Args:
        trace: A labelled trace.
        segments: Its segments.
        first: First step to keep.
        count: Number of steps to keep.

    Returns:
        The smaller trace and what is left of the segments.
    """
    begin, end = int(trace.step_bounds[first, 0]), int(trace.step_bounds[first + count - 1, 1])
    step, events = trace.step, trace.events
    own = (step >= first) & (step < first + count)
    backlog = trace.on_gpu & (step < first) & (events.end_ns > begin) & (events.start_ns < end)
    outside = ~trace.on_gpu & (step < 0) & (events.start_ns >= begin) & (events.start_ns < end)
    kept, index = trace.select(own | backlog | outside)
    return kept, [left for one in segments if (left := _moved(one, kept, index)) is not None]


def _moved(segment: Segment, trace: Trace, index: np.ndarray) -> Segment | None:
    """The segment in the trace that was cut, or None if none of its events is left."""
    rows = index[segment.first_event : segment.first_event + segment.event_count]
    rows = rows[rows >= 0]
    if not len(rows):
        return None
    return msgspec.structs.replace(
        segment,
        lane=int(trace.events.lane[rows[0]]),
        step=int(trace.step[rows[0]]),
        start_ns=int(trace.events.start_ns[rows].min()),
        end_ns=int(trace.events.end_ns[rows].max()),
        first_event=int(rows[0]),
        event_count=len(rows),
    )


def steps_below(trace: Trace, cap: int) -> int:
    """How many of the trace's steps stay below ``cap`` events, going by its average; at least one."""
    steps = len(trace.step_bounds)
    return steps if len(trace) <= cap else max(1, min(steps - 1, int(cap / len(trace) * steps)))
