"""Any Kineto JSON, as ``torch.profiler`` writes it on CUDA, ROCm, XPU or a CPU, as a :class:`Trace`.

What stays is what detectors may see. Process and thread ids, hosts, correlation and sequence numbers are
resolved to event indices or dropped.
"""

from __future__ import annotations

import gzip
import re
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset._kineto_json import Args, Columns, decode
from torchtraceap.dataset._kineto_tree import enclosing, first_match, forward_ops
from torchtraceap.dataset.trace import CATEGORIES, GPU_CATEGORIES, Events, IntArray, Lane, Op, Trace
from torchtraceap.errors import UserError

MAX_UNPACKED_BYTES = 4 << 30
"""Larger JSON is refused, so that a small archive cannot fill the memory."""

_CHUNK_BYTES = 1 << 24

MAX_NAME = 4096
"""Event names are cut to so many characters; the longest template kernels have about 2,000."""

_NOTHING = msgspec.Raw(b"")
_LAUNCH = re.compile(r"launch|memcpy|memset|enqueue", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INT16_MAX = int(np.iinfo(np.int16).max)


def _codes(*categories: str) -> list[int]:
    return [CATEGORIES.index(category) for category in categories]


_CPU_OP, _USER_ANNOTATION = _codes("cpu_op", "user_annotation")
_KERNEL, _MEMCPY, _MEMSET = _codes("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = _codes("cuda_runtime", "cuda_driver", "xpu_runtime")
_GPU = _codes(*GPU_CATEGORIES)

# At equal start and duration (traces of whole microseconds) the outer event comes first.
_NESTING = np.full(len(CATEGORIES), 3, dtype=np.int8)
_NESTING[_codes("python_function", "user_annotation", "cpu_op")] = 0, 1, 2
_NESTING[_codes("cuda_driver")] = 4


@dataclass(frozen=True)
class Profile:
    """A trace and what its file says of where it was made.

    Attributes:
        trace: The events.
        device_name: The device that the GPU events ran on; without any, the first device of the file; ``""``
            when the file lists none.
        compute_units: Its multiprocessors (NVIDIA) or compute units (AMD), 0 when unknown.
        rank: Of a distributed job, None when the file does not tell.
        with_shapes: Whether input shapes were recorded.
    """

    trace: Trace
    device_name: str
    compute_units: int
    rank: int | None
    with_shapes: bool


def read_trace(path: str | Path) -> Trace:
    """The trace in a Kineto JSON file, plain or gzip; see :func:`read_profile`."""
    return read_profile(path).trace


def read_profile(path: str | Path) -> Profile:
    """Read a Kineto JSON file, plain or gzip (told apart by content).

    Raises:
        UserError: As for :func:`unpack` and :func:`parse`.
    """
    return parse(unpack(path), str(path))


def unpack(path: str | Path) -> bytes:
    """The JSON text in a file, plain or gzip. The file is read once, so a pipe will do.

    Raises:
        UserError: It cannot be read or unpacked, or is larger than :data:`MAX_UNPACKED_BYTES`.
    """
    path, chunks, size = Path(path), [], 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = stack.enter_context(gzip.open(raw)) if packed else raw
            while chunk := file.read(_CHUNK_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_UNPACKED_BYTES:
                    raise UserError(
                        f"{path}: more than {MAX_UNPACKED_BYTES} bytes of JSON; profile fewer steps"
                    )
    except (OSError, EOFError, zlib.error) as error:  # gzip reports damage by all three
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path}: cannot be read: {reason}") from None
    return b"".join(chunks)


def parse(data: bytes, where: str) -> Profile:
    """Make a profile of unpacked Kineto JSON.

    Only complete events of :data:`~torchtraceap.dataset.trace.CATEGORIES` are kept. Lanes are ``thread N``,
    0 being the thread with the ``ProfilerStep`` annotations (else with most events) and the others numbered
    by their first event, then ``stream N`` of each device; -1 is the stream of a wait for a whole device.
    Control characters in names become U+FFFD, and addresses of Python objects go.

    The links of a GPU event: ``launch`` is the runtime or driver call of the same correlation id; ``parent``
    is the call's own parent. Without such a call (replayed graphs, a profile that began too late)
    ``parent`` is the CPU op with the same external id, if any.

    Args:
        data: JSON text, UTF-8.
        where: What to call it in messages.

    Raises:
        UserError: See :func:`~torchtraceap.dataset._kineto_json.decode`.
    """
    columns = decode(data, where)
    names = _clean(columns.name)
    step_names = {name for name in set(names) if name.startswith("ProfilerStep#")}
    is_step = np.array([name in step_names for name in names], dtype=bool)
    category = columns.category
    # Before PyTorch 1.12 the annotation of a step was an ``Operator`` like any other.
    category[is_step & (category == _CPU_OP)] = _USER_ANNOTATION
    on_gpu = np.isin(category, _GPU)
    lanes, lane = _lanes(columns, on_gpu, is_step & (category == _USER_ANNOTATION))
    if len(lanes) > _INT16_MAX:
        raise UserError(f"{where}: {len(lanes)} threads and streams; at most {_INT16_MAX} are possible")

    order = np.lexsort((_NESTING[category], -columns.dur_ns, columns.start_ns, lane))
    lane, on_gpu, category = lane[order], on_gpu[order], category[order]
    start_ns, dur_ns = columns.start_ns[order], columns.dur_ns[order]
    names = [names[i] for i in order.tolist()]
    args = [columns.args[i] for i in order.tolist()]

    parent = enclosing(lane, start_ns, dur_ns)
    launch = _launches(names, category, args, start_ns, on_gpu)
    by_id = _by_external_id(args, start_ns, on_gpu, category)
    parent[on_gpu] = np.where(launch >= 0, parent[launch], by_id)[on_gpu]
    forward = forward_ops(
        start_ns, _ids([arg.sequence for arg in args]), _ids([arg.forward_thread for arg in args])
    )
    ops, op = _ops(names, category, args, on_gpu, launch)
    trace = Trace(
        lanes=lanes,
        ops=ops,
        events=Events(
            lane=lane.astype(np.int16),
            op=op,
            start_ns=start_ns,
            dur_ns=dur_ns,
            parent=parent,
            launch=launch.astype(np.int32),
            forward=forward,
        ),
    )
    device_name, compute_units = _device(columns, lanes)
    return Profile(trace, device_name, compute_units, columns.rank, any(op.shapes for op in ops))


def _clean(names: list[str]) -> list[str]:
    clean = {name: _UNPRINTABLE.sub("\ufffd", _ADDRESS.sub("", name[:MAX_NAME])) for name in set(names)}
    return [clean[name] for name in names]


def _lanes(
    columns: Columns, on_gpu: NDArray[np.bool_], is_step: NDArray[np.bool_]
) -> tuple[list[Lane], NDArray[np.int16 | np.int64]]:
    """All lanes, threads first, and the lane of each event."""
    index: dict[tuple[bool, Any, Any], int] = {}  # of (on a GPU, pid, tid) or (..., device, stream)
    rows = zip(on_gpu.tolist(), columns.pid, columns.tid, columns.args, strict=True)
    key = np.array(
        [
            index.setdefault((True, *_place(arg, pid, tid)) if gpu else (False, pid, tid), len(index))
            for gpu, pid, tid, arg in rows
        ]
    )
    keys = list(index)
    begins = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(begins, key, columns.start_ns)
    sizes = np.bincount(key, minlength=len(keys))
    steps = np.bincount(key[is_step], minlength=len(keys))

    threads = sorted((k for k in range(len(keys)) if not keys[k][0]), key=lambda k: begins[k])
    if threads:
        main = max(threads, key=lambda k: (steps[k], sizes[k]))
        threads.remove(main)
        threads.insert(0, main)
    places = [keys[k][1:] for k in range(len(keys)) if keys[k][0]]
    devices = _small_numbers([device for device, _ in places])
    numbers: dict[int, tuple[int, int]] = {}
    for device, number in devices.items():
        for stream, n in _small_numbers([s for d, s in places if d == device]).items():
            numbers[index[True, device, stream]] = number, n
    streams = sorted(numbers, key=numbers.__getitem__)

    lanes = [Lane("cpu", f"thread {i}") for i in range(len(threads))]
    lanes += [Lane("gpu", f"stream {stream}", device) for device, stream in map(numbers.__getitem__, streams)]
    lane_of_key = np.empty(len(keys), dtype=np.int64)
    lane_of_key[[*threads, *streams]] = np.arange(len(keys))
    return lanes, lane_of_key[key]


def _place(arg: Args, pid: Any, tid: Any) -> tuple[Any, Any]:
    """Device and stream of a GPU event; Kineto also shows them as process and thread."""
    device = pid if arg.device is None else arg.device
    stream = tid if arg.stream is None else arg.stream
    return device, -1 if stream == 0xFFFFFFFF else stream  # on no stream in particular: a context sync


def _small_numbers(ids: list[Any]) -> dict[Any, int]:
    """A number for each id: a small integer stays; a handle or an address gets the next free number."""
    small = {i: i for i in ids if isinstance(i, int) and -1 <= i <= _INT16_MAX}
    free = (n for n in range(len(ids)) if n not in small)
    return {i: small[i] if i in small else next(free) for i in dict.fromkeys(ids)}


def _ids(values: list[int | None]) -> NDArray[np.int64]:
    """As int64; -1 for none and for what does not fit (unsigned fillers)."""
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, OverflowError):
        return np.array([-1 if v is None or not 0 <= v < 2**63 else v for v in values], dtype=np.int64)


def _launches(
    names: list[str],
    category: NDArray[np.int8],
    args: list[Args],
    start_ns: IntArray,
    on_gpu: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """The call that launched each GPU event, -1 for none."""
    correlation = _ids([arg.correlation for arg in args])
    calls = np.flatnonzero(np.isin(category, _CALLS))
    # Calls that share an id: one that launches before one that does not, then the outermost.
    launches = np.array([bool(_LAUNCH.search(names[i])) for i in calls.tolist()], dtype=bool)
    preferred = calls[np.lexsort((start_ns[calls], ~launches))]
    return first_match(np.where(on_gpu & (correlation > 0), correlation, -1), correlation, preferred)


def _by_external_id(
    args: list[Args], start_ns: IntArray, on_gpu: NDArray[np.bool_], category: NDArray[np.int8]
) -> NDArray[np.int64]:
    """The CPU op with the external id of each GPU event, -1 for none."""
    external, old = _ids([arg.external for arg in args]), _ids([arg.external_old for arg in args])
    external = np.where(external < 0, old, external)
    # Some versions repeat the correlation id in this place: no op's id.
    filler = external == _ids([arg.correlation for arg in args])
    ops = np.flatnonzero(np.isin(category, (_CPU_OP, _USER_ANNOTATION)))
    preferred = ops[np.argsort(start_ns[ops], kind="stable")]
    return first_match(np.where(on_gpu & (external > 0) & ~filler, external, -1), external, preferred)


def _ops(
    names: list[str],
    category: NDArray[np.int8],
    args: list[Args],
    on_gpu: NDArray[np.bool_],
    launch: NDArray[np.int64],
) -> tuple[list[Op], NDArray[np.int32]]:
    """The distinct signatures in order of first use, and that of each event.

    ROCm records launch configurations and copy sizes in the calls: GPU events take them from there.
    """
    # First by the text as it stands in the file, event by event; then the few that differ are normalised.
    index: dict[tuple[str, int, bytes, bytes, int], int] = {}
    literal = []
    rows = zip(names, category.tolist(), args, on_gpu.tolist(), launch.tolist(), strict=True)
    for name, code, arg, gpu, call in rows:
        first, second, size = arg.shapes, arg.types, 0
        if gpu:
            source = args[call] if call >= 0 else arg
            first = second = _NOTHING
            if code == _KERNEL:
                first, second = arg.grid or source.grid, arg.block or source.block
            elif code in (_MEMCPY, _MEMSET):
                size = (source.size if arg.bytes is None else arg.bytes) or 0
                size = size if 0 < size < 2**63 else 0
        literal.append(index.setdefault((name, code, bytes(first), bytes(second), size), len(index)))

    ops: dict[Op, int] = {}
    merged = []
    for name, code, *raw, size in index:
        left, right = (_compact(text) for text in raw)
        shared = {"grid": left, "block": right} if code in _GPU else {"shapes": left, "types": right}
        merged.append(ops.setdefault(Op(name, CATEGORIES[code], bytes=size, **shared), len(ops)))
    return list(ops), np.array(merged, dtype=np.int32)[literal]


def _compact(raw: bytes) -> str:
    """JSON text without white space; nothing for null."""
    text = msgspec.json.format(raw, indent=-1).decode("utf-8", "replace") if raw else ""
    return "" if text == "null" else text


def _device(columns: Columns, lanes: list[Lane]) -> tuple[str, int]:
    used = next((lane.device for lane in lanes if lane.kind == "gpu"), None)
    if used is None:
        return next(iter(columns.devices.values()), ("", 0))
    return columns.devices.get(used, ("", 0))
