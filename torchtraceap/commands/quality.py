"""`traceap quality`: how good the labels of collected runs are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.commands._options import Json

if TYPE_CHECKING:
    from torchtraceap.dataset.quality import LabelQuality, NullRow, PatternRow

COLUMNS = (
    "pattern", "instances", "costly", "benign", "undecided", "cost of costly", "cost", "profiler",
    "violations", "extra", "missing", "models", "held out",
)  # fmt: skip
NULL_COLUMNS = ("regime", "trials", "called costly", "share", "95 % interval")
NOTES = """\
An instance counts once a workload. *costly*, *benign* and *undecided* are as in a release of these runs:
verdicts that may be chance among all tests are undecided. *cost*: median ratio of step times with over
without, of the costly instances and of all; *profiler*: the same with over without the profiler.
*violations* of the laws of attribution (dataset/attribution.py), for each of which `traceap build`
refuses the data. *extra*, *missing*: median number of operators, kernels and copies by which a trace
differs from its clean twin outside of all labels (collect/twins.py, which says what differences are
honest). Null trials compare the clean loop with itself; their intervals are exact (Clopper-Pearson)."""


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("quality", epilog="Example: traceap quality runs/a runs/b --markdown")(quality)


def quality(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that `traceap collect` made.")
    ],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/label_quality.md.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say how good labels are: verdicts, costs, attribution and null trials, by what bounds the step time."""
    from torchtraceap.dataset.quality import measure_quality

    found = measure_quality(runs)
    if as_json:
        console.emit_json(found)
        return
    if markdown:
        print("\n".join(_markdown(found)))
        return
    print(_summary(found))
    for title, rows in _tables(found):
        console.table(title, COLUMNS, [_cells(row) for row in rows], numeric=len(COLUMNS) - 1)
    if found.nulls:
        cells = [_null_cells(row) for row in found.nulls]
        console.table("null trials", NULL_COLUMNS, cells, numeric=len(NULL_COLUMNS) - 1)
    for problem in found.violations:
        console.note(problem)


def _markdown(found: LabelQuality) -> Iterator[str]:
    from torchtraceap.dataset.quality import FEW_COSTLY

    yield f"{_summary(found)}\n\n{NOTES}"
    for title, rows in _tables(found):
        yield f"\n## {title[0].upper()}{title[1:]}\n"
        yield from _grid(COLUMNS, [_cells(row) for row in rows])
    if found.nulls:
        yield "\n## Null trials\n"
        yield from _grid(NULL_COLUMNS, [_null_cells(row) for row in found.nulls])
    rare = [r for r in found.patterns if r.regime == "GPU-busy" and r.costly < FEW_COSTLY * r.instances]
    if rare:
        named = ", ".join(f"{row.pattern} ({row.costly} of {row.instances})" for row in rare)
        yield f"\nCostly in fewer than {FEW_COSTLY:.0%} of their GPU-busy instances: {named}."


def _summary(found: LabelQuality) -> str:
    return (
        f"{found.traces} traces; {found.tests} cost tests of injected instances, {found.demoted} of which "
        f"were costly by themselves and not among all; {len(found.violations)} violations of attribution."
    )


def _tables(found: LabelQuality) -> Iterator[tuple[str, list[PatternRow]]]:
    """A title and its rows for each regime, the patterns first and then the look-alikes."""
    for what, rows in (("patterns", found.patterns), ("look-alikes", found.lookalikes)):
        for regime in dict.fromkeys(row.regime for row in rows):
            yield f"{what}, {regime}", [row for row in rows if row.regime == regime]


def _cells(row: PatternRow) -> list[str]:
    ratios = (row.ratio_of_costly, row.ratio, row.profiler_ratio)
    counts = (row.instances, row.costly, row.benign, row.undecided)
    differences = (row.extra, row.missing)
    return [
        row.pattern,
        *map(str, counts),
        *("-" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios),
        str(row.violations),
        *("-" if math.isnan(count) else f"{count:g}" for count in differences),
        str(row.models),
        str(row.heldout),
    ]


def _null_cells(row: NullRow) -> list[str]:
    interval = f"{row.low:.2%} to {row.high:.2%}"
    return [row.regime, str(row.trials), str(row.costly), f"{row.share:.2%}", interval]


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table: the first column of text, the others of numbers. Ids need no escaping."""
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'--:|' * (len(columns) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
