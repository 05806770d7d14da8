"""A trace in memory: parallel numpy arrays, with every id resolved to an event index."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchtraceap.errors import UserError
from torchtraceap.labels.types import Instance, LaneClass, Quality, Segment, quality

IntArray = NDArray[np.integer]

CPU_CATEGORIES = frozenset(
    {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "xpu_runtime", "overhead"}
)
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"})
CATEGORIES = tuple(sorted(CPU_CATEGORIES | GPU_CATEGORIES))
"""Kineto categories that are kept; a ROCm trace uses the same names.

Not ``gpu_user_annotation``: Kineto's projection of CPU annotations onto streams, which the tree gives too,
and which would lie between the kernels of a segment.
"""


class Lane(msgspec.Struct, frozen=True):
    """A CPU thread or a GPU stream. ``name`` is ``thread 0`` ..., ``stream 7`` ...; device is -1 for CPU."""

    kind: LaneClass
    name: str
    device: int = -1


class Op(msgspec.Struct, frozen=True):
    """What events of one signature share; events refer to it by index.

    ``shapes`` and ``types`` are the JSON of Kineto's "Input Dims" and "Input type", empty when not
    recorded; ``grid`` and ``block`` the launch configuration of a kernel as JSON; ``bytes`` the size of a
    memory copy or set, else 0.
    """

    name: str
    category: str
    shapes: str = ""
    types: str = ""
    grid: str = ""
    block: str = ""
    bytes: int = 0


@dataclass(eq=False)
class Events:
    """Parallel arrays of equal length, sorted by lane, then start, then longest first.

    In this order an event's descendants on its lane follow it immediately.

    Attributes:
        lane: int16, index into the trace's lanes.
        op: int32, index into the trace's ops.
        start_ns: int64, nanoseconds from the trace's first event.
        dur_ns: int64, nanoseconds.
        parent: int32, index of the event above in the tree, -1 for none. For a CPU event the innermost
            event of the same thread that encloses it; for a GPU event the CPU op that launched it.
        launch: int32, for a GPU event the index of the runtime or driver call that launched it, else -1.
        forward: int32, for a backward op the index of the forward op whose gradient it computes, else -1.
    """

    lane: IntArray
    op: IntArray
    start_ns: IntArray
    dur_ns: IntArray
    parent: IntArray
    launch: IntArray
    forward: IntArray

    DTYPES: ClassVar[dict[str, type[np.integer]]] = {
        "lane": np.int16,
        "op": np.int32,
        "start_ns": np.int64,
        "dur_ns": np.int64,
        "parent": np.int32,
        "launch": np.int32,
        "forward": np.int32,
    }

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def end_ns(self) -> IntArray:
        return self.start_ns + self.dur_ns

    def arrays(self) -> dict[str, IntArray]:
        """The columns by name, in the order of the schema."""
        return {name: getattr(self, name) for name in self.DTYPES}


@dataclass(eq=False)
class Trace:
    """One profile: lanes, ops and events. Equality compares contents.

    A trace never holds raw ids (correlation, external id, sequence number, process or thread id): they are
    resolved to indices when it is read, so none can give away the order in which traces were made.
    """

    lanes: list[Lane]
    ops: list[Op]
    events: Events

    def __len__(self) -> int:
        return len(self.events)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = self.events.arrays(), other.events.arrays()
        return (
            self.lanes == other.lanes
            and self.ops == other.ops
            and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        )

    @cached_property
    def names(self) -> NDArray[np.object_]:
        """Name of each event, ``str``, shape (events,).

        References to the ops' own strings: an array of numpy's fixed-width strings would give each event
        the room of the longest kernel name.
        """
        return np.array([op.name for op in self.ops], dtype=object)[self.events.op]

    @cached_property
    def categories(self) -> NDArray[np.object_]:
        """Kineto category of each event, ``str``, shape (events,)."""
        return np.array([op.category for op in self.ops], dtype=object)[self.events.op]

    @cached_property
    def on_gpu(self) -> NDArray[np.bool_]:
        """Whether each event lies on a stream, shape (events,)."""
        return np.array([lane.kind == "gpu" for lane in self.lanes], dtype=bool)[self.events.lane]

    @cached_property
    def duration_ns(self) -> int:
        """From the first event's start to the last event's end."""
        return int(self.events.end_ns.max(initial=0))

    @cached_property
    def step_bounds(self) -> NDArray[np.int64]:
        """Start and end of each ``ProfilerStep``, shape (steps, 2), in time order; empty without any."""
        in_ops = np.array(
            [op.category == "user_annotation" and op.name.startswith("ProfilerStep#") for op in self.ops],
            dtype=bool,
        )
        rows = np.flatnonzero(in_ops[self.events.op]) if len(self.ops) else np.empty(0, dtype=np.int64)
        bounds = np.stack([self.events.start_ns[rows], self.events.end_ns[rows]], axis=1)
        return bounds[np.argsort(bounds[:, 0], kind="stable")].astype(np.int64)

    @cached_property
    def step(self) -> NDArray[np.int32]:
        """Profiled step of each event, counted from 0; -1 outside of any.

        A GPU event belongs to the step that launched it, though it may run later; if neither its launch
        call nor its op is in the trace, to none.
        """
        bounds = self.step_bounds
        if not len(bounds):
            return np.full(len(self), -1, dtype=np.int32)
        above = np.where(self.events.launch >= 0, self.events.launch, self.events.parent)
        origin = np.where(self.on_gpu, above, np.arange(len(self)))
        start = self.events.start_ns[origin]
        index = np.searchsorted(bounds[:, 0], start, side="right") - 1
        inside = (origin >= 0) & (index >= 0) & (start < bounds[np.maximum(index, 0), 1])
        return np.where(inside, index, -1).astype(np.int32)

    def select(self, keep: NDArray[np.bool_]) -> tuple[Trace, IntArray]:
        """Drop events and renumber the rest.

        A kept event whose parent is dropped moves to its nearest kept ancestor. Time starts anew at the
        first kept event; ops and lanes that nothing uses any more go.

        Args:
            keep: bool, shape (events,).

        Returns:
            The smaller trace, and the new index of each old event (-1 when dropped), shape (events,).
        """
        events = self.events
        new_index = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
        parent = events.parent.copy()
        while True:  # one round per level of nested dropped ancestors
            dropped = (parent >= 0) & ~keep[parent]
            if not dropped.any():
                break
            parent[dropped] = events.parent[parent[dropped]]

        def follow(column: IntArray) -> IntArray:
            return np.where(column >= 0, new_index[column], -1)[keep].astype(np.int32)

        ops, op = np.unique(events.op[keep], return_inverse=True)
        lanes, lane = np.unique(events.lane[keep], return_inverse=True)
        start = events.start_ns[keep]
        trace = Trace(
            lanes=[self.lanes[i] for i in lanes],
            ops=[self.ops[i] for i in ops],
            events=Events(
                lane=lane.astype(np.int16),
                op=op.astype(np.int32),
                start_ns=start - (start.min() if len(start) else 0),
                dur_ns=events.dur_ns[keep],
                parent=follow(parent),
                launch=follow(events.launch),
                forward=follow(events.forward),
            ),
        )
        return trace, new_index

    def check(self, where: str = "trace") -> None:
        """Check every promise made above.

        Raises:
            UserError: Names ``where`` and the first broken promise.
        """
        events, n = self.events, len(self.events)

        def require(ok: bool | np.bool_, what: str) -> None:
            if not ok:
                raise UserError(f"{where}: {what}")

        for name, dtype in Events.DTYPES.items():
            column = getattr(events, name)
            require(column.dtype == dtype, f"column {name} is {column.dtype}, not {np.dtype(dtype)}")
            require(column.shape == (n,), f"column {name} has shape {column.shape}, not {(n,)}")
        if not n:
            return
        require((events.lane >= 0).all() and events.lane.max() < len(self.lanes), "an event names no lane")
        require((events.op >= 0).all() and events.op.max() < len(self.ops), "an event names no op")
        require((events.dur_ns >= 0).all(), "an event ends before it starts")
        require(events.start_ns.min() == 0, "time does not start at the first event")
        for name in ("parent", "launch", "forward"):
            column = getattr(events, name)
            require((column >= -1).all() and column.max() < n, f"{name} points outside of the trace")
            require((column != np.arange(n)).all(), f"an event is its own {name}")
        order = np.lexsort((-events.dur_ns, events.start_ns, events.lane))
        require(
            np.array_equal(events.lane[order], events.lane)
            and np.array_equal(events.start_ns[order], events.start_ns),
            "events are not sorted by lane and start",
        )


@dataclass(eq=False)
class TraceRecord:
    """A row of the table ``traces``: a trace, what is known of it, and its labels.

    ``meta`` holds the row's scalar columns (``schema.TRACE_META``); ``exhaustive`` the patterns for which
    every instance in the trace is known, so that a further prediction is a false alarm.
    """

    trace: Trace
    meta: dict[str, object] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    exhaustive: list[str] = field(default_factory=list)

    @property
    def trace_id(self) -> str:
        return str(self.meta["trace_id"])

    @property
    def quality(self) -> Quality:
        return quality(self.instances)
