"""What is injected into a loop: which places are candidates, which of them act, and in which traces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtraceap.collect import profiling
from torchtraceap.collect.labelling import Armed
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.plan import Injection, Job, settles_slowly
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import Cost
from torchtraceap.labels.pattern import PATTERNS, Mechanism, Pattern, Site, Stage, StageSite, Variant, choose
from torchtraceap.labels.types import Instance, State, state_of_lookalike


@dataclass(eq=False)
class Injected:
    """An injection of the plan, placed into the loop."""

    pattern: Pattern
    variant: Variant
    placement: Placement
    is_lookalike: bool
    cost: Cost | None = None

    @property
    def name(self) -> str:
        return f"{self.pattern.id}/{self.variant.name}"

    @property
    def mechanism(self) -> Mechanism:
        """How its events are found."""
        return self.pattern.mechanism_of(self.variant)

    @property
    def measured(self) -> Cost:
        """Its cost, once that is measured."""
        assert self.cost is not None
        return self.cost

    def mean_ms(self, steps: int) -> float:
        """Its cost averaged over ``steps`` profiled steps, in not all of which it need act."""
        acting = self.placement.steps
        return self.measured.ms * (1.0 if acting is None else len(acting) / steps)

    def instance(self) -> Instance:
        """What the trace says of it; costs must have been measured."""
        cost = self.measured
        state: State = cost.state
        if self.is_lookalike:
            state = state_of_lookalike(state)
        return Instance(
            pattern=self.pattern.id,
            variant=self.variant.name,
            scope=self.pattern.scope,
            source="lookalike" if self.is_lookalike else "injected",
            state=state,
            every_step=self.placement.steps is None,
            sites=len(self.placement.acting),
            cost_ms=cost.ms,
            cost_ratio=cost.ratio,
            cost_low=cost.low,
            cost_high=cost.high,
        )


class Injections:
    """All that is put into a loop, nothing of which is installed yet.

    Attributes:
        all: Patterns and look-alikes, by the index of their placement.
        arms: The patterns of each trace; none in the clean one, which is the first.
        twins: The look-alikes.
        skipped: What found no place, and why.
    """

    def __init__(self, job: Job, loop: TrainingLoop, rng: random.Random) -> None:
        """Find the candidate places of every injection, before any is wrapped, and draw those that act.

        Raises:
            UserError: Nothing of the plan can be injected here.
        """
        self.all: list[Injected] = []
        self.arms: list[list[Injected]] = [[]]
        self.twins: list[Injected] = []
        self.skipped: list[str] = []
        self._loop = loop
        self._rng = rng
        self._place(job)

    def toggled(self) -> list[list[Injected]]:
        """What is switched on together: the patterns of each arm, and each look-alike alone."""
        return [*self.arms[1:], *([twin] for twin in self.twins)]

    def cost_of(self, instance: Instance) -> Cost:
        """What was measured of an instance that is not native."""
        return next(
            one.measured
            for one in self.all
            if (one.pattern.id, one.variant.name) == (instance.pattern, instance.variant)
        )

    def _place(self, job: Job) -> None:
        # Loader workers must be forked before the dry run, which others ask for, computes anything.
        early = {one: self._sites(one) for one in [*job.injections, *job.lookalikes] if _starts_workers(one)}
        spares = [one for one in job.spares if not (_starts_workers(one) or settles_slowly(one))]
        for indices in job.arms:
            arm: list[Injected] = []
            for one in [job.injections[index] for index in indices]:
                sites = early[one] if one in early else self._sites(one)
                goes_alone = arm and self._refusal(one, sites, arm) and not self._refusal(one, sites, [])
                placed = self._place_one(one, sites, beside=[] if goes_alone else arm)
                if goes_alone and placed is not None:
                    self.arms.append([placed])
                    continue
                while placed is None and spares:
                    placed = self._place_one(spares.pop(0), beside=arm)
                if placed is not None:
                    arm.append(placed)
            if arm:
                self.arms.append(arm)
        if job.injections and not self.all:
            raise UserError(f"{job.model}: nothing can be injected ({'; '.join(self.skipped)})")
        for one in job.lookalikes:
            placed = self._place_one(one, early.get(one), beside=list(self.all), is_lookalike=True)
            if placed is not None:
                self.twins.append(placed)

    def _sites(self, plan: Injection) -> list[Site]:
        """Candidate places; none where the pattern does not apply."""
        pattern = PATTERNS[plan.pattern]
        applies = pattern.applies(self._loop.device.type, self._loop.mode, self._loop.runtime) is None
        return pattern.variant(plan.variant).sites(self._loop) if applies else []

    def _place_one(
        self,
        plan: Injection,
        sites: list[Site] | None = None,
        *,
        beside: list[Injected],
        is_lookalike: bool = False,
    ) -> Injected | None:
        """Place an injection that may act in the same trace as those of ``beside``, or say why not."""
        sites = self._sites(plan) if sites is None else sites
        if reason := self._refusal(plan, sites, beside):
            self.skipped.append(f"{plan.pattern}/{plan.variant}: {reason}")
            return None
        pattern = PATTERNS[plan.pattern]
        variant = pattern.variant(plan.variant)
        # What takes longer to settle than the profiler warms up cannot be toggled from step to step.
        every_step = self._rng.random() < 0.5 or variant.settle_steps > profiling.WARMUP_STEPS
        placement = Placement(
            index=len(self.all),
            sites=sites,
            acting=frozenset(choose(variant, sites, self._rng)),
            steps=None if every_step else self._some_steps(),
        )
        self.all.append(Injected(pattern, variant, placement, is_lookalike))
        return self.all[-1]

    def _refusal(self, plan: Injection, sites: list[Site], beside: list[Injected]) -> str | None:
        """Why an injection may not act at ``sites`` in a trace with those of ``beside``; None if it may."""
        pattern = PATTERNS[plan.pattern]
        selects = pattern.mechanism_of(pattern.variant(plan.variant)) == "selector"
        if not sites:
            reason = pattern.applies(self._loop.device.type, self._loop.mode, self._loop.runtime)
            return reason or "no place for it in this model"
        if any(_replaced(sites) & _replaced(one.placement.sites) for one in self._rivals(sites, beside)):
            return "would stand in for the stage that another pattern stands in for"
        if selects and any(one.mechanism == "selector" for one in beside):
            return "a trace can hold one pattern that is found by comparison with the clean one"
        return None

    def _rivals(self, sites: list[Site], beside: list[Injected]) -> list[Injected]:
        """Those of ``beside``, and those that run something else in the traces of the other, even if off."""
        if _stands_in_when_off(sites):
            return self.all
        return [*beside, *(one for one in self.all if _stands_in_when_off(one.placement.sites))]

    def _some_steps(self) -> frozenset[int]:
        """Some but not all of the profiled steps."""
        steps = profiling.PROFILED_STEPS
        return frozenset(self._rng.sample(range(steps), self._rng.randint(1, steps - 1)))


@contextmanager
def armed(arm: list[Injected]) -> Iterator[None]:
    """Switch the injections of an arm on while the block runs."""
    for one in arm:
        one.placement.armed = True
    try:
        yield
    finally:
        for one in arm:
            one.placement.armed = False


def armed_in(arm: list[Injected]) -> dict[int, Armed]:
    """What acts in the trace of an arm, for the labelling."""
    return {one.placement.index: Armed(i, one.mechanism, one.pattern.selects) for i, one in enumerate(arm)}


def _starts_workers(plan: Injection) -> bool:
    return PATTERNS[plan.pattern].variant(plan.variant).starts_workers


def _replaced(sites: list[Site]) -> set[Stage]:
    """Stages that these sites may run something else for, so that what lies inside them never runs."""
    stage_sites = [site for site in sites if isinstance(site, StageSite)]
    brings: set[Stage] = {"data"} if any(site.data is not None for site in stage_sites) else set()
    return brings | {site.stage for site in stage_sites if site.replaces}


def _stands_in_when_off(sites: list[Site]) -> bool:
    """Whether a stage does not run as it is where these sites do not act."""
    return any(isinstance(site, StageSite) and site.replaces and site.otherwise is not None for site in sites)
