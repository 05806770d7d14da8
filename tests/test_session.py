"""One workload, from the model to a file of labelled traces; only the costs are made up."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny
import torch
from torch import nn

from torchtraceap.collect import loader, session, turn
from torchtraceap.collect.cores import GIVEN, Cores, confine
from torchtraceap.collect.cutting import keep_steps
from torchtraceap.collect.devices import hardware
from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.plan import Injection, Job
from torchtraceap.collect.processes import locked
from torchtraceap.collect.profiling import LEAD_IN, PROFILED_STEPS
from torchtraceap.collect.server import WAITING
from torchtraceap.collect.session import run_job
from torchtraceap.dataset.build import check
from torchtraceap.dataset.parquet import read_metadata, read_traces
from torchtraceap.dataset.schema import SESSION_KEY, TRACE_META
from torchtraceap.dataset.shards import read_session
from torchtraceap.dataset.trace import Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import Cost, conclude
from torchtraceap.labels.markers import PREFIX
from torchtraceap.labels.types import Segment

CLEAN_SECONDS = 0.010
COPY = Injection("redundant_copy", "clone")
OPTIMIZER = Injection("unfused_optimizer", "for_loop")
NEEDS_GPU = Injection("host_sync", "item")
CASTS = Injection("dtype_ping_pong", "round_trip")
SCALAR_CAST = Injection("dtype_ping_pong", "scalar_cast")


class Loop(TrainingLoop):
    """Without workers, which take a second to start and to stop; tells of what is asked of it."""

    asked: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked = []
        super().__init__(*args, **kwargs)
        loops.append(self)

    def make_loader(self, **changes: Any) -> Any:
        self.asked.append("loader")
        return super().make_loader(**changes | {"workers": 0})

    def module_calls(self) -> Any:
        self.asked.append("calls")
        return super().module_calls()


loops: list[Loop] = []
SESSIONS: list[session.Session] = []
told: list[str] = []
ratios: dict[str, float] = {}
"""Step time with a variant over that without; 1 where nothing is said."""


def made_up_cost(loop: TrainingLoop, placement: Placement, **_: Any) -> Cost:
    """What ``measure_cost`` returns when all pairs are alike; steps once in each arm, as it does."""
    for placement.armed in (True, False):
        loop.step()
    ratio = ratios.get(told[-1].removeprefix("measuring ").split("/")[1], 1.0)
    return conclude([(CLEAN_SECONDS, CLEAN_SECONDS * ratio)] * 12, 6)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ZOO.names()
    for spec in (tiny.spec(), tiny.spec(Failing, "tiny/fails")):
        monkeypatch.setitem(ZOO._entries, spec.name, spec)
    monkeypatch.setattr(session, "TrainingLoop", Loop)
    monkeypatch.setattr(session, "measure_cost", made_up_cost)
    monkeypatch.setattr(session, "WARMUP_STEPS", 1)

    class Watched(session.Session):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            SESSIONS.append(self)

    monkeypatch.setattr(session, "Session", Watched)
    for kept in (loops, told, ratios):
        kept.clear()
    yield
    torch.set_num_threads(threads)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(108, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no forward today")


def job(
    *injections: Injection, mode: Any = "train", model: str = "tiny/net", seed: int = 3, **rest: Any
) -> Job:
    arms = rest.pop("arms", [[index] for index in range(len(injections))])
    return Job(model, mode, 4, seed, list(injections), arms, **rest)


def run(one: Job, folder: Path, event_cap: int = 60_000) -> tuple[dict[str, Any], list[TraceRecord]]:
    """The summary, and the records of the shard, each checked as ``build`` does."""
    out = folder / "shard.parquet"
    summary = run_job(one, out, device="cpu", event_cap=event_cap, progress=told.append)
    records = list(read_traces(out))
    for record in records:
        check(record, "the shard")
    return summary, records


def of(records: list[TraceRecord], *patterns: str) -> TraceRecord:
    """The trace that holds exactly these injected patterns."""
    (found,) = [
        record
        for record in records
        if [i.pattern for i in record.instances if i.source == "injected"] == list(patterns)
    ]
    return found


def told_of(folder: Path) -> dict[str, Any]:
    return json.loads(read_metadata(folder / "shard.parquet")[SESSION_KEY])


def test_traces_of_a_workload(tmp_path: Path) -> None:
    ratios["clone"] = 1.2
    summary, records = run(job(COPY, OPTIMIZER), tmp_path)
    clean, copy, optimizer = of(records), of(records, COPY.pattern), of(records, OPTIMIZER.pattern)
    assert len(records) == 3
    assert summary == {
        "traces": 3,
        "files": 1,
        "events": sum(len(record.trace) for record in records),
        "segments": len(copy.segments) + len(optimizer.segments),
        "states": ["redundant_copy/clone: costly", "unfused_optimizer/for_loop: benign"],
        "skipped": [],
        "marked": False,
        "natives": [],
    }
    assert (clean.quality, copy.quality, optimizer.quality) == ("good", "bad", "good")
    assert clean.segments == []
    for record in records:
        assert set(record.meta) == set(TRACE_META.names)
        assert record.meta["quality"] == record.quality
        assert record.meta["split_unit"] == ""
        assert record.meta["hardware_id"] == hardware(torch.device("cpu"))["hardware_id"]
        assert (record.meta["task"], record.meta["mode"]) == ("classification", "train")
        assert (record.meta["precision"], record.meta["input_shape"]) == ("fp32", "3x6x6")
        assert (record.meta["batch_size"], record.meta["steps"]) == (4, 3)
        assert len(record.trace.step_bounds) == 3
        assert "host_sync" in record.exhaustive  # nothing can wait for a GPU here
    assert len({record.meta["pair_id"] for record in records}) == 1
    ids = [record.trace_id for record in records]
    assert ids == sorted(set(ids))  # random, so that nothing is left of the order of profiling


def test_instances_and_segments(tmp_path: Path) -> None:
    ratios["clone"] = 1.2
    _, records = run(job(COPY, OPTIMIZER), tmp_path)
    for pattern in (COPY.pattern, OPTIMIZER.pattern):
        record = of(records, pattern)
        (instance,) = record.instances
        assert instance.cost_ratio == pytest.approx(1.2 if pattern == COPY.pattern else 1.0)
        steps = {segment.step for segment in record.segments}
        assert instance.every_step == (len(steps) == PROFILED_STEPS)
        acting = len(steps) / PROFILED_STEPS
        expected = CLEAN_SECONDS * 1e3 + instance.cost_ms * acting
        assert record.meta["step_ms"] == pytest.approx(expected, rel=1e-5)
        assert {segment.instance for segment in record.segments} == {0}
    copies = of(records, COPY.pattern)
    firsts = [copies.trace.names[s.first_event] for s in copies.segments]
    sites, acting = copies.instances[0].sites, len({s.step for s in copies.segments})
    assert firsts.count("aten::clone") == sites * acting
    assert any("CloneBackward0" in name for name in firsts)
    updates = of(records, OPTIMIZER.pattern)
    names = {updates.trace.names[s.first_event] for s in updates.segments}
    assert names == {"Optimizer.step#AdamW.step"}


def test_what_the_file_says_of_its_making(tmp_path: Path) -> None:
    one = job(COPY, NEEDS_GPU, lookalikes=[SCALAR_CAST])
    _, records = run(one, tmp_path)
    session_ = told_of(tmp_path)
    assert session_["job"] == msgspec.to_builtins(one)
    assert session_["hardware"] == hardware(torch.device("cpu"))
    assert session_["skipped"] == ["host_sync/item: host_sync needs a GPU"]
    assert session_["event_cap"] == 60_000
    assert session_["unpaired"] == []
    assert session_["timed_cores"] is None
    assert session_["block_steps"] >= 1
    injected = [r for r in records if any(i.source == "injected" for i in r.instances)]
    assert session_["differences"] == [
        {"trace_id": record.trace_id, "extra": 0, "missing": 0, "names": {}} for record in injected
    ]
    instances = {(row["trace_id"], row["instance"]): row for row in session_["instances"]}
    assert set(instances) == {(r.trace_id, i) for r in records for i in range(len(r.instances))}
    for record in records:
        for i, instance in enumerate(record.instances):
            row = instances[record.trace_id, i]
            assert row["ratio"] == pytest.approx(instance.cost_ratio)
            assert len(row["pairs"]) == 12


def test_costs_are_measured_before_the_first_profile(tmp_path: Path) -> None:
    run(job(COPY, OPTIMIZER, lookalikes=[SCALAR_CAST]), tmp_path)
    kinds = [text.split()[0] for text in told]
    profiles = ["profiling"] * (3 + 3)  # without markers and with them
    before = ["building", "placing", "surveying", "warming"] + ["measuring"] * (1 + 3)
    assert kinds == before + profiles + ["reading", "labelling"]


def test_a_lookalike_appears_in_some_traces_and_is_never_costly(tmp_path: Path) -> None:
    seen = []
    for seed, (ratio, state) in enumerate([(1.0, "benign"), (1.5, "undecided")] * 2):
        ratios["scalar_cast"] = ratio
        _, records = run(job(COPY, lookalikes=[SCALAR_CAST], seed=seed, mode="infer"), tmp_path)
        for record in records:
            twins = [i for i, one in enumerate(record.instances) if one.source == "lookalike"]
            seen.append(bool(twins))
            for i in twins:
                assert record.instances[i].state == state
                assert any(segment.instance == i for segment in record.segments)
    assert set(seen) == {True, False}


def test_a_lookalike_that_would_hide_a_pattern_stays_out(tmp_path: Path) -> None:
    stall = Injection("dataloader_stall", "main_process")
    summary, records = run(job(stall, lookalikes=[Injection("dataloader_stall", "views")]), tmp_path)
    assert summary["skipped"] == [
        "dataloader_stall/views: would stand in for the stage that another pattern stands in for"
    ]
    assert all(one.source == "injected" for record in records for one in record.instances)


def test_spares_stand_in_for_what_finds_no_place(tmp_path: Path) -> None:
    summary, records = run(job(NEEDS_GPU, COPY, spares=[CASTS, OPTIMIZER]), tmp_path)
    assert [state.split(":")[0] for state in summary["states"]] == [
        "dtype_ping_pong/round_trip", "redundant_copy/clone",
    ]  # fmt: skip
    assert len(records) == 3
    assert summary["skipped"] == ["host_sync/item: host_sync needs a GPU"]


def test_a_plan_that_cannot_be_met(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny/net: nothing can be injected") as raised:
        run(job(NEEDS_GPU, OPTIMIZER, mode="infer"), tmp_path)
    assert "host_sync needs a GPU" in str(raised.value)
    assert "unfused_optimizer occurs only in train" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_clean_workload(tmp_path: Path) -> None:
    summary, (record,) = run(job(mode="infer"), tmp_path)
    assert summary["states"] == []
    assert record.quality == "good"
    assert record.meta["step_ms"] > 0
    assert record.meta["profiler_ratio"] > 0


def test_a_failing_model_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no forward today"):
        run(job(COPY, model="tiny/fails"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_cap_keeps_a_step_in_which_the_pattern_acts(tmp_path: Path, seed: int) -> None:
    _, records = run(job(COPY, seed=seed), tmp_path, event_cap=1)
    for record in records:
        assert record.meta["steps"] == len(record.trace.step_bounds) == 1
        assert {segment.step for segment in record.segments} <= {0}
        assert "ProfilerStep#0" in record.trace.names
    assert of(records, COPY.pattern).segments
    assert told_of(tmp_path)["event_cap"] == 1


def test_equal_seeds_place_alike(tmp_path: Path) -> None:
    def places(seed: int) -> list[tuple[int, int]]:
        _, records = run(job(COPY, seed=seed, mode="infer"), tmp_path)
        copies = of(records, COPY.pattern)
        return [(segment.step, segment.first_event) for segment in copies.segments]

    assert places(5) == places(5)
    assert places(5) != places(6)


def test_loaders_with_workers_are_made_before_the_model_computes(tmp_path: Path) -> None:
    run(job(COPY, lookalikes=[Injection("dataloader_stall", "light_workers")]), tmp_path)
    (loop,) = loops
    assert loop.asked[:3] == ["loader", "loader", "calls"]  # its own, the look-alike's, the places for copies


def test_no_annotation_of_ours_is_left(tmp_path: Path) -> None:
    _, records = run(job(COPY, CASTS, lookalikes=[SCALAR_CAST]), tmp_path)
    annotations = {
        op.name for r in records for op in r.trace.ops if op.category not in ("cpu_op", "cuda_runtime")
    }
    numbered = {f"ProfilerStep#{i}" for i in range(PROFILED_STEPS)}
    assert {
        name for name in annotations if not name.startswith(("Optimizer.", "enumerate(DataLoader)"))
    } == numbered


Taken = list[tuple[bool, list[str], Trace]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Of each profile of a session whether it has markers, what acts, and the trace as read."""
    found: Taken = []

    record, read = session.profiling.record_steps, session.profiling.Recording.read
    acting: dict[session.profiling.Recording, tuple[bool, list[str]]] = {}

    def watched(loop: TrainingLoop, settle: int, **options: Any) -> session.profiling.Recording:
        recording, marking = record(loop, settle, **options), options["marking"]
        acting[recording] = marking, [one.name for one in SESSIONS[-1].injections.all if one.placement.armed]
        return recording

    def kept(recording: session.profiling.Recording) -> Trace:
        found.append((*acting[recording], read(recording)))
        return found[-1][2]

    monkeypatch.setattr(session.profiling, "record_steps", watched)
    monkeypatch.setattr(session.profiling.Recording, "read", kept)
    return found


def source_of(record: TraceRecord, taken: Taken) -> tuple[bool, list[str], Trace]:
    """The profile that a published trace was cut from."""
    durations = record.trace.events.dur_ns
    (found,) = [
        one
        for one in taken
        if np.array_equal(keep_steps(strip(one[2]), [], LEAD_IN, PROFILED_STEPS)[0].events.dur_ns, durations)
    ]
    return found


def labelled_names(trace: Trace, segments: list[Segment]) -> list[tuple[Any, ...]]:
    """What the segments hold, without times and positions."""
    return [
        (s.instance, s.lane, s.step, *trace.names[s.first_event : s.first_event + s.event_count].tolist())
        for s in segments
    ]


def test_published_traces_never_had_a_marker(tmp_path: Path, taken: Taken) -> None:
    _, records = run(job(COPY, OPTIMIZER, lookalikes=[SCALAR_CAST], seed=7), tmp_path)
    assert [marking for marking, _, _ in taken] == [False] * 3 + [True] * 3
    for record in records:
        marking, acting, raw = source_of(record, taken)
        assert not marking
        assert not any(op.name.startswith(PREFIX) for op in raw.ops)
        (profile,) = [trace for marking, what, trace in taken if marking and what == acting]
        assert any(op.name.startswith(PREFIX) for op in profile.ops)
        placed = {one.name: one for one in SESSIONS[-1].injections.all}
        order = [f"{one.pattern}/{one.variant}" for one in record.instances]
        armed = {
            placed[name].placement.index: Armed(order.index(name), placed[name].pattern.mechanism)
            for name in acting
        }
        marked = keep_steps(*label(profile, SESSIONS[-1].secret, armed), LEAD_IN, PROFILED_STEPS)
        assert labelled_names(record.trace, record.segments) == labelled_names(*marked)
        assert bool(record.segments) == bool(acting)


def test_marked_profiles_stand_in_for_all_if_those_of_one_arm_differ(
    tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session.carried

    def differs(marked: Trace, secret: str, armed: dict[int, Armed], *rest: Any) -> Any:
        return None if armed else real(marked, secret, armed, *rest)

    monkeypatch.setattr(session, "carried", differs)
    summary, records = run(job(COPY, OPTIMIZER), tmp_path)
    assert summary["marked"]
    assert told_of(tmp_path)["marked"]
    assert [marking for marking, _, _ in taken] == [False] * 3 + [True] * (3 + session.ATTEMPTS - 1 + 3)
    for record in records:
        assert source_of(record, taken[-3:])[0]  # taken alone, as the others before them were not
        assert bool(record.segments) == bool(record.instances)


def test_what_is_timed_has_the_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[bool, str]] = []

    def watched(path: Path, *, shared: bool = False) -> AbstractContextManager[None]:
        held.append((shared, ""))
        return locked(path, shared=shared)

    def progress(text: str) -> None:
        told.append(text)
        if held and not held[-1][1] and text != WAITING:
            held[-1] = held[-1][0], text

    monkeypatch.setattr(turn, "locked", watched)
    out = tmp_path / "a.parquet"
    run_job(job(COPY), out, device="cpu", event_cap=10**6, progress=progress, gate=tmp_path / "lock")
    assert [(shared, text.split()[0], "with markers" in text) for shared, text in held] == [
        (True, "placing", False),
        (False, "measuring", False),
        (False, "profiling", False),
        (False, "profiling", False),
        (True, "profiling", True),
        (True, "profiling", True),
    ]


@pytest.mark.skipif(len(GIVEN) < 2 or sys.platform != "linux", reason="needs two CPUs, on Linux")
def test_what_is_timed_has_cores_of_its_own(tmp_path: Path) -> None:
    timed, other = sorted(GIVEN)[:2]
    found: dict[str, set[int]] = {}

    def progress(text: str) -> None:
        told.append(text)
        if text != WAITING:
            found[f"{text.split()[0]}{' with markers' if 'with markers' in text else ''}"] = (
                os.sched_getaffinity(0)
            )

    try:
        run_job(
            job(COPY),
            tmp_path / "shard.parquet",
            device="cpu",
            event_cap=10**6,
            progress=progress,
            gate=tmp_path / "lock",
            cores=Cores([timed], [other]),
        )
        assert os.sched_getaffinity(0) == {other}
    finally:
        confine(sorted(GIVEN))
    del found["building"]  # said before the turn is there
    assert found == {
        "placing": {other},
        "surveying": {other},
        "warming": {other},
        "measuring": {timed},
        "profiling": {timed},
        "profiling with markers": {other},
        "reading": {other},
        "labelling": {other},
    }
    session_ = told_of(tmp_path)
    assert session_["timed_cores"] == 1
    assert session_["hardware"] == hardware(torch.device("cpu"))  # what the machine has, not the session
    assert read_session(tmp_path / "shard.parquet").hardware == session_["hardware"]


def test_ranks_use_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(session, "_run", lambda *_, **options: asked.append(options) or {})
    monkeypatch.setattr(
        session, "run_ranks", lambda size, main: [main(n, tmp_path) for n in range(size)].pop()
    )
    cores = Cores([0], [1])
    for one in (job(COPY), job(COPY, runtime="distributed", world_size=2)):
        run_job(one, tmp_path / "a.parquet", device="cpu", event_cap=10**6, progress=told.append, cores=cores)
    assert asked == [{"cores": cores}, {}, {}]


def test_a_profile_that_differs_by_chance_is_taken_again(
    tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = session.carried, []

    def differs_once(marked: Trace, *rest: Any) -> Any:
        asked.append(marked)
        return None if len(asked) == 2 else real(marked, *rest)

    monkeypatch.setattr(session, "carried", differs_once)
    summary, records = run(job(COPY), tmp_path)
    assert not summary["marked"]
    assert [marking for marking, _, _ in taken] == [False] * 2 + [True] * 3
    assert not any(source_of(record, taken)[0] for record in records)
    assert of(records, COPY.pattern).segments


def test_two_patterns_share_a_trace(tmp_path: Path) -> None:
    ratios.update(clone=1.2, round_trip=1.1)
    seen: list[set[str]] = []

    def watched(loop: TrainingLoop, placement: Placement, **rest: Any) -> Cost:
        on = [one for one in SESSIONS[-1].injections.all if one.placement.armed]
        seen.append({one.name for one in on})
        return made_up_cost(loop, placement, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "measure_cost", watched)
        _, records = run(job(COPY, CASTS, OPTIMIZER, arms=[[0, 1], [2]]), tmp_path)
    assert seen == [{"dtype_ping_pong/round_trip"}, {"redundant_copy/clone"}, set()]  # all but the one
    assert len(records) == 3
    both = of(records, COPY.pattern, CASTS.pattern)
    assert {segment.instance for segment in both.segments} == {0, 1}
    assert both.quality == "bad"
    clones = [s for s in both.segments if both.trace.names[s.first_event] == "aten::clone"]
    assert {segment.instance for segment in clones} == {0}


def test_patterns_that_replace_one_stage_do_not_share_a_trace(tmp_path: Path) -> None:
    stalls = [Injection("dataloader_stall", name) for name in ("main_process", "starved_worker")]
    summary, records = run(job(*stalls, COPY, arms=[[0, 1, 2]]), tmp_path)
    assert summary["skipped"] == []
    found = [sorted(i.pattern for i in record.instances) for record in records]
    assert sorted(found) == [[], ["dataloader_stall"], ["dataloader_stall", COPY.pattern]]


def test_the_device_is_waited_for_and_given_back(tmp_path: Path) -> None:
    gate = tmp_path / "device.lock"
    with gate.open("wb") as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        running = pool.submit(
            run_job,
            job(COPY),
            tmp_path / "shard.parquet",
            device="cpu",
            event_cap=60_000,
            progress=told.append,
            gate=gate,
        )
        with pytest.raises(TimeoutError):
            running.result(timeout=1)
        assert told == ["building", "waiting for the device"]
        fcntl.flock(held, fcntl.LOCK_UN)
        running.result()
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert told[2] == "placing"


def test_workers_that_live_on_do_not_keep_the_device(tmp_path: Path) -> None:
    gate = tmp_path / "device.lock"
    with locked(gate):
        batches = loader.endless([torch.zeros(2)], workers=1, pin=False)  # forked: they hold the file open
    try:
        with gate.open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        loader.close(batches)


def test_null_trials_are_told(tmp_path: Path) -> None:
    run(job(mode="infer", null_trials=2), tmp_path)
    trials = told_of(tmp_path)["null_trials"]
    assert len(trials) == 2
    assert all(trial["low"] <= trial["high"] for trial in trials)
