"""Intervals, matchings, rankings and resamples on cases worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from torchtraceap.eval.bootstrap import f1, interval, mean_defined, pool_singletons, ratio, resample, whole
from torchtraceap.eval.intervals import Line, covered_share, pairs_above, ranges, tiou, union_length
from torchtraceap.eval.matching import Pairs, match_greedily, match_most
from torchtraceap.eval.ranking import Ranking


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# Intervals


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 10), (5, 15), 5 / 15),
        ((0, 10), (0, 10), 1.0),
        ((0, 10), (10, 20), 0.0),  # touching: nothing shared
        ((0, 10), (2, 4), 2 / 10),
        ((5, 5), (5, 5), 1.0),  # the same instant
        ((5, 5), (6, 6), 0.0),  # two instants
        ((5, 5), (0, 10), 0.0),  # an instant inside of an interval shares no time with it
    ],
)
def test_tiou(a: tuple[int, int], b: tuple[int, int], expected: float) -> None:
    one, other = (ints(a[0]), ints(a[1])), (ints(b[0]), ints(b[1]))
    assert tiou(*one, *other)[0] == pytest.approx(expected)
    assert tiou(*other, *one)[0] == pytest.approx(expected)


_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12)


@given(_spans, _spans, st.sampled_from([0.3, 0.5, 0.7]))
@settings(deadline=None)
def test_pairs_above_are_all_pairs_of_a_double_loop(rows, others, least) -> None:
    def columns(spans):
        return ints(*(s for s, _ in spans)), ints(*(s + d for s, d in spans))

    found = pairs_above(*columns(rows), *columns(others), least)
    expected = {
        (i, j)
        for (i, (s, d)), (j, (t, e)) in itertools.product(enumerate(rows), enumerate(others))
        if tiou(ints(s), ints(s + d), ints(t), ints(t + e))[0] >= least
    }
    assert set(zip(found[0].tolist(), found[1].tolist(), strict=True)) == expected
    assert len(found[0]) == len(expected)


def test_ranges_lists_every_index_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtraceap.eval.intervals._PAIRS_AT_ONCE", 3)
    parts = list(ranges(ints(0, 5, 9, 2), ints(2, 5, 14, 3)))
    assert [(a, b) for i, j in parts for a, b in zip(i.tolist(), j.tolist(), strict=True)] == [
        (0, 0), (0, 1), (2, 9), (2, 10), (2, 11), (2, 12), (2, 13), (3, 2),
    ]  # fmt: skip
    assert len(parts) > 1


@given(_spans)
@settings(deadline=None)
def test_union_length_counts_covered_nanoseconds(spans) -> None:
    covered = {t for s, d in spans for t in range(s, s + d)}
    start, end = ints(*(s for s, _ in spans)), ints(*(s + d for s, d in spans))
    assert union_length(np.zeros(len(spans), dtype=np.int64), start, end, 1).tolist() == [len(covered)]


def test_groups_on_a_line_never_meet() -> None:
    line = Line.of(ints(10, 10))
    group = ints(0, 1)
    start, end = line.place(group, ints(0, 0)), line.place(group, ints(10, 10))
    assert union_length(group, start, end, 2).tolist() == [10, 10]
    assert len(pairs_above(start[:1], end[:1], start[1:], end[1:], 0.1)[0]) == 0


def test_covered_share() -> None:
    # The union of [0, 4], [2, 6] and [10, 12] is [0, 6] and [10, 12].
    start, end = ints(0, 4, 6, 3, 11, 8), ints(6, 12, 10, 3, 11, 8)
    # [0, 6] all; [4, 12] 2 + 2 of 8; [6, 10] nothing; the instants 3 and 11 inside; the instant 8 outside.
    share = covered_share(start, end, ints(0, 2, 10), ints(4, 6, 12))
    assert share.tolist() == [1.0, 0.5, 0.0, 1.0, 1.0, 0.0]
    assert covered_share(start, end, ints(), ints()).tolist() == [0.0] * 6


# Matchings


def test_greedy_and_maximum_matching_differ() -> None:
    # Row 0 overlaps segments 0 (0.6) and 1 (0.5), row 1 overlaps segment 0 only (0.55). By score row 0 goes
    # first and takes segment 0: one match. The maximum gives segment 1 to row 0 and 0 to row 1: two.
    pairs = Pairs(ints(0, 0, 1), ints(0, 1, 0), np.array([0.6, 0.5, 0.55]))
    assert match_greedily(pairs, ints(0, 1)).tolist() == [0, -1]
    assert match_most(pairs, 2).tolist() == [True, True]


def test_greedy_takes_the_next_best_when_the_best_is_taken() -> None:
    pairs = Pairs(ints(0, 1, 1), ints(0, 0, 1), np.array([0.9, 0.8, 0.4]))
    assert match_greedily(pairs, ints(0, 1)).tolist() == [0, 1]


def test_duplicates_match_once() -> None:
    pairs = Pairs(ints(0, 1), ints(0, 0), np.array([1.0, 1.0]))
    assert match_greedily(pairs, ints(0, 1)).tolist() == [0, -1]
    assert match_most(pairs, 2).sum() == 1


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
@settings(deadline=None)
def test_match_most_is_as_many_as_trying_all(edges) -> None:
    def most(rows: list[int], taken: frozenset[int]) -> int:
        if not rows:
            return 0
        options = [j for i, j in edges if i == rows[0] and j not in taken]
        return max([most(rows[1:], taken)] + [1 + most(rows[1:], taken | {j}) for j in options])

    listed = sorted(edges)
    pairs = Pairs(ints(*(i for i, _ in listed)), ints(*(j for _, j in listed)), np.ones(len(listed)))
    assert match_most(pairs, 5).sum() == most(list(range(5)), frozenset())


# Rankings

_items = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans(), st.integers(0, 3)),
    min_size=2,
    max_size=40,
)


def ranking(items, missing: int = 0) -> Ranking:
    score = np.array([s for s, _, _ in items], dtype=float)
    positive = np.array([p for _, p, _ in items], dtype=bool)
    unit = ints(*(u for _, _, u in items))
    positives = np.bincount(unit[positive], minlength=4).astype(float)
    positives[0] += missing
    return Ranking.of(score, positive, unit, positives)


@given(_items, st.lists(st.integers(0, 3), min_size=4, max_size=4))
@settings(deadline=None)
def test_weighted_rankings_are_those_of_repeated_items(items, counts) -> None:
    weights = np.array(counts, dtype=float)[:, None]
    repeated = [(s, p) for s, p, u in items for _ in range(counts[u])]
    labels, scores = [p for _, p in repeated], [s for s, _ in repeated]
    ranks = ranking(items)
    if any(labels):
        assert ranks.average_precision(weights)[0] == pytest.approx(average_precision_score(labels, scores))
    else:
        assert np.isnan(ranks.average_precision(weights)[0])
    if len(set(labels)) == 2:
        assert ranks.auroc(weights)[0] == pytest.approx(roc_auc_score(labels, scores))
    else:
        assert np.isnan(ranks.auroc(weights)[0])


@given(_items, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_rows_never_matters(items, random) -> None:
    shuffled = random.sample(items, len(items))
    for name in ("auroc", "average_precision", "interpolated_ap"):
        one, other = (getattr(ranking(rows), name)(whole(4)) for rows in (items, shuffled))
        assert np.array_equal(one, other, equal_nan=True)


def test_interpolated_precision_by_hand() -> None:
    # Highest first: hit, miss, hit, hit; a fourth positive is never reported.
    # Precision at the hits: 1, 2/3, 3/4; interpolated 1, 3/4, 3/4; each hit gains 1/4 of recall.
    items = [(0.9, True, 0), (0.8, False, 0), (0.7, True, 0), (0.6, True, 0)]
    ranks = ranking(items, missing=1)
    assert ranks.interpolated_ap(whole(4))[0] == pytest.approx((1 + 3 / 4 + 3 / 4) / 4)
    assert ranks.average_precision(whole(4))[0] == pytest.approx((1 + 2 / 3 + 3 / 4) / 4)


def test_tied_hit_and_miss_are_one_block() -> None:
    # One hit and one miss of equal score: precision 1/2, whichever row comes first.
    for items in ([(0.5, True, 0), (0.5, False, 1)], [(0.5, False, 1), (0.5, True, 0)]):
        assert ranking(items).interpolated_ap(whole(4))[0] == 0.5
        assert ranking(items).auroc(whole(4))[0] == 0.5


def test_nothing_reported_scores_zero() -> None:
    assert ranking([(0.5, False, 0)], missing=2).interpolated_ap(whole(4))[0] == 0.0


# Bootstrap


def test_resamples_keep_the_size_of_each_stratum() -> None:
    stratum = ints(0, 0, 0, 1, 1, 2)
    weights = resample(stratum, 200, seed=3)
    for value in range(3):
        assert set(weights[stratum == value].sum(axis=0)) == {float((stratum == value).sum())}
    assert (weights[5] == 1).all()  # the only unit of its stratum is always drawn
    assert weights[0].min() == 0  # others are not
    assert np.array_equal(weights, resample(stratum, 200, seed=3))
    assert not np.array_equal(weights, resample(stratum, 200, seed=4))


def test_strata_of_one_unit_are_pooled() -> None:
    assert pool_singletons(ints(4, 7, 4, 9)).tolist() == [4, -1, 4, -1]


def test_f1_and_ratio_of_resampled_sums() -> None:
    tp, fp, fn = np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 2.0]] * 2), np.array([[1.0, 1.0]] * 2)
    weights = np.array([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    # Class 0: whole 2/(2+2+2); unit 0 twice 4/(4+0+2); nothing drawn: undefined. Class 1 is never found: 0.
    values = f1(tp, fp, fn)(weights)
    assert values[:, 0].tolist() == pytest.approx([1 / 3, 0])
    assert values[:, 1].tolist() == pytest.approx([2 / 3, 0])
    assert np.isnan(values[:, 2]).all()
    assert mean_defined(values)[:2].tolist() == pytest.approx([1 / 6, 1 / 3])
    assert ratio(np.array([3.0, 1.0]), np.array([1.0, 1.0]))(weights)[:2].tolist() == [2.0, 3.0]


def test_interval_is_of_the_defined_samples() -> None:
    samples = np.append(np.arange(101.0), np.nan)
    assert interval(samples) == pytest.approx((2.5, 97.5))
    assert interval(np.array([np.nan])) is None
