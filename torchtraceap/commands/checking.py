"""`traceap zoo check`: which models of the zoo run on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.collect import CHECK_TIME_LIMIT
from torchtraceap.commands._options import Family, Json, MaxParams, MinParams, Source, Task, TimeLimit
from torchtraceap.commands._runs import following, print_lost
from torchtraceap.commands.catalogue import zoo
from torchtraceap.commands.collecting import (
    PARTLY_FAILED,
    Budget,
    Device,
    MemoryLimit,
    Models,
    Modes,
    Tier,
    TierOption,
    bytes_of,
    resolve_devices,
)
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.collect.check import Checked, CheckReport
    from torchtraceap.labels.pattern import Mode

LANES = 4
"""Models side by side on an accelerator, unless told otherwise. Most of the time goes into building a model
and into its first step, and then the device waits."""


def add_to(app: typer.Typer) -> None:
    """Add the command to the group that is there."""
    zoo.command("check", epilog="Example: traceap zoo check -o runs/check --task detection --device cuda")(
        zoo_check
    )


def zoo_check(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="CHECK", help="Folder of the check.")],
    model: Models = None,
    tier: TierOption = None,
    task: Task = "",
    source: Source = "",
    family: Family = "",
    min_params: MinParams = 0.0,
    max_params: MaxParams = math.inf,
    mode: Modes = None,
    device: Device = "auto",
    lanes: Annotated[
        int | None,
        typer.Option(
            "--lanes",
            min=1,
            max=64,
            help="Models side by side for each device, which they share. "
            f"Default: {LANES} on an accelerator, else 1.",
        ),
    ] = None,
    time_limit: TimeLimit = CHECK_TIME_LIMIT,
    memory_limit: MemoryLimit = None,
    budget: Budget = math.inf,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the check that CHECK holds; what failed is tried again."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build models and let them step, in inference and training, at their smallest and largest batch size.

    All models unless some are chosen; on a CPU the smallest batch size alone. CHECK/check.json has the
    result. Exit code 1 when a model failed.
    """
    from torchtraceap.collect.check import STATES, check, make_checks
    from torchtraceap.collect.listing import select
    from torchtraceap.collect.model import ZOO

    chosen = select(
        task=task,
        source=source,
        family=family,
        small=tier is Tier.small,
        min_params=min_params,
        max_params=max_params,
    )
    names = [spec.name for spec in chosen]
    if model:
        named = [ZOO[name].name for name in model]
        names = [name for name in names if name in named]
    if not names:
        raise UserError("no model meets all conditions; see `traceap zoo list`")
    devices, kind = resolve_devices(device)
    modes: list[Mode] = [one.value for one in mode] if mode else ["train", "infer"]
    with following(len(make_checks(names, device_type=kind, modes=modes))) as show:
        report, ran = check(
            names,
            out,
            devices=devices,
            device_type=kind,
            modes=modes,
            lanes=lanes or (1 if kind == "cpu" else LANES),
            resume=resume,
            time_limit=time_limit,
            memory_limit=bytes_of(memory_limit),
            budget=budget,
            on_event=show,
        )
    if as_json:
        console.emit_json(report)
    else:
        print_report(report)
        print_lost(ran)
        print(
            f"{', '.join(f'{report.count(state)} {state}' for state in STATES)}; {ran.seconds:.0f} s; "
            f"{console.visible(out / 'check.json')}"
        )
    if report.count("failed"):
        raise typer.Exit(PARTLY_FAILED)


def print_report(report: CheckReport) -> None:
    """A row a model, what failed last."""
    rows = sorted(report.models, key=lambda one: (one.state == "failed", one.model))
    console.table(
        f"{report.machine}, torch {report.hardware['torch']}",
        ("model", "state", "build s", "longest step ms", "peak MiB", "reason"),
        [_row(one) for one in rows],
    )


def _row(one: Checked) -> tuple[object, ...]:
    steps = [case.step_ms for case in one.cases if case.step_ms is not None]
    peaks = [case.peak_mib for case in one.cases if case.peak_mib is not None]
    return (
        one.model,
        one.state,
        None if one.build_s is None else f"{one.build_s:.1f}",
        f"{max(steps):.1f}" if steps else None,
        f"{max(peaks):.0f}" if peaks else None,
        one.reason or ("alone on the device" if one.alone else ""),
    )
