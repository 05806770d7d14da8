"""Profiled traces a minute: the harness, which also measures costs, against a process of its own a model.

    python benchmarks/collection.py [--models 60] [--device auto] [--lanes 3] [--run FOLDER]

A workload is a model in training or inference, of tasks in the zoo's proportions: a clean trace and two with
a pattern each, all costs measured.
The peer imports the same libraries, builds the same model and takes three profiles of it, measures nothing,
and begins anew for the next one. With ``--run`` the traces are kept.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import cast

import msgspec

from torchtraceap.collect import devices
from torchtraceap.collect.model import ZOO, ModelSpec, kind_of
from torchtraceap.collect.plan import Job, make_plan
from torchtraceap.collect.runner import RunReport, collect
from torchtraceap.labels.pattern import Mode

PROFILES = 3
PEERS = 3
"""Workloads that the peer runs, each of which takes as long as all others of its kind: mostly to import."""


def sample(count: int, kind: str, seed: int) -> list[ModelSpec]:
    """Models that train and infer on this kind of device, drawn by seed, of each task as the zoo has them."""
    by_task: dict[str, list[ModelSpec]] = {}
    for spec in ZOO:
        sizes = spec.batch_sizes[kind_of(kind)]
        if sizes["train"] and sizes["infer"] and (spec.small or kind != "cpu"):
            by_task.setdefault(spec.task, []).append(spec)
    for specs in by_task.values():
        random.Random(seed).shuffle(specs)
    ordered = [spec for task in sorted(by_task) for spec in by_task[task]]
    return [ordered[index * len(ordered) // count] for index in range(min(count, len(ordered)))]


def plan_of(specs: list[ModelSpec], kind: str, seed: int) -> list[Job]:
    """A workload a model, half of them in training: two patterns, each in a trace of its own."""
    plan = make_plan([spec.name for spec in specs], device_type=kind, per_workload=2, seed=seed)
    first = {job.model: job for job in reversed(plan)}  # the planner's first of each model
    return [
        msgspec.structs.replace(job, arms=[[index] for index in range(len(job.injections))])
        for job in plan
        if first[job.model] is job
    ]


def naive(model: str, mode: Mode, batch_size: int, device: str, folder: Path) -> None:
    """What a script does that profiles one model: three profiles of its loop, none of which is measured."""
    import torch

    from torchtraceap.collect import server
    from torchtraceap.collect.loop import TrainingLoop

    server._import_all()
    where = devices.resolve(device)
    loop = TrainingLoop(ZOO[model], mode, batch_size, where, secret="", seed=0)
    for _ in range(3):
        loop.step()
    for number in range(PROFILES):
        with torch.profiler.profile(activities=devices.activities(where), record_shapes=True) as profiler:
            for _ in range(3):
                loop.step()
        profiler.export_chrome_trace(str(folder / f"{number}.json"))
    loop.close()


def peer_seconds(jobs: list[Job], device: str) -> float:
    """Seconds a workload of the peer, each in a fresh interpreter."""
    begin = time.monotonic()
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            facts = [job.model, job.mode, str(job.batch_size), device, folder]
            subprocess.run([sys.executable, __file__, "--naive", *facts], check=True, capture_output=True)
    return (time.monotonic() - begin) / len(jobs)


def tell(report: RunReport, names: list[str], lanes: int) -> float:
    """Print what the harness did; returns its traces a minute."""
    rate = report.traces / report.seconds * 60
    print(
        f"{report.traces} traces of {len(report.done)} workloads in {report.seconds:.0f} s on "
        f"{', '.join(names)}, {lanes} lanes each: {rate:.1f} traces a minute"
    )
    for name, why in report.failed.items():
        print(f"  failed: {name}: {why}")
    if report.left:
        print(f"  not begun within the budget: {len(report.left)} workloads")
    stages = Counter(report.stages)
    total = stages.total()
    print("  " + ", ".join(f"{stage} {spent / total:.0%}" for stage, spent in stages.most_common()))
    return rate


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--naive"]:
        model, mode, batch_size, device, folder = sys.argv[2:]
        naive(model, cast("Mode", mode), int(batch_size), device, Path(folder))
        return
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", type=int, help="workloads (default: 60 on an accelerator, 3 on a CPU)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lanes", type=int, help="workloads side by side a device (default: 3; on a CPU 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-limit", type=float, metavar="GIB", help="main memory of a workload")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds after which no further workload starts"
    )
    parser.add_argument("--run", type=Path, help="where traces go and stay; an earlier run is taken up")
    options = parser.parse_args()
    found = devices.groups(options.device)
    kind, names = found[0].type, [str(device) for device in found]
    lanes = options.lanes or (1 if kind == "cpu" else 3)
    specs = sample(options.models or (3 if kind == "cpu" else 60), kind, options.seed)
    jobs = plan_of(specs, kind, options.seed)
    memory = int(options.memory_limit * 2**30) if options.memory_limit else None
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder) / "run"
        report = collect(
            jobs, run, devices=names, lanes=lanes, resume=True, memory_limit=memory, budget=options.budget
        )
    rate = tell(report, names, lanes)
    seconds = peer_seconds(jobs[:PEERS], names[0])
    peer = PROFILES * 60 / seconds
    print(
        f"A process a model, nothing measured: {peer:.1f} traces a minute; "
        f"the harness makes {rate / peer:.1f} times that"
    )


if __name__ == "__main__":
    main()
