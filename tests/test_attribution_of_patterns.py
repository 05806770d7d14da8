"""What each injector leaves in a trace is labelled: the rest is what the clean loop leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_patterns import make_loop

from torchtraceap.collect.cutting import keep_steps
from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.profiling import LEAD_IN, PROFILED_STEPS, profile_steps
from torchtraceap.collect.twins import Difference, difference, steps_without
from torchtraceap.dataset.attribution import violations
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.labels.pattern import PATTERNS, Pattern
from torchtraceap.labels.types import Instance

EAGER = [pattern for pattern in PATTERNS if pattern.runtime == "eager"]

LEFT_OVER = {
    # By its definition: only the repeated forward pass belongs to it, not the calls around it. Not every
    # version of PyTorch has some around each kind of checkpoint.
    "over_checkpointing": {"blocks", "reentrant"},
}
"""By pattern, the variants that may make code outside of all labels do something else."""
NOTHING_ON_CPU = ("cache_flush", "explicit_synchronize")


@pytest.fixture
def loop(one_thread) -> Iterator[TrainingLoop]:
    loop = make_loop("train")
    yield loop
    loop.close()


@pytest.mark.parametrize("pattern", EAGER, ids=lambda pattern: pattern.id)
def test_all_that_an_injection_adds_is_labelled(pattern: Pattern, loop: TrainingLoop) -> None:
    variants = [*pattern.variants, *pattern.lookalikes]
    placements = []
    for index, variant in enumerate(variants):
        sites = variant.sites(loop)
        placements.append(Placement(index, sites, frozenset(range(len(sites)))))
    for placement in placements:
        loop.install(placement)
    loop.step()
    clean = profile_steps(loop, 0)
    left_over: dict[str, Difference] = {}
    for variant, placement in zip(variants, placements, strict=True):
        placement.armed = True
        loop.step()
        raw = profile_steps(loop, variant.settle_steps)
        placement.armed = False
        mechanism = pattern.mechanism_of(variant)
        armed = {placement.index: Armed(0, mechanism, pattern.selects)}
        trace, segments = label(raw, "s", armed, strip(clean))
        places = [(placement, mechanism)]
        rest = steps_without(raw, "s", places, segments)[LEAD_IN:]
        found = difference(rest, steps_without(clean, "s", places, [])[LEAD_IN:])
        if found.extra:
            left_over[variant.name] = found

        # A look-alike that leaves none would never be an instance. What needs a GPU does nothing here.
        assert segments or pattern.id in NOTHING_ON_CPU

        instance = Instance(
            pattern=pattern.id, variant=variant.name, scope=pattern.scope, source="injected", state="benign",
            every_step=True, sites=1,
        )  # fmt: skip
        trace, segments = keep_steps(trace, segments, LEAD_IN, PROFILED_STEPS)
        assert list(violations(TraceRecord(trace, {}, [instance], segments))) == []
    assert left_over.keys() <= LEFT_OVER.get(pattern.id, set()), left_over
