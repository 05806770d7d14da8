"""`traceap convert`, `build` and `diagnose`: from profiles and runs to tables, and what one profile says."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtraceap import console
from torchtraceap.commands._options import Force, Jobs, Json, Ray, Seed, check_output
from torchtraceap.commands.describing import check_date, draw_trace
from torchtraceap.errors import UserError
from torchtraceap.parallel import HERE, Where, map_on

if TYPE_CHECKING:
    from torchtraceap.dataset.build import BuildReport
    from torchtraceap.dataset.trace import TraceRecord

Profile = Annotated[Path, typer.Argument(metavar="TRACE.json[.gz]", help="What torch.profiler exported.")]
Profiles = Annotated[
    list[Path], typer.Argument(metavar="TRACE.json[.gz]...", help="What torch.profiler exported.")
]


def add_to(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command("convert", epilog="Example: traceap convert trace.json.gz -o trace.parquet")(convert)
    app.command("build", epilog="Example: traceap build runs/a runs/b -o data --seed 1")(build)
    app.command("diagnose", epilog="Example: traceap diagnose trace.json.gz --html trace.html")(diagnose)


def convert(
    profiles: Profiles,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="OUT", help="File to write; a folder for several profiles."),
    ],
    jobs: Jobs = 1,
    ray: Ray = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Convert profiles to the layout of the table `traces`, without labels.

    Exit code 1 when one of several could not be read; the others are converted.
    """
    several = len(profiles) > 1 or out.is_dir()
    targets = _targets(profiles, out, force=force) if several else {profiles[0]: out}
    if not several:
        check_output(out, force=force, source=profiles[0])
    pairs = (
        [(profile.resolve(), target.resolve()) for profile, target in targets.items()]
        if ray
        else [*targets.items()]
    )
    converted = []
    with console.progress() as bar:
        for facts in bar.track(
            map_on(Where(jobs, ray), convert_file, pairs), total=len(pairs), description="converting"
        ):
            if isinstance(facts, str) and not several:
                raise UserError(facts)
            converted.append(facts)
    failed = [facts for facts in converted if isinstance(facts, str)]
    written = [facts for facts in converted if not isinstance(facts, str)]
    if as_json:
        console.emit_json({"converted": written, "failed": failed} if several else written[0])
    else:
        for facts in written:
            per_event = facts["bytes"] / max(1, facts["events"])
            print(
                f"{facts['events']} events on {facts['lanes']} lanes, {facts['steps']} steps: "
                f"{console.visible(facts['out'])}, {per_event:.1f} bytes an event"
            )
    for reason in failed:
        console.note(reason)
    if failed:
        raise typer.Exit(1)


def _targets(profiles: list[Path], folder: Path, *, force: bool) -> dict[Path, Path]:
    """A file of ``folder`` for each profile, named after it.

    Raises:
        UserError: Two profiles have the same name, a file exists, or ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder, which several profiles need")
    targets: dict[Path, Path] = {}
    for profile in profiles:
        stem = profile.name.removesuffix(".gz").removesuffix(".json")
        target = folder / f"{stem}.parquet"
        if target in targets.values():
            raise UserError(f"two profiles would be written as {target}; convert them into two folders")
        check_output(target, force=force, source=profile)
        targets[profile] = target
    return targets


def convert_file(pair: tuple[Path, Path]) -> dict[str, Any] | str:
    """Convert one profile to one file: what it holds, or why it cannot be read."""
    from torchtraceap.dataset.parquet import write_traces

    profile, out = pair
    try:
        record = _unlabelled(profile)
    except UserError as error:
        return str(error)
    write_traces(out, [record])
    return {
        "trace_id": record.trace_id,
        "events": len(record.trace),
        "lanes": len(record.trace.lanes),
        "steps": record.meta["steps"],
        "bytes": out.stat().st_size,
        "out": str(out),
    }


def _unlabelled(path: Path) -> TraceRecord:
    """A record of which only the trace is known; its id is a digest of the unpacked file."""
    import numpy as np

    from torchtraceap.dataset.kineto import parse, unpack
    from torchtraceap.dataset.trace import TraceRecord

    data = unpack(path)
    digest = hashlib.sha256(data).hexdigest()
    trace = parse(data, str(path)).trace
    bounds = trace.step_bounds
    return TraceRecord(
        trace=trace,
        meta={
            "trace_id": digest[:16],
            "pair_id": digest[:16],
            "model": "",
            "source": "",
            "task": "other",
            "family": "",
            "backbone_family": "",
            "split_unit": digest[:16],
            "hardware_id": "",
            "mode": "train" if (trace.events.forward >= 0).any() else "infer",
            "precision": "",
            "batch_size": 0,
            "input_shape": "",
            "rank": 0,
            "world_size": 1,
            "steps": len(bounds),
            "quality": "undecided",
            "step_ms": float(np.median(bounds[:, 1] - bounds[:, 0]) / 1e6) if len(bounds) else float("nan"),
            "profiler_ratio": float("nan"),
            "gpu_busy": float("nan"),
        },
    )


def build(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `traceap collect` made, and data sets that this command made.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DATASET", help="Folder of the data set.")],
    seed: Seed = 0,
    date: Annotated[
        str,
        typer.Option(
            "--date", metavar="YYYY-MM-DD", help="Of the release, for the card.", show_default=False
        ),
    ] = "",
    jobs: Jobs = 1,
    ray: Ray = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Build the data set that `datasets.load_dataset` reads from one or several runs.

    A data set among them is taken apart: splits, and which costs are sure, depend on all traces of the new
    one, and may change for those that it had.
    """
    check_output(out, force=force)
    report = build_dataset(runs, out, seed=seed, where=Where(jobs, ray), date=check_date(date))
    if as_json:
        console.emit_json({**asdict(report), "out": str(out)})
    else:
        print_build(report, out)


def build_dataset(
    runs: list[Path], out: Path, *, seed: int, where: Where = HERE, date: str = ""
) -> BuildReport:
    """Build with progress on stderr, and with pictures of traces."""
    from torchtraceap.dataset.build import build as build_from

    with console.stages("checking") as progress:
        return build_from(
            runs,
            out,
            seed=seed,
            where=where,
            progress=progress,
            date=date,
            draw=draw_trace,
        )


def print_build(report: BuildReport, out: Path) -> None:
    """What a build wrote, and what it decided, in a line each."""
    traces = ", ".join(f"{count} {split}" for split, count in report.traces.items())
    print(f"{traces} traces; {report.segments} segments, {report.windows} windows")
    if report.left_out:
        print(f"{report.left_out} traces left out: they hold a variant that only test may show")
    if report.demoted:
        print(
            f"{report.demoted} instances that were measured costly are undecided: among {report.tested} "
            "measurements they may be chance"
        )
    print(f"{console.visible(out)}: {report.size_bytes / 1e6:.1f} MB")


def diagnose(
    profile: Profile,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the timeline too.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say which anti-patterns a profile shows, what they cost about, and what to change."""
    from torchtraceap.eval.diagnose import diagnose as diagnose_file
    from torchtraceap.eval.diagnose import to_text

    if html is not None:
        check_output(html, force=force, source=profile)
    diagnosis = diagnose_file(profile)
    if html is not None:
        from torchtraceap.eval.report import write_diagnosis

        write_diagnosis(html, diagnosis)
        console.note(f"wrote {html}")
    if as_json:
        console.emit_json(
            {
                "name": diagnosis.name,
                "events": len(diagnosis.trace),
                "steps": diagnosis.steps,
                "step_ms": diagnosis.step_ms,
                "gpu_busy": diagnosis.gpu_busy,
                "causes": diagnosis.causes,
                "notes": diagnosis.notes,
                "detections": diagnosis.detections,
            }
        )
    else:
        console.out().print(to_text(diagnosis))
