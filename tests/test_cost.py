"""The rule that calls a pattern costly, benign or undecided."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from torchtraceap.labels.cost import ALPHA, LOOKS, MARGIN, TRIM, conclude, log_ratios, look, report_pairs


def pairs(*ratios: float, clean: float = 0.010) -> list[tuple[float, float]]:
    """Pairs of step times with these ratios of with over without."""
    return [(clean, clean * ratio) for ratio in ratios]


def test_log_ratios() -> None:
    assert log_ratios([(2.0, 2.0), (1.0, math.e)]) == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, -1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_times_that_are_none(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        log_ratios([(1.0, 1.0), bad])


@pytest.mark.parametrize("too_few", [[], pairs(1.1)])
def test_an_interval_needs_two_pairs(too_few: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two pairs"):
        look(too_few)


def test_an_estimate_needs_two_pairs_of_its_own() -> None:
    with pytest.raises(ValueError, match="two pairs"):  # those that decided do not count
        conclude(pairs(*[1.1] * 7), 6)


def test_what_nothing_stopped_tells_its_cost_too() -> None:
    noisy = pairs(1.0, 1.2, 0.9, 1.1, 1.3, 0.8)
    cost = conclude(noisy, 6)
    assert (cost.state, report_pairs(look(noisy))) == ("undecided", 0)
    assert math.log(cost.ratio) == pytest.approx(float(stats.trim_mean(log_ratios(noisy), TRIM)))
    assert [report_pairs(look(pairs(*[1.5] * n))) for n in (4, 8, 12, 24)] == [4, 4, 6, 8]


def test_interval_by_hand() -> None:
    """Ten log ratios 1 ... 10 hundredths: 1, 2 and 9, 10 are trimmed, and pulled in to 3 and 8.

    Mean 5.5. Winsorised squares about it: 3 at each end of 2.5^2, and 1.5^2, 0.5^2 twice, 42.5 in all; over
    9 gives 4.7222, root 2.17307; over 0.6 x root 10 gives 1.14531. Five degrees of freedom.
    """
    logs = np.arange(1, 11) / 100
    one = look([(1.0, math.exp(value)) for value in np.random.default_rng(0).permutation(logs)])
    quantile = 3.5341  # t, 5 degrees of freedom, 1 - 0.05 / 3 / 2
    assert (one.low + one.high) / 2 == pytest.approx(0.055)
    assert (one.high - one.low) / 2 == pytest.approx(quantile * 0.0114531, rel=1e-4)
    assert one.pairs == 10


@pytest.mark.parametrize("count", [5, 10, 15, 20])  # elsewhere scipy takes a fifth for what it cuts
def test_interval_against_scipy(count: int) -> None:
    logs = np.random.default_rng(count).normal(0.02, 0.03, count)
    one = look([(1.0, math.exp(value)) for value in logs])
    peer = stats.mstats.trimmed_mean_ci(logs, limits=(TRIM, TRIM), alpha=ALPHA / len(LOOKS))
    assert (one.low, one.high) == pytest.approx(peer)


def test_states_at_a_look() -> None:
    assert look(pairs(1.10, 1.11, 1.10, 1.09, 1.10, 1.10)).state == "costly"
    assert look(pairs(1.00, 1.001, 0.999, 1.0, 1.002, 0.998)).state == "benign"
    assert look(pairs(0.5, 1.5, 0.7, 1.4, 0.8, 1.2)).state == "undecided"
    assert look(pairs(*[0.9] * 6)).state == "benign"  # faster is not slower


def test_the_margin_is_one_percent() -> None:
    assert look(pairs(*[1.0099] * 6)).state == "benign"
    assert look(pairs(*[1.0101] * 6)).state == "costly"


def test_one_wild_pair_in_six_changes_nothing() -> None:
    tame = [1.101, 1.10, 1.099, 1.10, 1.1005, 1.0995]
    assert look(pairs(*tame[:5], 3.0)).state == "costly"
    assert look(pairs(*tame[:5], 0.2)).state == "costly"


def test_p_values_are_corrected_for_the_looks() -> None:
    one = look(pairs(1.02, 1.05, 1.01, 1.03, 1.02, 1.04))
    logs = np.sort(np.log([1.02, 1.05, 1.01, 1.03, 1.02, 1.04]))
    middle = logs[1:5]
    error = np.clip(logs, middle[0], middle[-1]).std(ddof=1) / ((1 - 2 / 6) * math.sqrt(6))
    p = stats.t.sf((middle.mean() - MARGIN) / error, 3)
    assert one.p_costly == pytest.approx(3 * p)
    assert one.p_benign == 1.0  # three times what is close to one
    assert look(pairs(*[1.0] * 6)).p_costly == 1.0


def test_estimate_comes_from_the_pairs_after_the_decision() -> None:
    decided = pairs(*[2.0] * 6)
    report = pairs(1.2, 1.2, 1.2, 1.2, 1.2, 1.2, clean=0.020)
    cost = conclude(decided + report, 6)
    assert cost.state == "costly"
    assert cost.decided_at == 6
    assert cost.ratio == pytest.approx(1.2)
    assert cost.low == pytest.approx(1.2, rel=1e-4)
    assert cost.high == pytest.approx(1.2, rel=1e-4)
    assert cost.low < cost.ratio < cost.high
    assert cost.ms == pytest.approx(20 * 0.2)
    assert cost.pairs == decided + report


def test_interval_of_the_estimate_is_at_95_percent() -> None:
    logs = np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    cost = conclude(pairs(*[1.5] * 6) + [(1.0, math.exp(value)) for value in logs], 6)
    # 2 2 3 4 5 5 hundredths about 3.5: squares of 1.5, 1.5, 0.5, 0.5, 1.5 and 1.5, in all 9.5
    error = math.sqrt(9.5 / 5) / 100 / (4 / 6 * math.sqrt(6))
    assert math.log(cost.ratio) == pytest.approx(0.035)
    assert math.log(cost.high) == pytest.approx(0.035 + 3.18245 * error, rel=1e-5)
    assert math.log(cost.low) == pytest.approx(0.035 - 3.18245 * error, rel=1e-5)


def decide(rng: np.random.Generator, effect: float, noise: float, wild: float) -> str:
    """The verdict of the whole procedure on simulated pairs, of which a share ``wild`` is off by a third."""
    count = LOOKS[-1]
    logs = effect + noise * rng.standard_normal(count)
    logs += (rng.random(count) < wild) * rng.choice([-1 / 3, 1 / 3], count)
    simulated = [(1.0, math.exp(value)) for value in logs]
    for at in LOOKS:
        state = look(simulated[:at]).state
        if state != "undecided":
            return state
    return "undecided"


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("wild", [0.0, 0.1])
def test_no_effect_is_seldom_called_costly(noise: float, wild: float) -> None:
    rng = np.random.default_rng(1)
    trials = 500
    costly = sum(decide(rng, 0.0, noise, wild) == "costly" for _ in range(trials))
    assert costly <= 0.02 * trials


def test_errors_at_the_margin_are_within_what_all_looks_may_take_together() -> None:
    rng = np.random.default_rng(2)
    trials = 1000
    states = [decide(rng, MARGIN, 0.02, 0.0) for _ in range(trials)]
    bound = ALPHA / 2 * trials + 2 * math.sqrt(trials * ALPHA / 2)
    assert states.count("costly") <= bound
    assert states.count("benign") <= bound


def test_a_clear_effect_is_found_in_spite_of_wild_pairs() -> None:
    rng = np.random.default_rng(3)
    states = [decide(rng, math.log(1.1), 0.01, 0.1) for _ in range(200)]
    assert states.count("costly") >= 190
    assert "benign" not in states


def test_a_costly_verdict_that_may_be_chance_among_many_does_not_end_the_test() -> None:
    # Six of eight ratios of 1.02 to 1.09 are kept: costly by its interval, but not at 0.001.
    wide = look(pairs(1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.09))
    assert wide.state == "costly"
    assert 0.001 < wide.p_costly < 0.05
    assert not wide.settled
    narrow = look(pairs(1.05, 1.051, 1.052, 1.053, 1.054, 1.055, 1.056, 1.057))
    assert narrow.p_costly < 0.001
    assert narrow.settled
    assert look(pairs(*[1.0] * 8)).settled  # benign
    assert not look(pairs(0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 0.9, 1.0)).settled  # undecided
