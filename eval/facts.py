"""What one reads off a trace before judging it: steps, the GPU's idle time, the tree, and lost time.

Everything is derived from the events alone, once a trace.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.windows import merge

IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories in which a GPU does something; annotations and sync records on a stream are none."""

NO_STEP = -1


class Facts:
    """Derived quantities of one trace. Times are nanoseconds; arrays have shape (events,) unless said."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.start: IntArray = trace.events.start_ns
        self.end: IntArray = trace.events.end_ns

    def name(self, event: int | np.integer[Any]) -> str:
        return self.trace.ops[self.trace.events.op[event]].name

    def names(self, events: IntArray | list[int]) -> list[str]:
        """Names of some events."""
        return self.trace.names[events].tolist()

    @cached_property
    def gpu_work(self) -> BoolArray:
        """Whether an event is a kernel, a memory copy or a memory set."""
        return np.isin(self.trace.categories, GPU_WORK)

    @cached_property
    def cpu_op(self) -> BoolArray:
        return self.trace.categories == "cpu_op"

    @cached_property
    def op_parent(self) -> IntArray:
        """Nearest enclosing ``cpu_op``, -1 for none: annotations and Python frames are looked through."""
        parent = self.trace.events.parent.copy()
        while True:  # one round per level of such frames
            frame = (parent >= 0) & ~self.cpu_op[parent]
            if not frame.any():
                return parent
            parent[frame] = self.trace.events.parent[parent[frame]]

    @cached_property
    def has_steps(self) -> bool:
        return bool(len(self.trace.step_bounds))

    @cached_property
    def launching(self) -> BoolArray:
        """Whether an event lies on a thread that launches kernels; every CPU thread without any kernel.

        Waiting elsewhere (the loader's pinning thread, a logger) does not hold the model up.
        """
        events = self.trace.events
        kernels = np.flatnonzero((self.trace.categories == "kernel") & (events.launch >= 0))
        if not len(kernels):
            return ~self.trace.on_gpu
        return np.isin(events.lane, np.unique(events.lane[events.launch[kernels]]))

    def step_ns(self, step: int) -> int:
        """Time that a profiled step takes: that of ``ProfilerStep``, or of its GPU work if that is longer.

        The host may run ahead of the GPU, so that all steps are launched before the first has finished. In a
        trace without ``ProfilerStep``, the whole trace is the step.
        """
        if step == NO_STEP:
            return max(1, self.trace.duration_ns)
        first, last = self.trace.step_bounds[step]
        return max(1, int(last - first), self._gpu_ns[step])

    def busy_share(self, step: int) -> float:
        """Share of a step's time in which the GPU works on it: how far it is the limit. 0 without a GPU."""
        return self._gpu_ns.get(step, 0) / self.step_ns(step)

    @cached_property
    def _gpu_ns(self) -> dict[int, int]:
        """Time that the GPU works on what each step launched."""
        spent = dict.fromkeys(range(NO_STEP, len(self.trace.step_bounds)), 0)
        for step in np.unique(self.trace.step[self.gpu_work]).tolist():
            rows = np.flatnonzero(self.gpu_work & (self.trace.step == step))
            intervals = union(self.start[rows], self.end[rows])
            spent[step] = int((intervals[:, 1] - intervals[:, 0]).sum())
        return spent

    @cached_property
    def busy(self) -> IntArray:
        """Disjoint intervals in which any GPU works, in order, shape (intervals, 2)."""
        rows = np.flatnonzero(self.gpu_work)
        return union(self.start[rows], self.end[rows])

    @cached_property
    def _busy_before(self) -> IntArray:
        """Busy time ahead of each busy interval, and of all, shape (intervals + 1,)."""
        return np.concatenate([[0], np.cumsum(self.busy[:, 1] - self.busy[:, 0])])

    def busy_ns(self, start: int, end: int) -> int:
        """Time between ``start`` and ``end`` in which a GPU works."""
        return self._busy_until(end) - self._busy_until(start)

    def _busy_until(self, time: int) -> int:
        index = int(np.searchsorted(self.busy[:, 0], time, side="right"))
        if index == 0:
            return 0
        first, last = self.busy[index - 1]
        return int(self._busy_before[index - 1] + min(time, last) - first)

    def stall_ns(self, start: int, end: int) -> int:
        """Time that the step loses because its thread is held up from ``start`` to ``end``.

        While the GPU still has queued work nothing is lost. What counts is the GPU's idle time in the wait
        and from there to the next thing that it does (the queue has to fill again), and never more than
        the wait itself: a step that the CPU limits leaves the GPU idle anyway. Without a GPU in the trace,
        the wait.
        """
        wait = end - start
        if not len(self.busy):
            return wait
        following = int(np.searchsorted(self.busy[:, 0], end, side="left"))
        working = following > 0 and self.busy[following - 1, 1] > end
        resumes = end if working or following == len(self.busy) else int(self.busy[following, 0])
        return min(wait, resumes - start - self.busy_ns(start, resumes))

    def bound_ns(self, cpu_ns: float, gpu_ns: float, step: int) -> float:
        """Time that a step would save without work of ``cpu_ns`` on the host and ``gpu_ns`` on the GPU.

        A step whose GPU never idles is as long as the GPU's work, one whose GPU hardly works as long as the
        host's. In between, the two are weighted by the busy share.
        """
        share = self.busy_share(step)
        return share * gpu_ns + (1 - share) * cpu_ns

    def path(self, event: int, depth: int = 3) -> str:
        """Names of an event and its nearest ancestors, outermost first, without steps and Python frames."""
        names: list[str] = []
        while event >= 0 and len(names) < depth:
            op = self.trace.ops[self.trace.events.op[event]]
            if op.category != "python_function" and not op.name.startswith("ProfilerStep#"):
                names.append(op.name)
            event = int(self.trace.events.parent[event])
        return " > ".join(reversed(names))


def union(start: IntArray, end: IntArray) -> IntArray:
    """Disjoint, ordered intervals that cover the same time, shape (intervals, 2)."""
    order = np.argsort(start, kind="stable")
    return np.stack(merge(start[order], end[order]), axis=1).astype(np.int64)


@lru_cache(maxsize=65536)
def dims(shapes: str) -> tuple[Any, ...]:
    """Kineto's "Input Dims" as nested tuples, one entry an argument; empty when not recorded or malformed."""
    return _decode(shapes)


@lru_cache(maxsize=65536)
def kinds(types: str) -> tuple[Any, ...]:
    """Kineto's "Input type" as a tuple of names, one entry an argument; empty when not recorded."""
    return _decode(types)


def _decode(text: str) -> tuple[Any, ...]:
    try:
        value = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return ()
    return tuple(map(_freeze, value)) if isinstance(value, list) else ()


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
