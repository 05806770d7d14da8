"""The only definition of the published tables. Everything else (writer, reader, card) derives from it.

Each config is one Arrow schema that all its files share, empty splits too: `datasets` takes the features
of the whole config from the card and fails on a column that one file has and another lacks.
"""

from __future__ import annotations

import pyarrow as pa

from torchtraceap.labels.pattern import Mode

SCHEMA_VERSION = 2
"""Raised when a reader of the previous version would misread a file."""

CANARY = (
    "TORCHTRACEAP CANARY 6f0c9a52-1b53-4d8c-9e0e-0f5d6c1d7a44: benchmark data, keep out of training corpora"
)
"""In the metadata of every file, so that leaked test data can be found."""

SESSION_KEY = "torchtraceap.session"
"""Key in the metadata of a collected shard: JSON of how its traces were made, with the raw step times."""

SPLITS = ("train", "validation", "test")
ALL_SPLITS = "all"
"""Asks for the traces of all splits together: fair to a detector that has learnt from none of them."""

TASKS = ("classification", "detection", "segmentation", "generation", "depth", "pose", "other")
MODES: tuple[Mode, ...] = ("train", "infer")

_string, _i16, _i32, _i64 = pa.string(), pa.int16(), pa.int32(), pa.int64()
_f32, _f64 = pa.float32(), pa.float64()


def _schema(**fields: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in fields.items()])


def _columns(**fields: pa.DataType) -> pa.StructType:
    """A struct of parallel lists: a table inside of a row, that reads as numpy without copying."""
    return pa.struct([pa.field(name, pa.list_(kind)) for name, kind in fields.items()])


# Lists of one length. A reference from one event to another (see dataset/trace.py) is stored as the distance
# back to it, 0 for none: parent = arange(n) - parent_offset. A GPU event's may be large, and as lanes follow
# each other, a distance may be negative.
EVENTS = _columns(
    lane=_i16, op=_i32, start_ns=_i64, dur_ns=_i64, parent_offset=_i32, launch_offset=_i32,
    forward_offset=_i32,
)  # fmt: skip
OPS = _columns(
    name=_string, category=_string, shapes=_string, types=_string, grid=_string, block=_string, bytes=_i64
)
LANES = _columns(kind=_string, name=_string, device=_i16)
INSTANCES = _columns(
    pattern=_string, variant=_string, scope=_string, source=_string, state=_string, every_step=pa.bool_(),
    sites=_i32, cost_ms=_f32, cost_ratio=_f32, cost_low=_f32, cost_high=_f32,
)  # fmt: skip
SEGMENTS_OF_TRACE = _columns(
    instance=_i32, lane=_i16, lane_class=_string, step=_i32, start_ns=_i64, end_ns=_i64, first_event=_i32,
    event_count=_i32,
)  # fmt: skip

TRACE_META = pa.schema(
    [
        pa.field("trace_id", _string),  # random; says nothing of the order in which traces were made
        pa.field("pair_id", _string),  # traces of one workload share it; never shown to a detector
        pa.field("model", _string),
        pa.field("source", _string),  # library the model comes from
        pa.field("task", _string),
        pa.field("family", _string),
        pa.field("backbone_family", _string),
        pa.field("split_unit", _string),  # traces that must lie on one side of a split
        pa.field("hardware_id", _string),
        pa.field("mode", _string),  # train or infer
        pa.field("precision", _string),
        pa.field("batch_size", _i32),
        pa.field("input_shape", _string),  # of one sample, for example 3x224x224
        pa.field("rank", _i32),  # of several processes that train together each has a trace
        pa.field("world_size", _i32),  # their number; 1 for a process alone, whose rank is 0
        pa.field("steps", _i32),  # profiled steps in the trace
        pa.field("quality", _string),  # good, bad or undecided
        pa.field("step_ms", _f32),  # unprofiled: median of clean steps, and mean cost of what acts
        pa.field("profiler_ratio", _f32),  # mean step time in the profile over step_ms
        pa.field("gpu_busy", _f32),  # share of the profiled steps in which a kernel or copy ran; NaN on CPU
    ]
)

DETECTOR_META = ("hardware_id", "task", "mode", "precision", "batch_size", "input_shape", "steps")
"""Columns of ``TRACE_META`` that a detector may see: a whitelist, so that a new column never leaks."""

TRACES = pa.schema(
    [
        *TRACE_META,
        pa.field("exhaustive", pa.list_(_string)),
        pa.field("lanes", LANES),
        pa.field("ops", OPS),
        pa.field("events", EVENTS),
        pa.field("instances", INSTANCES),
        pa.field("segments", SEGMENTS_OF_TRACE),
    ]
)

SEGMENTS = _schema(
    trace_id=_string, task=_string, hardware_id=_string, split_unit=_string, pattern=_string, variant=_string,
    scope=_string, source=_string, state=_string, lane_class=_string, lane=_string, step=_i32, start_ns=_i64,
    end_ns=_i64, first_event=_i32, event_count=_i32, cost_ms=_f32, cost_ratio=_f32, cost_low=_f32,
    cost_high=_f32,
)  # fmt: skip

# A row a measured instance, from which its verdict and its cost follow (labels/cost.py). Evaluation never
# reads it.
COSTS = _schema(
    trace_id=_string,
    instance=_i32,  # index in the trace
    pair_id=_string,  # instances of one, pattern, variant and p_costly are one test
    pattern=_string,
    variant=_string,
    source=_string,  # injected or lookalike
    state=_string,  # by this measurement alone, before the false discovery control
    p_costly=_f64,
    p_benign=_f64,
    decided_at=_i32,  # pairs that the verdict is from; the cost is from the others, if there are any
    seconds_without=pa.list_(_f64),  # a step, in the order of measurement
    seconds_with=pa.list_(_f64),
)

HARDWARE = _schema(
    hardware_id=_string,  # slug and digest, for example nvidia-h200-1a2b3c
    device_kind=_string,  # cuda, rocm, xpu, mps or cpu
    device_name=_string,
    device_count=_i32,
    compute_units=_i32,  # SMs, CUs or physical cores
    memory_gib=_f32,
    driver=_string,
    runtime=_string,  # "CUDA 13.0", "ROCm 6.4" or empty
    cpu_name=_string,
    cpu_cores=_i32,
    ram_gib=_f32,
    os=_string,
    python=_string,
    torch=_string,
    libraries=_string,  # JSON object: package to version
    emulated=pa.bool_(),  # a part of a larger device standing in for a smaller one
)

# Columns of `windows` that come before the features, which dataset/windows.py appends.
WINDOW_KEYS = pa.schema(
    [
        pa.field("trace_id", _string),
        pa.field("window", _i32),
        pa.field("start_ns", _i64),
        pa.field("end_ns", _i64),
        pa.field("step", _i32),  # step in which the window begins, -1 outside of any
        pa.field("task", _string),
        pa.field("hardware_id", _string),
        pa.field("split_unit", _string),
        pa.field("positive", pa.bool_()),  # for any pattern on any lane class
        pa.field("ignored", pa.bool_()),  # not positive, and ignored for some pattern
        pa.field("cpu_patterns", pa.list_(_string)),
        pa.field("gpu_patterns", pa.list_(_string)),
        pa.field("cpu_ignored", pa.list_(_string)),
        pa.field("gpu_ignored", pa.list_(_string)),
    ]
)
