"""Cutting steps off a trace whose GPU lags behind its host."""

from __future__ import annotations

import numpy as np

from torchtraceap.collect.cutting import keep_steps, steps_below
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.labels.types import Segment

OPS = [Op("ProfilerStep#0", "user_annotation"), Op("ProfilerStep#1", "user_annotation"),
       Op("aten::mul", "cpu_op"), Op("cudaLaunchKernel", "cuda_runtime"), Op("mul", "kernel"),
       Op("cudaEventQuery", "cuda_runtime")]  # fmt: skip

# Two steps of 100 ns. Each launches two kernels; those of step 0 run at 60 and 120, those of step 1 at 180
# and 230. A call outside of any step lies at 99.
#       lane op start dur parent launch
ROWS = [(0, 0, 0, 98, -1, -1),
        (0, 2, 10, 30, 0, -1),
        (0, 3, 15, 5, 1, -1),
        (0, 3, 30, 5, 1, -1),
        (0, 5, 99, 1, -1, -1),
        (0, 1, 100, 98, -1, -1),
        (0, 2, 110, 30, 5, -1),
        (0, 3, 115, 5, 6, -1),
        (0, 3, 130, 5, 6, -1),
        (1, 4, 60, 30, 1, 2),
        (1, 4, 120, 50, 1, 3),
        (1, 4, 180, 40, 6, 7),
        (1, 4, 230, 40, 6, 8)]  # fmt: skip


def lagging() -> Trace:
    lane, op, start, dur, parent, launch = (np.array(column) for column in zip(*ROWS, strict=True))
    columns = [lane, op, start, dur, parent, launch, np.full(13, -1)]
    events = Events(*(c.astype(kind) for c, kind in zip(columns, Events.DTYPES.values(), strict=True)))
    trace = Trace([Lane("cpu", "thread 0"), Lane("gpu", "stream 7", 0)], OPS, events)
    trace.check()
    return trace


def segment(first: int, count: int, lane_class, step: int) -> Segment:
    trace = lagging()
    rows = slice(first, first + count)
    return Segment(
        instance=0, lane=int(trace.events.lane[first]), lane_class=lane_class, step=step, first_event=first,
        event_count=count, start_ns=int(trace.events.start_ns[first]),
        end_ns=int(trace.events.end_ns[rows].max()),
    )  # fmt: skip


def test_a_gpu_event_belongs_to_the_step_that_launched_it():
    assert lagging().step.tolist() == [0, 0, 0, 0, -1, 1, 1, 1, 1, 0, 0, 1, 1]


def test_the_backlog_of_a_step_that_is_cut_away_stays_with_its_label():
    segments = [
        segment(1, 3, "cpu", 0),
        segment(9, 2, "gpu", 0),
        segment(6, 3, "cpu", 1),
        segment(11, 2, "gpu", 1),
    ]
    trace, kept = keep_steps(lagging(), segments, 1, 1)
    trace.check()
    # Step 1, the kernel of step 0 that still ran at 120, and nothing before: the clock starts at 100.
    assert trace.events.start_ns.tolist() == [0, 10, 15, 30, 20, 80, 130]
    assert trace.step.tolist() == [0, 0, 0, 0, -1, 0, 0]
    assert trace.events.launch.tolist() == [-1, -1, -1, -1, -1, 2, 3]
    assert [(s.lane_class, s.step, s.start_ns, s.end_ns, s.first_event, s.event_count) for s in kept] == [
        ("cpu", 0, 10, 40, 1, 3),
        ("gpu", -1, 20, 70, 4, 1),
        ("gpu", 0, 80, 170, 5, 2),
    ]


def test_what_the_gpu_ran_late_for_a_kept_step_stays():
    trace, kept = keep_steps(lagging(), [segment(9, 2, "gpu", 0)], 0, 1)
    assert trace.events.start_ns.tolist() == [0, 10, 15, 30, 60, 120]  # the call at 99 lies behind step 0
    assert [(s.step, s.first_event, s.event_count) for s in kept] == [(0, 4, 2)]


def test_segments_that_only_their_steps_kept_apart_become_one_backlog():
    trace = lagging()
    trace.events.dur_ns[9:11] = 200, 170  # both kernels of step 0 still run when step 1 begins
    trace.events.start_ns[10] = 61
    trace.events.launch[10] = 4  # and the second was launched between the steps
    _, kept = keep_steps(trace, [segment(9, 1, "gpu", 0), segment(10, 1, "gpu", -1)], 1, 1)
    assert [(s.step, s.event_count) for s in kept] == [(-1, 2)]


def test_number_of_steps_below_a_cap():
    trace = lagging()  # 13 events, 2 steps
    assert [steps_below(trace, cap) for cap in (13, 12, 7, 1)] == [2, 1, 1, 1]
