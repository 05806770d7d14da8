"""`traceap zoo`, `patterns` and `detectors`: what there is, by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtraceap import console
from torchtraceap.commands._options import Family, Json, MaxParams, MinParams, Source, Task
from torchtraceap.errors import UserError

FACTS = ("group", "scope", "lanes", "mechanism", "needs", "modes", "precondition", "belongs")
"""What ``patterns show`` prints in a line each."""

zoo = typer.Typer(help="Models that traces are collected from.")
patterns = typer.Typer(help="Anti-patterns: definition, mechanism, remedy.")
detectors = typer.Typer(help="Detectors that ship with the scorer.")


def add_to(app: typer.Typer) -> None:
    """Add the three groups."""
    app.add_typer(zoo, name="zoo")
    app.add_typer(patterns, name="patterns")
    app.add_typer(detectors, name="detectors")


@zoo.callback()
@patterns.callback()
@detectors.callback()
def _group() -> None:
    """Keep a group a group while it has one command only."""


@zoo.command("list", epilog="Example: traceap zoo list --task detection --max-params 50")
def zoo_list(
    task: Task = "",
    source: Source = "",
    family: Family = "",
    min_params: MinParams = 0.0,
    max_params: MaxParams = math.inf,
    small: Annotated[bool, typer.Option("--small", help="Only the tier that a CPU runs in seconds.")] = False,
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/zoo.md: all models, with all facts.")
    ] = False,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", help="A check.json that the page shall tell of; repeat for several."),
    ] = None,
) -> None:
    """List the models of the zoo."""
    from torchtraceap.collect.listing import page, select
    from torchtraceap.collect.model import describe

    if markdown:
        if task or source or family or small or min_params or max_params < math.inf or as_json:
            raise UserError("--markdown prints the whole page: leave out all other options but --check")
        print(page(check or ()), end="")
        return
    if check:
        raise UserError("--check is told of on the page: add --markdown")
    chosen = select(
        task=task, source=source, family=family, small=small, min_params=min_params, max_params=max_params
    )
    rows = [describe(spec) for spec in chosen]
    if as_json:
        console.emit_json(rows)
        return
    families = len({spec.family for spec in chosen})
    console.table(
        f"{len(rows)} models of {families} families",
        ("model", "task", "family", "backbone", "modes", "Mparams"),
        [
            (
                spec.name,
                spec.task,
                spec.family,
                "" if spec.backbone_family == spec.family else spec.backbone_family,
                ", ".join(spec.modes),
                f"{spec.params_m:.1f}",
            )
            for spec in chosen
        ],
        numeric=1,
    )


@patterns.command("list", epilog="Example: traceap patterns list")
def patterns_list(
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/patterns.md, with all facts.")
    ] = False,
) -> None:
    """List the anti-patterns."""
    from torchtraceap.labels.catalogue import page
    from torchtraceap.labels.pattern import PATTERNS

    if markdown:
        print(page(), end="")
        return
    rows = [_pattern(pattern) for pattern in PATTERNS]
    if as_json:
        console.emit_json(rows)
        return
    console.table(
        f"{len(rows)} patterns",
        ("pattern", "scope", "lanes", "mechanism", "variants", "what it is"),
        [
            (r["id"], r["scope"], ", ".join(r["lanes"]), r["mechanism"], str(len(r["variants"])), r["title"])
            for r in rows
        ],
    )


@patterns.command("show", epilog="Example: traceap patterns show host_sync")
def patterns_show(
    pattern: Annotated[str, typer.Argument(metavar="ID", help="A name from `traceap patterns list`.")],
    as_json: Json = False,
) -> None:
    """Show one anti-pattern: definition, variants, look-alikes and remedy."""
    from torchtraceap.labels.pattern import PATTERNS

    row = _pattern(PATTERNS[pattern])
    if as_json:
        console.emit_json(row)
        return
    _line(f"{row['id']}: {row['title']}\n", style="bold")
    _line(row["definition"] + "\n")
    for name in FACTS:
        value = row[name]
        _line(f"{name:<13}{', '.join(value) if isinstance(value, list) else value}")
    for name in ("variants", "lookalikes"):
        _line(f"\n{name}", style="bold")
        for variant in row[name]:
            heldout = " (held out of training)" if variant["heldout"] else ""
            _line(f"  {variant['name']}{heldout}: {variant['summary']}")
    for name, lines in (("remedy", row["remedy"].splitlines()), ("references", row["references"])):
        _line(f"\n{name}", style="bold")
        for text in lines:
            _line("  " + text, soft_wrap=True)


def _line(text: str, **style: Any) -> None:
    """Print text that may look like markup but is code."""
    shown = "\n".join(map(console.visible, text.split("\n")))
    console.out().print(shown, markup=False, emoji=False, **style)


@detectors.command("list", epilog="Example: traceap detectors list")
def detectors_list(as_json: Json = False) -> None:
    """List the detectors."""
    from torchtraceap.eval.detector import DETECTORS

    rows = [
        {"name": name, "description": " ".join(DETECTORS[name].card().description.split())}
        for name in DETECTORS.names()
    ]
    if as_json:
        console.emit_json(rows)
        return
    console.table(
        f"{len(rows)} detectors", ("detector", "what it does"), [(r["name"], r["description"]) for r in rows]
    )


def _pattern(pattern: Any) -> dict[str, Any]:
    """The facts of a pattern as JSON values, without its functions."""
    from torchtraceap.labels.catalogue import group_of, needs

    facts = (
        "id", "title", "definition", "scope", "mechanism", "belongs", "precondition", "needs_gpu", "runtime",
        "native_risk", "remedy",
    )  # fmt: skip
    row: dict[str, Any] = {name: getattr(pattern, name) for name in facts}
    row |= {"group": group_of(pattern.id), "needs": needs(pattern)}
    row |= {"lanes": sorted(pattern.lanes), "modes": sorted(pattern.modes)}
    row["references"] = list(pattern.references)
    for kind in ("variants", "lookalikes"):
        row[kind] = [
            {"name": v.name, "summary": v.summary, "heldout": v.heldout} for v in getattr(pattern, kind)
        ]
    return row
