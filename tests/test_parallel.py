"""Work in many processes of this machine: none outlives the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from torchtraceap.errors import UserError
from torchtraceap.parallel import Where, map_on

SECONDS = 20.0
PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_parallel import Where, map_on, process
if __name__ == "__main__":
    for pid in map_on(Where(jobs=2), process, range(1000)):
        print(pid, flush=True)
"""


def process(item: int) -> int:
    """Which process does this."""
    time.sleep(0.01)
    return os.getpid()


def die(item: int) -> None:
    """End the process that does this, as the system does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_killed_is_told() -> None:
    with pytest.raises(UserError, match=r"a process was killed \(out of memory\?\): try fewer --jobs"):
        list(map_on(Where(jobs=2), die, range(3)))


def test_no_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        begun = psutil.Process(parent.pid).children(recursive=True)
        assert pid in [one.pid for one in begun]
        parent.kill()
    _, alive = psutil.wait_procs(begun, timeout=SECONDS)
    assert alive == []
