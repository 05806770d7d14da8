"""Pictures for the card: what the instances cost, and which traces show their tasks best.

The chart is SVG written here: a strip plot needs no plotting library. Timelines are drawn by whoever asks for
the card, as drawing belongs to ``eval``, which this package does not import.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape

from torchtraceap.dataset.card import Released
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.labels.types import STATES, Instance, State

Draw = Callable[[TraceRecord], str]
"""Draws a trace with its labels as SVG."""

WIDTH, GUTTER, RIGHT, ROW, TOP = 900, 210, 20, 16, 40
TICKS = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Cost ratios on the axis, which ends at the first that holds all; what lies beyond is drawn at an end."""

COLOURS = {"costly": "#cf222e", "benign": "#57606a", "undecided": "#9a6700"}
STYLE = """\
.c{--ink:#1f2328;--dim:#656d76;--line:#d0d7de;--bg:#fff}
@media(prefers-color-scheme:dark){.c{--ink:#e6edf3;--dim:#8d96a0;--line:#30363d;--bg:#0d1117}}
.c text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:var(--ink)}.c .dim{fill:var(--dim)}
.c .end{text-anchor:end}.c .mid{text-anchor:middle}.c .bg{fill:var(--bg)}
.c path{stroke:var(--line)}.c .one{stroke:var(--dim);stroke-dasharray:3 3}.c circle{fill-opacity:.55}
"""


def costs_svg(released: Sequence[Released]) -> str:
    """A dot for each injected instance: by pattern, how much slower a step is with it.

    The axis is logarithmic in the ratio of step times; colours are states. Traces of one workload that show
    the same measurement (several ranks) are one dot.
    """
    seen: dict[str, set[tuple[str, Instance]]] = defaultdict(set)
    for one in released:
        for instance in one.instances:
            if instance.source == "injected" and math.isfinite(instance.cost_ratio):
                seen[instance.pattern].add((str(one.meta["pair_id"]), instance))
    order = sorted(seen, key=lambda name: (-_middle([i.cost_ratio for _, i in seen[name]]), name))
    highest = max((i.cost_ratio for instances in seen.values() for _, i in instances), default=1.0)
    ticks = [tick for tick, below in zip(TICKS, (0.0, 0.0, *TICKS[1:]), strict=False) if below < highest]
    height = TOP + ROW * len(order) + 34
    parts = [f'<rect class="bg" width="{WIDTH}" height="{height}"/>']
    bottom = TOP + ROW * len(order) + 4
    for tick in ticks:
        x = _x(tick, ticks)
        parts.append(f'<path class="{"one" if tick == 1 else ""}" d="M{x:.1f} {TOP - 8}V{bottom}"/>')
        parts.append(f'<text class="dim mid" x="{x:.1f}" y="{TOP - 14}">{tick:g}</text>')
    for row, name in enumerate(order):
        y = TOP + ROW * row + 6
        parts.append(f'<text class="end" x="{GUTTER - 12}" y="{y + 4}">{escape(name)}</text>')
        dots = sorted((_x(i.cost_ratio, ticks), i.state) for _, i in seen[name])
        parts += [f'<circle cx="{x:.1f}" cy="{y}" r="3.2" fill="{COLOURS[state]}"/>' for x, state in dots]
    parts += _legend(bottom + 20)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="c" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="Costs of injected instances by pattern">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _legend(y: float) -> list[str]:
    parts = [f'<text class="dim end" x="{GUTTER - 12}" y="{TOP - 14}">step time with / without</text>']
    for index, state in enumerate(STATES):
        x = GUTTER + 110 * index
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="3.2" fill="{COLOURS[state]}"/>')
        parts.append(f'<text class="dim" x="{x + 10}" y="{y}">{state}</text>')
    return parts


def _x(ratio: float, ticks: Sequence[float]) -> float:
    least, most = ticks[0], ticks[-1]
    share = math.log(min(max(ratio, least), most) / least) / math.log(most / least)
    return GUTTER + share * (WIDTH - GUTTER - RIGHT)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


_PREFERENCE: dict[State, int] = {"costly": 0, "benign": 1, "undecided": 2}


def shown_traces(released: Sequence[Released]) -> dict[str, str]:
    """Task to the id of the trace that its picture shows.

    Of the traces outside of test one with a costly injected instance that has a segment, else with a benign
    or an undecided one; among these that with the fewest events, which is easiest to read. A task without
    any is left out.
    """
    best: dict[str, tuple[int, int, str]] = {}
    for one in released:
        if one.split == "test":
            continue
        states = [
            _PREFERENCE[instance.state]
            for instance, segments in zip(one.instances, one.segments, strict=True)
            if instance.source == "injected" and segments
        ]
        if states:
            rank = min(states), one.events, str(one.meta["trace_id"])
            task = str(one.meta["task"])
            best[task] = min(best.get(task, rank), rank)
    return {task: best[task][2] for task in sorted(best)}
