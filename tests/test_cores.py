"""Cores of its own for what is timed."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from torchtraceap.collect import cores
from torchtraceap.collect import turn as turn_module
from torchtraceap.collect.cores import GIVEN, LEAST, Cores, confine, divide, division, physical
from torchtraceap.collect.turn import Turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")


def pairs(count: int, apart: int) -> list[frozenset[int]]:
    """Cores of two logical CPUs each, numbered as Linux does."""
    return [frozenset({cpu, cpu + apart}) for cpu in range(count)]


def singles(count: int) -> list[frozenset[int]]:
    return [frozenset({cpu}) for cpu in range(count)]


def test_half_of_the_cores_is_for_what_is_timed() -> None:
    assert divide(pairs(8, 8), 1) == [Cores([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])]


def test_every_device_times_in_its_own_part_of_the_machine() -> None:
    first, second = divide(singles(16), 2)
    assert first.timed == [0, 1, 2, 3]
    assert second.timed == [8, 9, 10, 11]
    assert first.others == second.others == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("there", [pairs(97, 97), pairs(64, 100), singles(128)])
def test_a_division_is_one(there: Sequence[frozenset[int]], devices: int) -> None:
    parts = divide(there, devices)
    assert len(parts) == devices
    assert len({len(one.timed) for one in parts}) == 1
    (others,) = {tuple(one.others) for one in parts}
    sets = [set(others), *(set(one.timed) for one in parts)]
    assert sum(map(len, sets)) == sum(map(len, there))
    assert set().union(*sets) == set().union(*there)
    for core in there:
        assert sum(bool(core & one) for one in sets) == 1  # siblings stay together
    for one in parts:
        assert len([core for core in there if core <= set(one.timed)]) == len(there) // (2 * devices)


def test_too_few_cores_are_not_divided() -> None:
    assert divide(singles(2 * LEAST - 1), 1) == []
    assert len(divide(singles(2 * LEAST), 1)) == 1
    assert divide(singles(4 * LEAST - 1), 2) == []
    assert len(divide(pairs(LEAST, LEAST), 1)) == 1
    assert divide(singles(2), 8) == []


def test_siblings_are_read(tmp_path: Path) -> None:
    for cpu, text in {0: "0,4\n", 4: "0,4\n", 1: "1-2\n", 2: "1-2\n", 5: "what?\n"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    given = frozenset({0, 2, 4, 5, 6})  # the sibling of 2 is not ours; of 6 nothing is known
    assert physical(given, tmp_path) == [frozenset({0, 4}), *map(frozenset, ({2}, {5}, {6}))]


def test_cores_of_this_machine() -> None:
    assert frozenset().union(*physical()) == GIVEN
    assert sum(map(len, physical())) == len(GIVEN)


def test_cores_are_divided_among_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "physical", lambda: singles(16))
    assert division(["cuda:0", "cuda:1"]) == dict(
        zip(["cuda:0", "cuda:1"], divide(singles(16), 2), strict=True)
    )
    assert list(division(["xpu"])) == ["xpu"]
    assert division(["cuda:0", "cuda:1", "cuda:2"]) == {}  # too few
    for devices in (["cpu"], ["cpu:0"], ["auto"]):
        assert division(devices) == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert division(["cuda:0"]) == {}


# -- in a process -----------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[Cores]:
    """A division of two CPUs; this process has all of its own again when the test ends."""
    if len(GIVEN) < 2:
        pytest.skip("needs two CPUs")
    first, second = sorted(GIVEN)[:2]
    yield Cores([first], [second])
    confine(sorted(GIVEN))


class Family:
    """A thread and a forked child that has a thread too, all of them idle."""

    def __enter__(self) -> Family:
        self.threads: list[int] = [threading.get_native_id()]
        self.end = threading.Event()
        self.has_begun = threading.Semaphore(0)
        self.thread = threading.Thread(target=self.idle)
        self.thread.start()
        assert self.has_begun.acquire(timeout=20)
        code = "import threading; threading.Thread(target=input).start(); print('here', flush=True)"
        self.child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"here\n"
        found = [int(path.name) for path in Path(f"/proc/{self.child.pid}/task").iterdir()]
        assert len(found) == 2
        self.threads += found
        return self

    def idle(self) -> None:
        self.threads.append(threading.get_native_id())
        self.has_begun.release()
        self.end.wait()

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.thread.join()
        self.child.communicate(b"\n", timeout=20)

    def cpus(self) -> set[int]:
        """Those of all, who must have the same."""
        (found,) = {frozenset(os.sched_getaffinity(thread)) for thread in self.threads}
        return set(found)


def test_a_turn_moves_all_threads_of_a_workload(tmp_path: Path, two: Cores) -> None:
    gate = tmp_path / "device.lock"
    with Family() as family:
        assert family.cpus() == GIVEN
        with closing(Turn(gate, lambda text: None, two)) as turn:
            assert turn.timed_cores == 1
            assert family.cpus() == set(two.others)
            for _ in range(2):
                with turn.taken():
                    assert family.cpus() == set(two.timed)
                assert family.cpus() == set(two.others)
            with turn.taken(shared=True):
                assert family.cpus() == set(two.others)
            turn.take()
            assert family.cpus() == set(two.timed)
        assert family.cpus() == set(two.others)


def test_what_starts_during_a_turn_goes_along(tmp_path: Path, two: Cores) -> None:
    turn = Turn(tmp_path / "device.lock", lambda text: None, two)
    turn.take()
    with Family() as family:
        assert family.cpus() == set(two.timed)
        turn.close()
        assert family.cpus() == set(two.others)


def test_without_cores_nothing_is_moved(tmp_path: Path) -> None:
    with Family() as family, closing(Turn(tmp_path / "device.lock", lambda text: None)) as turn:
        turn.take()
        assert turn.timed_cores is None
        assert family.cpus() == GIVEN


def test_a_turn_leaves_the_cores_before_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "device.lock"
    moves: list[tuple[list[int], bool]] = []

    def watched(cpus: Sequence[int]) -> None:
        with gate.open("ab") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                moves.append((list(cpus), True))
            else:
                moves.append((list(cpus), False))
        if len(moves) == 3:
            raise OSError(errno.EINVAL, "these CPUs are gone")

    monkeypatch.setattr(turn_module, "confine", watched)
    turn = Turn(gate, lambda text: None, Cores([0], [1]))
    turn.take()
    with pytest.raises(OSError, match="are gone"):
        turn.close()
    assert moves == [([1], False), ([0], True), ([1], True)]
    with Turn(gate, lambda text: None).taken():  # it was given back all the same
        pass


def test_what_ends_meanwhile_is_no_error(two: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    confine(two.timed)  # it has ended and nobody has asked for its status
    gone = psutil.Process(child.pid)
    child.join()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [gone])
    confine(two.others)
    listed = cores._threads
    monkeypatch.setattr(cores, "_threads", lambda: [*listed(), gone.pid])
    confine(two.timed)
    assert os.sched_getaffinity(0) == set(two.timed)
