"""Labels of small profiles recorded on a GPU, markers included (tests/data/h200)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from torchtraceap.collect.labelling import Armed, label
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.markers import PREFIX
from torchtraceap.labels.types import Segment

DATA = Path(__file__).parent / "data" / "h200"


def labelled(name: str, backward: bool, armed: int | None) -> tuple[Trace, list[Segment]]:
    """The trace called ``name`` without its markers, and the segments of the placement that was armed."""
    raw = read_trace(DATA / f"{name}.json.gz")
    marker = next(op.name for op in raw.ops if op.name.startswith(PREFIX))
    secret = marker.removeprefix(PREFIX).split("/")[0]
    placements = {} if armed is None else {armed: Armed(0, "marker+backward" if backward else "marker")}
    trace, segments = label(raw, secret, placements)
    trace.check(name)
    return trace, segments


def names(trace: Trace, segment: Segment) -> list[str]:
    return trace.names[segment.first_event : segment.first_event + segment.event_count].tolist()


HOUSEKEEPING = ("cudaEventQuery", "cudaPointerGetAttributes")
"""Calls of the thread that pins batches, as often as it happens to look."""


def unlabelled(trace: Trace, segments: list[Segment]) -> Counter[str]:
    """How often each op, call and kernel occurs in the steps outside of all segments."""
    rest = (trace.step >= 0) & (trace.categories != "overhead") & ~np.isin(trace.names, HOUSEKEEPING)
    for segment in segments:
        rest[segment.first_event : segment.first_event + segment.event_count] = False
    return Counter(trace.names[rest].tolist())


@pytest.mark.parametrize(
    ("name", "clean", "backward", "armed"),
    [
        ("dtype_ping_pong_train", "dtype_ping_pong_train_clean", True, 0),
        ("host_sync_infer", "infer_clean", False, 1),
    ],
)
def test_without_its_segments_a_trace_is_the_clean_one(name, clean, backward, armed):
    trace, segments = labelled(name, backward, armed)
    twin, none = labelled(clean, backward, None)
    assert none == []
    assert unlabelled(trace, segments) == unlabelled(twin, [])


def test_backward_of_injected_casts_is_found_on_the_thread_of_autograd():
    trace, segments = labelled("dtype_ping_pong_train", True, 0)
    main = int(trace.events.lane[np.flatnonzero(np.char.startswith(trace.names.astype(str), "Profiler"))[0]])
    by_place = Counter(
        (s.lane_class, "main" if s.lane == main else "other", s.step)
        for s in segments
        if s.lane_class == "cpu"
    )
    # Two sites in all three steps: one behind a layer, and one on the image, which needs no gradient.
    places = [("cpu", "main", 2), ("cpu", "other", 1)]
    assert by_place == {(kind, who, step): count for kind, who, count in places for step in range(3)}
    grads = [names(trace, s) for s in segments if s.lane_class == "cpu" and s.lane != main]
    assert all("ToCopyBackward0" in found for found in grads)
    kernels = sum(s.event_count for s in segments if s.lane_class == "gpu")
    assert kernels == 3 * (2 + 4)  # steps, two casts forward, and two forward and two backward


def test_a_blocking_copy_holds_its_wait_and_its_gpu_work():
    trace, segments = labelled("pageable_h2d_infer", False, 0)
    assert Counter((s.lane_class, s.step) for s in segments) == {
        (lane, step): 1 for lane in ("cpu", "gpu") for step in range(3)
    }
    for segment in segments:
        if segment.lane_class == "cpu":
            assert "cudaStreamSynchronize" in names(trace, segment)
        else:
            assert set(names(trace, segment)) == {"Memcpy HtoD (Pageable -> Device)"}


def test_host_sync_acts_in_some_steps_only():
    trace, segments = labelled("host_sync_infer", False, 1)
    steps = {segment.step for segment in segments}
    assert steps
    assert steps < {0, 1, 2}
    gpu = [names(trace, s) for s in segments if s.lane_class == "gpu"]
    assert all(any("DtoH" in name for name in found) for found in gpu)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda path: path.name)
def test_every_gpu_event_has_its_launch_in_the_step_that_it_belongs_to(path):
    trace, _ = labelled(path.name.removesuffix(".json.gz"), True, _armed(path))
    gpu = np.flatnonzero(trace.on_gpu)
    launch = trace.events.launch[gpu]
    assert (launch >= 0).all()
    assert (trace.events.start_ns[gpu] >= trace.events.start_ns[launch]).all()
    assert np.array_equal(trace.step[gpu], trace.step[launch])


def _armed(path: Path) -> int | None:
    return None if "clean" in path.name else int(path.name.startswith("host_sync"))
