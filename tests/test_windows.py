"""Tiling, window labels and window features, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from torchtraceap.labels.multiplicity import discoveries
from torchtraceap.labels.types import Instance, Segment, Source, State
from torchtraceap.labels.windows import MAX_WINDOWS, covered_ns, label_windows, merge, spans, tile

NO_STEPS = np.empty((0, 2), dtype=np.int64)
TENS = np.arange(0, 101, 10)  # ten windows of 10 ns


def instance(pattern: str = "host_sync", state: State = "costly", source: Source = "injected") -> Instance:
    return Instance(
        pattern=pattern, variant="v", scope="local", source=source, state=state, every_step=True, sites=1
    )


def segment(first_event: int, event_count: int, instance: int = 0, lane_class="cpu") -> Segment:
    return Segment(
        instance=instance, lane=0, lane_class=lane_class, step=0, start_ns=0, end_ns=0,
        first_event=first_event, event_count=event_count,
    )  # fmt: skip


def label(events: list[tuple[int, int]], instances, segments, edges=TENS):
    start, end = np.array(events).T
    return label_windows(edges, start, end, instances, segments)


def windows(column) -> list[int]:
    return np.flatnonzero(column).tolist()


def test_64_windows_a_median_step_and_a_shorter_last_one():
    steps = np.array([[100, 6500], [6500, 12900], [12900, 99999]])  # median 6400: windows of 100
    edges = tile(100_050, steps)
    assert len(edges) == 1002
    assert edges[:3].tolist() == [0, 100, 200]
    assert edges[-2:].tolist() == [100_000, 100_050]


def test_an_odd_step_makes_the_width_a_whole_number_of_ns():
    assert np.diff(tile(6500, np.array([[0, 6401]])))[0] == 101  # 100.02 rounded up
    assert len(tile(6464, np.array([[0, 6464]]))) == 65


def test_256_windows_without_steps():
    assert tile(2560, NO_STEPS).tolist() == list(range(0, 2561, 10))
    assert tile(0, NO_STEPS).tolist() == [0, 1]
    assert tile(3, NO_STEPS).tolist() == [0, 1, 2, 3]


def test_an_absurd_step_does_not_make_a_billion_windows():
    edges = tile(3_600 * 10**9, np.array([[0, 1]]))
    assert len(edges) - 1 <= MAX_WINDOWS
    assert edges[-1] == 3_600 * 10**9


def test_an_event_belongs_to_the_windows_that_it_overlaps():
    start = np.array([0, 5, 9, 10, 10, 95, 100])
    end = np.array([10, 15, 30, 10, 20, 100, 100])
    first, last = spans(start, end, TENS)
    assert first.tolist() == [0, 0, 0, 1, 1, 9, 9]
    assert last.tolist() == [0, 1, 2, 1, 1, 9, 9]


def test_union_and_cover():
    start, end = merge(np.array([1, 2, 8, 12, 30, 95]), np.array([5, 3, 12, 13, 55, 120]))
    assert start.tolist() == [1, 8, 30, 95]
    assert end.tolist() == [5, 13, 55, 120]
    assert covered_ns(start, end, TENS).tolist() == [6, 3, 0, 10, 10, 5, 0, 0, 0, 5]
    assert covered_ns(start[:0], end[:0], TENS).tolist() == [0] * 10


def test_exactly_10_percent_is_positive():
    spread = [(0, 1), (33, 34), (35, 36), (62, 63), (95, 99)]  # no window holds half of the five
    edges = np.array([0, 10, 30, 61, 111])
    labels = label(spread, [instance()], [segment(0, 5)], edges)
    assert windows(labels.positive[:, 0]) == [0, 3]  # 1 of 10 and 1 + 4 of 50; not 2 of 31


def test_the_union_counts_not_the_sum():
    twice = [(0, 6), (0, 6), (150, 151), (250, 251), (350, 351)]
    hundreds = np.arange(0, 401, 100)
    # Each of the first two covers 6 % and they overlap; two of five events are less than half.
    assert windows(label(twice, [instance()], [segment(0, 5)], hundreds).positive[:, 0]) == []
    apart = [(0, 6), (6, 10), *twice[2:]]
    assert windows(label(apart, [instance()], [segment(0, 5)], hundreds).positive[:, 0]) == [0]


def test_half_of_a_segments_events_is_positive_however_short():
    hundreds = np.arange(0, 1001, 100)
    two_syncs = [(10, 11), (510, 511), (999, 999)]
    each = [segment(0, 1), segment(1, 1), segment(2, 1)]
    assert windows(label(two_syncs, [instance()], each, hundreds).positive[:, 0]) == [0, 5, 9]
    halves = [(10, 11), (110, 111)]
    assert windows(label(halves, [instance()], [segment(0, 2)], hundreds).positive[:, 0]) == [0, 1]
    thirds = [(10, 11), (110, 111), (210, 211)]
    assert windows(label(thirds, [instance()], [segment(0, 3)], hundreds).positive[:, 0]) == []


def test_states_and_sources():
    events = [(0, 10), (20, 30), (40, 50), (60, 70), (80, 90)]
    instances = [
        instance(state="costly"),
        instance(state="benign"),
        instance(state="undecided"),
        instance(state="costly", source="native"),
        instance(state="costly", source="lookalike"),
    ]
    labels = label(events, instances, [segment(i, 1, instance=i) for i in range(5)])
    assert labels.classes == [("cpu", "host_sync")]
    assert windows(labels.any_positive) == [0, 8]
    assert windows(labels.any_ignored) == [4, 6]


def test_positive_wins_over_ignored_within_a_class_and_lanes_are_apart():
    events = [(0, 10), (5, 25), (12, 13)]
    instances = [instance(), instance(state="undecided"), instance("redundant_copy", "undecided")]
    segments = [segment(0, 1), segment(1, 1, 1), segment(2, 1, 2, "gpu"), segment(0, 1, 0, "gpu")]
    labels = label(events, instances, segments)
    assert labels.classes == [("cpu", "host_sync"), ("gpu", "host_sync"), ("gpu", "redundant_copy")]
    assert [windows(column) for column in labels.positive.T] == [[0], [0], []]
    assert [windows(column) for column in labels.ignored.T] == [[1, 2], [], [1]]
    assert windows(labels.any_ignored) == [1, 2]


def test_a_touch_is_enough_to_be_ignored():
    edges = np.array([0, 1000, 2000])
    labels = label([(0, 1001)], [instance(state="undecided")], [segment(0, 1)], edges)
    assert windows(labels.any_ignored) == [0, 1]


def test_a_trace_without_segments_has_negative_windows_only():
    labels = label([(0, 10)], [], [])
    assert labels.positive.shape == (10, 0)
    assert not labels.any_positive.any()
    assert not labels.any_ignored.any()


def test_benjamini_hochberg_by_hand():
    # m = 5, rate 0.1: the thresholds are 0.02, 0.04, 0.06, 0.08, 0.1. The largest p below its own is the
    # third (0.055 <= 0.06), which carries the second (0.045 > 0.04) with it; 0.09 and 0.5 stay out.
    p = [0.5, 0.045, 0.01, 0.09, 0.055]
    assert discoveries(p, rate=0.1).tolist() == [False, True, True, False, True]
    assert discoveries([0.03], rate=0.02).tolist() == [False]
    assert discoveries([0.02], rate=0.02).tolist() == [True]
    assert discoveries([]).tolist() == []


@pytest.mark.parametrize("p", [float("nan"), -0.1, 1.1])
def test_what_is_no_p_value_is_refused(p):
    with pytest.raises(ValueError, match="p-values"):
        discoveries([0.01, p])
