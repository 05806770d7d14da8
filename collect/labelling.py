"""From a profile with markers to a published trace with segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchtraceap.collect.additions import additions
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels import segments as runs_of
from torchtraceap.labels.markers import PREFIX, parse_marker
from torchtraceap.labels.pattern import Mechanism
from torchtraceap.labels.types import Segment


@dataclass(frozen=True)
class Armed:
    """A placement that acts in a trace: its index in the trace's instances, and how its events are found."""

    instance: int
    mechanism: Mechanism
    selects: Callable[[str], bool] | None = None


def strip(trace: Trace) -> Trace:
    """The trace without markers, and without GPU work that was launched before the profile began.

    Nobody can say what the latter belongs to. Steps are numbered from 0.
    """
    return number_steps(trace.select(published(trace))[0])


def label(
    trace: Trace, secret: str, armed: Mapping[int, Armed], clean: Trace | None = None
) -> tuple[Trace, list[Segment]]:
    """Find the segments of every placement that acted, and remove all markers.

    Args:
        trace: As read from the profiler, with this session's markers.
        secret: The session's part of marker names.
        armed: The placements that act, by their index in the session.
        clean: The stripped clean twin; needed by the mechanism "selector".

    Returns:
        The stripped trace (see :func:`strip`), and the segments in order of start.

    Raises:
        RuntimeError: A marker that said "on" belongs to a placement that was not armed.
        ValueError: Two placements are of the mechanism "selector", or one is and ``clean`` is missing.
    """
    stripped, members = marked_members(trace, secret, armed)
    return stripped, all_segments(stripped, members | selected_members(stripped, members, armed, clean))


def marked_members(
    trace: Trace, secret: str, armed: Mapping[int, Armed]
) -> tuple[Trace, dict[int, NDArray[np.bool_]]]:
    """The stripped trace, and by instance which of its events belong to what acted there, shape (events,).

    Without instances of the mechanism "selector", which no marker knows of; see :func:`label` for the rest.
    """
    keep = published(trace)
    markers = [parse_marker(secret, op.name) for op in trace.ops]
    if stray := {m.placement for m in markers if m is not None and m.on} - armed.keys():
        raise RuntimeError(f"placement {min(stray)} acted without being armed")

    members: dict[int, NDArray[np.bool_]] = {}
    events = trace.events
    for placement, one in armed.items():
        if one.mechanism == "selector":
            continue
        on = np.array([m is not None and m.on and m.placement == placement for m in markers], dtype=bool)
        if one.mechanism == "meanwhile":
            assert one.selects is not None
            seeds = runs_of.meanwhile(on[events.op], events.start_ns, events.end_ns) & ~trace.on_gpu
            seeds &= _accepted(trace, one.selects)
            members[one.instance] = runs_of.below(seeds, events.parent, events.launch)[keep]
            continue
        members[one.instance] = runs_of.belongs(
            on[events.op],
            events.parent,
            events.launch,
            events.forward,
            backward=one.mechanism == "marker+backward",
        )[keep]
    return strip(trace), members


def selected_members(
    stripped: Trace,
    members: Mapping[int, NDArray[np.bool_]],
    armed: Mapping[int, Armed],
    clean: Trace | None,
) -> dict[int, NDArray[np.bool_]]:
    """The members of the instance that is found by comparison, if there is one, less those of others."""
    selectors = [one for one in armed.values() if one.mechanism == "selector"]
    if len(selectors) > 1 or (selectors and clean is None):
        raise ValueError("a trace can hold one pattern found by comparison, and needs the clean trace for it")
    found = {}
    for one in selectors:
        assert clean is not None
        assert one.selects is not None
        taken = np.logical_or.reduce([_of_any_step(stripped), *members.values()])
        new = additions(stripped, clean, taken) & ~taken
        found[one.instance] = _selected(stripped, new, one.selects)
    return found


def _of_any_step(trace: Trace) -> NDArray[np.bool_]:
    """What is no consequence of a pattern, other than those that mark it, shape (events,).

    What the loader does; and what a reducer copies from its buckets, which are others, in another order,
    where DistributedDataParallel looks for unused parameters.
    """
    names = ("enumerate(DataLoader)", "torch.distributed.ddp.reducer::copy_bucket_to_grad")
    tops = np.array([op.name.startswith(names) for op in trace.ops], dtype=bool)
    return runs_of.below(tops[trace.events.op], trace.events.parent, trace.events.launch)


def all_segments(trace: Trace, members: Mapping[int, NDArray[np.bool_]]) -> list[Segment]:
    """The segments of several instances, each with its events (see :func:`segments_of`), by their start."""
    segments = [s for instance, member in members.items() for s in segments_of(trace, member, instance)]
    return sorted(segments, key=lambda s: (s.start_ns, s.lane, s.first_event))


def segments_of(trace: Trace, member: NDArray[np.bool_], instance: int) -> list[Segment]:
    """The segments that the events ``member`` (bool, shape (events,)) of ``trace`` form."""
    events = trace.events
    run = runs_of.runs(member, events.lane, trace.step)
    times = runs_of.bounds(run, events.start_ns, events.end_ns)
    return [
        Segment(
            instance=instance,
            lane=int(events.lane[first]),
            lane_class=trace.lanes[int(events.lane[first])].kind,
            step=int(trace.step[first]),
            start_ns=start,
            end_ns=end,
            first_event=first,
            event_count=count,
        )
        for (first, count), (start, end) in zip(run.tolist(), times.tolist(), strict=True)
    ]


def published(trace: Trace) -> NDArray[np.bool_]:
    """Events that :func:`strip` keeps, bool, shape (events,)."""
    is_marker = np.array([op.name.startswith(PREFIX) for op in trace.ops], dtype=bool)[trace.events.op]
    return ~is_marker & ~launched_before(trace)


def _selected(trace: Trace, new: NDArray[np.bool_], selects: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Of the events ``new`` those whose name is accepted, with the new ones below and launched by them."""
    seeds = new & _accepted(trace, selects)
    return runs_of.below(seeds, trace.events.parent, trace.events.launch, among=new)


def _accepted(trace: Trace, selects: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Never the profiler's own work and the driver's, which come as they will: buffers, lazy loading."""
    accepted = [op.category != "overhead" and selects(op.name) for op in trace.ops]
    return np.array(accepted, dtype=bool)[trace.events.op]


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
