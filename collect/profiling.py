"""Taking one profile of a loop, and what is read off it besides its labels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.profiler import profile, schedule

from torchtraceap.collect import devices
from torchtraceap.collect.labelling import launched_before
from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.collect.measure import quiet
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.windows import merge

PROFILED_STEPS = 3
WARMUP_STEPS = 2
LEAD_IN = 1
"""Steps that are recorded and then cut away: they give the GPU the backlog of a loop that has been running,
made of work whose launch calls, and so whose labels, are known."""
MOST_LOST = 0.01
"""Share of kernels that may be missing from a profile; none was in those that were looked at."""


class Recording:
    """A profile in a file, which is read when there is time for it."""

    def __init__(self, profiler: profile, device: torch.device) -> None:
        # Now: what the profiler holds of a GPU is lost when the next profile begins, without a word
        # (PyTorch 2.11, CUDA 13: no runtime call and no kernel was left).
        self._folder = tempfile.TemporaryDirectory(prefix="traceap-")
        self._path = Path(self._folder.name) / "trace.json"
        self._device = device
        profiler.export_chrome_trace(str(self._path))

    def read(self) -> Trace:
        """The trace without the step in which the device was waited for; the file goes.

        Raises:
            RuntimeError: The profiler lost what the GPU did.
        """
        with self._folder:
            trace = read_trace(self._path)
        *_, (end, _) = trace.step_bounds.tolist()
        trace, _ = trace.select(
            (trace.step < LEAD_IN + PROFILED_STEPS) & (trace.on_gpu | (trace.events.start_ns < end))
        )
        if self._device.type != "cpu":
            require_kernels(trace)
        return trace


def require_kernels(trace: Trace) -> None:
    """Make sure that a profile of a GPU has what the GPU did.

    Raises:
        RuntimeError: There is no event of a GPU, or more than a hundredth of the launches have no kernel.
    """
    launching = np.array(["LaunchKernel" in op.name for op in trace.ops], dtype=bool)
    launches = np.flatnonzero(launching[trace.events.op] & ~trace.on_gpu)
    lost = len(np.setdiff1d(launches, trace.events.launch[trace.on_gpu]))
    if not trace.on_gpu.any() or lost > len(launches) * MOST_LOST:
        raise RuntimeError(f"the profiler lost {lost} of {len(launches)} kernels")


def profile_steps(loop: TrainingLoop, settle: int, *, marking: bool = True) -> Trace:
    """The trace of :func:`record_steps`."""
    return record_steps(loop, settle, marking=marking).read()


def record_steps(
    loop: TrainingLoop,
    settle: int,
    *,
    marking: bool = True,
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Recording:
    """Profile the loop's next steps; shapes on, stacks and memory off.

    The trace has ``LEAD_IN`` steps more than are published, in front. The loaders are rewound first, so that
    each profile of one arm sees the same batches in the same steps.

    Args:
        loop: Warm, armed as the trace shall have it.
        settle: Steps that what is armed takes to settle; the profiler warms up at least so long.
        marking: Whether candidate places leave markers.
        on_device: What to hold while the device is used: for less than half of the time that this takes.
    """
    warmup = max(WARMUP_STEPS, settle)
    plan = schedule(wait=0, warmup=warmup, active=LEAD_IN + PROFILED_STEPS + 1, repeat=1)
    loop.rewind()
    loop.marking = marking
    try:
        # Without acc_events: it turns every event into a Python object, which took longer than all the rest.
        with (
            quiet(),
            profile(
                activities=devices.activities(loop.device), schedule=plan, record_shapes=True
            ) as profiler,
        ):
            with on_device():
                for step in range(-LEAD_IN - warmup, PROFILED_STEPS):
                    loop.profiled_step = step if step >= 0 else None
                    loop.step()
                    if step == -LEAD_IN - 1:
                        # Work still queued would run in the profile without the calls that launched it.
                        devices.synchronize(loop.device)
                    profiler.step()
                # In a step of its own, which is cut away.
                devices.synchronize(loop.device)
            profiler.step()  # sorts what was recorded, which the device is not needed for
    finally:
        loop.marking = False
        loop.profiled_step = None
    return Recording(profiler, loop.device)


def step_ms(trace: Trace) -> float:
    """Milliseconds a profiled step.

    From when host and device were done with what came before the first until both were done with the last.
    """
    bounds, end = trace.step_bounds, trace.events.end_ns
    first = max(int(bounds[0, 0]), int(end[launched_before(trace)].max(initial=0)))
    last = max(int(bounds[-1, 1]), int(end[trace.on_gpu].max(initial=0)))
    return (last - first) / len(bounds) / 1e6


def gpu_busy(trace: Trace) -> float:
    """Share of the profiled steps in which a kernel, copy or set ran on any stream; NaN without a GPU."""
    bounds = trace.step_bounds
    rows = trace.on_gpu & (trace.categories != "cuda_sync")
    if not rows.any() or not len(bounds):
        return float("nan")
    start, end = trace.events.start_ns[rows], trace.events.end_ns[rows]
    low, high = int(bounds[0, 0]), int(max(bounds[-1, 1], end.max()))
    order = np.argsort(start, kind="stable")
    start, end = merge(start[order], end[order])
    return float(np.maximum(end - np.maximum(start, low), 0).sum() / (high - low))
