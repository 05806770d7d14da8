"""What a trace has beyond its clean twin, on trees by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from torchtraceap.collect.additions import additions, common
from torchtraceap.dataset.trace import Events, Lane, Op, Trace

Node = tuple[str, Sequence["Node"]]
"""Name, with the shapes behind a space, and what lies below; what is called ``kernel`` was launched there."""


def make(*threads: Sequence[Node]) -> Trace:
    """A trace of threads, the first of which has the steps."""
    rows: list[tuple[int, str, int, int, int, int]] = []  # lane, name, start, duration, parent, launch
    kernels: list[tuple[int, str, int, int, int, int]] = []

    def put(lane: int, node: Node, start: int, parent: int) -> int:
        name, children = node
        row, now = len(rows), start + 1
        rows.append((lane, name, start, 0, parent, -1))
        for child in children:
            if child[0].startswith("kernel"):
                kernels.append((len(threads), child[0], now, 1, parent, row))
                now += 1
            else:
                now = put(lane, child, now, row)
        rows[row] = (lane, name, start, now - start, parent, -1)
        return now + 1

    for lane, nodes in enumerate(threads):
        start = 0
        for node in nodes:
            start = put(lane, node, start, -1)
    ops: dict[str, int] = {}
    table = [(lane, ops.setdefault(name, len(ops)), *rest, -1) for lane, name, *rest in rows + kernels]
    columns = np.array(table, dtype=np.int64).T
    events = Events(
        **{
            name: column.astype(Events.DTYPES[name])
            for name, column in zip(Events.DTYPES, columns, strict=True)
        }
    )
    lanes = [*(Lane("cpu", f"thread {i}") for i in range(len(threads))), Lane("gpu", "stream 7", 0)]
    split = [name.partition(" ") for name in ops]
    return Trace(lanes, [Op(name, "cpu_op", shapes) for name, _, shapes in split], events)


def step(*names: str | Node, number: int = 0) -> Node:
    return f"ProfilerStep#{number}", [(name, ()) if isinstance(name, str) else name for name in names]


def leaves(*names: str) -> list[Node]:
    return [(name, ()) for name in names]


def new(trace: Trace, clean: Trace, without: Sequence[int] | None = None) -> list[int]:
    taken = None if without is None else np.isin(np.arange(len(trace)), without)
    return np.flatnonzero(additions(trace, clean, taken)).tolist()


def test_equal_traces_have_nothing_new_whatever_their_steps_are_called() -> None:
    clean = make([step("conv", ("relu", leaves("clamp")), number=3)])
    trace = make([step("conv", ("relu", leaves("clamp")), number=7)])
    assert new(trace, clean) == []


def test_an_operator_is_new_where_the_twin_has_one_of_its_name_elsewhere() -> None:
    clean = make([step("add", "conv", "relu")])
    assert new(make([step("add", "conv", "add", "relu")]), clean) == [3]


def test_one_more_of_equal_operators_is_one_that_is_new() -> None:
    clean = make([step("add", "add", "add")])
    assert len(new(make([step("add", "add", "add", "add")]), clean)) == 1


def test_of_operators_of_one_name_that_of_other_shapes_is_new() -> None:
    clean = make([step("conv", "add [8]", "relu")])
    assert new(make([step("conv", "add [2]", "add [8]", "relu")]), clean) == [2]
    assert new(make([step("conv", "add [8]", "add [2]", "relu")]), clean) == [3]


def test_an_operator_of_other_shapes_among_several_is_found() -> None:
    clean = make([step("add [8]", "add [4]", "add [8]")])
    assert new(make([step("add [2]", "add [8]", "add [4]", "add [8]")]), clean) == [1]
    assert new(make([step("add [8]", "add [4]", "add [2]", "add [8]")]), clean) == [3]
    assert new(make([step("add [8]", "add [4]", "add [8]", "add [2]")]), clean) == [4]


def test_of_operators_of_the_twin_that_with_the_same_shapes_is_the_counterpart() -> None:
    clean = make([step(("to [2]", ()), ("to [8]", leaves("copy")))])
    assert new(make([step(("to [8]", leaves("copy")))]), clean) == []


def test_equal_operators_in_another_order_are_nothing_new() -> None:
    clean = make([step("copy [8]", "copy [4]", "copy [2]")])
    assert new(make([step("copy [2]", "copy [8]", "copy [4]")]), clean) == []


def test_shapes_that_depend_on_values_are_nothing_new() -> None:
    clean = make([step("conv", "index [8]", "relu")])
    assert new(make([step("conv", "index [5]", "relu")]), clean) == []


def test_repeated_blocks_are_not_taken_for_each_other() -> None:
    block = ["norm", "linear", "gelu"]
    clean = make([step("conv", *block * 6, "head")])
    trace = make([step("conv", *block * 2, "sort", *block * 3, "sort", *block, "head")])
    assert new(trace, clean) == [8, 18]


def test_what_lies_below_something_new_or_was_launched_by_it_is_new() -> None:
    clean = make([step(("empty", ()), ("add", [("launch", leaves("kernel"))]))])
    trace = make(
        [
            step(
                ("empty", [("fill_", [("launch", leaves("kernel"))])]),
                ("add", [("launch", leaves("kernel"))]),
            )
        ]
    )
    assert new(trace, clean) == [2, 3, 6]  # the fill, its launch and its kernel


def test_another_kernel_of_the_same_operator_is_new() -> None:
    clean = make([step(("conv", [("launch", leaves("kernel_fast"))]))])
    trace = make([step(("conv", [("launch", leaves("kernel_slow"))]))])
    assert new(trace, clean) == [3]


def test_threads_are_known_by_what_they_run() -> None:
    main, pinning, backward = [step("conv", "relu")], leaves("copy", "copy"), leaves("relu_back", "conv_back")
    clean = make(main, pinning, backward)
    trace = make(main, leaves("relu_back", "fill", "conv_back"), pinning)
    assert new(trace, clean) == [4]


def test_all_is_new_on_a_thread_that_the_twin_has_not() -> None:
    main = [step("conv")]
    assert new(make(main, leaves("copy", "fill")), make(main)) == [2, 3]


def test_a_step_is_compared_with_the_same_step() -> None:
    clean = make([step("conv", "zero"), step("conv", number=1)])
    trace = make([step("conv", "zero", number=4), step("conv", "zero", number=5)])
    assert new(trace, clean) == [5]


def test_a_step_that_the_twin_has_not_is_new() -> None:
    assert new(make([step("conv"), step("conv", number=1)]), make([step("conv")])) == [2, 3]


@pytest.mark.parametrize("other", [2, 3])
def test_what_belongs_to_others_takes_no_counterpart_from_the_rest(other: int) -> None:
    clean = make([step("conv", "cast", "relu")])
    assert new(make([step("conv", "cast", "cast", "relu")]), clean, without=[other]) == [other]


def test_work_of_the_clean_step_may_run_under_another_roof() -> None:
    clean = make([step("conv", "add", "relu")])
    roof: Node = ("CheckpointFunctionBackward", leaves("conv", "fill", "add"))
    trace = make([step(roof, "relu")])
    assert [str(trace.names[row]) for row in new(trace, clean)] == ["CheckpointFunctionBackward", "fill"]


def test_what_lies_below_something_taken_is_aligned_above_it() -> None:
    clean = make([step("conv", "add")])
    trace = make([step(("taken", leaves("conv", "fill")), "add")])
    (taken,) = (row for row, name in enumerate(trace.names.tolist()) if name == "taken")
    assert [str(trace.names[row]) for row in new(trace, clean, without=[taken])] == ["taken", "fill"]


@pytest.mark.parametrize("seed", range(3))
def test_common_subsequence_is_a_longest_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        a, b = ([rng.randrange(3) for _ in range(rng.randrange(9))] for _ in range(2))
        found = common(a, b)
        assert all(a[i] == b[j] for i, j in found)
        assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(found))
        assert len(found) == longest(a, b)


def longest(a: list[int], b: list[int]) -> int:
    """By the textbook's recursion."""
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest(a[1:], b[1:])
    return max(longest(a[1:], b), longest(a, b[1:]))
