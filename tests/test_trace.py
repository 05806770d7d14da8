"""A trace in memory: what it says of each event, and what that costs."""

from __future__ import annotations

import numpy as np

from torchtraceap.dataset.trace import Events, Lane, Op, Trace


def _trace(ops: list[Op], op: list[int]) -> Trace:
    """Events of ``ops`` one after the other on one thread."""
    columns = {name: np.full(len(op), -1, dtype=dtype) for name, dtype in Events.DTYPES.items()}
    columns["lane"][:] = 0
    columns["op"][:] = op
    columns["start_ns"][:] = np.arange(len(op)) * 10
    columns["dur_ns"][:] = 5
    return Trace([Lane("cpu", "thread 0")], ops, Events(**columns))


def test_names_and_categories_of_events() -> None:
    trace = _trace([Op("aten::add", "cpu_op"), Op("cudaLaunchKernel", "cuda_runtime")], [1, 0, 1])
    assert trace.names.tolist() == ["cudaLaunchKernel", "aten::add", "cudaLaunchKernel"]
    assert (trace.names == "aten::add").tolist() == [False, True, False]
    assert np.isin(trace.categories, ("cuda_runtime", "cuda_driver")).tolist() == [True, False, True]


def test_a_long_name_is_held_once() -> None:
    names = ["k" * 2000, "a"]
    trace = _trace([Op(name, "c" * 2000) for name in names], [0, 1] * 500)
    assert trace.names[998] is names[0]
    assert trace.names.nbytes <= 8 * 1000
    assert trace.categories.nbytes <= 8 * 1000


def test_a_trace_without_events_has_no_names() -> None:
    trace = _trace([], [])
    assert trace.names.tolist() == []
    assert (trace.categories == "cpu_op").tolist() == []
