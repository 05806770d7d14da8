"""The programs in benchmarks/ run, and print what the README quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "tests" / "data" / "h200" / "host_sync_infer.json.gz"


def output(program: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_storage_of_a_file() -> None:
    text = output("storage.py", str(PROFILE))
    assert PROFILE.name[:40] in text
    assert re.search(r"^Parquet: [\d.]+ bytes an event, [\d.]+ times smaller than gzip\.$", text, re.M)


@pytest.mark.slow
def test_without_a_file_a_trace_is_made() -> None:
    pytest.importorskip("hta")
    assert "resnet18.json" in output("storage.py")
    text = output("read_kineto.py", "--repeats", "1")
    assert re.search(r"^resnet18\.json: .* HTA table [\d.]+ s \([\d.]+x\), table and stacks ", text, re.M)
