"""Which of the machine's cores are kept for what is timed, where lanes do other things beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

LEAST = 4
"""Logical CPUs for what is timed on a device, or there is no division. A step of a loop on an accelerator has
a thread that launches, one of autograd and two loader workers; operators on the CPU use as many threads
(``devices.BESIDE_THREADS``)."""

GIVEN = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
"""Logical CPUs that this process may use. Read once, as a workload is confined to some of them later."""

_SYSTEM = Path("/sys/devices/system/cpu")


class Cores(msgspec.Struct, frozen=True):
    """Logical CPUs: those of what is timed on a device, and those of all that is not, on any device."""

    timed: list[int]
    others: list[int]


def division(devices: Sequence[str]) -> dict[str, Cores]:
    """How the machine's cores are divided, by device; empty if they are too few, or not ours to divide.

    That is so on CPUs, where what is timed needs them all, and outside of Linux.
    """
    if sys.platform != "linux" or any(name.partition(":")[0] in ("cpu", "auto") for name in devices):
        return {}
    return dict(zip(devices, divide(physical(), len(devices)), strict=False))


def divide(cores: Sequence[frozenset[int]], devices: int) -> list[Cores]:
    """A share for each of so many devices; none if there are fewer than ``LEAST`` logical CPUs for one.

    At least half of the cores are for what is not timed. Each device has the first half of its part of the
    list, not all of them the first half of the list: so devices of both sockets time on their own, where
    devices and cores are numbered alike.

    Args:
        cores: The logical CPUs of each core, in order.
        devices: How many there are; at least one.
    """
    each = len(cores) // (2 * devices)
    starts = [n * len(cores) // devices for n in range(devices)]
    timed = [sorted(chain.from_iterable(cores[start : start + each])) for start in starts]
    if min(map(len, timed)) < LEAST:
        return []
    others = sorted({*chain.from_iterable(cores)} - {*chain.from_iterable(timed)})
    return [Cores(one, others) for one in timed]


def physical(given: frozenset[int] = GIVEN, system: Path = _SYSTEM) -> list[frozenset[int]]:
    """The cores of this machine, each as its logical CPUs that are ``given``, in the order of their numbers.

    Where the system does not tell what belongs together, each CPU is a core.
    """
    cores = set()
    for cpu in given:
        siblings = {cpu}
        with suppress(OSError, ValueError):
            siblings |= _listed((system / f"cpu{cpu}/topology/thread_siblings_list").read_text("ascii"))
        cores.add(frozenset(siblings & given))
    return sorted(cores, key=min)


def _listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes it, such as ``0-1,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}


def confine(cpus: Sequence[int]) -> None:
    """Move this process and its descendants to some logical CPUs, with all threads that they have or start.

    On Linux only.
    """
    moved: set[int] = set()
    while new := {*_threads()} - moved:  # one that was still elsewhere may have started another meanwhile
        for thread in new:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cpus)
        moved |= new


def _threads() -> Iterator[int]:
    """System-wide numbers of the threads of this process and its descendants."""
    import psutil

    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            yield from [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
