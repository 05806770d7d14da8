"""`traceap demo`: the whole way once, on whatever is here, in minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtraceap import console
from torchtraceap.collect import EVENT_CAP
from torchtraceap.commands import collecting, data, scoring
from torchtraceap.commands._options import Seed, check_output
from torchtraceap.commands._runs import following, print_failures
from torchtraceap.errors import UserError

if TYPE_CHECKING:
    from torchtraceap.collect.plan import Job
    from torchtraceap.labels.pattern import Mode

DETECTORS = ("rules", "random", "everything", "nothing")
WORKLOADS: tuple[tuple[str, Mode], ...] = (
    ("timm/resnet18", "train"),
    ("torchvision/ssdlite320_mobilenet_v3_large", "infer"),
    ("smp/unet-mobilenet_v2", "train"),
    ("diffusers/ddpm-small", "infer"),
    ("transformers/vitpose-tiny-simple", "infer"),
    ("torchvision/lraspp_mobilenet_v3_large", "infer"),
    ("timm/mobilenetv3_large_100", "infer"),
    ("transformers/glpn-b0", "infer"),
)
"""In an order in which every prefix holds as many tasks and loops as it can: the budget cuts the end off.
Training steps take a CPU so long that only the quickest models train."""
PATTERNS: dict[Mode, tuple[str, ...]] = {
    "train": ("unfused_optimizer",),
    "infer": ("host_sync", "pageable_h2d", "dtype_ping_pong", "python_loop_over_batch", "dataloader_stall"),
}
"""By loop: one of these goes into each workload, if the device can have it. On a small model they cost enough
to be told from a busy machine's noise in little time, and a build takes the fewer of them for chance."""
TIME_LIMIT = 90.0
BUDGET = 240.0
"""Seconds after which no further workload starts, so that a slow machine is done in minutes too."""
RESAMPLES = 200
SHOWN_TRACES = 12


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog="Example: traceap demo -o runs/demo")(demo)


def demo(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FOLDER", help="Everything goes in here.")
    ] = Path("runs/demo"),
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda ...")] = "auto",
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what FOLDER holds.")] = False,
) -> None:
    """Collect small models, label and build, load with `datasets`, run detectors, score and report."""
    from torchtraceap.collect.runner import collect
    from torchtraceap.dataset.schema import ALL_SPLITS
    from torchtraceap.eval.leaderboard import ALL_COLUMNS

    check_output(out, force=resume)
    run, dataset = out / "run", out / "dataset"
    devices, kind = collecting.resolve_devices(device)

    plan = _plan(kind, seed)
    console.note(f"1/5 collect: {len(plan)} models on {device}, at most {BUDGET + TIME_LIMIT:.0f} s")
    with following(len(plan)) as show:
        collected = collect(
            plan,
            run,
            devices=devices,
            resume=resume,
            time_limit=TIME_LIMIT,
            event_cap=EVENT_CAP,
            budget=BUDGET,
            on_event=show,
        )
    if collected.skipped:
        console.note(f"{len(collected.skipped)} of them were collected before: {run}")
    if collected.left:
        console.note(
            f"{len(collected.left)} workloads are left out to end in time; `traceap demo --resume` runs them"
        )
    if collected.failed and not (collected.done or collected.skipped):
        raise UserError(f"no workload succeeded; the first: {next(iter(collected.failed.values()))}")

    console.note("2/5 label and build")
    data.print_build(data.build_dataset([run], dataset, seed=seed), dataset)

    console.note("3/5 load with datasets.load_dataset")
    loaded = _load(dataset)
    for config, splits in loaded.items():
        print(f"{config}: " + ", ".join(f"{len(rows)} {split}" for split, rows in splits.items()))

    console.note("4/5 detect and score on all splits: no detector here has learnt from any")
    submissions = [out / "submissions" / name for name in DETECTORS]
    for path in submissions:
        scoring.run_detector(dataset, path.name, path, split=ALL_SPLITS)
    results = scoring.score_all(dataset, submissions, split=ALL_SPLITS, resamples=RESAMPLES, seed=seed)
    # Of few traces the scores of steps and traces say something where those of segments have no class yet.
    scoring.print_leaderboard(results, tuple(ALL_COLUMNS))

    console.note("5/5 report")
    page = out / "report.html"
    scoring.write_page(dataset, submissions, results, page, split=ALL_SPLITS, traces=SHOWN_TRACES)
    print(f"report: {console.visible(page)}")
    if collected.failed:
        print_failures(collected)
        raise typer.Exit(collecting.PARTLY_FAILED)


def _plan(kind: str, seed: int) -> list[Job]:
    """The jobs of :data:`WORKLOADS`, in its order."""
    from torchtraceap.collect.plan import make_plan

    jobs = {
        (job.model, job.mode): job
        for mode, patterns in PATTERNS.items()
        for job in make_plan(
            [model for model, its_mode in WORKLOADS if its_mode == mode],
            device_type=kind,
            modes=[mode],
            patterns=patterns,
            per_workload=1,
            seed=seed,
        )
    }
    return [jobs[workload] for workload in WORKLOADS]


def _load(dataset: Path) -> dict[str, Any]:
    """The splits of each config, as `datasets` loads them, offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    configs = datasets.get_dataset_config_names(str(dataset))
    return {config: datasets.load_dataset(str(dataset), config) for config in configs}
