"""What a trace has beyond its clean twin: both are aligned, level by level of the tree.

Two events correspond if they have one name, those above them correspond, and both take part in a longest
sequence of names that the children of these have in common. So equal operators are told apart by where they
stand: one that the clean step has elsewhere does not excuse another here. Where any of several could be the
additional one, those with the twin's shapes are taken for the twin's.

A node that only brings work of the clean step under another roof is looked through: so is a reentrant
checkpoint's, in which a part of the backward pass runs, and what is known to be no counterpart of anything.

What nothing encloses is aligned by step and thread. Threads are numbered by when each is first seen, for
which they race, and so are known by what they run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Op, Trace

BoolArray = NDArray[np.bool_]
ROOFS = frozenset(
    {"CheckpointFunctionBackward", "autograd::engine::evaluate_function: CheckpointFunctionBackward"}
)
"""Names of nodes in which clean work runs that nothing encloses in the clean step."""

Pair = tuple[int, int]
Key = tuple[int, int]
"""Numbers of what two events share if they are alike in all, and of their name."""


def additions(trace: Trace, clean: Trace, without: BoolArray | None = None) -> BoolArray:
    """Events of ``trace`` that correspond to none of its clean twin, bool, shape (events,).

    Args:
        trace, clean: Stripped profiles of the same steps.
        without: Events of ``trace`` that are known to be no counterpart of any, shape (events,).
    """
    numbers: dict[Hashable, int] = {}
    keys, clean_keys = _keys(trace, numbers), _keys(clean, numbers)
    tops, below = _tree(trace, np.zeros(len(trace), dtype=bool) if without is None else without)
    clean_tops, clean_below = _tree(clean, np.zeros(len(clean), dtype=bool))
    new = np.ones(len(trace), dtype=bool)
    lanes = _same_threads(tops, clean_tops, keys, clean_keys)
    pending = [
        (rows, clean_tops.get((lanes[lane], step), []))
        for (lane, step), rows in tops.items()
        if lane in lanes
    ]
    while pending:
        rows, clean_rows = pending.pop()
        for row, clean_row in _aligned(rows, clean_rows, keys, clean_keys):
            new[row] = False
            if row in below and clean_row in clean_below:
                pending.append((below[row], clean_below[clean_row]))
    return new


def _keys(trace: Trace, numbers: dict[Hashable, int]) -> list[Key]:
    def key(op: Op) -> Key:
        name = "ProfilerStep" if op.name.startswith("ProfilerStep#") else op.name
        alike = name, op.category, op.shapes, op.types, op.grid, op.block, op.bytes
        return numbers.setdefault(alike, len(numbers)), numbers.setdefault(name, len(numbers))

    by_op = [key(op) for op in trace.ops]
    return [by_op[op] for op in trace.events.op.tolist()]


def _tree(trace: Trace, without: BoolArray) -> tuple[dict[tuple[int, int], list[int]], dict[int, list[int]]]:
    """Events that nothing encloses, by lane and step, and those directly below or launched by each other.

    Events ``without`` are in neither, and like roofs nothing is below them.
    """
    events = trace.events
    tops: dict[tuple[int, int], list[int]] = defaultdict(list)
    below: dict[int, list[int]] = defaultdict(list)
    roofs = np.array([op.name in ROOFS for op in trace.ops], dtype=bool)
    through = (without | roofs[events.op]).tolist()
    above = np.where(events.launch >= 0, events.launch, events.parent).tolist()
    lanes, steps = events.lane.tolist(), trace.step.tolist()
    for row in np.flatnonzero(~without).tolist():
        parent = above[row]
        while parent >= 0 and through[parent]:
            parent = above[parent]
        if parent >= 0:
            below[parent].append(row)
        else:
            tops[lanes[row], steps[row]].append(row)
    return dict(tops), dict(below)


def _same_threads(
    tops: dict[tuple[int, int], list[int]],
    clean_tops: dict[tuple[int, int], list[int]],
    keys: Sequence[Key],
    clean_keys: Sequence[Key],
) -> dict[int, int]:
    """For each lane that one of the twin resembles the one that does most, each taken once."""

    def contents(tops: dict[tuple[int, int], list[int]], keys: Sequence[Key]) -> dict[int, Counter[int]]:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for (lane, _), rows in tops.items():
            counts[lane].update(keys[row][1] for row in rows)
        return counts

    here, there = contents(tops, keys), contents(clean_tops, clean_keys)
    alike = sorted((-(a & b).total(), lane, other) for lane, a in here.items() for other, b in there.items())
    found: dict[int, int] = {}
    for count, lane, other in alike:
        if count and lane not in found and other not in found.values():
            found[lane] = other
    return found


def _aligned(
    rows: Sequence[int], clean_rows: Sequence[int], keys: Sequence[Key], clean_keys: Sequence[Key]
) -> list[Pair]:
    """Corresponding events of two rows of siblings: by name; of several that would do, those alike in all."""
    pairs = common([keys[row][1] for row in rows], [clean_keys[row][1] for row in clean_rows])
    for order in (range(len(pairs) - 1, -1, -1), range(len(pairs))):  # an additional one shifts all behind it
        for number in order:
            i, j = pairs[number]
            alike, clean_alike = keys[rows[i]][0], clean_keys[clean_rows[j]][0]
            if alike == clean_alike:
                continue
            low, clean_low = pairs[number - 1] if number else (-1, -1)
            last = number + 1 == len(pairs)
            high, clean_high = (len(rows), len(clean_rows)) if last else pairs[number + 1]
            better = [(k, j) for k in range(low + 1, high) if keys[rows[k]][0] == clean_alike]
            better += [
                (i, k) for k in range(clean_low + 1, clean_high) if clean_keys[clean_rows[k]][0] == alike
            ]
            pairs[number] = next(iter(better), (i, j))
    return [(rows[i], clean_rows[j]) for i, j in pairs]


def common(a: Sequence[int], b: Sequence[int]) -> list[Pair]:
    """A longest common subsequence: indices into both sequences, in order.

    Not that of difflib, which takes the longest block that it finds first: a network repeats its blocks, and
    so one of them would be taken for another. Hyyrö's bit vectors (2004) find the lengths, a row of the table
    in an integer; they make ``len(a)`` steps on ``len(b)`` bits, so that some thousands take milliseconds.
    """
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    middle = _common(a[head : len(a) - tail], b[head : len(b) - tail])
    return [
        *((i, i) for i in range(head)),
        *((head + i, head + j) for i, j in middle),
        *((len(a) - i, len(b) - i) for i in range(tail, 0, -1)),
    ]


def _common(a: Sequence[int], b: Sequence[int]) -> list[Pair]:
    if not a or not b:
        return []
    places: dict[int, int] = defaultdict(int)
    for j, item in enumerate(b):
        places[item] |= 1 << j
    full = (1 << len(b)) - 1
    # Bit j of row i is 0 where b[j] makes the longest sequence of a[:i] and b[:j + 1] longer than without.
    row = full
    rows = [row]
    for item in a:
        hit = row & places.get(item, 0)
        row = ((row + hit) | (row - hit)) & full
        rows.append(row)
    found: list[Pair] = []
    i, j = len(a), len(b) - 1
    while i and j >= 0:
        if rows[i] >> j & 1:
            j -= 1  # b[j] adds nothing
        elif not rows[i - 1] >> j & 1:
            i -= 1  # it does so without a[i - 1], too
        else:
            found.append((i - 1, j))
            i, j = i - 1, j - 1
    return found[::-1]
