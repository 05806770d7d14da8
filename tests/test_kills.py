"""A runner that is killed again and again makes in the end what an undisturbed one does, and no mess."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from torchtraceap.collect import lane
from torchtraceap.collect.plan import Job
from torchtraceap.collect.runner import collect

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
PLAN = [Job(f"fake/slowly.{number}", "train", 2, 0, [], []) for number in range(40)]
KILLS = 20
SECONDS = 20.0

KILLER = """
import os, signal, sys, time, traceback
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_kills
test_kills.lane.SERVER = (sys.executable, test_kills.FAKE_SERVER)
def tell_of(event, fd):
    if event.kind != "skipped":
        try:
            os.write(fd, b".")
        except BrokenPipeError:
            pass
for line in sys.stdin:
    events, seconds = line.split()
    told, tell = os.pipe()
    pid = os.fork()  # a runner that has imported all it needs
    if pid == 0:
        try:
            test_kills.collect(
                test_kills.PLAN, Path(sys.argv[2]), lanes=2, resume=True, on_event=lambda e: tell_of(e, tell)
            )
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(tell)
    for _ in range(int(events)):
        os.read(told, 1)
    os.close(told)
    time.sleep(float(seconds))
    os.kill(pid, signal.SIGKILL)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
"""Runs it once for each line of its input, kills it so many events and seconds later, and prints its end."""


def shards(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "shards").iterdir()}


def strays(mark: str) -> list[psutil.Process]:
    """Processes that have ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRACEAP_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs the environment of other processes")
def test_twenty_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, run, undisturbed = (tmp_path / name for name in ("temporary", "run", "undisturbed"))
    temporary.mkdir()
    monkeypatch.setattr(lane, "SERVER", (sys.executable, FAKE_SERVER))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert len(collect(PLAN, undisturbed, lanes=4).done) == len(PLAN)

    moments = random.Random(4)
    grown = [0]
    environment = {**os.environ, "TRACEAP_TEST": str(tmp_path), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", KILLER, str(Path(__file__).parent), str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(KILLS):
            # Counted in events, of which a workload has three, as a busy machine takes long for any.
            print(moments.randrange(12), moments.uniform(0, 0.1), file=killer.stdin, flush=True)
            status = int(killer.stdout.readline())
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, (
                "it failed, or was refused the folder"
            )
            grown.append(len(list(run.glob("shards/*.parquet"))))
        killer.stdin.close()
    assert len({made for made in grown if 0 < made < len(PLAN)}) > 2, (
        f"kills did not meet it at work: {grown}"
    )

    report = collect(PLAN, run, lanes=2, resume=True)
    assert report.failed == {}
    assert shards(run) == shards(undisturbed)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} == {"done"}
    assert max(Counter(line["job"] for line in lines).values()) == 1

    end = time.monotonic() + SECONDS
    while found := strays(str(tmp_path)):
        assert time.monotonic() < end, f"still there: {found}"
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []
