"""The real fork server for workloads that end in every way that one can; run as a program.

``fake_server.py`` alone imports no torch and runs a function below for each job. ``fake_server.py tiny``
runs real sessions of the model in ``tiny.py`` with short measurements.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
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
ORDERS: list[Order] = []
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


def speaks(out: Path, progress: Progress) -> None:
    print(f"last words of {out.stem}")
    out.write_bytes(b"shard")


def introduces(out: Path, progress: Progress) -> None:
    progress(f"pids {os.getppid()} {os.getpid()}")
    out.write_bytes(b"shard")


def meets(out: Path, progress: Progress) -> None:
    """Ends only while another such workload runs."""
    out.with_suffix(".here").touch()
    _wait_for_two(out.parent, "*.here")
    out.write_bytes(b"shard")


def outlasts(out: Path, progress: Progress) -> None:
    """Ends when two of ``fits_alone`` have."""
    _wait_for_two(out.parent, "*fits_alone*.parquet")
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


def killed_once(out: Path, progress: Progress) -> None:
    mark = out.with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    mark.unlink()
    out.write_bytes(b"shard")


def fits(out: Path, progress: Progress) -> None:
    """Fits the device at a batch of 2 and below."""
    if ORDERS[-1].job.batch_size > 2:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    out.write_bytes(b"shard")


def fits_alone(out: Path, progress: Progress) -> None:
    """Fits while no other such workload has the device."""
    here = out.with_suffix(".here")
    here.touch()
    time.sleep(0.5)
    others = set(out.parent.glob("*.here")) - {here}
    time.sleep(0.2)
    here.unlink()
    if others:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    out.write_bytes(b"shard")


def broken(out: Path, progress: Progress) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")


def greedy(out: Path, progress: Progress) -> None:
    """Shares a page with each of its workers, and takes much of its own."""
    taken = [b"x" * (1 << 20)]
    _with_worker(progress)
    while True:
        taken.append(os.urandom(1 << 20))
        time.sleep(0.002)


def litters(out: Path, progress: Progress) -> None:
    progress(f"folder {tempfile.mkdtemp()}")
    out.write_bytes(b"shard")


def litters_and_dies(out: Path, progress: Progress) -> None:
    progress(f"folder {tempfile.mkdtemp()}")
    os.kill(os.getpid(), signal.SIGKILL)


def kills_server(out: Path, progress: Progress) -> None:
    _with_worker(progress)
    time.sleep(0.3)  # until the server has passed that on
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(SLOW)


def slowly(out: Path, progress: Progress) -> None:
    """Writes its name many times, with pauses; has a worker and a temporary folder."""
    _with_worker(progress)
    tempfile.mkdtemp()
    pauses = random.Random(out.name)
    with replacing(out) as temporary, temporary.open("wb") as file:
        for _ in range(4):
            file.write(out.name.encode() * 1000)
            file.flush()
            time.sleep(pauses.uniform(0.01, 0.04))


def full(out: Path, progress: Progress) -> None:
    os.write(2, b"x" * (2 << 20))  # as much as fits
    with replacing(out) as temporary:
        temporary.write_bytes(b"x" * (2 << 20))


def _wait_for_two(folder: Path, pattern: str) -> None:
    end = time.monotonic() + SLOW
    while len(list(folder.glob(pattern))) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)


def _with_worker(progress: Progress) -> None:
    """Start a worker, as a loader does, and say which processes there are now."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(SLOW,))
    worker.start()
    progress(f"pids {os.getppid()} {os.getpid()} {worker.pid}")


def run_request(request: server.Request, progress: Progress) -> dict[str, Any]:
    """Stands for ``session.run_request``: the model's name says what happens."""
    order = msgspec.json.decode(request.arguments, type=Order)
    ORDERS.append(order)
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


def run_probe(request: server.Request, progress: Progress) -> dict[str, Any]:
    """Stands for ``probe.run_request``: one device is gone."""
    if request.device == "gone:0":
        raise RuntimeError("No CUDA GPUs are available")
    return {}


def main() -> None:
    if sys.argv[1:] == ["tiny"]:
        import tiny

        from torchtraceap.collect import measure, session
        from torchtraceap.collect.model import register

        server.LIBRARIES = ("torch._dynamo",)
        register(tiny.spec())
        measure.LOOKS, measure.report_pairs, session.WARMUP_STEPS = (2,), lambda decision: 2, 1
    else:
        for kind, function in (("collect", run_request), ("check", run_check), ("probe", run_probe)):
            fake = types.ModuleType(f"fake_{kind}")
            fake.__dict__["run_request"] = function
            sys.modules[fake.__name__] = fake
            server.WORK[kind] = fake.__name__
        server.LIBRARIES = ()
    server.serve()


if __name__ == "__main__":
    main()
