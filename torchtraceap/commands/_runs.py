"""How runs of many workloads are shown: while they go on, and when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchtraceap import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torchtraceap.collect.runner import JobEvent, RunReport

REFRESHES_A_SECOND = 4


class Tally:
    """What a run has done so far, from the events that the runner tells.

    Args:
        total: Workloads of the plan.
        clock: Tells seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = self.failed = self.skipped = self.traces = 0
        self.running: dict[str, str] = {}
        """Names of workloads, and what each is doing."""
        self._clock = clock
        self._begin = clock()

    @property
    def over(self) -> int:
        """Workloads that need no more work."""
        return self.done + self.failed + self.skipped

    def take(self, event: JobEvent) -> str:
        """Count an event in, and return what to say of it in a line, if anything."""
        name = event.job.name
        if event.kind in ("start", "progress"):
            self.running[name] = event.text or "starting"
            return ""
        self.running.pop(name, None)
        if event.kind == "skipped":
            self.skipped += 1
            return ""
        if event.kind == "again":
            return f"{name}: once more after {event.seconds:.0f} s: {event.text}"
        if event.kind == "failed":
            self.failed += 1
            return f"{self._place()} {name}: failed after {event.seconds:.0f} s: {event.text}"
        self.done += 1
        result = event.result or {}
        self.traces += result.get("traces", 0)
        traces = [f"{result['traces']} traces"] if "traces" in result else []
        return f"{self._place()} {name}: " + "; ".join(
            [", ".join([*traces, f"{event.seconds:.0f} s"]), *result.get("states", ())]
        )

    def line(self) -> str:
        """All of it in one line."""
        told = [f"{self.done} done", f"{self.failed} failed", f"{self.total - self.over} left"]
        if self.skipped:
            told.insert(1, f"{self.skipped} there before")
        minutes = (self._clock() - self._begin) / 60
        ended = self.done + self.failed
        if ended and minutes > 0:
            count, what = (self.traces, "traces") if self.traces else (ended, "workloads")
            told.append(f"{count / minutes:.1f} {what} a minute")
            told.append(f"{_span(minutes / ended * (self.total - self.over))} to go")
        return ", ".join(told)

    def _place(self) -> str:
        return f"[{self.over}/{self.total}]"

    def render(self) -> RenderableType:
        """The line with a bar, and below it a line for each workload that runs."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_row(ProgressBar(total=max(self.total, 1), completed=self.over, width=16), Text(self.line()))
        lanes = (
            Text(console.visible(f"  {name}: {text}"), no_wrap=True, overflow="ellipsis", style="dim")
            for name, text in list(self.running.items())  # a thread of its own shows it
        )
        return Group(head, *lanes)


def _span(minutes: float) -> str:
    """A length of time in the largest unit that fits."""
    if minutes < 1:
        return f"{minutes * 60:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


@contextmanager
def following(total: int) -> Iterator[Callable[[JobEvent], None]]:
    """Show on stderr a line for each end of a workload, and on a terminal what is going on now."""
    tally = Tally(total)

    def on_event(event: JobEvent) -> None:
        if line := tally.take(event):
            console.note(line)

    with console.live(tally.render, REFRESHES_A_SECOND):
        yield on_event


def print_run(report: RunReport) -> None:
    """Say in tables where the time went, what was run otherwise than planned, and what failed and why."""
    if report.stages:
        total = sum(report.stages.values())
        spent = sorted(report.stages.items(), key=lambda item: -item[1])
        rows = [(stage, f"{seconds:.0f}", f"{100 * seconds / total:.0f} %") for stage, seconds in spent]
        console.table("where the time went", ("stage", "seconds", "share"), rows, numeric=2)
    if report.smaller:
        smaller = [(name, str(planned), str(used)) for name, (planned, used) in report.smaller.items()]
        console.table("did not fit as planned", ("workload", "planned batch", "batch"), smaller, numeric=2)
    print_failures(report)
    print_lost(report)


def print_failures(report: RunReport) -> None:
    """Say in a table what failed and why; nothing if nothing did."""
    if report.failed:
        console.table("failed", ("workload", "reason"), report.failed.items())


def print_lost(report: RunReport) -> None:
    """Say in a table which devices were lost; nothing if none was."""
    if report.lost:
        console.table("devices that do not work any more", ("device", "reason"), report.lost.items())
