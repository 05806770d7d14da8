"""Windows over a trace and their labels. Pure functions on arrays.

**Tiling.** Windows of one width tile the trace from its first event to the end of its last one, on whatever
lane, so that GPU work that outlives the host is inside. The width is 1/64 of the median ``ProfilerStep``,
or 1/256 of the trace without any; the last window may be shorter. A window is half open: [start, end).

**Membership.** An event belongs to every window that it overlaps, one of no length to the window that
holds its instant. An event at the very end of the trace belongs to the last window.

**Labels**, for each pair (lane class, pattern) on its own:

- *positive*: costly events cover at least 10 % of the window (the union over all threads or streams of the
  class and over all instances of the pattern), or the window holds at least half of the events of one costly
  *segment*. Per segment, not per trace or step: a sync of 2 us is positive in the one window where it lies,
  even if the pattern occurs in each step and at four places of each, and a segment cut by a window edge is
  not lost. A segment whose events are strewn over three windows or more needs the 10 %.
- *ignored*: not positive, and touched (by any overlap) by an undecided or a native segment. A benign segment,
  or a costly one that falls short of both rules, does not make such a window a certain negative.
- *negative*: everything else, benign segments too.

What counts is an instance's state; a native instance is ignored whatever its state says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.labels.types import Instance, LaneClass, Segment

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer[Any]]

WINDOWS_A_STEP = 64
WINDOWS_WITHOUT_STEPS = 256
MAX_WINDOWS = 65_536
"""More than this (a step of nanoseconds in a trace of hours) and the windows are made wider."""

COVERED_PERCENT = 10
HELD_PERCENT = 50


def tile(duration_ns: int, step_bounds: IntArray) -> IntArray:
    """Edges of the windows of a trace.

    Args:
        duration_ns: End of the trace's last event.
        step_bounds: Start and end of each ``ProfilerStep``, shape (steps, 2).

    Returns:
        int64 nanoseconds, shape (windows + 1,), strictly increasing from 0 to ``duration_ns``. At least one
        window; of a trace without length it is [0, 1).
    """
    duration_ns = max(int(duration_ns), 1)
    median = float(np.median(step_bounds[:, 1] - step_bounds[:, 0])) if len(step_bounds) else 0.0
    width = int(np.ceil(median / WINDOWS_A_STEP)) if median > 0 else -(-duration_ns // WINDOWS_WITHOUT_STEPS)
    width = max(width, -(-duration_ns // MAX_WINDOWS))
    edges = np.arange(0, duration_ns + width, width, dtype=np.int64)
    edges[-1] = duration_ns
    return edges


def spans(start_ns: IntArray, end_ns: IntArray, edges: IntArray) -> tuple[IntArray, IntArray]:
    """First and last window that each event belongs to, both inclusive, shape (events,)."""
    last_window = len(edges) - 2
    first = np.minimum(np.searchsorted(edges, start_ns, side="right") - 1, last_window)
    last = np.searchsorted(edges, end_ns, side="left") - 1
    return first, np.maximum(first, np.minimum(last, last_window))


def merge(start_ns: IntArray, end_ns: IntArray) -> tuple[IntArray, IntArray]:
    """Union of intervals as disjoint ones: starts and ends, both increasing. Touching intervals join.

    Args:
        start_ns: Sorted, shape (intervals,).
        end_ns: Shape (intervals,).
    """
    if not len(start_ns):
        return start_ns, end_ns
    reach = np.maximum.accumulate(end_ns)
    opens = np.flatnonzero(np.append(True, start_ns[1:] > reach[:-1]))
    return start_ns[opens], reach[np.append(opens[1:], len(reach)) - 1]


def covered_ns(start_ns: IntArray, end_ns: IntArray, edges: IntArray) -> IntArray:
    """Time of each window that disjoint intervals cover.

    Args:
        start_ns, end_ns: Result of :func:`merge`.
        edges: Shape (windows + 1,).

    Returns:
        int64 nanoseconds, shape (windows,).
    """
    if not len(start_ns):
        return np.zeros(len(edges) - 1, dtype=np.int64)
    before = np.append(0, np.cumsum(end_ns - start_ns))
    index = np.searchsorted(start_ns, edges, side="right")
    open_end = end_ns[np.maximum(index - 1, 0)]
    beyond = np.where(index > 0, np.maximum(open_end - edges, 0), 0)  # of the interval begun, what is to come
    return np.diff(before[index] - beyond)


@dataclass(frozen=True, eq=False)
class WindowLabels:
    """Labels of a trace's windows.

    Attributes:
        classes: The pairs (lane class, pattern) that any segment has, sorted.
        positive, ignored: bool, shape (windows, classes).
    """

    classes: list[tuple[LaneClass, str]]
    positive: BoolArray
    ignored: BoolArray

    @property
    def any_positive(self) -> BoolArray:
        """Whether a window is positive for any class, shape (windows,)."""
        return np.logical_or.reduce(self.positive, axis=1)

    @property
    def any_ignored(self) -> BoolArray:
        """Whether a window is positive for none and ignored for some class, shape (windows,)."""
        return np.logical_or.reduce(self.ignored, axis=1) & ~self.any_positive


def label_windows(
    edges: IntArray,
    start_ns: IntArray,
    end_ns: IntArray,
    instances: Sequence[Instance],
    segments: Sequence[Segment],
) -> WindowLabels:
    """Label every window; the rules stand at the top of this module.

    Args:
        edges: Result of :func:`tile`, shape (windows + 1,).
        start_ns, end_ns: Of all events of the trace, shape (events,).
        instances: Of the trace.
        segments: Of the trace, each with at least one event.
    """
    windows = len(edges) - 1
    pairs: list[tuple[LaneClass, str]] = [(s.lane_class, instances[s.instance].pattern) for s in segments]
    classes = sorted(set(pairs))
    positive = np.zeros((windows, len(classes)), dtype=bool)
    touched = np.zeros((windows, len(classes)), dtype=bool)
    for column, wanted in enumerate(classes):
        costly: list[Segment] = []
        unknown: list[Segment] = []
        for segment, pair in zip(segments, pairs, strict=True):
            instance = instances[segment.instance]
            if pair != wanted:
                continue
            if instance.source == "native" or instance.state == "undecided":
                unknown.append(segment)
            elif instance.state == "costly":
                costly.append(segment)
        positive[:, column] = _positive(edges, start_ns, end_ns, costly)
        touched[:, column] = _held(edges, start_ns, end_ns, unknown, percent=0)
    return WindowLabels(classes, positive, touched & ~positive)


def _positive(edges: IntArray, start_ns: IntArray, end_ns: IntArray, segments: list[Segment]) -> BoolArray:
    rows, _ = _events(segments)
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    covered = covered_ns(*merge(start_ns[rows], end_ns[rows]), edges)
    much = (covered > 0) & (100 * covered >= COVERED_PERCENT * np.diff(edges))
    return much | _held(edges, start_ns, end_ns, segments, percent=HELD_PERCENT)


def _held(
    edges: IntArray, start_ns: IntArray, end_ns: IntArray, segments: list[Segment], percent: int
) -> BoolArray:
    """Windows that hold some, and at least ``percent``, of the events of any one segment."""
    held = np.zeros(len(edges) - 1, dtype=bool)
    if not segments:
        return held
    rows, owner = _events(segments)
    first, last = spans(start_ns[rows], end_ns[rows], edges)
    counts = np.array([segment.event_count for segment in segments])
    heads = np.append(0, np.cumsum(counts)[:-1])
    low = np.minimum.reduceat(first, heads)
    width = np.maximum.reduceat(last, heads) - low + 2
    # One strip of windows per segment, one after the other. A strip counts the events that open less those
    # that have closed, and ends at 0: one running sum serves them all.
    offset = np.append(0, np.cumsum(width)[:-1]) - low
    length = int(width.sum())
    change = np.bincount(first + offset[owner], minlength=length)
    change -= np.bincount(last + 1 + offset[owner], minlength=length)
    inside = np.cumsum(change)
    strip = np.repeat(np.arange(len(segments)), width)
    enough = (inside > 0) & (100 * inside >= percent * counts[strip])
    held[(np.arange(length) - offset[strip])[enough]] = True
    return held


def _events(segments: list[Segment]) -> tuple[IntArray, IntArray]:
    """Event indices of all segments, and the position in ``segments`` that each belongs to."""
    counts = np.array([segment.event_count for segment in segments], dtype=np.int64)
    first = np.array([segment.first_event for segment in segments], dtype=np.int64)
    owner = np.repeat(np.arange(len(segments)), counts)
    start_of_run = np.cumsum(counts) - counts
    return first[owner] + np.arange(len(owner)) - start_of_run[owner], owner
