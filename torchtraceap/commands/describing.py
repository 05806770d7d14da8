"""`traceap cards` and `traceap publish`: what a data set says of itself, and where it goes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.commands._options import Dataset, Json
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.dataset.publish import Publication
    from torchtraceap.dataset.trace import TraceRecord

PICTURE_WIDTH = 1000
PICTURE_DETAIL = 150
"""Events with a name of their own: a picture has some 30 kB."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("cards", epilog="Example: traceap cards dataset")(cards)
    app.command("publish", epilog="Example: traceap publish my-lab/torchtraceap dataset --dry-run")(publish)


def cards(dataset: Dataset) -> None:
    """Write the card, the pages, the pictures and the checksums of a data set anew, from its tables."""
    from torchtraceap.dataset.configs import SCHEMAS
    from torchtraceap.dataset.description import describe_again

    describe_again(dataset, SCHEMAS, draw=draw_trace)
    print(f"{console.visible(dataset)}: described anew")


def publish(
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Of the data set on the Hugging Face Hub.")],
    dataset: Dataset,
    tag: Annotated[
        str, typer.Option("--tag", help="Instead of v and the version of the data set.", show_default=False)
    ] = "",
    revision: Annotated[
        str, typer.Option("--revision", metavar="BRANCH", help="Made if there is none.")
    ] = "main",
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it, not only ORG.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Verify, list what belongs to it, send nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload a data set to the Hugging Face Hub, in one commit with a tag, if it keeps what it promises.

    The token is that of `hf auth login` or HF_TOKEN. An upload that broke off goes on when the command is
    run again.
    """
    from torchtraceap.dataset.publish import publish as publish_folder

    with console.stages("reading") as progress:
        done = publish_folder(
            dataset,
            repo,
            tag=tag,
            branch=revision,
            public=public,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        console.emit_json(done)
    else:
        print_publication(done)


def print_publication(done: Publication) -> None:
    """What was sent, or would be."""
    size = sum(file.size for file in done.files) / 1e6
    where = f"{done.repo} ({'private' if done.private else 'public'}), branch {done.branch}, tag {done.tag}"
    if not done.commit:
        for file in done.files:
            print(f"{file.size:>12,}  {console.visible(file.name)}")
        print(f"would send {len(done.files)} files, {size:.1f} MB, to {where}")
    elif done.sent or done.removed:
        removed = f", {len(done.removed)} removed" if done.removed else ""
        print(f"{len(done.sent)} of {len(done.files)} files sent{removed}: {where}, commit {done.commit}")
    else:
        print(f"{len(done.files)} files, {size:.1f} MB, were there already: {where}, commit {done.commit}")


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
