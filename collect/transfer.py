"""Labels of a marked profile, carried over to a profile of the same steps that never had a marker.

A marker takes time, and the gap that it leaves stays when it is stripped. So each arm is profiled twice
(collect/session.py), and the profile without markers is the one that is published. In both the loop takes
the same steps with the same batches, so both hold the same operators in the same order, and an event is
known in the other profile by its position in the sequence of its thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.collect.labelling import Armed, all_segments, marked_members, selected_members
from torchtraceap.collect.native import RUNTIME_CATEGORIES
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.segments import below
from torchtraceap.labels.types import Segment

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

VOLATILE = frozenset(
    prefix + call
    for prefix in ("cuda", "hip")
    for call in (
        # Allocators ask whether the device is done with a block, as often as they happen to look.
        "EventQuery",
        # They ask for memory, and for what that needs, when they have none that fits. Whether they do depends
        # on how far the device has come with what was freed.
        "Malloc",
        "Free",
        "HostAlloc",
        "FreeHost",
        "StreamIsCapturing",
        # Events come from pools, which make one when all are in use.
        "EventCreateWithFlags",
        # Asked of a batch by the thread that pins it, and of what is copied before that thread has run.
        "PointerGetAttributes",
    )
)
"""Runtime calls that come and go by chance between equal steps."""


def carried(
    marked: Trace, secret: str, armed: Mapping[int, Armed], plain: Trace, clean: Trace | None
) -> list[Segment] | None:
    """The segments of a profile without markers.

    Args:
        marked: A profile of the same steps with this session's markers, as read.
        secret: The session's part of marker names.
        armed: The placements that act, by their index in the session.
        plain: The stripped profile without markers.
        clean: The stripped profile of the clean twin, without markers too; needed by "selector".

    Returns:
        The segments in order of start, or None if the two profiles do not correspond.

    Raises:
        As :func:`labelling.label`.
    """
    stripped, members = marked_members(marked, secret, armed)
    moved = transfer(stripped, members, plain)
    if moved is None:
        return None
    return all_segments(plain, moved | selected_members(plain, moved, armed, clean))


def transfer(marked: Trace, members: Mapping[int, BoolArray], plain: Trace) -> dict[int, BoolArray] | None:
    """Find the members of instances in another profile of the same steps.

    What lies below a member or was launched by one is a member (see ``labels/segments.py``), so only core
    events have to be found (see :func:`_core`). Others are found by their place between these where nothing
    above them is a member.

    Args:
        marked: A stripped profile.
        members: By instance, which of its events are members, shape (events,).
        plain: The other profile, stripped.

    Returns:
        By instance, which events of ``plain`` are members; None if the two do not correspond.
    """
    if not members:
        return {}
    twin = _twins(marked, plain)
    if twin is None:
        return None
    moved = {}
    for instance, member in members.items():
        seeds = np.zeros(len(plain), dtype=bool)
        seeds[twin[member & (twin >= 0)]] = True
        loose = _loose(marked, member, twin, plain)
        if loose is None:
            return None
        seeds[loose] = True
        moved[instance] = below(seeds, plain.events.parent, plain.events.launch)
    return moved


def _twins(marked: Trace, plain: Trace) -> IntArray | None:
    """For each core event of ``marked`` its index in ``plain``, -1 for others; None if the two differ."""
    core, other_core = _core(marked), _core(plain)
    ids: dict[str, int] = {}
    lanes = _lanes(marked, core, ids)
    # By what they run and not by their number: threads are numbered by when each is first seen, for which
    # those of autograd and of the loader race. Equal ones are taken in order.
    unused: dict[bytes, list[IntArray]] = {}
    for key, rows in _lanes(plain, other_core, ids):
        unused.setdefault(key, []).append(rows)
    twin = np.full(len(marked), -1, dtype=np.int64)
    for key, rows in lanes:
        if not unused.get(key):
            return None
        twin[rows] = unused[key].pop(0)
    if any(unused.values()):
        return None

    def image(reference: NDArray[np.integer[Any]]) -> IntArray:
        return np.where(reference >= 0, twin[reference], -1)[core]

    there = twin[core]
    same_tree = np.array_equal(image(_above(marked, core)), _above(plain, other_core)[there])
    same_gradients = np.array_equal(image(marked.events.forward), plain.events.forward[there])
    return twin if same_tree and same_gradients else None


def _core(trace: Trace) -> BoolArray:
    """Events that equal steps have in equal order: operators, annotations, and calls outside of operators.

    Those of threads that run operators: others (one pins batches) only make calls, as often as they happen
    to look. A runtime call of an operator belongs where that does, so that a library may launch another
    kernel for it. The rest must be equal, less what is :data:`VOLATILE`.
    """
    events, categories = trace.events, trace.categories
    follows = np.array([op.category == "overhead" or op.name in VOLATILE for op in trace.ops], dtype=bool)
    operator = categories == "cpu_op"
    call = np.isin(categories, RUNTIME_CATEGORIES) & (events.parent >= 0) & operator[events.parent]
    lanes = np.unique(events.lane[operator & ~_communication(trace)])
    return np.isin(events.lane, lanes) & ~trace.on_gpu & ~follows[events.op] & ~call


def _communication(trace: Trace) -> BoolArray:
    """Work of gloo's threads, of which any may take the next, shape (events,)."""
    return np.array([op.name.startswith("gloo:") for op in trace.ops], dtype=bool)[trace.events.op]


def _lanes(trace: Trace, core: BoolArray, ids: dict[str, int]) -> list[tuple[bytes, IntArray]]:
    """Of each lane with core events, the sequence of their names as a key, and their indices."""
    number = np.array([ids.setdefault(op.name, len(ids)) for op in trace.ops], dtype=np.int64)
    rows = np.flatnonzero(core)
    lane = trace.events.lane[rows]
    groups = np.split(rows, np.flatnonzero(np.diff(lane)) + 1) if len(rows) else []
    return [(number[trace.events.op[group]].tobytes(), group) for group in groups]


def _above(trace: Trace, core: BoolArray) -> IntArray:
    """The nearest core event above each event, -1 for none."""
    above = trace.events.parent.astype(np.int64)
    while (skipped := (above >= 0) & ~core[above]).any():
        above[skipped] = trace.events.parent[above[skipped]]
    return above


def _loose(marked: Trace, member: BoolArray, twin: IntArray, plain: Trace) -> list[int] | None:
    """Other events of ``plain`` that are members though nothing above them is; None if nobody can say.

    They lie below the same event and behind the same one of their thread as those of ``marked``. If only some
    calls of one name there are members, the two profiles must have equally many.
    """
    events = marked.events
    above = np.where(events.launch >= 0, events.launch, events.parent)
    rows = np.flatnonzero(member & (twin < 0) & ~((above >= 0) & member[above]))
    if not len(rows):
        return []
    core = twin >= 0
    here = _by_place(marked, core)
    there = _by_place(plain, _core(plain))
    found: list[int] = []
    for place in dict.fromkeys(_place_of(marked, core, rows)):
        parent, ahead, name = place
        if ahead < 0:
            return None
        all_here = np.array(here[place])
        all_there = there.get((int(twin[parent]) if parent >= 0 else -1, int(twin[ahead]), name), [])
        if member[all_here].all():
            found += all_there
        elif len(all_here) == len(all_there):
            found += np.array(all_there)[member[all_here]].tolist()
        else:
            return None
    return found


Place = tuple[int, int, str]
"""Core event above (-1 for none), core event ahead on the same thread (-1 for none), and name."""


def _by_place(trace: Trace, core: BoolArray) -> dict[Place, list[int]]:
    rows = np.flatnonzero(~core & ~trace.on_gpu)
    places: dict[Place, list[int]] = {}
    for row, place in zip(rows.tolist(), _place_of(trace, core, rows), strict=True):
        places.setdefault(place, []).append(row)
    return places


def _place_of(trace: Trace, core: BoolArray, rows: IntArray) -> list[Place]:
    index = np.arange(len(trace))
    ahead = np.maximum.accumulate(np.where(core, index, -1))
    ahead[trace.events.lane[ahead] != trace.events.lane] = -1  # of another thread
    parent = _above(trace, core)
    return list(zip(parent[rows].tolist(), ahead[rows].tolist(), trace.names[rows].tolist(), strict=True))
