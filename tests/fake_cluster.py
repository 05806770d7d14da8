"""What tasks of tests/test_cluster.py run on their nodes: real ones, with the fake fork server.

Run as a program, it is that server, with workloads that write shards, and some that meet with an accident.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchtraceap.collect import cluster, lane

MARKS = "TRACEAP_TEST_MARKS"
"""Variable of the environment: a folder in which workloads leave word to the test and to each other."""

SLOW = 120.0
TRACES = 2


def work(task: cluster.Task) -> cluster.Outcome:
    lane.SERVER = (sys.executable, __file__)
    return cluster.work(task)


def lacks(task: cluster.Task) -> cluster.Outcome:
    raise ModuleNotFoundError("No module named 'timm'")


def square(number: int) -> int:
    return number * number


def leave_mark(name: str) -> bool:
    """Whether it was not there yet."""
    mark = Path(os.environ[MARKS]) / name
    fresh = not mark.exists()
    mark.write_text(str(os.getppid()))
    return fresh


def traced(out: Path, progress: Callable[[str], None]) -> None:
    """Writes a shard of two files, named after the server that it ran in."""
    from traces import random_record

    from torchtraceap.dataset.shards import write_shard

    leave_mark(f"server-{os.getppid()}-{out.stem}")
    seed = int(out.stem.split(".")[1].split("_")[0])
    records = [random_record(10 * seed + index) for index in range(TRACES)]
    assert write_shard(out, records, '{"hardware": {}, "instances": []}', limit=1) == TRACES


def lingers(out: Path, progress: Callable[[str], None]) -> None:
    """Does not end until it may."""
    leave_mark(f"here-{out.stem}")
    end = time.monotonic() + SLOW
    while not (Path(os.environ[MARKS]) / "go").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    traced(out, progress)


def strikes(out: Path, progress: Callable[[str], None]) -> None:
    """Kills the process of its task the first time."""
    import psutil

    if leave_mark(f"struck-{out.stem}"):
        psutil.Process(os.getppid()).parent().send_signal(signal.SIGKILL)
        time.sleep(SLOW)
    traced(out, progress)


def torn(out: Path, progress: Callable[[str], None]) -> None:
    """Writes what is no shard."""
    out.write_bytes(b"PAR1 half a file")


if __name__ == "__main__":
    import fake_server

    for workload in (traced, lingers, strikes, torn):
        setattr(fake_server, workload.__name__, workload)
    fake_server.main()
