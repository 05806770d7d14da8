"""Whether a data set folder is what its card promises: everything is read again, nothing is trusted.

A check is one promise. Some are about files, some about every trace without its events, and some about
events, which take most of the time: these are made of all traces or of a sample. Where files cannot be read,
the rest is not made, as nothing can be said of what they hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torchtraceap.dataset.parquet import read_table, row_groups, split_files
from torchtraceap.dataset.schema import COSTS, HARDWARE, SEGMENTS, SPLITS
from torchtraceap.dataset.verify import _card, _costs, _files, _inspect, _release, _survey
from torchtraceap.dataset.verify._check import PROMISES, Check, Report, judge, unread
from torchtraceap.dataset.windows import WINDOWS
from torchtraceap.errors import UserError
from torchtraceap.parallel import HERE, Where, map_on

__all__ = ["PROMISES", "Check", "Report", "verify"]

Progress = Callable[[str, int, int], None]
"""Told the stage (``reading`` groups of traces, then ``checking`` traces), how many are done, of how many."""


def verify(
    dataset: str | Path,
    sample: int | None = None,
    *,
    seed: int = 0,
    where: Where = HERE,
    progress: Progress | None = None,
    leave_out: Iterable[str] = (),
) -> Report:
    """Check everything that the card of a data set promises.

    Args:
        dataset: Folder that ``traceap build`` made.
        sample: Look at the events of so many traces only, drawn at random; None for all of them.
        seed: Draws the sample.
        where: Processes that read traces; those of a cluster must see the folder under the same path.
        progress: See :data:`Progress`.
        leave_out: Checks of :data:`PROMISES` that are not made, as a build leaves out what comes after it.

    Returns:
        A check a promise. What is wrong with the data is in there, and raises nothing.

    Raises:
        UserError: There is no data set in the folder.
    """
    folder = Path(dataset).resolve() if where.ray else Path(dataset)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; a data set is needed, as `traceap build` makes it")
    if not any((folder / "data").glob("*.parquet")):
        raise UserError(
            f"{folder} holds no data/*.parquet; a data set is needed, as `traceap build` makes it"
        )
    made = {check.name: check for check in _checks(folder, sample, seed, where, progress or _quiet)}
    wanted = [name for name in PROMISES if name not in set(leave_out)]
    return Report([made.get(name) or unread(name) for name in wanted])


def _checks(folder: Path, sample: int | None, seed: int, where: Where, tell: Progress) -> Iterator[Check]:
    readable = _files.layout(folder), _files.columns(folder)
    yield from readable
    yield _files.sums(folder)
    yield _files.croissant(folder)
    yield _files.audit(folder)
    if any(check.count for check in readable):
        return

    groups = [
        (split, path, group)
        for split in SPLITS
        for path, group in row_groups(split_files(folder, "traces", split))
    ]
    surveyed: list[_survey.Surveyed] = []
    for done, found in enumerate(map_on(where, _survey.survey_group, groups), start=1):
        surveyed += found
        tell("reading", done, len(groups))
    seen = [one for one in surveyed if isinstance(one, _survey.Seen)]
    broken = [one for one in surveyed if isinstance(one, str)]
    windows = {split: read_table(split_files(folder, "windows", split), WINDOWS) for split in SPLITS}
    segments = {split: read_table(split_files(folder, "segments", split), SEGMENTS) for split in SPLITS}
    hardware = {split: read_table(split_files(folder, "hardware", split), HARDWARE) for split in SPLITS}

    yield from _release.checks(folder, seen, windows, segments, hardware)
    measured = {split: read_table(split_files(folder, "costs", split), COSTS) for split in SPLITS}
    yield _costs.costs(seen, measured)
    if not broken:
        yield _card.card(folder, seen, windows, hardware)

    drawn = None
    if sample is not None and sample < len(seen):
        drawn = frozenset(random.Random(seed).sample(sorted(one.trace_id for one in seen), sample))
    of_group: dict[tuple[Path, int], set[str]] = {}
    for one in seen:
        if drawn is None or one.trace_id in drawn:
            of_group.setdefault((one.path, one.group), set()).add(one.trace_id)
    items = [
        _inspect.Item(folder, split, path, group, frozenset(of_group[path, group]))
        for split, path, group in groups
        if (path, group) in of_group
    ]
    inspected: list[_inspect.Inspected] = []
    looked = sum(len(item.ids) for item in items)
    for found_here in map_on(where, _inspect.inspect_group, items):
        inspected += found_here
        tell("checking", len(inspected), looked)
    for name in _inspect.CHECKS:
        problems = [problem for one in inspected for problem in one.get(name, [])]
        if name == "traces":
            problems = broken + problems
        yield judge(name, looked, "traces", problems, of=len(surveyed))


def _quiet(stage: str, done: int, total: int) -> None:
    pass
