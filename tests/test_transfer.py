"""Labels carried over from a profile with markers to one that never had any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchtraceap.collect.labelling import Armed, marked_members, strip
from torchtraceap.collect.transfer import carried, transfer
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.labels.markers import PREFIX, Marker, marker_name

DATA = Path(__file__).parent / "data" / "h200"
MAIN, PINNING, AUTOGRAD, STREAM = "thread 0", "thread 1", "thread 2", "stream 7"
ON = marker_name("s", Marker(0, 0, True))

Row = tuple[str, str, int, int, str, str]
"""Lane, name, start and end in us, and the names of what launched a GPU event and of the forward op."""

CATEGORIES = {"ProfilerStep": "user_annotation", PREFIX: "user_annotation", "cuda": "cuda_runtime"}

MARKED: list[Row] = [
    (MAIN, "ProfilerStep#4", 0, 1000, "", ""),
    (MAIN, "aten::conv", 10, 90, "", ""),
    (MAIN, "cudaLaunchKernel", 20, 30, "", ""),
    (MAIN, ON, 100, 300, "", ""),
    (MAIN, "aten::clone", 110, 200, "", ""),
    (MAIN, "cudaMemcpyAsync", 120, 130, "", ""),
    (MAIN, "cudaDeviceSynchronize", 210, 290, "", ""),
    (MAIN, "aten::relu", 310, 350, "", ""),
    (PINNING, "cudaEventQuery", 5, 6, "", ""),
    (AUTOGRAD, "ReluBackward0", 400, 450, "", "aten::relu"),
    (AUTOGRAD, "CloneBackward0", 460, 500, "", "aten::clone"),
    (AUTOGRAD, "cudaLaunchKernelExC", 470, 480, "", ""),
    (STREAM, "conv_kernel", 700, 800, "cudaLaunchKernel", ""),  # a GPU that lags behind
    (STREAM, "Memcpy DtoD", 2000, 2100, "cudaMemcpyAsync", ""),
    (STREAM, "add_kernel", 2200, 2300, "cudaLaunchKernelExC", ""),
]
MEMBERS = {
    "aten::clone",
    "cudaMemcpyAsync",
    "cudaDeviceSynchronize",
    "CloneBackward0",
    "cudaLaunchKernelExC",
    "Memcpy DtoD",
    "add_kernel",
}


def make(rows: list[Row]) -> Trace:
    """A trace of uniquely named events; parents follow from times."""
    rows = sorted(rows, key=lambda row: (row[0] == STREAM, row[0], row[2], -row[3]))
    names = [row[1] for row in rows]
    lanes = list(dict.fromkeys(row[0] for row in rows))

    def parent(i: int) -> int:
        lane, _, start, end, launch, _ = rows[i]
        if launch:
            return parent(names.index(launch))
        around = [j for j in range(i) if rows[j][0] == lane and rows[j][2] <= start and end <= rows[j][3]]
        return around[-1] if around else -1

    def category(name: str, lane: str) -> str:
        if lane == STREAM:
            return "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        return next((kind for head, kind in CATEGORIES.items() if name.startswith(head)), "cpu_op")

    distinct = list(dict.fromkeys((row[1], category(row[1], row[0])) for row in rows))
    columns = {
        "lane": [lanes.index(row[0]) for row in rows],
        "op": [distinct.index((row[1], category(row[1], row[0]))) for row in rows],
        "start_ns": [row[2] * 1000 for row in rows],
        "dur_ns": [(row[3] - row[2]) * 1000 for row in rows],
        "parent": [parent(i) for i in range(len(rows))],
        "launch": [names.index(row[4]) if row[4] else -1 for row in rows],
        "forward": [names.index(row[5]) if row[5] else -1 for row in rows],
    }
    trace = Trace(
        [Lane("gpu", lane, 0) if lane == STREAM else Lane("cpu", lane) for lane in lanes],
        [Op(*one) for one in distinct],
        Events(**{key: np.array(column, Events.DTYPES[key]) for key, column in columns.items()}),
    )
    trace.check()
    return trace


def moved_to(plain: list[Row], marked: list[Row] = MARKED) -> set[str] | None:
    """Names of the events of ``plain`` that are members."""
    trace, members = marked_members(make(marked), "s", {0: Armed(3, "marker+backward")})
    target = strip(make(plain))
    moved = transfer(trace, members, target)
    if moved is None:
        return None
    assert moved.keys() == {3}
    return set(target.names[moved[3]].tolist())


def changed(*more: Row, without: tuple[str, ...] = (), **renamed: str) -> list[Row]:
    """The rows without the marker, and with other changes."""
    kept = [row for row in MARKED if row[1] not in (ON, *without)]
    return [(row[0], renamed.get(row[1].split("::")[-1], row[1]), *row[2:]) for row in kept] + list(more)


def test_members_are_found_again_by_their_place() -> None:
    _, members = marked_members(make(MARKED), "s", {0: Armed(3, "marker+backward")})
    assert set(strip(make(MARKED)).names[members[3]].tolist()) == MEMBERS
    assert moved_to(changed()) == MEMBERS


def test_steps_may_have_other_numbers_and_all_may_take_other_times() -> None:
    slower = [
        (lane, name.replace("#4", "#11"), 3 * a, 3 * b, *links) for lane, name, a, b, *links in changed()
    ]
    assert moved_to(slower) == MEMBERS  # type: ignore[arg-type]


def test_calls_that_come_and_go_follow_what_is_above_them() -> None:
    more = [
        (MAIN, "cudaMalloc", 140, 150, "", ""),  # in the clone
        (MAIN, "cudaFree", 40, 50, "", ""),  # in the convolution
        (PINNING, "cudaPointerGetAttributes", 8, 9, "", ""),
        (AUTOGRAD, "cudaEventCreateWithFlags", 405, 410, "", ""),  # in the backward of the activation
    ]
    assert moved_to(changed(*more)) == MEMBERS | {"cudaMalloc"}
    assert moved_to(changed(), [*MARKED, *more]) == MEMBERS


def test_an_operator_may_launch_another_kernel() -> None:
    rows = [
        (MAIN, "cudaFuncSetAttribute", 32, 36, "", ""),
        (MAIN, "cudaMemsetAsync", 140, 150, "", ""),
        (STREAM, "Memset", 1900, 1950, "cudaMemsetAsync", ""),
    ]
    assert moved_to(changed(*rows)) == MEMBERS | {"cudaMemsetAsync", "Memset"}
    assert moved_to(changed(), [*MARKED, *rows]) == MEMBERS


def test_threads_are_known_by_what_they_run_and_not_by_their_number() -> None:
    other = {PINNING: AUTOGRAD, AUTOGRAD: PINNING}
    swapped = [(other.get(lane, lane), *rest) for lane, *rest in changed()]
    assert moved_to(swapped) == MEMBERS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plain",
    [
        changed((MAIN, "aten::add", 360, 370, "", "")),
        changed(without=("aten::relu", "ReluBackward0")),
        changed(relu="aten::gelu"),
        changed((AUTOGRAD, "aten::add_", 485, 490, "", "")),
        changed((MAIN, "cudaStreamSynchronize", 360, 370, "", "")),
        changed(without=("cudaDeviceSynchronize",)),
        changed((PINNING, "aten::pin_memory", 700, 710, "", "")),
    ],
    ids=["one more", "one less", "another", "backward", "a wait", "no wait", "on another thread"],
)
def test_other_work_is_not_taken_for_the_same(plain: list[Row]) -> None:
    if any(row[5] == "aten::relu" and "aten::gelu" in {r[1] for r in plain} for row in plain):
        plain = [(*row[:5], row[5].replace("relu", "gelu")) for row in plain]
    assert moved_to(plain) is None


def test_the_same_names_in_another_tree_are_not_the_same() -> None:
    nested = [
        (lane, name, a, 360 if name == "aten::conv" else b, *links) for lane, name, a, b, *links in changed()
    ]
    assert moved_to(nested) is None  # type: ignore[arg-type]


def test_the_same_names_with_other_gradients_are_not_the_same() -> None:
    crossed = [(*row[:5], "aten::clone" if row[1] == "ReluBackward0" else row[5]) for row in changed()]
    assert moved_to(crossed) is None


def free(start: int) -> Row:
    return (MAIN, "cudaFree", start, start + 2, "", "")


@pytest.mark.parametrize(
    ("marked", "plain", "members"),
    [
        ([292], [292], [True]),
        ([292, 295], [292], [True]),  # all of the name in that place are members
        ([292, 302], [295, 305], [True, False]),  # one of two is: the first
        ([292, 302], [295, 305, 307], None),  # one of two is, and now there are three
        ([302], [295], [False]),
    ],
)  # fmt: skip
def test_a_volatile_call_right_below_a_marker(
    marked: list[int], plain: list[int], members: list[bool] | None
) -> None:
    # Behind cudaDeviceSynchronize, within the marker (until 300) or behind it.
    trace, found = marked_members(repeated(MARKED, marked), "s", {0: Armed(3, "marker+backward")})
    target = strip(repeated(changed(), plain))
    moved = transfer(trace, found, target)
    if members is None:
        assert moved is None
    else:
        assert moved is not None
        assert moved[3][target.names == "cudaFree"].tolist() == members


def repeated(rows: list[Row], starts: list[int]) -> Trace:
    return make([*rows, *map(free, starts)])


def test_without_instances_nothing_has_to_correspond() -> None:
    assert transfer(strip(make(MARKED)), {}, strip(make(changed(relu="aten::x")[:3]))) == {}


def test_what_is_found_by_comparison_is_sought_in_the_plain_profile() -> None:
    armed = {
        0: Armed(0, "marker+backward"),
        1: Armed(1, "selector", lambda name: name in ("aten::fill_", "aten::clone")),
    }
    clean = strip(make(changed(without=("aten::clone", "CloneBackward0"))))
    plain = strip(make(changed((MAIN, "aten::fill_", 140, 160, "", ""))))
    marked = make([*MARKED, (MAIN, "aten::fill_", 140, 160, "", "")])
    segments = carried(marked, "s", armed, plain, clean)
    assert segments is not None
    assert {s.instance for s in segments} == {0}  # the marker's claim goes first
    apart = (MAIN, "aten::fill_", 360, 380, "", "")
    segments = carried(make([*MARKED, apart]), "s", armed, strip(make(changed(apart))), clean)
    assert segments is not None
    assert [(s.step, s.event_count) for s in segments if s.instance == 1] == [(0, 1)]


@pytest.mark.parametrize("name", ["dtype_ping_pong_train", "host_sync_infer", "pageable_h2d_infer"])
def test_profiles_of_a_gpu(name: str) -> None:
    """A profile of a GPU corresponds to itself, and not to the clean one of its loop."""
    raw = read_trace(DATA / f"{name}.json.gz")
    secret = next(op.name for op in raw.ops if op.name.startswith(PREFIX)).removeprefix(PREFIX).split("/")[0]
    armed = {int(name == "host_sync_infer"): Armed(0, "marker+backward")}
    trace, members = marked_members(raw, secret, armed)
    assert members[0].any()
    moved = transfer(trace, members, trace)
    assert moved is not None
    assert np.array_equal(moved[0], members[0])
    clean = "dtype_ping_pong_train_clean" if "train" in name else "infer_clean"
    assert transfer(trace, members, strip(read_trace(DATA / f"{clean}.json.gz"))) is None
