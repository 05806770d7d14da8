"""`traceap collect-audit` and `audit`: do published traces show where the harness was at work?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.collect import TIME_LIMIT
from torchtraceap.commands._options import Dataset, Json, Seed, TimeLimit
from torchtraceap.commands.collecting import (
    Device,
    Models,
    Modes,
    TierOption,
    choose_models,
    resolve_devices,
)
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.collect.audit import Gathered, Workload
    from torchtraceap.eval.audit import Arm, MetadataRow

NOT_PASSED = 1
PARTLY_FAILED = 1


def add_to(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command("collect-audit", epilog="Example: traceap collect-audit -o runs/audit --tier small")(
        collect_audit
    )
    app.command("audit", epilog="Example: traceap audit data --examples runs/audit")(audit)


def collect_audit(
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="EXAMPLES", help="Folder; workloads that it has are not run again."
        ),
    ],
    model: Models = None,
    tier: TierOption = None,
    mode: Modes = None,
    profiles: Annotated[
        int,
        typer.Option(
            "--profiles",
            min=1,
            help="Of a workload, with the wrappers of candidate places and as many without.",
        ),
    ] = 4,
    device: Device = "auto",
    seed: Seed = 0,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Gather the examples that `traceap audit` needs: candidate places, wrapped and bare.

    Exit code 1 when a workload failed; the others are kept.
    """
    from torchtraceap.collect.audit import gather, make_workloads

    models = choose_models(model, tier)
    (device, *_), kind = resolve_devices(device)
    workloads = make_workloads(
        models,
        device_type=kind,
        modes=[m.value for m in mode] if mode else ("train", "infer"),
        profiles=profiles,
        seed=seed,
    )
    done: dict[str, Gathered] = {}
    failed: dict[str, str] = {}

    with console.progress() as bar:
        task = bar.add_task("gathering", total=len(workloads))

        def on_event(workload: Workload, result: Gathered | str) -> None:
            if isinstance(result, str):
                failed[workload.name] = result
                console.note(f"{workload.name}: failed: {result}")
            else:
                done[workload.name] = result
                console.note(f"{workload.name}: {result.wrapped} wrapped, {result.bare} bare")
            bar.update(task, completed=len(done) + len(failed), description=console.safe(workload.name))

        gather(workloads, out, device=device, time_limit=time_limit, on_event=on_event)
    if as_json:
        console.emit_json({"done": done, "failed": failed, "out": str(out)})
    else:
        wrapped, bare = (sum(getattr(one, arm) for one in done.values()) for arm in ("wrapped", "bare"))
        print(f"{wrapped} wrapped and {bare} bare places of {len(done)} workloads in {console.visible(out)}")
    if failed:
        raise typer.Exit(PARTLY_FAILED)


def audit(
    dataset: Dataset,
    examples: Annotated[
        Path | None,
        typer.Option("--examples", metavar="EXAMPLES", help="Folder that `traceap collect-audit` filled."),
    ] = None,
    seed: Seed = 0,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the outcome in DATASET, as leak_audit.json.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether the harness leaves something in published traces, and what metadata and lengths alone tell.

    Exit code 1 when a classifier finds the places, or when there are too few examples to say so.
    """
    from torchtraceap.eval.audit import audit_examples, audit_metadata, to_dict

    files = sorted(examples.glob("*.parquet")) if examples is not None else []
    if examples is not None and not files:
        raise UserError(f"{examples} holds no examples; make some with `traceap collect-audit`")
    arms = audit_examples(files, seed=seed) if files else []
    metadata = audit_metadata(dataset, seed=seed)
    result = to_dict(arms, metadata)
    if record:
        from torchtraceap.dataset.audited import record_audit

        console.note(f"wrote {record_audit(dataset, result)}")
    if as_json:
        console.emit_json(result)
    else:
        print_metadata(metadata)
        print_arms(arms)
    if not result["passed"]:
        raise typer.Exit(NOT_PASSED)


def print_arms(arms: list[Arm]) -> None:
    """The verdict, a row an arm."""
    if not arms:
        console.note("places were not audited: give --examples, made by `traceap collect-audit`")
        return
    columns = ("arm", "examples", "families", "AUROC", "95 %", "verdict", "it goes by")
    rows = [
        (
            arm.name,
            f"{arm.positives} / {arm.negatives}",
            arm.families,
            arm.auroc,
            f"{arm.low:.3f} - {arm.high:.3f}",
            f"{'passed' if arm.passed else 'FAILED'}: {arm.reason}",
            _telling(arm.telling),
        )
        for arm in arms
    ]
    console.table("where an injector was at work", columns, rows)


def print_metadata(rows: list[MetadataRow]) -> None:
    """What is known without looking at a single event."""
    columns = ("question", "given", "yes / no", "units", "AUROC", "95 %", "it goes by")
    cells = [
        (
            row.question,
            row.given,
            f"{row.positives} / {row.negatives}",
            row.units,
            row.auroc,
            f"{row.low:.3f} - {row.high:.3f}",
            _telling(row.telling),
        )
        for row in rows
    ]
    console.table("what metadata, counts and lengths alone tell", columns, cells)


def _telling(columns: dict[str, float]) -> str:
    return ", ".join(f"{name} {lost:.2f}" for name, lost in columns.items())
