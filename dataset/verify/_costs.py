"""Whether states and costs follow from what was measured: all of it is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from torchtraceap.dataset.costs import Measurement, Measurements, measurements_in, own_states
from torchtraceap.dataset.shards import CostTests
from torchtraceap.dataset.verify._check import Check, judge
from torchtraceap.dataset.verify._survey import Seen
from torchtraceap.errors import UserError
from torchtraceap.labels.cost import LOOKS, Cost, conclude
from torchtraceap.labels.types import Instance, state_of_lookalike

FLOAT32, FLOAT64 = 1e-6, 1e-9
"""Relative difference that another order of summation or another library may make."""


def costs(seen: Sequence[Seen], tables: Mapping[str, pa.Table]) -> Check:
    """Compare the tables ``costs`` with the instances of the traces."""
    found: list[str] = []
    measured: dict[tuple[str, int], Measurement] = {}
    for split, table in tables.items():
        of_split = [one for one in seen if one.split == split]
        found += _unmatched(split, of_split, table)
        try:
            measured |= measurements_in(table, split)
        except UserError as error:
            found.append(str(error))
    for one in seen:
        for index, instance in enumerate(one.record.instances):
            if measurement := measured.get((one.trace_id, index)):
                name = f"trace {one.trace_id}: instance {index} ({instance.pattern}/{instance.variant})"
                found += [f"{name} {what}" for what in _not_following(instance, measurement)]
    if not found:  # else nobody knows what the tests are
        found += _misjudged(seen, measured)
    return judge("costs", sum(map(len, tables.values())), "measurements", found)


def _unmatched(split: str, seen: Sequence[Seen], table: pa.Table) -> Iterator[str]:
    """Rows without their instance, and instances without their row."""
    columns = ("trace_id", "instance", "pair_id", "pattern", "variant", "source")
    listed = list(zip(*(table[name].to_pylist() for name in columns), strict=True))
    wanted = [
        (one.trace_id, index, one.meta["pair_id"], instance.pattern, instance.variant, instance.source)
        for one in seen
        for index, instance in enumerate(one.record.instances)
        if _is_measured(instance)
    ]
    there, expected = set(listed), set(wanted)
    if len(there) < len(listed):
        yield f"{split} lists a measurement twice"
    yield from (f"{split} lacks the measurement of {_named(row)}" for row in wanted if row not in there)
    yield from (
        f"{split} has a measurement of {_named(row)}, of which there is none"
        for row in listed
        if row not in expected
    )


def _is_measured(instance: Instance) -> bool:
    """Injected ones must have been; look-alikes were if they have a cost."""
    return instance.source == "injected" or (
        instance.source == "lookalike" and bool(np.isfinite(instance.cost_ratio))
    )


def _named(row: tuple[Any, ...]) -> str:
    trace_id, index, pair_id, pattern, variant, source = row
    return f"instance {index} of trace {trace_id}, {source} {pattern}/{variant} of workload {pair_id}"


def _not_following(instance: Instance, one: Measurement) -> Iterator[str]:
    """What the pairs of an instance contradict."""
    if one.decided_at not in LOOKS or one.decided_at > len(one.pairs):
        yield f"was decided at {one.decided_at} of {len(one.pairs)} pairs"
        return
    try:
        cost: Cost = conclude(one.pairs, one.decided_at)
    except ValueError as error:
        yield f"has impossible pairs: {error}"
        return
    if one.state != cost.state:
        yield f"was measured {one.state}, its pairs say {cost.state}"
    for name in ("p_costly", "p_benign"):
        said, follows = getattr(one, name), getattr(cost, name)
        if not np.isclose(said, follows, rtol=FLOAT64, atol=1e-300):
            yield f"has {name} {said:g}, its pairs say {follows:g}"
    for name in ("ms", "ratio", "low", "high"):
        said, follows = getattr(instance, f"cost_{name}"), getattr(cost, name)
        if not np.isclose(said, follows, rtol=FLOAT32, atol=FLOAT64):
            yield f"has cost_{name} {said:g}, its pairs say {follows:g}"


def _misjudged(seen: Sequence[Seen], measured: Measurements) -> Iterator[str]:
    """States that do not follow from all measurements together."""
    tests = CostTests()
    for one in seen:
        record = replace(one.record, instances=own_states(one.record, measured))
        tests.add(record, measured, f"trace {one.trace_id}")
    demoted = tests.demoted()
    for one in seen:
        for index, instance in enumerate(one.record.instances):
            key = one.trace_id, index
            if (measurement := measured.get(key)) is None or measurement.state is None:
                continue
            state = measurement.state
            if instance.source == "lookalike":
                state = state_of_lookalike(state)
            elif key in demoted:
                state = "undecided"
            if instance.state != state:
                yield (
                    f"trace {one.trace_id}: instance {index} ({instance.pattern}/{instance.variant}) is "
                    f"{instance.state}, all measurements together say {state}"
                )
