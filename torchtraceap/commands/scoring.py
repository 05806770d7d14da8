"""`traceap detect`, `score` and `report`: run a detector, score submissions, show both."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtraceap import console
from torchtraceap.commands._options import Dataset, Force, Jobs, Json, Ray, Seed, Split, check_output
from torchtraceap.errors import UserError
from torchtraceap.parallel import HERE, Where

if TYPE_CHECKING:
    from torchtraceap.eval.scorer import ScoreResult

Slice = Annotated[
    str, typer.Option("--slice", help="all, headline, unseen_variant, unseen_backbone or hardware:ID.")
]
Resamples = Annotated[
    int, typer.Option("--resamples", min=0, help="Of the bootstrap for 95 % intervals; 0 for none.")
]


def add_to(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command("detect", epilog="Example: traceap detect data --detector rules --split test -o rules")(
        detect
    )
    app.command("score", epilog="Example: traceap score data rules random --split test --json")(score)
    app.command("report", epilog="Example: traceap report data rules -o report.html")(report)


def detect(
    dataset: Dataset,
    detector: Annotated[str, typer.Option("--detector", help="A name from `traceap detectors list`.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="SUBMISSION", help="Folder to write.")],
    split: Split = "test",
    jobs: Jobs = 1,
    ray: Ray = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run a detector on every trace of a split and write its submission."""
    check_output(out, force=force)
    rows = run_detector(dataset, detector, out, split=split, where=Where(jobs, ray))
    if as_json:
        console.emit_json({"detector": detector, "split": split, "detections": rows, "out": str(out)})
    else:
        print(f"{detector}: {rows} detections in {console.visible(out)}")


def run_detector(dataset: Path, detector: str, out: Path, *, split: str, where: Where = HERE) -> int:
    """Run a detector with progress on stderr; returns the number of detections."""
    from torchtraceap.dataset.parquet import split_files
    from torchtraceap.eval.detector import DETECTORS, run_split
    from torchtraceap.eval.submission import write_submission

    chosen = DETECTORS[detector]
    files = split_files(dataset, "traces", split)
    with console.progress() as bar:
        task = bar.add_task(console.safe(detector), total=_row_count(files))
        submission = run_split(
            chosen, dataset, split, where=where, progress=lambda done: bar.update(task, completed=done)
        )
    windows = submission.window_scores
    write_submission(out, submission.detections, windows if len(windows) else None, submission.card)
    return len(submission.detections)


def score(
    dataset: Dataset,
    submissions: Annotated[
        list[Path], typer.Argument(metavar="SUBMISSION...", help="Folders, or files of detections.")
    ],
    split: Split = "test",
    slice_name: Slice = "all",
    resamples: Resamples = 1000,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Score submissions and rank them."""
    from torchtraceap.eval.leaderboard import COLUMNS, leaderboard_dict

    results = score_all(
        dataset, submissions, split=split, slice_name=slice_name, resamples=resamples, seed=seed
    )
    if as_json:
        console.emit_json(leaderboard_dict(results))
    else:
        print_leaderboard(results, tuple(COLUMNS))


def print_leaderboard(results: Sequence[ScoreResult], columns: Sequence[str]) -> None:
    """Print a table of scores, with intervals if the terminal is wide enough for them."""
    from rich.measure import Measurement

    from torchtraceap.eval.leaderboard import leaderboard

    screen = console.out()
    table = leaderboard(results, columns)
    needed = Measurement.get(screen, screen.options.update(width=sys.maxsize), table).minimum
    screen.print(table if needed <= screen.width else leaderboard(results, columns, intervals=False))


def score_all(
    dataset: Path,
    submissions: Sequence[Path],
    *,
    split: str,
    slice_name: str = "all",
    resamples: int = 1000,
    seed: int = 0,
) -> list[ScoreResult]:
    """Score each submission on the same resamples, with progress on stderr."""
    from torchtraceap.eval import scorer
    from torchtraceap.eval.submission import read_submission
    from torchtraceap.eval.truth import Truth

    truth = Truth.load(dataset, split)
    with console.progress() as bar:
        results = []
        for path in bar.track(submissions, description="scoring"):
            submission = read_submission(path)
            try:
                results.append(
                    scorer.score(truth, submission, slice=slice_name, resamples=resamples, seed=seed)
                )
            except UserError as error:  # the scorer does not know which of several it is
                raise UserError(f"{path}: {error}") from error
        return results


def report(
    dataset: Dataset,
    submissions: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[SUBMISSION]...", help="All are scored; the first is drawn over the traces."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="report.html", help="Page to write.")] = Path(
        "report.html"
    ),
    split: Split = "test",
    traces: Annotated[int, typer.Option("--traces", min=1, max=40, help="So many traces are drawn.")] = 12,
    resamples: Resamples = 1000,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Write one HTML page: scores, and traces with what is there, what was found and what to change."""
    check_output(out, force=force)
    paths = submissions or []
    results = score_all(dataset, paths, split=split, resamples=resamples, seed=seed) if paths else []
    write_page(dataset, paths, results, out, split=split, traces=traces)
    print(console.visible(out))


def write_page(
    dataset: Path,
    submissions: Sequence[Path],
    results: Sequence[ScoreResult],
    out: Path,
    *,
    split: str,
    traces: int,
) -> None:
    """Write the report with the detections of the first submission; bad traces come first."""
    from torchtraceap.dataset.parquet import read_table, read_traces, split_files
    from torchtraceap.dataset.schema import TRACES
    from torchtraceap.eval.report import write_report
    from torchtraceap.eval.submission import Detection, read_submission

    detections = []
    if submissions:
        rows = read_submission(submissions[0]).detections.to_pylist()
        detections = [Detection(**row) for row in rows]
    files = split_files(dataset, "traces", split)
    rows = read_table(files, TRACES, ["trace_id", "quality"]).to_pylist()
    telling = sorted(rows, key=lambda row: row["quality"] != "bad")[:traces]
    rank = {row["trace_id"]: place for place, row in enumerate(telling)}
    found = itertools.islice((record for record in read_traces(files) if record.trace_id in rank), len(rank))
    records = sorted(found, key=lambda record: rank[record.trace_id])
    name = results[0].card.name if results else dataset.name
    write_report(out, records, detections, results, title=f"{name} on {split}")


def _row_count(files: Sequence[Path]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return sum(pq.read_metadata(file).num_rows for file in files)
    except pa.ArrowException:
        return 0  # the reader says what is wrong with the file
