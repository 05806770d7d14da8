"""A trace as a picture: lanes over time, with the truth and what a detector says."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Trace
from torchtraceap.eval.facts import IntArray
from torchtraceap.eval.markup import escaped, visible
from torchtraceap.eval.submission import Detection
from torchtraceap.labels.types import LANE_CLASSES, STATES, Instance, LaneClass, Segment, State

KINDS = {
    "op": "operator",
    "note": "annotation",
    "call": "runtime call",
    "sync": "wait",
    "kernel": "kernel",
    "copy": "copy or set",
}
"""Colours of events, in the order in which one wins where several share a pixel (the last wins)."""

MAX_LANES = 12
"""Lanes with the most events; data set loaders and NCCL can have dozens of threads."""
MAX_DEPTH = 6
"""Levels of nested operators; runtime calls have a row of their own below."""

GUTTER, RIGHT, TOP = 166, 14, 46
ROW, GPU_ROW, STRIP, GAP = 14, 22, 15, 16
CHARACTER = 6.05
"""Width of a character of the monospaced font at its size in the style below."""

STYLE = """\
.tl{--bg:#fff;--ink:#1f2328;--dim:#656d76;--line:#d0d7de;--band:#f3f5f8;--lane:#eaeef2;--op:#9cc3f0;
--note:#cdb4f6;--call:#8fd3cf;--sync:#f0883e;--kernel:#7fcf8e;--copy:#f2cc60;--costly:#cf222e;
--undecided:#9a6700;--benign:#57606a;--found:#8250df;--on:#1f2328}
@media(prefers-color-scheme:dark){.tl{--bg:#0d1117;--ink:#e6edf3;--dim:#8d96a0;--line:#30363d;--band:#151b23;
--lane:#1c232c;--op:#2f6fb8;--note:#7a55c0;--call:#1f8580;--sync:#d9731f;--kernel:#2f8f46;--copy:#a57c14;
--costly:#ff7b72;--undecided:#d29922;--benign:#8d96a0;--found:#b48ef5;--on:#fff}}
.tl text{font:10px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
.tl .dim{fill:var(--dim)}.tl .end{text-anchor:end}.tl .mid{text-anchor:middle}.tl .lane{font-weight:600}
.tl .on{fill:var(--on);pointer-events:none}
.tl .bg{fill:var(--bg)}.tl .band{fill:var(--band)}.tl .box{fill:var(--lane)}
.tl .rule{stroke:var(--line)}.tl .step{stroke:var(--dim);stroke-dasharray:3 3}
.tl .op{fill:var(--op)}.tl .note{fill:var(--note)}.tl .call{fill:var(--call)}.tl .sync{fill:var(--sync)}
.tl .kernel{fill:var(--kernel)}.tl .copy{fill:var(--copy)}.tl .found{fill:var(--found)}
.tl .costly{stroke:var(--costly);color:var(--costly)}
.tl .undecided{stroke:var(--undecided);color:var(--undecided)}
.tl .benign{stroke:var(--benign);color:var(--benign)}.tl .truth{stroke-width:1.25}
.tl text.costly,.tl text.undecided,.tl text.benign{fill:currentColor;stroke:none}
.tl .hatch{stroke:currentColor;stroke-width:1.6;stroke-opacity:.5}
"""
"""Of every timeline; a page with several of them needs it once."""


@dataclass(frozen=True)
class _Row:
    """Events that are drawn side by side, all of one lane."""

    events: IntArray
    y: float
    height: float


class _Canvas:
    """Collects markup, and maps time to pixels."""

    def __init__(self, start_ns: int, end_ns: int, width: int) -> None:
        self.start, self.end, self.width = start_ns, end_ns, width
        self.scale = (width - GUTTER - RIGHT) / (end_ns - start_ns)
        self.y = float(TOP)
        self.parts: list[str] = []

    def x(self, time: float) -> float:
        return GUTTER + (min(max(time, self.start), self.end) - self.start) * self.scale

    def span(self, start: float, end: float, least: float = 0.0) -> tuple[float, float]:
        """Left edge and width in pixels, at least ``least`` wide and inside of the plot."""
        left, right = self.x(start), self.x(end)
        if right - left < least:
            left = min(max(GUTTER, (left + right - least) / 2), self.width - RIGHT - least)
            right = left + least
        return left, right - left

    def seen(self, start: int, end: int) -> bool:
        return end >= self.start and start <= self.end

    def add(self, markup: str) -> None:
        self.parts.append(markup)

    def rect(self, kind: str, left: float, y: float, width: float, height: float, title: str = "") -> None:
        """A rectangle; ``title`` is markup, escaped already."""
        shape = f'<rect class="{kind}" x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
        self.add(f"{shape}><title>{title}</title></rect>" if title else f"{shape}/>")

    def hatched(
        self, state: State, left: float, y: float, width: float, height: float, title: str = ""
    ) -> None:
        """A box of a true segment; ``title`` is markup."""
        self.add(
            f'<rect class="truth {state}" fill="url(#{_HATCH}{state})" x="{left:.1f}" y="{y:g}" '
            f'width="{width:.1f}" height="{height:g}">{title and f"<title>{title}</title>"}</rect>'
        )

    def text(self, x: float, y: float, kind: str, text: str, limit: int = 60) -> None:
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escaped(text, limit)}</text>')


def timeline_svg(
    trace: Trace,
    segments: Sequence[Segment] = (),
    instances: Sequence[Instance] = (),
    detections: Iterable[Detection] = (),
    start_ns: int | None = None,
    end_ns: int | None = None,
    width: int = 1200,
    style: bool = True,
    detail: int = 1000,
) -> str:
    """Draw a trace, or a stretch of it, as SVG.

    From top to bottom: time in milliseconds and the profiled steps; each CPU thread with its nested
    operators and, in the lowest row, its runtime calls; what was detected on the CPU, a row a pattern; then
    the same for the GPU's streams. True segments are hatched boxes over their lane. Short events are merged
    by pixel, so that the size hardly depends on the number of events. Python frames are left out.

    Args:
        trace: The trace.
        segments, instances: The truth; segments refer to instances by index.
        detections: Of this trace.
        start_ns, end_ns: What to show, on the trace's clock; all of it by default.
        width: In pixels.
        style: Whether to include :data:`STYLE`, for a file of its own.
        detail: So many events, the longest, are rectangles with a name and a tooltip; all others are merged
            by pixel.

    Raises:
        ValueError: The stretch is empty, or the width leaves no room to draw.
    """
    first = 0 if start_ns is None else start_ns
    last = max(trace.duration_ns, first + 1) if end_ns is None else end_ns
    if first >= last:
        raise ValueError(f"nothing lies between {first} and {last} ns")
    if width < 2 * GUTTER:
        raise ValueError(f"a timeline needs at least {2 * GUTTER} pixels, not {width}")
    canvas = _Canvas(first, last, width)
    detections = [found for found in detections if canvas.seen(found.start_ns, found.end_ns)]
    kinds = _kinds(trace)
    depth = _depth(trace, kinds >= 0)
    shown = _shown_lanes(trace, canvas, kinds)
    rows: list[_Row] = []
    for lane_class in LANE_CLASSES:
        lanes = [lane for lane in shown if trace.lanes[lane].kind == lane_class]
        for lane in lanes:
            rows += _lane(canvas, trace, lane, kinds, depth, segments)
        if lanes:
            _found(canvas, lane_class, detections)
    _events(canvas, trace, rows, kinds, detail)
    _truth(canvas, trace, shown, rows, segments, instances)
    hidden = len(np.unique(trace.events.lane)) - len(shown)
    if hidden:
        canvas.text(10, canvas.y + 8, "dim", f"{hidden} more lane{'s' * (hidden > 1)}")
        canvas.y += STRIP
    _legend(canvas, bool(segments), bool(detections))
    height = canvas.y + 6
    back = _Canvas(first, last, width)
    _background(back, trace, canvas.y)
    body = "".join([*back.parts, *canvas.parts])
    mark = f"h{zlib.crc32(body.encode()):08x}"  # ids are global in a page with several timelines
    hatches = "".join(
        f'<pattern id="{mark}{state}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path class="hatch {state}" d="M0 0V6"/></pattern>'
        for state in STATES
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tl" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" role="img" aria-label="Timeline">'
        + (f"<style>{STYLE}</style>" if style else "")
        + f"<defs>{hatches}</defs>{body.replace(_HATCH, mark)}</svg>"
    )


_HATCH = "\x00hatch"
"""Stands for the id of the hatches until it is known; a NUL cannot come from escaped text."""


def _shown_lanes(trace: Trace, canvas: _Canvas, kinds: IntArray) -> list[int]:
    events = trace.events
    inside = (kinds >= 0) & (events.end_ns >= canvas.start) & (events.start_ns <= canvas.end)
    counts = np.bincount(events.lane[inside], minlength=len(trace.lanes))
    busiest = np.argsort(-counts, kind="stable")[:MAX_LANES]
    return sorted(int(lane) for lane in busiest if counts[lane])


def _kinds(trace: Trace) -> IntArray:
    """Index into ``KINDS`` of each event, -1 for what is not drawn, shape (events,)."""
    by_category = {
        "cpu_op": "op", "user_annotation": "note", "gpu_user_annotation": "note", "overhead": "call",
        "cuda_runtime": "call", "cuda_driver": "call", "xpu_runtime": "call", "kernel": "kernel",
        "gpu_memcpy": "copy", "gpu_memset": "copy", "cuda_sync": "sync",
    }  # fmt: skip
    order = list(KINDS)
    kinds = []
    for op in trace.ops:
        kind = by_category.get(op.category)
        if kind == "call" and "Synchronize" in op.name:
            kind = "sync"
        if op.name.startswith("ProfilerStep#"):
            kind = None  # drawn as the step's bounds
        kinds.append(-1 if kind is None else order.index(kind))
    return np.array(kinds, dtype=np.int64)[trace.events.op] if kinds else np.empty(0, dtype=np.int64)


def _depth(trace: Trace, drawn: NDArray[np.bool_]) -> IntArray:
    """Number of drawn events of its own lane above each event, shape (events,)."""
    parent = trace.events.parent
    above = np.where((parent >= 0) & (trace.events.lane[parent] == trace.events.lane), parent, -1)
    depth = np.zeros(len(trace), dtype=np.int64)
    while (above >= 0).any():  # one round per level of the tree
        depth += (above >= 0) & drawn[above]
        above = np.where(above >= 0, np.where(trace.on_gpu[above], -1, parent[above]), -1)
    return depth


def _lane(
    canvas: _Canvas, trace: Trace, lane: int, kinds: IntArray, depth: IntArray, segments: Sequence[Segment]
) -> list[_Row]:
    """Lay a lane out: its name, a strip for names of true segments, and its rows."""
    events = trace.events
    low, high = np.searchsorted(events.lane, [lane, lane + 1])
    part = slice(int(low), int(high))
    kinds, depth = kinds[part], depth[part]
    seen = (kinds >= 0) & (events.end_ns[part] >= canvas.start) & (events.start_ns[part] <= canvas.end)
    index = np.arange(low, high)
    order = list(KINDS)
    gpu = trace.lanes[lane].kind == "gpu"
    if gpu:
        notes = kinds == order.index("note")
        groups = [index[seen & notes], index[seen & ~notes]]
    else:
        calls = (kinds == order.index("call")) | (kinds == order.index("sync"))
        groups = [index[seen & ~calls & (depth == level)] for level in range(MAX_DEPTH)]
        groups.append(index[seen & calls])
    groups = [group for group in groups if len(group)]
    top = canvas.y
    if any(segment.lane == lane and canvas.seen(segment.start_ns, segment.end_ns) for segment in segments):
        canvas.y += STRIP
    height = GPU_ROW if gpu else ROW
    rows = []
    for group in groups:
        rows.append(_Row(group, canvas.y, height))
        canvas.y += height
    about = trace.lanes[lane]
    middle = (rows[0].y + canvas.y) / 2 if rows else top
    canvas.text(10, middle - 1, "lane", about.name, 24)
    canvas.text(10, middle + 11, "dim", f"GPU {about.device}" if gpu else "CPU")
    canvas.y = max(canvas.y, middle + STRIP)
    canvas.y += GAP / 2
    return rows


def _events(canvas: _Canvas, trace: Trace, rows: Sequence[_Row], kinds: IntArray, detail: int) -> None:
    """The longest events as rectangles of their own, all others merged by pixel."""
    events, names = trace.events, list(KINDS)
    widths = [events.dur_ns[row.events] * canvas.scale for row in rows]
    flat = np.sort(np.concatenate([*widths, [0.0]]))[::-1]
    titled = max(3.0, float(flat[min(detail, len(flat) - 1)]))
    for row, pixels in zip(rows, widths, strict=True):
        _merged(canvas, trace, row, row.events[pixels <= titled], kinds)
        for event in row.events[pixels > titled].tolist():
            name = trace.ops[events.op[event]].name
            left, wide = canvas.span(
                int(events.start_ns[event]), int(events.start_ns[event] + events.dur_ns[event])
            )
            title = f"{escaped(name, 100)}, {_duration(int(events.dur_ns[event]))}"
            canvas.rect(names[kinds[event]], left, row.y + 0.5, max(wide - 0.5, 0.5), row.height - 1, title)
            room = int((wide - 6) / CHARACTER)
            if room >= 4:
                canvas.text(left + 3, row.y + row.height / 2 + 3, "on", _short(name, room), room)


def _merged(canvas: _Canvas, trace: Trace, row: _Row, chosen: IntArray, kinds: IntArray) -> None:
    """Events that are too short to be told apart: a colour a pixel, equal neighbours in one stroke."""
    if not len(chosen):
        return
    cells = int(canvas.width - GUTTER - RIGHT)
    colour = np.full(cells, -1, dtype=np.int64)
    start = (np.maximum(trace.events.start_ns[chosen], canvas.start) - canvas.start) * canvas.scale
    end = (np.minimum(trace.events.end_ns[chosen], canvas.end) - canvas.start) * canvas.scale
    first = np.clip(start.astype(np.int64), 0, cells - 1)
    length = np.clip(np.ceil(end).astype(np.int64) - first, 1, cells - first)
    touched = np.repeat(first - np.concatenate([[0], np.cumsum(length)[:-1]]), length) + np.arange(
        length.sum()
    )
    np.maximum.at(colour, touched, np.repeat(kinds[chosen], length))
    edges = np.flatnonzero(np.diff(colour, prepend=-2, append=-2))
    for kind, name in enumerate(KINDS):
        strokes = [
            f"M{GUTTER + a} {row.y + 0.5:g}h{b - a}v{row.height - 1:g}h{a - b}z"
            for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            if colour[a] == kind
        ]
        if strokes:
            canvas.add(f'<path class="{name}" d="{"".join(strokes)}"/>')


def _truth(
    canvas: _Canvas,
    trace: Trace,
    shown: Sequence[int],
    rows: Sequence[_Row],
    segments: Sequence[Segment],
    instances: Sequence[Instance],
) -> None:
    """Hatched boxes over the lanes, with a name where there is room for it."""
    for lane in shown:
        mine = [row for row in rows if trace.events.lane[row.events[0]] == lane]
        if not mine:  # nothing of the lane is drawn in this stretch
            continue
        top, bottom = mine[0].y, mine[-1].y + mine[-1].height
        free = float(GUTTER)  # where the next name may begin
        drawn: dict[int, float] = {}  # right edge of the last box of each instance
        for segment in sorted(segments, key=lambda segment: segment.start_ns):
            if segment.lane != lane or not canvas.seen(segment.start_ns, segment.end_ns):
                continue
            instance = instances[segment.instance]
            left, wide = canvas.span(segment.start_ns, segment.end_ns, least=2.0)
            if left + wide <= drawn.get(segment.instance, 0.0) + 0.5:
                continue  # within a pixel of the last one
            drawn[segment.instance] = left + wide
            label = f"{instance.pattern} · {instance.state}"
            title = f"{escaped(label)}, {_duration(segment.end_ns - segment.start_ns)}"
            canvas.hatched(instance.state, left, top - 1, wide, bottom - top + 2, title)
            room = canvas.width - RIGHT - left
            if left >= free and len(label) * CHARACTER <= room:
                canvas.text(left, top - 4, escaped(instance.state), label)
                free = left + (len(label) + 2) * CHARACTER


def _found(canvas: _Canvas, lane_class: LaneClass, detections: Sequence[Detection]) -> None:
    """What was detected on a lane class, a row a pattern."""
    mine = [found for found in detections if found.lane == lane_class]
    for pattern in sorted({found.pattern for found in mine}):
        canvas.rect("box", GUTTER, canvas.y, canvas.width - GUTTER - RIGHT, STRIP - 3)
        canvas.text(GUTTER - 6, canvas.y + 8, "dim end", pattern, 25)
        for found in mine:
            if found.pattern == pattern:
                left, wide = canvas.span(found.start_ns, found.end_ns, least=2.0)
                title = f"detected {escaped(pattern)}, score {found.score:.3g}"
                canvas.rect("found", left, canvas.y, wide, STRIP - 3, title)
        canvas.y += STRIP
    canvas.y += GAP / 2


def _background(canvas: _Canvas, trace: Trace, bottom: float) -> None:
    """Paper, bands of the steps, and the axis."""
    canvas.add('<rect class="bg" width="100%" height="100%"/>')
    for step, (first, last) in enumerate(trace.step_bounds.tolist()):
        if not canvas.seen(first, last):
            continue
        left, wide = canvas.span(first, last)
        if step % 2 == 0:
            canvas.rect("band", left, TOP - 24, wide, bottom - TOP + 6)
        if canvas.start <= first:
            canvas.add(f'<path class="step" d="M{left:.1f} {TOP - 24}V{bottom - 18:g}"/>')
        if wide > 60:
            canvas.text(left + 5, TOP - 12, "dim", f"step {step}")
    canvas.add(f'<path class="rule" d="M{GUTTER} {TOP - 24}H{canvas.width - RIGHT}"/>')
    spacing = _spacing((canvas.end - canvas.start) / 1e6 / 9)
    digits = max(0, -int(np.floor(np.log10(spacing))))
    tick = np.ceil(canvas.start / 1e6 / spacing) * spacing
    while tick <= canvas.end / 1e6:
        x = canvas.x(tick * 1e6)
        canvas.add(f'<path class="rule" d="M{x:.1f} {TOP - 28}v4"/>')
        if GUTTER + 12 < x < canvas.width - RIGHT - 12:
            canvas.text(x, TOP - 31, "dim mid", f"{tick:.{digits}f}")
        tick += spacing
    canvas.text(GUTTER - 6, TOP - 31, "dim end", "ms")


def _spacing(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least this."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9)))


def _legend(canvas: _Canvas, truth: bool, found: bool) -> None:
    canvas.y += 4
    x = float(GUTTER)
    y = canvas.y

    def entry(label: str, swatch: Callable[[float], None]) -> None:
        nonlocal x
        swatch(x)
        canvas.text(x + 15, y + 8, "dim", label)
        x += 15 + (len(label) + 3) * CHARACTER

    for kind, label in KINDS.items():
        entry(label, partial(canvas.rect, kind, y=y, width=11, height=9))
    for state in STATES if truth else ():
        entry(f"true, {state}", partial(canvas.hatched, state, y=y, width=11, height=9))
    if found:
        entry("detected", lambda x: canvas.rect("found", x, y, 11, 9))
    canvas.y += 12


def _short(name: str, room: int) -> str:
    """A name cut to what tells most: no namespace of operators, no return type or arguments of kernels."""
    name = visible(name, 4096).removeprefix("aten::").removeprefix("void ")
    name = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("at::native::")
    return name if len(name) <= room else name[: room - 1] + "…"


def _duration(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms" if ns >= 100_000 else f"{ns / 1e3:.1f} µs"
