"""Cutting a labelled profile down to some of its steps."""

from __future__ import annotations

from torchtraceap.collect.labelling import all_segments
from torchtraceap.dataset.attribution import members
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
        The smaller trace, and its segments in order of start. They are formed anew: two may become one when
        what lay between them goes, or when the steps that told them apart become the same backlog.
    """
    begin, end = int(trace.step_bounds[first, 0]), int(trace.step_bounds[first + count - 1, 1])
    step, events = trace.step, trace.events
    own = (step >= first) & (step < first + count)
    backlog = trace.on_gpu & (step < first) & (events.end_ns > begin) & (events.start_ns < end)
    outside = ~trace.on_gpu & (step < 0) & (events.start_ns >= begin) & (events.start_ns < end)
    keep = own | backlog | outside
    kept, _ = trace.select(keep)
    instances = sorted({segment.instance for segment in segments})
    belongs = {instance: members(segments, instance, len(trace))[keep] for instance in instances}
    return kept, all_segments(kept, belongs)


def steps_below(trace: Trace, cap: int) -> int:
    """How many of the trace's steps stay below ``cap`` events, going by its average; at least one."""
    steps = len(trace.step_bounds)
    return steps if len(trace) <= cap else max(1, min(steps - 1, int(cap / len(trace) * steps)))
