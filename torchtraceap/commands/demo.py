"""`traceap demo`: the whole way once, on whatever is here, in minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtraceap import console
from torchtraceap.commands import collecting, data, scoring
from torchtraceap.commands._options import Seed, check_output
from torchtraceap.errors import UserError

DETECTORS = ("rules", "random", "everything", "nothing")
MODES = ("train", "infer")
"""In turns: half of the models train, the others infer."""
PER_WORKLOAD = 2
TIME_LIMIT = 90.0
BUDGET = 210.0
"""Seconds after which no further workload starts, so that a slow machine is done in minutes too."""
EVENT_CAP = 60_000
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
    from torchtraceap.collect.model import ZOO
    from torchtraceap.collect.plan import make_plan
    from torchtraceap.eval.leaderboard import leaderboard

    check_output(out, force=resume)
    run, dataset = out / "run", out / "dataset"
    device, kind = collecting.resolve_device(device)

    small = [spec.name for spec in ZOO if spec.small]
    both = make_plan(small, device_type=kind, per_workload=PER_WORKLOAD, seed=seed)
    turns = [job for job in both if job.mode == MODES[small.index(job.model) % 2]]
    plan = sorted(turns, key=lambda job: job.mode)  # inference first: it is quicker
    console.note(f"1/5 collect: {len(plan)} workloads of {len(small)} models on {device}")
    collected = collecting.run_plan(
        plan, run, device=device, resume=resume, time_limit=TIME_LIMIT, event_cap=EVENT_CAP, budget=BUDGET
    )
    left = len(plan) - len(collected.done) - len(collected.skipped) - len(collected.failed)
    if left:
        console.note(f"{left} workloads are left out to end in time; `traceap demo --resume` runs them")
    if collected.failed and not (collected.done or collected.skipped):
        raise UserError(f"no workload succeeded; the first: {next(iter(collected.failed.values()))}")

    console.note("2/5 label and build")
    data.print_build(data.build_dataset([run], dataset, seed=seed), dataset)

    console.note("3/5 load with datasets.load_dataset")
    loaded = _load(dataset)
    for config, splits in loaded.items():
        print(f"{config}: " + ", ".join(f"{len(rows)} {split}" for split, rows in splits.items()))

    split = _richest_split(loaded)
    console.note(
        f"4/5 detect and score on {split}, where most is to be found: no detector here has learnt from it"
    )
    submissions = [out / "submissions" / name for name in DETECTORS]
    for path in submissions:
        scoring.run_detector(dataset, path.name, path, split=split)
    results = scoring.score_all(dataset, submissions, split=split, resamples=RESAMPLES, seed=seed)
    console.out().print(leaderboard(results))

    console.note("5/5 report")
    page = out / "report.html"
    scoring.write_page(dataset, submissions, results, page, split=split, traces=SHOWN_TRACES)
    print(f"report: {console.visible(page)}")
    if collected.failed:
        raise typer.Exit(collecting.PARTLY_FAILED)


def _load(dataset: Path) -> dict[str, Any]:
    """The splits of each config, as `datasets` loads them, offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    configs = datasets.get_dataset_config_names(str(dataset))
    return {config: datasets.load_dataset(str(dataset), config) for config in configs}


def _richest_split(loaded: dict[str, Any]) -> str:
    """The split with the most costly local segments, then traces: so few traces leave some splits bare."""

    def wealth(split: str) -> tuple[int, int]:
        rows = loaded.get("segments", {}).get(split, {"state": [], "scope": []})
        labels = zip(rows["state"], rows["scope"], strict=True)
        return sum(label == ("costly", "local") for label in labels), len(loaded["traces"][split])

    return max(loaded["traces"], key=wealth)
