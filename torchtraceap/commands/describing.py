"""`traceap cards` and `traceap publish`: what a data set says of itself, and where it goes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from torchtraceap import console
from torchtraceap.commands._options import Dataset
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.dataset.trace import TraceRecord

PICTURE_WIDTH = 1000
PICTURE_DETAIL = 150
"""Events with a name of their own: a picture has some 30 kB."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("cards", epilog="Example: traceap cards dataset")(cards)


def cards(dataset: Dataset) -> None:
    """Write the card, the pages, the pictures and the checksums of a data set anew, from its tables."""
    from torchtraceap.dataset.configs import SCHEMAS
    from torchtraceap.dataset.description import describe_again

    describe_again(dataset, SCHEMAS, draw=draw_trace)
    print(f"{console.visible(dataset)}: described anew")


def check_date(date: str) -> str:
    """``date`` if it is one, or empty.

    Raises:
        UserError: It is neither.
    """
    from datetime import date as calendar

    try:
        if date:
            calendar.fromisoformat(date if _DATE.fullmatch(date) else "")
    except ValueError:
        raise UserError(f"{date} is no date; one is written like 2026-11-30") from None
    return date


def draw_trace(record: TraceRecord) -> str:
    """The step of a trace in which its first costly segment lies, or any segment, as SVG with the labels."""
    from torchtraceap.eval.timeline import timeline_svg

    bounds = record.trace.step_bounds
    start = end = None
    placed = [segment for segment in record.segments if 0 <= segment.step < len(bounds)]
    if placed:
        first = min(
            placed,
            key=lambda segment: (record.instances[segment.instance].state != "costly", segment.start_ns),
        )
        start, end = bounds[first.step].tolist()
    return timeline_svg(
        record.trace,
        record.segments,
        record.instances,
        start_ns=start,
        end_ns=end,
        width=PICTURE_WIDTH,
        detail=PICTURE_DETAIL,
    )
