"""The command's contract: exit codes, one line of complaint, JSON that parses, nothing overwritten."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from measured import measurements
from traces import random_record

from torchtraceap import __version__, console
from torchtraceap.cli import main
from torchtraceap.collect import runner
from torchtraceap.collect.model import ZOO
from torchtraceap.commands import collecting, demo
from torchtraceap.dataset.parquet import read_traces, split_files, write_traces
from torchtraceap.dataset.schema import SESSION_KEY
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS

FULL = Path("/dev/full")
"""A device to which nothing can be written."""

EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 10, "dur": 90},
    {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 20, "dur": 30},
]


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return path


@pytest.fixture
def traceap(capsys):
    """Run the command in this process; gives exit code, standard output and standard error."""

    def run(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(result, *parts):
    """Exit code 2, nothing on stdout, one line on stderr that holds ``parts``."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("traceap: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err


def test_version(traceap):
    assert traceap("--version") == (0, f"traceap {__version__}\n", "")


def test_alone_it_prints_help(traceap):
    code, out, err = traceap()
    assert (code, err) == (0, "")
    assert "Usage: traceap" in out
    assert "collect" in out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["zo"], ["No such command", "zo"]),
        (["zoo"], ["Missing command", "See: traceap zoo --help"]),
        (["zoo", "list", "--jsn"], ["--jsn"]),
        (["zoo", "list", "--check", "check.json"], ["add --markdown"]),
        (["zoo", "list", "--markdown", "--task", "pose"], ["--markdown prints the whole page"]),
        (["zoo", "list", "--markdown", "--check", "nowhere.json"], ["nowhere.json: No such file"]),
        (["zoo", "list", "--min-params", "3", "--max-params", "2"], ["--min-params 3 is above"]),
        (["zoo", "check", "-o", "x", "--task", "pose", "--model", "timm/resnet18"], ["no model meets all"]),
        (["zoo", "list", "--task", "detect"], ["Unknown task 'detect'", "detection"]),
        (["patterns", "show"], ["Missing argument", "ID"]),
        (["patterns", "show", "host_snc"], ["Unknown pattern 'host_snc'", "host_sync"]),
        (["build", "-o", "x"], ["Missing argument", "RUN"]),
        (["collect", "-o", "x"], ["--model", "--tier small"]),
        (["collect", "-o", "x", "--tier", "tiny"], ["tiny", "small", "all"]),
        (["collect", "-o", "x", "--model", "timm/resnet81"], ["'timm/resnet81'", "timm/resnet18"]),
        (
            ["collect", "-o", "x", "--model", "timm/resnet18", "--pattern", "host_snc"],
            ["Unknown pattern 'host_snc'", "host_sync"],
        ),
        (["collect", "-o", "x", "--model", "timm/resnet18", "--seed", "-1"], ["--seed", "0"]),
        (["collect", "-o", "x", "--model", "timm/resnet18", "--device", "toaster"], ["'toaster'", "cpu"]),
        (["collect", "-o", "x", "--tier", "small", "--lanes", "0"], ["--lanes", "equal to 1"]),
        (["collect", "-o", "x", "--tier", "small", "--lanes", "99"], ["--lanes", "equal to 16"]),
        (["collect", "-o", "x", "--tier", "small", "--time-limit", "inf"], ["--time-limit", "1000000"]),
        (["collect", "-o", "x", "--tier", "small", "--world-size", "1"], ["--world-size", "2"]),
        (["collect", "-o", "x", "--tier", "small", "--world-size", "3"], ["add --runtime distributed"]),
        (
            ["collect", "-o", "x", "--tier", "small", "--runtime", "distributed", "--mode", "infer"],
            ["distributed workloads have train alone"],
        ),
        (
            ["collect", "-o", "x", "--model", "timm/resnet50", "--runtime", "compiled"],
            ["timm/resnet50", "timm/resnet18"],
        ),
        (["detect", "x", "--detector", "ruels", "-o", "y"], ["Unknown detector 'ruels'", "rules"]),
        (["detect", "x", "--detector", "rules", "-o", "y", "--split", "tset"], ["'tset'", "test"]),
        (["detect", "x", "--detector", "rules", "-o", "y"], ["x", "traceap build"]),
        (["score", "x", "y"], ["x"]),
        (["report", "x", "-o", "r.html"], ["x", "traceap build"]),
        (["build", "nowhere", "-o", "x"], ["nowhere"]),
        (["quality", "nowhere"], ["nowhere holds no shards", "traceap collect"]),
        (["convert", "nowhere.json", "-o", "x.parquet"], ["nowhere.json", "No such file"]),
        (["diagnose", "nowhere.json"], ["nowhere.json", "No such file"]),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_writes_nothing(traceap, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    refused(traceap(*words), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not JSON"),
        (b'{"traceEvents": [{"ph": "X", ', "cut off"),
        (b'{"answer": 42}', "traceEvents"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cannot be read"),
        (b"\x89PNG\r\n", "not JSON"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "diagnose"])
def test_what_is_no_trace(traceap, tmp_path, command, content, part):
    path, out = tmp_path / "trace.json", tmp_path / "out.parquet"
    path.write_bytes(content)
    more = ["-o", out] if command == "convert" else []
    refused(traceap(command, path, *more), str(path), part)
    assert not out.exists()


def test_convert_keeps_what_is_known_and_no_more(traceap, trace_file, tmp_path):
    out = tmp_path / "trace.parquet"
    code, text, _ = traceap("convert", trace_file, "-o", out, "--json")
    assert code == 0
    assert json.loads(text) == {
        "trace_id": json.loads(text)["trace_id"],
        "events": 2,
        "lanes": 1,
        "steps": 1,
        "bytes": out.stat().st_size,
        "out": str(out),
    }
    (record,) = read_traces(out)
    assert record.trace.names.tolist() == ["ProfilerStep#1", "aten::add"]
    assert record.trace.events.start_ns.tolist() == [0, 10_000]
    assert (record.meta["quality"], record.meta["mode"], record.meta["step_ms"]) == (
        "undecided", "infer", np.float32(0.09),
    )  # fmt: skip


@pytest.mark.parametrize("command", ["convert", "diagnose"])
def test_an_output_that_exists_is_kept_unless_forced(traceap, trace_file, tmp_path, command):
    out = tmp_path / "out"
    out.write_text("mine")
    option = "-o" if command == "convert" else "--html"
    refused(traceap(command, trace_file, option, out), str(out), "exists", "--force")
    assert out.read_text() == "mine"
    code, _, _ = traceap(command, trace_file, option, out, "--force")
    assert code == 0
    assert out.read_bytes()[:4] == (b"PAR1" if command == "convert" else b"<!do")


@pytest.mark.parametrize("words", [["convert", "-o"], ["diagnose", "--html"]])
def test_the_input_is_never_the_output(traceap, trace_file, words):
    command, option = words
    before = trace_file.read_bytes()
    link = trace_file.with_name("link")
    link.symlink_to(trace_file)
    refused(traceap(command, trace_file, option, link, "--force"), "link is the input")
    assert trace_file.read_bytes() == before


@pytest.mark.parametrize("command", [["convert", "-o", "out.parquet"], ["diagnose"]])
def test_a_profile_may_come_through_a_pipe(trace_file, tmp_path, command):
    name, *rest = command
    run = subprocess.run(
        [sys.executable, "-m", "torchtraceap.cli", name, "/dev/stdin", *rest],
        input=trace_file.read_bytes(), capture_output=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"2 events" in run.stdout


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["patterns", "list"], ["patterns", "list", "--json"], ["--help"]])
def test_output_that_cannot_be_written(words):
    with FULL.open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "torchtraceap.cli", *words],
            stdout=full, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert (run.returncode, run.stderr) == (2, b"traceap: output: No space left on device\n")


def test_a_terminal_without_unicode(trace_file, tmp_path):
    odd = tmp_path / "tr\N{LATIN SMALL LETTER A WITH RING ABOVE}ce.json.gz"
    trace_file.rename(odd)
    run = subprocess.run(
        [sys.executable, "-m", "torchtraceap.cli", "diagnose", odd],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0
    assert run.stdout.startswith(b"tr\\xe5ce.json.gz")


@pytest.mark.parametrize("words", [["build", "run", "-o"], ["detect", "x", "--detector", "rules", "-o"]])
def test_a_folder_with_files_is_kept(traceap, tmp_path, words):
    out = tmp_path / "out"
    out.mkdir()
    out.joinpath("notes.txt").write_text("mine")
    refused(traceap(*words, out), str(out), "exists", "--force")
    assert list(out.iterdir()) == [out / "notes.txt"]


def test_diagnose_json(traceap, trace_file):
    code, text, _ = traceap("diagnose", trace_file, "--json")
    facts = json.loads(text)
    assert (code, facts["events"], facts["steps"], facts["step_ms"]) == (0, 2, 1, 0.09)


@pytest.mark.parametrize("words", [["zoo", "list"], ["patterns", "list"], ["detectors", "list"]])
def test_lists_hold_the_same_names_as_table_and_as_json(traceap, words):
    code, text, err = traceap(*words, "--json")
    assert (code, err) == (0, "")
    names = [row.get("name", row.get("id")) for row in json.loads(text)]
    assert names == sorted(names)
    code, table, _ = traceap(*words)
    assert code == 0
    lines = [line.split()[0] for line in table.splitlines() if line.strip()]
    assert names == [word for word in lines if word in set(names)]


def test_zoo_list_filters(traceap):
    rows = json.loads(traceap("zoo", "list", "--small", "--task", "classification", "--json")[1])
    assert "timm/resnet18" in [row["name"] for row in rows]
    assert {(row["task"], row["small"]) for row in rows} == {("classification", True)}


def test_show_pattern(traceap):
    code, text, _ = traceap("patterns", "show", "host_sync")
    row = json.loads(traceap("patterns", "show", "host_sync", "--json")[1])
    assert code == 0
    for value in (row["id"], row["title"], *(v["name"] for v in row["variants"] + row["lookalikes"])):
        assert value in text
    for line in row["remedy"].splitlines():
        assert line in text


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(console, "emit_json", lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["patterns", "list", "--json"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("bad\nnews \x1b[31m[red]"), 2, "traceap: bad\\nnews \\x1b[31m[red]\n"),
        (PermissionError(13, "Permission denied", "/x/y"), 2, "traceap: /x/y: Permission denied\n"),
        (KeyboardInterrupt(), 130, "traceap: interrupted\n"),
    ],
)
def test_ends(traceap, monkeypatch, error, code, line):
    def fail(value):
        raise error

    monkeypatch.setattr(console, "emit_json", fail)
    assert traceap("patterns", "list", "--json") == (code, "", line)


def test_sigterm_ends_a_command_as_in_order_as_an_interrupt():
    program = """if True:
        import os, signal, sys
        from torchtraceap import cli, console
        def end(value):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                print("in order")
        console.emit_json = end
        sys.exit(cli.main(["patterns", "list", "--json"]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "in order\n", "traceap: interrupted\n")


def test_a_closed_pipe_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "torchtraceap.cli", "patterns", "list", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("aten::add", "aten::add"),
        ("Größe 大", "Größe 大"),
        ("\x1b[2J\r\n\x07", "\\x1b[2J\\r\\n\\x07"),
        ("a\u202eb\u2028c\x9b", "a\\u202eb\\u2028c\\x9b"),
        ("\ud800", "\\ud800"),
    ],
)
def test_visible(text, shown):
    assert console.visible(text) == shown


def test_a_table_prints_markup_as_text(capsys):
    console.table(
        "[b]t", ["[red]name", "n"], [["[link=http://x]\x1b]8;;", 0.5], ["b", float("nan")]], numeric=1
    )
    out = capsys.readouterr().out
    for part in ("[b]t", "[red]name", "[link=http://x]\\x1b]8;;", "0.500"):
        assert part in out
    assert "\x1b" not in out
    assert out.splitlines()[-2].split() == ["b", "-"]


def test_json_has_no_nan_and_no_raw_characters(capsys):
    console.emit_json({"a": float("nan"), "b": np.float32(0.5), "c": "\u202e\x9b", "d": np.arange(2)})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"a": None, "b": 0.5, "c": "\u202e\x9b", "d": [0, 1]}


HARDWARE = {
    "hardware_id": "cpu-test", "device_kind": "cuda", "device_name": "device", "device_count": 1,
    "compute_units": 1, "memory_gib": 1.0, "driver": "1", "runtime": "CUDA 13.0", "cpu_name": "cpu",
    "cpu_cores": 1, "ram_gib": 1.0, "os": "Linux", "python": "3.11", "torch": "2.14", "libraries": "{}",
    "emulated": False,
}  # fmt: skip


def catalogued(record):
    """The record with variants that the catalogue knows, so that it passes for a collected one."""

    def known(instance):
        pattern = PATTERNS[instance.pattern]
        twins = pattern.lookalikes if instance.source == "lookalike" else pattern.variants
        return msgspec.structs.replace(instance, variant=twins[0].name)

    record.instances = [known(instance) for instance in record.instances]
    record.meta["hardware_id"] = HARDWARE["hardware_id"]
    return record


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Built by the command from a run of six workloads with two traces each."""
    folder = tmp_path_factory.mktemp("dataset")
    records = [catalogued(random_record(seed, gpu=True)) for seed in range(12)]
    for seed, record in enumerate(records):
        record.meta |= {"backbone_family": f"backbone{seed // 2}", "task": "classification"}
    session = {
        "hardware": HARDWARE,
        "instances": [one for record in records for one in measurements(record)],
    }
    write_traces(folder / "run" / "shards" / "job.parquet", records, {SESSION_KEY: json.dumps(session)})
    assert main(["build", str(folder / "run"), "-o", str(folder / "data")]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def submissions(dataset):
    """What two detectors say of the training split."""
    paths = [dataset.parent / name for name in ("everything", "nothing")]
    for path in paths:
        words = ["detect", str(dataset), "--detector", path.name, "--split", "train", "-o", str(path)]
        assert main(words) == 0
    return paths


def test_build_json(traceap, dataset, tmp_path):
    code, text, _ = traceap("build", dataset.parent / "run", "-o", tmp_path / "data", "--json")
    report = json.loads(text)
    assert code == 0
    assert sum(report["traces"].values()) + report["left_out"] == 12
    assert sum(report["units"].values()) == 6


def test_build_refuses_a_data_set_that_exists(traceap, dataset):
    before = sorted(path.name for path in dataset.rglob("*"))
    refused(traceap("build", dataset.parent / "run", "-o", dataset), str(dataset), "--force")
    assert sorted(path.name for path in dataset.rglob("*")) == before


def test_score_ranks(traceap, dataset, submissions):
    code, text, _ = traceap("score", dataset, *submissions, "--split", "train", "--resamples", 20, "--json")
    board = json.loads(text)
    values = [row["scores"][board["ranking_metric"]]["value"] for row in board["rows"]]
    assert (code, [row["rank"] for row in board["rows"]]) == (0, [1, 2])
    assert {row["card"]["name"] for row in board["rows"]} == {"everything", "nothing"}
    assert values[0] >= values[1] == 0
    code, table, _ = traceap("score", dataset, *submissions, "--split", "train", "--resamples", 20)
    assert code == 0
    assert "everything" in table


def test_detectors_and_scores_do_without_the_measurements(traceap, dataset, submissions, tmp_path):
    rest = Path(shutil.copytree(dataset, tmp_path / "rest"))
    for path in rest.glob("data/costs-*.parquet"):
        path.unlink()
    found = {}
    for folder in (dataset, rest):
        out = tmp_path / f"rules-{folder.name}"
        assert traceap("detect", folder, "--detector", "rules", "--split", "train", "-o", out)[0] == 0
        words = ["score", folder, out, submissions[0], "--split", "train", "--resamples", 20, "--json"]
        board = json.loads(traceap(*words)[1])
        found[folder] = next(out.glob("detections.*")).read_bytes(), [row["scores"] for row in board["rows"]]
    assert found[dataset] == found[rest]


def test_report_is_a_page(traceap, dataset, submissions, tmp_path):
    out = tmp_path / "report.html"
    records = list(read_traces(split_files(dataset, "traces", "train")))
    bad = {record.trace_id for record in records if record.quality == "bad"}
    assert 0 < len(bad) < len(records)
    code, text, _ = traceap(
        "report",
        dataset,
        submissions[0],
        "--split",
        "train",
        "--resamples",
        0,
        "--traces",
        len(bad),
        "-o",
        out,
    )
    assert (code, text) == (0, f"{out}\n")
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert {record.trace_id for record in records if record.trace_id in page} == bad  # good ones come last


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"end_ns": -5}, "row 2"),
        ({"lane": "tpu"}, "tpu"),
        ({"score": "high"}, "row 2"),
        ({"trace_id": "\x1b[2J"}, "row 2"),
        ({"pattern": "\x1b[2J"}, "row 2"),
    ],
)
def test_a_bad_row_is_named_on_one_harmless_line(traceap, dataset, submissions, tmp_path, changes, part):
    good = {
        "trace_id": trace_ids(dataset)[0],
        "pattern": "host_sync",
        "lane": "cpu",
        "start_ns": 0,
        "end_ns": 9,
    }
    rows = [good | {"score": 1.0}, good | {"score": 1.0} | changes]
    tmp_path.joinpath("card.yaml").write_bytes(submissions[0].joinpath("card.yaml").read_bytes())
    tmp_path.joinpath("detections.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = traceap("score", dataset, tmp_path, "--split", "train")
    refused(result, part)
    assert "row 1:" not in result[2]
    assert "\x1b" not in result[2]


def trace_ids(dataset):
    return [record.trace_id for record in read_traces(dataset.glob("data/traces-train-*.parquet"))]


@pytest.fixture
def fake_runner(monkeypatch):
    """A runner whose workloads end as told, in turn: with a number of traces, or a complaint."""

    def install(*outcomes):
        def run(plan, out, *, on_event, **_):
            report = runner.RunReport()
            for job, outcome in zip(plan, outcomes, strict=True):
                on_event(runner.JobEvent("start", job))
                if isinstance(outcome, int):
                    report.done.append(job.name)
                    report.traces += outcome
                    on_event(runner.JobEvent("done", job, result={"traces": outcome}))
                else:
                    report.failed[job.name] = outcome
                    on_event(runner.JobEvent("failed", job, text=outcome))
            return report

        monkeypatch.setattr(runner, "collect", run)
        monkeypatch.setattr(collecting, "resolve_devices", lambda name, size=1: (["cpu"], "cpu"))

    return install


def test_collect_ends_with_1_when_a_workload_failed(traceap, fake_runner, tmp_path):
    fake_runner(3, "no \x1bmemory")
    code, text, err = traceap("collect", "-o", tmp_path / "run", "--model", "timm/resnet18", "--json")
    report = json.loads(text)
    (done,), ((failed, why),) = report["done"], report["failed"].items()
    assert (code, report["traces"], why) == (1, 3, "no \x1bmemory")
    assert done.startswith("timm-resnet18_train_")
    assert failed.startswith("timm-resnet18_infer_")
    assert f"{failed}: failed after 0 s: no \\x1bmemory\n" in err


def test_what_failed_and_why_is_listed_at_the_end(traceap, fake_runner, tmp_path):
    fake_runner(3, "no \x1bmemory")
    code, text, _ = traceap("collect", "-o", tmp_path / "run", "--model", "timm/resnet18")
    assert code == 1
    assert text.splitlines()[0].endswith("0 were there already, 1 failed")
    assert re.search(r"timm-resnet18_infer_b\d +no \\x1bmemory *\n", text)


def test_the_demo_covers_what_it_promises():
    assert len(demo.WORKLOADS) >= 8
    assert {mode for _, mode in demo.WORKLOADS[:4]} == {"train", "infer"}
    assert {ZOO[model].task for model, _ in demo.WORKLOADS[:5]} >= {
        "classification", "detection", "segmentation", "generation", "pose",
    }  # fmt: skip
    assert all(ZOO[model].small for model, _ in demo.WORKLOADS)


def test_collect_ends_with_0_when_all_is_done(traceap, fake_runner, tmp_path):
    fake_runner(3, 2)
    code, text, _ = traceap("collect", "-o", tmp_path / "run", "--model", "timm/resnet18")
    assert code == 0
    assert text.startswith("5 traces of 2 workloads in ")


def test_collect_hands_its_limits_to_the_runner(traceap, monkeypatch, tmp_path):
    given = {}

    def run(plan, out, *, on_event, **options):
        given.update(options)
        return runner.RunReport(left=[job.name for job in plan])

    monkeypatch.setattr(runner, "collect", run)
    limits = ["--lanes", 3, "--budget", 0, "--time-limit", 7, "--event-cap", 9, "--shard-mb", 1.5, "--resume"]
    limits += ["--memory-limit", 0.5]
    code, text, _ = traceap(
        "collect", "-o", tmp_path / "run", "--model", "timm/resnet18", "--device", "cpu", *limits
    )
    assert code == 0
    assert given == {
        "devices": ["cpu"], "lanes": 3, "budget": 0, "time_limit": 7, "event_cap": 9, "resume": True,
        "shard_mb": 1.5, "memory_limit": 1 << 29,
    }  # fmt: skip
    assert "2 workloads did not start within the budget; --resume runs them\n" in text


def test_collect_on_a_cluster_hands_its_options_to_the_driver(traceap, monkeypatch, tmp_path):
    given = {}

    def run(address, plan, out, *, on_event, **options):
        given.update(options, address=address, models=[job.model for job in plan])
        return runner.RunReport()

    monkeypatch.setattr("torchtraceap.collect.cluster.collect", run)
    words = ["--ray", "head:6379", "--accelerator-type", "H100", "--shared", "s3://a/b", "--resume"]
    base = ["collect", "-o", tmp_path / "run", "--model", "timm/resnet18", "--mode", "infer"]
    assert traceap(*base, *words)[0] == 0
    assert given == {
        "address": "head:6379", "models": ["timm/resnet18"], "device_type": "cuda", "accelerator": "H100",
        "shared": "s3://a/b", "lanes": 2, "resume": True, "time_limit": 600.0, "memory_limit": None,
        "event_cap": 60_000, "shard_mb": 45.0, "budget": float("inf"),
    }  # fmt: skip
    code, _, err = traceap(*base, "--shared", "s3://a/b", "--device", "cpu")
    assert (code, "add --ray ADDRESS" in err) == (2, True)
    code, _, err = traceap(*base, "--ray", "head:6379", "--device", "cuda:1")
    assert (code, "Ray's choice; say cuda, xpu or cpu" in err) == (2, True)


def test_convert_of_several(traceap, tmp_path):
    """One cannot be read; the others are written, each to a file of its name."""
    folder = tmp_path / "out"
    profiles = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path in profiles[:2]:
        path.write_text(json.dumps({"traceEvents": EVENTS}))
    profiles[2].write_text("no JSON")
    code, text, err = traceap("convert", *profiles, "-o", folder, "--jobs", 2)
    assert code == 1
    assert "c.json" in err
    assert sorted(path.name for path in folder.iterdir()) == ["a.parquet", "b.parquet"]
    assert [len(list(read_traces(folder / f"{name}.parquet"))) for name in "ab"] == [1, 1]
    assert text.count("bytes an event") == 2
    code, _, err = traceap("convert", profiles[0], "-o", folder)
    assert (code, "a.parquet exists; choose another output or give --force" in err) == (2, True)
    (tmp_path / "twin").mkdir()
    twin = tmp_path / "twin" / "a.json"
    twin.write_text("{}")
    code, _, err = traceap("convert", profiles[0], twin, "-o", tmp_path / "new")
    assert (code, "two profiles would be written as" in err) == (2, True)


def test_jobs_change_nothing(traceap, dataset, submissions, tmp_path):
    """The same bytes from two processes as from one."""
    assert traceap("build", dataset.parent / "run", "-o", tmp_path / "data", "--jobs", 2)[0] == 0
    everything = ["--detector", "everything", "--split", "train", "--jobs", 2]
    assert traceap("detect", dataset, *everything, "-o", tmp_path / "everything")[0] == 0
    pairs = [(dataset, tmp_path / "data"), (submissions[0], tmp_path / "everything")]
    for one, two in pairs:
        files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
        assert files
        assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
        assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)


def test_parts_of_a_plan_are_disjoint_and_make_up_the_whole(traceap, monkeypatch, tmp_path):
    plans = []

    def run(plan, out, *, on_event, **options):
        plans.append(plan)
        return runner.RunReport()

    monkeypatch.setattr(runner, "collect", run)
    base = ["collect", "-o", tmp_path / "run", "--device", "cpu", "--model", "timm/resnet18"]
    base += ["--model", "timm/mobilenetv3_large_100"]
    for options in ([], ["--part", "1/3"], ["--part", "2/3"], ["--part", "3/3"]):
        assert traceap(*base, *options)[0] == 0
    whole, *parts = plans
    assert [len(part) for part in parts] == [2, 1, 1]
    assert [parts[0][0], parts[1][0], parts[2][0], parts[0][1]] == whole


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "-1/2", "1/0", "one/two"])
def test_a_part_that_there_is_not_is_refused(traceap, tmp_path, part):
    code, _, err = traceap("collect", "-o", tmp_path / "run", "--tier", "small", f"--part={part}")
    assert code == 2
    assert f"--part {part}: say which part of how many, from 1/N to N/N" in err


@pytest.mark.slow
def test_demo_of_one_model(traceap, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "WORKLOADS", (("torchvision/lraspp_mobilenet_v3_large", "infer"),))
    monkeypatch.setattr(demo, "PATTERNS", {"infer": ("redundant_copy",)})
    monkeypatch.setattr(demo, "TIME_LIMIT", 280.0)
    out = tmp_path / "demo"
    code, text, err = traceap("demo", "-o", out, "--device", "cpu")
    assert code == 0, err
    # Without the injected one if its variant is held out.
    assert "traces: 2 train\n" in text or "traces: 1 train\n" in text
    for detector in demo.DETECTORS:
        assert f"{detector} " in text
    assert text.endswith(f"report: {out / 'report.html'}\n")
    refused(traceap("demo", "-o", out), "exists")
