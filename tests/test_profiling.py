"""What is read off a profile besides its labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torchtraceap.collect.profiling import gpu_busy, require_kernels, step_ms
from torchtraceap.dataset.trace import Events, Lane, Op, Trace

STEPS = 3


def trace_of(kernels: list[tuple[int, int, int]], category: str = "kernel") -> Trace:
    """Three steps of 1 ms with an op and its launch in each, and ``kernels`` (step, start and end in us).

    Those of step -1 were launched before the trace.
    """
    ops = [Op(f"ProfilerStep#{i}", "user_annotation") for i in range(STEPS)]
    ops += [Op("aten::add", "cpu_op"), Op("cudaLaunchKernel", "cuda_runtime"), Op("add_kernel", category)]
    rows = []
    for step in range(STEPS):
        start, top = step * 1_000_000, len(rows)
        rows.append((0, step, start, 1_000_000, -1, -1))
        rows.append((0, 3, start + 1_000, 50_000, top, -1))
        rows.append((0, 4, start + 2_000, 1_000, top + 1, -1))
    for step, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        parent, launch = (3 * step + 1, 3 * step + 2) if step >= 0 else (-1, -1)
        rows.append((1, 5, start * 1_000, (end - start) * 1_000, parent, launch))
    columns = np.array(rows, dtype=np.int64).T
    names = ("lane", "op", "start_ns", "dur_ns", "parent", "launch")
    arrays = {name: columns[i].astype(Events.DTYPES[name]) for i, name in enumerate(names)}
    events = Events(**arrays, forward=np.full(len(rows), -1, dtype=np.int32))
    trace = Trace([Lane("cpu", "thread 0"), Lane("gpu", "stream 7", 0)], ops, events)
    trace.check()
    return trace


def test_busy_share_counts_overlaps_once_and_the_last_kernel_to_its_end() -> None:
    # 500 + 500 us with 250 in common, and 1000 us from the end of the last step on: 4 ms in all.
    trace = trace_of([(0, 500, 1000), (0, 750, 1250), (2, 3000, 4000)])
    assert gpu_busy(trace) == pytest.approx(1750 / 4000)
    assert step_ms(trace) == pytest.approx(4 / 3)


def test_a_profile_without_its_kernels_is_refused() -> None:
    require_kernels(trace_of([(0, 500, 1000), (1, 1500, 1600), (2, 3000, 4000)]))
    with pytest.raises(RuntimeError, match="lost 1 of 3 kernels"):
        require_kernels(trace_of([(0, 500, 1000), (2, 3000, 4000)]))
    with pytest.raises(RuntimeError, match="lost 3 of 3 kernels"):
        require_kernels(trace_of([]))


def test_busy_share_without_kernels() -> None:
    assert math.isnan(gpu_busy(trace_of([])))
    assert math.isnan(gpu_busy(trace_of([(0, 500, 1000)], category="cuda_sync")))  # waiting is no work
    assert step_ms(trace_of([])) == pytest.approx(1.0)


def test_step_time_leaves_out_what_the_gpu_still_had_to_do() -> None:
    # A GPU that is always behind: 1500 us left over, then three steps of 2000 us.
    late = [(-1, 0, 1500), (0, 1500, 3500), (1, 3500, 5500), (2, 5500, 7500)]
    assert step_ms(trace_of(late)) == pytest.approx(2.0)
    assert gpu_busy(trace_of(late)) == 1.0
