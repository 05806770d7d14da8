"""A plan on a Ray cluster of two nodes on this machine, with what befalls nodes; workloads need no torch."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cluster
import msgspec
import pytest

from torchtraceap.collect import cluster
from torchtraceap.collect.cluster import Need
from torchtraceap.collect.plan import Job
from torchtraceap.collect.run_folder import read_log, shard_path
from torchtraceap.collect.runner import JobEvent, RunReport
from torchtraceap.dataset.shards import files_of, traces_of
from torchtraceap.errors import UserError
from torchtraceap.parallel import Where, map_on

SECONDS = 120.0
KIND = "accelerator_type:T1000"


def job(model: str, **changes: Any) -> Job:
    return msgspec.structs.replace(Job(f"fake/{model}", "train", 2, 0, [], []), **changes)


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "Alive": alive,
        "Resources": {name.replace("_type_", "_type:"): n for name, n in resources.items()},
    }


def need(
    nodes: list[dict], device_type: str = "cuda", accelerator: str | None = None, lanes=2, ranks=1
) -> Need:
    plan = [job("x", world_size=ranks)]
    return Need.of(plan, nodes, device_type=device_type, accelerator=accelerator, lanes=lanes)


H100 = node(CPU=64, GPU=8, accelerator_type_H100=1)
T4 = node(CPU=4, GPU=1, accelerator_type_T4=1)
HEAD = node(CPU=16)


def test_workloads_share_gpus_and_cpus_of_a_node() -> None:
    assert need([HEAD, H100]) == Need(0.5, 4)
    assert [need([H100]).slots(one) for one in (H100, T4, HEAD)] == [16, 1, 0]
    assert need([H100, T4]) == Need(0.5, 2)
    assert need([H100, T4], accelerator="H100") == Need(0.5, 4, "H100")
    assert need([H100], lanes=3) == Need(0.3333, 2)
    assert need([H100], lanes=3).slots(H100) == 24
    assert need([H100], ranks=4) == Need(4.0, 32)


def test_a_node_without_a_gpu_is_one_device() -> None:
    assert need([HEAD], "cpu", lanes=1) == Need(0.0, 16)
    assert need([HEAD], "cpu", lanes=2) == Need(0.0, 8)
    assert need([HEAD], "cpu", lanes=2).slots(HEAD) == 2


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            {"accelerator": "A100"},
            "has 1 GPU of type A100 for a workload; there are: 1 x lost node; 2 x node with 8",
        ),
        ({"ranks": 16}, r"has 16 GPU for a workload; .*node with 8 GPU \(H100\), 64 CPU"),
    ],
)
def test_what_no_node_has_is_said_before_anything_runs(wanted: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        need([H100, H100, node(alive=False)], **wanted)
    with pytest.raises(UserError, match=r"1 x node with 0 GPU, 16 CPU \(to collect on CPUs: --device cpu\)"):
        need([HEAD])


def test_nobody_at_the_address() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'torchtraceap[scale]'")
    with pytest.raises(UserError, match=r"--ray 127\.0\.0\.1:1: nobody answers there"):
        list(map_on(Where(ray="127.0.0.1:1"), fake_cluster.square, [1]))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A cluster of a head without anything and two nodes of a GPU each, and the folder of marks."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'torchtraceap[scale]'")
    from ray.cluster_utils import Cluster

    marks = tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_memory_monitor_refresh_ms", "0")  # what other programs of this machine take
        patched.setenv("PYTHONPATH", str(Path(__file__).parent))
        patched.setenv(fake_cluster.MARKS, str(marks))
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            for _ in range(2):
                started.add_node(num_cpus=1, num_gpus=1, resources={KIND: 1})
            yield started, marks
        finally:
            started.shutdown()


@pytest.fixture
def collect(nodes: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "work", fake_cluster.work)
    monkeypatch.setattr(cluster, "ARRIVAL_SECONDS", 2.0)

    def run(models: str, **options: Any) -> RunReport:
        plan = [job(model) for model in models.split()]
        return cluster.collect(
            nodes[0].address,
            plan,
            tmp_path / "run",
            **{"device_type": "cuda", "time_limit": SECONDS, **options},
        )

    return run


def ids(run: Path, models: str) -> list[str]:
    return [r.trace_id for model in models.split() for r in traces_of(shard_path(run, job(model)))]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "shards").iterdir())


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)


@pytest.mark.slow
def test_accidents_of_workers_and_shards(collect, nodes, tmp_path: Path) -> None:
    events: list[JobEvent] = []
    models = "traced.1 strikes.2 torn.3 error traced.4 traced.5"
    report = collect(models, accelerator="T1000", on_event=events.append)
    finished = "traced.1 strikes.2 traced.4 traced.5"
    assert sorted(report.done) == sorted(job(model).name for model in finished.split())
    assert sorted(report.failed) == ["fake-error_train_b2", "fake-torn.3_train_b2"]
    assert "lost 3 times, the last time: its shard" in report.failed["fake-torn.3_train_b2"]
    assert "fake-strikes.2_train_b2" in report.again
    assert report.traces == len(set(ids(tmp_path / "run", finished))) == 8
    assert len(names(tmp_path / "run")) == 8  # of two files each, and nothing else
    kinds = [event.kind for event in events]
    assert (kinds.count("start"), kinds.count("again"), kinds.count("done")) == (9, 3, 4)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "done" and "node" in line for line in log) == 4
    servers = {mark.name.split("-")[1] for mark in nodes[1].glob("server-*")}
    assert len(servers) < len(list(nodes[1].glob("server-*")))  # lanes are kept from task to task


@pytest.mark.slow
def test_resume_makes_exactly_what_is_missing(collect, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert len(collect("traced.1 traced.2 traced.3").done) == 3
    before = ids(run, "traced.1")
    files_of(shard_path(run, job("traced.2")))[0].unlink()
    with (run / "log.jsonl").open("a") as log:  # a driver that was killed before it could check
        log.write(json.dumps({"job": job("traced.3").name, "event": "failed", "error": "?"}) + "\n")
    shard_path(run, job("traced.3")).write_bytes(b"torn")
    report = collect("traced.1 traced.2 traced.3", resume=True)
    assert report.skipped == [job("traced.1").name]
    assert sorted(report.done) == [job("traced.2").name, job("traced.3").name]
    assert ids(run, "traced.1") == before
    with pytest.raises(UserError, match="holds a run already: add --resume"):
        collect("traced.1 traced.2 traced.3")


@pytest.mark.slow
def test_shards_by_way_of_a_url(collect, tmp_path: Path) -> None:
    way = tmp_path / "way"
    report = collect("traced.1 traced.2", shared=f"file://{way}")
    assert report.failed == {}
    assert len(report.done) == 2
    assert len(set(ids(tmp_path / "run", "traced.1 traced.2"))) == 4
    assert list(way.iterdir()) == []
    for path in (tmp_path / "run" / "shards").iterdir():  # as if the driver had not fetched them
        path.rename(way / path.name)
    (tmp_path / "run" / "log.jsonl").write_text("")
    assert len(collect("traced.1 traced.2", shared=f"file://{way}", resume=True).skipped) == 2


@pytest.mark.slow
def test_a_node_that_lacks_something_ends_the_run(collect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "work", fake_cluster.lacks)
    with pytest.raises(UserError, match=r"lacks something \(No module named 'timm'\)"):
        collect("traced.1")


@pytest.mark.slow
def test_a_run_that_nodes_do_not_see(collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "shard_path", lambda run, job: Path(os.devnull) / "none")
    monkeypatch.setattr(cluster._Driver, "store", str(tmp_path / "elsewhere" / "shards"))
    with pytest.raises(UserError, match=r"does not see this run in .*elsewhere.*--shared URL"):
        collect("traced.1")


@pytest.mark.slow
def test_an_interrupt_ends_what_runs_on_the_nodes(collect, nodes, tmp_path: Path) -> None:
    import psutil

    mark = nodes[1] / "here-fake-lingers.9_train_b2"

    def interrupt(event: JobEvent) -> None:
        wait_until(mark.exists)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect("lingers.9", on_event=interrupt)
    wait_until(lambda: not psutil.pid_exists(int(mark.read_text())))
    assert names(tmp_path / "run") == []


@pytest.mark.slow
def test_items_are_mapped_in_order(nodes) -> None:
    assert list(map_on(Where(ray=nodes[0].address), fake_cluster.square, range(9))) == [
        n * n for n in range(9)
    ]


@pytest.mark.slow
def test_a_node_lost_in_the_middle(collect, nodes, tmp_path: Path) -> None:
    """Last: the cluster has one node less afterwards."""
    started, marks = nodes
    doomed = list(started.worker_nodes)[-1]

    def kill_one_when_both_work() -> None:
        wait_until(lambda: len(list(marks.glob("here-fake-lingers.[12]_*"))) == 2)
        started.remove_node(doomed, allow_graceful=False)

    def go_on(event: JobEvent) -> None:
        if event.kind == "again":  # not before: what is to be lost might end faster than its node
            (marks / "go").touch()

    killer = threading.Thread(target=kill_one_when_both_work)
    killer.start()
    try:
        report = collect("lingers.1 lingers.2 traced.3", on_event=go_on)
    finally:
        (marks / "go").touch()
        killer.join()
    assert report.failed == {}
    assert len(report.done) == 3
    assert len(report.again) == 1
    assert len(set(ids(tmp_path / "run", "lingers.1 lingers.2 traced.3"))) == 6
    assert len(names(tmp_path / "run")) == 6
    assert read_log(tmp_path / "run").keys() == set(report.done)
