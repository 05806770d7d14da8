"""How small traces become: bytes an event as JSON, as gzip and as the Parquet that is published.

    python benchmarks/storage.py [FILE...] [--encodings]

FILE is Kineto JSON, plain or gzip; without one, a trace is made (``_profile.py``). All files are written as
one Parquet file, with every column: names, shapes, types, launch configurations, parents, launches, forward
ops. With ``--encodings``, each event column is encoded in every way that Parquet has, and so are other forms
of it: absolute references, times as differences. The choices in dataset/parquet.py and dataset/rows.py rest
on this. The footer weighs much with a few traces and little with many.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _profile import given_or_made

from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.parquet import read_traces, write_traces
from torchtraceap.dataset.rows import row_from_record
from torchtraceap.dataset.schema import TRACE_META
from torchtraceap.dataset.trace import IntArray, Trace, TraceRecord

GZIP_LEVEL = 6  # the default of the gzip command
ENCODINGS = ("PLAIN", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "dictionary")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="*", type=Path)
    parser.add_argument("--encodings", action="store_true", help="compare the encodings of each event column")
    arguments = parser.parse_args()
    with given_or_made(arguments.file) as files:
        measure(files, arguments.encodings)


def measure(files: list[Path], encodings: bool) -> None:
    """Print the sizes of ``files`` as JSON, gzip and Parquet, and how fast Parquet is written and read."""
    print(f"{'trace':40} {'events':>8} {'GPU':>7} {'ops':>6} {'JSON':>7} {'gzip':>7}   bytes an event")
    records, packed = [], 0
    for path in files:
        trace, text = read_trace(path), path.read_bytes()
        text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
        size = len(gzip.compress(text, GZIP_LEVEL))
        packed += size
        print(
            f"{path.name[:40]:40} {len(trace):8} {trace.on_gpu.sum():7} {len(trace.ops):6}"
            f" {len(text) / len(trace):7.1f} {size / len(trace):7.1f}"
        )
        records.append(_record(trace, path.name))

    events = sum(len(record.trace) for record in records)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.parquet"
        write_s = min(_seconds(lambda: write_traces(path, records)) for _ in range(3))
        read_s = min(_seconds(lambda: list(read_traces(path))) for _ in range(3))
        size = path.stat().st_size
        print(f"\n{'column':40} bytes an event")
        for name, column_size in _column_sizes(path).most_common():
            print(f"{name:40} {column_size / events:14.3f}")
    print(f"\nParquet: {size / events:.2f} bytes an event, {packed / size:.1f} times smaller than gzip.")
    print(
        f"Written at {events / write_s / 1e6:.2f} and read at {events / read_s / 1e6:.2f} million events/s."
    )
    if encodings:
        _compare(records, events)


def _record(trace: Trace, name: str) -> TraceRecord:
    """A record without labels, and with ``name`` in place of all that a profile does not say."""
    meta = {field.name: name if field.type == pa.string() else 0 for field in TRACE_META}
    return TraceRecord(trace=trace, meta=meta)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _column_sizes(path: Path) -> Counter[str]:
    """Compressed bytes of each leaf, with what belongs to none (the footer) as one more."""
    metadata = pq.read_metadata(path)
    sizes: Counter[str] = Counter()
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema.removesuffix(".list.element")
            sizes[name if "." in name else "scalars"] += column.total_compressed_size
    sizes["footer and page headers"] = path.stat().st_size - sizes.total()
    return sizes


def _compare(records: list[TraceRecord], events: int) -> None:
    print(f"\n{'bytes an event':24}" + "".join(f"{encoding:>22}" for encoding in ENCODINGS))
    forms = [_forms(record) for record in records]
    for name in forms[0]:
        sizes = [_encoded([form[name] for form in forms], encoding) / events for encoding in ENCODINGS]
        print(f"{name:24}" + "".join(f"{size:22.3f}" for size in sizes))


def _forms(record: TraceRecord) -> dict[str, IntArray]:
    """The stored event columns, and what could have been stored in place of them."""
    events = record.trace.events
    return {
        **row_from_record(record)["events"],
        "(parent)": events.parent,
        "(launch)": events.launch,
        "(forward)": events.forward,
        "(start difference)": np.diff(events.start_ns, prepend=0),
        "(gap to the one before)": np.diff(events.start_ns, prepend=0) - np.append(0, events.dur_ns[:-1]),
    }


def _encoded(columns: list[IntArray], encoding: str) -> int:
    table = pa.table(
        {"x": columns}, schema=pa.schema([("x", pa.list_(pa.from_numpy_dtype(columns[0].dtype)))])
    )
    sink = pa.BufferOutputStream()
    dictionary = encoding == "dictionary"
    pq.write_table(
        table,
        sink,
        row_group_size=8,
        compression="zstd",
        compression_level=19,
        use_dictionary=dictionary,
        column_encoding=None if dictionary else {"x.list.element": encoding},
        write_statistics=False,
    )
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    return sum(metadata.row_group(i).column(0).total_compressed_size for i in range(metadata.num_row_groups))


if __name__ == "__main__":
    main()
