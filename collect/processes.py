"""What processes do to end together and to take turns, and what they have of the machine."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """On Linux, let the kernel kill this process when ``parent``, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def memory_of_session(leader: int, *, more_than: int) -> int:
    """Bytes of main memory that the processes of a session have together.

    Their resident sets count what they share several times, as forked ones share most. Only if that is more
    than ``more_than`` is it worth to ask the system for the exact figure, where it knows one.
    """
    import psutil

    processes = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == leader:
                processes.append(psutil.Process(pid))

    def total(bytes_of: Callable[[Any], int]) -> int:
        found = 0
        for process in processes:
            with suppress(psutil.Error):  # it has ended meanwhile
                found += bytes_of(process)
        return found

    resident = total(lambda process: process.memory_info().rss)
    if resident <= more_than or sys.platform != "linux":
        return resident
    return total(lambda process: process.memory_full_info().pss)


def machine_memory() -> int:
    """Bytes of main memory that this machine has, or the container that this process is in."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


POLL_SECONDS = 0.01


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock on ``path`` while the block runs, alone or with others that share it.

    Who wants it alone goes first. Those who would share it gather meanwhile and then have it at once; let in
    as they come, they would have it one by one, each between two that have it alone.
    """
    with path.open("wb") as file, path.with_suffix(".wanted").open("wb") as wanted:
        # Either lock goes with this process and its workers, however they end.
        if shared:
            while not (_tried(wanted, fcntl.LOCK_EX) and _tried(file, fcntl.LOCK_SH)):
                fcntl.flock(wanted, fcntl.LOCK_UN)
                time.sleep(POLL_SECONDS)
        else:
            fcntl.flock(wanted, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(wanted, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # loader workers forked meanwhile hold the file open


def _tried(file: IO[bytes], kind: int) -> bool:
    """Whether the lock could be had without waiting."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
