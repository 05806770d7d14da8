"""From a profile with markers to a trace with segments and without them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from torchtraceap.collect.cutting import keep_steps
from torchtraceap.collect.labelling import Armed, label, number_steps, strip
from torchtraceap.collect.loop import Placement
from torchtraceap.collect.profiling import LEAD_IN, PROFILED_STEPS, profile_steps
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.labels.markers import PREFIX, Marker, marker_name, parse_marker
from torchtraceap.labels.pattern import ModuleSite, Site
from torchtraceap.labels.types import Segment

pytestmark = pytest.mark.usefixtures("one_thread")


def test_marker_names_round_trip() -> None:
    for marker in (Marker(0, 0, True), Marker(3, 11, False)):
        name = marker_name("ab12", marker)
        assert name.startswith(PREFIX)
        assert parse_marker("ab12", name) == marker
        assert parse_marker("other", name) is None
    assert parse_marker("ab12", "aten::add") is None


# -- a trace by hand ----------------------------------------------------------------------------------

MAIN, STREAM = 0, 1
ON, OFF, FOREIGN = marker_name("s", Marker(5, 0, True)), marker_name("s", Marker(5, 1, False)), "ttap-x/5/0/1"

# lane, name, category, start, duration, parent, launch, forward
ROWS = [
    (MAIN, "ProfilerStep#12", "user_annotation", 100, 900, -1, -1, -1),  # 0
    (MAIN, "aten::conv", "cpu_op", 110, 90, 0, -1, -1),  # 1
    (MAIN, ON, "user_annotation", 200, 100, 0, -1, -1),  # 2
    (MAIN, "aten::clone", "cpu_op", 210, 80, 2, -1, -1),  # 3
    (MAIN, "aten::copy_", "cpu_op", 220, 60, 3, -1, -1),  # 4
    (MAIN, "cudaLaunchKernel", "cuda_runtime", 230, 10, 4, -1, -1),  # 5
    (MAIN, OFF, "user_annotation", 300, 50, 0, -1, -1),  # 6
    (MAIN, "aten::relu", "cpu_op", 310, 30, 6, -1, -1),  # 7
    (MAIN, FOREIGN, "user_annotation", 360, 20, 0, -1, -1),  # 8
    (MAIN, "aten::tanh", "cpu_op", 365, 5, 8, -1, -1),  # 9
    (MAIN, "CloneBackward0", "cpu_op", 500, 40, 0, -1, 3),  # 10
    (MAIN, "ReluBackward0", "cpu_op", 600, 40, 0, -1, 7),  # 11
    (MAIN, "ProfilerStep#101", "user_annotation", 1000, 500, -1, -1, -1),  # 12
    (MAIN, "aten::conv", "cpu_op", 1100, 90, 12, -1, -1),  # 13
    (STREAM, "copy_kernel", "kernel", 1200, 300, 4, 5, -1),  # 14, in the time of the next step
]


def by_hand(rows=ROWS) -> Trace:
    ops: dict[tuple[str, str], int] = {}
    columns = {name: [] for name in Events.DTYPES}
    for lane, name, category, *numbers in rows:
        row = [lane, ops.setdefault((name, category), len(ops)), *numbers]
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    events = Events(**{name: np.array(columns[name], dtype) for name, dtype in Events.DTYPES.items()})
    lanes = [Lane("cpu", "thread 0"), Lane("gpu", "stream 7", 0)]
    return Trace(lanes, [Op(*key) for key in ops], events)


def labelled(backward: bool) -> tuple[Trace, list[Segment]]:
    return label(by_hand(), "s", {5: Armed(2, "marker+backward" if backward else "marker")})


def test_segments_of_a_trace_by_hand() -> None:
    trace, segments = labelled(backward=True)
    # Time starts at the first event that is kept; three markers ahead of CloneBackward0 are gone.
    assert segments == [
        Segment(
            instance=2, lane=MAIN, lane_class="cpu", step=0, start_ns=110, end_ns=190, first_event=2,
            event_count=3,
        ),
        Segment(
            instance=2, lane=MAIN, lane_class="cpu", step=0, start_ns=400, end_ns=440, first_event=7,
            event_count=1,
        ),
        Segment(
            instance=2, lane=STREAM, lane_class="gpu", step=0, start_ns=1100, end_ns=1400, first_event=11,
            event_count=1,
        ),
    ]  # fmt: skip
    assert trace.names[2:5].tolist() == ["aten::clone", "aten::copy_", "cudaLaunchKernel"]
    assert trace.names[7] == "CloneBackward0"
    assert trace.names[11] == "copy_kernel"
    trace.check()


def test_backward_only_where_the_mechanism_says_so() -> None:
    trace, segments = labelled(backward=False)
    assert [trace.names[s.first_event] for s in segments] == ["aten::clone", "copy_kernel"]


def test_every_marker_goes_and_its_children_move_up() -> None:
    trace, _ = labelled(backward=True)
    assert len(trace) == len(ROWS) - 3
    assert not any(PREFIX in op.name for op in trace.ops)
    for name in ("aten::clone", "aten::relu", "aten::tanh"):
        (row,) = np.flatnonzero(trace.names == name)
        assert trace.names[trace.events.parent[row]] == "ProfilerStep#0"
    (backward,) = np.flatnonzero(trace.names == "ReluBackward0")
    assert trace.names[trace.events.forward[backward]] == "aten::relu"


def test_steps_are_numbered_from_zero_by_number_and_not_by_name() -> None:
    trace, _ = labelled(backward=True)
    steps = [name for name in trace.names.tolist() if name.startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#0", "ProfilerStep#1"]  # as text, #101 comes before #12
    assert number_steps(trace) == trace


def test_decoys_leave_no_segments() -> None:
    rows = [row if row[1] != ON else (row[0], OFF, *row[2:]) for row in ROWS]
    trace, segments = label(by_hand(rows), "s", {5: Armed(0, "marker+backward")})
    assert segments == []
    assert trace.events.arrays().keys() == Events.DTYPES.keys()
    same, _ = labelled(backward=True)
    assert trace == same  # where a marker was on cannot be told from where it was off


def test_a_marker_of_nothing_armed_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="placement 5 acted without being armed"):
        label(by_hand(), "s", {0: Armed(0, "marker")})


def test_a_marker_around_nothing_makes_no_segment() -> None:
    rows = [
        (MAIN, ON, "user_annotation", 0, 10, -1, -1, -1),
        (MAIN, "aten::add", "cpu_op", 20, 5, -1, -1, -1),
    ]
    trace, segments = label(by_hand(rows), "s", {5: Armed(0, "marker+backward")})
    assert segments == []
    assert trace.names.tolist() == ["aten::add"]


def test_two_placements_in_one_trace() -> None:
    rows = list(ROWS)
    rows[6] = (MAIN, marker_name("s", Marker(4, 0, True)), *ROWS[6][2:])
    trace, segments = label(
        by_hand(rows), "s", {4: Armed(0, "marker+backward"), 5: Armed(1, "marker+backward")}
    )
    found = [(s.instance, trace.names[s.first_event]) for s in segments]
    assert found == [
        (1, "aten::clone"),
        (0, "aten::relu"),
        (1, "CloneBackward0"),
        (0, "ReluBackward0"),
        (1, "copy_kernel"),
    ]


# -- real profiles on a CPU ---------------------------------------------------------------------------


def softplus_twice(y: torch.Tensor) -> torch.Tensor:
    """Operators that the model has nowhere else."""
    return nn.functional.softplus(nn.functional.softplus(y))


def profiled(mode, *placements: Placement) -> Trace:
    loop = tiny.WithoutWorkers(tiny.spec(), mode, 4, torch.device("cpu"), secret="s", seed=1)
    calls = loop.module_calls()
    for placement in placements:
        placement.sites[:] = [ModuleSite(one, softplus_twice, "after") for one in calls]
        loop.install(placement)
    for _ in range(2):
        loop.step()
    return profile_steps(loop, 0)


def published(trace: Trace, segments: list[Segment]) -> tuple[Trace, list[Segment]]:
    """Without the lead-in."""
    trace, segments = keep_steps(trace, segments, LEAD_IN, PROFILED_STEPS)
    return number_steps(trace), segments


def placed(index: int, acting: set[int], steps=None, armed: bool = True) -> Placement:
    sites: list[Site] = []
    return Placement(index, sites, frozenset(acting), steps, armed)


def is_ours(trace: Trace) -> np.ndarray:
    return np.char.find(np.char.lower(trace.names.astype(str)), "softplus") >= 0


def members(trace: Trace, segments: list[Segment]) -> np.ndarray:
    inside = np.zeros(len(trace), dtype=bool)
    for s in segments:
        inside[s.first_event : s.first_event + s.event_count] = True
    return inside


def test_training_profile() -> None:
    acting = {1, 6}
    marked = profiled("train", placed(0, acting, frozenset({0, 2})))
    trace, segments = published(*label(marked, "s", {0: Armed(0, "marker+backward")}))
    trace.check()
    inside, ours = members(trace, segments), is_ours(trace)
    assert ours.any()
    assert not (ours & ~inside).any()  # every injected op and its backward
    # What else is inside are their descendants: above each lies one of ours.
    for row in np.flatnonzero(inside & ~ours):
        while row >= 0 and not ours[row]:
            row = trace.events.parent[row]
        assert row >= 0
    # Two places, forward and backward, in two of three steps. The two ops of a place make one run; of the
    # backward pass there may be an op of the profiler's between them, so that it is one run or two.
    forward = [s for s in segments if trace.names[s.first_event] == "aten::softplus"]
    assert [s.step for s in forward] == [0, 0, 2, 2]
    backward = trace.events.forward[inside] >= 0
    assert backward.any()
    assert {s.step for s in segments} == {0, 2}
    assert not any(PREFIX in op.name for op in trace.ops)
    assert [n for n in trace.names.tolist() if "ProfilerStep" in n] == [f"ProfilerStep#{i}" for i in range(3)]
    for s in segments:
        rows = slice(s.first_event, s.first_event + s.event_count)
        assert s.start_ns == trace.events.start_ns[rows].min()
        assert s.end_ns == trace.events.end_ns[rows].max()


def test_inference_profile_of_two_placements() -> None:
    marked = profiled("infer", placed(0, {2}), placed(1, {4}), placed(2, {5}, armed=False))
    on = [parse_marker("s", op.name) for op in marked.ops if op.name.startswith(PREFIX)]
    assert {(m.placement, m.site) for m in on if m and m.on} == {(0, 2), (1, 4)}
    assert len({(m.placement, m.site) for m in on if m}) == 3 * 11  # every candidate is marked
    trace, segments = published(*label(marked, "s", {i: Armed(i, "marker+backward") for i in (0, 1)}))
    assert [(s.instance, s.step) for s in segments] == [(i, step) for step in range(3) for i in (0, 1)]
    assert np.array_equal(members(trace, segments) & is_ours(trace), is_ours(trace))


def test_profile_of_decoys() -> None:
    trace, segments = label(profiled("train", placed(0, {1, 6}, armed=False)), "s", {})
    assert segments == []
    assert not is_ours(trace).any()
    assert not any(PREFIX in op.name for op in trace.ops)


def test_recomputation_of_a_checkpoint_belongs() -> None:
    """The forward op runs again in the backward pass, with the same sequence number."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU())
            self.head = nn.Linear(8 * 36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False) if torch.is_grad_enabled() else self.inner(x)
            return self.head(y.flatten(1))

    loop = tiny.WithoutWorkers(tiny.spec(Checkpointed), "train", 4, torch.device("cpu"), secret="s", seed=1)
    site = next(one for one in loop.module_calls() if one.name == "inner.0")
    loop.install(Placement(0, [ModuleSite(site, softplus_twice, "after")], frozenset({0}), armed=True))
    loop.step()
    trace, segments = published(*label(profile_steps(loop, 0), "s", {0: Armed(0, "marker+backward")}))
    ours = is_ours(trace)
    assert (trace.names[ours] == "aten::softplus").sum() == 3 * 2 * 2  # steps, ops, forward and again
    assert not (ours & ~members(trace, segments)).any()


# -- the mechanism "selector" -------------------------------------------------------------------------

# What a pattern brings about elsewhere: an accumulation under a node that the clean trace has too, and a
# call that waits. A second conv is no news, and neither is what has another name than the pattern's.
CONSEQUENCES = [
    (MAIN, "ProfilerStep#12", "user_annotation", 100, 900, -1, -1, -1),  # 0
    (MAIN, "aten::conv", "cpu_op", 110, 90, 0, -1, -1),  # 1
    (MAIN, "aten::conv", "cpu_op", 210, 90, 0, -1, -1),  # 2
    (MAIN, "AccumulateGrad", "cpu_op", 400, 200, 0, -1, -1),  # 3
    (MAIN, "aten::add_", "cpu_op", 410, 100, 3, -1, -1),  # 4
    (MAIN, "cudaLaunchKernel", "cuda_runtime", 420, 10, 4, -1, -1),  # 5
    (MAIN, "aten::tanh", "cpu_op", 700, 50, 0, -1, -1),  # 6
    (STREAM, "add_kernel", "kernel", 800, 100, 4, 5, -1),  # 7
]


def test_selector_finds_what_the_clean_twin_has_not() -> None:
    clean = strip(by_hand([*CONSEQUENCES[:2], (*CONSEQUENCES[3][:5], 0, -1, -1)]))
    rows = [(MAIN, "ProfilerStep#3", *CONSEQUENCES[0][2:]), *CONSEQUENCES[1:]]
    trace, segments = label(by_hand(rows), "s", {0: Armed(3, "selector", lambda name: "add" in name)}, clean)
    found = [trace.names[s.first_event : s.first_event + s.event_count].tolist() for s in segments]
    assert found == [["aten::add_", "cudaLaunchKernel"], ["add_kernel"]]
    assert {s.instance for s in segments} == {3}


def test_selector_leaves_to_markers_what_is_theirs() -> None:
    twin = by_hand([row for row in ROWS if row[1] == "ProfilerStep#12"])
    armed = {5: Armed(0, "marker"), 6: Armed(1, "selector", lambda name: name.startswith("aten::"))}
    trace, segments = label(by_hand(), "s", armed, strip(twin))
    by_instance = [{trace.names[s.first_event] for s in segments if s.instance == i} for i in (0, 1)]
    assert "aten::clone" in by_instance[0]
    assert "aten::clone" not in by_instance[1]
    assert "aten::relu" in by_instance[1]


def test_selector_leaves_out_what_the_profiler_does_for_itself() -> None:
    rows = [*CONSEQUENCES[:2], (MAIN, "Activity Buffer Request", "overhead", 250, 50, 0, -1, -1)]
    clean = strip(by_hand(CONSEQUENCES[:2]))
    assert label(by_hand(rows), "s", {0: Armed(0, "selector", lambda name: True)}, clean)[1] == []


def test_selector_leaves_out_the_loader_which_may_be_that_of_another_pattern() -> None:
    loading = (MAIN, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation")
    begin = [CONSEQUENCES[0], (*loading, 101, 8, 0, -1, -1)]
    rows = [*begin, (MAIN, "aten::set_", "cpu_op", 102, 2, 1, -1, -1), (*CONSEQUENCES[6][:5], 0, -1, -1)]
    trace, segments = label(by_hand(rows), "s", {0: Armed(0, "selector", lambda name: True)}, by_hand(begin))
    assert [trace.names[s.first_event] for s in segments] == ["aten::tanh"]


def test_selector_needs_a_twin_and_to_be_alone() -> None:
    one = Armed(0, "selector", str.isalpha)
    with pytest.raises(ValueError, match="clean trace"):
        label(by_hand(CONSEQUENCES), "s", {0: one})
    with pytest.raises(ValueError, match="one pattern"):
        label(by_hand(CONSEQUENCES), "s", {0: one, 1: one}, by_hand(CONSEQUENCES))


# -- the mechanism "meanwhile" ------------------------------------------------------------------------


def test_meanwhile_finds_what_other_threads_begin_while_a_marker_is_open() -> None:
    other, stream = 1, 2
    rows = [
        (MAIN, "ProfilerStep#3", "user_annotation", 0, 900, -1, -1, -1),  # 0
        (MAIN, ON, "user_annotation", 100, 300, 0, -1, -1),  # 1
        (MAIN, "aten::conv", "cpu_op", 110, 90, 1, -1, -1),  # 2
        (MAIN, OFF, "user_annotation", 500, 300, 0, -1, -1),  # 3
        (other, "AccumulateGrad", "cpu_op", 150, 60, -1, -1, -1),  # 4
        (other, "c10d::allreduce_", "cpu_op", 160, 40, 4, -1, -1),  # 5
        (other, "cudaLaunchKernel", "cuda_runtime", 170, 10, 5, -1, -1),  # 6
        (other, "aten::mul", "cpu_op", 300, 50, -1, -1, -1),  # 7
        (other, "c10d::allreduce_", "cpu_op", 399, 50, -1, -1, -1),  # 8: outlives the marker
        (other, "c10d::allreduce_", "cpu_op", 550, 50, -1, -1, -1),  # 9: where the pattern does not act
        (stream, "ncclDevKernel", "kernel", 600, 100, 5, 6, -1),  # 10
    ]
    trace = by_hand(rows)
    trace.lanes = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1"), Lane("gpu", "stream 20", 0)]
    trace, segments = label(trace, "s", {5: Armed(0, "meanwhile", "c10d::allreduce_".__eq__)})
    found = [(s.lane, s.start_ns, s.event_count) for s in segments]
    assert found == [(other, 160, 2), (other, 399, 1), (stream, 600, 1)]
