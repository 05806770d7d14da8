"""How runs are shown: what is counted and said, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from torchtraceap import console
from torchtraceap.collect.plan import Job
from torchtraceap.collect.runner import JobEvent, RunReport
from torchtraceap.commands._runs import Tally, following, print_run

JOBS = [Job(f"a/{n}", "train", 2, 0, [], []) for n in range(6)]
RESULT = {"traces": 3, "states": ["host_sync/item: costly"]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tally_says_what_is_over_and_how_long_the_rest_takes() -> None:
    clock = Clock()
    tally = Tally(len(JOBS), clock)
    assert tally.line() == "0 done, 0 failed, 6 left"
    assert tally.take(JobEvent("skipped", JOBS[0])) == ""
    assert tally.take(JobEvent("start", JOBS[1])) == ""
    clock.now = 60.0
    assert tally.take(JobEvent("done", JOBS[1], seconds=60.0, result=RESULT)) == (
        "[2/6] a-1_train_b2: 3 traces, 60 s; host_sync/item: costly"
    )
    tally.take(JobEvent("start", JOBS[2]))
    assert tally.take(JobEvent("again", JOBS[2], text="killed", seconds=3.0)) == (
        "a-2_train_b2: once more after 3 s: killed"
    )
    clock.now = 120.0
    tally.take(JobEvent("start", JOBS[2]))
    assert tally.take(JobEvent("failed", JOBS[2], text="no", seconds=9.0)) == (
        "[3/6] a-2_train_b2: failed after 9 s: no"
    )
    assert tally.line() == ("1 done, 1 there before, 1 failed, 3 left, 1.5 traces a minute, 3 min to go")
    assert tally.running == {}


def test_a_check_counts_models_as_it_makes_no_traces() -> None:
    clock = Clock()
    tally = Tally(300, clock)
    clock.now = 30.0
    assert tally.take(JobEvent("done", JOBS[0], seconds=30.0, result={})) == "[1/300] a-0_train_b2: 30 s"
    assert tally.line() == "1 done, 0 failed, 299 left, 2.0 workloads a minute, 2.5 h to go"


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console.err.cache_clear()
    with following(2) as show:
        show(JobEvent("start", JOBS[0]))
        show(JobEvent("progress", JOBS[0], "measuring"))
        show(JobEvent("failed", JOBS[0], "[red]\x1b[2J", 1.0))
    assert capsys.readouterr().err == "[1/2] a-0_train_b2: failed after 1 s: [red]\\x1b[2J\n"


PROGRAM = """
import time
from torchtraceap.collect.plan import Job
from torchtraceap.collect.runner import JobEvent
from torchtraceap.commands._runs import following
jobs = [Job(f"a/{n}", "train", 2, 0, [], []) for n in range(3)]
with following(3) as show:
    show(JobEvent("start", jobs[0]))
    show(JobEvent("start", jobs[1]))
    show(JobEvent("progress", jobs[1], "measuring \\x1b[2J"))
    time.sleep(0.6)
    show(JobEvent("done", jobs[0], "", 1.0, {"traces": 3}))
"""


def test_on_a_terminal_every_workload_that_runs_has_a_line() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            text += chunk
    except OSError:  # what Linux says when the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    for part in ("0 done, 0 failed, 3 left", "a-0_train_b2: starting", "a-1_train_b2: measuring \\x1b[2J"):
        assert part.encode() in text
    assert b"[1/3] a-0_train_b2: 3 traces, 1 s" in text


def test_the_end_of_a_run_says_where_time_went_and_what_was_not_as_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.out.cache_clear()
    print_run(
        RunReport(
            failed={"b": "no"},
            smaller={"a": (128, 64)},
            lost={"cuda:1": "gone"},
            stages={"building": 25.0, "measuring": 75.0},
        )
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("measuring 75 75 %", "building 25 25 %", "a 128 64", "b no", "cuda:1 gone"):
        assert line in lines
    print_run(RunReport())
    assert capsys.readouterr().out == ""
