"""Which events belong to a pattern, and the segments they form, worked out by hand."""

from __future__ import annotations

import numpy as np

from torchtraceap.labels.segments import belongs, bounds, runs


def member(roots: str, parent: list[int], launch=None, forward=None, *, backward: bool = False) -> list[int]:
    """Indices of the events that belong; ``roots`` has an ``x`` for each root."""
    none = [-1] * len(parent)
    found = belongs(
        np.array([c == "x" for c in roots], dtype=bool),
        np.array(parent, dtype=np.int32),
        np.array(launch or none, dtype=np.int32),
        np.array(forward or none, dtype=np.int32),
        backward=backward,
    )
    return np.flatnonzero(found).tolist()


def test_descendants_belong_and_roots_do_not() -> None:
    #        0 step, 1 op, 2 marker, 3 op, 4 child, 5 grandchild, 6 op
    assert member("..x....", [-1, 0, 0, 2, 3, 4, 0]) == [3, 4, 5]


def test_roots_inside_of_roots_are_left_out_too() -> None:
    #        0 marker, 1 op, 2 marker, 3 op
    assert member("x.x.", [-1, 0, 0, 2]) == [1, 3]


def test_work_on_the_gpu_follows_its_launch() -> None:
    #        0 marker, 1 op, 2 launch in it, 3 op outside, 4 launch in it, 5 and 6 kernels of 2 and 4
    assert member("x......", [-1, 0, 1, -1, 3, 1, 3], [-1, -1, -1, -1, -1, 2, 4]) == [1, 2, 5]


def test_the_launch_decides_and_not_the_parent() -> None:
    # The kernel's op encloses the marker, the launch call lies in it.
    #        0 op, 1 marker, 2 launch, 3 kernel
    assert member(".x..", [-1, 0, 1, 0], [-1, -1, -1, 2]) == [2, 3]


def test_work_whose_launch_was_not_recorded_follows_its_parent() -> None:
    #        0 marker, 1 op, 2 kernel of that op, 3 kernel of nothing
    assert member("x...", [-1, 0, 1, -1]) == [1, 2]


BACKWARD = {
    # 0 marker, 1 forward op, 2 another outside, 3 backward of 1, 4 launch in it, 5 backward of 2, 6 kernel
    "roots": "x......",
    "parent": [-1, 0, -1, -1, 3, -1, 3],
    "launch": [-1, -1, -1, -1, -1, -1, 4],
    "forward": [-1, -1, -1, 1, -1, 2, -1],
}


def test_backward_of_what_is_inside_belongs_with_all_below() -> None:
    assert member(**BACKWARD, backward=True) == [1, 3, 4, 6]


def test_backward_does_not_belong_without_that_mechanism() -> None:
    assert member(**BACKWARD, backward=False) == [1]


def test_a_last_event_is_not_taken_for_no_event() -> None:
    # Index -1 reads the last entry; here that one is inside, and event 0 has neither parent, nor forward op.
    assert member(".x.", [-1, -1, 1], backward=True) == [2]


def test_no_events() -> None:
    assert member("", []) == []
    assert runs(np.zeros(0, bool), np.zeros(0, np.int16), np.zeros(0, np.int32)).shape == (0, 2)
    assert bounds(np.empty((0, 2), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)).shape == (0, 2)


def cut(members: str, lane: str, step: str) -> list[list[int]]:
    """Runs as [first, count]; lanes and steps are digits, ``-`` for no step."""
    return runs(
        np.array([c == "x" for c in members], dtype=bool),
        np.array([int(c) for c in lane], dtype=np.int16),
        np.array([-1 if c == "-" else int(c) for c in step], dtype=np.int32),
    ).tolist()


def test_another_event_between_ends_a_run() -> None:
    assert cut("xx.x.", "00000", "00000") == [[0, 2], [3, 1]]


def test_an_event_around_a_run_does_not_end_it() -> None:
    # The step's annotation and an op lie ahead of what they enclose.
    assert cut("..xxx", "00000", "00000") == [[2, 3]]


def test_lanes_and_steps_end_a_run() -> None:
    assert cut("xxxx", "0011", "0000") == [[0, 2], [2, 2]]
    assert cut("xxxx", "0000", "0011") == [[0, 2], [2, 2]]
    assert cut("xxxx", "0000", "-000") == [[0, 1], [1, 3]]


def test_no_member() -> None:
    assert cut("...", "000", "000") == []


def test_bounds_reach_to_the_latest_end() -> None:
    start = np.array([0, 10, 20, 30, 100], dtype=np.int64)
    end = np.array([5, 90, 25, 35, 101], dtype=np.int64)  # event 1 encloses 2 and 3
    assert bounds(np.array([[1, 3], [4, 1]]), start, end).tolist() == [[10, 90], [100, 101]]
