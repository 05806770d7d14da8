"""Paths of operators: what tells an event that only the injected trace has from one that the clean twin has.

The path of an event is its name after the names of all that encloses it, of GPU work after those of the call
that launched it. Shapes and lanes have no part in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace


class Paths:
    """The paths that occur in one trace without markers."""

    def __init__(self, trace: Trace) -> None:
        self._known: dict[tuple[int, str], int] = {}
        _path_ids(trace, self._known, grow=True)

    def lacks(self, trace: Trace) -> NDArray[np.bool_]:
        """Events of another trace whose path occurs here nowhere, bool, shape (events,)."""
        return _path_ids(trace, self._known, grow=False) < 0


def _path_ids(trace: Trace, known: dict[tuple[int, str], int], *, grow: bool) -> NDArray[np.int64]:
    """The number of each event's path in ``known``, which maps (number of the path above, name) to it.

    A path that is not there is added if ``grow``, else -1.
    """
    events = trace.events
    names = ["ProfilerStep" if op.name.startswith("ProfilerStep#") else op.name for op in trace.ops]
    above = np.where(events.launch >= 0, events.launch, events.parent)
    ids = np.full(len(events.op), -1, dtype=np.int64)
    pending = above < 0
    while pending.any():  # one round per level of the tree
        rows = np.flatnonzero(pending)
        base = np.where(above[rows] < 0, -2, ids[above[rows]])
        keys, which = np.unique(np.stack([base, events.op[rows]], axis=1), axis=0, return_inverse=True)
        found = np.full(len(keys), -1, dtype=np.int64)
        for i, (parent, op) in enumerate(keys.tolist()):
            if parent == -1:
                continue  # what is above is not known, so this is not either
            key = parent, names[op]
            found[i] = known.setdefault(key, len(known)) if grow else known.get(key, -1)
        ids[rows] = found[which.reshape(-1)]
        done = pending
        pending = np.zeros_like(done)
        children = np.flatnonzero(above >= 0)
        pending[children] = done[above[children]]
    return ids
