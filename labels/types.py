"""What a label is: an instance of an anti-pattern in a trace, and the segments it consists of."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Scope = Literal["local", "step"]
"""``local``: there is a place in the timeline. ``step``: the whole step is affected."""

LaneClass = Literal["cpu", "gpu"]
"""All threads, or all streams."""

State = Literal["costly", "benign", "undecided"]
"""A positive, a negative, or ignored by the scorer; see :class:`Instance` for how it comes about."""

Source = Literal["injected", "lookalike", "native"]
"""Injected by us; a harmless twin that we injected; or the model's own."""

Quality = Literal["good", "bad", "undecided"]

LANE_CLASSES: tuple[LaneClass, ...] = get_args(LaneClass)
STATES: tuple[State, ...] = get_args(State)
SOURCES: tuple[Source, ...] = get_args(Source)
SCOPES: tuple[Scope, ...] = get_args(Scope)
QUALITIES: tuple[Quality, ...] = get_args(Quality)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One anti-pattern (or look-alike) switched on in one trace, with its measured cost.

    ``state`` of an injected pattern is the outcome of its cost measurement. A look-alike is harmless by
    construction, so it is benign unless it was measured costly; then nobody knows why, and it is undecided.

    ``cost_ms`` is milliseconds a step; ``cost_ratio`` is step time with over step time without, with the
    bounds of its 95 % interval. All four are NaN when nothing was measured (native instances).
    """

    pattern: str
    variant: str
    scope: Scope
    source: Source
    state: State
    every_step: bool
    sites: int
    cost_ms: float = float("nan")
    cost_ratio: float = float("nan")
    cost_low: float = float("nan")
    cost_high: float = float("nan")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A maximal run of one instance's events on one thread or stream and within one step.

    ``instance`` indexes the trace's instances. The events are ``first_event`` up to
    ``first_event + event_count`` (events are sorted by lane, then start, so a run is contiguous).
    Times are nanoseconds on the trace's clock. ``step`` counts profiled steps from 0, of GPU work by where it
    was launched; it is -1 outside of any and for what the GPU had left to do from before the first.
    """

    instance: int
    lane: int
    lane_class: LaneClass
    step: int
    start_ns: int
    end_ns: int
    first_event: int
    event_count: int

    @property
    def rows(self) -> slice:
        """Its events."""
        return slice(self.first_event, self.first_event + self.event_count)


def quality(instances: list[Instance]) -> Quality:
    """Label a trace: bad with a costly instance, good with neither a costly nor an undecided one.

    Native instances have no part in it: nothing is known of what they cost.
    """
    states = {instance.state for instance in instances if instance.source != "native"}
    if "costly" in states:
        return "bad"
    return "undecided" if "undecided" in states else "good"


def state_of_lookalike(measured: State) -> State:
    """The state of a look-alike with this verdict.

    It is harmless by construction, so that its measurement can only object. What it finds costly is still no
    instance of the pattern, and so nothing that a detector should be judged by.
    """
    return "undecided" if measured == "costly" else "benign"
