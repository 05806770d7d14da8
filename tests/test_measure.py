"""Blocks of steps in pairs: how many, in which order, and what is left as it was."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import pytest
import torch
from scipy import stats

from torchtraceap.collect import measure
from torchtraceap.collect.distributed import World
from torchtraceap.collect.loop import Placement
from torchtraceap.labels.cost import LOOKS, REPORT_PAIRS


class Clock:
    """A loop whose steps take the time that they are told to, on a clock that nothing else moves."""

    world = World()

    device = torch.device("cpu")

    def __init__(self, placement: Placement, clean: float, ratio: float = 1.0, toggle: float = 0.0) -> None:
        self.placement = placement
        self.clean, self.ratio, self.toggle = clean, ratio, toggle
        self.now = 0.0
        self.arms: list[bool] = []

    def step(self) -> None:
        armed = self.placement.armed
        changed = bool(self.arms) and self.arms[-1] != armed
        self.now += self.clean * (self.ratio if armed else 1.0) + (self.toggle if changed else 0.0)
        self.arms.append(armed)


def clocked(monkeypatch: pytest.MonkeyPatch, *args: float, **kwargs: float) -> Any:
    loop = Clock(Placement(0, [], frozenset()), *args, **kwargs)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: loop.now)
    return loop


def measured(loop: Any, seed: int = 0, settle: int = 1, steps: int = 2) -> Any:
    rng = random.Random(seed)
    return measure.measure_cost(loop, loop.placement, steps=steps, settle=settle, rng=rng)


def test_a_clear_case_ends_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010, 1.5)
    cost = measured(loop)
    assert cost.state == "costly"
    assert cost.ratio == pytest.approx(1.5)
    assert cost.ms == pytest.approx(5.0)
    assert cost.decided_at == LOOKS[0]
    assert len(cost.pairs) == LOOKS[0] + REPORT_PAIRS[0]
    assert cost.pairs[0] == pytest.approx((0.010, 0.015))  # without, then with, whichever ran first
    assert measured(clocked(monkeypatch, 0.010, 1.0)).state == "benign"


def test_noise_goes_on_to_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010)
    noise = random.Random(1)
    monkeypatch.setattr(measure, "step_seconds", lambda *_, **__: 0.010 * noise.uniform(0.8, 1.25))
    cost = measured(loop)
    assert cost.state == "undecided"
    assert cost.decided_at == LOOKS[-1]
    assert len(cost.pairs) == LOOKS[-1]  # nothing stopped it, so they tell the cost too
    logs = [math.log(b / a) for a, b in cost.pairs]
    assert math.log(cost.ratio) == pytest.approx(float(stats.trim_mean(logs, 0.2)))


def test_long_steps_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 1.0)
    noise = random.Random(1)
    step = loop.step

    def uneven() -> None:
        loop.clean = noise.uniform(0.8, 1.25)
        step()

    loop.step = uneven
    cost = measured(loop, steps=1)
    assert cost.state == "undecided"
    assert cost.decided_at == LOOKS[0]


class Slower(World):
    """Ranks of which another has spent more time than this one."""

    def largest(self, value: float) -> float:
        return value + max(measure.TIME_BUDGET.values())


@pytest.mark.parametrize(("world", "looks"), [(World(), LOOKS[-1]), (Slower(), LOOKS[0])])
def test_ranks_agree_on_whether_time_is_up(monkeypatch: pytest.MonkeyPatch, world: World, looks: int) -> None:
    loop = clocked(monkeypatch, 0.010)
    loop.world = world
    noise = random.Random(1)

    def seconds(*_: Any, **__: Any) -> float:
        loop.now += 0.01
        return 0.010 * noise.uniform(0.8, 1.25)

    monkeypatch.setattr(measure, "step_seconds", seconds)
    assert measured(loop).decided_at == looks


def test_either_arm_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010, 1.5)
    measured(loop, settle=0, steps=1)
    first = loop.arms[::2]
    assert all(a != b for a, b in zip(first, loop.arms[1::2], strict=True))  # each pair has both
    # The second of two pairs runs the other way round, and which way the first runs is drawn.
    assert all(a != b for a, b in zip(first[::2], first[1::2], strict=True))
    assert not loop.placement.armed
    assert len({tuple(_arms(monkeypatch, seed)) for seed in range(6)}) > 1


def _arms(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[bool]:
    loop = clocked(monkeypatch, 0.010, 1.5)
    measured(loop, settle=0, steps=1, seed=seed)
    return loop.arms[:4]


def test_steps_after_a_toggle_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010, 1.0, toggle=0.1)
    assert measured(loop).state == "benign"
    assert measured(clocked(monkeypatch, 0.010, 1.0, toggle=0.1)).ratio == pytest.approx(1.0)
    toggles = sum(a != b for a, b in zip(loop.arms, loop.arms[1:], strict=False))
    blocks = 2 * (LOOKS[0] + REPORT_PAIRS[0])
    assert len(loop.arms) == 2 * blocks + toggles + 1  # a block that follows one of its own arm is settled


def test_a_failing_step_leaves_placement_and_collector_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = clocked(monkeypatch, 0.010)

    def fail() -> None:
        assert not gc.isenabled()
        if loop.placement.armed:
            raise ZeroDivisionError

    loop.step = fail
    with pytest.raises(ZeroDivisionError):
        measured(loop)
    assert not loop.placement.armed
    assert gc.isenabled()


def test_a_host_that_runs_ahead_is_timed_over_two_steps_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.1)
    loop.device = torch.device("cuda")
    behind = 0.0

    def step() -> None:
        nonlocal behind
        loop.now += 0.01  # to launch what takes the device 0.1
        behind += 0.09

    def synchronize(device: torch.device) -> None:
        nonlocal behind
        loop.now, behind = loop.now + behind, 0.0

    loop.step = step
    monkeypatch.setattr(measure, "synchronize", synchronize)
    assert measure.block_steps(loop) == 2
    loop.step = lambda: setattr(loop, "now", loop.now + 0.1)
    assert measure.block_steps(loop) == 1


@pytest.mark.parametrize(("seconds", "steps"), [(0.0001, 10), (0.010, 5), (0.020, 3), (5.0, 1), (0.0, 10)])
def test_steps_a_block(monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int) -> None:
    assert measure.block_steps(clocked(monkeypatch, seconds)) == steps


def test_the_clean_step_is_the_median_over_all_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [measured(clocked(monkeypatch, seconds)) for seconds in (0.010, 0.020, 0.011)]
    assert measure.median_clean_ms(costs) == pytest.approx(11.0)
    assert measure.median_clean_ms([]) != measure.median_clean_ms([])  # NaN


def test_a_null_trial_times_the_same_loop_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010, 1.5)
    seen = measure.null_trial(loop, steps=2, rng=random.Random(0))
    assert seen.state == "benign"
    assert seen.pairs == LOOKS[0]
    assert set(loop.arms) == {False}


def test_what_is_armed_beside_stays_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = clocked(monkeypatch, 0.010)
    other = Placement(1, [], frozenset(), armed=True)
    seen: list[bool] = []
    step = loop.step

    def watched() -> None:
        seen.append(other.armed)
        step()

    loop.step = watched
    measured(loop)
    assert all(seen)
    assert other.armed
