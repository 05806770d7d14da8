"""Kineto's JSON as columns: one typed decode of all events, one of the arguments of those that are kept.

Times come out as exact int64 nanoseconds. Whatever Kineto has been seen to write that JSON does not allow is
repaired, but only after a strict decode has failed, so that a sound file pays nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import CATEGORIES
from torchtraceap.errors import UserError

T = TypeVar("T")
_EMPTY, _NULL = msgspec.Raw(b""), msgspec.Raw(b"null")

FLOAT_EXACT_US = 2.0**43
"""Below this, a float64 of microseconds determines its nanosecond. Kineto's ``baseTimeNanoseconds`` keeps
recent traces there; absolute times, as older ones have them, lie above."""

MAX_US = 3.0e15
"""Times and durations beyond this (95 years) are damage. Within it, start plus duration fits int64 ns."""

_OLD_CATEGORIES = {  # Kineto before PyTorch 1.12, and the call categories of other accelerators
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "hip_runtime": "cuda_runtime",
    "xpu_driver": "xpu_runtime",
}


class Args(msgspec.Struct, gc=False):
    """Arguments of an event that the reader uses; of all ids, null and negative mean none."""

    correlation: int | None = -1
    external: int | None = msgspec.field(name="External id", default=-1)
    external_old: int | None = msgspec.field(name="external id", default=-1)
    sequence: int | None = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=-1)
    device: int | str | None = None
    stream: int | str | None = None
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_EMPTY)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_EMPTY)
    grid: msgspec.Raw = _EMPTY
    block: msgspec.Raw = _EMPTY
    bytes: int | None = None
    size: int | None = None  # ROCm tells the size of a copy in the call that starts it


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: Any = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float | None = None
    dur: float | None = None
    args: msgspec.Raw = _EMPTY


class _Device(msgspec.Struct):
    id: int = 0
    name: str = ""
    units: int = msgspec.field(name="numSms", default=0)


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    events: list[_Event] | None = msgspec.field(name="traceEvents", default=None)
    devices: list[_Device] | None = msgspec.field(name="deviceProperties", default=None)
    distributed: _Distributed | None = msgspec.field(name="distributedInfo", default=None)


class _ExactTime(msgspec.Struct, gc=False):
    ts: Decimal | None = None
    dur: Decimal | None = None


class _ExactTimes(msgspec.Struct):
    events: list[_ExactTime] = msgspec.field(name="traceEvents")


# Not strict: numbers may be strings, as in the arguments of hip* calls.
_FILE = msgspec.json.Decoder(_File, strict=False)
_EXACT = msgspec.json.Decoder(_ExactTimes, strict=False)
_ARGS = msgspec.json.Decoder(list[Args], strict=False)


@dataclass(frozen=True)
class Columns:
    """The kept events of a file, in its order: parallel lists and arrays of equal length.

    ``category`` indexes ``CATEGORIES``; ``pid`` and ``tid`` are as Kineto writes them, mostly integers.
    ``start_ns`` counts from the earliest kept event. ``devices`` maps the id of each device of the file to
    (name, compute units).
    """

    name: list[str]
    category: NDArray[np.int8]
    pid: list[Any]
    tid: list[Any]
    start_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    args: list[Args]
    devices: dict[int, tuple[str, int]]
    rank: int | None


def decode(data: bytes, where: str) -> Columns:
    """Decode the JSON text of one profile, and keep its complete events of the known categories.

    Raises:
        UserError: Not JSON, cut off, no ``traceEvents``, no event that is kept, a value of the wrong type, or
            a time that is missing, negative (durations), not finite or out of range.
    """
    try:
        file = _decode(_FILE, data)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: not a Kineto trace: {error}") from None
    except msgspec.DecodeError:
        data = repaired(data)
        try:
            file = _decode(_FILE, data)
        except msgspec.DecodeError as error:
            raise UserError(f"{where}: not JSON, or cut off: {error}") from None
    if file.events is None:
        raise UserError(f"{where}: no traceEvents, so not a trace written by torch.profiler")

    known = {text: _category(text) for text in {event.cat for event in file.events}}
    index = [i for i, event in enumerate(file.events) if event.ph == "X" and known[event.cat] >= 0]
    if not index:
        raise UserError(
            f"{where}: none of its {len(file.events)} events is an op, a runtime call or GPU work "
            f"(complete events of category {', '.join(CATEGORIES)})"
        )
    events = [file.events[i] for i in index]
    start_ns, dur_ns = _times(events, index, data, where)
    return Columns(
        name=[event.name if isinstance(event.name, str) else str(event.name) for event in events],
        category=np.array([known[event.cat] for event in events], dtype=np.int8),
        pid=[event.pid for event in events],
        tid=[event.tid for event in events],
        start_ns=start_ns,
        dur_ns=dur_ns,
        args=_args(events, index, where),
        devices={device.id: (device.name, device.units) for device in file.devices or ()},
        rank=file.distributed.rank if file.distributed else None,
    )


def _decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise msgspec.ValidationError("nested too deeply") from None


def _category(text: str | None) -> int:
    """Index in ``CATEGORIES`` of a category as the file spells it, -1 if it is not kept."""
    name = (text or "").lower()
    name = _OLD_CATEGORIES.get(name, name)
    return CATEGORIES.index(name) if name in CATEGORIES else -1


def _args(events: list[_Event], index: list[int], where: str) -> list[Args]:
    raw = [b"{}" if event.args in (_EMPTY, _NULL) else event.args for event in events]
    try:
        return _decode(_ARGS, b"[" + b",".join(raw) + b"]")
    except msgspec.DecodeError as error:
        # The message names the place among the kept events: say which event of the file that is.
        text = re.sub(r"`\$\[(\d+)\]", lambda m: f"`traceEvents[{index[int(m[1])]}].args", str(error))
        raise UserError(f"{where}: {text}") from None


def _times(
    events: list[_Event], index: list[int], data: bytes, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start since the earliest event and duration in nanoseconds."""
    ts = np.array([event.ts for event in events], dtype=np.float64)
    dur = np.array([event.dur for event in events], dtype=np.float64)

    def refuse(bad: NDArray[np.bool_], what: str) -> NoReturn:
        first = int(np.argmax(bad))
        value = f"ts {events[first].ts}, dur {events[first].dur}"
        raise UserError(f"{where}: traceEvents[{index[first]}] {what} ({value})")

    for bad, what in (
        (~np.isfinite(ts), "has no finite start"),
        (~np.isfinite(dur), "has no finite duration"),
        (dur < 0, "ends before it starts"),
        ((np.abs(ts) > MAX_US) | (dur > MAX_US), "lies outside of the range of time"),
    ):
        if bad.any():
            refuse(bad, what)
    if np.abs(ts).max() < FLOAT_EXACT_US and dur.max() < FLOAT_EXACT_US:
        start_ns, dur_ns = (np.rint(column * 1000).astype(np.int64) for column in (ts, dur))
    else:
        exact = _decode(_EXACT, data).events
        pairs = [(_nanoseconds(exact[i].ts), _nanoseconds(exact[i].dur)) for i in index]
        start_ns, dur_ns = np.array(pairs, dtype=np.int64).T
    return start_ns - start_ns.min(), np.ascontiguousarray(dur_ns)


def _nanoseconds(microseconds: Decimal | None) -> int:
    assert microseconds is not None  # the float pass has refused such an event
    return int((microseconds * 1000).to_integral_value())


_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\b(?:NaN|nan|Infinity|inf)\b', re.DOTALL)
_IN_STRING = re.compile(
    r"""(?P<control>[\x00-\x1f])
      | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}  # a pair of surrogates
      | (?P<surrogate>\\u[dD][89a-fA-F][0-9a-fA-F]{2})
      | \\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})
      | (?P<backslash>\\)""",
    re.VERBOSE,
)
_MENDED = {"control": "\ufffd", "surrogate": "\ufffd", "backslash": "\\\\"}


def repaired(data: bytes) -> bytes:
    """Make JSON of what is nearly JSON.

    A byte order mark, as editors put in front, goes. Not-a-number and infinity become null. In strings, bytes
    that are not UTF-8, control characters and lone surrogates become U+FFFD, and a backslash that escapes
    nothing becomes two.
    """

    def mend(token: re.Match[bytes]) -> bytes:
        text = token[0]
        if not text.startswith(b'"'):
            return b"null"
        return _IN_STRING.sub(
            lambda m: _MENDED[m.lastgroup] if m.lastgroup else m[0], text.decode("utf-8", "replace")
        ).encode()

    return _TOKEN.sub(mend, data.removeprefix(b"\xef\xbb\xbf"))
