"""Runs end in order whatever their workloads do: the real fork server with fake and tiny workloads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from torchtraceap.collect import cores, lane, run_folder, server
from torchtraceap.collect.plan import Injection, Job
from torchtraceap.collect.run_folder import shard_path
from torchtraceap.collect.runner import JobEvent, collect, halved_batches
from torchtraceap.dataset.parquet import read_traces
from torchtraceap.errors import UserError

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
SECONDS = 20.0
"""What "soon" may take on a busy machine; nothing waits longer than it must."""

RUNNER = """
import sys
from pathlib import Path
import msgspec
from torchtraceap.collect import lane, runner
from torchtraceap.collect.plan import Job
from torchtraceap.termination import terminable
lane.SERVER = (sys.executable, sys.argv[1])
plan = msgspec.json.decode(sys.argv[3], type=list[Job])
with terminable():
    runner.collect(
        plan, Path(sys.argv[2]), on_event=lambda e: print(e.kind, e.job.model, e.text, sep="|", flush=True)
    )
"""


@pytest.fixture(autouse=True)
def fake_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SERVER", (sys.executable, FAKE_SERVER))


def job(model: str) -> Job:
    return Job(f"fake/{model}", "train", 2, 0, [], [])


def run(models: str, folder: Path, on_event: Callable[[JobEvent], None] = lambda e: None, **options):
    return collect([job(model) for model in models.split()], folder, on_event=on_event, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "shards").iterdir())


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def pids(text: str) -> list[int]:
    assert text.startswith("pids ")
    return [int(word) for word in text.split()[1:]]


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


class Recorder:
    """Keeps events; ``processes`` are those that workloads told of."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []

    def __call__(self, event: JobEvent) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events if event.kind != "progress"]

    @property
    def processes(self) -> list[int]:
        return [pid for e in self.events if e.text.startswith("pids ") for pid in pids(e.text)]


def test_a_failure_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("ok.1 error nameless leaves abandons ok.2", tmp_path, recorder)
    assert report.done == ["fake-ok.1_train_b2", "fake-ok.2_train_b2"]
    assert report.traces == 4
    assert report.failed == {
        "fake-error_train_b2": r"ValueError: [red]no\x1b[2J\u202e good\ud800 [/red]",
        "fake-nameless_train_b2": "RuntimeError: no message",
        "fake-leaves_train_b2": "SystemExit: 3",
        "fake-abandons_train_b2": "ended without a word (exit status 3)",
    }
    assert recorder.kinds == ["start", "done"] + ["start", "failed"] * 4 + ["start", "done"]
    assert names(tmp_path) == ["fake-ok.1_train_b2.parquet", "fake-ok.2_train_b2.parquet"]
    assert [(line["job"], line["event"]) for line in log(tmp_path)[:2]] == [
        ("fake-ok.1_train_b2", "done"),
        ("fake-error_train_b2", "failed"),
    ]
    assert "second line" in (tmp_path / "stderr.log").read_text(errors="replace")  # all of it is kept there


def test_lanes_run_side_by_side(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("meets.1 meets.2 error ok", tmp_path, recorder, lanes=2, time_limit=SECONDS)
    assert recorder.kinds[:2] == ["start", "start"]
    assert sorted(report.done) == [f"fake-{name}_train_b2" for name in ("meets.1", "meets.2", "ok")]
    assert list(report.failed) == ["fake-error_train_b2"]
    assert len(log(tmp_path)) == 4


def test_devices_run_side_by_side(tmp_path: Path) -> None:
    report = run("meets.1 meets.2 ok", tmp_path, devices=["cpu", "cpu:0"], time_limit=SECONDS)
    assert len(report.done) == 3
    assert not list(tmp_path.glob("device-*.lock"))  # nobody shares one


@pytest.mark.parametrize(
    ("devices", "lanes", "timed"),
    [
        (["cuda:0", "cuda:1"], 2, {"cuda:0": [0, 1, 2, 3], "cuda:1": [8, 9, 10, 11]}),
        (["cuda:0", "cuda:1"], 1, {"cuda:0": None, "cuda:1": None}),
        (["cpu"], 2, {"cpu": None}),
    ],
)
def test_lanes_of_a_gpu_are_told_which_cores_to_use(
    devices, lanes, timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Watched(lane.Lane):
        def submit(self, *args, cores, **options):
            told.append((self.device, cores))
            return super().submit(*args, cores=cores, **options)

    monkeypatch.setattr(cores, "physical", lambda: [frozenset({cpu}) for cpu in range(16)])
    report = run("ok.1 ok.2 ok.3 ok.4", tmp_path, devices=devices, lanes=lanes, open_lane=Watched)
    assert len(report.done) == len(told) == 4
    assert {device: one and one.timed for device, one in told} == timed
    assert all((one and one.timed) == timed[device] for device, one in told)
    assert all(one is None or one.others == [4, 5, 6, 7, 12, 13, 14, 15] for _, one in told)


def test_a_spent_budget_lets_what_runs_end(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("waits ok.1 ok.2", tmp_path, recorder, budget=0.5)
    assert report.done == ["fake-waits_train_b2"]
    assert report.left == ["fake-ok.1_train_b2", "fake-ok.2_train_b2"]
    assert run("waits ok.1 ok.2", tmp_path, resume=True).done == report.left
    assert run("ok", tmp_path / "none", budget=-1.0).left == ["fake-ok_train_b2"]


def test_a_lane_that_dies_leaves_the_other_alone(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("kills_server ok.1 ok.2 ok.3", tmp_path, recorder, lanes=2)
    assert list(report.failed) == ["fake-kills_server_train_b2"]
    assert len(report.done) == 3
    for worker in recorder.processes[2::3]:  # which sleep
        os.kill(worker, signal.SIGKILL)


def test_output_of_a_model_does_not_mix_with_the_protocol(tmp_path: Path) -> None:
    assert run("chatty ok", tmp_path).failed == {}


def test_the_log_keeps_the_beginning_and_the_end_of_what_a_model_prints(tmp_path: Path) -> None:
    assert run("chatty error", tmp_path).done == ["fake-chatty_train_b2"]
    text = (tmp_path / "stderr.log").read_text(errors="replace")
    assert len(text) < 2 * server.LOG_BYTES
    assert text.startswith("x" * 100_000)
    assert "bytes left out" in text
    assert "yyyy" in text
    assert text.endswith("second line\n")  # the traceback of the next


def test_the_last_words_of_a_model_are_kept(tmp_path: Path) -> None:
    done = run(" ".join(f"speaks.{n}" for n in range(20)), tmp_path).done
    assert (tmp_path / "stderr.log").read_text().splitlines() == [f"last words of {name}" for name in done]


def test_time_limit_ends_a_workload_and_its_workers(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("sleep ok", tmp_path, recorder, time_limit=1.0)
    assert report.failed == {"fake-sleep_train_b2": "time limit of 1 s reached"}
    assert report.done == ["fake-ok_train_b2"]
    assert len(recorder.processes) == 3
    wait_until(lambda: not any(map(alive, recorder.processes)))


def test_waiting_for_the_device_is_no_time_of_ones_own(tmp_path: Path) -> None:
    assert run("waits", tmp_path, time_limit=1.0).failed == {}


def test_a_killed_workload_is_reported_though_its_workers_live_on(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("killed ok", tmp_path, recorder)
    assert report.failed == {
        "fake-killed_train_b2": "killed by SIGKILL (out of memory?), for the second time"
    }
    assert report.done == ["fake-ok_train_b2"]
    assert recorder.kinds == ["start", "again", "start", "failed", "start", "done"]
    wait_until(lambda: not any(map(alive, recorder.processes)))


def test_a_workload_that_a_signal_ended_has_a_second_chance(tmp_path: Path) -> None:
    report = run("killed_once", tmp_path)
    assert report.done == ["fake-killed_once_train_b2"]
    assert report.again == {"fake-killed_once_train_b2": "killed by SIGSEGV"}
    assert [(line["event"], line.get("kind")) for line in log(tmp_path)] == [
        ("again", "killed"),
        ("done", None),
    ]


def test_a_batch_that_does_not_fit_is_halved_and_the_decision_kept(tmp_path: Path) -> None:
    plan = [Job("fake/fits", "train", 9, 0, [], []), job("ok")]
    recorder = Recorder()
    report = collect(plan, tmp_path, on_event=recorder)
    assert report.smaller == {"fake-fits_train_b9": (9, 2)}
    assert report.done == ["fake-fits_train_b9", "fake-ok_train_b2"]
    assert recorder.kinds == ["start", "again"] * 2 + ["start", "done"] * 2
    assert "now at batch 2 instead of 4" in [e.text for e in recorder.events if e.kind == "again"][-1]
    decisions = [line["batch_size"] for line in log(tmp_path) if line["event"] == "again"]
    assert decisions == [[9, 4], [4, 2]]
    shard_path(tmp_path, plan[0]).unlink()  # as if it had been killed after the decision
    again = collect(plan, tmp_path, resume=True)
    assert (again.again, again.smaller) == ({}, {"fake-fits_train_b9": (9, 2)})


def test_the_smallest_batch_may_not_fit_either(tmp_path: Path) -> None:
    assert halved_batches(Job("fake/fits", "infer", 9, 0, [], [])) == [9, 4, 2, 1]
    report = collect([Job("fake/fits", "train", 3, 0, [], [])], tmp_path)
    assert report.failed == {
        "fake-fits_train_b3": "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    }


def test_what_does_not_fit_beside_others_keeps_its_batch(tmp_path: Path) -> None:
    report = run("fits_alone.1 fits_alone.2", tmp_path, lanes=2)
    assert len(report.done) == 2
    assert report.smaller == {}
    assert {line["event"] for line in log(tmp_path)} == {"again", "done"}
    assert not any("batch_size" in line for line in log(tmp_path))


def test_what_needs_a_device_alone_runs_when_nothing_else_is_left(tmp_path: Path) -> None:
    report = run("fits_alone.1 fits_alone.2 ok.1 ok.2 ok.3", tmp_path, lanes=2)
    again = {line["job"] for line in log(tmp_path) if line["event"] == "again"}
    assert again
    assert set(report.done[-len(again) :]) == again


def test_what_has_a_device_alone_leaves_the_others_at_work(tmp_path: Path) -> None:
    models = "fits_alone.1 outlasts.1 fits_alone.2 outlasts.2"
    report = run(models, tmp_path, devices=["cuda:0", "cuda:1"], lanes=2, time_limit=SECONDS)
    assert (len(report.done), report.failed) == (4, {})
    assert {line["job"] for line in log(tmp_path) if line["event"] == "again"} <= {
        "fake-fits_alone.1_train_b2",
        "fake-fits_alone.2_train_b2",
    }


def test_a_memory_limit_ends_a_workload_and_its_workers(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("greedy ok", tmp_path, recorder, memory_limit=200 << 20)
    assert report.failed == {"fake-greedy_train_b2": "memory limit of 0.195 GiB reached"}
    assert report.done == ["fake-ok_train_b2"]
    assert recorder.kinds == ["start", "failed", "start", "done"]  # once: it would happen again
    wait_until(lambda: not any(map(alive, recorder.processes)))


def test_a_device_that_works_on_is_used_on(tmp_path: Path) -> None:
    report = run("broken.1 broken.2 ok", tmp_path, devices=["cuda:0"])
    assert list(report.failed) == ["fake-broken.1_train_b2", "fake-broken.2_train_b2"]
    assert report.failed["fake-broken.1_train_b2"].endswith(
        "CUDA error: an illegal memory access was encountered"
    )
    assert (report.done, report.lost) == (["fake-ok_train_b2"], {})


def test_a_device_that_is_gone_leaves_the_rest_for_later(tmp_path: Path) -> None:
    report = run("broken ok.1 ok.2", tmp_path, devices=["gone:0"])
    assert list(report.failed) == ["fake-broken_train_b2"]
    assert report.lost == {"gone:0": "RuntimeError: No CUDA GPUs are available"}
    assert report.left == ["fake-ok.1_train_b2", "fake-ok.2_train_b2"]
    assert run("broken ok.1 ok.2", tmp_path, resume=True, devices=["cuda:0"]).done == report.left


def test_other_devices_do_the_work_of_one_that_is_gone(tmp_path: Path) -> None:
    report = run("broken waits ok.1 ok.2", tmp_path, devices=["gone:0", "cuda:0"])
    assert list(report.lost) == ["gone:0"]
    assert (len(report.done), report.left) == (3, [])


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    recorder = Recorder()
    run("litters litters_and_dies", tmp_path, recorder)
    folders = [Path(e.text.split()[1]) for e in recorder.events if e.text.startswith("folder ")]
    assert len(folders) == 3
    assert {path.parent.parent for path in folders} == {Path(tempfile.gettempdir())}
    assert not any(path.parent.exists() for path in folders)


def test_runner_and_server_do_not_grow(tmp_path: Path) -> None:
    sizes: list[list[int]] = []
    files: list[int] = []
    server = 0

    def look(event: JobEvent) -> None:
        nonlocal server
        if event.text.startswith("pids "):
            server, _ = pids(event.text)
        elif event.kind == "done":
            sizes.append([psutil.Process(pid).memory_info().rss for pid in (os.getpid(), server)])
            files.append(psutil.Process().num_fds())

    assert len(run(" ".join(f"introduces.{n}" for n in range(500)), tmp_path, look).done) == 500
    growth = [after - before for before, after in zip(sizes[50], sizes[-1], strict=True)]
    assert max(growth) < 4 << 20, f"runner and server grew by {growth} bytes"
    assert files[50] == files[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_killed_server_takes_its_workload_along_and_is_started_anew(tmp_path: Path) -> None:
    recorder = Recorder()
    report = run("kills_server ok", tmp_path, recorder)
    (error,) = report.failed.values()
    assert "the fork server died (exit status -9)" in error
    assert report.done == ["fake-ok_train_b2"]
    servers, children, workers = (recorder.processes[kind::3] for kind in range(3))  # of both attempts
    wait_until(lambda: not any(map(alive, [*servers, *children])))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)  # a loader's workers look after their parent; this one sleeps


@contextlib.contextmanager
def other_runner(folder: Path, models: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A runner in another process, and the server, workload and worker that its last job told of."""
    plan = msgspec.json.encode([job(model) for model in models.split()]).decode()
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, FAKE_SERVER, str(folder), plan], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            text = line.strip().split("|")[-1]
            if text.startswith("pids "):
                yield process, pids(text)
                break
        else:
            raise AssertionError("no workload said which processes it has")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_outlives_a_killed_runner_and_resume_runs_the_rest(tmp_path: Path) -> None:
    with other_runner(tmp_path, "ok sleep") as (process, processes):
        assert all(map(alive, processes))
        process.kill()
        wait_until(lambda: not any(map(alive, processes)))
    assert names(tmp_path) == ["fake-ok_train_b2.parquet"]
    torn = tmp_path / "shards" / ".fake-sleep_train_b2.parquet.1-ab.tmp"
    torn.touch()
    recorder = Recorder()
    report = run("ok sleep", tmp_path, recorder, resume=True, time_limit=0.5)
    assert report.skipped == ["fake-ok_train_b2"]
    assert list(report.failed) == ["fake-sleep_train_b2"]
    assert recorder.kinds == ["skipped", "start", "failed"]
    assert not torn.exists()


# An uncaught KeyboardInterrupt ends Python as the signal would have, one of its kind does not.
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 1)])
def test_interrupt_stops_the_workload_and_keeps_what_is_finished(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with other_runner(tmp_path, "ok sleep ok.2") as (process, processes):
        process.send_signal(number)
        process.wait(SECONDS)
        assert process.returncode == status
        assert not any(map(alive, processes))
    assert names(tmp_path) == ["fake-ok_train_b2.parquet"]


def test_interrupt_raises(tmp_path: Path) -> None:
    def interrupt(event: JobEvent) -> None:
        if event.text.startswith("pids "):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run("ok sleep", tmp_path, interrupt)
    assert names(tmp_path) == ["fake-ok_train_b2.parquet"]


def test_one_folder_one_runner(tmp_path: Path) -> None:
    with other_runner(tmp_path, "sleep"), pytest.raises(UserError, match="in use"):
        run("sleep", tmp_path, resume=True)


def test_a_finished_run_starts_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ok", tmp_path)
    monkeypatch.setattr(lane, "SERVER", ("no-such-program",))
    assert run("ok", tmp_path, resume=True).skipped == ["fake-ok_train_b2"]


def test_a_run_is_resumed_only_on_demand_and_with_its_own_plan(tmp_path: Path) -> None:
    run("ok", tmp_path)
    with pytest.raises(UserError, match="holds a run already: add --resume"):
        run("ok", tmp_path)
    with pytest.raises(UserError, match="of another plan"):
        run("ok error", tmp_path, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(UserError, match="is no run"):
        run("ok", tmp_path, resume=resume)
    with pytest.raises(UserError, match="is no run"):
        run("ok", tmp_path / "photo.jpg", resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_run_whose_plan_could_not_be_written_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "replacing", full)
        with pytest.raises(OSError, match=r"plan\.json"):
            run("ok", tmp_path)
    torn = tmp_path / ".plan.json.1-ab.tmp"  # of a runner that was killed there
    torn.touch()
    assert run("ok", tmp_path).done == ["fake-ok_train_b2"]
    assert not torn.exists()


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    assert len({job(model).name for model in ("a.b", "a-b", "a_b", "a.b-c", "a.b_c")}) == 5
    with pytest.raises(UserError, match=r"would be written as fake-a-b_train_b2\.parquet"):
        run("a-b a/b", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount")
def test_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    recorder = Recorder()
    try:
        with pytest.raises(
            UserError, match="the disk is full; what is finished is kept: make room and go on"
        ):
            run("ok.1 full ok.2", tmp_path, recorder)
        assert recorder.kinds == ["start", "done", "start", "failed"]
        assert recorder.events[-1].text.startswith("OSError: [Errno 28] No space left on device")
        assert names(tmp_path) == ["fake-ok.1_train_b2.parquet"]
        subprocess.run(["mount", "-o", "remount,size=9m", str(tmp_path)], check=True)
        done = run("ok.1 full ok.2", tmp_path, resume=True).done
        assert done == ["fake-full_train_b2", "fake-ok.2_train_b2"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_real_workload_through_the_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and profile in forked children, which hang if the server did more than import."""
    monkeypatch.setattr(lane, "SERVER", (sys.executable, FAKE_SERVER, "tiny"))
    clone = [Injection("redundant_copy", "clone")]
    plan = [Job("tiny/net", "train", 4, 3, clone, [[0]]), Job("tiny/net", "infer", 4, 3, clone, [[0]])]
    report = collect(plan, tmp_path, devices=["cpu"], time_limit=60)
    assert report.failed == {}
    assert report.traces == 4
    for one in plan:
        records = list(read_traces(shard_path(tmp_path, one)))
        assert sorted(len(record.instances) for record in records) == [0, 1]
        assert all(record.meta["mode"] == one.mode for record in records)


@pytest.mark.slow
def test_the_command_that_users_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries imported, and a model of the zoo."""
    monkeypatch.undo()
    plan = [Job("timm/resnet18", "infer", 1, 3, [Injection("redundant_copy", "clone")], [[0]])]
    report = collect(plan, tmp_path, devices=["cpu"])
    assert report.failed == {}
    assert report.traces == 2
    assert len(list(read_traces(shard_path(tmp_path, plan[0])))) == 2
