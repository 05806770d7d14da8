"""Valid random traces with labels, the same for the same seed."""

from __future__ import annotations

import json
import random

import numpy as np

from torchtraceap.dataset.schema import TASKS
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.labels.types import Instance, Scope, Segment, Source, State, quality

STEPS = 3
MAIN, AUTOGRAD, STREAM, COPIES = range(4)
HOSTILE_NAMES = ("<b>x</b>", 'aten::"quoted"\\', "ядро::свёртка", "red\x1b[31m", "&amp;{{x}}", "aten::名前")


class _Timeline:
    """Collects events in the order in which they are made up; ``trace`` sorts and renumbers them."""

    def __init__(self, rng: random.Random, gpu: bool) -> None:
        self.rng = rng
        self.gpu = gpu
        self.clock = 0
        self.stop = 0  # number of events at which the growing of trees ends
        self.free = {STREAM: 0, COPIES: 0}  # when each stream has finished its queue
        self.ops: dict[Op, int] = {}
        self.rows: list[list[int]] = []  # lane, op, start, duration, parent, launch, forward

    def room(self, events: int = 1) -> bool:
        return len(self.rows) + events <= self.stop

    def tick(self) -> int:
        self.clock += self.rng.randint(200, 9_000)
        return self.clock

    def add(self, lane: int, op: Op, start: int, dur: int, parent=-1, launch=-1, forward=-1) -> int:
        self.rows.append([lane, self.ops.setdefault(op, len(self.ops)), start, dur, parent, launch, forward])
        return len(self.rows) - 1

    def open(self, lane: int, op: Op, parent: int = -1, forward: int = -1) -> int:
        return self.add(lane, op, self.tick(), 0, parent, forward=forward)

    def close(self, event: int) -> None:
        self.rows[event][3] = self.tick() - self.rows[event][2]

    def launch(self, lane: int, parent: int, call: str, stream: int, work: Op) -> None:
        """A runtime call, and what it puts on a stream (two events)."""
        call_event = self.open(lane, Op(call, "cuda_runtime"), parent)
        self.close(call_event)
        start = max(self.free[stream], self.clock + self.rng.randint(1_000, 5_000))
        dur = self.rng.randint(800, 60_000)
        self.free[stream] = start + dur + self.rng.randint(100, 900)
        self.add(stream, work, start, dur, parent, launch=call_event)

    def synchronize(self, lane: int, parent: int) -> None:
        call = self.open(lane, Op("cudaStreamSynchronize", "cuda_runtime"), parent)
        self.clock = max(self.clock, *self.free.values())
        self.close(call)

    def grow(self, lane: int, parent: int, prefix: str, forward: int = -1, depth: int = 0) -> int:
        """An op with random children; leaves launch kernels."""
        rng = self.rng
        name = rng.choice(HOSTILE_NAMES) if rng.random() < 0.08 else f"{prefix}op{rng.randint(0, 30)}"
        shape = [rng.choice((1, 2, 8)), rng.choice((3, 64, 256)), 14, 14]
        op = Op(name, "cpu_op", json.dumps([shape, []]), json.dumps(["float", "Scalar"]))
        event = self.open(lane, op, parent, forward)
        if depth < 3 and rng.random() < 0.6:
            for _ in range(rng.randint(1, 3)):
                if self.room():
                    self.grow(lane, event, prefix, depth=depth + 1)
        elif self.gpu and self.room(2):
            kernel = Op(
                f"void kernel<{rng.randint(0, 12)}, float>(float*)", "kernel",
                grid=json.dumps([rng.randint(1, 132), 1, 1]), block="[256, 1, 1]",
            )  # fmt: skip
            self.launch(lane, event, "cudaLaunchKernel", STREAM, kernel)
        self.close(event)
        return event

    def trace(self) -> tuple[Trace, list[int]]:
        """The sorted trace, and the index in it of each event in ``rows``."""
        table = np.array(self.rows, dtype=np.int64)
        order = np.lexsort((-table[:, 3], table[:, 2], table[:, 0]))
        place = np.empty(len(table), dtype=np.int64)
        place[order] = np.arange(len(table))
        for column in (4, 5, 6):
            table[:, column] = np.where(table[:, column] >= 0, place[table[:, column]], -1)
        table[:, 2] -= table[:, 2].min()
        columns = zip(Events.DTYPES.items(), table[order].T, strict=True)
        events = Events(**{name: values.astype(dtype) for (name, dtype), values in columns})
        lanes = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1")]
        lanes += [Lane("gpu", "stream 7", 0), Lane("gpu", "stream 20", 0)] if self.gpu else []
        return Trace(lanes=lanes, ops=list(self.ops), events=events), place.tolist()


def _segments(trace: Trace, instance: int, members: list[int]) -> list[Segment]:
    """Runs of consecutive events of one lane and step."""
    events, step = trace.events, trace.step
    runs: list[list[int]] = []
    for event in sorted(members):
        last = runs[-1][-1] if runs else -2
        same = event == last + 1 and events.lane[event] == events.lane[last] and step[event] == step[last]
        runs[-1].append(event) if same else runs.append([event])
    return [
        Segment(
            instance=instance,
            lane=int(events.lane[run[0]]),
            lane_class=trace.lanes[events.lane[run[0]]].kind,
            step=int(step[run[0]]),
            start_ns=int(events.start_ns[run].min()),
            end_ns=int(events.end_ns[run].max()),
            first_event=run[0],
            event_count=len(run),
        )
        for run in runs
    ]


def _float32(value: float) -> float:
    """The nearest value that survives a float32 column."""
    return float(np.float32(value))


def random_record(seed: int, events: int = 200, gpu: bool = True, state: State | None = None) -> TraceRecord:
    """A labelled trace of three training steps.

    Two threads (forward and backward) and, with ``gpu``, two streams. Names may be hostile. Instances: an
    injected local one (``host_sync`` on a GPU, ``recomputed_constant`` without), in every step or in some; a
    look-alike of ``redundant_copy``, always benign; in odd seeds also a step-scope ``unfused_optimizer``.

    Args:
        seed: The same seed gives an equal record.
        events: Exact number of events, at least 60.
        gpu: Whether there are streams.
        state: Of the injected instances. By default ``(costly, benign, costly, undecided)[seed % 4]``.
    """
    assert events >= 60
    rng = random.Random(seed)
    line = _Timeline(rng, gpu)
    state = state or ("costly", "benign", "costly", "undecided")[seed % 4]
    on = set(range(STEPS)) if seed % 2 else set(rng.sample(range(STEPS), rng.randint(1, STEPS)))
    injected: list[int] = []
    lookalike: list[int] = []
    unfused: list[int] = []
    for step in range(STEPS):
        first, last = events * step // STEPS, events * (step + 1) // STEPS
        profiled = line.open(MAIN, Op(f"ProfilerStep#{step}", "user_annotation"))
        forward: list[int] = []

        line.stop = first + (last - first) // 3
        while line.room():
            forward.append(line.grow(MAIN, profiled, "aten::"))

        line.stop = last
        start = len(line.rows)
        if step in on and gpu:
            item = line.open(MAIN, Op("aten::item", "cpu_op", "[[]]", '["float"]'), profiled)
            copy = Op("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", bytes=4)
            line.launch(MAIN, item, "cudaMemcpyAsync", COPIES, copy)
            line.synchronize(MAIN, item)
            line.close(item)
        elif step in on:
            outer = line.open(MAIN, Op("aten::arange", "cpu_op", "[[], []]"), profiled)
            inner = line.open(MAIN, Op("aten::empty", "cpu_op"), outer)
            line.close(inner)
            line.close(outer)
        injected += range(start, len(line.rows))

        lookalike.append(line.open(MAIN, Op("aten::clone", "cpu_op", "[[2, 3]]", '["float"]'), profiled))
        line.close(lookalike[-1])

        line.stop = first + (last - first) * 4 // 5
        while line.room():
            source = rng.choice(forward)
            line.grow(AUTOGRAD, -1, "autograd::engine::evaluate_function: ", forward=source)

        line.stop = last
        start = len(line.rows)
        optimizer = line.open(MAIN, Op("Optimizer.step#SGD.step", "user_annotation"), profiled)
        while line.room():
            line.grow(MAIN, optimizer, "aten::")
        line.close(optimizer)
        unfused += range(start, len(line.rows))
        line.close(profiled)

    trace, place = line.trace()

    def instance(pattern: str, variant: str, scope: Scope, source: Source, state: State, ratio: float):
        every_step = source == "lookalike" or scope == "step" or len(on) == STEPS
        return Instance(
            pattern=pattern, variant=variant, scope=scope, source=source, state=state, every_step=every_step,
            sites=1, cost_ms=_float32(10 * (ratio - 1)), cost_ratio=_float32(ratio),
            cost_low=_float32(ratio / 1.004), cost_high=_float32(ratio * 1.004),
        )  # fmt: skip

    ratio = {"costly": 1.1, "benign": 1.001, "undecided": 1.012}[state]
    pattern, variant = ("host_sync", "item") if gpu else ("recomputed_constant", "position_table")
    chosen = [
        instance(pattern, variant, "local", "injected", state, ratio),
        instance("redundant_copy", "views", "local", "lookalike", "benign", 1.0),
    ]
    members = [injected, lookalike]
    if seed % 2:
        chosen.append(instance("unfused_optimizer", "foreach", "step", "injected", state, ratio))
        members.append(unfused)
    segments = [
        segment
        for index, rows in enumerate(members)
        for segment in _segments(trace, index, [place[row] for row in rows])
    ]
    source = ("timm", "torchvision", "transformers")[seed % 3]
    step_ms = float(np.median(np.diff(trace.step_bounds, axis=1))) / 1e6
    meta: dict[str, object] = {
        "trace_id": f"{rng.getrandbits(64):016x}",
        "pair_id": f"{random.Random(seed // 2).getrandbits(64):016x}",
        "model": f"{source}/model{seed}",
        "source": source,
        "task": TASKS[seed % len(TASKS)],
        "family": f"family{seed % 11}",
        "backbone_family": f"backbone{seed % 5}",
        "split_unit": f"unit{seed % 5}",
        "hardware_id": "nvidia-h200" if gpu else "cpu-x86",
        "mode": "train",
        "precision": ("fp32", "bf16")[seed % 2],
        "batch_size": 2 ** (seed % 6),
        "input_shape": "3x224x224",
        "rank": 0,
        "world_size": 1,
        "steps": STEPS,
        "quality": quality(chosen),
        "step_ms": _float32(step_ms),
        "profiler_ratio": 1.0625,
        "gpu_busy": 0.5 if gpu else float("nan"),
    }
    exhaustive = sorted({one.pattern for one in chosen})
    return TraceRecord(trace=trace, meta=meta, instances=chosen, segments=segments, exhaustive=exhaustive)
