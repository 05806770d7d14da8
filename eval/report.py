"""Scores, traces and detections as one HTML file that needs nothing else and loads nothing.

Everything from traces, submissions and cards is untrusted: templates escape it, and the page's content
security policy allows only the one style sheet and the one script written here, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torchtraceap.dataset.trace import Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.eval.diagnose import Diagnosis
from torchtraceap.eval.leaderboard import ALL_COLUMNS, ranked
from torchtraceap.eval.markup import visible
from torchtraceap.eval.metrics import METRIC_BY_NAME
from torchtraceap.eval.scorer import Score, ScoreResult
from torchtraceap.eval.submission import Detection
from torchtraceap.eval.timeline import STYLE, timeline_svg
from torchtraceap.files import write_text
from torchtraceap.labels.pattern import PATTERNS
from torchtraceap.labels.types import Instance, LaneClass, Segment

MAX_BYTES = 10 * 2**20
"""Larger pages are slow to open; so many traces are to be split over several."""
MAX_DETECTIONS = 40
"""Listed of a trace; all of them are drawn."""
MAX_PANELS = 4
CONTEXT = 0.15
"""Of a panel's length, shown before and after it."""
LEAST_CONTEXT_NS = 20_000
OVERVIEW_DETAIL, PANEL_DETAIL = 400, 150
"""Rectangles with tooltips, which are most of a page's size."""

SHOWN_META = (
    "model", "task", "mode", "hardware_id", "precision", "batch_size", "input_shape", "steps", "step_ms",
    "gpu_busy", "profiler_ratio",
)  # fmt: skip

_Span = tuple[LaneClass, int, int]
"""Lane class, start and end of a place."""

_TEMPLATES = Environment(
    loader=PackageLoader("torchtraceap.eval", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(
    path: Path,
    records: Iterable[TraceRecord],
    detections: Iterable[Detection] = (),
    results: Sequence[ScoreResult] = (),
    title: str = "Detections",
) -> None:
    """Write the report: scores, and each trace with its truth, detections and remedies.

    Args:
        path: The HTML file, replaced as a whole.
        records: Traces to show, about 40 at most.
        detections: Of one detector; those of other traces are left out.
        results: Scores of any number of detectors, scored alike; none leaves the table out.
        title: Heading.

    Raises:
        UserError: The page would be larger than 10 MiB, or results cannot be compared.
    """
    by_trace: dict[str, list[Detection]] = {}
    for detection in detections:
        by_trace.setdefault(detection.trace_id, []).append(detection)
    page = _page(
        "report.html.j2",
        title=visible(title),
        board=_board(results) if results else None,
        traces=[_trace(record, by_trace.get(record.trace_id, [])) for record in records],
    )
    _write(path, page)


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Write a diagnosis as a page of its own.

    Raises:
        UserError: The page would be larger than 10 MiB.
    """
    _write(path, diagnosis_html(diagnosis))


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The page of a diagnosis: the timeline, and each cause with its places and remedy."""
    causes = []
    for cause in diagnosis.major:
        pattern = PATTERNS[cause.pattern]
        mine = [found for found in diagnosis.detections if found.pattern == cause.pattern]
        spans: list[_Span] = [(found.lane, found.start_ns, found.end_ns) for found in _best(mine)[:1]]
        causes.append(
            {
                "id": pattern.id,
                "title": pattern.title,
                "definition": pattern.definition,
                "remedy": pattern.remedy,
                "cost": diagnosis.cost(cause),
                "places": [(visible(place), number) for place, number in cause.places],
                "panels": [
                    {"title": _where(span), "svg": _panel(diagnosis.trace, span, detections=mine)}
                    for span in spans
                ],
            }
        )
    overview = timeline_svg(
        diagnosis.trace, detections=diagnosis.detections, style=False, detail=OVERVIEW_DETAIL
    )
    return _page(
        "diagnosis.html.j2",
        title=visible(diagnosis.name),
        summary=diagnosis.summary,
        overview=Markup(overview),
        notes=diagnosis.notes,
        causes=causes,
        minor=", ".join(cause.pattern for cause in diagnosis.minor),
    )


def _page(template: str, **values: Any) -> str:
    css = STYLE + _source("report.css.j2")
    js = _source("report.js.j2")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _TEMPLATES.get_template(template).render(policy=policy, css=Markup(css), js=Markup(js), **values)


def _source(name: str) -> str:
    """A file that goes into the page as it is."""
    return _TEMPLATES.get_template(name).render()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(path: Path, page: str) -> None:
    size = len(page.encode())
    if size > MAX_BYTES:
        raise UserError(
            f"{path} would have {size / 2**20:.0f} MiB, more than {MAX_BYTES // 2**20}; show fewer traces"
        )
    write_text(path, page)


def _board(results: Sequence[ScoreResult]) -> dict[str, Any]:
    order = ranked(results)
    metrics = [METRIC_BY_NAME[name] for name in ALL_COLUMNS]
    return {
        "columns": [
            ALL_COLUMNS[metric.name] + ("" if metric.higher_is_better else " ↓") for metric in metrics
        ],
        "rows": [
            {
                "name": visible(f"{result.card.name} {result.card.version}"),
                "cells": [_cell(result.scores[metric.name]) for metric in metrics],
            }
            for result in order
        ],
        "caption": (
            f"Split {order[0].provenance['split']}, {order[0].counts['traces']} traces; 95 % intervals over "
            f"{order[0].counts['split_units']} split units."
        ),
    }


def _cell(score: Score) -> dict[str, str]:
    known = score.value is not None
    bounded = score.low is not None and score.high is not None
    return {
        "value": f"{score.value:.3f}" if known else "–",
        "interval": f"{score.low:.3f} to {score.high:.3f}" if bounded else "",
    }


def _trace(record: TraceRecord, detections: Sequence[Detection]) -> dict[str, Any]:
    trace, found = record.trace, _best(detections)
    overview = timeline_svg(
        trace, record.segments, record.instances, found, style=False, detail=OVERVIEW_DETAIL
    )
    panels = [
        {"title": title, "svg": _panel(trace, span, record.segments, record.instances, found)}
        for title, span in _panels(record, found)
    ]
    named = {detection.pattern for detection in found} | {
        instance.pattern for instance in record.instances if instance.state == "costly"
    }
    return {
        "name": visible(record.trace_id),
        "quality": record.quality,
        "summary": f"{len(trace):,} events, {trace.duration_ns / 1e6:.1f} ms, {len(found)} detections",
        "meta": [(name, _value(record.meta[name])) for name in SHOWN_META if name in record.meta],
        "instances": [_instance(instance) for instance in record.instances],
        "overview": Markup(overview),
        "panels": panels,
        "detections": [
            {
                "pattern": visible(detection.pattern),
                "lane": detection.lane,
                "start": f"{detection.start_ns / 1e6:.3f}",
                "length": f"{(detection.end_ns - detection.start_ns) / 1e6:.3f}",
                "score": f"{detection.score:.3g}",
            }
            for detection in found[:MAX_DETECTIONS]
        ],
        "left_out": max(0, len(found) - MAX_DETECTIONS),
        "remedies": [PATTERNS[name] for name in sorted(named) if name in PATTERNS],
    }


def _panels(record: TraceRecord, detections: Sequence[Detection]) -> Iterator[tuple[str, _Span]]:
    """The longest true segment of each instance and lane class, then the best detections without truth."""
    longest: dict[tuple[int, LaneClass], Segment] = {}
    truth: dict[tuple[str, LaneClass], list[Segment]] = {}
    for segment in record.segments:
        key = (segment.instance, segment.lane_class)
        if key not in longest or _length(segment) > _length(longest[key]):
            longest[key] = segment
        truth.setdefault((record.instances[segment.instance].pattern, segment.lane_class), []).append(segment)
    panels: list[tuple[str, Segment | Detection]] = [
        (f"True {record.instances[index].pattern} ({record.instances[index].state})", segment)
        for (index, _), segment in sorted(longest.items(), key=lambda item: item[0])
    ]
    alarms = [
        (f"Detected {visible(found.pattern)}", found)
        for found in detections
        if found.start_ns <= record.trace.duration_ns
        and found.end_ns >= 0
        and not any(
            segment.start_ns <= found.end_ns and found.start_ns <= segment.end_ns
            for segment in truth.get((found.pattern, found.lane), ())
        )
    ]
    # Half of the panels for false alarms, as far as there are so many.
    for_truth = max(MAX_PANELS // 2, MAX_PANELS - len(alarms))
    for title, place in [*panels[:for_truth], *alarms][:MAX_PANELS]:
        lane = place.lane_class if isinstance(place, Segment) else place.lane
        span = (lane, place.start_ns, place.end_ns)
        yield f"{title} {_where(span)}", span


def _panel(
    trace: Trace,
    span: _Span,
    segments: Sequence[Segment] = (),
    instances: Sequence[Instance] = (),
    detections: Sequence[Detection] = (),
) -> Markup:
    """The timeline around a stretch of time."""
    _, start, end = span
    start, end = max(0, start), min(end, trace.duration_ns)
    context = max(round((end - start) * CONTEXT), LEAST_CONTEXT_NS)
    return Markup(
        timeline_svg(
            trace, segments, instances, detections, max(0, start - context), end + context,
            style=False, detail=PANEL_DETAIL,
        )
    )  # fmt: skip


def _where(span: _Span) -> str:
    lane, start, end = span
    return f"on the {lane.upper()} at {start / 1e6:.3f} ms, {(end - start) / 1e6:.3f} ms long"


def _length(segment: Segment) -> int:
    return segment.end_ns - segment.start_ns


def _best(detections: Iterable[Detection]) -> list[Detection]:
    """Highest score first; equal ones by place, so that the order of rows does not matter."""
    return sorted(detections, key=lambda row: (-row.score, row.start_ns, row.pattern, row.lane))


def _instance(instance: Instance) -> Mapping[str, str]:
    measured = not math.isnan(instance.cost_ratio)
    return {
        "pattern": visible(instance.pattern),
        "variant": visible(instance.variant),
        "source": instance.source,
        "state": instance.state,
        "cost": f"{instance.cost_ms:.2f} ms" if measured else "not measured",
        "ratio": f"{instance.cost_ratio:.3f} ({instance.cost_low:.3f} to {instance.cost_high:.3f})"
        if measured
        else "",
    }


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else visible(value, 80)
