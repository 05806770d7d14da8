"""What a build demands of segments: which laws hold, which honest traces keep them, and what breaks each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from traces import random_record

from torchtraceap.collect.cutting import keep_steps
from torchtraceap.collect.labelling import Armed, all_segments, label, number_steps
from torchtraceap.dataset import attribution
from torchtraceap.dataset.attribution import members, violations
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.labels.markers import PREFIX
from torchtraceap.labels.types import Instance, Segment, Source

DATA = Path(__file__).parent / "data" / "h200"
MAIN, AUTOGRAD, STREAM = range(3)
LANES = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1"), Lane("gpu", "stream 7", 0)]

# Two steps. The first launches a kernel late enough to run in the second; its backward runs on a thread of
# its own. The second replays a graph of two kernels by one call. The backlog at the start has no launch.
# lane, name, category, start, duration, parent, launch, forward
ROWS = [
    (MAIN, "ProfilerStep#0", "user_annotation", 0, 100, -1, -1, -1),  # 0
    (MAIN, "aten::clone", "cpu_op", 10, 30, 0, -1, -1),  # 1
    (MAIN, "aten::copy_", "cpu_op", 15, 20, 1, -1, -1),  # 2
    (MAIN, "cudaLaunchKernel", "cuda_runtime", 20, 5, 2, -1, -1),  # 3
    (MAIN, "aten::relu", "cpu_op", 50, 10, 0, -1, -1),  # 4
    (MAIN, "ProfilerStep#1", "user_annotation", 100, 100, -1, -1, -1),  # 5
    (MAIN, "cudaGraphLaunch", "cuda_runtime", 110, 5, 5, -1, -1),  # 6
    (AUTOGRAD, "CloneBackward0", "cpu_op", 70, 20, -1, -1, 1),  # 7
    (AUTOGRAD, "cudaLaunchKernel", "cuda_runtime", 75, 5, 7, -1, -1),  # 8
    (STREAM, "old_kernel", "kernel", 5, 10, -1, -1, -1),  # 9
    (STREAM, "copy_kernel", "kernel", 120, 10, 2, 3, -1),  # 10
    (STREAM, "grad_kernel", "kernel", 130, 10, 7, 8, -1),  # 11
    (STREAM, "graph_kernel_a", "kernel", 140, 10, 5, 6, -1),  # 12
    (STREAM, "graph_kernel_b", "kernel", 150, 10, 5, 6, -1),  # 13
]
CLONES = {1, 2, 3, 7, 8, 9, 10, 11}
GRAPH = {6, 12, 13}


def trace_of(rows: Iterable[tuple] = ROWS) -> Trace:
    ops: dict[tuple[str, str], int] = {}
    columns: dict[str, list[int]] = {name: [] for name in Events.DTYPES}
    for lane, name, category, *numbers in rows:
        row = [lane, ops.setdefault((name, category), len(ops)), *numbers]
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    events = Events(**{name: np.array(columns[name], dtype) for name, dtype in Events.DTYPES.items()})
    trace = Trace(LANES, [Op(*key) for key in ops], events)
    trace.check()
    return trace


def instance(pattern: str, source: Source = "injected") -> Instance:
    return Instance(
        pattern=pattern, variant="v", scope="local", source=source, state="benign", every_step=True, sites=1
    )


def record_of(trace: Trace, *labels: tuple[Instance, set[int]]) -> TraceRecord:
    """A record of which each instance has exactly the given members."""
    chosen = {i: np.isin(np.arange(len(trace)), list(rows)) for i, (_, rows) in enumerate(labels)}
    return TraceRecord(trace, {}, [one for one, _ in labels], all_segments(trace, chosen))


def catalogue(**mechanism: str) -> dict[str, SimpleNamespace]:
    """Stands for the catalogue: patterns by name, all of whose variants but ``marks`` are found alike."""
    return {
        name: SimpleNamespace(
            variant=lambda variant: variant,
            mechanism_of=lambda variant, own=own: "marker" if variant == "marks" else own,
        )
        for name, own in mechanism.items()
    }


@pytest.fixture(autouse=True)
def _mechanisms(monkeypatch):
    """Patterns named after their mechanism."""
    names = ("marker", "marker+backward", "selector")
    monkeypatch.setattr(attribution, "PATTERNS", catalogue(**{name: name for name in names}))


def test_lag_graph_replays_and_a_backlog_are_lawful():
    record = record_of(
        trace_of(), (instance("marker+backward"), CLONES), (instance("marker", "lookalike"), GRAPH)
    )
    assert list(violations(record)) == []
    by_name = {record.trace.names[s.first_event]: (s.step, s.event_count) for s in record.segments}
    assert by_name["old_kernel"] == (-1, 1)
    assert by_name["copy_kernel"] == (0, 2)  # runs in step 1, together with the kernel of the backward op
    assert by_name["graph_kernel_a"] == (1, 2)


@pytest.mark.parametrize(
    ("pattern", "rows", "says"),
    [
        ("marker", {1, 3, 10}, r"event 2 \(aten::copy_\) lies below a member of instance 0 \(marker/v\)"),
        ("marker", {1, 2, 3}, r"event 10 \(copy_kernel\) .* was launched by one"),
        ("marker", {6, 12}, r"event 13 \(graph_kernel_b\)"),
        ("marker", {1, 2, 3, 10, 11}, r"event 11 \(grad_kernel\) .* what launched it is not"),
        ("marker+backward", {1, 2, 3, 10}, r"event 7 \(CloneBackward0\) is the backward op of a member"),
        ("selector", {1, 3, 10}, r"event 2 \(aten::copy_\) lies below a member"),
    ],
)
def test_what_is_missing_or_too_much_is_named(pattern, rows, says):
    (problem,) = violations(record_of(trace_of(), (instance(pattern), rows)))
    assert re.search(says, problem), problem


def test_the_backward_law_is_that_of_its_mechanism_alone():
    for pattern, source in (("marker", "injected"), ("selector", "injected"), ("marker+backward", "native")):
        record = record_of(trace_of(), (instance(pattern, source), {1, 2, 3, 10}))
        assert list(violations(record)) == [], (pattern, source)


def test_a_lookalike_obeys_the_laws_of_its_own_mechanism():
    twin = msgspec.structs.replace(instance("selector", "lookalike"), variant="marks")
    (problem,) = violations(record_of(trace_of(), (twin, {10})))
    assert "what launched it is not" in problem
    twin = msgspec.structs.replace(instance("marker+backward", "lookalike"), variant="marks")
    assert list(violations(record_of(trace_of(), (twin, {1, 2, 3, 10})))) == []


def test_a_selector_may_hold_a_kernel_without_its_call_and_leaves_others_theirs():
    assert list(violations(record_of(trace_of(), (instance("selector"), {10})))) == []
    assert len(list(violations(record_of(trace_of(), (instance("marker"), {10}))))) == 1
    theirs = instance("marker"), {3, 10}
    assert list(violations(record_of(trace_of(), (instance("selector"), {1, 2}), theirs))) == []
    assert len(list(violations(record_of(trace_of(), (instance("marker"), {1, 2}), theirs)))) == 1


def test_a_long_list_of_events_is_counted_and_not_told():
    (problem,) = violations(record_of(trace_of(), (instance("marker"), {6})))
    assert problem.endswith("(the first of 2)")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"event_count": 0}, "has no events"),
        ({"event_count": 5}, "has events of another lane"),
        ({"lane": MAIN}, "has events of another lane"),
        ({"lane_class": "gpu"}, "has the wrong lane class"),
        ({"step": -1}, "has events of another step"),
        ({"start_ns": 69}, "does not begin and end with its events"),
        ({"end_ns": 10_000}, "does not begin and end with its events"),
    ],
)
def test_a_segment_that_is_not_what_it_says(changes, says):
    record = record_of(trace_of(), (instance("marker+backward"), CLONES))
    index = next(i for i, s in enumerate(record.segments) if s.lane == AUTOGRAD)
    record.segments[index] = msgspec.structs.replace(record.segments[index], **changes)
    assert list(violations(record)) == [f"segment {index} {says}"]


def halves(trace: Trace, segment: Segment) -> list[Segment]:
    """The same events as two segments."""
    first, count = segment.first_event, segment.event_count
    rows = np.zeros((2, len(trace)), dtype=bool)
    rows[0, first : first + count // 2] = rows[1, first + count // 2 : first + count] = True
    return [all_segments(trace, {segment.instance: half})[0] for half in rows]


def test_segments_are_whole_runs_and_each_once():
    record = record_of(trace_of(), (instance("marker+backward"), CLONES))
    whole = record.segments
    longest = max(whole, key=lambda one: one.event_count)
    rest = [one for one in whole if one is not longest]
    record.segments = [*halves(record.trace, longest), *rest]
    (problem,) = violations(record)
    assert "are not the maximal runs" in problem
    record.segments = [*whole, whole[0]]
    (problem,) = violations(record)
    assert "are not the maximal runs" in problem


# -- profiles of an H200, labelled as a session does ---------------------------------------------------

RECORDED = {
    "dtype_ping_pong_train": ("marker+backward", 0),
    "host_sync_infer": ("marker", 1),
    "pageable_h2d_infer": ("marker", 0),
}


def recorded(name: str) -> TraceRecord:
    mechanism, placement = RECORDED[name]
    raw = read_trace(DATA / f"{name}.json.gz")
    marker = next(op.name for op in raw.ops if op.name.startswith(PREFIX))
    secret = marker.removeprefix(PREFIX).split("/")[0]
    trace, segments = label(raw, secret, {placement: Armed(0, mechanism)})
    return TraceRecord(trace, {}, [instance(mechanism)], segments)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_labels_are_lawful_whole_and_cut(name):
    record = recorded(name)
    assert record.segments
    assert list(violations(record)) == []
    for first, count in ((0, 1), (1, 2), (2, 1)):
        trace, segments = keep_steps(record.trace, record.segments, first, count)
        assert list(violations(TraceRecord(number_steps(trace), {}, record.instances, segments))) == []


@pytest.mark.parametrize("name", RECORDED)
def test_no_gpu_segment_of_recorded_labels_can_go(name):
    record = recorded(name)
    on_gpu = [i for i, s in enumerate(record.segments) if s.lane_class == "gpu"]
    assert on_gpu
    for index in on_gpu:
        fewer = [s for i, s in enumerate(record.segments) if i != index]
        (problem,) = violations(TraceRecord(record.trace, {}, record.instances, fewer))
        assert "was launched by one, but is in no segment" in problem


@pytest.mark.parametrize("name", RECORDED)
def test_no_gpu_event_can_be_added_to_recorded_labels(name):
    record = recorded(name)
    own = members(record.segments, 0, len(record.trace))
    others = np.flatnonzero(record.trace.on_gpu & ~own)[::50]
    assert len(others)
    for event in others:
        segments = all_segments(record.trace, {0: own | (np.arange(len(own)) == event)})
        (problem,) = violations(TraceRecord(record.trace, {}, record.instances, segments))
        assert f"event {event} " in problem
        assert "what launched it is not" in problem


def test_random_records_are_lawful(monkeypatch):
    names = ("host_sync", "recomputed_constant", "redundant_copy", "unfused_optimizer")
    monkeypatch.setattr(attribution, "PATTERNS", catalogue(**dict.fromkeys(names, "marker")))
    for seed in range(8):
        assert list(violations(random_record(seed, gpu=seed % 3 > 0))) == []
