"""Which events of a trace belong to a pattern, and the segments they form. Pure functions on arrays.

Arrays are those of ``dataset.trace.Events``: one entry an event, sorted by lane, then start, then longest
first; ``parent``, ``launch`` and ``forward`` are indices into the same arrays, -1 for none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.labels.types import Segment

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer[Any]]


def belongs(
    roots: BoolArray, parent: IntArray, launch: IntArray, forward: IntArray, *, backward: bool
) -> BoolArray:
    """Every event that exists because of what ran inside of the marker events ``roots``.

    These are the events below a root on its thread, what they launched on the GPU and, when ``backward``,
    the backward ops of the forward ops among them with everything below and launched by those. The
    recomputation of a checkpointed forward op repeats its sequence number, and so is found by the same
    link. The roots themselves are not included.

    Args:
        roots: Marker events that were switched on, shape (events,).
        parent, launch, forward: See ``dataset.trace.Events``, shape (events,).
        backward: Whether the pattern's mechanism is "marker+backward".

    Returns:
        bool, shape (events,).
    """
    inside = below(roots, parent, launch)
    if backward:
        grads = (forward >= 0) & inside[forward]
        inside = below(inside | grads, parent, launch)
    return inside & ~roots


def below(
    seeds: BoolArray, parent: IntArray, launch: IntArray, *, among: BoolArray | None = None
) -> BoolArray:
    """``seeds`` and all their descendants; a GPU event follows its launch call, else its parent.

    With ``among`` only through and to events of it.
    """
    above = np.where(launch >= 0, launch, parent)
    inside = seeds.copy()
    while True:  # one round per level of the tree
        grown = inside | ((above >= 0) & inside[above])
        if among is not None:
            grown &= among
        if np.array_equal(grown, inside):
            return inside
        inside = grown


def meanwhile(roots: BoolArray, start_ns: IntArray, end_ns: IntArray) -> BoolArray:
    """Events on any lane that begin while an event of ``roots`` runs, bool, shape (events,).

    Args:
        roots: Marker events that were switched on, shape (events,).
        start_ns, end_ns: int64, shape (events,).
    """
    rows = np.flatnonzero(roots)
    if not len(rows):
        return np.zeros(len(roots), dtype=bool)
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    latest_end = np.maximum.accumulate(end_ns[rows])
    before = np.searchsorted(start_ns[rows], start_ns, side="right") - 1
    return (before >= 0) & (start_ns < latest_end[before])


def covered(segments: Iterable[Segment], events: int) -> BoolArray:
    """Which of the ``events`` events of a trace lie in one of the segments, bool, shape (events,)."""
    inside = np.zeros(events, dtype=bool)
    for segment in segments:
        inside[segment.rows] = True
    return inside


def runs(member: BoolArray, lane: IntArray, step: IntArray) -> IntArray:
    """Maximal runs of members on one lane and in one step, with no other event of the lane between them.

    An event that encloses the run lies before it in the order, and so does not break it.

    Args:
        member: Whether the event belongs to the pattern, shape (events,).
        lane: Lane of each event, shape (events,).
        step: Profiled step of each event, shape (events,).

    Returns:
        First event and number of events of each run, int64, shape (runs, 2).
    """
    rows = np.flatnonzero(member)
    if not len(rows):
        return np.empty((0, 2), dtype=np.int64)
    opens = np.ones(len(rows), dtype=bool)
    before, here = rows[:-1], rows[1:]
    opens[1:] = (here != before + 1) | (lane[here] != lane[before]) | (step[here] != step[before])
    first = np.flatnonzero(opens)
    count = np.diff(np.append(first, len(rows)))
    return np.stack([rows[first], count], axis=1)


def bounds(run: IntArray, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Start and end of each run in nanoseconds: from its first start to its latest end, shape (runs, 2).

    Args:
        run: Result of :func:`runs`, shape (runs, 2).
        start_ns, end_ns: int64, shape (events,).
    """
    if not len(run):
        return np.empty((0, 2), dtype=np.int64)
    ends = [int(end_ns[first : first + count].max()) for first, count in run]
    return np.stack([start_ns[run[:, 0]], np.array(ends, dtype=np.int64)], axis=1)
