"""Which traces lie on which side of a split, so that no architecture is on two.

**Split unit.** Traces are joined that are of one workload (``pair_id``), that have an equal
``backbone_family`` (unless it is empty), or whose programs are similar: two clean traces of one mode with a
weighted Jaccard similarity above 0.5 of their (op, shapes) counts. A trace is clean when nothing that was
injected is in it; look-alikes may be. A split unit is a connected component of that graph, named after its
alphabetically first backbone family. Ops without any tensor of one dimension or more are not counted: they
are alike in all models.

**Split.** By unit, for each task on its own; a unit counts for the task that most of its traces have. The
units of tasks that have only one are split together, as if they were of one task. Units with a family that is
meant for test come first, then those with a held-out variant, because only test can use those traces;
otherwise units are put in the order of a hash of seed and name, so that neither the order of the input nor
other units of the task decide. Of n units the first max(1, round(0.2 n)) are test, the next
max(1, round(0.1 n)) validation, the rest train; of two units one is test and one train, a single one is
train. Halves are rounded up.

**Families meant for test** are a quarter of all, by a hash of their names that depends on nothing else. Plans
of all machines draw held-out variants for them alone, so that hardly a trace must be left out, and may give
them more patterns, as a class needs some costly instances in test to be scored.

**Held-out variants.** A trace with an instance of one stays if its unit is in test. In a unit of train or
validation it is left out of the data set.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchtraceap.dataset.trace import IntArray, Op, Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS

SIMILAR = 0.5
TEST_PERCENT = 20
VALIDATION_PERCENT = 10

MEANT_PERCENT = 25
MEANT_SEED = 2433
"""Chosen for the balance of the zoo (tests/test_zoo.py): of all tasks whose models have more than two
backbone families, between them, some are meant for test, and the two largest families, ResNet and ViT, which
many others resemble, are not."""

Signature = Mapping[tuple[str, str], int]
"""How often each (op name, shapes) occurs."""


@dataclass(frozen=True)
class Member:
    """What the assignment of a trace depends on. ``signature`` is empty for a trace that is not clean."""

    trace_id: str
    pair_id: str
    task: str
    mode: str
    backbone_family: str
    heldout: bool
    signature: Signature = field(repr=False)


def meant_for_test(backbone_family: str) -> bool:
    """Whether models of this family are meant for test, whatever else there is."""
    digest = hashlib.sha256(f"{MEANT_SEED}:{backbone_family}".encode()).digest()
    return bool(backbone_family) and int.from_bytes(digest[:4], "big") % 100 < MEANT_PERCENT


def member(record: TraceRecord) -> Member:
    """Sum up a record for the split.

    Raises:
        UserError: An injected instance is of an unknown pattern.
    """
    meta = record.meta
    clean = all(instance.source != "injected" for instance in record.instances)
    return Member(
        trace_id=record.trace_id,
        pair_id=str(meta["pair_id"]),
        task=str(meta["task"]),
        mode=str(meta["mode"]),
        backbone_family=str(meta["backbone_family"]),
        heldout=has_heldout_variant(record),
        signature=signature(record.trace) if clean else {},
    )


def has_heldout_variant(record: TraceRecord) -> bool:
    """Whether anything injected (look-alikes too) is of a variant that train and validation must not show.

    Raises:
        UserError: The pattern or the variant is not in the catalogue, so nobody knows.
    """
    injected = [instance for instance in record.instances if instance.source != "native"]
    try:
        return any(PATTERNS[one.pattern].variant(one.variant).heldout for one in injected)
    except UserError as error:
        raise UserError(f"trace {record.trace_id}: {error}") from None


def signature(trace: Trace) -> Signature:
    """Counts of the trace's ops by name and shapes, of those with a dimension in any input."""
    return signature_of(trace.ops, trace.events.op)


def signature_of(ops: Sequence[Op], op_of_event: IntArray) -> Signature:
    """:func:`signature`, of the operators of a trace and the index of each event's."""
    counts = np.bincount(op_of_event, minlength=len(ops))
    result: Counter[tuple[str, str]] = Counter()
    for op, count in zip(ops, counts.tolist(), strict=True):
        if count and op.category == "cpu_op" and any(character.isdigit() for character in op.shapes):
            result[op.name, op.shapes] += count
    return result


def similar(signatures: Sequence[Signature]) -> list[tuple[int, int]]:
    """Index pairs whose weighted Jaccard similarity is above ``SIMILAR``.

    The similarity is the sum of the minima over the sum of the maxima. It is at most the ratio of the sizes,
    so in the order of size only a run of candidates has to be compared, and in one go.
    """
    order = sorted((i for i, one in enumerate(signatures) if one), key=lambda i: sum(signatures[i].values()))
    ids: dict[tuple[str, str], int] = {}
    keys = [np.array([ids.setdefault(key, len(ids)) for key in signatures[i]], np.int32) for i in order]
    counts = [np.array(list(signatures[i].values()), np.int32) for i in order]
    sizes = np.array([part.sum() for part in counts], np.int64)
    offsets = np.append(0, np.cumsum([len(part) for part in keys])).astype(np.int64)
    all_keys, all_counts = (np.concatenate([np.empty(0, np.int32), *parts]) for parts in (keys, counts))
    pairs: list[tuple[int, int]] = []
    count_of = np.zeros(len(ids), np.int32)  # of the larger one, by key
    for place, larger in enumerate(order):
        low = int(np.searchsorted(sizes, SIMILAR * sizes[place], side="right"))
        if low == place:
            continue
        count_of[keys[place]] = counts[place]
        part = slice(offsets[low], offsets[place])
        minima = np.minimum(all_counts[part], count_of[all_keys[part]])
        shared = np.add.reduceat(minima, offsets[low:place] - offsets[low])
        total = sizes[place] + sizes[low:place] - shared
        pairs += [(order[low + hit], larger) for hit in np.flatnonzero(shared > SIMILAR * total).tolist()]
        count_of[keys[place]] = 0
    return pairs


def split_units(members: Iterable[Member]) -> dict[str, str]:
    """The split unit of each trace id; see the top of this module."""
    members = sorted(members, key=lambda one: one.trace_id)
    groups = _Groups(len(members))
    first: dict[tuple[str, str], int] = {}
    for index, one in enumerate(members):
        groups.join(index, first.setdefault(("pair", one.pair_id), index))
        if one.backbone_family:
            groups.join(index, first.setdefault(("backbone", one.backbone_family), index))
    distinct: dict[tuple[str, frozenset[tuple[tuple[str, str], int]]], int] = {}
    for index, one in enumerate(members):
        if one.signature:  # the same program again, as with another seed, need not be compared again
            groups.join(index, distinct.setdefault((one.mode, frozenset(one.signature.items())), index))
    for mode in {one.mode for one in members}:
        indices = [index for (of_mode, _), index in distinct.items() if of_mode == mode]
        for a, b in similar([members[index].signature for index in indices]):
            groups.join(indices[a], indices[b])

    names: dict[int, str] = {}
    for index, one in enumerate(members):
        root = groups.root(index)
        # A component without any family is named after a workload; "~" sorts behind every family.
        name = one.backbone_family or f"~{one.pair_id}"
        names[root] = min(names.get(root, name), name)
    return {one.trace_id: names[groups.root(index)] for index, one in enumerate(members)}


def assign(members: Iterable[Member], units: Mapping[str, str], seed: int) -> dict[str, str]:
    """The split of each unit.

    Args:
        members: All traces.
        units: Trace id to unit.
        seed: Part of the hash that orders the units.
    """
    tasks: dict[str, Counter[str]] = defaultdict(Counter)
    meant: set[str] = set()
    heldout: set[str] = set()
    for one in members:
        unit = units[one.trace_id]
        tasks[unit][one.task] += 1
        if meant_for_test(one.backbone_family):
            meant.add(unit)
        if one.heldout:
            heldout.add(unit)
    by_task: dict[str, list[str]] = defaultdict(list)
    for unit, counts in tasks.items():
        most = min(counts, key=lambda task: (-counts[task], task))
        by_task[most].append(unit)

    alone = [names[0] for names in by_task.values() if len(names) == 1]
    strata = [names for names in by_task.values() if len(names) > 1] + [alone]
    splits: dict[str, str] = {}
    for names in strata:
        names.sort(
            key=lambda name: (
                name not in meant,
                name not in heldout,
                hashlib.sha256(f"{seed}:{name}".encode()).digest(),
            )
        )
        test, validation = _sizes(len(names))
        for place, name in enumerate(names):
            if place < test:
                splits[name] = "test"
            else:
                splits[name] = "validation" if place < test + validation else "train"
    return splits


def placement(split: str, heldout: bool) -> str | None:
    """The split of a trace whose unit lies in ``split``; None if it must be left out."""
    return None if heldout and split != "test" else split


def _sizes(units: int) -> tuple[int, int]:
    """Number of test and validation units."""
    if units <= 2:
        return max(units - 1, 0), 0
    return max(1, (units * TEST_PERCENT + 50) // 100), max(1, (units * VALIDATION_PERCENT + 50) // 100)


class _Groups:
    """Disjoint sets of 0 ... n - 1."""

    def __init__(self, n: int) -> None:
        self._above = list(range(n))

    def root(self, item: int) -> int:
        while self._above[item] != item:
            self._above[item] = self._above[self._above[item]]
            item = self._above[item]
        return item

    def join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self._above[max(a, b)] = min(a, b)
