"""What is collected: patterns spread evenly, and equal plans for equal seeds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import tiny

from torchtraceap.collect.audit import make_workloads
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.plan import HELDOUT_SHARE, Injection, Job, make_plan, settles_slowly
from torchtraceap.dataset.splits import meant_for_test
from torchtraceap.errors import UserError
from torchtraceap.labels.pattern import PATTERNS

COUNT = 40
MODELS = [f"tiny/net{i}" for i in range(COUNT)]


@pytest.fixture(autouse=True)
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty models that run anywhere, and two that do not."""
    entries = {name: tiny.spec(name=name) for name in MODELS}
    for name, spec in entries.items():
        object.__setattr__(spec, "backbone_family", name)
    nowhere = {kind: {"train": (), "infer": (2,) if kind == "gpu" else ()} for kind in ("cpu", "gpu")}
    several = {kind: {"train": (2, 4, 8), "infer": (1, 2)} for kind in ("cpu", "gpu")}
    for name, sizes in (("tiny/gpu-infer", nowhere), ("tiny/sizes", several)):
        spec = tiny.spec(name=name)
        object.__setattr__(spec, "batch_sizes", sizes)
        entries[name] = spec
    monkeypatch.setattr(ZOO, "_entries", entries)
    monkeypatch.setattr(ZOO, "_loaded", True)


def used(plan: list[Job]) -> Counter[str]:
    return Counter(one.pattern for job in plan for one in job.injections)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_patterns_that_apply_are_used_equally_often(device_type: str, mode) -> None:
    plan = make_plan(MODELS, device_type=device_type, modes=[mode], per_workload=2)
    applicable = {p.id for p in PATTERNS if p.applies(device_type, mode) is None}
    counts = used(plan)
    assert set(counts) == applicable
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sum(counts.values()) == 2 * COUNT


def test_use_stays_even_over_modes_that_allow_different_patterns() -> None:
    counts = used(make_plan(MODELS, device_type="cuda", per_workload=2))
    assert set(counts) == {p.id for p in PATTERNS if p.runtime == "eager"}
    assert max(counts.values()) - min(counts.values()) <= 2


def test_what_changes_the_clean_loop_has_a_workload_for_itself() -> None:
    plan = make_plan(MODELS, device_type="cuda", per_workload=3, runtime="distributed")
    apart = [job for job in plan if any(PATTERNS[one.pattern].alone for one in job.injections)]
    assert {len(job.injections) for job in apart} == {1}
    assert not any(job.spares for job in apart)
    assert not any(PATTERNS[one.pattern].alone for job in plan for one in job.spares)
    counts = used(plan)
    assert max(counts.values()) - min(counts.values()) <= 3


def test_distributed_workloads_train_on_several_ranks() -> None:
    plan = make_plan(MODELS, device_type="cuda", per_workload=2, runtime="distributed", world_size=4)
    assert set(used(plan)) == {p.id for p in PATTERNS if p.runtime == "distributed"}
    assert {(job.mode, job.world_size) for job in plan} == {("train", 4)}
    assert {job.world_size for job in make_plan(MODELS, device_type="cuda", world_size=4)} == {1}


def test_a_workload() -> None:
    for job in make_plan(MODELS, device_type="cuda", per_workload=3):
        patterns = [one.pattern for one in (*job.injections, *job.spares)]
        assert len(job.injections) == 3
        assert len(set(patterns)) == len(patterns)
        assert set(patterns) == {p.id for p in PATTERNS if p.applies("cuda", job.mode) is None}
        for one in (*job.injections, *job.spares):
            assert one.variant in [variant.name for variant in PATTERNS[one.pattern].variants]
        assert sorted(index for arm in job.arms for index in arm) == [0, 1, 2]
        for one in job.lookalikes:
            assert one.variant in [twin.name for twin in PATTERNS[one.pattern].lookalikes]


def test_lookalikes_are_used_equally_often() -> None:
    plan = make_plan(MODELS, device_type="cuda", modes=["train"])
    counts = Counter(one for job in plan for one in job.lookalikes)
    usable = [p for p in PATTERNS if p.applies("cuda", "train") is None]
    assert set(counts) == {Injection(p.id, twin.name) for p in usable for twin in p.lookalikes}
    assert max(counts.values()) - min(counts.values()) <= 1


def _heldout(job: Job) -> list[bool]:
    return [PATTERNS[one.pattern].variant(one.variant).heldout for one in job.injections]


def test_a_share_of_heldout_variants_in_families_meant_for_test_and_none_elsewhere() -> None:
    plans = [make_plan(MODELS, device_type="cuda", per_workload=3, seed=seed) for seed in range(20)]
    meant: list[bool] = []
    others: list[bool] = []
    for job in [job for plan in plans for job in plan]:
        chosen = meant if meant_for_test(ZOO[job.model].backbone_family) else others
        chosen += _heldout(job)
        if chosen is others:
            assert not any(PATTERNS[one.pattern].variant(one.variant).heldout for one in job.spares)
    assert not any(others)
    assert len(meant) > 300
    assert sum(meant) / len(meant) == pytest.approx(HELDOUT_SHARE, abs=0.08)  # 3 standard errors


def test_families_meant_for_test_may_have_more_patterns() -> None:
    counts: dict[bool, set[int]] = {True: set(), False: set()}
    for job in make_plan(MODELS, device_type="cuda", per_workload=1, per_test_workload=4):
        counts[meant_for_test(ZOO[job.model].backbone_family)].add(len(job.injections))
    assert counts == {True: {4}, False: {1}}


def test_equal_seeds_give_equal_plans_and_others_do_not() -> None:
    one, same, other = (make_plan(MODELS, device_type="cpu", seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert len({job.seed for job in one}) == len(one)


def test_seed_and_batch_size_of_a_workload_do_not_depend_on_the_other_models() -> None:
    name = "tiny/sizes"
    alone = make_plan([name], device_type="cpu")
    among = [job for job in make_plan([*MODELS[:7], name], device_type="cpu") if job.model == name]
    assert {(job.seed, job.batch_size) for job in among} == {(job.seed, job.batch_size) for job in alone}


def test_batch_sizes_are_drawn_from_those_of_the_model() -> None:
    plans = [make_plan(["tiny/sizes"], device_type="cpu", seed=seed) for seed in range(30)]
    drawn = {(job.mode, job.batch_size) for job in itertools.chain(*plans)}
    assert drawn == {("train", 2), ("train", 4), ("train", 8), ("infer", 1), ("infer", 2)}


def test_a_subset_of_patterns_and_modes() -> None:
    plan = make_plan(MODELS[:2], device_type="cpu", modes=["infer"], patterns=["redundant_copy"] * 2)
    assert [(job.mode, [one.pattern for one in job.injections], job.spares) for job in plan] == [
        ("infer", ["redundant_copy"], []),
        ("infer", ["redundant_copy"], []),
    ]


def test_models_named_twice_run_once() -> None:
    assert len(make_plan([MODELS[0]] * 2, device_type="cpu", modes=["train"])) == 1


def test_modes_named_twice_run_once() -> None:
    jobs = make_plan(MODELS[:1], device_type="cpu", modes=["infer", "infer", "train"])
    assert [job.mode for job in jobs] == ["infer", "train"]
    (workload,) = make_workloads(MODELS[:1], device_type="cpu", modes=["infer", "infer"], profiles=1, seed=0)
    assert workload.mode == "infer"


def test_patterns_that_cannot_occur() -> None:
    with pytest.raises(UserError, match="nothing to inject: host_sync needs a GPU"):
        make_plan(MODELS[:1], device_type="cpu", patterns=["host_sync"])
    plan = make_plan(MODELS[:1], device_type="cpu", patterns=["host_sync", "unfused_optimizer"])
    assert [(job.mode, [one.pattern for one in job.injections]) for job in plan] == [
        ("train", ["unfused_optimizer"]),
        ("infer", []),
    ]
    assert [len(job.lookalikes) for job in plan] == [1, 0]


def test_what_cannot_run_is_left_out() -> None:
    assert [job.mode for job in make_plan(["tiny/gpu-infer"], device_type="cuda")] == ["infer"]
    with pytest.raises(UserError, match="none of 1 models runs on cpu"):
        make_plan(["tiny/gpu-infer"], device_type="cpu")


def test_unknown_names() -> None:
    with pytest.raises(UserError, match=r"Unknown model 'tiny/net999'. Did you mean tiny/net9"):
        make_plan(["tiny/net999"], device_type="cpu")
    with pytest.raises(UserError, match=r"Unknown pattern 'host_sink'. Did you mean host_sync"):
        make_plan(MODELS[:1], device_type="cpu", patterns=["host_sink"])


def test_name_is_a_file_name() -> None:
    assert Job("timm/resnet18.a1_in1k", "train", 4, 0, [], []).name == "timm-resnet18.a1_in1k_train_b4"
    assert Job("hub/../../etc passwd", "infer", 1, 0, [], []).name == "hub-..-..-etc-passwd_infer_b1"


def test_traces_hold_one_to_three_patterns() -> None:
    plans = [make_plan(MODELS, device_type="cuda", per_workload=6, seed=seed) for seed in range(5)]
    sizes = Counter(len(arm) for plan in plans for job in plan for arm in job.arms)
    assert set(sizes) == {1, 2, 3}
    assert sizes[1] > sizes[2] > sizes[3]


def test_what_settles_slowly_has_a_trace_to_itself() -> None:
    for job in make_plan(MODELS, device_type="cuda", per_workload=12):
        for arm in job.arms:
            assert len(arm) == 1 or not any(settles_slowly(job.injections[index]) for index in arm)


def test_tasks_and_modes_take_turns() -> None:
    for name in MODELS[2:4]:
        object.__setattr__(ZOO[name], "task", "pose")
    order = [(job.model[-1], job.mode) for job in make_plan(MODELS[:4], device_type="cuda")]
    assert order == [
        ("0", "train"), ("2", "infer"), ("1", "train"), ("3", "infer"),
        ("0", "infer"), ("2", "train"), ("1", "infer"), ("3", "train"),
    ]  # fmt: skip
