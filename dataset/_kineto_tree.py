"""How events hang together: pure functions on arrays, sorted by lane, then start, then longest first."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]

OVERHANG_NS = 1_000
"""A child may outlast its parent by so much: in traces of whole microseconds, start and duration are rounded
each by itself, so that a true child seems to end up to 1 us late."""

NODES = 3
"""An op records at most so many nodes of autograd's graph: an in-place copy into a slice makes two."""


def enclosing(lane: IntArray, start_ns: IntArray, dur_ns: IntArray) -> NDArray[np.int32]:
    """Innermost event of the same lane that encloses each event, -1 for none.

    Event p encloses a later event e of its lane if e starts before p ends (or with p, when p has no
    duration), and ends at most :data:`OVERHANG_NS` after p. The innermost is the last of them in order.
    """
    parent = np.full(len(lane), -1, dtype=np.int32)
    lanes, starts, ends = lane.tolist(), start_ns.tolist(), (start_ns + dur_ns).tolist()
    stack: list[int] = []
    current = None
    # One pass: an event that does not enclose this one encloses no later one that this one would not enclose.
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if lanes[i] != current:
            current = lanes[i]
            stack.clear()
        while stack:
            top = stack[-1]
            if end <= ends[top] + OVERHANG_NS and (start < ends[top] or start == starts[top]):
                parent[i] = top
                break
            stack.pop()
        stack.append(i)
    return parent


def first_match(ids: IntArray, keys: IntArray, order: IntArray) -> NDArray[np.int64]:
    """Row with each id, -1 where no row has it.

    Args:
        ids: What to look for; negative means nothing.
        keys: Key of each row.
        order: Rows that may be found, the preferred one of equal keys first.
    """
    if not len(order):
        return np.full(len(ids), -1, dtype=np.int64)
    order = order[np.argsort(keys[order], kind="stable")]
    at = np.minimum(np.searchsorted(keys[order], ids), len(order) - 1)
    row = order[at]
    return np.where((ids >= 0) & (keys[row] == ids), row, -1)


def forward_ops(start_ns: IntArray, sequence: IntArray, forward_thread: IntArray) -> NDArray[np.int32]:
    """Forward op whose gradient each backward op computes, -1 for none.

    A backward op has a sequence number and a forward thread; a forward op only the former. Several forward
    ops share a number: nested ones (aten::conv2d and the aten::convolution in it), and ops without gradient,
    which show the number that the next op will take. The one that starts last recorded the gradient. It is
    sought among those that started before the backward op, and among all if there is none.

    An op that records several nodes shows the number of the first (a copy into a slice makes its own node,
    then ``CopySlices``). So a number that no forward op shows belongs to the op with the next lower one.

    Numbers count by thread. Forward passes of several threads (``DataParallel``) cannot be told apart: the
    profiler's numbers of forward threads are nowhere else in the file.
    """
    forward = np.full(len(start_ns), -1, dtype=np.int32)
    recorded: dict[int, list[tuple[int, int]]] = defaultdict(list)
    starts = start_ns.tolist()
    numbers = sequence.tolist()
    for row in np.flatnonzero((sequence >= 0) & (forward_thread <= 0)).tolist():
        recorded[numbers[row]].append((starts[row], row))
    for rows in recorded.values():
        rows.sort()
    for row in np.flatnonzero((sequence >= 0) & (forward_thread > 0)).tolist():
        for behind in range(NODES):
            candidates = recorded.get(numbers[row] - behind, [])
            # Slot -1 (nothing before the backward op) is the last of all.
            slot = bisect_right(candidates, (starts[row], -1)) - 1
            if candidates and (slot >= 0 or not behind):
                forward[row] = candidates[slot][1]
                break
    return forward
