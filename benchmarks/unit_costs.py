"""What a trace costs after it was collected: CPU time of every step, and how split units grow with traces.

    python benchmarks/unit_costs.py [DATASET]

Times are those of one process's CPU, so that other programs on the machine change them little. docs/scale.md
goes from these to a million traces.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtraceap.dataset import splits
from torchtraceap.dataset.build import check
from torchtraceap.dataset.parquet import read_traces, split_files, write_traces
from torchtraceap.dataset.rows import segment_table
from torchtraceap.dataset.schema import ALL_SPLITS
from torchtraceap.dataset.windows import window_table
from torchtraceap.eval.detector import DETECTORS, run

DATASET = Path(__file__).resolve().parents[1] / "dataset"
COPIES = (16, 64, 128)
"""Times that the workloads are repeated, each copy under other names, for the time that split units take."""


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this process, and what came of it."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def copies(members: list[splits.Member], count: int) -> list[splits.Member]:
    """As if so many models had been collected that are alike, but no two of which run the same program."""
    return [
        dataclasses.replace(
            one,
            trace_id=f"{one.trace_id}-{copy}",
            pair_id=f"{one.pair_id}-{copy}",
            backbone_family=f"{one.backbone_family}-{copy}",
            signature=one.signature and {**one.signature, ("copy", str(copy)): 1},
        )
        for copy in range(count)
        for one in members
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("dataset", nargs="?", type=Path, default=DATASET)
    dataset = parser.parse_args().dataset
    files = split_files(dataset, "traces", ALL_SPLITS)
    reading, records = cpu_seconds(lambda: list(read_traces(files)))
    count, events = len(records), sum(len(record.trace) for record in records)
    print(f"{count} traces of {events / count:,.0f} events")
    for config in ("traces", "windows", "segments"):
        size = sum(path.stat().st_size for path in split_files(dataset, config, ALL_SPLITS))
        print(f"{config:24} {size / count / 1e3:8.1f} kB a trace")

    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[], Any]] = {
            "check": lambda: [check(record, "") for record in records],
            "describe for splits": lambda: [splits.member(record) for record in records],
            "windows": lambda: [window_table(record) for record in records],
            "segments": lambda: [segment_table(record) for record in records],
            "write": lambda: write_traces(Path(folder) / "traces.parquet", records),
            "detect with rules": lambda: run(DETECTORS["rules"], records),
        }
        print(f"{'read':24} {1e3 * reading / count:8.1f} ms a trace")
        for name, step in steps.items():
            print(f"{name:24} {1e3 * cpu_seconds(step)[0] / count:8.1f} ms a trace")

    members = [splits.member(record) for record in records]
    for times in COPIES:
        many = copies(members, times)
        seconds, _ = cpu_seconds(lambda many=many: splits.split_units(many))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{'split units':24} {seconds:8.1f} s for {len(many):,} traces (at most {memory:,.0f} MiB so far)"
        )


if __name__ == "__main__":
    main()
