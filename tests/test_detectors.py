"""Rules on traces built by hand: what is found, where, and what it is said to cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from traces import random_record

from torchtraceap.dataset.parquet import write_table, write_traces
from torchtraceap.dataset.schema import HARDWARE
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.eval.detector import DETECTORS, Detector, TraceView, builtin_card, run, run_split
from torchtraceap.eval.detectors import rules
from torchtraceap.eval.facts import Facts, union
from torchtraceap.eval.findings import Attribution, Finding
from torchtraceap.eval.repeats import Repeat, tandem_repeats
from torchtraceap.eval.submission import Detection, Submission
from torchtraceap.labels.pattern import PATTERNS

IMAGE = [8, 3, 32, 32]


@dataclass
class Builder:
    """A trace of one thread and one stream, written down event by event in order of time."""

    rows: list[tuple[int, Op, int, int, int, int, int]] = field(default_factory=list)

    def cpu(self, name, start, dur, parent=-1, category="cpu_op", shapes=(), types=(), forward=-1) -> int:
        op = Op(name, category, json.dumps(shapes) if shapes else "", json.dumps(types) if types else "")
        self.rows.append((0, op, start, dur, parent, -1, forward))
        return len(self.rows) - 1

    def call(self, name, start, dur, parent) -> int:
        return self.cpu(name, start, dur, parent, "cuda_runtime")

    def gpu(self, name, start, dur, call, category="kernel", size=0) -> int:
        self.rows.append((1, Op(name, category, bytes=size), start, dur, self.rows[call][4], call, -1))
        return len(self.rows) - 1

    def step(self, number, start, dur) -> int:
        return self.cpu(f"ProfilerStep#{number}", start, dur, category="user_annotation")

    def trace(self) -> Trace:
        """Sorted, with indices that follow."""
        order = sorted(
            range(len(self.rows)), key=lambda i: (self.rows[i][0], self.rows[i][2], -self.rows[i][3])
        )
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        ops = list(dict.fromkeys(row[1] for row in self.rows))
        table = [
            (lane, ops.index(op), start, dur, place[parent], place[launch], place[forward])
            for lane, op, start, dur, parent, launch, forward in (self.rows[i] for i in order)
        ]
        columns = zip(Events.DTYPES.items(), np.array(table, dtype=np.int64).T, strict=True)
        events = Events(**{name: values.astype(dtype) for (name, dtype), values in columns})
        trace = Trace([Lane("cpu", "thread 0"), Lane("gpu", "stream 7", 0)], ops, events)
        trace.check()
        return trace


def detect(trace: Trace) -> list[tuple[str, str, int, int, float]]:
    found = DETECTORS["rules"].detect(TraceView("t", trace))
    assert all(row.trace_id == "t" for row in found)
    return sorted((row.pattern, row.lane, row.start_ns, row.end_ns, round(row.score, 4)) for row in found)


def test_union_joins_overlapping_and_touching_intervals():
    start, end = np.array([30, 0, 5, 10]), np.array([40, 8, 6, 20])
    assert union(start, end).tolist() == [[0, 8], [10, 20], [30, 40]]
    assert union(np.array([0, 5]), np.array([5, 9])).tolist() == [[0, 9]]
    assert union(np.array([], dtype=int), np.array([], dtype=int)).shape == (0, 2)


def test_tandem_repeats_reports_each_stretch_once_with_its_shortest_period():
    assert tandem_repeats(np.array([9, 1, 2, 1, 2, 1, 2, 1, 2, 8]), 4) == [Repeat(1, 8, 2)]
    assert tandem_repeats(np.array([5] * 8), 2) == [Repeat(0, 8, 1)]
    assert tandem_repeats(np.array([1, 2, 1, 2, 1, 2]), 4) == []
    assert tandem_repeats(np.array([1, 2, 3] * 4 + [1]), 4, longest_period=2) == []
    assert Repeat(0, 13, 3).times == 4


def busy_from_0_to_100_and_150_to_200() -> Builder:
    build = Builder()
    build.step(0, 0, 1000)
    for start, dur in ((0, 100), (150, 50)):
        call = build.call("cudaLaunchKernel", start, 1, 0)
        build.gpu("kernel", start, dur, call)
    return build


@pytest.mark.parametrize(
    ("start", "end", "lost"),
    [
        (20, 60, 0),  # the GPU has work all the time
        (20, 110, 50),  # it idles from 100 to 150
        (95, 110, 15),  # as long, but the wait is shorter
        (120, 130, 10),
        (160, 300, 100),  # nothing comes after
    ],
)
def test_a_wait_costs_what_the_gpu_idles_and_never_more_than_itself(start, end, lost):
    assert Facts(busy_from_0_to_100_and_150_to_200().trace()).stall_ns(start, end) == lost


def test_a_wait_without_gpu_costs_itself():
    build = Builder()
    build.step(0, 0, 1000)
    assert Facts(build.trace()).stall_ns(200, 450) == 250


def test_work_is_weighed_by_how_busy_the_gpu_is():
    facts = Facts(busy_from_0_to_100_and_150_to_200().trace())
    assert facts.busy_share(0) == 0.15
    assert facts.bound_ns(cpu_ns=100, gpu_ns=20, step=0) == pytest.approx(0.15 * 20 + 0.85 * 100)


def test_a_step_takes_as_long_as_its_gpu_work_when_the_host_runs_ahead():
    build = Builder()
    build.step(0, 0, 100)
    build.gpu("kernel", 500, 400, build.call("cudaLaunchKernel", 10, 1, 0))
    facts = Facts(build.trace())
    assert facts.step_ns(0) == 400
    assert facts.busy_share(0) == 1.0


def test_an_event_of_two_findings_belongs_to_the_first_and_pieces_add_their_findings():
    build = Builder()
    build.step(0, 0, 1000)
    build.cpu("aten::clone", 100, 100, 0)
    build.cpu("aten::clone", 200, 50, 0)
    facts = Facts(build.trace())
    first, second = (
        Finding("redundant_copy", (1, 2), avoidable=1.0),
        Finding("redundant_copy", (2,), avoidable=1.0),
    )
    found = Attribution(facts, [first, second])
    assert found.lost_ns.tolist() == [150, 0]
    (piece,) = Attribution(facts, [Finding("redundant_copy", (i,), avoidable=1.0) for i in (1, 2)]).pieces()
    assert (piece.start_ns, piece.end_ns, piece.event_count, piece.share) == (
        100, 250, 2, pytest.approx(0.15),
    )  # fmt: skip


def sync_trace(read: str) -> Trace:
    """A mean of an activation, read by the host while a kernel of 300 ns runs, in a step of 1000 ns."""
    build = Builder()
    build.step(0, 0, 1000)
    conv = build.cpu("aten::conv2d", 0, 50, 0)
    build.gpu("conv", 50, 300, build.call("cudaLaunchKernel", 20, 10, conv))
    mean = build.cpu("aten::mean", 60, 20, 0)
    build.gpu("reduce", 350, 20, build.call("cudaLaunchKernel", 65, 10, mean))
    item = build.cpu(read, 100, 300, 0)
    build.gpu(
        "Memcpy DtoH (Device -> Pinned)",
        370,
        10,
        build.call("cudaMemcpyAsync", 110, 10, item),
        "gpu_memcpy",
        4,
    )
    build.call("cudaStreamSynchronize", 125, 265, item)
    after = build.cpu("aten::relu", 500, 50, 0)
    build.gpu("relu", 530, 100, build.call("cudaLaunchKernel", 510, 10, after))
    return build.trace()


def test_host_sync_is_the_reduction_and_the_read_and_costs_the_gap_behind_it():
    # The host waits from 100 to 390. The GPU works until 380, and again from 530: 150 of 1000 are lost.
    assert detect(sync_trace("aten::item")) == [
        ("host_sync", "cpu", 60, 400, 0.15),
        ("host_sync", "gpu", 350, 380, 0.15),
    ]


def test_a_value_that_is_not_read_is_no_sync():
    build = Builder()
    build.step(0, 0, 1000)
    mean = build.cpu("aten::mean", 60, 20, 0)
    build.gpu("reduce", 350, 20, build.call("cudaLaunchKernel", 65, 10, mean))
    build.cpu("aten::item", 100, 300, 0)  # of a tensor on the CPU: no runtime call below it
    assert detect(build.trace()) == []


def test_waiting_after_the_last_step_is_no_sync():
    build = busy_from_0_to_100_and_150_to_200()
    build.cpu("cudaDeviceSynchronize", 1100, 900, category="cuda_runtime")
    assert detect(build.trace()) == []


def copies(kind: str, sizes: list[int]) -> Trace:
    """Tensors copied one after the other in a step of 10 us, then a kernel."""
    build = Builder()
    build.step(0, 0, 10_000)
    for i, size in enumerate(sizes):
        to = build.cpu("aten::to", 1000 * i, 1000, 0)
        call = build.call("cudaMemcpyAsync", 1000 * i + 100, 800, to)
        build.gpu(f"Memcpy HtoD ({kind} -> Device)", 1000 * i + 300, 500, call, "gpu_memcpy", size)
    relu = build.cpu("aten::relu", 5000, 100, 0)
    build.gpu("relu", 5050, 1000, build.call("cudaLaunchKernel", 5010, 10, relu))
    return build.trace()


def test_pageable_copies_of_a_batch_are_one_site_with_the_small_labels():
    found = detect(copies("Pageable", [1_000_000, 64]))
    assert [row[:4] for row in found] == [
        ("pageable_h2d", "cpu", 0, 2000),
        ("pageable_h2d", "gpu", 300, 1800),
    ]
    # First copy: idle 100-300 and 800-1300 is 700, and 500 of copying. Second: idle 1100-1300 and 1800-5050,
    # more than the wait of 900, and 500.
    assert found[0][4] == (700 + 500 + 900 + 500) / 10_000


@pytest.mark.parametrize(
    ("kind", "sizes"), [("Pinned", [1_000_000]), ("Pageable", [64]), ("Pageable", [65_535])]
)
def test_pinned_or_small_copies_are_fine(kind, sizes):
    assert detect(copies(kind, sizes)) == []


@pytest.mark.parametrize(("dur", "scores"), [(60, [0.06]), (50, [0.05]), (49, [])])
def test_loader_counts_from_five_percent_of_the_step(dur, scores):
    build = Builder()
    build.step(0, 0, 1000)
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    build.cpu(name, 100, dur, 0, "user_annotation")
    assert [row[4] for row in detect(build.trace())] == scores


def loop_trace(times: int, leading: int, backward: bool = False, join: str = "aten::cat") -> Trace:
    build = Builder()
    build.step(0, 0, 10_000)
    convs = []
    for i in range(times):
        build.cpu("aten::slice", 1000 + 100 * i, 10, 0, shapes=[IMAGE, [], [], [], []])
        convs.append(
            build.cpu("aten::conv2d", 1020 + 100 * i, 80, 0, shapes=[[leading, 3, 32, 32], [3, 3, 3, 3]])
        )
    build.cpu(join, 1000 + 100 * times, 50, 0, shapes=[[[1, 3, 32, 32]] * times, []])
    build.cpu("aten::relu", 5000, 100, 0, shapes=[IMAGE])
    for i, conv in enumerate(convs if backward else []):
        build.cpu("ConvolutionBackward0", 6000 + 100 * i, 100, 0, forward=conv)
    return build.trace()


def test_loop_is_found_from_the_first_slice_to_the_join():
    # 4 x (10 + 80) and the join's 50, of which a batch of one would remain a quarter.
    expected = ("python_loop_over_batch", "cpu", 1000, 1450, round(410 * 0.75 / 10_000, 4))
    assert detect(loop_trace(4, leading=1)) == [expected]


def test_loop_owns_its_backward_ops():
    found = detect(loop_trace(4, leading=1, backward=True))
    assert [row[2:4] for row in found] == [(1000, 1450), (6000, 6400)]
    assert found[0][4] == round((410 + 400) * 0.75 / 10_000, 4)


@pytest.mark.parametrize(("times", "leading"), [(3, 1), (4, 8)])
def test_few_repetitions_or_whole_batches_are_no_loop(times, leading):
    assert detect(loop_trace(times, leading)) == []


def test_a_loop_that_only_takes_views_is_none():
    build = Builder()
    build.step(0, 0, 10_000)
    build.cpu("aten::unbind", 900, 50, 0, shapes=[IMAGE, []])
    for i in range(8):
        build.cpu("aten::unsqueeze", 1000 + 100 * i, 80, 0, shapes=[[3, 32, 32], []])
    assert detect(build.trace()) == []


def test_a_loop_is_found_without_shapes():
    build = Builder()
    build.step(0, 0, 10_000)
    build.cpu("aten::unbind", 900, 100, 0)
    for i in range(8):
        build.cpu("aten::conv2d", 1000 + 100 * i, 100, 0)
    build.cpu("aten::stack", 1800, 100, 0)
    assert [row[:4] for row in detect(build.trace())] == [("python_loop_over_batch", "cpu", 900, 1900)]


def cast_trace(types: tuple[str, str], between: list[str], back_shape=IMAGE) -> Trace:
    build = Builder()
    build.step(0, 0, 10_000)

    def cast(start, source, target, shape):
        to = build.cpu("aten::to", start, 100, 0, shapes=[shape], types=[source])
        build.cpu(
            "aten::copy_", start + 10, 80, to, shapes=[shape, shape, []], types=[target, source, "Scalar"]
        )

    cast(1000, *types, IMAGE)
    for i, name in enumerate(between):
        build.cpu(name, 1100 + 100 * i, 100, 0, shapes=[IMAGE], types=[types[1]])
    cast(1100 + 100 * len(between), *types[::-1], back_shape)
    return build.trace()


@pytest.mark.parametrize(
    ("types", "between", "end"),
    [
        (("float", "double"), [], 1200),
        (("c10::BFloat16", "float"), ["aten::mul"], 1300),
        (("float", "c10::Half"), [], 1200),
        (("float", "c10::Half"), ["aten::view"], 1300),
    ],
)
def test_a_cast_there_and_back_is_found_with_what_lies_between(types, between, end):
    expected = ("dtype_ping_pong", "cpu", 1000, end, (end - 1000) / 10_000)
    assert detect(cast_trace(types, between)) == [expected]


@pytest.mark.parametrize(
    ("types", "between", "back_shape"),
    [
        (("c10::BFloat16", "float"), ["aten::layer_norm"], IMAGE),  # autocast wants it so
        (("float", "c10::BFloat16"), ["aten::conv2d"], IMAGE),  # mixed precision
        (("c10::BFloat16", "float"), ["aten::mul"] * 5, IMAGE),  # too far apart
        (("float", "double"), [], [8, 3]),  # another tensor
        (("float", "long int"), [], IMAGE),  # no floating type
    ],
)
def test_casts_with_a_reason_are_none(types, between, back_shape):
    assert detect(cast_trace(types, between, back_shape)) == []


def test_clones_of_the_model_are_found_and_those_inside_of_ops_are_not():
    build = Builder()
    build.step(0, 0, 10_000)
    build.cpu("aten::clone", 1000, 100, 0)
    reshape = build.cpu("aten::reshape", 2000, 200, 0)
    build.cpu("aten::clone", 2010, 100, reshape)
    build.cpu("aten::chunk", 3000, 100, 0)
    build.cpu("aten::cat", 3100, 100, 0)
    build.cpu("aten::cat", 4000, 100, 0)
    assert detect(build.trace()) == [
        ("redundant_copy", "cpu", 1000, 1100, 0.01),
        ("redundant_copy", "cpu", 3000, 3200, 0.02),
    ]


def optimizer_trace(optimizer: str, ops: list[str]) -> Trace:
    build = Builder()
    build.step(0, 0, 10_000)
    step = build.cpu(f"Optimizer.step#{optimizer}.step", 1000, 4000, 0, "user_annotation")
    for i, name in enumerate(ops):
        op = build.cpu(name, 1000 + 100 * i, 90, step)
        build.cpu("aten::empty", 1010 + 100 * i, 10, op)
    return build.trace()


@pytest.mark.parametrize(
    ("optimizer", "ops", "score"),
    [
        ("AdamW", ["aten::add_"] * 32, 0.3),
        ("SGD", ["aten::_foreach_add_"] * 4, 0.2),
        ("AdamW", ["aten::add_"] * 31, None),
        ("AdamW", ["aten::_foreach_add_", "aten::_fused_adamw_"] * 4, None),
        ("RMSprop", ["aten::add_"] * 32, None),
    ],
)
def test_optimizers_that_could_be_fused(optimizer, ops, score):
    expected = [] if score is None else [("unfused_optimizer", "cpu", 1000, 5000, score)]
    assert detect(optimizer_trace(optimizer, ops)) == expected


def test_every_rule_is_of_a_pattern_in_the_catalogue():
    assert set(rules.RULES) <= set(PATTERNS.names())


def test_a_detector_sees_the_whitelist_and_no_more():
    record = random_record(0)
    record.meta |= {"pair_id": "p", "gpu_busy": 0.5, "batch_size": 32}
    view = TraceView.of(record, {"device_name": "GPU"})
    assert set(view.meta) <= {
        "hardware_id", "task", "mode", "precision", "batch_size", "input_shape", "steps",
    }  # fmt: skip
    assert view.meta["batch_size"] == 32
    assert set(vars(view)) == {"trace_id", "trace", "meta", "hardware"}


def without_steps(record: TraceRecord) -> TraceRecord:
    keep = np.array([not op.name.startswith("ProfilerStep#") for op in record.trace.ops])
    return TraceRecord(record.trace.select(keep[record.trace.events.op])[0], record.meta)


def without_shapes(record: TraceRecord) -> TraceRecord:
    trace = record.trace
    ops = [Op(op.name, op.category, grid=op.grid, block=op.block, bytes=op.bytes) for op in trace.ops]
    return TraceRecord(Trace(trace.lanes, ops, trace.events), record.meta)


@pytest.mark.parametrize("name", ["rules", "random", "everything", "nothing"])
def test_detectors_cope_with_every_kind_of_trace_and_hand_in_valid_rows(name):
    empty = Trace([], [], Events(**{column: np.empty(0, dtype) for column, dtype in Events.DTYPES.items()}))
    records = [
        *(random_record(seed, events=300, gpu=seed % 2 == 0) for seed in range(4)),
        without_steps(random_record(4)),
        without_shapes(random_record(5)),
        TraceRecord(empty, {"trace_id": "empty"}),
    ]
    seen: list[int] = []
    submission = run(DETECTORS[name], records, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert isinstance(submission, Submission)
    durations = {record.trace_id: record.trace.duration_ns for record in records}
    for row in submission.detections.to_pylist():
        assert 0 <= row["start_ns"] <= row["end_ns"] <= durations[row["trace_id"]]
        assert 0 <= row["score"] <= 1
        assert row["lane"] in PATTERNS[row["pattern"]].lanes


def test_random_depends_on_the_trace_id_alone():
    record, other = random_record(1), random_record(1)
    other.meta["trace_id"] = "another"
    detector = DETECTORS["random"]
    first = detector.detect(TraceView.of(record))
    assert first == detector.detect(TraceView.of(record))
    places = [(row.pattern, row.start_ns) for row in detector.detect(TraceView.of(other))]
    assert [(row.pattern, row.start_ns) for row in first] != places


def test_everything_covers_the_trace_once_a_pattern_and_lane_class():
    record = random_record(2)
    found = DETECTORS["everything"].detect(TraceView.of(record))
    whole = {(row.start_ns, row.end_ns) for row in found}
    assert whole == {(0, record.trace.duration_ns)}
    assert len(found) == sum(len(pattern.lanes) for pattern in PATTERNS)
    assert Detection(record.trace_id, "host_sync", "gpu", 0, record.trace.duration_ns, 1.0) in found


class Spy(Detector):
    """Reports the whole trace as what its hardware is called."""

    name = "spy"

    def card(self):
        return builtin_card(self.name, "A test.", 0.0)

    def detect(self, view):
        name = str(view.hardware.get("device_name"))
        return [Detection(view.trace_id, name, "cpu", 0, view.trace.duration_ns, 1.0)]


def test_a_split_is_run_with_the_row_of_its_hardware(tmp_path):
    records = [random_record(seed) for seed in range(3)]
    records[0].meta["hardware_id"] = "known"
    row = {field.name: "" if field.type == pa.string() else 1 for field in HARDWARE}
    row |= {"hardware_id": "known", "device_name": "A GPU", "emulated": False}
    write_traces(tmp_path / "data/traces-validation-00000-of-00001.parquet", records)
    write_table(
        tmp_path / "data/hardware-train-00000-of-00001.parquet",
        pa.Table.from_pylist([row], schema=HARDWARE),
        HARDWARE,
    )
    found = run_split(Spy(), tmp_path, "validation").detections.to_pylist()
    assert [row["trace_id"] for row in found] == [record.trace_id for record in records]
    assert [row["pattern"] for row in found] == ["A GPU", "None", "None"]


@pytest.mark.parametrize(
    ("split", "message"), [("dev", "unknown split 'dev'"), ("test", "no data/traces-test")]
)
def test_a_missing_split_is_named(tmp_path, split, message):
    with pytest.raises(UserError, match=message):
        run_split(Spy(), tmp_path, split)
