"""Each promise of a data set is broken in a copy of one that keeps all, whose other files agree with it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from releases import change_records, change_table, measured_table, publishable, release, seal

from torchtraceap.cli import main
from torchtraceap.dataset import checksums
from torchtraceap.dataset.audited import record_audit
from torchtraceap.dataset.features import shard_path
from torchtraceap.dataset.parquet import read_traces, write_traces
from torchtraceap.dataset.schema import COSTS, SPLITS
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.dataset.verify import PROMISES, _inspect, _release, _texts, verify
from torchtraceap.dataset.verify._texts import private
from torchtraceap.errors import UserError
from torchtraceap.parallel import Where


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A data set that keeps every promise; not to be changed."""
    return release(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def dataset(kept, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(kept, tmp_path / "dataset"))


def in_split(wanted: str, change: Callable[[TraceRecord], None], index: int = 0) -> Callable[[Path], None]:
    """Change one record of a split."""

    def changed(split: str, records: list[TraceRecord]) -> None:
        if split == wanted:
            change(records[index])

    return lambda folder: change_records(folder, changed)


def meta(**values: object) -> Callable[[TraceRecord], None]:
    return lambda record: record.meta.update(values)


def op(category: str, **values: str) -> Callable[[TraceRecord], None]:
    """Change the first operator of a category."""

    def change(record: TraceRecord) -> None:
        index = next(i for i, one in enumerate(record.trace.ops) if one.category == category)
        record.trace.ops[index] = msgspec.structs.replace(record.trace.ops[index], **values)

    return change


def instance(**values: object) -> Callable[[TraceRecord], None]:
    def change(record: TraceRecord) -> None:
        record.instances[0] = msgspec.structs.replace(record.instances[0], **values)
        record.meta["quality"] = record.quality

    return change


def text(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace text in a page, and sum it anew."""

    def change(folder: Path) -> None:
        page = (folder / name).read_text()
        assert old in page
        (folder / name).write_text(page.replace(old, new, 1))
        checksums.write_checksums(folder, list(checksums.read_checksums(folder)))

    return change


def table(config: str, split: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda folder: change_table(folder, config, split, change)


def put(column: str, values: Callable[[np.ndarray], object]) -> Callable[[pa.Table], pa.Table]:
    """Replace a column by a function of it."""

    def change(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(column)
        kind = rows.schema.field(column).type
        return rows.set_column(index, column, pa.array(values(rows[column].to_numpy()), kind))

    return change


def footer(folder: Path) -> None:
    """Let a file say more of itself than it may."""
    path = folder / shard_path("segments", "test")
    rows = pq.read_table(path)
    old = pq.read_metadata(path).metadata
    said = {key: value for key, value in old.items() if key.startswith(b"torchtraceap.")}
    pq.write_table(rows.replace_schema_metadata({**said, b"torchtraceap.session": b"plan"}), path)
    seal(folder)


def noted(folder: Path) -> None:
    """Write a remark at a column."""
    path = folder / shard_path("hardware", "test")
    rows = pq.read_table(path)
    said = {key: value for key, value in pq.read_metadata(path).metadata.items() if b"torchtraceap" in key}
    field = rows.schema.field("torch").with_metadata({"by": "alice"})
    schema = rows.schema.set(rows.schema.get_field_index("torch"), field).with_metadata(said)
    pq.write_table(rows.cast(schema), path)
    seal(folder)


def not_nested(record: TraceRecord) -> None:
    """Give the last event of the main thread the first step as parent, which is over by then."""
    events = record.trace.events
    last = int(np.flatnonzero(events.lane == 0)[-1])
    step = int(np.flatnonzero(record.trace.names == "ProfilerStep#0")[0])
    events.parent = events.parent.copy()
    events.parent[last] = step


def swapped_steps(record: TraceRecord) -> None:
    def other(name: str) -> str:
        return {"ProfilerStep#0": "ProfilerStep#1", "ProfilerStep#1": "ProfilerStep#0"}.get(name, name)

    record.trace.ops = [msgspec.structs.replace(one, name=other(one.name)) for one in record.trace.ops]


def without_an_event(split: str, records: list[TraceRecord]) -> None:
    """Shorten a segment of a trace of test."""
    if split != "test":
        return
    record, index = next(
        (record, index)
        for record in records
        for index, one in enumerate(record.segments)
        if one.event_count > 1
    )
    one = record.segments[index]
    rows = slice(one.first_event, one.first_event + one.event_count - 1)
    record.segments[index] = msgspec.structs.replace(
        one, event_count=one.event_count - 1, end_ns=int(record.trace.events.end_ns[rows].max())
    )


def one_backbone_in_two(folder: Path) -> None:
    names: list[object] = []

    def change(split: str, records: list[TraceRecord]) -> None:
        names.append(records[0].meta["backbone_family"])
        if split == "test":
            records[0].meta["backbone_family"] = names[0]

    change_records(folder, change)


def a_copy_in_test(folder: Path) -> None:
    """The same clean program in train and test, as if of two workloads of two units."""
    (source, *_) = [
        one
        for one in read_traces(folder / shard_path("traces", "train"))
        if all(i.source == "lookalike" for i in one.instances)
    ]
    source.meta |= {
        "trace_id": "0123456789abcdef", "pair_id": "fedcba9876543210", "split_unit": "other",
        "backbone_family": "other",
    }  # fmt: skip

    def change(split: str, records: list[TraceRecord]) -> None:
        if split == "test":
            records.append(source)

    change_records(folder, change)


def stranger(rows: pa.Table) -> pa.Table:
    some = rows.slice(0, 3)
    return pa.concat_tables([rows, put("trace_id", lambda ids: ["0" * 16] * len(ids))(some)])


def not_by_chance(folder: Path) -> None:
    """Let measurements be such that of all together none is sure."""
    for split in SPLITS:
        records = read_traces(folder / shard_path("traces", split))
        tables = [COSTS.empty_table(), *(measured_table(record, 0.024) for record in records)]
        change_table(folder, "costs", split, lambda _, tables=tables: pa.concat_tables(tables))


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("layout", lambda folder: (folder / "data" / "notes.txt").write_text("mine") and None, "notes.txt"),
    (
        "checksums",
        lambda folder: (folder / "cards" / "costs.svg").open("a").write("\n") and None,
        "cards/costs.svg is not the file",
    ),
    ("checksums", lambda folder: (folder / "cards" / "extra.svg").touch(), "cards/extra.svg is not named"),
    ("schema", footer, "says more of itself than it may: torchtraceap.session"),
    ("schema", noted, "has notes at torch"),
    ("card", text("README.md", "| train | ", "| train | 1"), "train: traces is 1"),
    ("card", text("README.md", " labelled segments", "1 labelled segments"), "labelled segments"),
    ("card", text("README.md", "num_examples: ", "num_examples: 1"), "dataset_info in the YAML"),
    ("croissant", text("croissant.json", '"sha256": "', '"sha256": "0'), "has another digest"),
    ("audit", text("leak_audit.json", '"data": "', '"data": "0'), "is of other data"),
    ("audit", text("leak_audit.json", '"passed": false', '"passed": true'), "its arms say otherwise"),
    ("ids", in_split("train", meta(pair_id="workload-1")), "'workload-1' is not 16 hex digits"),
    ("metadata", in_split("train", meta(batch_size=0)), "its batch_size is 0"),
    ("metadata", in_split("test", meta(quality="undecided")), "its quality is 'undecided'"),
    ("metadata", in_split("test", meta(gpu_busy=1.5)), "its gpu_busy is 1.5"),
    ("hardware", table("hardware", "validation", lambda rows: rows.slice(0, 0)), "lacks nvidia-h200"),
    ("hardware", table("hardware", "test", put("cpu_cores", lambda n: n + 1)), "than another split"),
    ("markers", in_split("train", op("kernel", name="ttap-5ec2e7/0/1/1")), "ttap-5ec2e7"),
    ("markers", in_split("test", op("cpu_op", types='["ttap-5ec2e7"]')), "ttap-5ec2e7"),
    ("privacy", in_split("train", op("kernel", name="load /home/alice/x.png")), "a path in"),
    ("privacy", in_split("test", op("cpu_op", shapes='["bob@example.com"]')), "an e-mail address"),
    ("instances", in_split("test", instance(sites=0)), "has 0 places"),
    ("instances", in_split("test", instance(variant="telepathy")), "has no such variant"),
    ("costs", table("costs", "test", put("p_costly", lambda p: p / 2)), "its pairs say"),
    ("costs", table("costs", "test", put("decided_at", lambda n: n * 0 + 4)), "has p_costly"),
    ("costs", table("costs", "test", put("decided_at", lambda n: n * 0 + 24)), "decided at 24 of 12 pairs"),
    ("costs", table("costs", "test", put("seconds_with", lambda s: [2 * one for one in s])), "has cost_ms"),
    ("costs", table("costs", "test", put("seconds_with", lambda s: [0 * one for one in s])), "impossible"),
    ("costs", table("costs", "test", put("seconds_with", lambda s: [one[1:] for one in s])), "is broken"),
    ("costs", table("costs", "test", put("state", lambda s: ["undecided"] * len(s))), "measured undecided"),
    ("costs", table("costs", "train", lambda rows: rows.slice(1)), "train lacks the measurement of"),
    ("costs", table("costs", "train", stranger), f"of instance 0 of trace {'0' * 16}"),
    ("costs", table("costs", "train", lambda t: pa.concat_tables([t, t.slice(0, 1)])), "measurement twice"),
    ("costs", table("costs", "test", put("pair_id", lambda ids: ["f" * 16, *ids[1:]])), f"load {'f' * 16}"),
    ("costs", not_by_chance, "all measurements together say undecided"),
    ("exhaustive", in_split("train", lambda r: r.exhaustive.append(r.exhaustive[0])), "a pattern twice"),
    ("segments", table("segments", "test", put("step", lambda n: n + 1)), "its rows differ in step"),
    ("tiles", table("windows", "train", stranger), f"train has windows of {'0' * 16}"),
    ("splits", one_backbone_in_two, "backbone_family backbone"),
    ("splits", a_copy_in_test, "alike, in units"),
    ("heldout", in_split("train", instance(variant="finite_check"), index=1), "has a held-out variant"),
    ("ranks", in_split("train", meta(world_size=2)), "of rank 0"),
    ("traces", in_split("train", not_nested), "is not within its parent"),
    ("steps", in_split("test", swapped_steps), "its steps are ProfilerStep#1, ProfilerStep#0"),
    ("attribution", lambda folder: change_records(folder, without_an_event), "(host_sync/item)"),
    ("windows", table("windows", "test", put("ops", lambda n: n + 1)), "ops of window 0 is"),
]  # fmt: skip


def test_a_data_set_keeps_all_promises(kept):
    report = verify(kept)
    assert [check.name for check in report.checks] == list(PROMISES)
    assert {check.name: check.violations for check in report.checks if check.violations} == {}
    assert report.failures == []
    assert all(check.state == "ok" for check in report.checks)
    traces = sum(
        1
        for split in ("train", "validation", "test")
        for _ in read_traces(kept / shard_path("traces", split))
    )
    assert {check.looked for check in report.checks if check.things == "traces"} == {traces}


@pytest.mark.parametrize(
    ("name", "breaks", "says"), BROKEN, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BROKEN)]
)
def test_a_broken_promise_is_told_and_no_other(dataset, name, breaks, says):
    breaks(dataset)
    report = verify(dataset)
    assert {check.name: check.violations for check in report.failures}.keys() == {name}, report.failures
    (failed,) = report.failures
    assert any(says in violation for violation in failed.violations), failed.violations


def test_there_is_a_broken_copy_for_each_promise():
    assert {name for name, *_ in BROKEN} == set(PROMISES)


def test_a_file_that_is_missing_ends_the_checks_of_what_is_in_files(dataset):
    (dataset / shard_path("windows", "test")).unlink()
    report = verify(dataset)
    failed = {check.name: check.violations for check in report.failures}
    assert failed["layout"] == ["data/windows-test-00000-of-00001.parquet is missing"]
    assert "data/windows-test-00000-of-00001.parquet is missing" in failed["checksums"]
    assert {check.name for check in report.checks if check.state == "not made"} == {
        *list(PROMISES)[list(PROMISES).index("ids") :], "card",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"schema_version": "3"}, "has schema version 3, "),
        ({"schema_version": "none"}, "holds no schema version"),
        ({"canary": "another"}, "has no canary, or another one"),
    ],
)
def test_files_of_another_kind_are_told(dataset, said, told):
    path = dataset / shard_path("segments", "train")
    old = {key: value for key, value in pq.read_metadata(path).metadata.items() if b"torchtraceap" in key}
    new = {f"torchtraceap.{key}".encode(): value for key, value in said.items()}
    pq.write_table(pq.read_table(path).replace_schema_metadata({**old, **new}), path)
    failed = {check.name: check.violations for check in verify(dataset).failures}
    assert len(failed["schema"]) == 1
    assert told in failed["schema"][0]
    assert "segments" not in failed  # what cannot be read is not judged


@pytest.mark.parametrize("config", ["traces", "windows"])
def test_damage_within_a_file_is_told_by_name(dataset, config):
    path = dataset / shard_path(config, "test")
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)
    report = verify(dataset)
    failed = {check.name: check.violations for check in report.failures}
    assert failed["checksums"] == [f"data/{path.name} is not the file that SHA256SUMS describes"]
    (told,) = failed["traces" if config == "traces" else "schema"]
    assert f"{path} cannot be read as Parquet" in told


def test_rows_that_do_not_follow_the_schema_are_told_by_trace(dataset):
    path = dataset / shard_path("traces", "test")
    rows = pq.read_table(path)
    said = {key: value for key, value in pq.read_metadata(path).metadata.items() if b"torch" in key}
    instances = rows["instances"].combine_chunks()
    states = pa.array([["likely"] * len(cell) for cell in instances.field("state").to_pylist()])
    fields = [states if f.name == "state" else instances.field(f.name) for f in instances.type]
    column = pa.StructArray.from_arrays(fields, fields=list(instances.type))
    rows = rows.set_column(rows.schema.get_field_index("instances"), "instances", column)
    pq.write_table(rows.replace_schema_metadata(said), path, row_group_size=8)
    failed = {check.name: check.violations for check in verify(dataset).failures}
    assert all("does not follow the schema" in told and "likely" in told for told in failed["traces"])


def test_a_pattern_of_a_newer_catalogue_is_told(dataset):
    path = dataset / shard_path("traces", "test")
    records = list(read_traces(path))
    records[0].exhaustive.append("telepathy")
    records[0].instances[0] = msgspec.structs.replace(records[0].instances[0], pattern="telepathy")
    write_traces(path, records)
    failed = {check.name: check.violations for check in verify(dataset).failures}
    assert any("telepathy" in told for told in failed["exhaustive"])
    assert any("is of no pattern of the catalogue" in told for told in failed["instances"])


def test_a_sample_is_drawn_by_its_seed(dataset, monkeypatch):
    drawn: dict[int, list[frozenset[str]]] = {0: [], 1: []}
    for seed, items in drawn.items():

        def keep(item: _inspect.Item, items: list[frozenset[str]] = items) -> list[_inspect.Inspected]:
            items.append(item.ids)
            return [{} for _ in item.ids]

        monkeypatch.setattr(_inspect, "inspect_group", keep)
        for _ in range(2):
            report = verify(dataset, 3, seed=seed)
            looked = {check.name: (check.looked, check.of) for check in report.checks}
            assert looked["attribution"] == (3, looked["ids"][1])
        assert items[: len(items) // 2] == items[len(items) // 2 :]
    assert drawn[0] != drawn[1]


def test_many_processes_find_the_same(dataset):
    table("windows", "test", put("ops", lambda n: n + 1))(dataset)
    assert verify(dataset, where=Where(2)) == verify(dataset)


def test_what_comes_after_a_build_may_be_left_out(dataset):
    (dataset / "leak_audit.json").unlink()
    assert {check.name for check in verify(dataset).failures} == {"checksums", "audit"}
    report = verify(dataset, leave_out=["audit", "checksums"])
    assert report.failures == []
    assert {"audit", "checksums"}.isdisjoint(check.name for check in report.checks)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no data/\*\.parquet"):
        verify(tmp_path)


def test_ids_that_count_are_not_random():
    assert list(_release._ids([f"{0x10AB00 + n:016x}" for n in range(40)], ["a" * 16])) != []
    draw = random.Random(3)
    for count in (1, 2, 5, 40, 2000):
        assert list(_release._ids([f"{draw.getrandbits(64):016x}" for _ in range(count)], [])) == []
    assert list(_release._ids(["0123456789abcdef"] * 2, [])) == ["2 traces have the id 0123456789abcdef"]


def test_verdicts_may_be_contradicted_as_often_as_intervals_miss():
    def seen(against: int) -> list[SimpleNamespace]:
        record = publishable(1, clean=False)
        return [
            SimpleNamespace(
                meta={"pair_id": f"{n:016x}"},
                record=SimpleNamespace(
                    instances=[
                        msgspec.structs.replace(
                            record.instances[0],
                            state="costly",
                            cost_high=1.005 if n < against else 1.2,
                        )
                    ]
                ),
            )
            for n in range(200)
        ]

    assert list(_release._contradictions(seen(5))) == []  # type: ignore[arg-type]
    (told,) = _release._contradictions(seen(20))  # type: ignore[arg-type]
    assert told.startswith("20 of 200 that are costly have intervals on the other side of 1.01")


@pytest.mark.parametrize(
    "text",
    [
        "/home/alice/data", "open(/root/.cache)", "/tmp/x", "~/models", "C:\\Users\\bob", "file://share/x",
        "alice@example.com", "10.1.22.3", "gpu7.internal", "pid 4242", "tid=17", "0x7f3a5c001200",
        "GPU-1b2c3d4e-0000-1111-2222-333344445555", "a/site-packages/timm/x", "ip-10-0-0-1",
        "02:42:ac:11:00:02",
    ],
)  # fmt: skip
def test_private_texts_are_found(text):
    assert list(private([text]))


@pytest.mark.parametrize(
    "text",
    [
        "aten::div", "Torch-Compiled Region: 0/0", "dynamo_data: compile_id=3/1", "timm/resnet18",
        "580.159.04",
        "void at::native::vectorized_elementwise_kernel<4, std::array<char*, 3ul> >(int, float)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "2.11.0+cu130",
        "Memcpy HtoD (Pinned -> Device)", "void (anonymous namespace)::x<float>(float const*) [clone .kd]",
        "triton_poi_fused_add_data_0", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "c10d::allreduce_", "gloo:all_reduce", "a/data/b", "</title>", "1.0/2.0", "thread 12", "stream 7",
    ],
)  # fmt: skip
def test_other_texts_are_not(text):
    assert list(private([text])) == []


def test_the_name_of_this_host_is_private(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "frodo-3.example.org")
    _texts._kinds.cache_clear()
    _texts._found.cache_clear()
    try:
        assert list(private(["made on frodo-3"])) == ["the name of this user or host in 'made on frodo-3'"]
        assert list(private(["frodo-35", "xfrodo-3"])) == []
    finally:
        _texts._kinds.cache_clear()
        _texts._found.cache_clear()


def test_an_audit_is_recorded_beside_its_data_alone(dataset):
    before = checksums.read_checksums(dataset)
    record_audit(dataset, {"passed": False, "arms": [arm(float("nan"))], "metadata": []})
    after = checksums.read_checksums(dataset)
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] != before[name]} == {"leak_audit.json"}
    (check,) = [check for check in verify(dataset).checks if check.name == "audit"]
    assert (check.state, check.note) == ("ok", "off not passed")
    with (dataset / "README.md").open("a") as card:
        card.write("\n")
    with pytest.raises(UserError, match=r"README\.md is not the file that SHA256SUMS describes"):
        record_audit(dataset, {"passed": False, "arms": [], "metadata": []})


def arm(auroc: float) -> dict[str, object]:
    return {"name": "off", "passed": False, "auroc": auroc, "low": auroc, "high": auroc}


def test_the_command_says_a_line_a_check(kept, capsys):
    assert main(["verify", str(kept), "--sample", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["ok", name] for name in PROMISES]
    assert lines[-1] == "every promise holds"
    assert "(2 of 12 traces)" in next(line for line in lines if " attribution " in line)


def test_the_command_names_what_is_wrong_and_no_control_character(dataset, capsys):
    in_split("train", op("kernel", name="ttap-\x1b[31m/0/1/1"))(dataset)
    assert main(["verify", str(dataset)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "failed   markers" in out
    assert "- trace " in out
    assert out.endswith(f"1 of {len(PROMISES)} promises are broken\n")
    assert main(["verify", str(dataset), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [check["name"] for check in report["checks"] if check["count"]] == ["markers"]


def test_the_command_refuses_what_is_no_data_set(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("traceap: ")
