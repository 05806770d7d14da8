"""Many workloads, each in a process of its own: progress, time limits, resumption, and what failed why.

A run is a folder:

    plan.json              the jobs, written once
    shards/<job>.parquet   the traces of a finished workload, renamed into place when whole
    log.jsonl              one line an end of a workload, appended; locked while the run goes on
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from torchtraceap.collect import EVENT_CAP, TIME_LIMIT
from torchtraceap.collect.plan import Job
from torchtraceap.collect.server import Request
from torchtraceap.errors import UserError
from torchtraceap.files import replacing

SERVER = (sys.executable, "-P", "-m", "torchtraceap.collect.server")


class JobEvent(msgspec.Struct, frozen=True):
    """What the runner tells its caller: ``start``, ``progress``, ``done``, ``failed`` or ``skipped``.

    ``skipped`` is a job whose shard is there already. ``result`` is the summary of a finished job.
    """

    kind: str
    job: Job
    text: str = ""
    seconds: float = 0.0
    result: dict[str, Any] | None = None


class RunReport(msgspec.Struct):
    """How a run ended. ``failed`` maps the name of a job to one line that says why."""

    done: list[str] = []
    skipped: list[str] = []
    failed: dict[str, str] = {}
    traces: int = 0
    seconds: float = 0.0


def shard_path(run: Path, job: Job) -> Path:
    """Where the traces of a job lie."""
    return run / "shards" / f"{job.name}.parquet"


def collect(
    plan: Sequence[Job],
    run: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    event_cap: int = EVENT_CAP,
    time_limit: float = TIME_LIMIT,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> RunReport:
    """Run every job of ``plan`` whose shard is missing, going on past failures.

    Args:
        plan: The jobs; their names must be unique.
        run: Folder to write to.
        device: Where the workloads run.
        resume: Allow ``run`` to hold an earlier run of the same plan.
        event_cap: See ``session.run_job``.
        time_limit: Seconds that a workload may take, building and measuring included.
        on_event: Told of every start, progress and end.

    Returns:
        What was made, and what failed why. An interrupt (Ctrl-C) stops the current workload and raises
        KeyboardInterrupt; finished shards stay.

    Raises:
        UserError: ``run`` holds something else, or an earlier run and ``resume`` is not given.
    """

    def progressed(job: Job, stages: _Stages, text: str) -> None:
        stages.enter(text)
        on_event(JobEvent("progress", job, text))

    report = RunReport()
    begin = time.monotonic()
    with _claimed(run, plan, resume) as log, _Server(run / "stderr.log") as server:
        todo = []
        for job in plan:
            if shard_path(run, job).exists():
                report.skipped.append(job.name)
                on_event(JobEvent("skipped", job))
            else:
                todo.append(job)
        for job in todo:
            stages = _Stages()
            on_event(JobEvent("start", job))
            request = Request(job, str(shard_path(run, job)), device, event_cap, time_limit)
            final = server.run(request, partial(progressed, job, stages))
            _record(report, job, final, stages.seconds(), log, on_event)
    report.seconds = time.monotonic() - begin
    return report


@contextmanager
def _claimed(run: Path, plan: Sequence[Job], resume: bool) -> Iterator[IO[bytes]]:
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


def _write_or_match(run: Path, plan: Sequence[Job], resume: bool) -> None:
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
        return
    (run / "shards").mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(encoded)


def _record(
    report: RunReport,
    job: Job,
    final: dict[str, Any],
    stages: dict[str, float],
    log: IO[bytes],
    on_event: Callable[[JobEvent], None],
) -> None:
    seconds = sum(stages.values())
    if final["event"] == "done":
        result = final["result"]
        report.done.append(job.name)
        report.traces += result["traces"]
        on_event(JobEvent("done", job, seconds=seconds, result=result))
    else:
        report.failed[job.name] = final["error"]
        on_event(JobEvent("failed", job, text=final["error"], seconds=seconds))
    rounded = {stage: round(spent, 2) for stage, spent in stages.items()}
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
        self._entered.append((text.split()[0], time.monotonic()))

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        ends = [begin for _, begin in self._entered[1:]] + [time.monotonic()]
        for (stage, begin), end in zip(self._entered, ends, strict=True):
            spent[stage] = spent.get(stage, 0.0) + end - begin
        return spent


class _Server:
    """The fork server as a child process; started anew if it dies."""

    def __init__(self, stderr: Path) -> None:
        self._stderr = stderr
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, request: Request, on_progress: Callable[[str], None]) -> dict[str, Any]:
        """Run one workload and return its last event."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            on_progress("importing the model libraries")
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            event = msgspec.json.decode(line)
            if event["event"] == "progress":
                on_progress(event["text"])
            elif event["event"] in ("done", "failed"):
                return event
        status = self._process.wait()
        return {
            "event": "failed",
            "error": f"the fork server died (exit status {status}); see {self._stderr}",
        }

    def _start(self) -> subprocess.Popen[bytes]:
        # OpenMP's threads spin while they wait for each other. Where loader workers or other programs want
        # the cores too, that made a CPU step ten times as long, and its time mean nothing.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        # A session of its own: Ctrl-C reaches the runner alone, which then ends the server in order.
        with self._stderr.open("ab") as stderr:
            return subprocess.Popen(
                SERVER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env=environment,
            )

    def _stop(self) -> None:
        """Close the server's input, on which it kills its child and ends."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
