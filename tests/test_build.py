"""A build of three small shards, loaded back with `datasets`, and everything that a build refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
import yaml
from datasets import load_dataset
from measured import measurements
from traces import random_record

from torchtraceap.dataset import schema, splits
from torchtraceap.dataset.build import SCHEMAS, build
from torchtraceap.dataset.checksums import read_checksums, write_checksums
from torchtraceap.dataset.parquet import read_table, read_traces, write_traces
from torchtraceap.dataset.schema import SESSION_KEY
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.verify import Report
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import conclude

SEEDS = range(12)
PUBLISHED = ["README.md", "SHA256SUMS", "cards", "croissant.json", "data"]
HARDWARE: dict[str, Any] = {
    "hardware_id": "nvidia-h200", "device_kind": "cuda", "device_name": "NVIDIA H200", "device_count": 1,
    "compute_units": 132, "memory_gib": 139.8, "driver": "1", "runtime": "CUDA 13.0", "cpu_name": "cpu",
    "cpu_cores": 16, "ram_gib": 128.0, "os": "Linux x86_64", "python": "3.11.9", "torch": "2.14.1",
    "libraries": "{}", "emulated": False,
}  # fmt: skip


def shard(
    run: Path, name: str, records: list[TraceRecord], p: float | None = 0.001, hardware=HARDWARE
) -> Path:
    """Write a shard as a collection does; ``p`` is the p-value of its instances that are not benign."""
    session = {
        "hardware": hardware,
        "plan": {"ignored": "by the build"},
        "instances": [
            one if p is not None else one | {"p_costly": None}
            for record in records
            for one in measurements(record, p)
        ],
    }
    path = run / "shards" / f"{name}.parquet"
    write_traces(path, records, {SESSION_KEY: json.dumps(session)})
    return path


def edited(record: TraceRecord, index: int = 0, **changes: Any) -> TraceRecord:
    record.instances[index] = msgspec.structs.replace(record.instances[index], **changes)
    return record


@pytest.fixture
def run(tmp_path) -> Path:
    """Twelve traces of six workloads, each a split unit, in three shards: a test unit for each of two tasks,
    and one of validation. The second trace of each workload has a held-out variant.
    """
    records = [random_record(seed) for seed in SEEDS]
    for seed, record in enumerate(records):
        record.meta["backbone_family"] = f"backbone{seed // 2}"
        record.meta["profiler_ratio"] = 1 + seed / 8
        record.meta["task"] = "classification" if seed < 8 else "detection"
        if seed % 2:
            edited(record, variant="finite_check")
    for index in range(3):
        shard(tmp_path / "run", f"job{index}", records[4 * index : 4 * index + 4])
    return tmp_path / "run"


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_everything_comes_back_through_datasets(run, tmp_path):
    calls: list[tuple[str, int, int]] = []
    report = build([run], tmp_path / "out", seed=7, progress=lambda *call: calls.append(call))
    out = str(tmp_path / "out")

    loaded = {config: load_dataset(out, config) for config in SCHEMAS}
    rows = {
        config: {split: len(data) for split, data in splits_.items()} for config, splits_ in loaded.items()
    }
    assert load_dataset(out, split="test").features == loaded["traces"]["test"].features  # the default config
    assert rows["traces"] == report.traces == {"train": 3, "validation": 1, "test": 4}
    assert report.units == {"train": 3, "validation": 1, "test": 2}
    assert report.left_out == 4
    assert sum(rows["windows"].values()) == report.windows
    assert sum(rows["segments"].values()) == report.segments
    for split in schema.SPLITS:
        ids = set(loaded["traces"][split]["trace_id"])
        assert set(loaded["windows"][split]["trace_id"]) == ids
        assert set(loaded["segments"][split]["trace_id"]) == ids  # each random trace has segments
        assert set(loaded["costs"][split]["trace_id"]) == ids
        assert loaded["hardware"][split]["hardware_id"] == ["nvidia-h200"]
    for config in SCHEMAS:
        streams = load_dataset(out, config, streaming=True)
        assert {split: sum(1 for _ in stream) for split, stream in streams.items()} == rows[config]
    assert calls[0] == ("checking", 0, 3)
    assert ("writing", sum(report.traces.values()), sum(report.traces.values())) in calls
    assert calls[-1] == ("verifying", 1, 1)


def test_traces_are_those_that_went_in(run, tmp_path):
    build([run], tmp_path / "out", seed=7)
    before = {(r := random_record(seed)).trace_id: r for seed in SEEDS}
    after = list(read_traces(sorted((tmp_path / "out" / "data").glob("traces-*.parquet"))))
    assert after
    for record in after:
        assert record.trace == before[record.trace_id].trace
        assert record.segments == before[record.trace_id].segments


def test_units_never_cross_and_heldout_variants_are_in_test_only(run, tmp_path):
    report = build([run], tmp_path / "out", seed=7)
    units: dict[str, set[str]] = {}
    for split in schema.SPLITS:
        for record in read_traces(sorted((tmp_path / "out" / "data").glob(f"traces-{split}-*.parquet"))):
            units.setdefault(str(record.meta["split_unit"]), set()).add(split)
            assert split == "test" or not splits.has_heldout_variant(record)
    assert all(len(sides) == 1 for sides in units.values())
    assert report.units == Counter(side for sides in units.values() for side in sides)


def test_two_builds_are_equal_and_do_not_depend_on_the_order_of_shards(run, tmp_path):
    build([run], tmp_path / "one", seed=7)
    for index, name in enumerate(("c", "a", "b")):
        (run / "shards" / f"job{index}.parquet").rename(run / "shards" / f"{name}.parquet")
    build([run], tmp_path / "two", seed=7)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_costs_that_are_likely_chance_become_undecided(tmp_path):
    # Two tests at p = 0.015 both hold at 2 %. A third, at 0.5, lowers the bar to 2/3 * 2 % = 1.33 %.
    first, second, third = (random_record(seed, state="costly") for seed in (0, 2, 4))
    third = edited(third, state="undecided")
    run = tmp_path / "run"
    shard(run, "a", [first, second], p=0.015)
    assert build([run], tmp_path / "two", seed=1).demoted == 0
    shard(run, "b", [third], p=0.5)
    report = build([run], tmp_path / "three", seed=1)
    assert (report.tested, report.demoted) == (3, 2)
    data = tmp_path / "three" / "data"
    for record in read_traces(sorted(data.glob("traces-*.parquet"))):
        assert record.instances[0].state == "undecided"
        assert record.instances[1].state == "benign"  # the look-alike is not tested
        assert record.meta["quality"] == "undecided"
    windows = read_table(sorted(data.glob("windows-*.parquet")), SCHEMAS["windows"])
    assert not any(windows["positive"].to_pylist())
    assert any(windows["ignored"].to_pylist())


def test_a_measurement_that_traces_share_is_one_test(tmp_path):
    twins = [random_record(2, state="costly"), random_record(2, state="costly")]
    twins[1].meta["trace_id"] = "f" * 16
    shard(tmp_path, "a", twins, p=0.001)
    assert build([tmp_path], tmp_path / "out", seed=1).tested == 1


def test_every_state_can_be_derived_from_the_published_measurements(run, tmp_path):
    """By the definitions alone, without what the build itself uses."""
    shard(run, "chance", [edited(random_record(20, state="costly"), index=1, state="undecided")], p=0.024)
    report = build([run], tmp_path / "out", seed=7)
    assert report.demoted == 1
    out = str(tmp_path / "out")
    costs = pd.concat([load_dataset(out, "costs", split=split).to_pandas() for split in schema.SPLITS])
    assert set(costs["source"]) == {"injected", "lookalike"}
    follows = [
        conclude(list(zip(row.seconds_without, row.seconds_with, strict=True)), row.decided_at)
        for row in costs.itertuples()
    ]
    assert [cost.state for cost in follows] == costs["state"].tolist()
    tests = costs[costs["source"] == "injected"][["pair_id", "pattern", "variant", "p_costly"]]
    tests = tests.drop_duplicates().sort_values("p_costly")
    bars = 0.02 * np.arange(1, len(tests) + 1) / len(tests)
    (holding,) = np.nonzero(tests["p_costly"] <= bars)
    highest = tests["p_costly"].iloc[holding[-1]]
    published = {
        (record.trace_id, index): instance
        for record in read_traces(sorted((tmp_path / "out" / "data").glob("traces-*.parquet")))
        for index, instance in enumerate(record.instances)
    }
    assert len(published) == len(costs)
    for row, cost in zip(costs.itertuples(), follows, strict=True):
        instance = published[row.trace_id, row.instance]
        state = row.state if row.state != "costly" or row.p_costly <= highest else "undecided"
        if row.source == "lookalike":
            state = "undecided" if row.state == "costly" else "benign"
        assert instance.state == state
        numbers = instance.cost_ms, instance.cost_ratio, instance.cost_low, instance.cost_high
        assert numbers == pytest.approx((cost.ms, cost.ratio, cost.low, cost.high), rel=1e-6)


def workloads(seeds: range, hardware: str) -> list[TraceRecord]:
    """Records without a held-out variant, two a workload."""
    records = [random_record(seed) for seed in seeds]
    for seed, record in zip(seeds, records, strict=True):
        record.meta |= {
            "backbone_family": f"backbone{seed // 2}",
            "task": "classification" if seed % 8 < 4 else "detection",
            "hardware_id": hardware,
        }
    return records


@pytest.fixture
def two_runs(tmp_path) -> list[Path]:
    """Runs of two machines. Of each alone all costs hold, but not of both together."""
    for name, seeds, p in (("a", range(12), 0.012), ("b", range(12, 24), 0.02)):
        records = workloads(seeds, f"machine-{name}")
        machine = HARDWARE | {"hardware_id": f"machine-{name}"}
        shard(tmp_path / name, "first", records[:6], p=p, hardware=machine)
        shard(tmp_path / name, "second", records[6:], p=p, hardware=machine)
    return [tmp_path / "a", tmp_path / "b"]


def test_a_release_is_taken_up_as_the_shards_that_it_was_made_of(two_runs, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtraceap.dataset.build.TRACES_PER_FILE", 3)  # several files a split
    a, b = two_runs
    expected = build([a, b], tmp_path / "both", seed=7)
    build([a], tmp_path / "first", seed=3)  # of another seed, and so of other splits
    second = build([b], tmp_path / "second", seed=7)
    assert second.demoted != expected.demoted
    whole = files(tmp_path / "both")
    for sources in (["first", "b"], ["a", "second"], ["second", "first"], ["both"]):
        assert build([tmp_path / name for name in sources], tmp_path / "out", seed=7) == expected
        assert files(tmp_path / "out") == whole
    build([b, tmp_path / "first"], tmp_path / "first", seed=7)  # into the very folder
    assert files(tmp_path / "first") == whole


def test_a_run_beside_its_release_is_told(two_runs, tmp_path):
    a, _ = two_runs
    build([a], tmp_path / "first", seed=7)
    with pytest.raises(UserError, match=r"traces-train-.*: trace \w+ is also in .*a/shards/\w+\.parquet"):
        build([a, tmp_path / "first"], tmp_path / "out", seed=7)
    assert not (tmp_path / "out").exists()


def test_a_release_that_is_not_whole_is_refused(two_runs, tmp_path):
    build([two_runs[0]], tmp_path / "first", seed=7)
    costs = tmp_path / "first" / "data" / "costs-test-00000-of-00001.parquet"
    content = costs.read_bytes()
    costs.unlink()
    with pytest.raises(UserError, match=r"first: data/costs-test-.*so it cannot be built on"):
        build([tmp_path / "first"], tmp_path / "out", seed=7)
    costs.write_bytes(content[:-1] + b"X")
    with pytest.raises(UserError, match=r"first: data/costs-test-.*so it cannot be built on"):
        build([tmp_path / "first"], tmp_path / "out", seed=7)
    costs.unlink()
    names = [name for name in read_checksums(tmp_path / "first") if "costs-test" not in name]
    write_checksums(tmp_path / "first", names)
    with pytest.raises(UserError, match=r"first holds no data/costs-test-.*build from the runs"):
        build([tmp_path / "first"], tmp_path / "out", seed=7)
    (tmp_path / "first" / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="SHA256SUMS"):
        build([tmp_path / "first"], tmp_path / "out", seed=7)


def test_other_files_of_the_folder_survive_and_old_data_goes(run, tmp_path):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "traces-train-00000-of-00009.parquet").write_bytes(b"old")
    (out / "schema.py").write_text("kept")
    build([run], out, seed=7)
    (out / "leak_audit.json").write_text("of the old data")
    (out / "cards" / "timeline-pose.svg").write_text("of the old data")
    build([run], out, seed=7)
    assert (out / "schema.py").read_text() == "kept"
    assert sorted(path.name for path in out.iterdir()) == [*PUBLISHED, "schema.py"]
    assert not (out / "cards" / "timeline-pose.svg").exists()
    assert not (out / "data" / "traces-train-00000-of-00009.parquet").exists()


def test_the_card_says_what_was_written(run, tmp_path):
    report = build([run], tmp_path / "out", seed=7)
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    header = yaml.safe_load(front)
    assert header["license"] == "cc-by-4.0"
    assert header["size_categories"] == ["n<1K"]
    assert [config["config_name"] for config in header["configs"]] == list(SCHEMAS)
    assert schema.CANARY in body
    assert "2512.14141" in body
    rows = [line for line in body.splitlines() if line.startswith("| test | ")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[1] == str(report.traces["test"])
    assert cells[6] == str(report.units["test"])
    ratios = [r.meta["profiler_ratio"] for r in read_traces(sorted((tmp_path / "out/data").glob("traces-*")))]
    slowing = " / ".join(f"{quantile:.2f}" for quantile in np.quantile(ratios, (0.1, 0.5, 0.9)))
    (hardware,) = [line for line in body.splitlines() if line.startswith("| nvidia-h200 | ")]
    cells = [cell.strip() for cell in hardware.strip("|").split("|")]
    assert cells[-2:] == [str(sum(report.traces.values())), slowing]
    tables = [line for line in body.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_a_hostile_name_does_not_break_the_card(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtraceap.dataset.build.verify", lambda *_, **__: Report([]))  # would refuse it
    record = random_record(0)
    record.meta["task"], record.meta["source"] = "pose", "a|<img src=x>\n# b"
    shard(tmp_path, "a", [record])
    build([tmp_path], tmp_path / "out", seed=1)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "<img" not in text
    assert "\n# b" not in text


def broken(record: TraceRecord, what: str) -> TraceRecord:
    trace = record.trace
    if what == "marker":
        trace.ops[0] = msgspec.structs.replace(trace.ops[0], name="ttap-0123abcd-1")
    elif what == "marker lane":
        trace.lanes[1] = msgspec.structs.replace(trace.lanes[1], name="ttap-0123abcd-1")
    elif what == "task":
        record.meta["task"] = "poetry"
    elif what == "lane":
        record.segments[0] = msgspec.structs.replace(record.segments[0], lane=1)
    elif what == "class":
        record.segments[0] = msgspec.structs.replace(record.segments[0], lane_class="gpu")
    elif what == "time":
        record.segments[0] = msgspec.structs.replace(record.segments[0], end_ns=trace.duration_ns + 1)
    elif what == "step":
        record.segments[0] = msgspec.structs.replace(record.segments[0], step=3)
    elif what == "empty":
        record.segments[0] = msgspec.structs.replace(record.segments[0], event_count=0)
    elif what == "hardware":
        record.meta["hardware_id"] = "tpu"
    elif what in ("step_ms", "profiler_ratio"):
        record.meta[what] = float("nan")
    elif what in ("cost_ms", "cost_ratio", "cost_high"):
        record.instances[0] = msgspec.structs.replace(record.instances[0], **{what: float("inf")})
    elif what == "cost_low":
        record.instances[0] = msgspec.structs.replace(record.instances[0], cost_low=-1.0)
    return record


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("marker", "marker of the harness"),
        ("marker lane", "marker of the harness"),
        ("task", "task is none of classification"),
        ("lane", "segment 0 has events of another lane"),
        ("class", "segment 0 has the wrong lane class"),
        ("time", "segment 0 does not begin and end with its events"),
        ("step", "segment 0 has events of another step"),
        ("empty", "segment 0 has no events"),
        ("hardware", "was made on tpu, what is known is nvidia-h200"),
        ("step_ms", "its step_ms is no positive number"),
        ("profiler_ratio", "its profiler_ratio is no positive number"),
        ("cost_ms", "the cost of instance 0 is no number or negative"),
        ("cost_ratio", "the cost of instance 0 is no number or negative"),
        ("cost_low", "the cost of instance 0 is no number or negative"),
        ("cost_high", "the cost of instance 0 is no number or negative"),
    ],
)
def test_a_broken_trace_is_named(tmp_path, what, says):
    path = shard(tmp_path, "a", [random_record(1), broken(random_record(2), what)])
    with pytest.raises(UserError, match=says) as error:
        build([tmp_path], tmp_path / "out", seed=1)
    assert str(error.value).startswith(f"{path}: trace {random_record(2).trace_id}")
    assert not (tmp_path / "out" / "data").exists()


def test_a_variant_that_the_catalogue_has_not_is_named(tmp_path, monkeypatch):
    monkeypatch.undo()
    stranger = random_record(2)
    stranger.instances[0] = msgspec.structs.replace(stranger.instances[0], variant="telepathy")
    path = shard(tmp_path, "a", [stranger])
    with pytest.raises(UserError, match="Unknown variant 'telepathy' of pattern host_sync") as error:
        build([tmp_path], tmp_path / "out", seed=1)
    assert str(error.value).startswith(f"{path}: trace {stranger.trace_id}: ")


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no shards"):
        build([tmp_path / "nowhere"], tmp_path / "out", seed=1)
    path = shard(tmp_path, "a", [random_record(1)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"a\.parquet"):
        build([tmp_path], tmp_path / "out", seed=1)
    write_traces(path, [random_record(1)])
    with pytest.raises(UserError, match=r"a\.parquet has no torchtraceap.session"):
        build([tmp_path], tmp_path / "out", seed=1)
    write_traces(path, [random_record(1)], {SESSION_KEY: '{"hardware": 3}'})
    with pytest.raises(UserError, match=r"a\.parquet: torchtraceap.session in its metadata is broken"):
        build([tmp_path], tmp_path / "out", seed=1)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"model": "/home/alice/model"}, "metadata: trace"),
        ({"pair_id": "workload-1"}, "ids: trace"),
        ({"input_shape": "bob@example.com"}, "metadata: trace"),
        ({"world_size": 2}, "ranks: workload"),
    ],
)
def test_what_breaks_a_promise_is_not_published(run, tmp_path, broken, says):
    build([run], tmp_path / "out", seed=7)
    before = files(tmp_path / "out")
    record = random_record(20)
    record.meta |= broken
    shard(run, "broken", [record])
    with pytest.raises(UserError, match=f"would not keep what it promises, {says}"):
        build([run], tmp_path / "out", seed=7)
    assert files(tmp_path / "out") == before


def test_private_text_in_a_trace_is_not_published(tmp_path):
    record = random_record(1)
    record.trace.ops[-1] = msgspec.structs.replace(record.trace.ops[-1], name="read /home/alice/secret")
    shard(tmp_path / "run", "a", [record])
    with pytest.raises(UserError, match=r"privacy: trace .*: a path in 'read /home/alice"):
        build([tmp_path / "run"], tmp_path / "out", seed=7)
    assert not (tmp_path / "out").exists()


def test_an_injected_instance_needs_a_p_value(tmp_path):
    shard(tmp_path, "a", [random_record(0)], p=None)
    with pytest.raises(UserError, match=r"no p-value in \[0, 1\] was measured for instance 0"):
        build([tmp_path], tmp_path / "out", seed=1)


def test_shards_that_disagree_are_named(tmp_path):
    shard(tmp_path, "a", [random_record(1)])
    shard(tmp_path, "b", [random_record(1)])
    with pytest.raises(UserError, match=r"b\.parquet: trace \w+ is also in .*a\.parquet"):
        build([tmp_path], tmp_path / "out", seed=1)
    shard(tmp_path, "b", [random_record(3)], hardware=HARDWARE | {"driver": "2"})
    with pytest.raises(UserError, match="disagree on hardware nvidia-h200: driver 1 / 2"):
        build([tmp_path], tmp_path / "out", seed=1)
    shard(tmp_path, "b", [random_record(3)], hardware=HARDWARE | {"driver": None})
    with pytest.raises(UserError, match=r"b\.parquet: its hardware has null for: driver"):
        build([tmp_path], tmp_path / "out", seed=1)
    shard(tmp_path, "b", [random_record(3)], hardware={"hardware_id": "nvidia-h200"})
    with pytest.raises(UserError, match="lacks or has unknown: compute_units"):
        build([tmp_path], tmp_path / "out", seed=1)


def test_a_strangers_data_folder_is_not_replaced(run, tmp_path):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"thesis\.txt does not belong there"):
        build([run], out, seed=7)
    assert (out / "data" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("data/mine.parquet", "mine.parquet does not belong"),
        ("README.md", "no data set's card"),
        ("data", "data"),
        ("cards/mine.md", "mine.md does not belong"),
        ("cards", "cards"),
        ("croissant.json", "croissant.json would be replaced, but belongs to no data set"),
        ("SHA256SUMS", "SHA256SUMS would be replaced"),
    ],
)
def test_files_of_others_are_not_replaced(run, tmp_path, name, part):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(UserError, match=part):
        build([run], tmp_path / "out", seed=7)
    assert files(tmp_path / "out") == {name: b"precious"}


def test_a_failure_while_writing_leaves_the_old_data(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    build([run], out, seed=7)
    before = files(out)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("torchtraceap.dataset.build.write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        build([run], out, seed=8)
    assert files(out) == before


@pytest.mark.parametrize(
    "stage", range(5), ids=["nothing moved", "old data moved", "new data moved", "cards moved", "sums moved"]
)
def test_a_build_killed_in_its_swap_is_settled_by_the_next(run, tmp_path, stage):
    out = tmp_path / "out"
    build([run], out, seed=7)
    old = files(out)
    build([run], tmp_path / "new", seed=8)
    new = files(tmp_path / "new")
    assert old != new
    # What a kill leaves at that stage, made by hand.
    work = out / ".build-x.tmp"
    (tmp_path / "new").rename(work)
    if stage >= 1:
        (out / "data").rename(work / "old")
    if stage >= 2:
        (work / "data").rename(out / "data")
    if stage >= 3:
        shutil.rmtree(out / "cards")
        (work / "cards").rename(out / "cards")
    if stage >= 4:
        (work / "SHA256SUMS").replace(out / "SHA256SUMS")

    other = tmp_path / "other"
    shard(other, "a", [random_record(3)], hardware=HARDWARE | {"driver": "2"})
    with pytest.raises(UserError, match="disagree on hardware"):  # the next build fails, which undoes nothing
        build([run, other], out, seed=9)
    assert files(out) == (new if stage >= 2 else old)
    assert sorted(path.name for path in out.iterdir()) == PUBLISHED


def test_an_interrupt_between_two_renames_keeps_the_old_data(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    build([run], out, seed=7)
    before = files(out)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if target == out / "data" and self.name == "data":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build([run], out, seed=8)
    assert files(out) == before


def test_two_builds_at_once_into_one_folder(run, tmp_path):
    out = tmp_path / "out"
    complaints = []

    def again(*_: Any) -> None:
        with pytest.raises(UserError, match="is in use: another process builds into it") as caught:
            build([run], out, seed=8)
        complaints.append(caught.value)

    build([run], out, seed=7, progress=again)
    assert complaints
    assert (out / "README.md").exists()


def test_a_failed_build_leaves_no_new_folder(tmp_path):
    shard(tmp_path / "run", "a", [random_record(1)], p=None)
    with pytest.raises(UserError, match="p-value"):
        build([tmp_path / "run"], tmp_path / "out", seed=7)
    assert not (tmp_path / "out").exists()
