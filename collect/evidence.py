"""Which patterns a clean workload is known not to hold by itself, from evidence outside of its labels.

Only where every instance is known can a further prediction be called a false alarm. What is found here is
conservative: without proof of absence a pattern is left out, and predictions of it are then not counted.

* host_sync: no blocking call of the runtime lies inside a step of the clean trace.
* pageable_h2d: the clean trace names the memory of its copies to the device, and none is pageable.
* python_loop_over_batch: twice the batch dispatches as many operators.
* redundant_copy: no dispatched copy has the strides and type of its source.
* dtype_ping_pong: no cast back to the type that a value had at most two operators before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.pattern import PATTERNS, State

CAST_REACH = 2
"""Operators between a cast and the cast back that still count as one round trip."""

BLOCKING = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD")


class _Dispatched(TorchDispatchMode):
    """Counts operators and looks for copies and casts that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.same_copies = 0
        self.round_trips = 0
        # type that the value had before a cast, and how many operators ago
        self._was = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operators (to, contiguous, reshape) arrive whole
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        self.operators += 1
        sources = [leaf for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor)]
        if not sources or not isinstance(out, torch.Tensor):
            return out
        name = func.overloadpacket.__name__
        source = sources[-1]  # copy_ has its destination before it
        cast = out.is_floating_point() and source.is_floating_point() and out.dtype != source.dtype
        if name in ("_to_copy", "copy_") and cast:
            was = self._was.get(source)
            self.round_trips += was is not None and was[0] == out.dtype
            # A weight in a narrower type is no round trip of what is computed with it.
            if not isinstance(source, torch.nn.Parameter):
                self._was[out] = (source.dtype, 0)
            return out
        if name in ("_to_copy", "clone", "copy_"):
            same = (
                source.dtype == out.dtype and source.stride() == out.stride() and source.device == out.device
            )
            self.same_copies += same and source.numel() > 1
        before = [self._was[s] for s in sources if s in self._was]
        if before and before[0][1] < CAST_REACH:
            self._was[out] = (before[0][0], before[0][1] + 1)
        return out


def _dispatch(loop: TrainingLoop, change: Callable[[torch.Tensor], torch.Tensor]) -> _Dispatched:
    state = State()
    for stage in ("data", "h2d"):
        loop.stages[stage](state)
    state.batch = tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, state.batch)
    with loop.state_kept(), _Dispatched() as seen:
        loop.stages["forward"](state)
        loop.stages["loss"](state)
    return seen


def absent_by_dispatch(loop: TrainingLoop) -> set[str]:
    """Patterns that the clean forward pass and loss do not hold, from the operators they dispatch."""
    seen = _dispatch(loop, lambda leaf: leaf)
    doubled = _dispatch(loop, lambda leaf: torch.cat([leaf, leaf]))
    absent = set()
    if doubled.operators == seen.operators:
        absent.add("python_loop_over_batch")
    if not seen.same_copies:
        absent.add("redundant_copy")
    if not seen.round_trips:
        absent.add("dtype_ping_pong")
    return absent


def blocking_calls(trace: Trace) -> np.ndarray:
    """Events of a trace that make the host wait for the device inside a step, bool, shape (events,).

    Only threads that run operators count: the thread that pins batches waits, but nobody waits for it.
    """
    blocking = np.array(
        [
            op.category in ("cuda_runtime", "cuda_driver", "xpu_runtime")
            and (op.name.endswith(BLOCKING[0]) or op.name in BLOCKING[1:])
            for op in trace.ops
        ],
        dtype=bool,
    )
    lanes = np.unique(trace.events.lane[trace.categories == "cpu_op"])
    return blocking[trace.events.op] & (trace.step >= 0) & np.isin(trace.events.lane, lanes)


def exhaustive(absent: set[str], clean: Trace, has_gpu: bool) -> list[str]:
    """Ids of the patterns all of whose instances are known in the traces of a workload, sorted.

    Args:
        absent: Result of :func:`absent_by_dispatch`.
        clean: The workload's clean trace.
        has_gpu: Whether it ran on a GPU: without one nothing can wait for it.
    """
    known = absent | {pattern.id for pattern in PATTERNS if not pattern.native_risk}
    if has_gpu and not blocking_calls(clean).any():
        known.add("host_sync")
    to_device = [op.name for op in clean.ops if op.category == "gpu_memcpy" and "HtoD" in op.name]
    if to_device and all("Pinned" in name for name in to_device):
        known.add("pageable_h2d")
    if not has_gpu:
        known |= {pattern.id for pattern in PATTERNS if pattern.needs_gpu}
    return sorted(known & set(PATTERNS.names()))
