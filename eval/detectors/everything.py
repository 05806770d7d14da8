"""A reference: reports every pattern everywhere."""

from __future__ import annotations

from torchtraceap.eval.detector import Detector, TraceView, builtin_card, register
from torchtraceap.eval.submission import Detection, SubmissionCard
from torchtraceap.labels.pattern import PATTERNS


class Everything(Detector):
    """What a score is worth that comes from covering the whole trace."""

    name = "everything"

    def card(self) -> SubmissionCard:
        return builtin_card(
            self.name, "Reference: every pattern on the whole trace, a row a lane class.", threshold=0.0
        )

    def detect(self, view: TraceView) -> list[Detection]:
        lanes = {lane.kind for lane in view.trace.lanes}
        return [
            Detection(view.trace_id, pattern.id, lane, 0, view.trace.duration_ns, 1.0)
            for pattern in PATTERNS
            for lane in sorted(pattern.lanes & lanes)
        ]


register(Everything())
