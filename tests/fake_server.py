"""The real fork server for workloads that end in every way that one can; run as a program.

``fake_server.py`` alone imports no torch and runs a function below for each job. ``fake_server.py tiny``
runs real sessions of the model in ``tiny.py`` with short measurements.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from torchtraceap.collect import server
from torchtraceap.collect.check import Check
from torchtraceap.collect.failures import Failed, Failure
from torchtraceap.collect.plan import Order
from torchtraceap.files import replacing

RESULT = {"traces": 2, "events": 20, "segments": 3, "states": [], "skipped": []}
SLOW = 60.0
Progress = Callable[[str], None]


def ok(out: Path, progress: Progress) -> None:
    out.write_bytes(b"shard")


def error(out: Path, progress: Progress) -> None:
    raise ValueError("[red]no\x1b[2J\u202e good\ud800 [/red]\nsecond line")


def nameless(out: Path, progress: Progress) -> None:
    raise RuntimeError


def leaves(out: Path, progress: Progress) -> None:
    sys.exit(3)


def abandons(out: Path, progress: Progress) -> None:
    os._exit(3)


def chatty(out: Path, progress: Progress) -> None:
    for _ in range(100):
        print("x" * 100_000)
        os.write(1, b"y" * 100_000)
    out.write_bytes(b"shard")


def meets(out: Path, progress: Progress) -> None:
    """Ends only while another such workload runs."""
    out.with_suffix(".here").touch()
    end = time.monotonic() + SLOW
    while len(list(out.parent.glob("*.here"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    out.write_bytes(b"shard")


def waits(out: Path, progress: Progress) -> None:
    progress(server.WAITING)
    time.sleep(1.5)
    progress("placing")
    out.write_bytes(b"shard")


def sleep(out: Path, progress: Progress) -> None:
    _with_worker(progress)
    time.sleep(SLOW)


def killed(out: Path, progress: Progress) -> None:
    _with_worker(progress)
    os.kill(os.getpid(), signal.SIGKILL)


def kills_server(out: Path, progress: Progress) -> None:
    _with_worker(progress)
    time.sleep(0.3)  # until the server has passed that on
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(SLOW)


def full(out: Path, progress: Progress) -> None:
    os.write(2, b"x" * (2 << 20))  # as much as fits
    with replacing(out) as temporary:
        temporary.write_bytes(b"x" * (2 << 20))


def _with_worker(progress: Progress) -> None:
    """Start a worker, as a loader does, and say which processes there are now."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(SLOW,))
    worker.start()
    progress(f"pids {os.getppid()} {os.getpid()} {worker.pid}")


def run_request(request: server.Request, progress: Progress) -> dict[str, Any]:
    """Stands for ``session.run_request``: the model's name says what happens."""
    order = msgspec.json.decode(request.arguments, type=Order)
    out = Path(order.out)
    out.parent.mkdir(exist_ok=True)
    globals()[order.job.model.split("/")[1].split(".")[0]](out, progress)
    return RESULT


def run_check(request: server.Request, progress: Progress) -> dict[str, Any]:
    """Stands for ``check.run_request``, likewise."""
    one = msgspec.json.decode(request.arguments, type=Check)
    progress("infer at batch 4")
    result = {
        "build_s": 0.5,
        "alone": False,
        "cases": [{"mode": "infer", "batch_size": 4, "step_ms": 1.5, "peak_mib": 8.0, "error": ""}],
    }
    if "half" in one.model:
        raise Failed(Failure("train at batch 4: no", result=result))
    globals()[one.model.split("/")[1]](Path(os.devnull), progress)
    return result


def main() -> None:
    if sys.argv[1:] == ["tiny"]:
        import tiny

        from torchtraceap.collect import measure, session
        from torchtraceap.collect.model import register

        server.LIBRARIES = ("torch._dynamo",)
        register(tiny.spec())
        measure.LOOKS, measure.report_pairs, session.WARMUP_STEPS = (2,), lambda decision: 2, 1
    else:
        fake = types.ModuleType("torchtraceap.collect.session")
        fake.__dict__["run_request"] = run_request
        sys.modules[fake.__name__] = fake
        fake_check = types.ModuleType("fake_check")
        fake_check.__dict__["run_request"] = run_check
        sys.modules[fake_check.__name__] = fake_check
        server.WORK["check"] = fake_check.__name__
        server.LIBRARIES = ()
    server.serve()


if __name__ == "__main__":
    main()
