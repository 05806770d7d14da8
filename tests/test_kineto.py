"""The Kineto reader: on a real CPU trace, on hand-written quirks of GPU traces, on damage."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtraceap.dataset import kineto
from torchtraceap.dataset._kineto_json import repaired
from torchtraceap.dataset._kineto_tree import OVERHANG_NS, enclosing, first_match, forward_ops
from torchtraceap.dataset.kineto import parse, read_profile, read_trace
from torchtraceap.dataset.trace import Lane, Trace
from torchtraceap.errors import UserError

DATA = Path(__file__).parent / "data" / "kineto"


def event(name: str, ts: object, dur: object, cat: str = "cpu_op", pid: object = 1, tid: object = 1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def trace_of(*events: dict) -> Trace:
    trace = parse(json.dumps({"traceEvents": events}).encode(), "test").trace
    trace.check()
    return trace


def row(trace: Trace, name: str, category: str | None = None) -> int:
    """Index of the only event of that name."""
    found = trace.names == name
    if category:
        found &= trace.categories == category
    (index,) = np.flatnonzero(found)
    return int(index)


def name_of(trace: Trace, index: int) -> str | None:
    return None if index < 0 else str(trace.names[index])


# The real trace: two steps of training, one block checkpointed.


@pytest.fixture(scope="module")
def real() -> Trace:
    return read_trace(DATA / "cpu_train.json.gz")


@pytest.fixture(scope="module")
def real_json() -> list[dict]:
    text = gzip.decompress((DATA / "cpu_train.json.gz").read_bytes())
    return json.loads(text, parse_float=Decimal)["traceEvents"]


def test_real_trace_keeps_every_event_to_the_nanosecond(real, real_json):
    real.check()
    kept = [e for e in real_json if e["ph"] == "X" and e["cat"] in ("cpu_op", "user_annotation")]
    first = min(e["ts"] for e in kept)
    expected = sorted((round((e["ts"] - first) * 1000), round(e["dur"] * 1000), e["name"]) for e in kept)
    got = zip(real.events.start_ns.tolist(), real.events.dur_ns.tolist(), real.names.tolist(), strict=True)
    assert sorted(got) == expected
    assert real.lanes == [Lane("cpu", "thread 0")]
    assert len(real.step_bounds) == 2


def test_real_trace_has_the_tree_of_the_program(real):
    def path(index: int) -> list[str]:
        names = []
        while index >= 0:
            names.append(str(real.names[index]))
            index = int(real.events.parent[index])
        return names

    convolutions = [path(i) for i in np.flatnonzero(real.names == "aten::mkldnn_convolution")]
    inner = ["aten::mkldnn_convolution", "aten::_convolution", "aten::convolution", "aten::conv2d"]
    assert all(p[:4] == inner and p[-1].startswith("ProfilerStep#") for p in convolutions)
    # A step convolves in stem and block, and once more in the backward of the checkpointed block's last op.
    recomputed = [p[4:6] for p in convolutions if len(p) > 5]
    assert len(convolutions) == 6
    assert recomputed == 2 * [["ReluBackward0", "autograd::engine::evaluate_function: ReluBackward0"]]


def test_real_trace_links_backward_ops_as_pytorch_does(real, real_json):
    """PyTorch draws the same links as flow events, which the reader does not look at."""
    first = min(e["ts"] for e in real_json if e["ph"] == "X" and e["cat"] in ("cpu_op", "user_annotation"))
    ends: dict[int, dict[str, int]] = {}
    for e in real_json:
        if e.get("cat") == "fwdbwd":
            ends.setdefault(e["id"], {})[e["ph"]] = round((e["ts"] - first) * 1000)
    assert len(ends) > 10
    start = real.events.start_ns
    linked = {
        int(start[i]): int(start[real.events.forward[i]]) for i in np.flatnonzero(real.events.forward >= 0)
    }
    for end in ends.values():
        assert linked[end["f"]] == end["s"]


def test_real_trace_carries_nothing_personal(real, real_json):
    pids = {str(e["pid"]) for e in real_json} - {"0", ""}
    words = {text for op in real.ops for text in (op.name, op.category)} | {lane.name for lane in real.lanes}
    assert not any(pid in word for pid in pids for word in words)
    profile = read_profile(DATA / "cpu_train.json.gz")
    assert (profile.device_name, profile.compute_units, profile.rank) == ("", 0, None)
    assert profile.with_shapes


# Quirks of GPU traces, written by hand.


@pytest.fixture(scope="module")
def cuda() -> Trace:
    trace = read_trace(DATA / "cuda.json")
    trace.check()
    return trace


def test_profile_names_the_device_in_use():
    profile = read_profile(DATA / "cuda.json")
    assert (profile.device_name, profile.compute_units, profile.rank) == ("Busy GPU", 132, 3)
    assert profile.with_shapes


def test_nothing_personal_enters_the_trace(cuda):
    text = repr((cuda.lanes, cuda.ops))
    assert "gemm" in text
    assert not any(word in text for word in ("secret", "4711", "4799"))


def test_lanes_are_threads_then_streams(cuda):
    assert cuda.lanes == [
        Lane("cpu", "thread 0"),
        Lane("cpu", "thread 1"),
        Lane("gpu", "stream -1", 1),
        Lane("gpu", "stream 7", 1),
        Lane("gpu", "stream 20", 1),
    ]
    assert cuda.lanes[cuda.events.lane[row(cuda, "ProfilerStep#4")]].name == "thread 0"
    assert cuda.lanes[cuda.events.lane[row(cuda, "AddmmBackward0")]].name == "thread 1"


def test_times_are_exact_and_relative_to_the_first_kept_event(cuda):
    gemm = row(cuda, "gemm")
    assert cuda.events.start_ns[gemm] == 39_501  # 40.001 us - 0.5 us
    assert cuda.events.dur_ns[gemm] == 8_128
    assert cuda.events.start_ns[row(cuda, "ProfilerStep#4")] == 0


@pytest.mark.parametrize(
    ("name", "launch", "parent"),
    [
        ("gemm", "cudaLaunchKernel", "aten::addmm"),  # not the cudaStreamIsCapturing that shares its id
        ("Context Sync", "cudaDeviceSynchronize", "ProfilerStep#4"),
        ("replayed", None, "aten::linear"),  # by external id
        ("orphan", None, None),  # ids of 0 mean none
        ("filler id", None, None),  # an external id that repeats the correlation id is no op's
    ],
)
def test_gpu_events_hang_under_what_launched_them(cuda, name, launch, parent):
    index = row(cuda, name)
    assert name_of(cuda, cuda.events.launch[index]) == launch
    assert name_of(cuda, cuda.events.parent[index]) == parent


def test_backward_ops_know_their_forward_op(cuda):
    addmm = row(cuda, "aten::addmm")  # the innermost of the two that share the number
    backward = np.flatnonzero(cuda.events.forward >= 0)
    assert cuda.events.forward[backward].tolist() == [addmm, addmm]
    assert all("AddmmBackward0" in name for name in cuda.names[backward])


def test_ops_differ_by_content_not_by_white_space(cuda):
    linear, addmm = (cuda.ops[cuda.events.op[row(cuda, name)]] for name in ("aten::linear", "aten::addmm"))
    assert linear.shapes == addmm.shapes == "[[64,512],[10,512]]"
    assert linear.types == addmm.types == '["float","float"]'
    gemm = cuda.ops[cuda.events.op[row(cuda, "gemm")]]
    assert (gemm.grid, gemm.block, gemm.shapes) == ("[104,1,1]", "[128,1,1]", "")
    ops = trace_of(
        event("a", 0, 1, **{"Input Dims": [[1, 2]]}),
        event("a", 2, 1, **{"Input Dims": [[1, 2]]}),
        event("a", 4, 1, **{"Input Dims": [[2, 1]]}),
    ).ops
    assert [op.shapes for op in ops] == ["[[1,2]]", "[[2,1]]"]


def test_rocm_tells_sizes_in_the_calls():
    trace = trace_of(
        event(
            "hipMemcpyWithStream", 0, 9, "cuda_runtime", correlation=7, stream="0x0", size="2560", kind="1"
        ),
        event("Memcpy HtoD", 3, 2, "gpu_memcpy", 2, 0, device=2, stream=0, correlation=7, kind="HtoD"),
        event(
            "hipLaunchKernel",
            10,
            2,
            "cuda_runtime",
            correlation=8,
            stream="0x0",
            grid=[3, 1, 1],
            block=[64, 1, 1],
        ),
        event("k", 13, 2, "kernel", 2, 0, device=2, stream=0, correlation=8),
    )
    copy, kernel = (trace.ops[trace.events.op[row(trace, name)]] for name in ("Memcpy HtoD", "k"))
    assert copy.bytes == 2560
    assert (kernel.grid, kernel.block) == ("[3,1,1]", "[64,1,1]")
    assert trace.ops[trace.events.op[row(trace, "hipLaunchKernel")]].grid == ""


def test_old_spellings_are_understood():
    """PyTorch 1.8 to 1.11: capital categories, steps as operators, integer microseconds, ``external id``."""
    trace = trace_of(
        event("ProfilerStep#1", 1695835542514261, 50, "Operator", **{"External id": "1"}),
        event("aten::copy_", 1695835542514262, 20, "Operator", **{"External id": "2"}),
        event("cudaMemcpyAsync", 1695835542514263, 5, "Runtime", correlation=4),
        event(
            "Memcpy HtoD", 1695835542514270, 3, "Memcpy", 0, 7, correlation=4, bytes=64, **{"external id": 2}
        ),
        event("lost", 1695835542514280, 3, "Kernel", 0, 7, correlation=5, **{"external id": 2}),
    )
    assert sorted(trace.categories) == ["cpu_op", "cuda_runtime", "gpu_memcpy", "kernel", "user_annotation"]
    assert trace.step_bounds.tolist() == [[0, 50_000]]
    assert [name_of(trace, trace.events.parent[row(trace, n)]) for n in ("Memcpy HtoD", "lost")] == [
        "aten::copy_"
    ] * 2
    assert trace.lanes[-1] == Lane("gpu", "stream 7", 0)


def test_absolute_times_with_decimals_keep_their_nanoseconds():
    """float64 is 0.25 us coarse at 1.7e15 us, so these would all fall together."""
    texts = ["1695835542514261.001", "1695835542514261.002", "1695835542514261.123", "1695835542514262"]
    body = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":{t},"dur":0.001}}' for t in texts
    )
    trace = parse(f'{{"traceEvents":[{body}]}}'.encode(), "test").trace
    assert trace.events.start_ns.tolist() == [0, 1, 122, 999]
    assert trace.events.dur_ns.tolist() == [1, 1, 1, 1]


def test_numbers_may_be_strings():
    trace = trace_of(event("a", "10.001", "2"), event("b", 11, 0.5))
    assert trace.events.start_ns.tolist() == [0, 999]
    assert trace.events.dur_ns.tolist() == [2000, 500]


def test_main_thread_holds_the_steps_though_another_is_busier():
    trace = trace_of(
        *(event(f"busy {i}", i, 1, tid=99) for i in range(5)),
        event("ProfilerStep#0", 3, 9, "user_annotation", tid=5),
        event("late", 20, 1, tid=50),
    )
    by_name = {str(n): trace.lanes[k].name for n, k in zip(trace.names, trace.events.lane, strict=True)}
    assert by_name == {
        **{f"busy {i}": "thread 1" for i in range(5)},
        "ProfilerStep#0": "thread 0",
        "late": "thread 2",
    }


def test_streams_without_small_ids_are_numbered():
    trace = trace_of(
        event("a", 0, 1, "kernel", pid=0, tid=0, device=0, stream="0x55674ecd4180"),
        event("b", 1, 1, "kernel", pid=0, tid=0, device=0, stream=94784223),
        event("c", 2, 1, "kernel", pid=0, tid=0, device=0, stream=0),
    )
    lanes = {str(n): trace.lanes[k].name for n, k in zip(trace.names, trace.events.lane, strict=True)}
    assert lanes == {"a": "stream 1", "b": "stream 2", "c": "stream 0"}


def test_equal_intervals_nest_by_kind():
    trace = trace_of(
        event("cudaLaunchKernel", 5, 2, "cuda_runtime"),
        event("aten::add", 5, 2, "cpu_op"),
        event("note", 5, 2, "user_annotation"),
    )
    assert trace.names.tolist() == ["note", "aten::add", "cudaLaunchKernel"]
    assert trace.events.parent.tolist() == [-1, 0, 1]


def test_names_are_cut_and_cleaned():
    method = "<built-in method size of Tensor object{}>"
    names = [
        "x" * 5000,
        "nul\0 and \x1b[31m",
        {"odd": 1},
        method.format(" at 0x7bc8d8"),
        method.format(" at 0x11aa"),
    ]
    trace = trace_of(*(event(name, ts, 0.5) for ts, name in enumerate(names)))
    assert [op.name for op in trace.ops] == [
        "x" * 4096,
        "nul\ufffd and \ufffd[31m",
        "{'odd': 1}",
        method.format(""),
    ]


def test_fillers_that_fit_no_int64_mean_none():
    huge = 2**64 - 1
    trace = trace_of(event("k", 0, 1, "kernel", 0, 7, correlation=huge, bytes=huge, **{"External id": None}))
    assert trace.events.launch.tolist() == trace.events.parent.tolist() == [-1]


# Links by themselves.


@st.composite
def intervals(draw):
    """Sorted events of two lanes on a coarse grid, so that equal, touching and crossing ones are common."""
    unit = st.integers(0, 12).map(lambda n: n * OVERHANG_NS // 2)
    rows = draw(st.lists(st.tuples(st.integers(0, 1), unit, unit), max_size=30))
    rows.sort(key=lambda r: (r[0], r[1], -r[2]))
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


@settings(max_examples=150, deadline=None)
@given(intervals())
def test_parent_is_the_last_enclosing_event(events):
    lane, start, dur = events
    end = start + dur

    def encloses(p: int, e: int) -> bool:
        begins_inside = start[e] < end[p] or start[e] == start[p]
        return lane[p] == lane[e] and begins_inside and end[e] <= end[p] + OVERHANG_NS

    expected = [max((p for p in range(e) if encloses(p, e)), default=-1) for e in range(len(lane))]
    assert enclosing(lane, start, dur).tolist() == expected


def test_overhang_by_rounding_is_forgiven_and_touching_is_not_nesting():
    lane, start = np.zeros(4, dtype=np.int64), np.array([0, 1_000, 5_000, 9_001])
    dur = np.array([8_000, 8_000, 4_001, 1_000])  # ends: 8, 9 (1 us over), 9.001 (too late for 0), 10.001
    assert enclosing(lane, start, dur).tolist() == [-1, 0, 1, -1]


def test_first_match_takes_the_preferred_row():
    keys = np.array([5, 7, 5, 9])
    assert first_match(np.array([5, 9, 4, -1]), keys, np.array([2, 0, 1])).tolist() == [2, -1, -1, -1]
    assert first_match(np.array([5]), keys, np.array([], dtype=np.int64)).tolist() == [-1]


def test_forward_op_is_the_latest_one_before_the_backward_op():
    #                 forward  nested  backward  later forward  other number  backward without any
    start = np.array([0, 10, 50, 60, 20, 70])
    sequence = np.array([3, 3, 3, 3, 4, 8])
    thread = np.array([0, -1, 1, 0, 0, 1])
    assert forward_ops(start, sequence, thread).tolist() == [-1, -1, 1, -1, -1, -1]
    # Clocks of two threads disagree: the only forward op seems to start after its backward op.
    assert forward_ops(np.array([9, 5]), np.array([1, 1]), np.array([0, 1])).tolist() == [-1, 0]


def test_forward_op_of_a_second_node_is_the_one_with_the_next_lower_number():
    #                 copy_  mul  backward of mul, of copy_ (CopySlices), of copy_, of what came before all
    start = np.array([10, 20, 50, 60, 70, 30])
    sequence = np.array([4, 7, 7, 5, 4, 3])
    thread = np.array([0, 0, 1, 1, 1, 1])
    assert forward_ops(start, sequence, thread).tolist() == [-1, -1, 1, 0, 0, -1]
    # An op that starts later cannot be the one, nor one whose number is far away.
    assert forward_ops(np.array([9, 5]), np.array([1, 2]), np.array([0, 1])).tolist() == [-1, -1]
    assert forward_ops(np.array([1, 5]), np.array([1, 9]), np.array([0, 1])).tolist() == [-1, -1]


# Damage.


def test_near_json_is_repaired():
    text = (
        b"\xef\xbb\xbf"
        b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"NaN \\q \xff \x01 \\ud800 ok\\n","pid":0,"tid":7,'
        b'"ts":1,"dur":2,"args":{"est. achieved occupancy %":NaN,"bandwidth (GB/s)":-Infinity,"x":nan}}]}'
    )
    (op,) = parse(text, "test").trace.ops
    assert op.name == "NaN \\q \ufffd \ufffd \ufffd ok\ufffd"


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s))
)
def test_repair_leaves_sound_json_alone(value):
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    assert repaired(text) == text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON, or cut off"),
        (b"\x00\x01", "not JSON, or cut off"),
        (b"<html>", "not JSON, or cut off"),
        (b'{"traceEvents":[{"ph":"X","cat":"cpu_op","na', "not JSON, or cut off"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply"),
        (b'{"traceEvents":[{"args":' + b"[" * 100_000, "nested too deeply"),
        (b"[]", "not a Kineto trace"),
        (b'{"traceEvents":[3]}', "not a Kineto trace"),
        (b'{"nodes":[]}', "no traceEvents"),
        (b'{"traceEvents":[]}', "none of its 0 events"),
        (json.dumps({"traceEvents": [event("a", 0, 1, "ac2g")]}).encode(), "none of its 1 events"),
    ],
)
def test_files_that_are_no_trace_are_refused(data, reason):
    with pytest.raises(UserError, match=reason) as error:
        parse(data, "some.json")
    assert str(error.value).startswith("some.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ts", "dur", "reason"),
    [
        (5, -1, "ends before it starts"),
        (5, None, "no finite duration"),
        (None, 1, "no finite start"),
        ("nan", 1, "no finite start"),
        (5, "inf", "no finite duration"),
        (5, 1e300, "outside of the range"),
        (-9e15, 1, "outside of the range"),
        ("soon", 1, r"Expected .* at `\$.traceEvents\[1\]"),
        (1e400, 1, "not"),
    ],
)
def test_bad_times_name_the_event(ts, dur, reason):
    text = json.dumps({"traceEvents": [event("fine", 0, 1), event("bad", ts, dur)]}).replace(
        "Infinity", "1e999"
    )
    with pytest.raises(UserError, match=reason) as error:
        parse(text.encode(), "some.json")
    assert "traceEvents[1]" in str(error.value)


def test_bad_arguments_name_the_event_of_the_file():
    events = [{"ph": "M", "name": "process_name"}, event("fine", 0, 1), event("bad", 1, 1, correlation=[])]
    with pytest.raises(UserError, match=r"traceEvents\[2\]\.args\.correlation"):
        parse(json.dumps({"traceEvents": events}).encode(), "some.json")


def test_unreadable_files_are_refused(tmp_path, monkeypatch):
    good = json.dumps({"traceEvents": [event("a", 0, 1)]}).encode()
    cut, garbage = tmp_path / "cut.json.gz", tmp_path / "garbage.json.gz"
    cut.write_bytes(gzip.compress(good)[:-12])
    garbage.write_bytes(b"\x1f\x8b\x08" + bytes(40))
    for path in (tmp_path, tmp_path / "missing.json", cut, garbage):
        with pytest.raises(UserError, match="cannot be read"):
            read_trace(path)

    misnamed = tmp_path / "packed.json"  # gzip is told by content, not by name
    misnamed.write_bytes(gzip.compress(good))
    assert len(read_trace(misnamed)) == 1
    monkeypatch.setattr(kineto, "MAX_UNPACKED_BYTES", len(good) - 1)
    with pytest.raises(UserError, match="bytes of JSON"):
        read_trace(misnamed)
