"""Split units and their assignment, by hand and by properties."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import count, islice

import msgspec
import numpy as np
import pytest
from traces import random_record

from torchtraceap.dataset.splits import (
    Member,
    Signature,
    assign,
    has_heldout_variant,
    meant_for_test,
    placement,
    signature,
    similar,
    split_units,
)
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.errors import UserError


def member(
    trace_id: str, backbone: str = "", pair: str = "", task="classification", mode="train", **ops: int
) -> Member:
    signature: Signature = {(name, "[[1]]"): count for name, count in ops.items()}
    return Member(trace_id, pair or f"pair-{trace_id}", task, mode, backbone, False, signature)


def workloads(n: int, task: str = "classification") -> list[Member]:
    """Of families that are not meant for test."""
    families = (name for i in count() if not meant_for_test(name := f"{task}-net{i}"))
    return [member(f"{task}{i}", backbone=name, task=task) for i, name in enumerate(islice(families, n))]


def test_similarity_is_weighted_jaccard_above_a_half():
    a = {("conv", "x"): 4, ("relu", "x"): 2}
    b = {("conv", "x"): 3, ("relu", "x"): 2, ("add", "x"): 3}  # 5 shared of 6 + 8 - 5 = 9: 0.556
    c = {("conv", "x"): 4, ("relu", "y"): 2}  # with a: 4 of 8, exactly a half
    assert [sorted(pair) for pair in similar([a, b, c])] == [[0, 1]]
    assert similar([{}, {}]) == []
    assert similar([a, {}, a]) == [(0, 2)]


def test_similar_agrees_with_the_definition_on_random_counts():
    rng = np.random.default_rng(0)
    some = [
        Counter({(f"op{k}", ""): int(v) for k, v in enumerate(rng.integers(0, 5, 6)) if v}) for _ in range(40)
    ]
    expected = {
        (i, j)
        for i in range(40)
        for j in range(i)
        if 2 * (some[i] & some[j]).total() > (some[i] | some[j]).total()
    }
    assert 0 < len(expected) < 780
    assert {(max(pair), min(pair)) for pair in similar(some)} == expected


def test_units_are_connected_components():
    units = split_units(
        [
            member("a", backbone="resnet", conv=10),
            member("b", backbone="resnet"),
            member("c", backbone="detr", conv=9, attention=2),  # like a: 9 of 12
            member("d", backbone="swin", attention=50),
            member("e", backbone="swin", conv=100),
            member("f", pair="p1"),
            member("g", pair="p1"),
            member("h", pair="p2"),
        ]
    )
    assert units == {
        "a": "detr", "b": "detr", "c": "detr", "d": "swin", "e": "swin", "f": "~p1", "g": "~p1", "h": "~p2"
    }  # fmt: skip


def test_a_program_is_compared_once_however_often_it_ran(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "torchtraceap.dataset.splits.similar", lambda signatures: compared.extend(signatures) or []
    )
    units = split_units([member(f"{name}{i}", **{name: 3}) for i in range(9) for name in "ab"])
    assert sorted(name for signature in compared for (name, _) in signature) == ["a", "b"]
    assert [len({units[f"{name}{i}"] for i in range(9)}) for name in "ab"] == [1, 1]
    assert units["a0"] != units["b0"]


def test_programs_of_different_modes_are_not_compared():
    units = split_units([member("a", "x", conv=5), member("b", "y", conv=5, mode="infer")])
    assert units == {"a": "x", "b": "y"}


def test_units_and_splits_do_not_depend_on_the_order_of_the_input():
    members = [*workloads(12), *workloads(5, "detection"), member("z", "other", conv=3)]
    units = split_units(members)
    assert split_units(members[::-1]) == units
    assert assign(members[::-1], units, seed=3) == assign(members, units, seed=3)


@pytest.mark.parametrize(
    ("units", "train", "validation", "test"),
    [(1, 1, 0, 0), (2, 1, 0, 1), (3, 1, 1, 1), (4, 2, 1, 1), (8, 5, 1, 2), (15, 10, 2, 3), (100, 70, 10, 20)],
)
def test_shares_of_each_task(units, train, validation, test):
    members = [*workloads(units), *workloads(2, "detection")]
    unit = split_units(members)
    splits = assign(members, unit, seed=0)
    mine = Counter(split for name, split in splits.items() if name.startswith("classification"))
    assert mine == Counter(train=train, validation=validation, test=test)
    others = Counter(split for name, split in splits.items() if name.startswith("detection"))
    assert others == {"train": 1, "test": 1}


def test_a_unit_counts_for_the_task_of_most_of_its_traces():
    shared = [member(f"s{i}", "resnet", task=task) for i, task in enumerate(("pose", "pose", "depth"))]
    members = [*shared, *workloads(2, "depth")]
    splits = assign(members, split_units(members), seed=0)
    # The only unit of pose, and two of depth. Were it one of depth too, one of three would be validation.
    assert splits.pop("resnet") == "train"
    assert sorted(splits.values()) == ["test", "train"]


def test_tasks_of_one_unit_are_split_together():
    members = [*workloads(1, "pose"), *workloads(1, "depth"), *workloads(1, "other"), *workloads(2)]
    splits = assign(members, split_units(members), seed=0)
    both = [splits.pop(one.backbone_family) for one in members[-2:]]
    assert sorted(both) == ["test", "train"]
    assert sorted(splits.values()) == ["test", "train", "validation"]


def test_the_seed_decides_who_is_in_test():
    members = workloads(10)
    units = split_units(members)
    chosen = {
        tuple(sorted(name for name, split in assign(members, units, seed).items() if split == "test"))
        for seed in range(20)
    }
    assert len(chosen) > 5


def test_heldout_variants_are_in_test_or_nowhere():
    assert placement("test", True) == placement("test", False) == "test"
    assert placement("train", True) is placement("validation", True) is None
    assert placement("train", False) == "train"


def test_units_with_heldout_variants_are_test_before_others():
    members = workloads(10)
    heldout = {members[i].trace_id for i in (3, 7)}  # two test units of ten
    members = [dataclasses.replace(one, heldout=one.trace_id in heldout) for one in members]
    units = {one.trace_id: one.trace_id for one in members}
    for seed in range(5):
        splits = assign(members, units, seed)
        assert {unit for unit, split in splits.items() if split == "test"} == heldout


def test_an_unknown_variant_is_an_error_not_a_leak():
    record = random_record(0)
    record.instances = record.instances[:1]
    assert not has_heldout_variant(record)
    record.instances = [msgspec.structs.replace(record.instances[0], variant="telepathy")]
    with pytest.raises(UserError, match="Unknown variant 'telepathy' of pattern host_sync"):
        has_heldout_variant(record)


def test_signature_counts_ops_with_a_dimension():
    shape = json.dumps([[8, 3, 14, 14], []])
    ops = [
        Op("aten::conv2d", "cpu_op", shape),
        Op("aten::empty", "cpu_op", "[[], []]"),
        Op("aten::item", "cpu_op"),
        Op("cudaLaunchKernel", "cuda_runtime"),
        Op("aten::relu", "cpu_op", "[[8]]"),
    ]
    op = np.array([0, 1, 2, 3, 0], dtype=np.int32)
    n = len(op)
    columns = {name: np.full(n, -1, dtype) for name, dtype in Events.DTYPES.items()}
    columns |= {
        "lane": np.zeros(n, np.int16),
        "op": op,
        "start_ns": np.arange(n),
        "dur_ns": np.ones(n, np.int64),
    }
    trace = Trace([Lane("cpu", "thread 0")], ops, Events(**columns))
    assert signature(trace) == {("aten::conv2d", shape): 2}


def test_families_meant_for_test_are_there_before_others():
    families = [f"net{i}" for i in range(40)]
    meant = [name for name in families if meant_for_test(name)]
    others = [name for name in families if not meant_for_test(name)]
    assert len(meant) > 2
    members = [member(name, backbone=name) for name in (*meant[:2], *others[:8])]
    members[5] = dataclasses.replace(members[5], heldout=True)
    for seed in range(5):
        splits = assign(members, split_units(members), seed)
        assert {unit for unit, split in splits.items() if split == "test"} == set(meant[:2])
