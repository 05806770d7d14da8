"""Many workloads, each in a process of its own: progress, time limits, resumption, and what failed why.

A run is a folder:

    plan.json              the jobs, written once
    shards/<job>.parquet   the traces of a finished workload, renamed into place when whole; with parts beside
                           it where that would be too large (dataset/shards.py)
    log.jsonl              one line an end of a workload, appended; locked while the run goes on
    device-<n>.lock        held by the workload that has the n-th device to itself

Several lanes run workloads side by side. Each has a fork server of its own (collect/lane.py) and a device. Of
the lanes of a device one measures and profiles, while others build their models, label or write.
"""

from __future__ import annotations

import fcntl
import math
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import msgspec

from torchtraceap.collect import EVENT_CAP, SHARD_MB, TIME_LIMIT
from torchtraceap.collect.lane import Lane
from torchtraceap.collect.plan import Job, Order
from torchtraceap.collect.server import Request
from torchtraceap.errors import UserError
from torchtraceap.files import replacing


class Named(Protocol):
    """A job as the runner sees it: a structure of msgspec with a name that no other of its plan has."""

    @property
    def name(self) -> str: ...


AnyJob = TypeVar("AnyJob", bound=Named)


@dataclass(frozen=True)
class Work(Generic[AnyJob]):
    """What a run does with its jobs.

    Attributes:
        kind: A key of ``server.WORK``.
        arguments: What the process of a job is told, as a structure of msgspec.
        shard: The file that a finished job has left; without one, a job is finished that the log calls done.
    """

    kind: str
    arguments: Callable[[AnyJob], Any]
    shard: Callable[[AnyJob], Path] | None = None


class JobEvent(msgspec.Struct, frozen=True):
    """What the runner tells its caller: ``start``, ``progress``, ``done``, ``failed`` or ``skipped``.

    ``skipped`` is a job that was finished before. ``result`` is the summary of a finished job.
    """

    kind: str
    job: Any
    text: str = ""
    seconds: float = 0.0
    result: dict[str, Any] | None = None


class RunReport(msgspec.Struct):
    """How a run ended. ``failed`` maps the name of a job to one line that says why.

    ``left`` names the jobs that did not start within the budget.
    """

    done: list[str] = []
    skipped: list[str] = []
    failed: dict[str, str] = {}
    left: list[str] = []
    traces: int = 0
    seconds: float = 0.0


def shard_path(run: Path, job: Job) -> Path:
    """Where the traces of a job lie."""
    return run / "shards" / f"{job.name}.parquet"


def collect(
    plan: Sequence[Job],
    run: Path,
    *,
    devices: Sequence[str] = ("auto",),
    lanes: int = 1,
    resume: bool = False,
    event_cap: int = EVENT_CAP,
    time_limit: float = TIME_LIMIT,
    shard_mb: float = SHARD_MB,
    budget: float = math.inf,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> RunReport:
    """Collect the traces of every job of ``plan`` whose shard is missing.

    Args:
        plan: The jobs.
        event_cap, shard_mb: See ``session.run_job``.

    For the others see :func:`run_jobs`. Of a distributed workload a device is where its rank 0 runs.
    """

    def arguments(job: Job) -> Order:
        return Order(job, str(shard_path(run, job)), event_cap, shard_mb)

    return run_jobs(
        plan,
        run,
        Work("collect", arguments, partial(shard_path, run)),
        devices=devices,
        lanes=lanes,
        resume=resume,
        time_limit=time_limit,
        budget=budget,
        on_event=on_event,
    )


def run_jobs(
    jobs: Sequence[AnyJob],
    run: Path,
    work: Work[AnyJob],
    *,
    devices: Sequence[str],
    lanes: int = 1,
    resume: bool = False,
    time_limit: float = TIME_LIMIT,
    budget: float = math.inf,
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
        budget: Seconds after which no further workload starts; those that run end in peace.
        on_event: Told of every start, progress and end.

    Returns:
        What was made, and what failed why. An interrupt (Ctrl-C) stops the workloads that run and raises
        KeyboardInterrupt; finished ones stay.

    Raises:
        UserError: ``run`` holds something else, or an earlier run and ``resume`` is not given.
    """

    report = RunReport()
    begin = time.monotonic()
    with _claimed(run, jobs, resume) as log, ExitStack() as opened:
        if work.shard is None:
            finished = {name for name, ended in read_log(run).items() if ended["event"] == "done"}
        else:
            finished = {job.name for job in jobs if work.shard(job).exists()}
        waiting: deque[AnyJob] = deque()
        for job in jobs:
            if job.name in finished:
                report.skipped.append(job.name)
                on_event(JobEvent("skipped", job))
            else:
                waiting.append(job)
        # One lane of each device before the second of any: few workloads then meet at no gate.
        places = [(device, n) for _ in range(lanes) for n, device in enumerate(devices)][: len(waiting)]
        idle = deque(
            opened.enter_context(
                Lane(run / "stderr.log", device, str(run / f"device-{n}.lock") if lanes > 1 else "")
            )
            for device, n in places
        )
        busy: dict[Lane, tuple[AnyJob, _Stages]] = {}
        while waiting or busy:
            if time.monotonic() - begin > budget:
                report.left += [job.name for job in waiting]
                waiting.clear()
                if not busy:
                    break
            while waiting and idle:
                job, lane = waiting.popleft(), idle.popleft()
                stages = _Stages()
                busy[lane] = job, stages
                on_event(JobEvent("start", job))
                arguments = msgspec.Raw(msgspec.json.encode(work.arguments(job)))
                if lane.submit(Request(work.kind, arguments, lane.device, time_limit, lane.gate)):
                    stages.enter("importing the model libraries")
                    on_event(JobEvent("progress", job, "importing the model libraries"))
            for lane in select.select(list(busy), [], [])[0]:
                job, stages = busy[lane]
                for event in lane.events():
                    if event["event"] == "progress":
                        stages.enter(event["text"])
                        on_event(JobEvent("progress", job, event["text"]))
                    else:
                        del busy[lane]
                        idle.append(lane)
                        _record(report, job, event, stages, log, on_event)
    report.seconds = time.monotonic() - begin
    return report


def read_log(run: Path) -> dict[str, dict[str, Any]]:
    """The last line of each job in ``log.jsonl``, by name.

    A line that is no whole one is passed over: the disk was full, or the machine went down.
    """
    ends: dict[str, dict[str, Any]] = {}
    for line in (run / "log.jsonl").read_bytes().splitlines():
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            entry = msgspec.json.decode(line)
            ends[entry["job"]] = entry
    return ends


@contextmanager
def _claimed(run: Path, plan: Sequence[Named], resume: bool) -> Iterator[IO[bytes]]:
    """Make ``run`` the folder of ``plan``, ours alone while the block runs, and yield its log."""
    names = Counter(job.name for job in plan)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"two workloads of the plan would be written as {twice[0]}.parquet")
    log_path = run / "log.jsonl"
    foreign = run.exists() and (not run.is_dir() or any(path != log_path for path in run.iterdir()))
    if foreign and not (run / "plan.json").exists():
        raise UserError(f"{run} exists and is no run: choose another folder")
    run.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes when this process does, however it ends
        except BlockingIOError:
            raise UserError(f"{run} is in use: another process collects into it") from None
        _write_or_match(run, plan, resume)
        yield log


def _write_or_match(run: Path, plan: Sequence[Named], resume: bool) -> None:
    path = run / "plan.json"
    encoded = msgspec.json.format(msgspec.json.encode(list(plan)))
    if path.exists():
        if not resume:
            raise UserError(f"{run} holds a run already: add --resume to finish it, or choose another folder")
        if path.read_bytes() != encoded:
            raise UserError(
                f"{run} holds a run of another plan: repeat its options, or choose another folder"
            )
        for torn in (run / "shards").glob(".*.tmp"):  # of a workload that was killed while it wrote
            torn.unlink()
    else:
        with replacing(path) as temporary:
            temporary.write_bytes(encoded)


def _record(
    report: RunReport,
    job: Named,
    final: dict[str, Any],
    stages: _Stages,
    log: IO[bytes],
    on_event: Callable[[JobEvent], None],
) -> None:
    by_stage = stages.seconds()
    seconds = sum(by_stage.values())
    if final["event"] == "done":
        result = final["result"]
        report.done.append(job.name)
        report.traces += result.get("traces", 0)
        on_event(JobEvent("done", job, seconds=seconds, result=result))
    else:
        report.failed[job.name] = final["error"]
        final = {"stage": stages.last, **final}
        on_event(JobEvent("failed", job, text=final["error"], seconds=seconds))
    rounded = {stage: round(spent, 2) for stage, spent in by_stage.items()}
    line = msgspec.json.encode({"job": job.name, "seconds": rounded, **final}) + b"\n"
    try:
        log.write(line)
    except OSError as error:
        raise UserError(f"{log.name} cannot be written: {error.strerror}") from error


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

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        ends = [begin for _, begin in self._entered[1:]] + [time.monotonic()]
        for (text, begin), end in zip(self._entered, ends, strict=True):
            stage = text.split()[0]
            spent[stage] = spent.get(stage, 0.0) + end - begin
        return spent
