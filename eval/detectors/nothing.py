"""A reference: reports nothing."""

from __future__ import annotations

from torchtraceap.eval.detector import Detector, TraceView, builtin_card, register
from torchtraceap.eval.submission import Detection, SubmissionCard


class Nothing(Detector):
    """What a score is worth that comes from silence."""

    name = "nothing"

    def card(self) -> SubmissionCard:
        return builtin_card(self.name, "Reference: reports nothing.", threshold=0.0)

    def detect(self, view: TraceView) -> list[Detection]:
        return []


register(Nothing())
