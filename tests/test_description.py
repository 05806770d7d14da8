"""What a build writes beside its tables, held against the tables."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import mlcroissant
import numpy as np
import pytest
from test_build import HARDWARE, shard
from traces import random_record

from torchtraceap import __version__
from torchtraceap.cli import main
from torchtraceap.commands.describing import draw_trace
from torchtraceap.dataset.build import build
from torchtraceap.dataset.checksums import differing, read_checksums
from torchtraceap.dataset.configs import SCHEMAS
from torchtraceap.dataset.description import describe_again, read_facts
from torchtraceap.dataset.parquet import read_table, read_traces, split_files
from torchtraceap.dataset.schema import SCHEMA_VERSION, SPLITS
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError

CPU = HARDWARE | {
    "hardware_id": "cpu-1", "device_kind": "cpu", "device_name": "<b>|CPU", "emulated": True,
    "libraries": '{"timm": "1.0"}',
}  # fmt: skip


def records() -> list[TraceRecord]:
    found = [random_record(seed, gpu=seed < 8) for seed in range(12)]
    for seed, record in enumerate(found):
        record.meta["backbone_family"] = f"backbone{seed // 2}"
        record.meta["task"] = ("classification", "pose")[seed >= 6]
        record.meta["profiler_ratio"] = 1 + seed / 8
        record.meta["gpu_busy"] = 0.9 if seed < 6 else 0.1
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    found = records()
    for record in found[8:]:
        record.meta["hardware_id"] = "cpu-1"
        record.meta["gpu_busy"] = float("nan")
    found[0].instances[:] = []  # clean traces, one a platform
    found[0].segments[:] = []
    found[10].instances[:] = []
    found[10].segments[:] = []
    for record in (found[0], found[10]):
        record.meta["quality"] = record.quality
    shard(tmp_path / "run", "gpu", found[:8])
    shard(tmp_path / "run", "cpu", found[8:], hardware=CPU)
    build([tmp_path / "run"], tmp_path / "ds", seed=3, date="2026-12-01", draw=draw_trace)
    return tmp_path / "ds"


def all_traces(dataset: Path) -> list[TraceRecord]:
    return list(read_traces(split_files(dataset, "traces", "all")))


def cells(text: str, start: str) -> list[str]:
    """The cells of the one row of a table that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_published_file_has_its_sum(dataset: Path) -> None:
    names = {str(path.relative_to(dataset)) for path in dataset.rglob("*") if path.is_file()}
    assert read_checksums(dataset).keys() == names - {"SHA256SUMS"}
    assert list(differing(dataset)) == []
    kinds = Counter(re.sub(r"-.*", "", name.removeprefix("cards/")) for name in names if "cards/" in name)
    assert kinds == {"datasheet.md": 1, "costs.svg": 1, "hardware": 2, "timeline": 2}


def test_the_card_keeps_what_no_table_says(dataset: Path) -> None:
    facts = read_facts(dataset)
    assert (facts.seed, facts.date, facts.left_out) == (3, "2026-12-01", 0)
    assert (facts.version, facts.schema_version) == (__version__, SCHEMA_VERSION)


def test_describing_again_gives_the_same_to_the_byte(dataset: Path, capsys) -> None:
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    (dataset / "croissant.json").write_text("{}")
    (dataset / "cards" / "costs.svg").unlink()
    (dataset / "cards" / "hardware-gone.md").write_text("of other data")
    describe_again(dataset, SCHEMAS, draw=draw_trace)
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before
    assert main(["cards", str(dataset)]) == 0
    assert "described anew" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before


def test_a_card_without_the_facts_of_its_build_is_named(dataset: Path, capsys) -> None:
    card = dataset / "README.md"
    card.write_text(card.read_text().replace("torchtraceap:\n", "other:\n", 1))
    assert main(["cards", str(dataset)]) == 2
    assert "README.md does not say how the data set was built" in capsys.readouterr().err
    card.unlink()
    with pytest.raises(UserError, match="is no card of a data set"):
        read_facts(dataset)


def test_the_datasheet_counts_what_is_there(dataset: Path) -> None:
    text = (dataset / "cards" / "datasheet.md").read_text()
    found = all_traces(dataset)
    windows = read_table(split_files(dataset, "windows", "all"), SCHEMAS["windows"])
    segments = sum(len(record.segments) for record in found)
    assert f"{len(found)} traces of {len({r.meta['pair_id'] for r in found})} workloads" in text
    assert (
        f"{sum(len(r.trace) for r in found)} events, {len(windows)} windows\nand {segments} segments" in text
    )
    for split in SPLITS:
        count = sum(1 for _ in read_traces(split_files(dataset, "traces", split)))
        assert cells(text, split)[0] == str(count)
    for quality in ("good", "bad", "undecided"):
        assert f"{sum(r.meta['quality'] == quality for r in found)} traces are {quality}" in text
    undecided = sum(i.state == "undecided" and i.source == "injected" for r in found for i in r.instances)
    assert f"{undecided} injected instances are undecided" in text


def test_a_hardware_page_has_the_facts_and_counts_of_its_machine(dataset: Path) -> None:
    gpu = (dataset / "cards" / "hardware-nvidia-h200.md").read_text()
    cpu = (dataset / "cards" / "hardware-cpu-1.md").read_text()
    assert cells(gpu, "units (SMs, CUs or cores)") == ["132"]
    assert cells(cpu, "timm") == ["1.0"]
    assert "Emulated: a part of a larger device" in cpu
    assert "Emulated" not in gpu
    assert "<b>" not in cpu
    for page, name in ((gpu, "nvidia-h200"), (cpu, "cpu-1")):
        mine = [record for record in all_traces(dataset) if record.meta["hardware_id"] == name]
        assert f"{len(mine)} traces (" in page
        for task in {str(record.meta["task"]) for record in mine}:
            assert cells(page, task)[0] == str(sum(record.meta["task"] == task for record in mine))
    # Each platform has one workload with a clean trace; both traces of the workload count for the slowing.
    (clean,) = [r for r in all_traces(dataset) if not r.instances and r.meta["hardware_id"] == "nvidia-h200"]
    pair = [r for r in all_traces(dataset) if r.meta["pair_id"] == clean.meta["pair_id"]]
    quantiles = np.quantile([r.meta["profiler_ratio"] for r in pair], (0.1, 0.5, 0.9))
    assert cells(gpu, "GPU-busy") == ["1", "100 %", *(f"{quantile:.2f}" for quantile in quantiles)]
    assert cells(cpu, "CPU")[:2] == ["1", "100 %"]


def test_the_picture_of_costs_has_a_dot_for_each_measurement(dataset: Path) -> None:
    svg = ET.fromstring((dataset / "cards" / "costs.svg").read_text())
    measured = {
        (r.meta["pair_id"], i) for r in all_traces(dataset) for i in r.instances if i.source == "injected"
    }
    dots = [one for one in svg if one.tag.endswith("circle")]
    assert len(dots) == len(measured) + 3  # three of the legend
    by_pattern = {i.pattern for _, i in measured}
    names = {one.text for one in svg if one.get("class") == "end"}
    assert names == by_pattern
    # On one row, of two dots the costlier one lies to the right.
    rows: dict[str | None, list[float]] = {}
    for dot in dots[: len(measured)]:
        rows.setdefault(dot.get("cy"), []).append(float(dot.get("cx") or 0))
    assert sorted(map(len, rows.values())) == sorted(Counter(i.pattern for _, i in measured).values())


def test_timelines_show_a_trace_outside_of_test_with_its_labels(dataset: Path) -> None:
    outside = [
        record
        for split in ("train", "validation")
        for record in read_traces(split_files(dataset, "traces", split))
    ]
    card = (dataset / "README.md").read_text()
    for path in (dataset / "cards").glob("timeline-*.svg"):
        text = path.read_text()
        ET.fromstring(text)
        assert any(draw_trace(record) + "\n" == text for record in outside)
        assert 'class="truth ' in text
        assert f"(cards/{path.name})" in card
        assert len(text) < 100_000


def test_croissant_is_valid_and_reads_the_rows(dataset: Path, caplog) -> None:
    croissant = mlcroissant.Dataset(jsonld=str(dataset / "croissant.json"))
    issues = croissant.metadata.ctx.issues
    assert not issues.errors
    assert not issues.warnings
    assert croissant.metadata.version == __version__
    sums = read_checksums(dataset)
    files = {file.id: file.sha256 for file in croissant.metadata.distribution if hasattr(file, "sha256")}
    assert {name: sums[name] for name in sums if name.startswith("data/")} == {
        name: digest for name, digest in files.items() if digest
    }
    for config, schema in SCHEMAS.items():
        rows = list(croissant.records(record_set=config))
        assert len(rows) == len(read_table(split_files(dataset, config, "all"), schema))
        assert rows[0].keys() == {f"{config}/{name}" for name in ("split", *schema.names)}
        assert {row[f"{config}/split"].decode() for row in rows} <= set(SPLITS)
    by_id = {record.trace_id: record for record in all_traces(dataset)}
    for row in croissant.records(record_set="traces"):
        record = by_id[row["traces/trace_id"].decode()]
        events = row["traces/events"]
        assert list(events["traces/events/start_ns"]) == record.trace.events.start_ns.tolist()
        instances = row["traces/instances"]["traces/instances/pattern"]
        assert [name.decode() for name in instances] == [one.pattern for one in record.instances]
    assert "Could not match" not in caplog.text


def test_croissant_names_no_column_that_is_not_there(dataset: Path) -> None:
    document = json.loads((dataset / "croissant.json").read_text())
    for record_set in document["recordSet"][1:]:
        schema = SCHEMAS[record_set["name"]]
        assert [field["name"] for field in record_set["field"]] == ["split", *schema.names]


def test_a_wrong_date_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["build", str(tmp_path), "-o", str(tmp_path / "ds"), "--date", "2026-13-01"]) == 2
    assert "2026-13-01 is no date" in capsys.readouterr().err
