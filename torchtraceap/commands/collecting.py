"""`traceap collect`: run the models of a plan and keep their labelled traces."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtraceap import console
from torchtraceap.collect import EVENT_CAP, SHARD_MB, TIME_LIMIT
from torchtraceap.commands._options import Json, Seed, TimeLimit
from torchtraceap.commands._runs import following, print_run
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.collect.runner import RunReport

PARTLY_FAILED = 1


class Tier(StrEnum):
    """Named selections of models."""

    small = "small"
    all = "all"


class LoopRuntime(StrEnum):
    """``labels.pattern.Runtime``."""

    eager = "eager"
    compiled = "compiled"
    distributed = "distributed"


class LoopMode(StrEnum):
    """Loops that a model can run in."""

    train = "train"
    infer = "infer"


Models = Annotated[list[str] | None, typer.Option("--model", help="A model; repeat for several.")]
TierOption = Annotated[Tier | None, typer.Option("--tier", help="A selection of models.")]
Modes = Annotated[
    list[LoopMode] | None, typer.Option("--mode", help="train or infer; repeat for both. Default: both.")
]
Device = Annotated[
    str,
    typer.Option("--device", help="auto (all accelerators, else the CPU), cpu, cuda:1, xpu, mps ..."),
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget",
        min=0,
        metavar="SECONDS",
        help="Start no workload after so long; --resume goes on. Plans are ordered so that what is done "
        "by then is a fair part.",
        show_default=False,
    ),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit",
        min=0.1,
        max=1e6,
        metavar="GIB",
        help="Main memory that a workload may take, with its loader workers. Default: 60 % of the machine's.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "collect", epilog="Example: traceap collect -o runs/a --model timm/resnet18 --pattern host_sync"
    )(collect)


def collect(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.")],
    model: Models = None,
    tier: TierOption = None,
    pattern: Annotated[
        list[str] | None, typer.Option("--pattern", help="An anti-pattern; repeat for several. Default: all.")
    ] = None,
    mode: Modes = None,
    per_workload: Annotated[
        int,
        typer.Option(
            "--per-workload",
            min=0,
            help="Patterns of a workload, one to three in each trace beside the clean one.",
        ),
    ] = 2,
    per_test_workload: Annotated[
        int | None,
        typer.Option(
            "--per-test-workload",
            min=0,
            help="The same for models of the families that are meant for test. Default: as all.",
            show_default=False,
        ),
    ] = None,
    runtime: Annotated[
        LoopRuntime, typer.Option("--runtime", help="How loops run; each kind has patterns of its own.")
    ] = LoopRuntime.eager,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            min=2,
            max=64,
            help="Ranks of a distributed workload, each on its own GPU or all on the CPU. Default: 2.",
        ),
    ] = None,
    null_trials: Annotated[
        int,
        typer.Option("--null-trials", min=0, help="Cost measurements of a clean loop against itself."),
    ] = 0,
    device: Device = "auto",
    lanes: Annotated[
        int | None,
        typer.Option(
            "--lanes",
            min=1,
            max=16,
            help="Workloads side by side for each device, one of which has it. "
            "Default: 2 on an accelerator, else 1.",
        ),
    ] = None,
    seed: Seed = 0,
    time_limit: TimeLimit = TIME_LIMIT,
    memory_limit: MemoryLimit = None,
    event_cap: Annotated[
        int, typer.Option("--event-cap", min=1, help="A trace with more events is cut to fewer steps.")
    ] = EVENT_CAP,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="The I-th of N parts of the plan, for a RUN of its own; `build` takes all of them.",
        ),
    ] = None,
    shard_mb: Annotated[
        float,
        typer.Option(
            "--shard-mb",
            min=0.1,
            max=1e6,
            help="A workload's traces go into files of so many megabytes at most; a trace is never cut.",
        ),
    ] = SHARD_MB,
    budget: Budget = math.inf,
    ray: Annotated[
        str,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Run on this Ray cluster: HOST:PORT, auto or local (docs/scale.md).",
            show_default=False,
        ),
    ] = "",
    accelerator_type: Annotated[
        str | None,
        typer.Option("--accelerator-type", help="With --ray: only on GPUs that Ray calls so, as H100."),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            "--shared",
            metavar="URL",
            help="With --ray: where nodes put shards that do not see RUN, such as s3://bucket/folder.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish the run that RUN holds.")] = False,
    as_json: Json = False,
) -> None:
    """Run models, inject anti-patterns, measure what they cost and keep labelled traces.

    Exit code 1 when a workload failed; the others are kept, and --resume tries the failed ones again.
    """
    from torchtraceap.collect.plan import make_plan, part_of
    from torchtraceap.collect.runner import collect as run
    from torchtraceap.labels.pattern import PATTERNS

    models = choose_models(model, tier)  # a wrong name is told before the seconds that torch takes to import
    for name in pattern or ():
        PATTERNS[name]
    index, count = _part(part)
    if world_size is not None and runtime is not LoopRuntime.distributed:
        raise UserError("--world-size counts the ranks of a distributed workload: add --runtime distributed")
    world_size = world_size or 2
    devices: list[str] = []
    if ray:
        kind = _device_type(device)
    elif accelerator_type or shared:
        raise UserError("--accelerator-type and --shared are about a cluster: add --ray ADDRESS")
    else:
        devices, kind = resolve_devices(device, world_size if runtime is LoopRuntime.distributed else 1)
    if runtime is LoopRuntime.compiled and tier is not None:
        from torchtraceap.collect.compiled import MODELS

        models = [name for name in models if name in MODELS or name in (model or ())]
    plan = make_plan(
        models,
        device_type=kind,
        modes=[m.value for m in mode] if mode else ("train", "infer"),
        patterns=pattern,
        per_workload=per_workload,
        per_test_workload=per_test_workload,
        null_trials=null_trials,
        runtime=runtime.value,
        world_size=world_size,
        seed=seed,
    )
    plan = part_of(plan, index, count)
    with following(len(plan)) as show:
        options: dict[str, Any] = {
            "lanes": lanes or (1 if kind == "cpu" else 2),
            "resume": resume,
            "time_limit": time_limit,
            "memory_limit": bytes_of(memory_limit),
            "event_cap": event_cap,
            "shard_mb": shard_mb,
            "budget": budget,
            "on_event": show,
        }
        if ray:
            from torchtraceap.collect import cluster

            report = cluster.collect(
                ray, plan, out, device_type=kind, accelerator=accelerator_type, shared=shared, **options
            )
        else:
            report = run(plan, out, devices=devices, **options)
    if as_json:
        console.emit_json(report)
    else:
        print(
            f"{report.traces} traces of {len(report.done)} workloads in {console.visible(out)}, "
            f"{report.seconds:.0f} s{_rate(report)}; {len(report.skipped)} were there already, "
            f"{len(report.failed)} failed"
        )
        if report.left:
            why = "for want of a device" if report.lost else "within the budget"
            print(f"{len(report.left)} workloads did not start {why}; --resume runs them")
        print_run(report)
    if report.failed:
        raise typer.Exit(PARTLY_FAILED)


def _rate(report: RunReport) -> str:
    """Traces a minute, in words, where there are any."""
    return (
        f" ({60 * report.traces / report.seconds:.1f} a minute)" if report.traces and report.seconds else ""
    )


def _device_type(name: str) -> str:
    """What ``--device`` says of the nodes of a cluster."""
    if name not in ("auto", "cuda", "xpu", "cpu"):
        raise UserError(f"--device {name}: which one a workload has is Ray's choice; say cuda, xpu or cpu")
    return "cuda" if name == "auto" else name


def _part(text: str | None) -> tuple[int, int]:
    """What ``--part`` says: which part, from 1, of how many."""
    if text is None:
        return 1, 1
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {text}: say which part of how many, from 1/N to N/N")
    return int(match[1]), int(match[2])


def bytes_of(gib: float | None) -> int | None:
    """What ``--memory-limit`` says, in bytes."""
    return None if gib is None else int(gib * 2**30)


def choose_models(names: list[str] | None, tier: Tier | None) -> list[str]:
    """The models that are named, and those of a selection.

    Raises:
        UserError: There is none, or one is unknown.
    """
    from torchtraceap.collect.model import ZOO

    models = [ZOO[name].name for name in names or ()]
    if tier is not None:
        models += [spec.name for spec in ZOO if spec.small or tier is Tier.all]
    if not models:
        raise UserError("name models with --model (see `traceap zoo list`) or a selection with --tier small")
    return models


def resolve_devices(name: str, size: int = 1) -> tuple[list[str], str]:
    """The full names of devices, the first of each ``size`` that a workload takes, and their type.

    Raises:
        UserError: There is no such device, or not enough of them, or PyTorch is not installed.
    """
    try:
        import torch  # noqa: F401  before anything that needs it, to tell a missing extra from a bug
    except ModuleNotFoundError:
        raise UserError("collecting needs PyTorch and models: pip install 'torchtraceap[collect]'") from None
    from torchtraceap.collect import devices

    found = devices.groups(name, size)
    return list(map(str, found)), found[0].type
