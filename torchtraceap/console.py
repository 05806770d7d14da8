"""What the command writes: tables for people, JSON for programs, progress on stderr.

Names in traces, submissions and file names are untrusted: a terminal acts on control characters and Rich on
square brackets. Everything that comes from outside passes through :func:`visible` or :func:`safe`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

PIPE_WIDTH = 160


@cache
def out() -> Console:
    """Standard output: results only, so that it can be piped; wide when it is no terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


@cache
def err() -> Console:
    """Standard error: progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def visible(text: object) -> str:
    """``text`` with every control, format, surrogate and line-separating character written as an escape.

    Covers ANSI sequences, carriage returns that overwrite a line, and marks that reverse its direction.
    """
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in str(text)
    )


def safe(text: object) -> str:
    """:func:`visible` text that Rich prints as it is, square brackets included."""
    from rich.markup import escape

    return escape(visible(text))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numeric: int = 0) -> None:
    """Print ``rows`` as a table; every cell is taken as untrusted text.

    Args:
        title: Printed above the table.
        columns: Headings.
        rows: One cell a column; None prints as a dash and a float with three decimals.
        numeric: How many of the last columns are aligned to the right.
    """
    from rich import box
    from rich.table import Table

    grid = Table(title=safe(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        right = index >= len(columns) - numeric
        grid.add_column(
            safe(column),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right or not index,  # names and numbers stay whole while prose can give way
        )
    for row in rows:
        grid.add_row(*(safe(_cell(value)) for value in row))
    out().print(grid)


def _cell(value: object) -> str:
    if value is None or value != value:  # NaN is the only value unequal to itself
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def emit_json(value: Any) -> None:
    """Print ``value`` as JSON in ASCII: builtins, dataclasses, msgspec structs, numpy; NaN is null."""
    import msgspec

    encoded = msgspec.json.encode(value, enc_hook=_plain)
    sys.stdout.write(json.dumps(json.loads(encoded), indent=2) + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "__fspath__"):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def note(text: object) -> None:
    """Print a line on stderr."""
    err().print(safe(text), soft_wrap=True)


def live(render: Callable[[], RenderableType], refreshes_a_second: float) -> AbstractContextManager[object]:
    """Keep what ``render`` returns on show on stderr, below all notes, while the block runs.

    It disappears at the end; where stderr is no terminal there is nothing to see.
    """
    from rich.live import Live

    if not err().is_terminal:
        return nullcontext()
    return Live(get_renderable=render, console=err(), refresh_per_second=refreshes_a_second, transient=True)


def progress() -> Progress:
    """A progress display on stderr that disappears when done; silent when stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    return Progress(
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Last, and as wide as what is left: a long name must not push the numbers off the line.
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=err(),
        expand=True,
        transient=True,
        disable=not err().is_terminal,
    )


@contextmanager
def stages(first: str) -> Iterator[Callable[[str, int, int], None]]:
    """Progress of work in stages: a function that is told of a stage, what is done of it, and of how much."""
    with progress() as bar:
        task = bar.add_task(first)

        def update(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield update
