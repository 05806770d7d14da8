"""The fork server: imports torch and the model libraries once, and forks a child for each workload.

It speaks JSON lines: jobs on standard input, one at a time; events on standard output. It must only import.
A process that has run an operator, asked the driver or started a thread before it forks leaves children that
hang in their first backward pass, so everything with threads (progress, Ray) lives in the parent of this
process. When standard input closes, because the runner ended or was killed, the server kills its child and
ends.

    <- {"work": "collect", "arguments": {...}, "device": "cuda:0", "time_limit": 600.0,
        "scratch": "/tmp/traceap-x", "gate": "run/device-0.lock", "memory_limit": 64000000000,
        "cores": {"timed": [0, 1, 2, 3], "others": [4, 5, 6, 7]}}
    -> {"event": "progress", "text": "measuring host_sync/item"}
    -> {"event": "done", "result": {...}}
       or   {"event": "failed", "error": "one line", "kind": "out_of_memory"}  (collect/failures.py)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchtraceap.collect.cores import Cores
from torchtraceap.collect.failures import Failed, Failure, Kind, describe
from torchtraceap.collect.processes import die_with, memory_of_session
from torchtraceap.errors import UserError

LIBRARIES = (
    "torchtraceap.collect.session", "torch._dynamo", "torchvision", "timm", "transformers", "diffusers",
    "segmentation_models_pytorch",
)  # fmt: skip
"""What every child would else import anew: our own session, with the profiler and scipy, is 1.4 s of it."""

WORK = {
    "collect": "torchtraceap.collect.session",
    "check": "torchtraceap.collect.check",
    "probe": "torchtraceap.collect.probe",
}
"""Kinds of workloads: the module whose ``run_request(request, progress)`` returns the result as JSON."""

POLL_SECONDS = 0.5
LOG_BYTES = 1 << 20
"""What is kept of all that a workload prints: the beginning and the end."""

WAITING = "waiting for the device"
"""What a workload says when it waits for others to be done with the device."""

_CHUNK = 1 << 16


class Request(msgspec.Struct, frozen=True):
    """One workload for the server: a kind of :data:`WORK`, what that takes, and what is alike for all.

    Attributes:
        work: A key of :data:`WORK`.
        arguments: What its process is told.
        device: Where it runs.
        time_limit: Seconds that it may take, waiting for the device not included.
        scratch: A folder of its own for temporary files, which the server removes.
        gate: A lock file of the device if others use it too, else empty.
        memory_limit: Bytes that its processes may have together; 0: no limit.
        cores: Which it has while it has the device alone, and which else; None: all, all the time.
    """

    work: str
    arguments: msgspec.Raw
    device: str
    time_limit: float
    scratch: str
    gate: str = ""
    memory_limit: int = 0
    cores: Cores | None = None


def serve() -> None:
    """Answer requests until standard input closes."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a model prints must not mix with the protocol
    _import_all()
    # Nothing that was imported is ever garbage. Going through it cost each collection in a child half a
    # second, and a copy of the pages that it shares with this process.
    gc.freeze()
    lines = Lines(0)
    while (line := lines.next()) is not None:
        _run_one(msgspec.json.decode(line, type=Request), events, lines)


def _import_all() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Libraries ask at import whether there is a GPU. Through the CUDA runtime that would forbid its use in
    # forked children; through NVML it does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    for name in LIBRARIES:
        # A missing or broken library fails the models that need it, with its own message, and no others.
        with contextlib.suppress(ImportError, RuntimeError):
            importlib.import_module(name)


def _run_one(request: Request, events: Any, requests: Lines) -> None:
    read, write = os.pipe()
    server = os.getpid()
    with _removed(request.scratch), Printed(Path(request.scratch)) as printed:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            events.close()  # or the runner would not see the end of a server that was killed
            _child(request, write, server, printed.fd)
        os.close(write)
        try:
            final = _follow(request, pid, Lines(read), events, requests, printed)
        finally:
            _kill(pid)  # loader workers too; a finished child has nothing left to lose
            _, status = os.waitpid(pid, 0)
            os.close(read)
    events.write((final or _death(status)) + b"\n")


@contextlib.contextmanager
def _removed(folder: str) -> Iterator[None]:
    """Remove a folder after the block, whatever a workload that was killed has left there."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(
    request: Request, pid: int, child: Lines, events: Any, requests: Lines, printed: Printed
) -> bytes:
    """Pass on the child's progress and return its last event; empty if it died without one.

    The time for which the child waits for its turn on the device does not count.

    Raises:
        SystemExit: Standard input closed.
    """
    deadline = time.monotonic() + request.time_limit
    waiting_since: float | None = None
    next_look = time.monotonic()
    while (left := deadline - (waiting_since or time.monotonic())) > 0:
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + POLL_SECONDS
            printed.bound()
            if 0 < request.memory_limit < memory_of_session(pid, more_than=request.memory_limit):
                gib = request.memory_limit / 2**30
                return _failed(f"memory limit of {gib:.3g} GiB reached", "memory_limit")
        # A child that was killed does not close the pipe while its loader workers hold it too.
        ended = _has_ended(pid)
        ready, _, _ = select.select([child.fd, 0], [], [], 0 if ended else min(left, POLL_SECONDS))
        if 0 in ready and requests.closed():
            raise SystemExit(1)
        if child.fd in ready:
            for line in child.available():
                if b'"event":"progress"' not in line[:24]:
                    return line
                if waiting_since is not None:
                    deadline += time.monotonic() - waiting_since
                waiting_since = time.monotonic() if WAITING.encode() in line else None
                events.write(line + b"\n")
            if child.at_end:
                return b""
        elif ended:
            return b""
    return _failed(f"time limit of {request.time_limit:g} s reached", "time_limit")


def _has_ended(pid: int) -> bool:
    """Whether the child has ended, which leaves it to be waited for; False where the system cannot say."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _child(request: Request, write: int, server: int, printed: int) -> None:
    """Run the workload and report its end; never returns."""
    os.setsid()  # so that a time-out reaches its loader workers too
    die_with(server)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    for fd in (1, 2):
        os.dup2(printed, fd)
    os.environ["TMPDIR"] = tempfile.tempdir = request.scratch

    def progress(text: str) -> None:
        os.write(write, msgspec.json.encode({"event": "progress", "text": text}) + b"\n")

    try:
        try:
            run = importlib.import_module(WORK[request.work]).run_request
            last = msgspec.json.encode({"event": "done", "result": run(request, progress)})
        except BaseException as error:
            if not isinstance(error, UserError | Failed):
                with contextlib.suppress(OSError):  # the disk may be full
                    traceback.print_exc()  # to the log; the event is one line
            last = msgspec.json.encode({"event": "failed", **msgspec.to_builtins(describe(error))})
        with contextlib.suppress(OSError, ValueError):  # ValueError: the model closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(write, last + b"\n")  # upon which the server kills us
    finally:
        os._exit(0)


def _death(status: int) -> bytes:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        return _failed(f"killed by {signal.Signals(number).name}{hint}", "killed")
    return _failed(f"ended without a word (exit status {os.waitstatus_to_exitcode(status)})", "error")


def _failed(error: str, kind: Kind) -> bytes:
    return msgspec.json.encode({"event": "failed", **msgspec.to_builtins(Failure(error, kind))})


class Printed:
    """What a workload prints: a file of its own, of which at last beginning and end go to standard error."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "printed.log"

    def __enter__(self) -> Printed:
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the disk may be full
            self.bound(LOG_BYTES)
            os.lseek(self.fd, 0, os.SEEK_SET)
            while chunk := os.read(self.fd, _CHUNK):
                os.write(2, chunk)
        os.close(self.fd)

    def bound(self, limit: int = 16 * LOG_BYTES) -> None:
        """Take out the middle if there is more than ``limit``."""
        size = os.fstat(self.fd).st_size
        if size > limit:
            tail = os.pread(self.fd, LOG_BYTES // 2, size - LOG_BYTES // 2)
            os.ftruncate(self.fd, LOG_BYTES // 2)
            os.write(self.fd, b"\n[... %d bytes left out ...]\n" % (size - LOG_BYTES) + tail)


def _kill(pid: int) -> None:
    """Kill the child's whole session, or the child alone if it has not made one yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


class Lines:
    """Lines of a file descriptor, without a buffer that select() cannot see."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""
        self._lines: list[bytes] = []
        self.at_end = False

    def available(self) -> list[bytes]:
        """The lines that one read brings; call when the descriptor is readable."""
        chunk = os.read(self.fd, _CHUNK)
        self.at_end = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines

    def closed(self) -> bool:
        """Read what is there, keep it for :meth:`next`, and say whether that was the end."""
        self._lines += self.available()
        return self.at_end

    def next(self) -> bytes | None:
        """Wait for the next line; None at the end."""
        while not self._lines:
            if self.at_end:
                return None
            self._lines += self.available()
        return self._lines.pop(0)


if __name__ == "__main__":
    serve()
