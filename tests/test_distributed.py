"""Workloads of several ranks, on the CPU: results, labels, and what happens when a rank fails.

Everything runs once, in a process of its own (tests/ranks.py), as ranks are forked from one that has not
computed.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchtraceap.collect.distributed import World, _Outcome, _why
from torchtraceap.dataset.build import check
from torchtraceap.dataset.parquet import read_traces
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.labels.pattern import PATTERNS, Pattern, Variant

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed"),
    pytest.mark.timeout(900),  # two ranks on a core that others want too
]

SEARCH = "find_unused_parameters"
DISTRIBUTED = [pattern for pattern in PATTERNS if pattern.runtime == "distributed"]
CASES = [
    pytest.param(pattern, variant, id=f"{pattern.id}-{variant.name}")
    for pattern in DISTRIBUTED
    for variant in (*pattern.variants, *pattern.lookalikes)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the outcome lies; one for all processes of a test run, the first of which brings it about."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "outcome.json").exists():
            run_ranks(folder)
    return folder


def run_ranks(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder / "outcome.json").write_text(done.stdout, encoding="utf-8")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "outcome.json").read_text(encoding="utf-8"))


def test_ranks_average_their_gradients(outcome: dict[str, Any]) -> None:
    first, _ = outcome["ranks"]
    assert first["by_hand"] == ""


@pytest.mark.parametrize(("pattern", "variant"), CASES)
def test_results_are_those_of_the_clean_loop(
    outcome: dict[str, Any], pattern: Pattern, variant: Variant
) -> None:
    for rank in outcome["ranks"]:
        seen = rank[f"{pattern.id}/{variant.name}"]
        assert seen["on_and_off"] == ""
        if pattern.id != "missing_no_sync" or variant in pattern.lookalikes:
            assert seen["off_and_clean"] == ""


@pytest.mark.parametrize(("pattern", "variant"), CASES)
def test_what_is_off_leaves_no_event(outcome: dict[str, Any], pattern: Pattern, variant: Variant) -> None:
    if pattern.id == "missing_no_sync" and variant in pattern.variants:
        pytest.skip("accumulates over micro-batches where it is off")
    first, _ = outcome["ranks"]
    assert first[f"{pattern.id}/{variant.name}"]["off"] == first["clean"]


@pytest.mark.parametrize("pattern", DISTRIBUTED, ids=lambda pattern: pattern.id)
def test_variants_differ_in_what_a_profiler_sees(outcome: dict[str, Any], pattern: Pattern) -> None:
    first, _ = outcome["ranks"]
    seen = []
    for variant in pattern.variants:
        events = first[f"{pattern.id}/{variant.name}"]
        assert events["on"] != events["off"]
        assert events["on"] not in seen
        seen.append(events["on"])


def reductions(outcome: dict[str, Any], name: str, arm: str) -> int:
    return outcome["ranks"][0][name][arm]["c10d::allreduce_"]


def test_numbers_of_reductions(outcome: dict[str, Any]) -> None:
    parameters, buckets = 9, 1  # of the model; all of it fits into a default bucket once order is known
    assert outcome["ranks"][0]["clean"]["c10d::allreduce_"] == buckets
    assert reductions(outcome, "tiny_buckets/per_parameter", "on") == parameters
    assert reductions(outcome, "unoverlapped_allreduce/per_tensor", "on") == parameters
    assert reductions(outcome, "unoverlapped_allreduce/flattened", "on") == 1
    assert reductions(outcome, "find_unused_parameters/flag", "on") == buckets + 1  # the map
    for name, micro_batches in (("two", 2), ("four", 4), ("bucket_view", 2)):
        assert reductions(outcome, f"missing_no_sync/{name}", "on") == micro_batches * buckets
        assert reductions(outcome, f"missing_no_sync/{name}", "off") == buckets


def test_ranks_agree_on_what_they_measure(outcome: dict[str, Any]) -> None:
    first, second = outcome["ranks"]
    assert first["seconds"] == second["seconds"]
    assert min(first["seconds"]) >= 0.02  # the second rank sleeps so long in each step
    assert first["world"] == second["world"] == [5, 6.0, "from 0"]


def test_one_process_agrees_with_itself() -> None:
    world = World()
    assert (world.largest(2.5), world.smallest(3), world.agreed("x"), world.gathered([1, 2])) == (
        2.5, 3, "x", [1, 2],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("refuse", "UserError: not here"),
        ("fail", "RuntimeError: rank 1: TypeError: no such thing"),
        ("exhaust", "OutOfMemoryError: tried to allocate 9 GiB"),
        ("die", "RuntimeError: rank 1: killed by SIGKILL"),
        (
            "unused",
            "UserError: tiny/net: 2 parameters get no gradient (spare.weight ...), which "
            "DistributedDataParallel refuses; choose another model",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_others(outcome: dict[str, Any], what: str, says: str) -> None:
    told = outcome["errors"][what]
    # Rank 0 may have had the time to say that its connection is gone.
    assert told.split("; rank 0: ")[0] == says


def test_the_rank_that_began_it_is_told_whichever_ends_first() -> None:
    gone = _Outcome(error="RuntimeError: Connection reset by peer", at=2.0)
    assert _why({0: gone}, [1, -signal.SIGKILL, -signal.SIGTERM]) == (
        "rank 1: killed by SIGKILL; rank 0: RuntimeError: Connection reset by peer"
    )
    assert _why({0: gone, 1: _Outcome(error="TypeError: no", at=1.0)}, [1, 1]) == "rank 1: TypeError: no"
    assert _why({0: _Outcome(result={})}, [0, 3]) == ""


def test_ranks_wait_for_the_one_that_waits_for_the_device(outcome: dict[str, Any]) -> None:
    assert outcome["late"] == "none"


# -- whole sessions -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(outcome: dict[str, Any], folder: Path) -> list[list[TraceRecord]]:
    return [list(read_traces(folder / f"{i}.parquet")) for i in range(len(outcome["sessions"]))]


def test_each_rank_has_a_trace_of_each_arm(shards: list[list[TraceRecord]]) -> None:
    arms = [
        [(), ("tiny_buckets",), ("unoverlapped_allreduce", "barrier_every_step"), (SEARCH,)],
        [(), ("missing_no_sync",)],
    ]
    for shard, expected in zip(shards, arms, strict=True):
        assert len({record.meta["pair_id"] for record in shard}) == 1
        seen = Counter()
        for record in shard:
            check(record, "the shard")
            seen[record.meta["rank"], tuple(one.pattern for one in record.instances)] += 1
        assert seen == {(rank, arm): 1 for rank in range(2) for arm in expected}
        assert {record.meta["world_size"] for record in shard} == {2}
    assert len({record.trace_id for shard in shards for record in shard}) == 12


def test_ranks_say_the_same_of_an_arm(shards: list[list[TraceRecord]]) -> None:
    for shard in shards:
        by_arm: dict[tuple[str, ...], list[Any]] = {}
        for record in shard:
            by_arm.setdefault(tuple(one.pattern for one in record.instances), []).append(record.instances)
        assert all(first == second for first, second in by_arm.values())


def names(record: TraceRecord, pattern: str, lane: str = "thread 0") -> Counter[str]:
    """Names of the events that belong to a pattern, on one lane, in one step in which it acts."""
    (index,) = [i for i, one in enumerate(record.instances) if one.pattern == pattern]
    segments = [
        segment
        for segment in record.segments
        if segment.instance == index and record.trace.lanes[segment.lane].name == lane
    ]
    assert segments
    rows = np.concatenate(
        [
            np.arange(s.first_event, s.first_event + s.event_count)
            for s in segments
            if s.step == segments[0].step
        ]
    )
    return Counter(record.trace.names[rows].tolist())


def of(shard: list[TraceRecord], pattern: str) -> list[TraceRecord]:
    return [record for record in shard if any(one.pattern == pattern for one in record.instances)]


def test_labels_are_what_was_changed(shards: list[list[TraceRecord]]) -> None:
    first, second = shards
    for record in of(first, "tiny_buckets"):
        assert names(record, "tiny_buckets") == {"c10d::allreduce_": 3}
    for record in of(first, "barrier_every_step"):
        barrier = names(record, "barrier_every_step")
        assert barrier["c10d::barrier"] == barrier["aten::empty"] >= 1
        assert set(barrier) == {"c10d::barrier", "aten::empty"}
        reduced = names(record, "unoverlapped_allreduce")
        assert reduced["c10d::allreduce_"] == reduced["aten::div_"] == 9
    for record in of(first, "find_unused_parameters"):
        found = names(record, "find_unused_parameters")
        assert found["torch.distributed.ddp.reducer::search_unused_parameters"] == 1
        assert found["aten::select"] == 18  # the map is written and read for each parameter
        assert "c10d::allreduce_" not in found
    for record in of(second, "missing_no_sync"):
        reducing = names(record, "missing_no_sync")
        assert reducing["c10d::allreduce_"] == 1  # of two, one is needed
        copies = "torch::distributed::reducer::mul_out", "torch.distributed.ddp.reducer::copy_bucket_to_grad"
        assert [reducing[name] for name in copies] == [9, 9]  # a parameter each, into buckets and back
        all_of_them = Counter(record.trace.names.tolist())["c10d::allreduce_"]
        assert all_of_them > record.meta["steps"]


def test_one_change_of_all_steps_leaves_no_room_for_another(outcome: dict[str, Any]) -> None:
    first, second = outcome["sessions"]
    assert first["skipped"] == [
        "missing_no_sync/two: would stand in for the stage that another pattern stands in for"
    ]
    assert second["skipped"] == []
