"""CPU time to read a Kineto JSON file: this project's reader against HTA (module hta of TraceInsight).

Both go from the file on disk to a table of events with CPU-GPU correlation, steps and call stacks:
``read_trace`` here (forward-backward links included); there ``Trace.parse_traces``, which makes the table,
then ``CallGraph``, which makes the stacks. Both run on one thread, in turns.

HTA rounds times to microseconds, and its ``CallGraph`` then fails on events whose duration became negative:
it runs without that rounding (``HTA_DISABLE_NS_ROUNDING``), and without its memory profiling.

    python benchmarks/read_kineto.py [FILE...] [--repeats N]

Without a file, one is made (``_profile.py``).
"""

from __future__ import annotations

import argparse
import gzip
import logging
import os
import statistics
import time
from pathlib import Path

from _profile import given_or_made

from torchtraceap.dataset.kineto import read_trace


def compare(path: Path, repeats: int) -> None:
    """Print one row: size, events, the median times, and HTA's over ours."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.common.trace import Trace as HtaTrace
    from hta.common.trace_call_graph import CallGraph

    logging.disable(logging.WARNING)  # HTA reports its progress as warnings

    ours, table, stacks = [], [], []
    for _ in range(repeats):
        begin = time.process_time()
        read_trace(path)
        ours.append(time.process_time() - begin)

        begin = time.process_time()
        trace = HtaTrace(trace_files={0: str(path)}, trace_dir="")
        trace.parse_traces(use_multiprocessing=False, use_memory_profiling=False)
        table.append(time.process_time() - begin)
        CallGraph(trace)
        stacks.append(time.process_time() - begin)
    events = len(read_trace(path))
    data = path.read_bytes()
    size = len(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    mine, hta_table, hta_stacks = (statistics.median(times) for times in (ours, table, stacks))
    print(
        f"{path.name}: {size / 1e6:.1f} MB of JSON, {events} events, median of {repeats}: ours {mine:.2f} s; "
        f"HTA table {hta_table:.2f} s ({hta_table / mine:.1f}x), "
        f"table and stacks {hta_stacks:.2f} s ({hta_stacks / mine:.1f}x)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="*", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with given_or_made(options.file) as files:
        for path in files:
            compare(path, options.repeats)


if __name__ == "__main__":
    main()
