"""A fork server and the one workload that it runs, seen from the runner: no call here waits, but the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from torchtraceap.collect.cores import Cores
from torchtraceap.collect.server import Lines, Request

SERVER = (sys.executable, "-P", "-m", "torchtraceap.collect.server")
STOP_SECONDS = 10


class Lane:
    """A fork server as a child process; started when it is needed, and anew if it died.

    Attributes:
        device: What its workloads run on.
        gate: Lock file of that device, where other lanes use it too; else empty.
    """

    def __init__(self, stderr: Path, device: str, gate: str = "") -> None:
        self._stderr = stderr
        self.device = device
        self.gate = gate
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def submit(
        self,
        work: str,
        arguments: Any,
        *,
        time_limit: float,
        memory_limit: int = 0,
        cores: Cores | None = None,
    ) -> bool:
        """Start a workload; the one before must have ended. Whether a server had to be started for it.

        See :class:`Request` for the arguments.
        """
        if fresh := self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = self._start()
            assert self._process.stdout is not None
            self._lines = Lines(self._process.stdout.fileno())
        assert self._process is not None
        assert self._process.stdin is not None
        self._scratch = tempfile.mkdtemp(prefix="traceap-")
        request = Request(
            work=work,
            arguments=msgspec.Raw(msgspec.json.encode(arguments)),
            device=self.device,
            time_limit=time_limit,
            scratch=self._scratch,
            gate=self.gate,
            memory_limit=memory_limit,
            cores=cores,
        )
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        return fresh

    def fileno(self) -> int:
        """For ``select``: readable when there are events."""
        return self._lines.fd

    def events(self) -> list[dict[str, Any]]:
        """What the workload said since; the last event of a workload is ``done`` or ``failed``."""
        told = [msgspec.json.decode(line) for line in self._lines.available()]
        if self._lines.at_end:
            assert self._process is not None
            status = self._process.wait()
            error = f"the fork server died (exit status {status}); see {self._stderr}"
            told.append({"event": "failed", "error": error, "kind": "killed"})
        return told

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
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        if self._scratch:  # the server removes it, if it can
            shutil.rmtree(self._scratch, ignore_errors=True)
