"""A submission laid against the truth: everything that scores are computed from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchtraceap.eval.cells import Cells
from torchtraceap.eval.intervals import Ints
from torchtraceap.eval.located import Located
from torchtraceap.eval.rows import Rows, WindowRows
from torchtraceap.eval.truth import Bools, Truth


@dataclass(frozen=True)
class Evidence:
    """A submission and the truth of a slice.

    Attributes:
        truth: The slice.
        rows: Detections of all scopes in it.
        window_rows: Window scores in it.
        threshold: Of the card: rows with at least this score are reported.
        classes: Patterns that macro scores average over, shape (patterns,).
    """

    truth: Truth
    rows: Rows
    window_rows: WindowRows
    threshold: float
    classes: Bools

    @cached_property
    def local(self) -> Located:
        """Rows of patterns of local scope, laid on their segments."""
        return Located(self.truth, self.rows.where(self.truth.local[self.rows.pattern]))

    @cached_property
    def cells(self) -> Cells:
        """Scores of windows."""
        return Cells.of(self.truth, self.rows, self.window_rows)

    @cached_property
    def reported(self) -> Rows:
        return self.rows.where(self.rows.score >= self.threshold)

    @property
    def local_classes(self) -> Ints:
        return np.flatnonzero(self.classes & self.truth.local)

    @property
    def step_classes(self) -> Ints:
        return np.flatnonzero(self.classes & ~self.truth.local)

    def without_ignoring(self) -> Evidence:
        return replace(self, truth=self.truth.without_ignoring())
