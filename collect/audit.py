"""Material of the leak audit: places that an injector could change, with its wrappers there and without.

The loop is that of a collection, with the candidate places of real variants, but what stands there does
nothing: whatever tells the profiles apart is the harness. For each profile half of the places are drawn as
those that "act". Profiles of the wrapped loop, as they are published, and of the loop as it was before
anything was wrapped follow each other in random order, so that a drift of the machine is no tell. None has a
marker; where the places are, one more profile says, which is taken last and thrown away.

A workload runs in a process of its own, for the reasons given in ``runner.py``::

    python -P -m torchtraceap.collect.audit < request.json
"""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from torchtraceap.collect.model import ZOO, kind_of
from torchtraceap.collect.processes import die_with
from torchtraceap.dataset import sites
from torchtraceap.dataset.parquet import write_table
from torchtraceap.errors import UserError
from torchtraceap.labels.markers import PREFIX, parse_marker
from torchtraceap.labels.pattern import PATTERNS, FunctionSite, Mode, ModuleSite, Site, StageSite

if TYPE_CHECKING:
    from torchtraceap.collect.loop import Placement, TrainingLoop
    from torchtraceap.collect.model import ModelSpec
    from torchtraceap.dataset.trace import Trace

PLACEMENTS = 4
"""Variants whose places are wrapped at once, about as many as in a collected workload."""

WARMUP_STEPS = 3


class Workload(msgspec.Struct, frozen=True):
    """A model in one mode at one batch size; ``profiles`` profiles of the wrapped loop and as many bare."""

    model: str
    mode: Mode
    batch_size: int
    seed: int
    profiles: int

    @property
    def name(self) -> str:
        """A file name without its ending."""
        model = re.sub(r"[^A-Za-z0-9._]+", "-", self.model)
        return f"{model}_{self.mode}_b{self.batch_size}"


class Request(msgspec.Struct, frozen=True):
    """What the process of a workload is asked for, by the process ``parent``, with which it dies."""

    workload: Workload
    out: str
    device: str
    parent: int


class Gathered(msgspec.Struct):
    """What came of a workload: examples by arm, and steps that equal no marked one, which are left out."""

    wrapped: int = 0
    bare: int = 0
    unmatched_steps: int = 0


def make_workloads(
    models: Sequence[str], *, device_type: str, modes: Sequence[Mode], profiles: int, seed: int
) -> list[Workload]:
    """A workload for each model and mode that runs on the device, at a batch size drawn by seed.

    Raises:
        UserError: A model is unknown, or none runs there.
    """
    found = []
    for name in dict.fromkeys(models):
        batch_sizes = ZOO[name].batch_sizes[kind_of(device_type)]
        for mode in dict.fromkeys(modes):
            rng = random.Random(f"{seed}/{name}/{mode}")
            if batch_sizes[mode]:
                size = rng.choice(list(batch_sizes[mode]))
                found.append(Workload(name, mode, size, rng.getrandbits(31), profiles))
    if not found:
        raise UserError(f"nothing to gather: none of {len(models)} models runs on {device_type}")
    return found


def gather(
    workloads: Sequence[Workload],
    out: Path,
    *,
    device: str,
    time_limit: float,
    on_event: Callable[[Workload, Gathered | str], None],
) -> None:
    """Write a file ``<workload>.parquet`` of ``dataset.sites.EXAMPLES`` for each that is missing in ``out``.

    Args:
        workloads: What to run.
        out: Folder.
        device: Full name of a device.
        time_limit: Seconds that a workload may take.
        on_event: Told how each ended: what was gathered, or in one line why nothing was.
    """
    out.mkdir(parents=True, exist_ok=True)
    for workload in workloads:
        path = out / f"{workload.name}.parquet"
        if not path.exists():
            on_event(workload, _in_a_process(Request(workload, str(path), device, os.getpid()), time_limit))


def _in_a_process(request: Request, time_limit: float) -> Gathered | str:
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "torchtraceap.collect.audit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # so that its loader workers can be ended with it
    )
    try:
        stdout, stderr = process.communicate(msgspec.json.encode(request), timeout=time_limit)
    except subprocess.TimeoutExpired:
        return f"time limit of {time_limit:g} s reached"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = (stdout if process.returncode == 0 else stderr).decode(errors="replace").strip().splitlines()
    if process.returncode or not lines:
        return lines[-1] if lines else f"ended with {process.returncode}"
    return msgspec.json.decode(lines[-1], type=Gathered)


def run(request: Request) -> Gathered:
    """Profile one workload and write its examples; in this process.

    Raises:
        UserError: No variant has a place in the model.
        Whatever the model raises.
    """
    import torch

    from torchtraceap.collect import devices
    from torchtraceap.collect.loop import TrainingLoop

    workload = request.workload
    device = devices.resolve(request.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
        torch.set_float32_matmul_precision("high")
    secret = secrets.token_hex(4)
    loop = TrainingLoop(
        ZOO[workload.model], workload.mode, workload.batch_size, device, secret=secret, seed=workload.seed
    )
    with closing(loop):
        return _gather(loop, workload, secret, Path(request.out))


def _gather(loop: TrainingLoop, workload: Workload, secret: str, out: Path) -> Gathered:
    from torchtraceap.collect import devices, profiling

    rng = random.Random(workload.seed)
    placements = empty_placements(loop, rng)
    if not placements:
        raise UserError(f"{workload.model}: no variant has a place in it")
    for placement in placements:
        loop.install(placement)
    for _ in range(WARMUP_STEPS):
        loop.step()
    devices.synchronize(loop.device)

    arms = [*sites.ARMS] * workload.profiles
    rng.shuffle(arms)
    taken: list[Taken] = []
    drawn = 0
    for arm in arms:
        if arm == "wrapped":
            _draw(placements, rng, complement=drawn % 2 == 1)
            drawn += 1
        with nullcontext() if arm == "wrapped" else _bare(loop):
            trace = _published(_profile(loop, marking=False))
        taken.append(Taken(arm, trace, acting_of(placements)))
    raw = _profile(loop, marking=True)
    marks = marks_of(raw, secret)[profiling.LEAD_IN :]
    return write_examples(out, loop.spec, workload.mode, _published(raw), marks, taken)


def _draw(placements: Sequence[Placement], rng: random.Random, *, complement: bool) -> None:
    """Let half of the places act: any, or those that did not before, so that none acts more often."""
    for placement in placements:
        count = len(placement.sites)
        half = frozenset(rng.sample(range(count), (count + rng.randint(0, 1)) // 2))
        placement.acting = frozenset(range(count)) - placement.acting if complement else half
        placement.armed = True


Candidate = tuple[int, int]
"""A candidate: its placement's index and its own."""

Marks = list[dict[sites.Place, set[Candidate]]]
"""For each published step where markers lay, and of which candidates."""


@dataclass(frozen=True)
class Taken:
    """A profile as it is published, of one of ``sites.ARMS``, and the candidates that acted in it."""

    arm: str
    trace: Trace
    acting: frozenset[Candidate]


def acting_of(placements: Sequence[Placement]) -> frozenset[Candidate]:
    """The candidates that act."""
    return frozenset((one.index, site) for one in placements if one.armed for site in one.acting)


def _profile(loop: TrainingLoop, *, marking: bool) -> Trace:
    from torchtraceap.collect import profiling

    return profiling.profile_steps(loop, settle=0, marking=marking)


def _published(raw: Trace) -> Trace:
    from torchtraceap.collect import profiling
    from torchtraceap.collect.cutting import keep_steps
    from torchtraceap.collect.labelling import number_steps, strip

    trace, _ = keep_steps(strip(raw), [], profiling.LEAD_IN, profiling.PROFILED_STEPS)
    return number_steps(trace)


def marks_of(raw: Trace, secret: str) -> Marks:
    """Where the markers of a trace lie that still has them."""
    is_marker = np.array([op.name.startswith(PREFIX) for op in raw.ops], dtype=bool)[raw.events.op]
    marks: Marks = []
    for step in sites.places(raw, is_marker):
        here: dict[sites.Place, set[Candidate]] = {}
        for place, event in step:
            marker = parse_marker(secret, raw.ops[raw.events.op[event]].name)
            assert marker is not None
            here.setdefault(place, set()).add((marker.placement, marker.site))
        marks.append(here)
    return marks


def write_examples(
    out: Path, spec: ModelSpec, mode: Mode, marked: Trace, marks: Marks, taken: Sequence[Taken]
) -> Gathered:
    """Describe the candidate places in all profiles of one loop and write them.

    A step is looked at where an equal step of ``marked`` had markers. A place that one candidate shares with
    another, of which one acts and one does not, is not used to tell the two apart.

    Args:
        out: File to write.
        spec, mode: For the rows.
        marked: The profile that had markers, stripped and cut.
        marks: Where they lay.
        taken: The others.
    """
    known: dict[tuple[str, ...], dict[sites.Place, set[Candidate]]] = {}
    for step, marks_here in zip(sites.steps(marked), marks, strict=True):
        places = known.setdefault(sites.sequence(marked, step), {})
        for place, candidates in marks_here.items():
            places.setdefault(place, set()).update(candidates)

    gathered = Gathered()
    batches = []
    for one in taken:
        steps = sites.steps(one.trace)
        where = [dict(sorted(known.get(sites.sequence(one.trace, step), {}).items())) for step in steps]
        gathered.unmatched_steps += sum(not here for here in where)
        count = sum(map(len, where))
        if not count:
            continue
        selected = [
            -1 if one.arm == "bare" else _selected(candidates, one.acting)
            for here in where
            for candidates in here.values()
        ]
        columns: dict[str, Any] = {
            "model": [spec.name] * count,
            "family": [spec.family] * count,
            "mode": [mode] * count,
            "profile": [secrets.token_hex(8)] * count,
            "arm": [one.arm] * count,
            "selected": selected,
            **sites.describe(one.trace, steps, [list(here) for here in where]),
        }
        batches.append(pa.RecordBatch.from_pydict(columns, schema=sites.EXAMPLES))
        setattr(gathered, one.arm, getattr(gathered, one.arm) + count)
    write_table(out, batches, sites.EXAMPLES)
    return gathered


def _selected(candidates: set[Candidate], acting: frozenset[Candidate]) -> int:
    """1 if all candidates at a place act, 0 if none does, else -1."""
    count = len(candidates & acting)
    return -1 if 0 < count < len(candidates) else int(count > 0)


def empty_placements(loop: TrainingLoop, rng: random.Random) -> list[Placement]:
    """The candidate places of some variants drawn from the catalogue, at which nothing happens, on or off."""
    from torchtraceap.collect.loop import Placement

    variants = [
        variant
        for pattern in PATTERNS
        if pattern.applies(loop.device.type, loop.mode, loop.runtime) is None
        for variant in (*pattern.variants, *pattern.lookalikes)
        if not variant.starts_workers
    ]
    rng.shuffle(variants)
    placements: list[Placement] = []
    for variant in variants:
        if len(placements) < PLACEMENTS and (found := variant.sites(loop)):
            emptied = [_emptied(site) for site in found]
            placements.append(Placement(len(placements), emptied, frozenset()))
    return placements


def _emptied(site: Site) -> Site:
    """The site with a body that only does what the loop does without it; where it marks, it marks nothing."""
    if isinstance(site, FunctionSite):
        return replace(site, body=lambda original, *args, **kwargs: original(*args, **kwargs))

    def inside(first: Any, second: Any, mark: Callable[[], Any]) -> Any:
        with mark():
            pass
        return second(first) if isinstance(site, StageSite) else first(second)

    bodies: dict[str, Callable[..., Any]] = {
        # A stage's body is given the state first, a module's the original.
        "around": (lambda state, original: original(state))
        if isinstance(site, StageSite)
        else (lambda original, x: original(x)),
        "inside": inside,
        "before": lambda x: x,
        "after": lambda x: x,
    }
    if isinstance(site, StageSite):
        return replace(site, body=bodies[site.where], otherwise=None, data=None)
    assert isinstance(site, ModuleSite)
    return replace(site, body=bodies[site.where], otherwise=None)


@contextmanager
def _bare(loop: TrainingLoop) -> Iterator[None]:
    """The loop without its placements while the block runs."""
    placements, loop.placements = loop.placements, []
    try:
        yield
    finally:
        loop.placements = placements


if __name__ == "__main__":
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        die_with(request.parent)
        print(msgspec.json.encode(run(request)).decode())
    except UserError as error:
        sys.exit(str(error))
