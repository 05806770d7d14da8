"""From a profile with markers to a published trace with segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace
from torchtraceap.labels import segments as runs_of
from torchtraceap.labels.markers import PREFIX, parse_marker
from torchtraceap.labels.types import Segment


def label(
    trace: Trace, secret: str, backward: Sequence[bool], instance_of: dict[int, int]
) -> tuple[Trace, list[Segment]]:
    """Find the segments of every placement that acted, and remove all markers.

    GPU work that was launched before the profile began goes too: nobody can say what it belongs to.

    Args:
        trace: As read from the profiler, with this session's markers.
        secret: The session's part of marker names.
        backward: For each placement, whether its mechanism follows the backward pass.
        instance_of: For each armed placement its index in the trace's instances.

    Returns:
        The trace without markers, its steps numbered from 0, and the segments in order of start.

    Raises:
        RuntimeError: A marker that said "on" belongs to a placement that was not armed.
    """
    markers = [parse_marker(secret, op.name) for op in trace.ops]
    is_marker = np.array([op.name.startswith(PREFIX) for op in trace.ops], dtype=bool)[trace.events.op]
    events = trace.events
    keep = ~is_marker & ~launched_before(trace)
    stripped, _ = trace.select(keep)
    step = stripped.step
    segments: list[Segment] = []
    for placement in {m.placement for m in markers if m is not None and m.on}:
        if placement not in instance_of:
            raise RuntimeError(f"placement {placement} acted without being armed")
        on = np.array([m is not None and m.on and m.placement == placement for m in markers], dtype=bool)
        member = runs_of.belongs(
            on[events.op], events.parent, events.launch, events.forward, backward=backward[placement]
        )[keep]
        run = runs_of.runs(member, stripped.events.lane, step)
        times = runs_of.bounds(run, stripped.events.start_ns, stripped.events.end_ns)
        for (first, count), (start, end) in zip(run.tolist(), times.tolist(), strict=True):
            lane = int(stripped.events.lane[first])
            segments.append(
                Segment(
                    instance=instance_of[placement],
                    lane=lane,
                    lane_class=stripped.lanes[lane].kind,
                    step=int(step[first]),
                    start_ns=start,
                    end_ns=end,
                    first_event=first,
                    event_count=count,
                )
            )
    segments.sort(key=lambda s: (s.start_ns, s.lane, s.first_event))
    return number_steps(stripped), segments


def launched_before(trace: Trace) -> NDArray[np.bool_]:
    """GPU events of which neither the launch call nor the op is in the trace, bool, shape (events,)."""
    return trace.on_gpu & (trace.events.launch < 0) & (trace.events.parent < 0)


def number_steps(trace: Trace) -> Trace:
    """Rename the ``ProfilerStep`` annotations to #0, #1, ...: the profiler's count tells of earlier runs."""
    names = sorted(
        (op.name for op in trace.ops if op.name.startswith("ProfilerStep#")),
        key=lambda name: int(name.split("#")[1]),
    )
    numbered = {name: f"ProfilerStep#{i}" for i, name in enumerate(names)}
    ops = [msgspec.structs.replace(op, name=numbered.get(op.name, op.name)) for op in trace.ops]
    return replace(trace, ops=ops)
