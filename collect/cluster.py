"""A plan on a Ray cluster: one task a workload, which runs there as it would here.

    driver    holds the run's folder: plan, log, checked shards. Sends a workload when there is room for it
    task      a process that Ray starts on a node and gives a GPU, or a part of one
    lane      the fork server of that process (collect/lane.py): a child of it, and kept for the next task

Ray's threads live in the driver and in the tasks' processes, never in the fork server, which only imports
and is started as a program of its own. A task is a run of a single workload (``runner.collect``) in a folder
of its node, so what is decided about failures is decided as on one machine. Ray keeps a task's process for
further tasks, and the process its lane: libraries are imported once a process, not once a workload.

Shards go from the node's folder to a place that all nodes reach, and count when the driver has read them.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import secrets
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import torchtraceap
from torchtraceap.collect import EVENT_CAP, SHARD_MB, TIME_LIMIT, runner
from torchtraceap.collect.lane import Lane
from torchtraceap.collect.plan import Job
from torchtraceap.collect.run_folder import RunFolder, claimed, read_log, shard_path
from torchtraceap.collect.runner import JobEvent, RunReport
from torchtraceap.dataset.shards import files_of, parts_to_come, read_session, traces_of
from torchtraceap.errors import UserError
from torchtraceap.parallel import connected, first_line, user_error

ATTEMPTS = 3
"""Times that a workload is sent whose process or node is lost, or whose shard does not arrive."""

ARRIVAL_SECONDS = 60.0
"""How long a shared file system may take until it shows here what was written elsewhere."""

POLL_SECONDS = 1.0


class Task(msgspec.Struct, frozen=True):
    """What a task is told: a workload and how to run it.

    ``store`` is where its shard goes: a folder beside the plan with ``plan_digest``, or a URL of fsspec.
    """

    job: Job
    device: str
    store: str
    plan_digest: str
    version: str
    event_cap: int
    time_limit: float
    memory_limit: int | None
    shard_mb: float


class Outcome(msgspec.Struct, frozen=True):
    """What a task answers: the machine's name, and report and log of its run of a single workload."""

    node: str
    report: RunReport
    log: bytes


class Need(msgspec.Struct, frozen=True):
    """What a workload takes of a node, in Ray's terms."""

    gpus: float
    cpus: int
    accelerator: str | None = None

    @classmethod
    def of(
        cls,
        plan: Sequence[Job],
        nodes: Sequence[Mapping[str, Any]],
        *,
        device_type: str,
        accelerator: str | None,
        lanes: int,
    ) -> Need:
        """What a workload of ``plan`` takes of the least of those ``nodes`` that can take it.

        CPUs are shared out evenly, as Ray tells a process to use no more threads than it has. Without GPUs a
        node is one device: ``lanes`` workloads have all of it.

        Args:
            plan: The jobs.
            nodes: What ``ray.nodes()`` says.
            device_type: ``cpu``, or that of a GPU.
            accelerator: Ray's name of a kind of GPU; any if None.
            lanes: Workloads side by side for each device.

        Raises:
            UserError: No node can; says what there is. Ray itself would wait for one without a word.
        """
        ranks = max((job.world_size for job in plan), default=1)
        # Ray counts in ten-thousandths.
        gpus = 0.0 if device_type == "cpu" else float(ranks) if ranks > 1 else math.floor(1e4 / lanes) / 1e4
        least = cls(gpus, 1, accelerator)
        fit = [node for node in nodes if least.slots(node)]
        if not fit:
            wanted = f"{ranks} GPU{' of type ' + accelerator if accelerator else ''}" if gpus else "a CPU"
            there = Counter(map(_resources, nodes))
            raise UserError(
                f"no node of the cluster has {wanted} for a workload; there are: "
                + ("; ".join(f"{count} x {what}" for what, count in sorted(there.items())) or "no nodes")
                + ("" if device_type == "cpu" else " (to collect on CPUs: --device cpu)")
            )
        share = min(node["Resources"]["CPU"] / (least.slots(node) if gpus else lanes) for node in fit)
        return cls(gpus, max(1, int(share)), accelerator)

    def slots(self, node: Mapping[str, Any]) -> int:
        """How many workloads a node takes at once."""
        has = node["Resources"] if node["Alive"] else {}
        if self.accelerator and f"accelerator_type:{self.accelerator}" not in has:
            return 0
        count = int(has.get("CPU", 0) // self.cpus)
        return min(count, int(has.get("GPU", 0) / self.gpus + 1e-3)) if self.gpus else count

    @property
    def options(self) -> dict[str, Any]:
        """Those of a Ray task."""
        kind = {"accelerator_type": self.accelerator} if self.accelerator else {}
        return {"num_gpus": self.gpus, "num_cpus": self.cpus, **kind}


def _resources(node: Mapping[str, Any]) -> str:
    """What a node has, in words."""
    if not node["Alive"]:
        return "lost node"
    has = node["Resources"]
    prefix = "accelerator_type:"
    kinds = ", ".join(sorted(name.removeprefix(prefix) for name in has if name.startswith(prefix)))
    gpus = f"{has.get('GPU', 0):g} GPU{' (' + kinds + ')' if kinds else ''}"
    return f"node with {gpus}, {has.get('CPU', 0):g} CPU"


def collect(
    address: str,
    plan: Sequence[Job],
    run: Path,
    *,
    device_type: str,
    accelerator: str | None = None,
    shared: str | None = None,
    lanes: int = 1,
    resume: bool = False,
    event_cap: int = EVENT_CAP,
    time_limit: float = TIME_LIMIT,
    memory_limit: int | None = None,
    shard_mb: float = SHARD_MB,
    budget: float = math.inf,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> RunReport:
    """Run every job of ``plan`` whose shard is missing on the cluster at ``address``.

    Args:
        address: See ``parallel.connected``.
        plan: The jobs; their names must be unique.
        run: Folder to write to. All nodes must see it under this path, or else reach ``shared``.
        device_type: ``cuda``, ``xpu`` or ``cpu``.
        accelerator: Ray's name of the GPU to use, such as ``H100``; any if None.
        shared: A URL of fsspec: tasks put shards there, the driver fetches and removes them.
        lanes: Workloads side by side for each GPU, or for each node without.
        resume: Allow ``run`` to hold an earlier run of the same plan.
        event_cap, time_limit, memory_limit, shard_mb, budget: See ``runner.collect``.
        on_event: Told of every workload that is sent, sent again, or ends.

    Returns:
        What was made, and what failed why. If a device stopped working, ``left`` names what was not sent.

    Raises:
        UserError: There is no cluster, or no node of it can take a workload; a node lacks what it needs; or
            as ``runner.collect`` has it. What is finished is kept.
    """
    begin = time.monotonic()
    run = run.resolve()
    with connected(address) as ray, claimed(run, plan, resume) as folder:
        need = Need.of(plan, ray.nodes(), device_type=device_type, accelerator=accelerator, lanes=lanes)
        (run / "shards").mkdir(exist_ok=True)
        driver = _Driver(ray, need, folder, shared, on_event)
        driver.plan(plan)
        digest = hashlib.sha256((run / "plan.json").read_bytes()).hexdigest()
        try:
            while driver.waiting or driver.pending:
                if time.monotonic() - begin > budget or driver.report.lost:
                    driver.report.left += [job.name for job, _ in driver.waiting]
                    driver.waiting.clear()
                room = sum(map(need.slots, ray.nodes())) - len(driver.pending)  # nodes come and go
                for job, attempt in driver.next(room):
                    task = Task(
                        job=job,
                        device=device_type,
                        store=driver.store,
                        plan_digest=digest,
                        version=torchtraceap.__version__,
                        event_cap=event_cap,
                        time_limit=time_limit,
                        memory_limit=memory_limit,
                        shard_mb=shard_mb,
                    )
                    driver.send(task, attempt)
                driver.follow()
        finally:
            driver.cancel()
        folder.remove_torn()  # nothing is at work any more
    driver.report.seconds = time.monotonic() - begin
    return driver.report


class _Driver:
    """The state of a run on a cluster."""

    def __init__(
        self,
        ray: Any,
        need: Need,
        folder: RunFolder,
        shared: str | None,
        on_event: Callable[[JobEvent], None],
    ) -> None:
        self.ray = ray
        # Ray would end the process of a task with a GPU after each, and the lane with it.
        self.task = ray.remote(max_calls=0, max_retries=0)(work).options(**need.options)
        self.folder = folder
        self.shared = shared
        self.on_event = on_event
        self.report = RunReport()
        self.waiting: deque[tuple[Job, int]] = deque()
        self.pending: dict[Any, tuple[Task, int]] = {}

    @property
    def store(self) -> str:
        """Where tasks put shards."""
        return self.shared or str(self.folder.path / "shards")

    def plan(self, jobs: Sequence[Job]) -> None:
        """Let all jobs wait whose shard is not there. One that no driver has checked is checked now."""
        checked = {name for name, end in read_log(self.folder.path).items() if end.event == "done"}
        arrived = _names(self.shared) if self.shared else set()
        for job in jobs:
            path = shard_path(self.folder.path, job)
            there = path.exists() or path.name in arrived
            if there and (job.name in checked or self._check(job) is None):
                self.report.skipped.append(job.name)
                self.on_event(JobEvent("skipped", job))
            else:
                self.waiting.append((job, 1))

    def next(self, room: int) -> list[tuple[Job, int]]:
        """Take out what waits, as much as there is room for."""
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def send(self, task: Task, attempt: int) -> None:
        """Give a workload to Ray."""
        self.pending[self.task.remote(task)] = task, attempt
        self.on_event(JobEvent("start", task.job))

    def follow(self) -> None:
        """Wait a little for workloads to end, and act on how they did."""
        if not self.pending:  # all nodes are gone, for now
            time.sleep(POLL_SECONDS)
            return
        ended, _ = self.ray.wait(list(self.pending), timeout=POLL_SECONDS)
        for reference in ended:
            task, attempt = self.pending.pop(reference)
            try:
                outcome = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise user_error(error) from None
            except self.ray.exceptions.RayError as error:
                self._lost(task.job, attempt, first_line(error))
            else:
                self._ended(task.job, attempt, outcome)

    def cancel(self) -> None:
        """End what still runs; Ray kills its processes, and their lanes end with them."""
        for reference in self.pending:
            self.ray.cancel(reference, force=True)

    def _ended(self, job: Job, attempt: int, outcome: Outcome) -> None:
        report = outcome.report
        entries = [msgspec.json.decode(line) for line in outcome.log.splitlines()]
        if report.done and (problem := self._check(job)) is not None:
            self._lost(job, attempt, f"its shard from {outcome.node} {problem}")
            return
        for entry in entries:
            self.folder.write({**entry, "node": outcome.node})
        self.report.done += report.done
        self.report.traces += report.traces
        self.report.failed |= report.failed
        self.report.again |= report.again
        self.report.smaller |= report.smaller
        self.report.lost |= {f"{outcome.node} {name}": why for name, why in report.lost.items()}
        for stage, seconds in report.stages.items():
            self.report.stages[stage] = self.report.stages.get(stage, 0.0) + seconds
        for name, why in report.failed.items():
            self.on_event(JobEvent("failed", job, text=f"{why} ({outcome.node})", seconds=report.seconds))
            assert name == job.name
        if report.done:
            result = entries[-1]["result"]
            self.on_event(JobEvent("done", job, seconds=report.seconds, result=result))

    def _lost(self, job: Job, attempt: int, why: str) -> None:
        """The workload did not end, or not well: send it again, a few times."""
        if attempt < ATTEMPTS:
            self.folder.write({"job": job.name, "event": "again", "error": why})
            self.report.again[job.name] = why
            self.on_event(JobEvent("again", job, text=why))
            self.waiting.appendleft((job, attempt + 1))
            return
        error = f"lost {ATTEMPTS} times, the last time: {why}"
        self.folder.write({"job": job.name, "event": "failed", "error": error})
        self.report.failed[job.name] = error
        self.on_event(JobEvent("failed", job, text=error))

    def _check(self, job: Job) -> str | None:
        """Read all of a shard that should have arrived, and say what is wrong with it; it is gone then."""
        path = shard_path(self.folder.path, job)
        try:
            if self.shared and not path.exists():
                _fetch(self.shared, path)
            _wait_for(path)
            read_session(path)
            for _ in traces_of(path):
                pass
        except UserError as error:
            path.unlink(missing_ok=True)
            return f"cannot be read: {error}"
        return None


def _wait_for(path: Path) -> None:
    """Wait until a shared file system shows a file that was written elsewhere.

    Raises:
        UserError: It does not.
    """
    end = time.monotonic() + ARRIVAL_SECONDS
    while not path.exists() and path not in path.parent.iterdir():  # a look-up may be cached here
        if time.monotonic() > end:
            raise UserError(f"{path} did not arrive")
        time.sleep(POLL_SECONDS)


def work(task: Task) -> Outcome:
    """Run one workload on the node where this is called, and put its shard where the driver finds it.

    Raises:
        UserError: The node is not fit for any workload of this run.
    """
    node = platform.node()
    if task.version != torchtraceap.__version__:
        raise UserError(f"{node} has torchtraceap {torchtraceap.__version__}, not {task.version} as here")
    if "://" not in task.store:
        plan = Path(task.store).parent / "plan.json"
        if not plan.is_file() or hashlib.sha256(plan.read_bytes()).hexdigest() != task.plan_digest:
            raise UserError(
                f"{node} does not see this run in {plan.parent}: put it on a file system that all nodes "
                "share, or name another place that all reach with --shared URL"
            )
    with tempfile.TemporaryDirectory(prefix="traceap-") as folder:
        run = Path(folder) / "run"
        report = runner.collect(
            [task.job],
            run,
            devices=(task.device,),
            event_cap=task.event_cap,
            time_limit=task.time_limit,
            memory_limit=task.memory_limit,
            shard_mb=task.shard_mb,
            open_lane=_kept_lane,
        )
        if report.done:
            _put(shard_path(run, task.job), task.store)
        return Outcome(node, report, (run / "log.jsonl").read_bytes())


_kept: dict[str, Lane] = {}
"""The lane of this process, by the GPUs that it was started with."""


@contextmanager
def _kept_lane(stderr: Path, device: str, gate: str) -> Iterator[Lane]:
    """The lane of this process, which outlives the block: it starts anew only if Ray gave us another GPU.

    Its gate is one of the node, as lanes of a device are in processes that do not know of each other.
    """
    import ray

    gpus = ",".join(map(str, ray.get_gpu_ids())) or "cpu"
    if gpus not in _kept:
        for name in [*_kept]:
            _kept.pop(name).__exit__()
        folder = _folder_of_node()
        shared_gate = str(folder / f"device-{gpus.replace('/', '-')}.lock")
        _kept[gpus] = Lane(folder / f"stderr-{os.getpid()}.log", device, shared_gate)
    try:
        yield _kept[gpus]
    except BaseException:
        _kept.pop(gpus).__exit__()  # it may be in the middle of something
        raise


def _folder_of_node() -> Path:
    """A folder of this user on this machine."""
    folder = Path(tempfile.gettempdir()) / f"torchtraceap-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to somebody else")
    return folder


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL or a folder, and the path in it.

    Raises:
        UserError: fsspec does not know it, or lacks the package for it.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {first_line(error)}") from None


def _names(url: str) -> set[str]:
    """What lies there."""
    system, root = _file_system(url)
    try:
        return {path.rstrip("/").rpartition("/")[2] for path in system.ls(root, detail=False)}
    except FileNotFoundError:
        return set()


def _put(shard: Path, url: str) -> None:
    """Copy the files of the only shard in its folder, the first last; each appears as a whole."""
    system, root = _file_system(url)
    try:
        system.makedirs(root, exist_ok=True)
        for file in [*(path for path in shard.parent.iterdir() if path != shard), shard]:
            temporary = f"{root}/.{file.name}.{secrets.token_hex(4)}.tmp"
            system.put_file(str(file), temporary)
            system.mv(temporary, f"{root}/{file.name}")
    except OSError as error:
        raise UserError(f"{platform.node()} cannot write to {url}: {first_line(error)}") from None


def _fetch(url: str, shard: Path) -> None:
    """Bring the files of a shard here and remove them there.

    Raises:
        UserError: One is not there, or no shard.
    """
    system, root = _file_system(url)
    with tempfile.TemporaryDirectory(dir=shard.parent.parent, prefix=".arriving-") as folder:
        first = Path(folder) / shard.name
        try:
            system.get_file(f"{root}/{first.name}", str(first))
            for part in parts_to_come(first):
                system.get_file(f"{root}/{part.name}", str(part))
            files = files_of(first)
            for file in reversed(files):
                file.replace(shard.with_name(file.name))
            for file in files:
                system.rm_file(f"{root}/{file.name}")
        except OSError as error:
            raise UserError(f"{url}: {first_line(error)}") from None
