"""Collected shards as a whole: what their sessions say, and which of all their costs hold.

A shard is a Parquet file of the table ``traces`` with the JSON of its session in the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchtraceap.dataset import schema
from torchtraceap.dataset.parquet import read_metadata
from torchtraceap.dataset.trace import TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.multiplicity import discoveries

InstanceKey = tuple[str, int]
"""Trace id, and index of the instance in its trace."""


class Tested(msgspec.Struct):
    """What a session says of an instance; ``p_costly`` is null where nothing was measured."""

    trace_id: str
    instance: int
    p_costly: float | None = None


class Differing(msgspec.Struct):
    """Events outside of all labels that a trace has and its clean twin has not, and the other way round."""

    trace_id: str
    extra: int
    missing: int
    names: dict[str, int] = {}


class Session(msgspec.Struct):
    """The part of a session's JSON that is read again. The null trials are ``labels.cost.Look``."""

    hardware: dict[str, Any]
    instances: list[Tested]
    differences: list[Differing] = []
    null_trials: list[dict[str, Any]] = []
    unpaired: list[str] = []

    @property
    def p_costly(self) -> dict[InstanceKey, float | None]:
        """The p-value of each instance."""
        return {(one.trace_id, one.instance): one.p_costly for one in self.instances}


def shards_of(runs: Sequence[str | Path]) -> list[Path]:
    """The shards of all ``runs``.

    Raises:
        UserError: There is no run, or one has no shards.
    """
    shards: list[Path] = []
    for run in map(Path, runs):
        found = sorted((run / "shards").glob("*.parquet"))
        if not found:
            raise UserError(f"{run} holds no shards/*.parquet; give folders that `traceap collect` wrote to")
        shards += found
    if not shards:
        raise UserError("No run was given; a data set needs the folder of at least one")
    return shards


def read_session(shard: Path) -> Session:
    """What ``shard`` says of its making.

    Raises:
        UserError: It says nothing, or something else.
    """
    text = read_metadata(shard).get(schema.SESSION_KEY)
    if text is None:
        raise UserError(
            f"{shard} has no {schema.SESSION_KEY} in its metadata: it was not written by a collection"
        )
    try:
        return msgspec.json.decode(text, type=Session)
    except msgspec.DecodeError as error:
        raise UserError(f"{shard}: {schema.SESSION_KEY} in its metadata is broken: {error}") from None


@dataclass
class CostTests:
    """The cost measurements of all injected instances of a release, taken together."""

    _costly: set[InstanceKey] = field(default_factory=set)  # by their own measurement
    _test_of: dict[InstanceKey, tuple[Any, ...]] = field(default_factory=dict)  # which measurement it was

    def add(self, record: TraceRecord, p_costly: Mapping[InstanceKey, float | None], where: str) -> None:
        """Take up the injected instances of a trace.

        Raises:
            UserError: One has no p-value; names ``where``.
        """
        for index, instance in enumerate(record.instances):
            if instance.source != "injected":
                continue
            key = record.trace_id, index
            p = p_costly.get(key)
            if p is None or not 0 <= p <= 1:
                raise UserError(f"{where}: its session has no p-value in [0, 1] for instance {index}")
            # Traces of one workload may share a measurement: it is one test, however many traces show it.
            self._test_of[key] = (record.meta["pair_id"], instance.pattern, instance.variant, p)
            if instance.state == "costly":
                self._costly.add(key)

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(set(self._test_of.values()))

    def demoted(self) -> frozenset[InstanceKey]:
        """Instances that are costly by their own measurement, but may be so by chance among all tests."""
        tests = sorted(set(self._test_of.values()))
        holds = dict(zip(tests, discoveries([test[-1] for test in tests]).tolist(), strict=True))
        return frozenset(key for key in self._costly if not holds[self._test_of[key]])
