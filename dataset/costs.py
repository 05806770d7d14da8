"""The table ``costs``: what was measured of each instance, from which its verdict and its cost follow.

A release judges all of its tests together, which may leave fewer instances costly than their own
measurements say. This table holds these measurements and their own verdicts, so that every state can be
derived anew, and a release be taken up in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from torchtraceap.dataset.parquet import read_table
from torchtraceap.dataset.schema import COSTS
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.types import Instance, State

InstanceKey = tuple[str, int]
"""Trace id, and index of the instance in its trace."""


class Measurement(msgspec.Struct):
    """What was measured of an instance; nothing was where ``state`` and ``p_costly`` are null.

    The fields are those of ``labels.cost.Cost`` from which the others follow.
    """

    trace_id: str
    instance: int
    state: State | None = None
    p_costly: float | None = None
    p_benign: float | None = None
    decided_at: int = 0
    pairs: list[tuple[float, float]] = []


Measurements = Mapping[InstanceKey, Measurement]


def cost_table(record: TraceRecord, measurements: Measurements) -> pa.Table:
    """Rows of ``costs`` of one trace, in the order of its instances."""
    rows: list[dict[str, Any]] = []
    for index, instance in enumerate(record.instances):
        one = measurements.get((record.trace_id, index))
        if one is None or instance.source == "native" or None in (one.state, one.p_costly, one.p_benign):
            continue
        rows.append(
            {
                "trace_id": record.trace_id,
                "instance": index,
                "pair_id": record.meta["pair_id"],
                "pattern": instance.pattern,
                "variant": instance.variant,
                "source": instance.source,
                "state": one.state,
                "p_costly": one.p_costly,
                "p_benign": one.p_benign,
                "decided_at": one.decided_at,
                "seconds_without": [without for without, _ in one.pairs],
                "seconds_with": [with_it for _, with_it in one.pairs],
            }
        )
    return pa.Table.from_pylist(rows, schema=COSTS)


def read_costs(path: Path) -> dict[InstanceKey, Measurement]:
    """The measurements in a file of ``costs``.

    Raises:
        UserError: It cannot be read, or a row is none of a measurement.
    """
    return measurements_in(read_table(path, COSTS), str(path))


def measurements_in(table: pa.Table, where: str) -> dict[InstanceKey, Measurement]:
    """The measurements in rows of ``costs``.

    Raises:
        UserError: A row is none of a measurement; names ``where``.
    """
    found = {}
    for row in table.to_pylist():
        try:
            pairs = list(zip(row["seconds_without"], row["seconds_with"], strict=True))
            one = msgspec.convert({**row, "pairs": pairs}, Measurement)
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: a row of trace {row['trace_id']} is broken: {error}") from None
        found[one.trace_id, one.instance] = one
    return found


def own_states(record: TraceRecord, measurements: Measurements) -> list[Instance]:
    """The instances of a released record, the injected ones with the states of their own measurements."""

    def own(index: int, instance: Instance) -> Instance:
        one = measurements.get((record.trace_id, index))
        if instance.source != "injected" or one is None or one.state is None:
            return instance
        return msgspec.structs.replace(instance, state=one.state)

    return [own(index, instance) for index, instance in enumerate(record.instances)]
