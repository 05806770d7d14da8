"""Measurements from which the made-up states and costs of a record follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.labels.cost import ALPHA, LOOKS, MARGIN, _trimmed, conclude
from torchtraceap.labels.types import Instance, State

DECIDED_AT = 8
SPREAD = np.linspace(-1e-3, 1e-3, DECIDED_AT)
REPORTED = np.linspace(-1, 1, 4)
COSTLY = ALPHA / len(LOOKS) / 2
"""The largest p-value of one look that is called costly."""


def measurements(record: TraceRecord, p: float | None = None) -> list[dict[str, Any]]:
    """What a session says of the instances of ``record``; ``p`` as for :func:`measurement`."""
    return [
        {"trace_id": record.trace_id, "instance": index, **measurement(one, p)}
        for index, one in enumerate(record.instances)
        if one.source != "native"
    ]


def measurement(instance: Instance, p: float | None = None) -> dict[str, Any]:
    """Pairs that give its state and its cost, and what else follows from them.

    Args:
        instance: Its interval must be symmetric in the logarithm.
        p: P-value of what is not benign, if its state allows it.
    """
    state: State = instance.state
    if instance.source == "lookalike" and state == "undecided":
        state = "costly"
    _, error, freedom = _trimmed(SPREAD)
    default = {"costly": 0.001, "undecided": 0.5, "benign": 3.0}[state]
    allowed = p is not None and state != "benign" and (p < len(LOOKS) * COSTLY) == (state == "costly")
    of_look = (p if allowed and p is not None else default) / len(LOOKS)
    t = -20.0 if state == "benign" else float(stats.t.isf(of_look, freedom))
    pairs = [(0.01, 0.01 * math.exp(MARGIN + t * error + one)) for one in SPREAD.tolist()]
    ratio, high, ms = instance.cost_ratio, instance.cost_high, instance.cost_ms
    if all(map(math.isfinite, (ratio, high, ms))) and high > ratio > 0:
        _, error, freedom = _trimmed(REPORTED)
        scale = math.log(high / ratio) / float(stats.t.ppf(0.975, freedom)) / error
        without = 0.01 if ratio == 1 else ms / 1e3 / (ratio - 1)
        pairs += [(without, without * ratio * math.exp(scale * one)) for one in REPORTED.tolist()]
    cost = conclude(pairs, DECIDED_AT)
    assert cost.state == state
    return {name: getattr(cost, name) for name in ("state", "p_costly", "p_benign", "decided_at", "pairs")}
