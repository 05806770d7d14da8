"""Tiling, window labels and window features, worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from traces import random_record

from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.dataset.windows import FEATURES, WINDOWS, features, window_table
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


MAIN, OTHER, STREAM, COPIES = range(4)


def small_trace(*rows: tuple) -> Trace:
    """Rows are (lane, op, start, end, parent, launch) with references to other rows by position."""
    table = [(*row, -1, -1)[:6] for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (table[i][0], table[i][2], -table[i][3]))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    ops = list(dict.fromkeys(row[1] for row in table))
    columns = {
        "lane": [table[i][0] for i in order],
        "op": [ops.index(table[i][1]) for i in order],
        "start_ns": [table[i][2] for i in order],
        "dur_ns": [table[i][3] - table[i][2] for i in order],
        "parent": [place[table[i][4]] for i in order],
        "launch": [place[table[i][5]] for i in order],
        "forward": [-1] * len(order),
    }
    lanes = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1"), Lane("gpu", "s7", 0), Lane("gpu", "s20", 0)]
    trace = Trace(lanes, ops, Events(**{n: np.array(c, Events.DTYPES[n]) for n, c in columns.items()}))
    trace.check()
    return trace


def op(name: str) -> Op:
    return Op(name, "cpu_op")


def call(name: str) -> Op:
    return Op(name, "cuda_runtime")


def kernel(name: str, grid: str = "[132, 1, 1]") -> Op:
    return Op(name, "kernel", grid=grid)


# A step of two windows of 10 us: the host launches two kernels, converts and waits; a copy runs beside them.
SMALL = small_trace(
    (MAIN, Op("ProfilerStep#0", "user_annotation"), 0, 20_000),
    (MAIN, op("aten::conv2d"), 0, 4_000, 0),
    (MAIN, op("aten::convolution"), 1_000, 3_000, 1),
    (MAIN, call("cudaLaunchKernel"), 2_000, 2_500, 2),
    (STREAM, kernel("sm90_xmma_fprop_tf32"), 5_000, 9_000, 2, 3),
    (MAIN, op("aten::to"), 5_000, 8_000, 0),
    (MAIN, op("aten::_to_copy"), 5_500, 8_000, 5),
    (MAIN, call("cudaLaunchKernel"), 6_000, 7_000, 6),
    (STREAM, kernel("elementwise_kernel", "[8, 2, 1]"), 9_000, 12_000, 6, 7),
    (MAIN, call("cudaMemcpyAsync"), 8_000, 8_200, 0),
    (COPIES, Op("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", bytes=63), 8_000, 11_000, 0, 9),
    (MAIN, call("cudaStreamSynchronize"), 9_000, 14_000, 0),
    (OTHER, op("autograd::engine::evaluate_function: A"), 15_000, 20_000),
)


def test_features_by_hand():
    got = {name: column.tolist() for name, column in features(SMALL, np.array([0, 10_000, 20_000])).items()}

    def share(*values: float) -> list[int]:
        return [round(255 * value) for value in values]

    assert got["position"] == share(0, 0.5)
    assert got["cpu_busy"] == share(0.82, 0.4)  # 0-4, 5-8.2, 9-14
    assert got["cpu_other_busy"] == share(0, 0.5)
    assert got["gpu_busy"] == share(0.5, 0.2)  # 5-12
    assert got["gpu_copy"] == share(0.2, 0.1)
    assert got["gpu_overlap"] == share(0.2, 0.1)  # 8-11 on both streams
    assert got["gpu_gap_inside"] == share(0.5, 0.8)
    assert got["gpu_gap"] == [round(7 * np.log2(5_001)), round(7 * np.log2(8_001))]
    assert got["gpu_gaps"] == [1, 1]  # 0-5 and 12-20
    assert got["queue"] == [0, 0]
    assert got["latency"] == [round(7 * np.log2(1 + (3_000 + 3_000 + 0) / 3)), 0]
    assert got["ops"] == [4, 1]
    assert got["top_ops"] == [2, 1]
    assert got["depth"] == [4, 0]  # two of four ops lie in another: half, in eighths
    assert got["op_mean"] == [round(7 * np.log2(3_501)), round(7 * np.log2(5_001))]
    assert got["distinct_ops"] == share(1, 1)
    assert got["repetition"] == share(0.25, 1)
    assert got["backward"] == share(0, 0.5)
    assert (got["to_calls"], got["casts"], got["matmuls"]) == ([1, 0], [1, 0], [1, 0])
    assert got["cast_time"] == share(0.25, 0)
    assert got["launches"] == [2, 0]
    assert got["launch_time"] == share(0.15, 0)
    assert got["syncs"] == [1, 0]
    assert got["sync_time"] == share(0.1, 0.4)
    assert got["sync_longest"] == [round(7 * np.log2(5_001))] * 2  # it reaches into both
    assert (got["kernels"], got["copy_calls"]) == ([2, 0], [1, 0])
    assert got["kernel_mean"] == [round(7 * np.log2(3_501)), 0]
    assert got["tiny_kernels"] == share(1, 0)
    assert got["small_grids"] == share(0.5, 0)
    assert got["other_thread"] == [0, 0]
    assert (got["htod"], got["pageable"], got["small_copies"]) == ([1, 0], [1, 0], [1, 0])
    assert got["copy_bytes"] == [42, 0]  # 7 log2(64)
    assert (got["elementwise_kernels"], got["matmul_kernels"]) == ([1, 0], [1, 0])
    assert got["tensor_cores"] == share(1, 0)
    untouched = {"optimizer", "dataloader", "scalars", "memsets", "collective_time", "overhead"}
    assert all(got[name] == [0, 0] for name in untouched)


def test_the_queue_counts_what_is_launched_and_has_not_begun():
    trace = small_trace(
        *((MAIN, call("cudaLaunchKernel"), 100 * i, 100 * i + 50) for i in range(4)),
        *((STREAM, kernel("k"), 1_000 * (i + 1), 1_000 * (i + 1) + 900, -1, i) for i in range(4)),
    )
    queue = features(trace, np.array([0, 250, 1_500, 3_000, 5_000]))["queue"]
    assert queue.tolist() == [0, 3, 3, 2]  # before 3000 two have begun


def test_counts_saturate_and_a_hostile_grid_is_harmless():
    many = [(MAIN, op("x"), 0, 1)] * 70_000
    odd = [(STREAM, kernel("k", grid), 0, 1) for grid in ("[1]", "{", json.dumps([9**20] * 3), '["a", 1, 1]')]
    got = features(small_trace(*many, *odd), np.array([0, 1]))
    assert got["ops"].tolist() == [65_535]
    assert got["small_grids"].tolist() == [0]


def test_the_table_has_the_schema_and_agrees_with_the_labels():
    record = random_record(1, state="costly")
    table = window_table(record)
    assert table.schema.equals(WINDOWS)
    assert table["start_ns"].to_pylist()[1:] == table["end_ns"].to_pylist()[:-1]
    assert table["end_ns"].to_pylist()[-1] == record.trace.duration_ns
    assert all(pa.types.is_unsigned_integer(WINDOWS.field(feature.name).type) for feature in FEATURES)
    for row in table.to_pylist():
        assert row["positive"] == bool(row["cpu_patterns"] or row["gpu_patterns"])
    syncs = [s for s in record.segments if record.instances[s.instance].pattern == "host_sync"]
    assert {s.lane_class for s in syncs} == {"cpu", "gpu"}
    for segment in syncs:  # all short: each has a window that says so
        column = table[f"{segment.lane_class}_patterns"].to_pylist()
        inside = (table["end_ns"].to_numpy() > segment.start_ns) & (
            table["start_ns"].to_numpy() < segment.end_ns
        )
        assert any("host_sync" in column[index] for index in np.flatnonzero(inside))
    steps = set(table["step"].to_pylist())
    assert {0, 1, 2} <= steps <= {-1, 0, 1, 2}


@pytest.mark.parametrize("gpu", [True, False])
def test_undecided_and_no_gpu(gpu):
    table = window_table(random_record(3, gpu=gpu, state="undecided"))
    assert not any(table["positive"].to_pylist())
    assert any(table["ignored"].to_pylist())
    if not gpu:
        assert not any(any(row) for row in table["gpu_ignored"].to_pylist())
        assert not any(table["gpu_gap"].to_pylist())


def test_an_empty_trace_has_one_empty_window():
    empty = Events(**{name: np.empty(0, dtype) for name, dtype in Events.DTYPES.items()})
    meta = dict.fromkeys(("trace_id", "task", "hardware_id", "split_unit"), "x")
    table = window_table(TraceRecord(Trace([], [], empty), meta))
    assert table.num_rows == 1
    assert not any(table[feature.name][0].as_py() for feature in FEATURES)
