"""`traceap verify`: is a data set what its card promises?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.commands._options import Dataset, Jobs, Json, Ray, Seed
from torchtraceap.parallel import HERE, Where

if TYPE_CHECKING:
    from torchtraceap.dataset.verify import Check, Report

BROKEN = 1


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", epilog="Example: traceap verify dataset --sample 20")(verify)


def verify(
    dataset: Dataset,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            metavar="N",
            min=1,
            help="Look at the events of N traces drawn at random, not of all.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    jobs: Jobs = 1,
    ray: Ray = "",
    as_json: Json = False,
) -> None:
    """Check everything that a data set promises against its files: a line a check.

    Exit code 1 when a promise is broken.
    """
    report = verify_dataset(dataset, sample=sample, seed=seed, where=Where(jobs, ray))
    if as_json:
        console.emit_json({"ok": not report.failures, "checks": report.checks})
    else:
        print_report(report)
    if report.failures:
        raise typer.Exit(BROKEN)


def verify_dataset(dataset: Path, *, sample: int | None = None, seed: int = 0, where: Where = HERE) -> Report:
    """Verify with progress on stderr."""
    from torchtraceap.dataset.verify import verify as verify_folder

    with console.stages("reading") as progress:
        return verify_folder(
            dataset,
            sample,
            seed=seed,
            where=where,
            progress=progress,
        )


def print_report(report: Report) -> None:
    """A line a check, and the first violations of each that failed."""
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        print(f"{check.state:<8} {check.name:<{width}}  {_line(check)}")
        for violation in check.violations:
            print(f"{'':<8} {'':<{width}}  - {console.visible(violation)}")
        if more := check.count - len(check.violations):
            print(f"{'':<8} {'':<{width}}  - and {more} more")
    failed = len(report.failures)
    print(f"{failed} of {len(report.checks)} promises are broken" if failed else "every promise holds")


def _line(check: Check) -> str:
    looked = str(check.looked) if check.looked == check.of else f"{check.looked} of {check.of}"
    found = f"{check.count} violations" if check.count else ""
    parts = (f"{looked} {check.things}" if check.things else "", found, console.visible(check.note))
    return f"{check.promise} ({'; '.join(part for part in parts if part)})"
