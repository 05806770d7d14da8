"""A log that others have written in, or that was cut off, is read as far as it is one of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchtraceap.collect import check, lane
from torchtraceap.collect.plan import Job
from torchtraceap.collect.run_folder import read_log
from torchtraceap.collect.runner import collect

JOB = Job("fake/ok", "train", 8, 0, [], [])
LINES = [
    b'{"job":[1],"event":"done"}',
    b'{"job":"%s","event":"again","batch_size":3}',
    b'{"job":"%s","event":"again","batch_size":[8]}',
    b'{"job":"%s","event":"again","batch_size":[8,"x"]}',
    b'{"job":"%s","event":"again","batch_size":[8,0]}',
    b'{"job":"%s","event":"again","batch_size":[8,9999]}',
    b'{"job":"%s","event":"failed","error":5}',
    b'{"job":"%s","event":"done","result":[1]}',
    b'{"job":"%s","event":"done","result":{"cases":[{"mode":3}]}}',
    b'{"job":"%s","event":"done","result":{"build_s":"long"}}',
    b"[" * 100_000,
    b"\xff",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_none_of_ours(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SERVER", (sys.executable, str(Path(__file__).with_name("fake_server.py"))))
    collect([JOB], tmp_path, budget=0)
    (tmp_path / "log.jsonl").write_bytes(line.replace(b"%s", JOB.name.encode()) + b"\n")

    one = check.Check(JOB.name, [])
    (found,) = check._checked([JOB.name], [one], read_log(tmp_path))
    assert found == check.Checked(JOB.name, "left")

    report = collect([JOB], tmp_path, resume=True)
    assert report.done == [JOB.name]
    assert report.smaller == {}
