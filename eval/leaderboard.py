"""Several detectors side by side: a table for the terminal and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchtraceap.console import safe
from torchtraceap.errors import UserError
from torchtraceap.eval.metrics import METRIC_BY_NAME, RANKING_METRIC
from torchtraceap.eval.scorer import Score, ScoreResult, compare

COLUMNS: Final = {
    RANKING_METRIC: "mAP",
    "segment_f1": "F1",
    "recovered_cost": "cost found",
    "false_alarms": "alarms",
    "window_auroc_pattern": "AUROC",
    "window_accuracy": "accuracy",
}
"""Metrics that are shown unless others are asked for, with their headings."""

ALL_COLUMNS: Final = COLUMNS | {"step_f1": "step F1", "trace_macro_f1": "trace F1"}
"""Where there is room: also those that say something where nothing costly has a place in the timeline."""


def ranked(results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Best first by the ranking metric; equal ones, and those without it, by the F1 of steps and of traces.

    What is equal in all three is in the order of name and version.

    Raises:
        UserError: The results were not all scored alike, or there are none.
    """
    if not results:
        raise UserError("a leaderboard needs at least one result")
    for other in results[1:]:
        compare(results[0], other)

    def key(result: ScoreResult) -> tuple[list[float], str, str]:
        values = [result.scores[name].value for name in (RANKING_METRIC, "step_f1", "trace_macro_f1")]
        worst_last = [1.0 if value is None else -value for value in values]
        return worst_last, result.card.name, result.card.version

    return sorted(results, key=key)


def leaderboard(
    results: Sequence[ScoreResult], columns: Sequence[str] = tuple(COLUMNS), *, intervals: bool = True
) -> Table:
    """A table of scores, under each its 95 % interval.

    Args:
        results: Scored alike; their cards are untrusted and are escaped.
        columns: Names of metrics.
        intervals: Whether there is room for them; without, all scores fit into 80 characters.

    Raises:
        UserError: As for :func:`ranked`, or an unknown metric.
    """
    unknown = [name for name in columns if name not in METRIC_BY_NAME]
    if unknown:
        raise UserError(f"unknown metric {unknown[0]!r}; possible: {', '.join(METRIC_BY_NAME)}")
    order = ranked(results)
    bare = any(result.scores[name].value is None for result in order for name in columns)
    rule = order[0].class_rule
    classes = ", ".join(f"{len(names)} {scope} ({rule[scope]})" for scope, names in order[0].classes.items())
    notes = [f"classes: {classes}"]
    if intervals:
        notes.append(f"95 % intervals over {order[0].counts['split_units']} split units")
    if bare:
        notes.append("a dash: too little to be found here for that score")
    table = Table(
        title=f"{order[0].provenance['split']}: {order[0].counts['traces']} traces",
        box=SIMPLE_HEAD,
        padding=0,
        caption="\n".join(notes),
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("detector", overflow="fold", min_width=10)
    for name in columns:
        heading = ALL_COLUMNS.get(name, name).replace(" ", "\n")
        arrow = "" if METRIC_BY_NAME[name].higher_is_better else " ↓"
        table.add_column(heading + arrow, justify="right", no_wrap=True)
    for rank, result in enumerate(order, start=1):
        card = f"{safe(result.card.name)}\n[dim]{safe(result.card.version)}[/]"
        cells = (_cell(result.scores[column], intervals) for column in columns)
        table.add_row(str(rank), card, *cells)
    return table


def leaderboard_dict(results: Sequence[ScoreResult]) -> dict[str, Any]:
    """For JSON: the results, best first, each with its paired differences to the next one.

    Raises:
        UserError: As for :func:`ranked`.
    """
    order = ranked(results)
    rows = [{"rank": rank, **result.to_dict()} for rank, result in enumerate(order, start=1)]
    for row, better, worse in zip(rows, order, order[1:], strict=False):
        row["to_next"] = {name: delta.to_dict() for name, delta in compare(better, worse).items()}
    return {"ranking_metric": RANKING_METRIC, "rows": rows}


def _cell(score: Score, intervals: bool) -> str:
    if score.value is None:
        return "-"
    if not intervals or score.low is None or score.high is None:
        return f"{score.value:.3f}"
    return f"{score.value:.3f}\n[dim]{score.low:.2f}–{score.high:.2f}[/]"
