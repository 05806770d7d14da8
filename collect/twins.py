"""How far a trace differs from its clean twin where nothing is labelled: a check of the labels by counting.

Without what belongs to the patterns, a step should hold what a clean step holds. What is there beyond that is
a consequence that no label has; what is missing was taken by one that should not have it. This is a count and
no law, because honest traces differ, too:

* What a clean loop does at the place of a pattern that stands for it is left out on both sides, by the
  markers of that place. With the mechanisms "selector" and "meanwhile" no marker says so: it is missing.
* Autograd adds gradients of one tensor up below whichever of its users comes last: below a labelled backward
  op the clean step's ``aten::add`` is missing.
* Work that depends on values differs from batch to batch: non-maximum suppression, ``nonzero``, and the
  kernels that libraries choose by what else is in memory.
* Calls of the runtime are not compared. The allocator makes some as it needs, and the thread that pins
  batches asks for events (``cudaEventQuery``) as often as it happens to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from torchtraceap.collect.labelling import published
from torchtraceap.collect.loop import Placement
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.markers import parse_marker
from torchtraceap.labels.pattern import Mechanism
from torchtraceap.labels.segments import belongs, covered
from torchtraceap.labels.types import Segment

COMPARED = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
NAMES = 8
"""The names that differ most are kept."""

Place = tuple[Placement, Mechanism]


class Difference(msgspec.Struct, frozen=True):
    """Events of a trace's steps that its clean twin lacks, and the other way round.

    ``names`` holds the names that differ most: how many more there are than in the twin.
    """

    extra: int
    missing: int
    names: dict[str, int]


def difference(rest: Iterable[Counter[str]], clean: Iterable[Counter[str]]) -> Difference:
    """Compare each step with the clean step that is most like it, and add up.

    Args:
        rest, clean: What :func:`steps_without` counted in each step.
    """
    total: Counter[str] = Counter()
    extra = missing = 0
    candidates = list(clean)
    for step in rest:
        found = min((_less(step, one) for one in candidates), key=lambda more: sum(map(abs, more.values())))
        extra += sum(count for count in found.values() if count > 0)
        missing -= sum(count for count in found.values() if count < 0)
        total.update(found)
    ordered = sorted(total.items(), key=lambda item: (-abs(item[1]), item[0]))
    return Difference(extra, missing, dict(ordered[:NAMES]))


def steps_without(
    trace: Trace, secret: str, places: Iterable[Place], segments: Sequence[Segment]
) -> list[Counter[str]]:
    """By step, how often each operator, kernel and copy occurs that neither is labelled nor lies at a place.

    Args:
        trace: As read from the profiler, with the session's markers.
        secret: The session's part of marker names.
        places: What acts in one of the traces that are compared. What lies at its acting sites is left out
            in both, whether they are on or off.
        segments: Those of the stripped trace, as ``labelling.label`` found them.
    """
    events = trace.events
    counted = np.array([op.category in COMPARED for op in trace.ops], dtype=bool)[events.op]
    kept = published(trace)
    counted &= kept
    counted[np.flatnonzero(kept)[covered(segments, int(kept.sum()))]] = False
    markers = [parse_marker(secret, op.name) for op in trace.ops]
    for placement, mechanism in places:
        if mechanism not in ("marker", "marker+backward"):
            continue
        here = np.array(
            [
                m is not None and m.placement == placement.index and m.site in placement.acting
                for m in markers
            ],
            dtype=bool,
        )
        counted &= ~belongs(
            here[events.op],
            events.parent,
            events.launch,
            events.forward,
            backward=mechanism == "marker+backward",
        )
    return [
        Counter(trace.names[counted & (trace.step == step)].tolist())
        for step in range(len(trace.step_bounds))
    ]


def _less(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    """How many more of each name there are in ``one``; names of equal count are left out."""
    names = one.keys() | other.keys()
    return Counter({name: more for name in names if (more := one.get(name, 0) - other.get(name, 0))})
