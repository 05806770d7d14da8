"""One workload, from building the model to a file of labelled traces. Runs in a process of its own."""

from __future__ import annotations

import math
import random
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchtraceap.collect import SHARD_MB, devices, profiling
from torchtraceap.collect.compiled import absent_when_compiled, compile_network
from torchtraceap.collect.cores import Cores
from torchtraceap.collect.cutting import keep_steps, steps_below
from torchtraceap.collect.dispatch import WAITING
from torchtraceap.collect.distributed import World, distribute, join, leave, run_ranks, share_cpu
from torchtraceap.collect.evidence import exhaustive, survey
from torchtraceap.collect.injections import Injected, Injections, armed, armed_in
from torchtraceap.collect.labelling import label, number_steps, strip
from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.collect.measure import (
    block_steps,
    measure_cost,
    median_clean_ms,
    null_trial,
    step_seconds,
)
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.native import natives, unpaired
from torchtraceap.collect.plan import Job, Order
from torchtraceap.collect.regions import number_regions
from torchtraceap.collect.server import Request
from torchtraceap.collect.transfer import carried
from torchtraceap.collect.turn import Turn
from torchtraceap.collect.twins import Difference, difference, steps_without
from torchtraceap.dataset.shards import MEGABYTE, write_shard
from torchtraceap.dataset.trace import Trace, TraceRecord
from torchtraceap.labels.cost import LOOKS, Look
from torchtraceap.labels.segments import covered
from torchtraceap.labels.types import Instance, Segment

WARMUP_STEPS = 3
ATTEMPTS = 3
"""Profiles with markers that are taken of an arm until one corresponds to the one without."""

Progress = Callable[[str], None]


def run_request(request: Request, progress: Progress) -> dict[str, Any]:
    """Run the job of a request to the fork server; in this process."""
    order = msgspec.json.decode(request.arguments, type=Order)
    return run_job(
        order.job,
        Path(order.out),
        device=request.device,
        event_cap=order.event_cap,
        shard_mb=order.shard_mb,
        gate=Path(request.gate) if request.gate else None,
        cores=request.cores,
        progress=progress,
    )


def run_job(
    job: Job,
    out: Path,
    *,
    device: str,
    event_cap: int,
    progress: Progress,
    gate: Path | None = None,
    cores: Cores | None = None,
    shard_mb: float = SHARD_MB,
) -> dict[str, Any]:
    """Collect the traces of one workload into a shard.

    Args:
        job: What to run.
        out: The file to write; it appears whole or not at all.
        device: A device name, or ``auto``.
        event_cap: A trace with more events is cut to two or one of its steps, which is recorded.
        progress: Told in a few words what is going on.
        gate: A lock file to hold while the device is used, if others want it too.
        cores: Which to use while the gate is held alone, and which else. The ranks of a distributed workload
            use all, as each times what it does and only the first holds the gate.
        shard_mb: A shard above so many megabytes is several files.

    Returns:
        A summary as JSON values: traces, files, events, segments, states, the injections that found no place,
        and whether the published traces were marked.

    Raises:
        UserError: Nothing of the plan can be injected here.
        torch.OutOfMemoryError: The batch does not fit. The runner decides what is done about it.
        RuntimeError: A rank of a distributed workload ended early.
    """
    if job.runtime != "distributed":
        return _run(job, out, device, event_cap, progress, gate, shard_mb, cores=cores)

    def main(rank: int, store: Path) -> dict[str, Any]:
        if rank > 0:
            return _run(job, out, device, event_cap, lambda text: None, None, shard_mb, rank, store)
        return _run(job, out, device, event_cap, progress, gate, shard_mb, rank, store)

    return run_ranks(job.world_size, main)


def _run(
    job: Job,
    out: Path,
    device: str,
    event_cap: int,
    progress: Progress,
    gate: Path | None,
    shard_mb: float,
    rank: int = 0,
    store: Path | None = None,
    cores: Cores | None = None,
) -> dict[str, Any]:
    """The workload, or one rank of it: those of a distributed workload find each other through ``store``."""
    where = devices.prepare(device, rank)
    if store is not None and where.type == "cpu":
        share_cpu(job.world_size)
    progress("building")
    world = World()
    with closing(Turn(gate, progress, cores)) as turn:

        def take_device() -> None:
            turn.take(shared=True)  # placing, surveying and warming up are not timed
            progress("placing")
            if store is not None:  # no rank uses its device before rank 0 may
                nonlocal world
                world = join(rank, job.world_size, store, where)

        session = Session(job, where, event_cap, progress, turn, rank=rank, take_device=take_device)
        with closing(session.loop):
            if store is not None:
                distribute(session.loop, world)
            result = session.run(out, shard_mb)
        leave()
        return result


class Session:
    """The order is that of the design: build, place, warm up, measure all costs, and only then profile for
    the first time, because a profiler that has run once can slow what follows.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        event_cap: int,
        progress: Progress,
        turn: Turn,
        *,
        rank: int = 0,
        take_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self.turn = turn
        self.event_cap = event_cap
        self.progress = progress
        self.rng = random.Random(job.seed)
        self.secret = secrets.token_hex(4)
        self.loop = TrainingLoop(
            ZOO[job.model],
            job.mode,
            job.batch_size,
            device,
            secret=self.secret,
            seed=job.seed,
            rank=rank,
            take_device=take_device,
        )
        if job.runtime == "compiled":
            compile_network(self.loop)
        self.nulls: list[Look] = []
        self.differences: list[dict[str, Any]] = []
        self.disagreements: set[str] = set()
        self.unpaired: list[str] = []
        self.absent_when_compiled: set[str] = set()
        self.clean_ms = math.nan
        self.marked = False
        """Whether profiles that were marked are published, as others did not correspond to them."""

    def run(self, out: Path, shard_mb: float) -> dict[str, Any]:
        """All of it; see :func:`run_job`. Of several ranks the first writes the traces of all."""
        world = self.loop.world
        self.pair_id = world.agreed(secrets.token_hex(8))
        self.injections = Injections(self.job, self.loop, self.rng)
        self.progress("surveying")
        # Dispatch modes need the bare model. What is installed in other loops cannot run on that.
        if self.loop.runtime != "eager":
            with self.loop.plain():
                self.seen = survey(self.loop)
        for one in self.injections.all:
            self.loop.install(one.placement)
        if self.loop.runtime == "eager":
            self.seen = survey(self.loop)
        self.progress("warming up")
        self._warm_up()
        self.turn.close()
        with self._on_device("measuring"):
            steps = block_steps(self.loop)
            self._measure(steps)
        records = self._profile_arms()

        hardware = devices.hardware(self.loop.device, world.size)
        for record in records:
            record.meta["hardware_id"] = hardware["hardware_id"]
        records = world.gathered(records)
        differences = world.gathered(self.differences)
        disagreements = set(world.gathered(sorted(self.disagreements)))
        unpaired_waits = world.gathered(self.unpaired)
        if world.rank > 0:
            return {}
        provenance = {
            "job": msgspec.to_builtins(self.job),
            "hardware": hardware,
            "skipped": self.injections.skipped,
            "event_cap": self.event_cap,
            "block_steps": steps,
            "marked": self.marked,
            "timed_cores": self.turn.timed_cores,
            "null_trials": [msgspec.to_builtins(seen) for seen in self.nulls],
            "differences": differences,
            "unpaired": unpaired_waits,
            "disagreements": sorted(disagreements),
            "instances": [
                {
                    "trace_id": r.trace_id,
                    "instance": i,
                    **msgspec.to_builtins(self.injections.cost_of(instance)),
                }
                for r in records
                for i, instance in enumerate(r.instances)
                if instance.source != "native"
            ],
        }
        records.sort(key=lambda record: record.trace_id)  # random: the order of profiling is not published
        encoded = msgspec.json.encode(provenance).decode()
        files = write_shard(out, records, encoded, int(shard_mb * MEGABYTE))
        return {
            "traces": len(records),
            "files": files,
            "events": sum(len(r.trace) for r in records),
            "segments": sum(len(r.segments) for r in records),
            "states": [f"{one.name}: {one.instance().state}" for one in self.injections.all],
            "skipped": self.injections.skipped,
            "marked": self.marked,
            "natives": sorted({i.pattern for r in records for i in r.instances if i.source == "native"}),
        }

    def _warm_up(self) -> None:
        """Every arm as it will run: what allocates, compiles or tunes does so now."""
        for _ in range(WARMUP_STEPS):
            self.loop.step()
        if self.loop.runtime == "compiled":
            self.absent_when_compiled = absent_when_compiled(self.loop)
        for arm in self.injections.toggled():
            with armed(arm):
                for _ in range(max(2, *(one.variant.settle_steps for one in arm))):
                    self.loop.step()
        devices.synchronize(self.loop.device)

    @contextmanager
    def _on_device(self, doing: str, *, shared: bool = False) -> Iterator[None]:
        """Have the device while the block runs, alone or beside others who do not time what they do."""
        with self.turn.taken(shared=shared):
            self.progress(doing)
            self.loop.world.agreed(0)  # no rank uses its device before rank 0 may
            yield

    def _measure(self, steps: int) -> None:
        """The cost of each pattern beside the others of its arm, and that of each look-alike alone."""
        costs = []
        for arm in self.injections.toggled():
            for one in arm:
                self.progress(f"measuring {one.name}")
                with armed([other for other in arm if other is not one]):
                    one.cost = measure_cost(
                        self.loop,
                        one.placement,
                        steps=min(steps, one.variant.max_block_steps or steps),
                        settle=one.variant.settle_steps,
                        rng=self.rng,
                        looks=LOOKS[:1] if one.is_lookalike else LOOKS,  # the measurement can only object
                    )
                if len(arm) == 1:
                    costs.append(one.cost)
        for number in range(self.job.null_trials):
            self.progress(f"null trial {number + 1} of {self.job.null_trials}")
            self.nulls.append(null_trial(self.loop, steps=steps, rng=self.rng))
        self.clean_ms = median_clean_ms(costs) if costs else step_seconds(self.loop, steps) * 1e3

    def _profile_arms(self) -> list[TraceRecord]:
        """The clean trace first in the list, then one an arm.

        Each arm is profiled without markers, which is what is published, and with them, which tells what
        belongs to what. Either is done in a random order of its own, and none is published that was taken
        after a profile with markers. No time is read off the latter, so others may use the device meanwhile.
        """
        arms = [
            arm + [twin for twin in self.injections.twins if self.rng.random() < 0.5]
            for arm in self.injections.arms
        ]
        recorded = self._recordings(arms, marking=False, shared=False)
        recorded_marked = self._recordings(arms, marking=True, shared=True)
        self.progress("reading profiles")
        plain = [strip(one.read()) for one in recorded]
        marked = [one.read() for one in recorded_marked]
        labels = self._carried(arms, plain, marked)
        self.marked = labels is None
        if self.marked:  # they are to be published, so they are taken as such
            marked = [one.read() for one in self._recordings(arms, marking=True, shared=False)]
        self.progress("labelling")
        marked_clean = _without_lookalikes(*label(marked[0], self.secret, armed_in(arms[0])))
        marked_labels = [
            label(profile, self.secret, armed_in(arm), marked_clean)
            for arm, profile in zip(arms, marked, strict=True)
        ]
        published = marked_labels if labels is None else list(zip(plain, labels, strict=True))
        records = []
        for number, (arm, (trace, segments)) in enumerate(zip(arms, published, strict=True)):
            records.append(self._record(arm, trace, segments, published[0][0]))
            if number:
                different = self._difference(
                    arm, marked[number], marked_labels[number][1], arms[0], marked[0]
                )
                self.differences.append({"trace_id": records[-1].trace_id, **msgspec.to_builtins(different)})
        return records

    def _recordings(
        self, arms: list[list[Injected]], *, marking: bool, shared: bool
    ) -> list[profiling.Recording]:
        taken = {
            number: self._recording(arms[number], marking=marking, shared=shared)
            for number in self.rng.sample(range(len(arms)), len(arms))
        }
        return [taken[number] for number in range(len(arms))]

    def _recording(self, arm: list[Injected], *, marking: bool, shared: bool) -> profiling.Recording:
        what = " and ".join(one.name for one in arm if not one.is_lookalike) or "clean"

        def on_device() -> AbstractContextManager[None]:
            return self._on_device(f"profiling {what}{' with markers' if marking else ''}", shared=shared)

        with armed(arm):
            settle = max((one.variant.settle_steps for one in arm), default=0)
            return profiling.record_steps(self.loop, settle, marking=marking, on_device=on_device)

    def _carried(
        self, arms: list[list[Injected]], plain: list[Trace], marked: list[Trace]
    ) -> list[list[Segment]] | None:
        """The segments of the stripped profiles without markers; None if those of an arm do not correspond.

        A step that depends on its data may differ from profile to profile. Then a profile with markers is
        taken again, which changes nothing in what is published.
        """
        clean: Trace | None = None  # the first arm has look-alikes at most, which are found by markers
        found = []
        for arm, trace, first in zip(arms, plain, marked, strict=True):
            profile = first
            for attempt in range(ATTEMPTS):
                if attempt:
                    profile = self._recording(arm, marking=True, shared=True).read()
                segments = carried(profile, self.secret, armed_in(arm), trace, clean)
                if self.loop.world.smallest(int(segments is not None)):  # on all ranks alike
                    break
            else:
                return None
            assert segments is not None
            if clean is None:
                clean = _without_lookalikes(trace, segments)
            found.append(segments)
        return found

    def _difference(
        self,
        arm: list[Injected],
        profile: Trace,
        segments: list[Segment],
        clean_arm: list[Injected],
        clean: Trace,
    ) -> Difference:
        """How far a trace differs from the clean one outside of all that acts in one of the two."""
        places = [(one.placement, one.mechanism) for one in (*arm, *clean_arm)]
        rest, clean_rest = (
            steps_without(trace, self.secret, places, found)[profiling.LEAD_IN :]
            for trace, found in ((profile, segments), (clean, []))
        )
        return difference(rest, clean_rest)

    def _record(
        self, arm: list[Injected], whole: Trace, segments: list[Segment], clean: Trace
    ) -> TraceRecord:
        waiting = [one for one in segments if arm[one.instance].pattern.id in WAITING]
        found = natives(self.seen.waits, whole, segments, waiting)
        self.disagreements.update(found.disagreements)
        instances = [*(one.instance() for one in arm), *found.instances]
        segments = segments + [
            msgspec.structs.replace(one, instance=one.instance + len(arm)) for one in found.segments
        ]
        segments.sort(key=lambda one: (one.start_ns, one.lane, one.first_event))
        whole, segments = keep_steps(whole, segments, profiling.LEAD_IN, profiling.PROFILED_STEPS)
        trace = whole
        count = self.loop.world.smallest(steps_below(whole, self.event_cap))
        if count < profiling.PROFILED_STEPS:
            # A part in which the arm's first pattern acts, if it does not act in all steps.
            acting = arm[0].placement.steps if arm else None
            first = self.rng.choice(sorted(acting or range(profiling.PROFILED_STEPS)))
            trace, segments = keep_steps(whole, segments, min(first, profiling.PROFILED_STEPS - count), count)
        trace = number_steps(trace)
        if self.loop.runtime == "compiled":
            trace = number_regions(trace)
        self._require_seen(arm, segments, was_cut=count < profiling.PROFILED_STEPS)
        instances, segments = _with_segments(instances, segments)
        spec, loop = self.loop.spec, self.loop
        step_ms = self._step_ms(arm)
        record = TraceRecord(
            trace=trace,
            meta={
                "trace_id": secrets.token_hex(8),
                "pair_id": self.pair_id,
                "model": spec.name,
                "source": spec.source,
                "task": spec.task,
                "family": spec.family,
                "backbone_family": spec.backbone_family,
                "split_unit": "",  # build.py decides, when it sees all traces
                "hardware_id": "",
                "mode": self.job.mode,
                "precision": loop.precision,
                "batch_size": self.job.batch_size,
                "input_shape": "x".join(map(str, spec.size(loop.device.type))),
                "rank": loop.world.rank,
                "world_size": loop.world.size,
                "steps": len(trace.step_bounds),
                "quality": "",
                "step_ms": step_ms,
                "profiler_ratio": profiling.step_ms(whole) / step_ms,
                "gpu_busy": profiling.gpu_busy(trace),
            },
            instances=instances,
            segments=segments,
            exhaustive=exhaustive(
                self.seen.absent | self.absent_when_compiled, clean, loop.device.type != "cpu", found
            ),
        )
        record.meta["quality"] = record.quality
        trace.check(f"trace of {spec.name}")
        self.unpaired += [f"trace {record.trace_id}: {what}" for what in unpaired(trace, instances, segments)]
        return record

    def _step_ms(self, arm: list[Injected]) -> float:
        """Step time without the profiler, averaged over the profiled steps, in not all of which all act."""
        patterns = [one for one in arm if not one.is_lookalike]
        with_all = self.clean_ms
        if len(patterns) == 1:
            with_all += patterns[0].measured.ms
        elif patterns:  # measured together; their costs need not add up
            with_all = statistics.median(one.measured.median_with_ms for one in patterns)
        return with_all + sum(
            one.mean_ms(profiling.PROFILED_STEPS) - (0 if one.is_lookalike else one.measured.ms)
            for one in arm
        )

    def _require_seen(self, arm: list[Injected], segments: list[Segment], *, was_cut: bool) -> None:
        """Make sure that patterns left events, but for what was cut away with the steps it acted in."""
        found = {segment.instance for segment in segments}
        for i, one in enumerate(arm):
            elsewhere = was_cut and one is not arm[0]
            if i not in found and not one.is_lookalike and not elsewhere:
                raise RuntimeError(f"{one.name} acted, but no event of the trace belongs to it")


def _without_lookalikes(trace: Trace, segments: list[Segment]) -> Trace:
    """A clean trace less its look-alikes: what they do is nothing that the clean loop does."""
    return trace.select(~covered(segments, len(trace)))[0]


def _with_segments(
    instances: list[Instance], segments: list[Segment]
) -> tuple[list[Instance], list[Segment]]:
    """Leave out instances without an event: look-alikes (a view, a cast to the same type), steps cut away."""
    found = sorted({segment.instance for segment in segments})
    position = {old: new for new, old in enumerate(found)}
    renumbered = [msgspec.structs.replace(s, instance=position[s.instance]) for s in segments]
    return [instances[i] for i in found], renumbered
