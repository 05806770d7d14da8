"""The table ``windows``: a trace cut into windows, with features and labels.

What a window is and when it is positive is defined in ``labels/windows.py``; the features are the table
``FEATURES`` below. They are small integers on purpose: as random floats they would take more room than the
events that they sum up. Names and durations are read, ids and the order of traces are not, and nothing
comes from another trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchtraceap.dataset.schema import WINDOW_KEYS
from torchtraceap.dataset.trace import CATEGORIES, Trace, TraceRecord
from torchtraceap.labels.types import LaneClass
from torchtraceap.labels.windows import covered_ns, label_windows, merge, spans, tile

IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

TINY_KERNEL_NS = 5_000  # about what it takes the host to launch one
SMALL_GRID = 64  # blocks; fewer than most GPUs have multiprocessors
SMALL_COPY = 64  # bytes: scalars and short shapes

Unit = Literal["share", "count", "log"]
"""``share``: uint8, 255 stands for 1. ``count``: uint16, 65535 stands for that or more. ``log``: uint8,
7 * log2(1 + x), so that a step of one is 10 %; x in ns or bytes."""


@dataclass(frozen=True)
class Feature:
    """A column of ``windows``. An event counts in the window in which it starts; time is cut at the edges."""

    name: str
    unit: Unit
    meaning: str


# fmt: off
_ROWS: tuple[tuple[str, Unit, str], ...] = (
    # Where, and who is busy
    ("position", "share", "place of the window's start within its step; 0 outside of any"),
    ("cpu_busy", "share", "main thread inside an op or a runtime call (main: the thread of ProfilerStep)"),
    ("cpu_other_busy", "share", "any other thread inside an op or a runtime call"),
    ("gpu_busy", "share", "a kernel, copy or memset runs on any stream"),
    ("gpu_kernel", "share", "a kernel runs"),
    ("gpu_copy", "share", "a copy runs"),
    ("gpu_overlap", "share", "time that streams gain by running at once: busy time of all less their union"),
    ("gpu_gap_inside", "share", "longest time in the window without anything on the GPU"),
    ("gpu_gap", "log", "whole length of the longest such gap that reaches into the window, ns"),
    ("gpu_gaps", "count", "gaps that begin here"),
    ("queue", "count", "launched but not yet started on the GPU when the window begins"),
    ("latency", "log", "mean time from the launch call to the start on the GPU, ns"),
    ("overhead", "share", "the profiler's own overhead on any thread"),
    # Ops
    ("ops", "count", "ops"),
    ("top_ops", "count", "ops outside of any other op"),
    ("depth", "count", "mean number of ops around an op, in eighths"),
    ("op_mean", "log", "mean duration of the ops outside of any other, ns"),
    ("distinct_ops", "share", "distinct op names among the ops"),
    ("repetition", "share", "ops with the most common name among the ops"),
    ("backward", "share", "inside the autograd engine"),
    ("backward_ops", "count", "ops that compute the gradient of a forward op"),
    ("optimizer", "share", "inside Optimizer.step"),
    ("zero_grad", "share", "inside Optimizer.zero_grad"),
    ("dataloader", "share", "waiting for the DataLoader"),
    ("compiled", "count", "calls of compiled regions, guards and caches of torch.compile"),
    ("to_calls", "count", "aten::to, most of which do nothing"),
    ("casts", "count", "aten::_to_copy: a change of dtype or device"),
    ("cast_time", "share", "inside aten::_to_copy"),
    ("clones", "count", "aten::clone and aten::contiguous"),
    ("copies", "count", "aten::copy_"),
    ("copy_time", "share", "inside aten::copy_"),
    ("joins", "count", "cat and stack"),
    ("slices", "count", "slice, select, narrow, split, chunk, unbind"),
    ("scalars", "count", "item, is_nonzero, _local_scalar_dense"),
    ("dynamic", "count", "ops whose output shape depends on data: nonzero, unique, masked_select"),
    ("allocations", "count", "aten::empty and its kin"),
    ("fills", "count", "zeros, ones, full, fill_, zero_, arange"),
    ("elementwise", "count", "elementwise arithmetic and activations"),
    ("foreach", "count", "ops on lists of tensors: _foreach_*, _fused_*"),
    ("matmuls", "count", "convolutions and matrix products"),
    ("attention", "count", "scaled_dot_product_attention and its kin"),
    ("softmax", "count", "softmax"),
    ("collectives", "count", "collectives of torch.distributed"),
    # Runtime and driver calls
    ("launches", "count", "kernel launches"),
    ("launch_time", "share", "inside launch calls"),
    ("syncs", "count", "calls that wait for the GPU"),
    ("sync_time", "share", "inside calls that wait for the GPU"),
    ("sync_longest", "log", "whole length of the longest such call that reaches into the window, ns"),
    ("copy_calls", "count", "copy and memset calls"),
    ("malloc_calls", "count", "allocations and frees by the driver"),
    # GPU
    ("kernels", "count", "kernels"),
    ("kernel_mean", "log", "mean duration of the kernels, ns"),
    ("tiny_kernels", "share", f"kernels under {TINY_KERNEL_NS // 1000} us among the kernels"),
    ("small_grids", "share", f"kernels of fewer than {SMALL_GRID} blocks among the kernels"),
    ("distinct_kernels", "share", "distinct kernel names among the kernels"),
    ("kernel_repetition", "share", "kernels with the most common name among the kernels"),
    ("other_thread", "share", "kernels launched from another than the main thread among the kernels"),
    ("htod", "count", "copies from host to device"),
    ("dtoh", "count", "copies from device to host"),
    ("dtod", "count", "copies from device to device"),
    ("pageable", "count", "copies from or to pageable memory"),
    ("small_copies", "count", f"copies of at most {SMALL_COPY} bytes"),
    ("copy_bytes", "log", "bytes copied"),
    ("memsets", "count", "memsets"),
    ("elementwise_kernels", "count", "elementwise kernels"),
    ("reduce_kernels", "count", "reductions, softmax and norms"),
    ("list_kernels", "count", "kernels on lists of tensors (multi_tensor_apply)"),
    ("layout_kernels", "count", "changes between NCHW and NHWC, and transposes"),
    ("matmul_kernels", "count", "matrix products and convolutions"),
    ("tensor_cores", "share", "of the busy time of those, in kernels whose name says tensor cores"),
    ("collective_time", "share", "collectives run on the GPU"),
)
# fmt: on
FEATURES = tuple(Feature(*row) for row in _ROWS)

_TYPES: dict[Unit, pa.DataType] = {"share": pa.uint8(), "count": pa.uint16(), "log": pa.uint8()}
WINDOWS = pa.schema([*WINDOW_KEYS, *(pa.field(f.name, _TYPES[f.unit]) for f in FEATURES)])

_CPU_NAMES = {
    "backward": r"autograd::engine::evaluate_function",
    "optimizer": r"Optimizer\.step#",
    "zero_grad": r"Optimizer\.zero_grad#",
    "dataloader": r"enumerate\(DataLoader\)#",
    "compiled": r"Torch-Compiled Region|CompiledFunction|TorchDynamo Cache|AOTDispatcher|## Call Compiled",
    "to_calls": r"aten::to$",
    "casts": r"aten::_to_copy$",
    "clones": r"aten::(clone|contiguous)$",
    "copies": r"aten::copy_$",
    "joins": r"aten::_?(cat|stack)$",
    "slices": r"aten::(slice|select|narrow|split|split_with_sizes|chunk|unbind)$",
    "scalars": r"aten::(item|is_nonzero|_local_scalar_dense)$",
    "dynamic": r"aten::(nonzero|nonzero_numpy|_?unique\w*|masked_select|bincount)$",
    "allocations": r"aten::(empty\w*|new_empty\w*)$",
    "fills": r"aten::(zeros|ones|full|zeros_like|ones_like|full_like|fill_|zero_|arange|linspace)$",
    "elementwise": (
        r"aten::(add|sub|mul|div|pow|neg|exp|log|sqrt|rsqrt|abs|clamp|clamp_min|where|lerp|addcmul|addcdiv"
        r"|relu|gelu|silu|sigmoid|tanh|hardswish|hardtanh|leaky_relu|mish|elu|threshold_backward"
        r"|(gelu|silu|sigmoid|tanh|hardswish)_backward)_?$"
    ),
    "foreach": r"aten::_(foreach|fused)_",
    "matmuls": r"aten::(convolution|convolution_backward|mm|bmm|addmm|baddbmm|_scaled_mm)$",
    "attention": r"aten::_?scaled_dot_product_",
    "softmax": r"aten::_(log_)?softmax(_backward_data)?$",
    "collectives": r"c10d::|nccl:|gloo:|record_param_comms",
}
_RUNTIME_NAMES = {
    "launches": r"(cuda|hip|cu)\w*Launch\w*Kernel|zeCommandListAppendLaunchKernel|(cuda|hip)GraphLaunch",
    "syncs": r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy(2D|3D)?$|ze\w*Synchronize",
    "copy_calls": r"(cuda|hip|cu)Mem(cpy|set)|zeCommandListAppendMemory",
    "malloc_calls": r"(cuda|hip)(Malloc|Free|Host(Alloc|Free))|cuMem(Alloc|Create|(Unm|M)ap|Release|Free)",
}
_COPY_NAMES = {
    "htod": r"HtoD|HostToDevice|M2D",
    "dtoh": r"DtoH|DeviceToHost|D2M",
    "dtod": r"DtoD|DeviceToDevice|D2D|PtoP",
    "pageable": r"Pageable",
}
_KERNEL_NAMES = {
    "elementwise_kernels": r"elementwise_kernel|triton_poi_",
    "reduce_kernels": r"reduce_kernel|[sS]oftmax|[nN]orm(alization|_)|bn_(fw|bw)|triton_(red|per)_",
    "list_kernels": r"multi_tensor_apply",
    "layout_kernels": r"nchwToNhwc|nhwcToNchw|[tT]ranspose(?!d)|convertTensor|permute",
    "matmul_kernels": r"gemm|Gemm|Cijk_|cutlass|conv|Conv|fprop|dgrad|wgrad|nvjet|flash|fmha|triton_tem_",
    "tensor_core_kernels": r"tensorop|[sh](16816|1688|884)|[hgi]mma|tf32|nvjet|flash|fmha|_MT\d+x\d+\w*MI\d",
    "collective_kernels": r"nccl|rccl",
}  # fmt: skip


_CATEGORY = {category: index for index, category in enumerate(CATEGORIES)}


class _Grid:
    """Sums over the windows of one trace. Every method takes a mask over events and returns (windows,)."""

    def __init__(self, trace: Trace, edges: IntArray) -> None:
        self.trace = trace
        self.edges = edges
        self.windows = len(edges) - 1
        self.width = np.diff(edges).astype(float)
        self.start = trace.events.start_ns
        self.end = trace.events.end_ns
        self.dur = trace.events.dur_ns
        self.first, self.last = spans(self.start, self.end, edges)
        self.by_start = np.argsort(self.start, kind="stable")

    def count(self, mask: BoolArray) -> FloatArray:
        """Events that start in the window."""
        return np.bincount(self.first[mask], minlength=self.windows).astype(float)

    def total(self, mask: BoolArray, values: NDArray[Any]) -> FloatArray:
        """Sum of ``values`` (over all events) of those that start in the window."""
        return np.bincount(self.first[mask], weights=values[mask], minlength=self.windows).astype(float)

    def mean(self, mask: BoolArray, values: NDArray[Any]) -> FloatArray:
        return _ratio(self.total(mask, values), self.count(mask))

    def union(self, mask: BoolArray) -> tuple[IntArray, IntArray]:
        """Disjoint intervals in which an event runs."""
        rows = self.by_start[mask[self.by_start]]
        return merge(self.start[rows], self.end[rows])

    def busy_ns(self, mask: BoolArray) -> FloatArray:
        """Time in which at least one of the events runs."""
        return covered_ns(*self.union(mask), self.edges).astype(float)

    def busy(self, mask: BoolArray) -> FloatArray:
        """The same as a share of the window."""
        return self.busy_ns(mask) / self.width

    def variety(self, mask: BoolArray, names: IntArray) -> tuple[FloatArray, FloatArray]:
        """Share of distinct names, and of the most common one, among the events that start in the window."""
        total = self.count(mask)
        names = names[mask].astype(np.int64)
        stride = int(names.max(initial=0)) + 1
        keys, counts = np.unique(self.first[mask] * stride + names, return_counts=True)
        window = keys // stride
        most = np.zeros(self.windows)
        np.maximum.at(most, window, counts)
        return _ratio(np.bincount(window, minlength=self.windows), total), _ratio(most, total)

    def longest(self, start: IntArray, end: IntArray) -> tuple[FloatArray, FloatArray]:
        """Of the intervals that reach into the window: longest part inside, and longest as a whole, in ns."""
        inside, whole = np.zeros(self.windows), np.zeros(self.windows)
        first, last = spans(start, end, self.edges)
        owner = np.repeat(np.arange(len(start)), last - first + 1)
        head = np.cumsum(last - first + 1) - (last - first + 1)
        window = first[owner] + np.arange(len(owner)) - head[owner]
        cut = np.minimum(end[owner], self.edges[window + 1]) - np.maximum(start[owner], self.edges[window])
        np.maximum.at(inside, window, cut)
        np.maximum.at(whole, window, (end - start)[owner])
        return inside, whole


def features(trace: Trace, edges: IntArray) -> dict[str, IntArray]:
    """Features of each window of a trace, encoded as ``FEATURES`` says.

    Args:
        trace: Any trace; without a GPU or steps the columns about them are 0.
        edges: Result of ``labels.windows.tile``, shape (windows + 1,).

    Returns:
        In the order of ``FEATURES``, arrays of uint8 or uint16, shape (windows,).
    """
    grid = _Grid(trace, edges)
    kinds = _Kinds(trace)
    values = _place(grid) | _cpu(grid, kinds) | _runtime(grid, kinds) | _gpu(grid, kinds)
    return {feature.name: _encode(values[feature.name], feature.unit) for feature in FEATURES}


def window_table(record: TraceRecord) -> pa.Table:
    """Rows of the table ``windows`` (schema ``WINDOWS``) of one trace, in time order."""
    trace, events = record.trace, record.trace.events
    edges = tile(trace.duration_ns, trace.step_bounds)
    labels = label_windows(edges, events.start_ns, events.end_ns, record.instances, record.segments)
    windows = len(edges) - 1

    def patterns(lane_class: LaneClass, marks: BoolArray) -> pa.Array:
        columns = [i for i, (lane, _) in enumerate(labels.classes) if lane == lane_class]
        return _lists([labels.classes[i][1] for i in columns], marks[:, columns])

    step, _ = _step_of(edges[:-1], trace.step_bounds)
    columns: dict[str, Any] = {
        name: pa.repeat(pa.scalar(record.meta[name], pa.string()), windows)
        for name in ("trace_id", "task", "hardware_id", "split_unit")
    }
    columns |= {
        "window": np.arange(windows, dtype=np.int32),
        "start_ns": edges[:-1],
        "end_ns": edges[1:],
        "step": step,
        "positive": labels.any_positive,
        "ignored": labels.any_ignored,
        "cpu_patterns": patterns("cpu", labels.positive),
        "gpu_patterns": patterns("gpu", labels.positive),
        "cpu_ignored": patterns("cpu", labels.ignored),
        "gpu_ignored": patterns("gpu", labels.ignored),
    }
    columns |= features(trace, edges)
    return pa.table([pa.array(columns[f.name], f.type) for f in WINDOWS], schema=WINDOWS)


class _Kinds:
    """What kind each event is, by its category and name; matched once a distinct name."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._category = np.array([_CATEGORY.get(op.category, -1) for op in trace.ops], dtype=np.int8)
        names: dict[str, int] = {}
        self._name = np.array([names.setdefault(op.name, len(names)) for op in trace.ops], dtype=np.int32)
        self._names = list(names)

    def category(self, *names: str) -> BoolArray:
        """Events of any of these categories, shape (events,)."""
        return self._spread(self._in_category(names))

    def matching(self, pattern: str, *categories: str) -> BoolArray:
        """Events of these categories whose name the pattern finds, shape (events,)."""
        search = re.compile(pattern).search
        found = np.array([search(name) is not None for name in self._names], dtype=bool)
        return self._spread(found[self._name] & self._in_category(categories))

    def _in_category(self, names: Sequence[str]) -> BoolArray:
        wanted = np.array([*(category in names for category in CATEGORIES), False], dtype=bool)
        return wanted[self._category]

    @cached_property
    def name(self) -> IntArray:
        """A number for each event's name, shape (events,)."""
        return self._spread(self._name)

    @cached_property
    def main(self) -> BoolArray:
        """Events of the main thread: that of ProfilerStep, else the thread with the most events."""
        trace = self.trace
        on_cpu = ~trace.on_gpu
        steps = self.matching(r"ProfilerStep#", "user_annotation") & on_cpu
        lanes = trace.events.lane[steps if steps.any() else on_cpu]
        return trace.events.lane == (np.bincount(lanes).argmax() if len(lanes) else -1)

    def op_values(self, values: Sequence[int]) -> IntArray:
        """A value of each op, spread over the events."""
        return self._spread(np.array(values, dtype=np.int64))

    def _spread(self, of_op: NDArray[Any]) -> NDArray[Any]:
        return of_op[self.trace.events.op] if len(of_op) else np.zeros(0, dtype=of_op.dtype)


def _place(grid: _Grid) -> dict[str, FloatArray]:
    _, position = _step_of(grid.edges[:-1], grid.trace.step_bounds)
    return {"position": position}


def _cpu(grid: _Grid, kinds: _Kinds) -> dict[str, FloatArray]:
    events = grid.trace.events
    on_cpu = ~grid.trace.on_gpu
    ops = kinds.category("cpu_op") & on_cpu
    running = kinds.category("cpu_op", "cuda_runtime", "cuda_driver", "xpu_runtime") & on_cpu
    depth = _depth(events.parent, ops)
    top = ops & (depth == 0)
    masks = {
        name: kinds.matching(pattern, "cpu_op", "user_annotation") & on_cpu
        for name, pattern in _CPU_NAMES.items()
    }
    distinct, repetition = grid.variety(ops, kinds.name)
    values = {
        "cpu_busy": grid.busy(running & kinds.main),
        "cpu_other_busy": grid.busy(running & ~kinds.main),
        "overhead": grid.busy(kinds.category("overhead")),
        "ops": grid.count(ops),
        "top_ops": grid.count(top),
        "depth": 8 * grid.mean(ops, depth),
        "op_mean": grid.mean(top, grid.dur),
        "distinct_ops": distinct,
        "repetition": repetition,
        "backward_ops": grid.count(ops & (events.forward >= 0)),
        "cast_time": grid.busy(masks["casts"]),
        "copy_time": grid.busy(masks["copies"]),
    }
    for name, mask in masks.items():
        time = name in ("backward", "optimizer", "zero_grad", "dataloader")
        values[name] = grid.busy(mask) if time else grid.count(mask)
    return values


def _runtime(grid: _Grid, kinds: _Kinds) -> dict[str, FloatArray]:
    masks = {
        name: kinds.matching(pattern, "cuda_runtime", "cuda_driver", "xpu_runtime")
        for name, pattern in _RUNTIME_NAMES.items()
    }
    values = {name: grid.count(mask) for name, mask in masks.items()}
    syncs = masks["syncs"]
    return values | {
        "launch_time": grid.busy(masks["launches"]),
        "sync_time": grid.busy(syncs),
        "sync_longest": grid.longest(grid.start[syncs], grid.end[syncs])[1],
    }


def _gpu(grid: _Grid, kinds: _Kinds) -> dict[str, FloatArray]:
    trace, events = grid.trace, grid.trace.events
    kernels, copies, memsets = (kinds.category(name) for name in ("kernel", "gpu_memcpy", "gpu_memset"))
    work = kernels | copies | memsets
    union = grid.union(work)
    busy_ns = covered_ns(*union, grid.edges).astype(float)
    lanes = [lane for lane in range(len(trace.lanes)) if trace.lanes[lane].kind == "gpu"]
    streams_ns = sum((grid.busy_ns(work & (events.lane == lane)) for lane in lanes), np.zeros(grid.windows))
    gap_start, gap_end = np.append(0, union[1]), np.append(union[0], grid.edges[-1])
    idle = (gap_end > gap_start) & work.any()  # a trace without GPU work has no gaps
    gap_start, gap_end = gap_start[idle], gap_end[idle]
    inside, whole = grid.longest(gap_start, gap_end)

    launched = work & (events.launch >= 0)
    call = events.launch[launched]
    waited = np.zeros(len(events), dtype=np.int64)
    waited[launched] = np.maximum(grid.start[launched] - grid.start[call], 0)
    queued = np.searchsorted(np.sort(grid.start[call]), grid.edges[:-1])
    begun = np.searchsorted(np.sort(grid.start[launched]), grid.edges[:-1])
    elsewhere = np.zeros(len(events), dtype=bool)
    elsewhere[launched] = ~kinds.main[call]

    count = grid.count(kernels)
    distinct, repetition = grid.variety(kernels, kinds.name)
    blocks_of = {text: _blocks(text) for text in {op.grid for op in trace.ops}}
    blocks = kinds.op_values([blocks_of[op.grid] for op in trace.ops])
    size = kinds.op_values([op.bytes for op in trace.ops])
    named = {name: kinds.matching(pattern, "kernel") for name, pattern in _KERNEL_NAMES.items()}
    matmul = named["matmul_kernels"]
    values = {name: grid.count(mask) for name, mask in named.items()}
    values |= {
        name: grid.count(kinds.matching(pattern, "gpu_memcpy")) for name, pattern in _COPY_NAMES.items()
    }
    return values | {
        "gpu_busy": busy_ns / grid.width,
        "gpu_kernel": grid.busy(kernels),
        "gpu_copy": grid.busy(copies),
        "gpu_overlap": (streams_ns - busy_ns) / grid.width,
        "gpu_gap_inside": inside / grid.width,
        "gpu_gap": whole,
        "gpu_gaps": np.bincount(spans(gap_start, gap_end, grid.edges)[0], minlength=grid.windows),
        "queue": (queued - begun).astype(float),
        "latency": grid.mean(launched, waited),
        "kernels": count,
        "kernel_mean": grid.mean(kernels, grid.dur),
        "tiny_kernels": _ratio(grid.count(kernels & (grid.dur < TINY_KERNEL_NS)), count),
        "small_grids": _ratio(grid.count(kernels & (blocks > 0) & (blocks < SMALL_GRID)), count),
        "distinct_kernels": distinct,
        "kernel_repetition": repetition,
        "other_thread": _ratio(grid.count(kernels & elsewhere), count),
        "small_copies": grid.count(copies & (size > 0) & (size <= SMALL_COPY)),
        "copy_bytes": grid.total(copies, size),
        "memsets": grid.count(memsets),
        "tensor_cores": _ratio(grid.busy_ns(matmul & named["tensor_core_kernels"]), grid.busy_ns(matmul)),
        "collective_time": grid.busy(named["collective_kernels"]),
    }


def _encode(values: NDArray[Any], unit: Unit) -> IntArray:
    if unit == "count":
        return np.clip(np.rint(values), 0, 65_535).astype(np.uint16)
    scaled = 255 * values if unit == "share" else 7 * np.log2(1 + np.maximum(values, 0))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def _ratio(part: NDArray[Any], whole: FloatArray) -> FloatArray:
    """``part / whole``, 0 where there is nothing."""
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


def _step_of(time_ns: IntArray, step_bounds: IntArray) -> tuple[IntArray, FloatArray]:
    """Step that each point in time lies in (-1 for none), and where in it, from 0 to 1 (0 for none)."""
    if not len(step_bounds):
        return np.full(len(time_ns), -1, dtype=np.int32), np.zeros(len(time_ns))
    index = np.searchsorted(step_bounds[:, 0], time_ns, side="right") - 1
    begin, end = step_bounds[np.maximum(index, 0)].T
    inside = (index >= 0) & (time_ns < end)
    position = np.where(inside, (time_ns - begin) / np.maximum(end - begin, 1), 0.0)
    return np.where(inside, index, -1).astype(np.int32), position


def _depth(parent: IntArray, counted: BoolArray) -> IntArray:
    """Number of ``counted`` events above each, shape (events,); doubling the pointers takes few rounds."""
    depth = ((parent >= 0) & counted[parent]).astype(np.int64)
    above = parent.copy()
    for _ in range(len(parent).bit_length()):
        linked = np.flatnonzero(above >= 0)
        if not len(linked):
            break
        depth[linked] += depth[above[linked]]
        above[linked] = above[above[linked]]
    return depth


def _blocks(grid: str) -> int:
    """Number of blocks of a launch grid such as ``[132, 1, 1]``; 0 when it is not known."""
    if not grid:
        return 0
    try:
        x, y, z = msgspec.json.decode(grid, type=tuple[int, int, int])
    except msgspec.DecodeError:
        return 0
    return min(x * y * z, 2**62)


def _lists(names: list[str], marks: BoolArray) -> pa.Array:
    """A list of the marked names for each row of ``marks``, shape (rows, names)."""
    rows, columns = np.nonzero(marks)
    offsets = np.searchsorted(rows, np.arange(len(marks) + 1)).astype(np.int32)
    flat = pa.array(np.array(names, dtype=object)[columns], pa.string())
    return pa.ListArray.from_arrays(pa.array(offsets), flat)
