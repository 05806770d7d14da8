"""What `traceap quality` says of runs whose labels are made up."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from traces import random_record

from torchtraceap.cli import main
from torchtraceap.dataset.parquet import write_traces
from torchtraceap.dataset.quality import exact_interval, measure_quality, regime
from torchtraceap.dataset.schema import SESSION_KEY
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS

BUSY, IDLE = 0.9, 0.2
NUMBERS = itertools.count()
PAGEABLE = PATTERNS["pageable_h2d"].variants[0].name


def record(workload: str, busy: float, *instances: dict[str, Any]) -> TraceRecord:
    """A trace with its look-alike of redundant_copy, and injected copies of what ``instances`` change."""
    one = random_record(2, state="costly", gpu=not math.isnan(busy))
    injected, lookalike = one.instances
    lookalike = msgspec.structs.replace(lookalike, variant="views")
    segments = [s for s in one.segments if s.instance == 1]
    one.instances = [lookalike, *(msgspec.structs.replace(injected, **changes) for changes in instances)]
    one.segments = [msgspec.structs.replace(s, instance=0) for s in segments]
    one.meta |= {
        "trace_id": f"{next(NUMBERS):016x}", "pair_id": workload, "model": workload, "gpu_busy": busy,
        "profiler_ratio": 1.5,
    }  # fmt: skip
    return one


def shard(
    run: Path,
    name: str,
    records: list[TraceRecord],
    p: float = 1e-6,
    nulls: int = 0,
    costly_nulls: int = 0,
    unpaired: tuple[str, ...] = (),
) -> None:
    look = {"pairs": 8, "p_costly": 0.5, "p_benign": 0.5}
    session = {
        "hardware": {},
        "instances": [
            {"trace_id": r.trace_id, "instance": i, "p_costly": p}
            for r in records
            for i in range(len(r.instances))
        ],
        "differences": [
            {"trace_id": r.trace_id, "extra": 2 * i, "missing": 1, "names": {"aten::add": -1, "mul": 2 * i}}
            for i, r in enumerate(records)
            if len(r.instances) > 1
        ],
        "null_trials": [
            look | {"low": 0.02 if i < costly_nulls else -0.02, "high": 0.03 if i < costly_nulls else 0.0}
            for i in range(nulls)
        ],
        "unpaired": list(unpaired),
    }
    write_traces(run / "shards" / f"{name}.parquet", records, {SESSION_KEY: json.dumps(session)})


@pytest.fixture
def run(tmp_path) -> Path:
    """Two GPU-busy workloads, one launch-bound and one without a GPU."""
    variants = PATTERNS["host_sync"].variants
    heldout = next(v.name for v in variants if v.heldout)
    other = next(v.name for v in variants if not v.heldout and v.name != "item")
    a = [
        record("a", BUSY),
        record("a", IDLE, {"cost_ratio": 1.25, "variant": "item"}),  # the clean trace alone decides
        record("a", BUSY, {"cost_ratio": 1.0, "state": "benign", "variant": other}),
    ]
    b = [record("b", BUSY), record("b", BUSY, {"cost_ratio": 1.5, "variant": "item"})]
    c = [
        record("c", IDLE),
        record("c", BUSY, {"cost_ratio": 1.125, "variant": heldout, "state": "undecided"}),
    ]
    d = [record("d", math.nan)]
    shard(tmp_path / "run", "a", a, nulls=3, costly_nulls=1)
    shard(tmp_path / "run", "b", b, nulls=1)
    shard(tmp_path / "run", "c", c, p=0.4, nulls=2)
    shard(tmp_path / "run", "d", d)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("busy", "ratio", "name"),
    [
        (0.8, 1.0, "GPU-busy"),
        (0.79, 1.0, "launch-bound"),
        (0.5, 1.7, "GPU-busy"),
        (0.0, 3.0, "launch-bound"),
        (math.nan, 1.2, "CPU"),
    ],
)
def test_regimes(busy, ratio, name):
    assert regime(busy, ratio) == name


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 400, 0.0, 0.00918), (2, 400, 0.00061, 0.01794), (10, 10, 0.69150, 1.0)],
)
def test_exact_intervals(successes, trials, low, high):
    assert exact_interval(successes, trials) == pytest.approx((low, high), abs=1e-5)


def test_patterns_lookalikes_and_null_trials_by_regime(run):
    found = measure_quality([run])
    assert (found.traces, found.tests, found.demoted, found.violations) == (8, 4, 0, [])
    busy, bound = found.patterns
    assert (busy.regime, busy.pattern, busy.models, busy.heldout) == ("GPU-busy", "host_sync", 2, 0)
    assert (busy.instances, busy.costly, busy.benign, busy.undecided) == (3, 2, 1, 0)
    assert (busy.ratio_of_costly, busy.ratio, busy.profiler_ratio) == (1.375, 1.25, 1.5)
    assert (busy.violations, busy.extra, busy.missing) == (0, 2.0, 1.0)
    assert busy.differ == {"mul": 8, "aten::add": -3}
    assert (bound.regime, bound.undecided, bound.heldout, bound.models) == ("launch-bound", 1, 1, 1)
    assert math.isnan(bound.ratio_of_costly)
    # A look-alike is in all traces of a workload, and counts once.
    assert [(row.regime, row.pattern, row.instances, row.benign) for row in found.lookalikes] == [
        ("GPU-busy", "redundant_copy", 2, 2),
        ("launch-bound", "redundant_copy", 1, 1),
        ("CPU", "redundant_copy", 1, 1),
    ]
    assert [(row.regime, row.trials, row.costly, row.share) for row in found.nulls] == [
        ("GPU-busy", 4, 1, 0.25),
        ("launch-bound", 2, 0, 0.0),
    ]


def test_what_may_be_chance_is_undecided_as_in_a_release(tmp_path):
    shard(tmp_path, "a", [record("a", BUSY), record("a", BUSY, {"variant": "item"})], p=0.015)
    shard(
        tmp_path, "b", [record("b", BUSY), record("b", BUSY, {"variant": "item", "state": "benign"})], p=0.9
    )
    found = measure_quality([tmp_path])
    (row,) = found.patterns
    assert (found.demoted, row.costly, row.benign, row.undecided) == (1, 0, 1, 1)


def test_a_difference_is_told_of_a_pattern_alone_where_one_is(tmp_path):
    both = record("a", BUSY, {"variant": "item"}, {"pattern": "pageable_h2d", "variant": PAGEABLE})
    shard(tmp_path, "a", [record("a", BUSY), record("a", BUSY, {"variant": "item"}), both])
    sync, copy = sorted(measure_quality([tmp_path]).patterns, key=lambda row: row.pattern)
    assert (sync.pattern, sync.extra) == ("host_sync", 2)
    assert (copy.pattern, copy.extra) == ("pageable_h2d", 4)


def test_violations_are_counted_and_named(tmp_path):
    broken = record("a", BUSY, {"variant": "item"})
    broken.segments[0] = msgspec.structs.replace(broken.segments[0], end_ns=broken.segments[0].end_ns + 1)
    shard(tmp_path, "a", [record("a", BUSY), broken])
    found = measure_quality([tmp_path])
    assert [row.violations for row in found.patterns] == [1]
    (problem,) = found.violations
    assert f"a.parquet: trace {broken.trace_id}: segment 0 does not begin" in problem


def test_waits_without_a_segment_are_violations(tmp_path):
    shard(tmp_path, "a", [record("a", BUSY)], unpaired=("cudaStreamSynchronize lies in no segment",))
    (problem,) = measure_quality([tmp_path]).violations
    assert problem.endswith("a.parquet: cudaStreamSynchronize lies in no segment")


def test_a_workload_without_a_clean_trace_is_named(tmp_path):
    shard(tmp_path, "a", [record("a", BUSY, {"variant": "item"})])
    with pytest.raises(UserError, match=r"a\.parquet has no clean trace"):
        measure_quality([tmp_path])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pattern": "telepathy"}, "Unknown pattern 'telepathy'"),
        ({"variant": "telepathy"}, "Unknown variant 'telepathy' of pattern host_sync"),
    ],
)
def test_what_the_catalogue_has_not_is_named(tmp_path, change, says):
    stranger = record("a", BUSY, change)
    shard(tmp_path, "a", [record("a", BUSY), stranger])
    with pytest.raises(UserError, match=rf"a\.parquet: trace {stranger.trace_id}: {says}"):
        measure_quality([tmp_path])


@pytest.mark.parametrize("trial", [{}, {"pairs": 8, "low": "x", "high": 0, "p_costly": 0, "p_benign": 1}])
def test_a_broken_null_trial_is_named(tmp_path, trial):
    session = json.dumps({"hardware": {}, "instances": [], "null_trials": [trial]})
    write_traces(tmp_path / "shards" / "a.parquet", [record("a", BUSY)], {SESSION_KEY: session})
    with pytest.raises(UserError, match=r"a\.parquet: a null trial of its session is broken: "):
        measure_quality([tmp_path])


def test_the_command_prints_tables_markdown_and_json(run, capsys):
    assert main(["quality", str(run)]) == 0
    table = capsys.readouterr().out
    assert main(["quality", str(run), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert main(["quality", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for part in ("host_sync", "1.375", "GPU-busy", "launch-bound", "25.00%"):
        assert part in table
        assert part in text
    assert "| host_sync | 3 | 2 | 1 | 0 | 1.375 | 1.250 | 1.500 | 0 | 2 | 1 | 2 | 0 |" in text
    assert "| GPU-busy | 4 | 1 | 25.00% | 0.63% to 80.59% |" in text
    assert [row["costly"] for row in found["patterns"]] == [2, 0]
    assert "Costly in fewer" not in text  # two of three are
