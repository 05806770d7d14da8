"""Why is this trace slow? The rules applied to any profile, summed up for a reader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Trace
from torchtraceap.eval.detector import TraceView
from torchtraceap.eval.detectors.rules import REPORTED_SHARE, SHOWN_SHARE, Rules, find
from torchtraceap.eval.facts import NO_STEP, Facts
from torchtraceap.eval.findings import Attribution
from torchtraceap.eval.markup import visible
from torchtraceap.eval.submission import Detection
from torchtraceap.labels.pattern import PATTERNS

MAX_PLACES = 4
LOW_BUSY = 0.5
"""Below this tb_plugin speaks of low GPU utilisation."""


@dataclass(frozen=True)
class Cause:
    """One pattern in one trace.

    Attributes:
        pattern: Its id; title and remedy are in ``PATTERNS``.
        lost_ms: Estimated milliseconds that it costs a step.
        share: The same as a share of the step.
        sites: Findings in the whole trace.
        places: Where most time goes: names of the enclosing events and the op, with the number of findings.
    """

    pattern: str
    lost_ms: float
    share: float
    sites: int
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Diagnosis:
    """What the rules say of a trace.

    Attributes:
        name: What was diagnosed.
        trace: Its events.
        steps: Profiled steps; 0 if the trace has no ``ProfilerStep``, which makes the whole trace the step.
        step_ms: Mean time of a step.
        gpu_busy: Share of it in which the GPU works; None without GPU events.
        causes: What costs time, the most first.
        notes: What else a reader should know.
        detections: The places of the causes.
    """

    name: str
    trace: Trace
    steps: int
    step_ms: float
    gpu_busy: float | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    detections: tuple[Detection, ...]

    @property
    def major(self) -> list[Cause]:
        """Causes of at least 1 % of a step, from which on the benchmark calls a pattern costly.

        All causes if the trace has no steps: how much of it is start-up is not known.
        """
        return [cause for cause in self.causes if not self.steps or cause.share >= REPORTED_SHARE]

    @property
    def minor(self) -> list[Cause]:
        """All others."""
        return [cause for cause in self.causes if cause not in self.major]

    @property
    def summary(self) -> str:
        """Size, step time and GPU-busy share on one line."""
        times = f"{self.steps} x {self.step_ms:.2f} ms a step" if self.steps else f"{self.step_ms:.2f} ms"
        busy = "no GPU events" if self.gpu_busy is None else f"GPU busy {_percent(self.gpu_busy)}"
        return f"{len(self.trace):,} events, {times}, {busy}"

    def cost(self, cause: Cause) -> str:
        """What a cause costs, in words."""
        of = "a step" if self.steps else "in all"
        return f"about {cause.lost_ms:.2f} ms {of} ({_percent(cause.share)})"


def diagnose(source: str | Path | Trace) -> Diagnosis:
    """Read a Kineto JSON file (plain or gzip) and apply the rules to it.

    Args:
        source: A path, or a trace that was read already.

    Raises:
        UserError: The file cannot be read or holds no trace.
    """
    if isinstance(source, Trace):
        trace, name = source, "trace"
    else:
        trace, name = read_trace(Path(source)), Path(source).name
    facts = Facts(trace)
    steps = list(range(len(trace.step_bounds))) or [NO_STEP]
    gpu = bool(facts.gpu_work.any())
    busy = float(np.mean([facts.busy_share(step) for step in steps])) if gpu else None
    return Diagnosis(
        name=name,
        trace=trace,
        steps=len(trace.step_bounds),
        step_ms=float(np.mean([facts.step_ns(step) for step in steps])) / 1e6,
        gpu_busy=busy,
        causes=_causes(facts, len(steps)),
        notes=tuple(_notes(facts, busy)),
        detections=tuple(Rules().detect(TraceView(name, trace))),
    )


def _causes(facts: Facts, steps: int) -> tuple[Cause, ...]:
    found = Attribution(facts, find(facts))
    causes = []
    for pattern in found.owner:
        mine = [i for i, finding in enumerate(found.findings) if finding.pattern == pattern]
        share = sum(found.share(i) for i in mine) / steps
        if share < SHOWN_SHARE:
            continue
        time, number = Counter[str](), Counter[str]()
        for i in mine:
            place = facts.path(found.findings[i].roots[-1])
            time[place] += int(found.lost_ns[i])
            number[place] += 1
        places = tuple((place, number[place]) for place, _ in time.most_common(MAX_PLACES))
        lost_ms = float(found.lost_ns[mine].sum()) / steps / 1e6
        causes.append(Cause(pattern, lost_ms, share, len(mine), places))
    return tuple(sorted(causes, key=lambda cause: -cause.share))


def _notes(facts: Facts, busy: float | None) -> list[str]:
    notes = []
    if not facts.has_steps:
        notes.append("No ProfilerStep in the trace: shares are of the whole trace, start-up included.")
    calls = np.isin(facts.trace.categories, ("cuda_runtime", "cuda_driver"))
    if busy is None and calls.any():
        notes.append("GPU events were not recorded: waits are taken at face value, copies are not judged.")
    if facts.has_steps and busy is not None and busy < LOW_BUSY:
        notes.append(
            f"The GPU works {_percent(busy)} of the time: the host is the limit. Beyond any causes named, a "
            'larger batch, torch.compile(model, mode="reduce-overhead") or CUDA graphs make launches cheaper.'
        )
    if not any(op.shapes for op in facts.trace.ops):
        notes.append("Shapes were not recorded (record_shapes=True): casts and loops are harder to see.")
    return notes


def to_text(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis for a terminal. Names from the trace are shown as they are, never as markup."""
    parts: list[RenderableType] = [
        Text(visible(diagnosis.name), style="bold"),
        Text(diagnosis.summary, style="dim"),
    ]
    for rank, cause in enumerate(diagnosis.major, start=1):
        pattern = PATTERNS[cause.pattern]
        line = Text(f"\n{rank}. {pattern.title}", style="bold")
        line.append(f"  {cause.pattern}", style="dim")
        line.append(f"  {diagnosis.cost(cause)}", style="red")
        parts += [line, Padding(Text(pattern.definition), (0, 3))]
        parts += [
            Padding(Text(f"{number} x {visible(place, 160)}", style="cyan"), (0, 3))
            for place, number in cause.places
        ]
        parts.append(Padding(Syntax(pattern.remedy.rstrip(), "python", background_color="default"), (0, 3)))
    if not diagnosis.major:
        parts.append(Text(f"\nNone of the {len(PATTERNS)} patterns costs 1 % of a step.", style="green"))
    if diagnosis.minor:
        minor = [f"{cause.pattern} ({_percent(cause.share)})" for cause in diagnosis.minor]
        parts.append(Text("\nBelow 1 %: " + ", ".join(minor), style="dim"))
    parts += [Text(f"\n{note}", style="yellow") for note in diagnosis.notes]
    return Group(*parts)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
