"""A runner that is killed again and again makes in the end what an undisturbed one does, and no mess."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
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
LATEST = 1.2
"""Seconds after which a runner is killed at the latest; its first workload starts after about half of it."""
SECONDS = 20.0


def shards(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "shards").iterdir()}


def start(run: Path) -> int:
    """A runner in a process of its own, forked so that it need not import anything; its id."""
    if pid := os.fork():
        return pid
    try:
        collect(PLAN, run, lanes=2, resume=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def strays(mark: str) -> list[psutil.Process]:
    """Processes that a fork server was or came from which had ``mark`` in its environment."""
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
    monkeypatch.setattr(lane, "SERVER", (sys.executable, FAKE_SERVER))
    monkeypatch.setenv("TRACEAP_TEST", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    assert len(collect(PLAN, undisturbed, lanes=4).done) == len(PLAN)

    moments = random.Random(4)
    grown = [0]
    for _ in range(KILLS):
        pid = start(run)
        time.sleep(moments.uniform(0, LATEST))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed, or was refused the folder"
        grown.append(len(list((run / "shards").glob("*.parquet"))) if (run / "shards").exists() else 0)
    assert len(set(grown)) > KILLS / 4, f"kills did not meet it at work: {grown}"

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
    assert list((tmp_path / "temporary").iterdir()) == []
