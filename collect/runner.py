"""Many workloads, each in a process of its own: progress, time limits, resumption, and what failed why.

A run is a folder (collect/run_folder.py). Several lanes run workloads side by side. Each has a fork server of
its own (collect/lane.py) and a device. Of the lanes of a device one measures and profiles, while others build
their models, label or write.

What is done about failures:

    a signal killed it     it runs once more, as it may have been the system that ran out of memory
    its batch is too large it runs once more: alone on the device if it was not, else at half of its batch
    the device failed      the device is asked whether it works (collect/probe.py); if not, its lanes end
    the disk is full       the run ends

Each decision is a line in the log, and a resumed run holds to those on batch sizes. All else that fails is
recorded, and tried again when the run is resumed.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from torchtraceap.collect import EVENT_CAP, SHARD_MB, TIME_LIMIT, probe
from torchtraceap.collect.cores import Cores, division
from torchtraceap.collect.lane import Lane
from torchtraceap.collect.plan import Job, Order
from torchtraceap.collect.processes import machine_memory
from torchtraceap.collect.run_folder import Named, RunFolder, claimed, log_lines, read_log, shard_path

MEMORY_SHARE = 0.6
"""Of the machine's memory, what a workload may take, unless told otherwise."""

LEAST_BATCH = {"train": 2, "infer": 1}
"""BatchNorm behind a global pooling cannot train on a single sample."""


AnyJob = TypeVar("AnyJob", bound=Named)
OpenLane = Callable[[Path, str, str], AbstractContextManager[Lane]]


@dataclass(frozen=True)
class Work(Generic[AnyJob]):
    """What a run does with its jobs.

    Attributes:
        kind: A key of ``server.WORK``.
        arguments: What the process of a job is told, which is given the batch size to run at.
        shard: The file that a finished job has left; without one, a job is finished that the log calls done.
        batch_sizes: The planned batch size of a job, and those to try in turn where it does not fit.
    """

    kind: str
    arguments: Callable[[AnyJob, int], Any]
    shard: Callable[[AnyJob], Path] | None = None
    batch_sizes: Callable[[AnyJob], Sequence[int]] = lambda job: (0,)


class JobEvent(msgspec.Struct, frozen=True):
    """What a caller is told: ``start``, ``progress``, ``again``, ``done``, ``failed`` or ``skipped``.

    ``again`` is a job that will be run once more, ``skipped`` one that was finished before. ``result`` is the
    summary of a finished job.
    """

    kind: str
    job: Any
    text: str = ""
    seconds: float = 0.0
    result: dict[str, Any] | None = None


class RunReport(msgspec.Struct):
    """How a run ended.

    Attributes:
        done: Jobs that were finished in it; ``skipped`` were before.
        failed: Why a job failed, in one line.
        left: Jobs that did not start, within the budget or for want of a device.
        again: Jobs that were run again, and why.
        smaller: Finished jobs whose planned batch did not fit: the planned size and the one that did.
        lost: Devices that stopped working, and how that showed.
        stages: Seconds of all workloads by what they did, as they said in its first word.
    """

    done: list[str] = []
    skipped: list[str] = []
    failed: dict[str, str] = {}
    left: list[str] = []
    again: dict[str, str] = {}
    smaller: dict[str, tuple[int, int]] = {}
    lost: dict[str, str] = {}
    stages: dict[str, float] = {}
    traces: int = 0
    seconds: float = 0.0


def collect(
    plan: Sequence[Job],
    run: Path,
    *,
    devices: Sequence[str] = ("auto",),
    lanes: int = 1,
    resume: bool = False,
    event_cap: int = EVENT_CAP,
    time_limit: float = TIME_LIMIT,
    memory_limit: int | None = None,
    shard_mb: float = SHARD_MB,
    budget: float = math.inf,
    open_lane: OpenLane = Lane,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> RunReport:
    """Collect the traces of every job of ``plan`` whose shard is missing.

    Args:
        plan: The jobs.
        event_cap, shard_mb: See ``session.run_job``.

    For the others see :func:`run_jobs`. Of a distributed workload a device is where its rank 0 runs.
    """

    def arguments(job: Job, batch_size: int) -> Order:
        return Order(job.at_batch(batch_size), str(shard_path(run, job)), event_cap, shard_mb)

    return run_jobs(
        plan,
        run,
        Work("collect", arguments, partial(shard_path, run), halved_batches),
        devices=devices,
        lanes=lanes,
        resume=resume,
        time_limit=time_limit,
        memory_limit=memory_limit,
        budget=budget,
        open_lane=open_lane,
        on_event=on_event,
    )


def halved_batches(job: Job) -> list[int]:
    """The planned batch size and what halving it gives, as far as the mode allows."""
    sizes = [job.batch_size]
    while sizes[-1] // 2 >= LEAST_BATCH[job.mode]:
        sizes.append(sizes[-1] // 2)
    return sizes


def run_jobs(
    jobs: Sequence[AnyJob],
    run: Path,
    work: Work[AnyJob],
    *,
    devices: Sequence[str],
    lanes: int = 1,
    resume: bool = False,
    time_limit: float = TIME_LIMIT,
    memory_limit: int | None = None,
    budget: float = math.inf,
    open_lane: OpenLane = Lane,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> RunReport:
    """Run every job that is not finished, going on past failures.

    Args:
        jobs: The plan; their names must be unique.
        run: Folder to write to.
        work: What is done with them.
        devices: Where the workloads run.
        lanes: Workloads side by side for each device.
        resume: Allow ``run`` to hold an earlier run of the same plan.
        time_limit: Seconds that a workload may take, waiting for the device not included.
        memory_limit: Bytes of main memory that a workload may take; a share of the machine's if None.
        budget: Seconds after which no further workload starts; those that run end in peace.
        open_lane: Makes a lane of a file for standard error, a device and a gate.
        on_event: Told of every start, progress and end.

    Returns:
        What was made, and what failed why. An interrupt (Ctrl-C) stops the workloads that run and raises
        KeyboardInterrupt; finished ones stay.

    Raises:
        UserError: ``run`` holds something else, or an earlier run and ``resume`` is not given; or its disk is
            full.
    """
    begin = time.monotonic()
    limits = _Limits(
        time_limit,
        memory_limit or int(MEMORY_SHARE * machine_memory()),
        division(devices) if lanes > 1 else {},
    )
    with claimed(run, jobs, resume) as folder, ExitStack() as opened:
        opened.callback(folder.remove_torn)  # when all lanes have ended
        running = _Running(folder, work, limits, on_event)
        running.plan(jobs)
        # One lane of each device before the second of any: few workloads then meet at no gate.
        places = [(device, n) for _ in range(lanes) for n, device in enumerate(devices)]
        for device, n in places[: len(running.waiting)]:
            gate = str(run / f"device-{n}.lock") if lanes > 1 else ""
            running.idle.append(opened.enter_context(open_lane(run / "stderr.log", device, gate)))
        while True:
            if time.monotonic() - begin > budget or not (running.idle or running.busy):
                running.report.left += [attempt.job.name for attempt in running.waiting]
                running.waiting.clear()
            running.start()
            if not running.busy:
                break
            running.follow()
    running.report.seconds = time.monotonic() - begin
    return running.report


@dataclass(frozen=True)
class _Limits:
    """Seconds and bytes that a workload may take, and by device which cores, where they are divided."""

    time: float
    memory: int
    cores: Mapping[str, Cores]


class _Attempt(Generic[AnyJob]):
    """A job to run: at which batch size, if a signal has ended it before, and a device to have alone.

    ``had_company`` says whether others used its device meanwhile.
    """

    def __init__(
        self, job: AnyJob, batch_size: int, *, killed: bool = False, alone: str | None = None
    ) -> None:
        self.job = job
        self.batch_size = batch_size
        self.killed = killed
        self.alone = alone
        self.had_company = False
        self.stages = _Stages()


class _Running(Generic[AnyJob]):
    """The state of a run, and what follows from what its workloads say."""

    def __init__(
        self,
        folder: RunFolder,
        work: Work[AnyJob],
        limits: _Limits,
        on_event: Callable[[JobEvent], None],
    ) -> None:
        self.folder = folder
        self.work = work
        self.limits = limits
        self.on_event = on_event
        self.report = RunReport()
        self.waiting: deque[_Attempt[AnyJob]] = deque()
        self.idle: deque[Lane] = deque()
        self.busy: dict[Lane, _Attempt[AnyJob] | None] = {}
        """The lanes that work, without an attempt those that ask their device whether it works."""

    def plan(self, jobs: Sequence[AnyJob]) -> None:
        """Let all jobs wait that are not finished, with what was decided on them."""
        if self.work.shard is None:
            finished = {name for name, end in read_log(self.folder.path).items() if end.event == "done"}
        else:
            finished = {job.name for job in jobs if self.work.shard(job).exists()}
        sizes = {line.job: line.batch_size[1] for line in log_lines(self.folder.path) if line.batch_size}
        for job in jobs:
            if job.name in finished:
                self.report.skipped.append(job.name)
                self.on_event(JobEvent("skipped", job))
            else:
                possible = self.work.batch_sizes(job)
                decided = sizes.get(job.name, possible[0])
                self.waiting.append(_Attempt(job, decided if decided in possible else possible[0]))

    def _planned(self, job: AnyJob) -> int:
        return self.work.batch_sizes(job)[0]

    def start(self) -> None:
        """Give every idle lane something to do, unless its device is or is to be somebody's alone."""
        for lane in [*self.idle]:
            others = [one for other, one in self.busy.items() if one and other.device == lane.device]
            if (attempt := self._next(lane.device, others)) is None:
                continue
            self.waiting.remove(attempt)
            self.idle.remove(lane)
            for one in [*others, attempt] if others else []:
                one.had_company = True
            self.busy[lane] = attempt
            attempt.stages = _Stages()
            self.on_event(JobEvent("start", attempt.job))
            if lane.submit(
                self.work.kind,
                self.work.arguments(attempt.job, attempt.batch_size),
                time_limit=self.limits.time,
                memory_limit=self.limits.memory,
                cores=self.limits.cores.get(lane.device),
            ):
                self._progress(attempt, "importing the model libraries")

    def _next(self, device: str, others: Sequence[_Attempt[AnyJob]]) -> _Attempt[AnyJob] | None:
        """What may run on a device beside ``others``; None if it has to wait for their end."""
        if any(one.alone for one in others):
            return None
        for attempt in self.waiting:
            if attempt.alone is None:
                return attempt
        # Last, and one after the other: for each, all lanes but one stand still.
        return None if others else next((one for one in self.waiting if one.alone == device), None)

    def follow(self) -> None:
        """Wait until lanes have something to say, and act on it."""
        for lane in select.select(list(self.busy), [], [])[0]:
            for event in lane.events():
                attempt = self.busy[lane]
                if event["event"] == "progress":
                    if attempt is not None:
                        self._progress(attempt, event["text"])
                    continue
                del self.busy[lane]
                if attempt is None:
                    self._probed(lane, event)
                elif event["event"] == "done":
                    self.idle.append(lane)
                    self._done(attempt, event)
                else:
                    self._failed(lane, attempt, event)

    def _progress(self, attempt: _Attempt[AnyJob], text: str) -> None:
        attempt.stages.enter(text)
        self.on_event(JobEvent("progress", attempt.job, text))

    def _probed(self, lane: Lane, event: dict[str, Any]) -> None:
        if event["event"] == "done":
            self.idle.append(lane)
        else:
            self.report.lost.setdefault(lane.device, event["error"])
            for waiting in self.waiting:
                if waiting.alone == lane.device:
                    waiting.alone = None

    def _done(self, attempt: _Attempt[AnyJob], event: dict[str, Any]) -> None:
        job, result = attempt.job, event["result"]
        if (planned := self._planned(job)) != attempt.batch_size:
            self.report.smaller[job.name] = (planned, attempt.batch_size)
        self._write(attempt, event)
        self.report.done.append(job.name)
        self.report.traces += result.get("traces", 0)
        self.on_event(JobEvent("done", job, seconds=attempt.stages.total(), result=result))

    def _failed(self, lane: Lane, attempt: _Attempt[AnyJob], event: dict[str, Any]) -> None:
        kind, error = event["kind"], event["error"]
        if kind == "device":
            self.busy[lane] = None
            lane.submit("probe", None, time_limit=probe.TIME_LIMIT)
        else:
            self.idle.append(lane)
        if kind == "killed" and not attempt.killed:
            self._again(attempt, event, killed=True)
            return
        smaller = [size for size in self.work.batch_sizes(attempt.job) if size < attempt.batch_size]
        if kind == "out_of_memory" and attempt.had_company:  # the others' models were on the device too
            self._again(attempt, event, alone=lane.device)
            return
        if kind == "out_of_memory" and smaller:
            self._again(attempt, event, batch_size=smaller[0])
            return
        if kind == "killed":
            error += ", for the second time"
        self._write(attempt, {**event, "error": error, "stage": attempt.stages.last})
        self.report.failed[attempt.job.name] = error
        self.on_event(JobEvent("failed", attempt.job, text=error, seconds=attempt.stages.total()))
        if kind == "disk_full" and Path(event["path"]).is_relative_to(self.folder.path):
            raise self.folder.full()

    def _again(
        self,
        old: _Attempt[AnyJob],
        event: dict[str, Any],
        *,
        batch_size: int | None = None,
        killed: bool = False,
        alone: str | None = None,
    ) -> None:
        """Run a job once more, before all others: what is decided on it is then told in one place."""
        text, entry = event["error"], {**event, "event": "again", "stage": old.stages.last}
        if batch_size is not None:
            entry["batch_size"] = [old.batch_size, batch_size]
            text += f"; now at batch {batch_size} instead of {old.batch_size}"
        elif alone is not None:
            entry["alone"] = True
            text += "; now alone"
        self._write(old, entry)
        self.report.again[old.job.name] = text
        self.on_event(JobEvent("again", old.job, text=text, seconds=old.stages.total()))
        self.waiting.appendleft(
            _Attempt(old.job, batch_size or old.batch_size, killed=killed or old.killed, alone=alone)
        )

    def _write(self, attempt: _Attempt[AnyJob], entry: dict[str, Any]) -> None:
        spent = attempt.stages.seconds()
        for stage, seconds in spent.items():
            self.report.stages[stage] = self.report.stages.get(stage, 0.0) + seconds
        rounded = {stage: round(seconds, 2) for stage, seconds in spent.items()}
        self.folder.write({"job": attempt.job.name, "seconds": rounded, **entry})


class _Stages:
    """Where the time of a workload goes: seconds by the first word of what it says that it is doing."""

    def __init__(self) -> None:
        self._entered = [("starting", time.monotonic())]

    def enter(self, text: str) -> None:
        self._entered.append((text, time.monotonic()))

    @property
    def last(self) -> str:
        """What it said last that it is doing."""
        return self._entered[-1][0]

    def total(self) -> float:
        """Seconds since it was created."""
        return time.monotonic() - self._entered[0][1]

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        ends = [begin for _, begin in self._entered[1:]] + [time.monotonic()]
        for (text, begin), end in zip(self._entered, ends, strict=True):
            stage = text.split()[0]
            spent[stage] = spent.get(stage, 0.0) + end - begin
        return spent
