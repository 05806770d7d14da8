"""A reference: random places with random scores, always the same for a trace."""

from __future__ import annotations

import random

from torchtraceap.eval.detector import Detector, TraceView, builtin_card, register
from torchtraceap.eval.submission import Detection, SubmissionCard
from torchtraceap.labels.pattern import PATTERNS

PLACES = 20
"""Rows of a trace, lane class and pattern."""


class Random(Detector):
    """The score of chance.

    A place is a random event and the events up to another one nearby, so that lengths follow the trace's
    own, instead of a uniform stretch of time that hits nothing but gaps or everything.
    """

    name = "random"

    def card(self) -> SubmissionCard:
        return builtin_card(self.name, "Reference: random events with random scores.", threshold=0.5)

    def detect(self, view: TraceView) -> list[Detection]:
        rng = random.Random(view.trace_id)
        trace, found = view.trace, []
        for pattern in PATTERNS:
            for lane in sorted(pattern.lanes):
                rows = (trace.on_gpu if lane == "gpu" else ~trace.on_gpu).nonzero()[0]
                for _ in range(PLACES if len(rows) else 0):
                    first = rng.randrange(len(rows))
                    last = min(len(rows) - 1, first + int(rng.expovariate(1 / 10)))
                    start = int(trace.events.start_ns[rows[first]])
                    end = int(trace.events.end_ns[rows[first : last + 1]].max())
                    found.append(Detection(view.trace_id, pattern.id, lane, start, end, rng.random()))
        return found


register(Random())
