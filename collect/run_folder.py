"""The folder of a run of many workloads: its plan, its log, and who may write to it.

    plan.json              the jobs, written once
    shards/<job>.parquet   the traces of a finished workload, renamed into place when whole; with parts beside
                           it where that would be too large (dataset/shards.py)
    log.jsonl              one line an end of a workload or a decision to run it again, appended; locked while
                           the run goes on
    stderr.log             what workloads printed, and why they failed
    device-<n>.lock        held by the workload that has the n-th device to itself
    device-<n>.wanted      held while one waits for that (collect/processes.py)

A run on a cluster has one too, without the last three, which its nodes keep for themselves.
"""

from __future__ import annotations

import errno
import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from torchtraceap.errors import UserError
from torchtraceap.files import replacing


class Named(Protocol):
    """A job as its folder sees it: a structure of msgspec with a name that no other of its plan has."""

    @property
    def name(self) -> str: ...


class RunFolder:
    """A folder that is ours alone; see :func:`claimed`."""

    def __init__(self, path: Path, log: IO[bytes]) -> None:
        self.path = path
        self._log = log

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log, with the time of now.

        Raises:
            UserError: It cannot be written, as the disk is full, say.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = msgspec.json.encode({"at": now, **entry}) + b"\n"
        try:
            while line:  # a disk with little room left takes a part, and says why only when asked again
                line = line[self._log.write(line) :]
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self.full() from error
            raise UserError(f"{self._log.name} cannot be written: {error.strerror}") from error

    def full(self) -> UserError:
        """What to raise when the disk is full."""
        return UserError(
            f"{self.path}: the disk is full; what is finished is kept: make room and go on with --resume"
        )

    def remove_torn(self) -> None:
        """Remove what workloads that were killed while they wrote have left; none may be at work."""
        for torn in (*self.path.glob(".plan.json.*.tmp"), *(self.path / "shards").glob(".*.tmp")):
            torn.unlink(missing_ok=True)


@contextmanager
def claimed(path: Path, plan: Sequence[Named], resume: bool) -> Iterator[RunFolder]:
    """Make ``path`` the folder of ``plan``, ours alone while the block runs.

    Raises:
        UserError: Two jobs have one name; the folder holds something else, another plan, or this one and
            ``resume`` is not given; or somebody else works in it.
    """
    names = Counter(job.name for job in plan)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(f"two workloads of the plan would be written as {twice[0]}.parquet")
    log_path = path / "log.jsonl"
    # Before there is a plan there is a log, and what a runner that was killed has left of a plan.
    ours = ("log.jsonl", ".plan.json.")
    foreign = path.exists() and (
        not path.is_dir() or any(not found.name.startswith(ours) for found in path.iterdir())
    )
    if foreign and not (path / "plan.json").exists():
        raise UserError(f"{path} exists and is no run: choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes when this process does, however it ends
        except BlockingIOError:
            raise UserError(f"{path} is in use: another process works in it") from None
        _write_or_match(path, plan, resume)
        if log.tell() and not log_path.read_bytes().endswith(b"\n"):  # the disk was full
            log.write(b"\n")
        yield RunFolder(path, log)


def _write_or_match(run: Path, plan: Sequence[Named], resume: bool) -> None:
    path = run / "plan.json"
    encoded = msgspec.json.format(msgspec.json.encode(list(plan)))
    if path.exists():
        if not resume:
            raise UserError(f"{run} holds a run already: add --resume to finish it, or choose another folder")
        if path.read_bytes() != encoded:
            raise UserError(
                f"{run} holds a run of another plan: repeat its options, choose another folder, or remove it"
            )
    else:
        with replacing(path) as temporary:
            temporary.write_bytes(encoded)


def shard_path(run: Path, job: Named) -> Path:
    """Where the traces of a job lie."""
    return run / "shards" / f"{job.name}.parquet"


class LogLine(msgspec.Struct, frozen=True):
    """What is read again of a line of the log; ``batch_size`` is the one before and the one from then on."""

    job: str
    event: str
    error: str = ""
    stage: str = ""
    result: dict[str, Any] | None = None
    batch_size: tuple[int, int] | None = None


def read_log(run: Path) -> dict[str, LogLine]:
    """How each job ended last, by name."""
    return {line.job: line for line in log_lines(run) if line.event in ("done", "failed")}


def log_lines(run: Path) -> Iterator[LogLine]:
    """The lines of the log. One that is no whole one of ours is passed over: the disk was full, say."""
    for line in (run / "log.jsonl").read_bytes().splitlines():
        with suppress(msgspec.DecodeError, RecursionError):
            yield msgspec.json.decode(line, type=LogLine)
