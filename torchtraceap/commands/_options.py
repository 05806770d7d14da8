"""Options that several commands share, and the rule for outputs that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchtraceap.errors import UserError

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Everything drawn at random follows from it.")]
Split = Annotated[str, typer.Option("--split", help="train, validation, test, or all of them.")]
# Bounded, as JSON takes no infinity to the process that runs a workload.
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=1, max=1e6, help="Seconds that a workload may take.")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, max=1024, help="Processes side by side.")]
Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Work on this Ray cluster instead: HOST:PORT, auto or local. Its nodes must see all folders.",
        show_default=False,
    ),
]
Task = Annotated[str, typer.Option("--task", help="Only models of this task, for example detection.")]
Source = Annotated[str, typer.Option("--source", help="Only models of this library.")]
Family = Annotated[str, typer.Option("--family", help="Only models of this family or with such a backbone.")]
MinParams = Annotated[
    float,
    typer.Option(
        "--min-params",
        min=0,
        metavar="M",
        help="Only models of at least M million parameters.",
        show_default=False,
    ),
]
MaxParams = Annotated[
    float,
    typer.Option(
        "--max-params",
        min=0,
        metavar="M",
        help="Only models of at most M million parameters.",
        show_default=False,
    ),
]
Dataset = Annotated[Path, typer.Argument(metavar="DATASET", help="Folder that `traceap build` made.")]


def check_output(path: Path, *, force: bool, source: Path | None = None) -> None:
    """Refuse to write over anything that exists unless told to, and over the input in any case.

    Raises:
        UserError: ``path`` exists and ``force`` is not given, where an empty folder counts as not existing;
            or it is ``source``.
    """
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"{path} is the input; choose another output")
    if force or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    raise UserError(f"{path} exists; choose another output or give --force")
