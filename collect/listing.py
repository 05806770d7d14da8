"""The zoo as people read it: some of its rows, how many there are, and the page docs/zoo.md (``make docs``).

python -m torchtraceap.collect.listing README.md    # brings the counts in a page up to date
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torchtraceap import console
from torchtraceap.collect.check import STATES, CheckReport, read_report
from torchtraceap.collect.model import ZOO, DeviceKind, ModelSpec
from torchtraceap.dataset.schema import TASKS
from torchtraceap.errors import UserError
from torchtraceap.files import write_text

BEGIN, END = "<!-- zoo: written by `make docs` -->", "<!-- /zoo -->"
"""Between these lines a page holds :func:`counts`."""

_HEAD = """\
# Models

<!-- Written by `make docs` from collect/zoo/; a test compares. -->

{counts}

`traceap zoo list` filters this list, `traceap zoo check` says which of its models run on a machine;
[adding_a_model.md](adding_a_model.md) how to add one. All are built offline with random weights.

A *family* is the outermost architecture, a *backbone* that of the feature extractor inside, if it is another
one. Splits of a data set go by backbones ([design.md](design.md#splits)). Batch sizes are those that are
traced, *train* / *infer*; a dash: not run there.
"""

_COLUMNS = (
    "model", "family", "backbone", "Mparams", "input on a GPU", "on a CPU", "batches on a GPU", "on a CPU",
    "licence",
)  # fmt: skip


def select(
    *,
    task: str = "",
    source: str = "",
    family: str = "",
    small: bool = False,
    min_params: float = 0.0,
    max_params: float = math.inf,
) -> list[ModelSpec]:
    """The models that meet all conditions, by name.

    Args:
        task, source: Empty for any.
        family: The family or the backbone's; empty for any.
        small: Only the demo tier.
        min_params, max_params: Bounds of the number of parameters in millions, both inclusive.

    Raises:
        UserError: There is no such task, source or family in the zoo, or the bounds leave no room.
    """
    _require("task", task, TASKS)
    _require("source", source, sorted({spec.source for spec in ZOO}))
    _require("family", family, sorted({name for s in ZOO for name in (s.family, s.backbone_family)}))
    if min_params > max_params:
        raise UserError(f"--min-params {min_params:g} is above --max-params {max_params:g}")
    return [
        spec
        for spec in ZOO
        if (not task or spec.task == task)
        and (not source or spec.source == source)
        and (not family or family in (spec.family, spec.backbone_family))
        and (not small or spec.small)
        and min_params <= spec.params_m <= max_params
    ]


def _require(what: str, name: str, known: Sequence[str]) -> None:
    if name and name not in known:
        raise UserError(f"Unknown {what} {name!r}. Available: {', '.join(known)}.")


def counts() -> str:
    """How many models there are, as a sentence and as a Markdown table of tasks by sources."""
    specs = list(ZOO)
    by_cell = Counter((spec.task, spec.source) for spec in specs)
    sources = sorted({spec.source for spec in specs})
    trained = sum("train" in spec.modes for spec in specs)
    lines = [
        f"{len(specs)} models of {len({spec.family for spec in specs})} families; {trained} of them train.",
        "",
        f"| task | {' | '.join(sources)} | all |",
        f"|---|{'--:|' * (len(sources) + 1)}",
    ]
    for task in [*TASKS, ""]:
        row = [
            sum(n for (t, s), n in by_cell.items() if task in ("", t) and s == source) for source in sources
        ]
        if sum(row):
            cells = [str(n or "") for n in (*row, sum(row))]
            lines.append(f"| {task or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(checks: Sequence[Path] = ()) -> str:
    """The text of docs/zoo.md.

    Args:
        checks: Results of `traceap zoo check` to tell of, by the names of their files.

    Raises:
        UserError: A file is none.
    """
    lines = [*_checks({path.name: read_report(path) for path in checks}), *_sections()]
    return _HEAD.format(counts=counts()) + "\n".join(lines) + "\n"


def with_counts(text: str) -> str:
    """``text`` with the current counts between the lines :data:`BEGIN` and :data:`END`.

    Raises:
        ValueError: ``text`` does not hold the two lines, in this order, once.
    """
    pattern = re.compile(rf"^{re.escape(BEGIN)}$.*?^{re.escape(END)}$", re.MULTILINE | re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"no text between the lines {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{counts()}\n{END}", text)


def _checks(reports: Mapping[str, CheckReport]) -> Iterator[str]:
    """Where the zoo was checked in which modes, and which models did not pass there and why."""
    if not reports:
        return
    yield "\n## Where they ran\n"
    yield "Files are in [measurements/](measurements/README.md). *Left*: the check ended before them.\n"
    yield f"| file | device | torch | date | modes | {' | '.join(STATES)} |"
    yield f"|---|---|---|---|---|{'--:|' * len(STATES)}"
    for name, report in reports.items():
        facts = (name, report.machine, str(report.hardware["torch"]), report.date, ", ".join(report.modes))
        yield _line(*facts, *(str(report.count(state)) for state in STATES))
    why: dict[tuple[str, str, str], list[str]] = {}
    for name, report in reports.items():
        for one in report.models:
            if one.reason:
                why.setdefault((name, one.state, one.reason), []).append(f"`{one.model}`")
    if why:
        yield "\n| file | state | reason | models |\n|---|---|---|---|"
        yield from (_line(*facts, ", ".join(models)) for facts, models in why.items())


def _line(*cells: str) -> str:
    """A row of a table of Markdown; text of others stays what it is, and in its row."""
    escaped = (
        re.sub(r"[|]" if cell[:1] == "`" else r"[|*_<>\[\]\\]", r"\\\g<0>", console.visible(cell))
        for cell in cells
    )
    return f"| {' | '.join(escaped)} |"


def _sections() -> Iterator[str]:
    for task in TASKS:
        specs = [spec for spec in ZOO if spec.task == task]
        if not specs:
            continue
        yield f"\n## {task.capitalize()}\n\n{_families(specs)}\n"
        yield f"| {' | '.join(_COLUMNS)} |"
        yield "|---|---|---|--:|---|---|---|---|---|"
        yield from map(_row, specs)


def _families(specs: Sequence[ModelSpec]) -> str:
    found = Counter(spec.family for spec in specs)
    named = (f"{name} {count}" if count > 1 else name for name, count in sorted(found.items()))
    return f"{len(specs)} models of {len(found)} families: {', '.join(named)}."


def _row(spec: ModelSpec) -> str:
    cells = (
        f"`{spec.name}`",
        spec.family,
        "" if spec.backbone_family == spec.family else spec.backbone_family,
        f"{spec.params_m:.1f}",
        _shape(spec.gpu_size),
        _shape(spec.cpu_size),
        _batches(spec, "gpu"),
        _batches(spec, "cpu"),
        spec.licence,
    )
    return f"| {' | '.join(cells)} |"


def _shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size))


def _batches(spec: ModelSpec, kind: DeviceKind) -> str:
    by_mode = spec.batch_sizes[kind]
    return " / ".join(", ".join(map(str, by_mode[mode])) or "-" for mode in ("train", "infer"))


if __name__ == "__main__":
    for _page in map(Path, sys.argv[1:]):
        write_text(_page, with_counts(_page.read_text(encoding="utf-8")))
