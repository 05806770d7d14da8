"""Scores of whole submissions, each value worked out by hand beside it.

The small world: traces of 1000 ns, ten windows of 100 ns, two steps of 500 ns. Patterns ``sync`` and ``copy``
have local scope, ``fp32`` has step scope. Every trace is a split unit unless said otherwise.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from traces import random_record

from torchtraceap import console
from torchtraceap.commands.scoring import print_leaderboard
from torchtraceap.dataset import schema
from torchtraceap.dataset.build import segment_table
from torchtraceap.dataset.features import shard_path
from torchtraceap.dataset.parquet import write_table, write_traces
from torchtraceap.dataset.windows import WINDOWS, window_table
from torchtraceap.errors import UserError
from torchtraceap.eval.leaderboard import ALL_COLUMNS, leaderboard, leaderboard_dict, ranked
from torchtraceap.eval.metrics import METRIC_BY_NAME, METRICS, RANKING_METRIC
from torchtraceap.eval.scorer import ClassRule, ScoreResult, compare, score
from torchtraceap.eval.submission import Detection, Submission, SubmissionCard, WindowScore
from torchtraceap.eval.truth import Truth
from torchtraceap.labels.types import Scope, State

CATALOGUE: dict[str, Scope] = {"sync": "local", "copy": "local", "fp32": "step"}
CARD = SubmissionCard(name="d", version="1", description="d", threshold=0.5, trained_on="nothing")


@dataclass
class S:
    """A true segment."""

    start: int
    end: int
    pattern: str = "sync"
    lane: str = "cpu"
    state: str = "costly"
    source: str = "injected"
    cost_ms: float = 1.0
    step: int | None = None  # that in which it starts


@dataclass
class T:
    """A trace; the quality follows from its segments."""

    segments: list[S] = field(default_factory=list)
    unit: str = ""
    task: str = "classification"
    hardware: str = "h200"
    exhaustive: tuple[str, ...] = tuple(CATALOGUE)
    variant: str = "item"
    every_step: bool = True


def truth_of(**traces: T) -> Truth:
    rows, segments, windows = [], [], []
    for trace_id, trace in traces.items():
        kinds = sorted({(s.pattern, s.source, s.state) for s in trace.segments})
        states = {state for _, _, state in kinds}
        quality = "bad" if "costly" in states else "undecided" if "undecided" in states else "good"
        rows.append(
            {
                "trace_id": trace_id,
                "task": trace.task,
                "backbone_family": "resnet",
                "split_unit": trace.unit or f"unit {trace_id}",
                "hardware_id": trace.hardware,
                "quality": quality,
                "exhaustive": list(trace.exhaustive),
                "instances": {
                    "pattern": [pattern for pattern, _, _ in kinds],
                    "source": [source for _, source, _ in kinds],
                    "state": [state for _, _, state in kinds],
                    "variant": [trace.variant for _ in kinds],
                    "every_step": [trace.every_step for _ in kinds],
                },
            }
        )
        segments += [
            {
                "trace_id": trace_id, "pattern": s.pattern, "source": s.source, "state": s.state,
                "lane_class": s.lane, "step": s.start // 500 if s.step is None else s.step,
                "start_ns": s.start, "end_ns": s.end, "cost_ms": s.cost_ms,
            }
            for s in trace.segments
        ]  # fmt: skip
        for window in range(10):
            low, high = 100 * window, 100 * (window + 1)
            inside = [s for s in trace.segments if s.start < high and max(s.end, s.start + 1) > low]
            row = {
                "trace_id": trace_id,
                "window": window,
                "start_ns": low,
                "end_ns": high,
                "step": window // 5,
            }
            for lane in ("cpu", "gpu"):
                here = [s for s in inside if s.lane == lane]
                unclear = {s.pattern for s in here if s.source == "native" or s.state == "undecided"}
                costly = {s.pattern for s in here if s.state == "costly" and s.source != "native"}
                row[f"{lane}_patterns"] = sorted(costly)
                row[f"{lane}_ignored"] = sorted(unclear - costly)
            windows.append(row)
    segment_schema = pa.schema(
        [
            schema.SEGMENTS.field(name)
            for name in (
                "trace_id", "pattern", "source", "state", "lane_class", "step", "start_ns", "end_ns",
                "cost_ms",
            )
        ]
    )  # fmt: skip
    return Truth.from_tables(
        pa.Table.from_pylist(rows),
        pa.Table.from_pylist(segments, schema=segment_schema),
        pa.Table.from_pylist(windows),
        catalogue=CATALOGUE,
        heldout=frozenset({("sync", "bool")}),
    )


def row(
    start: int, end: int, value: float = 0.9, trace: str = "a", pattern: str = "sync", lane: str = "cpu"
) -> Detection:
    return Detection(trace, pattern, lane, start, end, value)  # pyright: ignore[reportArgumentType]


def result(
    truth: Truth, *rows: Detection, windows: list[WindowScore] | None = None, **options
) -> ScoreResult:
    return score(truth, Submission.of(CARD, rows, windows), **{"resamples": 0, **options})


def value(
    truth: Truth, name: str, *rows: Detection, windows: list[WindowScore] | None = None
) -> float | None:
    return result(truth, *rows, windows=windows).scores[name].value


BOTH = truth_of(
    a=T([S(100, 200), S(600, 700), S(300, 400, "copy", "gpu", cost_ms=2.0), S(0, 500, "fp32")]), b=T()
)
PERFECT = [
    row(100, 200),
    row(600, 700),
    row(300, 400, pattern="copy", lane="gpu"),
    row(0, 500, pattern="fp32"),
]


def test_perfect_and_silent_submissions_reach_the_ends_of_every_score() -> None:
    best, worst = result(BOTH, *PERFECT), result(BOTH)
    for metric in METRICS:
        good, bad = best.scores[metric.name].value, worst.scores[metric.name].value
        if metric.name.endswith("false_alarms"):
            assert (good, bad) == (0, 0)
        elif "window_a" in metric.name and not metric.name.startswith("window_accuracy"):
            assert good == 1  # AUROC and average precision of windows
        else:
            assert (good, bad) == (1, 0), metric.name
    assert worst.scores["window_auroc_any"].value == 0.5  # all windows tied at 0
    # Average precision of all windows tied: the share of positives. Trace a has windows 1, 3, 6 positive;
    # windows 0, 2 and 4 hold only the step pattern and are left out; b has ten negatives: 3 of 3 + 4 + 10.
    assert worst.scores["window_ap_any"].value == pytest.approx(3 / 17)


# Matching


def test_missing_trace_is_all_false_negatives() -> None:
    truth = truth_of(a=T([S(100, 200)]), b=T([S(100, 200)]))
    got = result(truth, row(100, 200)).scores
    assert got["segment_map"].value == 0.5  # recall 1/2 at precision 1
    assert got["segment_f1"].value == pytest.approx(2 / 3)  # 2 TP / (2 TP + 1 FN)
    assert got["time_f1"].value == pytest.approx(2 / 3)
    assert got["trace_macro_f1"].value == pytest.approx(2 / 3)


def test_duplicates_are_false_positives() -> None:
    truth = truth_of(a=T([S(100, 200)]))
    tied = result(truth, row(100, 200), row(100, 200)).scores
    assert tied["segment_map"].value == 0.5  # one block: one hit, one miss
    assert tied["segment_f1"].value == pytest.approx(2 / 3)  # TP 1, FP 1
    assert tied["time_f1"].value == 1.0  # unions know no duplicates
    lower = result(truth, row(100, 200), row(100, 200, 0.8)).scores
    assert lower["segment_map"].value == 1.0  # full recall before the duplicate


def test_two_segments_one_row() -> None:
    # [100, 200] and [200, 300] against [100, 300]: tIoU 1/2 with each, and only one can be matched.
    got = result(truth_of(a=T([S(100, 200), S(200, 300)])), row(100, 300)).scores
    assert got["segment_ap_30"].value == got["segment_ap_50"].value == 0.5
    assert got["segment_ap_70"].value == 0.0
    assert got["segment_map"].value == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert got["segment_f1_50"].value == pytest.approx(2 / 3)  # TP 1, FN 1
    assert got["time_f1"].value == 1.0


def test_one_segment_two_rows() -> None:
    # [100, 200] against [100, 150] and [150, 200]: tIoU 1/2 each, one hit and one false positive.
    got = result(truth_of(a=T([S(100, 200)])), row(100, 150, 0.9), row(150, 200, 0.8)).scores
    assert got["segment_ap_50"].value == 1.0  # the hit comes first
    assert got["segment_f1_50"].value == pytest.approx(2 / 3)
    assert got["segment_f1_70"].value == 0.0


def test_greedy_and_maximum_matching_differ() -> None:
    # Segments [0, 100] and [100, 200]. The first row [40, 150] has tIoU 60/150 = 0.4 and 50/160 = 0.3125;
    # greedily it takes [0, 100], which leaves the second row [0, 90] nothing. The maximum matches both.
    truth = truth_of(a=T([S(0, 100), S(100, 200)]))
    got = result(truth, row(40, 150, 0.9), row(0, 90, 0.8)).scores
    assert got["segment_ap_30"].value == 0.5
    assert got["segment_f1_30"].value == 1.0
    assert got["segment_ap_50"].value == 0.25  # the first row misses, the second hits: recall 1/2 at 1/2


@pytest.mark.parametrize(
    "other", [row(100, 200, trace="b"), row(100, 200, pattern="copy"), row(100, 200, lane="gpu")]
)
def test_rows_match_only_in_their_trace_pattern_and_lane_class(other: Detection) -> None:
    assert value(truth_of(a=T([S(100, 200)]), b=T()), "segment_map", other) == 0


def test_segments_of_length_zero() -> None:
    truth = truth_of(a=T([S(150, 150)]))
    assert value(truth, "segment_map", row(150, 150)) == 1.0  # the same instant
    assert value(truth, "segment_map", row(100, 200)) == 0.0  # shares no time with it
    assert value(truth, "time_f1", row(150, 150)) is None  # there is no time to find
    assert value(truth, "window_auroc_any", row(150, 150)) == 1.0  # but it lies in window 1
    assert value(truth_of(a=T([S(100, 200)])), "segment_map", row(150, 150)) == 0.0


def test_an_instant_at_the_end_of_a_trace_lies_in_its_last_window() -> None:
    truth = truth_of(a=T([S(990, 1000)]), b=T([S(0, 10)]))
    # Windows a9 and b0 are positive, a9 alone is found: it and then 19 tied windows, one positive.
    # AUROC = (1 * 18 + 1 * 18 / 2) / (2 * 18) = 0.75.
    assert value(truth, "window_auroc_any", row(1000, 1000)) == pytest.approx(0.75)


def test_rows_below_the_threshold_count_in_the_ranking_only() -> None:
    got = result(truth_of(a=T([S(100, 200)])), row(100, 200, 0.4)).scores
    assert got["segment_map"].value == 1.0
    assert got["segment_f1"].value == got["time_f1"].value == got["trace_macro_f1"].value == 0.0


def test_at_most_100_rows_a_group_are_ranked() -> None:
    truth = truth_of(a=T([S(900, 1000)]))
    wrong = [row(i, i + 1, 0.9) for i in range(100)]
    got = result(truth, *wrong, row(900, 1000, 0.8))
    assert got.scores["segment_map"].value == 0.0  # the hit is row 101
    assert got.dropped["0.5"]["beyond_100_a_group"] == 1
    assert result(truth, *wrong[1:], row(900, 1000, 0.8)).scores["segment_map"].value == pytest.approx(
        1 / 100
    )
    assert got.scores["segment_f1"].value == pytest.approx(2 / (2 + 100))


def test_time_f1_by_unions() -> None:
    # Truth [0, 100]; reported [50, 120] and [110, 150], together [50, 150]: 50 found, 50 wrong, 50 missed.
    assert value(truth_of(a=T([S(0, 100)])), "time_f1", row(50, 120), row(110, 150)) == pytest.approx(0.5)


def test_rows_are_cut_to_their_trace() -> None:
    truth = truth_of(a=T([S(0, 100), S(900, 1000)]))
    assert value(truth, "segment_map", row(-50, 100), row(900, 5000)) == 1.0


# What does not count


def test_unmatched_rows_in_ignored_segments_are_dropped() -> None:
    for unclear in (S(400, 500, state="undecided"), S(400, 500, source="native")):
        truth = truth_of(a=T([S(100, 200), unclear]))
        # [450, 550] lies in it by half: dropped. [451, 551] by 49 %: a false positive.
        got = result(truth, row(100, 200), row(450, 550, 0.95))
        assert got.scores["segment_map"].value == got.scores["segment_f1"].value == 1.0
        assert got.dropped["0.5"] == {"ignored": 1, "not_exhaustive": 0, "beyond_100_a_group": 0}
        assert got.without_ignoring["segment_map"] == 0.5  # the wrong row ranks first
        assert got.without_ignoring["segment_f1"] == pytest.approx(2 / 3)
        assert value(truth, "segment_map", row(100, 200), row(451, 551, 0.95)) == 0.5
        assert value(truth, "segment_f1", row(100, 200), row(450, 550, lane="gpu")) == pytest.approx(2 / 3)


def test_truth_is_matched_before_anything_is_dropped() -> None:
    # The row lies in an ignored segment entirely, and matches a costly one: a true positive.
    truth = truth_of(a=T([S(100, 200), S(0, 300, state="undecided")]))
    assert value(truth, "segment_map", row(100, 200)) == 1.0
    # Of two equal rows one matches and the other is dropped.
    assert value(truth, "segment_f1", row(100, 200), row(100, 200)) == 1.0


def test_of_two_rows_for_a_segment_the_one_that_would_count_is_matched() -> None:
    # [100, 160] and [140, 200] both match [100, 200] at 0.6; the second lies in the ignored [140, 220].
    # Matching the first leaves no false positive, whichever row has the higher score.
    truth = truth_of(a=T([S(100, 200), S(140, 220, state="undecided")]))
    for scores in ((0.9, 0.8), (0.8, 0.9)):
        rows = row(100, 160, scores[0]), row(140, 200, scores[1])
        assert value(truth, "segment_f1_50", *rows) == 1.0


def test_ignored_time_is_left_out() -> None:
    # Reported [100, 300]: [100, 200] is true, [200, 250] ignored, [250, 300] wrong: 2*100/(200+50).
    truth = truth_of(a=T([S(100, 200), S(200, 250, state="undecided")]))
    assert value(truth, "time_f1", row(100, 300)) == pytest.approx(0.8)


def test_false_positives_count_only_where_a_pattern_is_exhaustive() -> None:
    truth = truth_of(a=T([S(100, 200)], exhaustive=("copy", "fp32")), b=T(exhaustive=("copy", "fp32")), c=T())
    got = result(truth, row(100, 200, 0.6), row(400, 500), row(400, 500, trace="b"))
    assert got.scores["segment_map"].value == got.scores["segment_f1"].value == 1.0
    assert got.scores["time_f1"].value == got.scores["trace_micro_f1"].value == 1.0
    assert got.scores["false_alarms"].value == 0.0
    assert got.dropped["0.3"]["not_exhaustive"] == 2
    assert got.without_ignoring["segment_f1"] == pytest.approx(2 / (2 + 2))
    assert got.without_ignoring["false_alarms"] == 0.5  # the row in b, over b and c
    # In c the pattern is exhaustive.
    got = result(truth, row(100, 200), row(400, 500, trace="c"))
    assert got.scores["false_alarms"].value == 0.5
    assert got.scores["segment_f1"].value == pytest.approx(2 / 3)


def test_benign_segments_and_lookalikes_are_negatives() -> None:
    twin = T([S(100, 200, state="benign"), S(300, 400, state="benign", source="lookalike")])
    got = result(truth_of(a=twin), row(100, 200), row(300, 400)).scores
    assert got["false_alarms"].value == 2.0  # a trace with benign segments only is clean
    assert got["segment_map"].value is None  # and has nothing to find


def test_undecided_traces_are_not_clean() -> None:
    truth = truth_of(a=T([S(100, 200, state="undecided")]), b=T())
    assert value(truth, "false_alarms", row(700, 800), row(700, 800, trace="b")) == 1.0
    assert value(truth_of(a=T([S(100, 200)])), "false_alarms", row(700, 800)) is None


# Classes


def test_a_class_without_truth_counts_as_false_alarms_only() -> None:
    truth = truth_of(a=T([S(100, 200)]), b=T())
    extra = [row(500, 600, pattern="copy"), row(500, 600, pattern="copy", trace="b")]
    got = result(truth, row(100, 200), *extra)
    assert got.classes == {"local": ["sync"], "step": []}
    assert got.scores["segment_map"].value == got.scores["trace_macro_f1"].value == 1.0
    assert got.scores["false_alarms"].value == 1.0
    assert got.scores["trace_micro_f1"].value == pytest.approx(2 / (2 + 2))  # (a, copy) and (b, copy)


def test_a_class_never_predicted_scores_zero() -> None:
    truth = truth_of(a=T([S(100, 200), S(300, 400, "copy")]))
    got = result(truth, row(100, 200)).scores
    assert got["segment_map"].by_pattern["copy"].value == 0.0
    for name in ("segment_map", "segment_f1", "time_f1", "trace_macro_f1", "window_macro_f1"):
        assert got[name].value == 0.5, name


def test_class_rule_and_fallback() -> None:
    traces = {f"t{i}": T([S(100, 200)], unit=f"u{i % 2}") for i in range(3)}
    truth = truth_of(**traces, z=T([S(100, 200, "copy")]))
    for rule, local, how in (
        (ClassRule(3, 2), ["sync"], "rule"),
        (ClassRule(4, 2), ["copy", "sync"], "fallback"),
        (ClassRule(3, 3), ["copy", "sync"], "fallback"),
    ):
        got = result(truth, class_rule=rule)
        assert got.classes["local"] == local
        assert got.class_rule == {
            "min_instances": rule.min_instances, "min_units": rule.min_units, "local": how, "step": "none",
        }  # fmt: skip


# Cost


def test_recovered_cost_by_hand() -> None:
    # Costs: sync 3 in step 0 and 3 in step 1, copy 1 in step 0: 7 in all. Two clean traces allow one false
    # alarm: 0.5 is the first, 0.45 would be the second. So rows above 0.45 count: sync in step 0 by one of
    # its two segments, and copy; sync in step 1 (0.45, tied with the alarm) does not: (3 + 1) / 7.
    bad = T([S(100, 200, cost_ms=3), S(300, 400, cost_ms=3), S(600, 700, cost_ms=3), S(0, 90, "copy")])
    truth = truth_of(a=bad, b=T(), c=T())
    rows = [
        row(100, 200, 0.9),
        row(600, 700, 0.45),
        row(0, 90, 0.46, pattern="copy"),
        row(0, 10, 0.5, trace="b"),
        row(0, 10, 0.45, trace="c"),
    ]
    assert value(truth, "recovered_cost", *rows) == pytest.approx(4 / 7)
    assert value(truth, "recovered_cost", *rows[:4]) == 1.0  # one alarm is allowed
    # One more alarm ahead of all is the one allowed, and 0.5 one too many: sync in step 0 alone is above.
    assert value(truth, "recovered_cost", *rows, row(0, 10, 0.99, trace="c")) == pytest.approx(3 / 7)
    assert value(truth, "recovered_cost", *rows, *[row(0, 10, 0.99, trace="c")] * 2) == 0.0
    assert value(truth_of(a=bad), "recovered_cost", *rows[:1]) is None  # no clean trace to count alarms in


# Steps


def test_what_is_left_of_a_step_before_the_trace_earns_no_cost() -> None:
    truth = truth_of(a=T([S(0, 100, lane="gpu", step=-1), S(600, 700, cost_ms=3.0)]), b=T())
    assert value(truth, "recovered_cost", row(600, 700)) == 1.0
    assert value(truth, "recovered_cost", row(0, 100, lane="gpu")) == 0.0


def test_step_rows_on_the_gpu_stand_for_the_step_that_launched_the_work() -> None:
    late = S(520, 620, "fp32", "gpu", step=0)
    truth = truth_of(a=T([S(400, 450, "fp32"), late]))
    mine = row(520, 620, pattern="fp32", lane="gpu")
    assert value(truth, "step_f1", mine) == 1.0
    # Of 520 to 720 half lies in the segment; of 520 to 722 less does, and so it stands for step 1.
    assert value(truth, "step_f1", row(520, 720, pattern="fp32", lane="gpu")) == 1.0
    assert value(truth, "step_f1", row(520, 722, pattern="fp32", lane="gpu")) == 0.0
    # An instant overlaps nothing: it stands for the step that it lies in.
    assert value(truth, "step_f1", row(530, 530, pattern="fp32", lane="gpu")) == 0.0
    nothing = result(truth_of(a=T()), mine).scores  # and without any labels
    assert nothing["step_false_alarms"].value == 1.0
    # A thread does its work in its own step.
    assert value(truth, "step_f1", row(520, 620, pattern="fp32")) == 0.0
    # Work that was undecided is no false alarm in the step in which it runs.
    unclear = truth_of(a=T([S(400, 450, "fp32"), S(520, 620, "fp32", "gpu", "undecided", step=0)]))
    assert value(unclear, "step_f1", mine) == 1.0
    # The rest of a step before the trace: neither found nor false.
    before = truth_of(a=T([S(600, 700, "fp32"), S(20, 80, "fp32", "gpu", step=-1)]))
    rest = row(20, 80, pattern="fp32", lane="gpu")
    assert value(before, "step_f1", row(600, 700, pattern="fp32"), rest) == 1.0
    assert value(before, "step_f1", rest) == 0.0


def test_step_rows_stand_for_the_steps_that_they_mostly_lie_in() -> None:
    both_steps = T([S(0, 500, "fp32"), S(500, 1000, "fp32")])
    truth = truth_of(a=both_steps, b=T())
    for rows, expected in (
        ([row(0, 1000, pattern="fp32")], 1.0),
        ([row(20, 30, pattern="fp32"), row(600, 600, pattern="fp32", lane="gpu")], 1.0),
        ([row(0, 520, pattern="fp32")], 2 / 3),  # 20 of 520 in step 1: only step 0
        ([row(0, 1000, pattern="fp32"), row(0, 500, pattern="fp32", trace="b")], 2 * 2 / (2 * 2 + 1)),
        ([row(0, 10, pattern="fp32"), row(20, 30, pattern="fp32")], 2 / 3),  # one step, said twice
        ([row(0, 1000, pattern="sync")], 0.0),
    ):
        assert value(truth, "step_f1", *rows) == pytest.approx(expected)
        assert value(truth, "step_macro_f1", *rows) == pytest.approx(expected)
    got = result(truth, row(0, 1000, pattern="fp32", trace="b"))
    assert got.scores["step_false_alarms"].value == 2.0
    assert got.scores["false_alarms"].value == 0.0  # those of local scope
    assert got.scores["segment_map"].value is None


def test_uncertain_steps_are_left_out() -> None:
    truth = truth_of(a=T([S(0, 500, "fp32"), S(500, 1000, "fp32", state="undecided")]))
    got = result(truth, row(0, 1000, pattern="fp32"))
    assert got.scores["step_f1"].value == 1.0
    assert got.without_ignoring["step_f1"] == pytest.approx(2 / 3)


# Windows


def test_windows_take_their_own_score_then_a_detection_then_zero() -> None:
    # Window 1 is positive. The detection covers windows 1 and 2; window 2 has a score of its own, 0.
    truth = truth_of(a=T([S(100, 200)]))
    assert value(truth, "window_auroc_any", row(100, 300)) == pytest.approx((8 + 0.5) / 9)
    own = [WindowScore("a", 2, "cpu", "sync", 0.0)]
    assert value(truth, "window_auroc_any", row(100, 300), windows=own) == 1.0
    # A score without a pattern answers for the lane and for any, not for the pattern.
    own = [WindowScore("a", 2, "cpu", "any", 0.95)]
    got = result(truth, row(100, 200), windows=own).scores
    assert got["window_auroc_any"].value == got["window_auroc_cpu"].value == pytest.approx(8 / 9)
    assert got["window_auroc_pattern"].value == 1.0
    assert got["window_auroc_gpu"].value is None  # no positive window there


def test_repeated_window_scores_count_once_with_the_highest() -> None:
    truth = truth_of(a=T([S(100, 200)]))
    windows = [WindowScore("a", 1, "cpu", "sync", s) for s in (0.2, 0.9, 0.4)]
    windows.append(WindowScore("a", 5, "cpu", "sync", 0.8))
    assert value(truth, "window_auroc_any", windows=windows) == 1.0
    assert value(truth, "window_auroc_any", windows=windows[::-1]) == 1.0


def test_ignored_windows_are_left_out() -> None:
    # Windows 4 and 5 are touched by an ignored segment: the score there does not matter.
    truth = truth_of(a=T([S(100, 200), S(450, 550, state="undecided")]))
    got = result(truth, row(100, 200, 0.6), row(400, 600, 0.9))
    assert got.scores["window_auroc_any"].value == got.scores["window_ap_any"].value == 1.0
    assert got.scores["window_auroc_pattern"].value == 1.0
    assert got.without_ignoring["window_auroc_any"] == pytest.approx(7 / 9)


def test_window_scores_of_patterns_that_are_not_exhaustive() -> None:
    # Window 4 of a is scored for copy, of which a may hold more than it says: none of a's nine windows
    # without a label is a negative. If all were, both positives would lose to that one of 18.
    truth = truth_of(a=T([S(100, 200)], exhaustive=("sync",)), b=T([S(100, 200, "copy")]))
    rows = [
        row(100, 200, 0.6),
        row(400, 500, 0.9, pattern="copy"),
        row(100, 200, 0.5, trace="b", pattern="copy"),
    ]
    got = result(truth, *rows)
    assert got.scores["window_auroc_any"].value == 1.0
    assert got.without_ignoring["window_auroc_any"] == pytest.approx(17 / 18)


def test_any_asks_for_the_classes_alone() -> None:
    # Nothing costly is of copy, so it is no class: that a is not exhaustive for it costs no negatives, and
    # rows of it are no answer.
    truth = truth_of(a=T([S(100, 200)], exhaustive=("sync",)))
    got = result(truth, row(100, 200, 0.6), row(400, 500, 0.9, pattern="copy"))
    assert got.scores["window_auroc_any"].value == 1.0
    assert value(truth, "window_auroc_any", row(400, 500, 0.9)) == pytest.approx(4 / 9)  # 8 ties and a loss


@pytest.mark.parametrize("pattern", ["sync", "copy"])
def test_the_same_score_everywhere_is_worth_nothing(pattern: str) -> None:
    # Only c is known to hold neither. Its ten windows tie with window 1 of a and of b: 2 of 12.
    truth = truth_of(
        a=T([S(100, 200)], exhaustive=("copy",)),
        b=T([S(100, 200, "copy")], exhaustive=("sync",)),
        c=T(exhaustive=("sync", "copy")),
    )
    got = result(truth, *[row(0, 1000, trace=trace, pattern=pattern) for trace in "abc"]).scores
    assert got["window_auroc_any"].value == got["window_auroc_cpu"].value == 0.5
    assert got["window_ap_any"].value == pytest.approx(2 / 12)


def test_accuracy_takes_any_pattern_of_the_label_set() -> None:
    # Window 1 holds sync and copy, window 3 copy. Window 1 is held for copy: right. Window 3 is held for
    # sync: wrong. copy: TP 1, FN 1; sync: FP 1 and no FN, since window 1 was right: F1 2/3 and undefined.
    truth = truth_of(a=T([S(100, 200), S(100, 200, "copy", "gpu"), S(300, 400, "copy")]))
    rows = [
        row(100, 200, 0.9, pattern="copy"),
        row(100, 200, 0.8),
        row(300, 400, 0.9),
        row(300, 400, 0.8, pattern="copy", lane="gpu"),
    ]
    got = result(truth, *rows).scores
    assert got["window_accuracy"].value == 0.5
    assert got["window_macro_f1"].by_pattern["copy"].value == pytest.approx(2 / 3)
    assert got["window_macro_f1"].by_pattern["sync"].value is None


def test_equal_top_scores_share_the_window() -> None:
    truth = truth_of(a=T([S(100, 200)]))
    rows = [row(100, 200), row(100, 200, pattern="copy")]
    assert value(truth, "window_accuracy", *rows) == value(truth, "window_accuracy", *rows[::-1]) == 0.5
    # sync: TP 1/2, FN 1/2: 2*0.5 / (2*0.5 + 0.5).
    assert value(truth, "window_macro_f1", *rows) == pytest.approx(2 / 3)
    assert value(truth, "window_accuracy", row(100, 200, 0.0)) == 0.0  # a score of 0 holds it for nothing


# Submissions


@pytest.mark.parametrize(
    ("rows", "windows", "message"),
    [
        ([row(0, 1), row(0, 1, trace="zz")], [], "row 2: unknown trace 'zz'"),
        ([row(0, 1, pattern="any")], [], "row 1: unknown pattern 'any'"),
        ([row(1001, 1002)], [], r"row 1: \[1001, 1002\] ns lies outside of its trace, \[0, 1000\]"),
        ([row(-5, -1)], [], "row 1: .* lies outside"),
        ([], [WindowScore("a", 10, "cpu", "sync", 1.0)], "row 1: its trace has no window 10"),
        ([], [WindowScore("zz", 0, "cpu", "sync", 1.0)], "row 1: unknown trace 'zz'"),
        ([], [WindowScore("a", 0, "cpu", "nope", 1.0)], "row 1: unknown pattern 'nope'"),
    ],
)
def test_rows_that_fit_no_truth_are_refused(rows, windows, message: str) -> None:
    with pytest.raises(UserError, match=message):
        result(BOTH, *rows, windows=windows)


_rows = st.lists(
    st.builds(
        lambda start, length, s, trace, pattern, lane: row(start, start + length, s, trace, pattern, lane),
        st.integers(0, 900), st.integers(0, 200), st.sampled_from([0.0, 0.4, 0.5, 0.9]),
        st.sampled_from("ab"), st.sampled_from(sorted(CATALOGUE)), st.sampled_from(["cpu", "gpu"]),
    ),
    max_size=25,
)  # fmt: skip


@given(_rows, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=10)
def test_order_of_rows_never_matters(rows: list[Detection], random) -> None:
    shuffled = random.sample(rows, len(rows))
    one, other = (result(BOTH, *some, resamples=20).to_dict() for some in (rows, shuffled))
    assert one == other
    for got in one["scores"].values():
        assert got["value"] is None or got["value"] >= 0


def test_result_is_json_and_says_what_it_depends_on() -> None:
    got = result(BOTH, *PERFECT[1:], resamples=50, seed=7)
    fields = json.loads(json.dumps(got.to_dict(), allow_nan=False))
    assert set(fields["scores"]) == set(METRIC_BY_NAME)
    assert fields["provenance"]["seed"] == 7
    assert fields["provenance"]["resamples"] == 50
    assert len(fields["provenance"]["labels_sha256"]) == 64
    assert fields["counts"]["traces"] == 2
    assert truth_of(a=T()).fingerprint != truth_of(a=T([S(1, 2)])).fingerprint


# Bootstrap and comparison

MANY = truth_of(
    **{
        f"t{i}": T([S(100, 200)], unit=f"u{i // 2}", task=("detection" if i < 8 else "pose"))
        for i in range(16)
    },
    clean=T(unit="u0", task="detection"),
)


def found(count: int) -> list[Detection]:
    return [row(100, 200, trace=f"t{i}") for i in range(0, 2 * count, 2)]


def test_intervals_hold_the_score_and_depend_on_the_seed_only() -> None:
    one, again, other = (result(MANY, *found(4), resamples=200, seed=s) for s in (0, 0, 1))
    got = one.scores["segment_map"]
    assert got.low is not None
    assert got.high is not None
    # Half of the traces of units u0 to u3 (all of task detection) are found, nothing in those of pose. Every
    # resample draws four units of each task, so the recall is 4 of 16 in each: no spread at all.
    assert got.value == 0.25
    assert (got.low, got.high) == pytest.approx((0.25, 0.25))
    spread = result(MANY, *found(2), resamples=200).scores["segment_map"]
    assert spread.low < spread.value < spread.high  # pyright: ignore
    assert one.to_dict() == again.to_dict()
    assert np.array_equal(one.samples["segment_f1"], again.samples["segment_f1"])
    assert one.provenance != other.provenance


def test_a_single_unit_has_no_interval() -> None:
    truth = truth_of(a=T([S(100, 200)]))
    got = result(truth, row(100, 200), resamples=50).scores["segment_map"]
    assert (got.value, got.low, got.high) == (1.0, None, None)


def test_comparison_is_paired() -> None:
    better, worse = (result(MANY, *found(n), resamples=200) for n in (3, 2))
    delta = compare(better, worse)["segment_map"]
    assert delta.value == pytest.approx(1 / 16)
    # In a resample they differ by the trace of unit u2, as often as it is drawn: never to the worse.
    assert delta.low == 0.0
    assert delta.better is not None
    assert 0.5 < delta.better < 1
    assert set(np.round(16 * (better.samples["segment_map"] - worse.samples["segment_map"]), 9)) <= set(
        range(5)
    )
    same = compare(better, better)["segment_map"]
    assert (same.value, same.low, same.high, same.better) == (0, 0, 0, 0.5)
    noisy, quiet = (result(MANY, *rows, resamples=50) for rows in ([row(0, 10, trace="clean")], []))
    alarms = compare(noisy, quiet)["false_alarms"]
    assert (alarms.value, alarms.better) == (1.0, 0.0)  # more of them is worse


def test_only_results_scored_alike_are_compared() -> None:
    one = result(MANY, resamples=9)
    for other in (result(MANY, resamples=9, seed=1), result(MANY, resamples=8), result(BOTH, resamples=9)):
        with pytest.raises(UserError, match="score both alike"):
            compare(one, other)
    truth = truth_of(a=T([S(100, 200)]), b=T([S(100, 200)]), c=T([S(100, 200, "copy")]))
    with pytest.raises(UserError, match="different classes"):
        compare(result(truth, class_rule=ClassRule(2, 2)), result(truth))


def test_slices() -> None:
    truth = truth_of(
        a=T([S(100, 200)]),
        b=T([S(100, 200)], every_step=False, hardware="a100"),
        c=T([S(100, 200)], variant="bool"),
        d=T(),
    )
    rows = [row(100, 200), row(100, 200, trace="b"), row(400, 500, trace="d")]
    for name, traces, f1 in (
        ("all", 4, 2 * 2 / (4 + 1 + 1)),
        ("headline", 3, 2 / (2 + 1 + 1)),  # a, c, d: one found, one missed, one false
        ("unseen_variant", 2, 0.0),  # c and the clean d
        ("hardware:a100", 1, 1.0),
    ):
        got = result(truth, *rows, slice=name)
        assert got.counts["traces"] == traces
        assert got.scores["segment_f1"].value == pytest.approx(f1), name
    with pytest.raises(UserError, match="unknown slice 'x'; possible: all, headline"):
        result(truth, slice="x")


# Leaderboard


def test_leaderboard_ranks_and_escapes() -> None:
    evil = CARD.model_copy(update={"name": "[red]x[/red]"})
    worse = score(MANY, Submission.of(evil, found(1)), resamples=20)
    better = result(MANY, *found(3), resamples=20)
    assert ranked([worse, better]) == [better, worse]
    screen = Console(width=120, record=True, file=io.StringIO())
    screen.print(leaderboard([worse, better]))
    text = screen.export_text()
    assert "[red]x[/red]" in text
    assert text.index(" d ") < text.index("[red]x")
    rows = leaderboard_dict([worse, better])["rows"]
    assert [one["rank"] for one in rows] == [1, 2]
    assert rows[0]["to_next"][RANKING_METRIC]["value"] == pytest.approx(2 / 16)
    assert "to_next" not in rows[1]
    with pytest.raises(UserError, match="unknown metric"):
        leaderboard([better], ["nope"])
    with pytest.raises(UserError, match="at least one"):
        ranked([])


def test_leaderboard_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARD.model_copy(update={"name": "everything"})
    scored = score(MANY, Submission.of(card, found(1)), resamples=20)
    for width, intervals in ((80, False), (120, True)):
        screen = Console(width=width, record=True, file=io.StringIO())
        monkeypatch.setattr(console, "out", lambda screen=screen: screen)
        print_leaderboard([scored], tuple(ALL_COLUMNS))
        text = screen.export_text()
        assert " everything " in text
        assert ("0.00–0.00" in text) is intervals
        assert "accuracy" in text
        assert "…" not in text


def test_without_a_local_class_the_f1_of_steps_ranks() -> None:
    truth = truth_of(a=T([S(0, 400, "fp32")]))  # fp32 is of step scope: no segment has a place
    card = CARD.model_copy(update={"name": "a"})  # first by name
    silent = score(truth, Submission.of(card, []), resamples=0)
    right = result(truth, row(0, 400, pattern="fp32"))
    assert right.scores[RANKING_METRIC].value is None
    assert right.scores["step_f1"].value == 1.0
    assert ranked([silent, right]) == [right, silent]


# Truth


def test_truth_from_files_equals_the_records(tmp_path: Path) -> None:
    states: list[State] = ["costly", "benign", "undecided", "costly"]  # odd seeds hold a step-scope pattern
    records = [random_record(seed, events=90, state=state) for seed, state in enumerate(states)]
    for record in records:
        record.meta["backbone_family"] = "known" if record is records[0] else "new"
    write_traces(tmp_path / shard_path("traces", "test"), records)
    write_traces(tmp_path / shard_path("traces", "train"), records[:1])
    write_table(
        tmp_path / shard_path("segments", "test"),
        pa.concat_tables([segment_table(record) for record in records]),
        schema.SEGMENTS,
    )
    write_table(
        tmp_path / shard_path("windows", "test"),
        pa.concat_tables([window_table(record) for record in records]),
        WINDOWS,
    )
    truth = Truth.load(tmp_path)
    assert truth.trace_ids == tuple(sorted(record.trace_id for record in records))
    by_id = {record.trace_id: record for record in records}
    for index, trace_id in enumerate(truth.trace_ids):
        record = by_id[trace_id]
        assert truth.good[index] == (record.quality == "good")
        assert truth.end_ns[index] == record.trace.duration_ns
        costly = {i.pattern for i in record.instances if i.state == "costly" and i.source != "native"}
        assert {truth.patterns[p] for p in np.flatnonzero(truth.costly[index])} == costly
        assert {truth.patterns[p] for p in np.flatnonzero(truth.exhaustive[index])} == set(record.exhaustive)
    segments = sum(
        record.instances[s.instance].state == "costly" and record.instances[s.instance].source != "native"
        for record in records
        for s in record.segments
    )
    assert len(truth.segments.trace) == segments > 0

    # What the labels say, reported as it stands, is a perfect submission.
    rows = [
        Detection(r.trace_id, r.instances[s.instance].pattern, s.lane_class, s.start_ns, s.end_ns, 1.0)
        for r in records
        for s in r.segments
        if r.instances[s.instance].state == "costly"
    ]
    got = score(truth, Submission.of(CARD, rows), resamples=10)
    assert got.scores["segment_map"].value == got.scores["segment_f1"].value == 1.0
    assert got.scores["step_f1"].value == got.scores["trace_macro_f1"].value == 1.0
    # The families of the three others are not in train.
    got = score(truth, Submission.of(CARD, rows), slice="unseen_backbone", resamples=0)
    assert got.counts["traces"] == 3


def test_missing_files_splits_and_withheld_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set folder"):
        Truth.load(tmp_path)
    with pytest.raises(UserError, match="unknown split 'dev'; possible: train, validation, test, all"):
        Truth.load(tmp_path, "dev")
    record = random_record(0, events=90)
    record.meta["quality"] = "withheld"
    write_traces(tmp_path / shard_path("traces", "test"), [record])
    write_table(tmp_path / shard_path("segments", "test"), schema.SEGMENTS.empty_table(), schema.SEGMENTS)
    write_table(tmp_path / shard_path("windows", "test"), WINDOWS.empty_table(), WINDOWS)
    with pytest.raises(UserError, match="withheld"):
        Truth.load(tmp_path)
    write_traces(tmp_path / shard_path("traces", "test"), [])
    with pytest.raises(UserError, match="test has no traces to score"):
        score(Truth.load(tmp_path), Submission.of(CARD, []))
