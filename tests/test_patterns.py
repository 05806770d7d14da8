"""Every injector changes how a step runs, never what it computes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchtraceap.collect.compiled import compile_network
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.labels.pattern import (
    PATTERNS,
    Mode,
    ModuleCall,
    ModuleSite,
    Pattern,
    Runtime,
    StageSite,
    State,
    Variant,
)
from torchtraceap.labels.patterns._common import MAX_CANDIDATES, spread, writes_to_input
from torchtraceap.labels.patterns.dataloader_stall import decode_and_augment

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def marks(pattern: Pattern) -> list[pytest.MarkDecorator]:
    """A pattern of several processes is skipped where a loop of one is run."""
    if pattern.runtime != "distributed":
        return []
    return [pytest.mark.skip(reason="tests/test_distributed.py runs it, on two ranks")]


CASES = [
    pytest.param(pattern, variant, id=f"{pattern.id}-{variant.name}", marks=marks(pattern))
    for pattern in PATTERNS
    for variant in (*pattern.variants, *pattern.lookalikes)
]
ACTIVATION_PATTERNS = ("cat_in_loop", "dtype_ping_pong", "layout_ping_pong", "redundant_copy")
# Sample by sample, or in another order of operations, sums round differently; nothing else may.
ROUND_DIFFERENTLY = (
    "misaligned_channels",
    "python_loop_over_batch",
    "unfused_attention",
    "unfused_elementwise",
    "unfused_optimizer",
)


def build() -> nn.Module:
    """Buffers that each call updates, random numbers, writes in place, and a block of neither."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # ahead of BatchNorm its gradient would be noise
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()),
        nn.Flatten(2),
        nn.Sequential(nn.LayerNorm(36), tiny.SelfAttention(heads=2)),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


SPEC = tiny.spec(build)


def make_loop(
    mode: Mode = "train", batch_size: int = 4, *, workers: bool = False, runtime: Runtime = "eager"
) -> TrainingLoop:
    spec = tiny.spec(lambda: tiny.Whole(build())) if runtime == "compiled" else SPEC
    loop = (TrainingLoop if workers else tiny.WithoutWorkers)(spec, mode, batch_size, CPU, secret="s", seed=1)
    if runtime == "compiled":
        compile_network(loop, backend="eager")  # the operators of the eager model: equal to the bit
    return loop


def place(loop: TrainingLoop, variant: Variant, *, armed: bool) -> Placement:
    sites = variant.sites(loop)
    placement = Placement(index=0, sites=sites, acting=frozenset(range(len(sites))), armed=armed)
    loop.install(placement)
    return placement


def run(
    mode: Mode, variant: Variant, *, armed: bool, runtime: Runtime = "eager"
) -> tuple[list[State], dict[str, torch.Tensor], int]:
    """Three steps with every candidate acting or none: states, parameters with buffers, candidates."""
    loop = make_loop(mode, workers=variant.starts_workers, runtime=runtime)
    try:
        placement = place(loop, variant, armed=armed)
        torch.manual_seed(7)
        states = [loop.step() for _ in range(3)]
    finally:
        loop.close()
    return states, loop.model.state_dict(), len(placement.sites)


def check_results(pattern: Pattern, variant: Variant, mode: Mode) -> None:
    clean, clean_model, _ = run(mode, variant, armed=False, runtime=pattern.runtime)
    changed, changed_model, candidates = run(mode, variant, armed=True, runtime=pattern.runtime)
    assert 1 <= candidates <= MAX_CANDIDATES
    rounds = pattern.id in ROUND_DIFFERENTLY
    rtol, atol = (1e-5, 1e-6) if rounds else (0, 0)
    for before, after in zip(clean, changed, strict=True):
        for name in ("image", "label"):
            assert torch.equal(after.host[name], before.host[name])
            assert torch.equal(after.batch[name], before.batch[name])
        torch.testing.assert_close(after.output, before.output, rtol=rtol, atol=atol)
        if mode == "train":
            torch.testing.assert_close(after.loss, before.loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(changed_model, clean_model, rtol=rtol, atol=atol)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(("pattern", "variant"), CASES)
def test_results_are_those_of_the_clean_loop(pattern: Pattern, variant: Variant, mode: Mode) -> None:
    if mode not in pattern.modes:
        pytest.skip(f"{pattern.id} does not occur there")
    check_results(pattern, variant, mode)


def test_example_of_the_guide_works(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "adding_a_pattern.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", guide, flags=re.DOTALL | re.MULTILINE)
    registered: list[Pattern] = []
    monkeypatch.setattr("torchtraceap.labels.pattern.register", registered.append)
    exec(compile(code, "guide", "exec"), {"__name__": "guide"})
    (pattern,) = registered
    check_entry(pattern)
    for variant in (*pattern.variants, *pattern.lookalikes):
        check_results(pattern, variant, "train")


def op_names(pattern: Pattern, variant: Variant | None) -> Counter[str]:
    """Names of a training step's events on the CPU, markers left out."""
    loop = make_loop(workers=pattern.id == "dataloader_stall", runtime=pattern.runtime)
    try:
        sites = (variant or pattern.variants[0]).sites(loop)
        loop.install(Placement(0, sites, frozenset(range(len(sites))), armed=variant is not None))
        loop.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loop.step()
    finally:
        loop.close()
    return Counter(event.name for event in profiler.events() or ())


SAME_ON_CPU = {
    "pageable_h2d/to_device": "a copy to the same device is none",
    "pageable_h2d/non_blocking": "a copy to the same device is none",
    "fp32_no_tensor_cores/whole_step": "the clean loop has no autocast there, and no TensorFloat-32",
    "explicit_synchronize/device": "there is nothing to wait for",
    "explicit_synchronize/stream": "there is nothing to wait for",
    "explicit_synchronize/event": "there is nothing to wait for",
    "cache_flush/empty_cache": "there is no such cache",
    "cache_flush/synchronize_first": "there is no such cache",
    "dataloader_stall/starved_worker": "the work is another process's, and a wait is no operator",
}


@pytest.mark.parametrize("pattern", [pytest.param(p, id=p.id, marks=marks(p)) for p in PATTERNS])
def test_variants_differ_in_what_a_profiler_sees(pattern: Pattern) -> None:
    clean = op_names(pattern, None)
    seen = {"clean": clean}
    for variant in pattern.variants:
        names = op_names(pattern, variant)
        if f"{pattern.id}/{variant.name}" in SAME_ON_CPU:
            assert names == clean
        else:
            assert names not in seen.values(), f"{variant.name} looks like one of {list(seen)}"
            seen[variant.name] = names


def test_lookalikes_copy_and_cast_nothing() -> None:
    """The harmless twins of the copying patterns run no copy: that is what makes them harmless."""
    for name in ("redundant_copy/views", "dtype_ping_pong/no_op_cast"):
        pattern_id, variant = name.split("/")
        pattern = PATTERNS[pattern_id]
        clean, names = op_names(pattern, None), op_names(pattern, pattern.variant(variant))
        for op in ("aten::clone", "aten::copy_", "aten::cat", "aten::_to_copy"):
            assert names[op] == clean[op], f"{name}: {op}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("pattern", "variant"), [case for case in CASES if str(case.id).startswith(ACTIVATION_PATTERNS)]
)
def test_activations_keep_value_type_layout_and_gradient(
    pattern: Pattern, variant: Variant, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    loop = make_loop()
    try:
        body = variant.sites(loop)[0].body
    finally:
        loop.close()
    x = torch.randn(4, 6, 5, 3).to(dtype).contiguous(memory_format=layout).requires_grad_()
    gradient = torch.randn(4, 6, 5, 3).to(dtype)
    y = body(x)
    torch.testing.assert_close(y, x, rtol=0, atol=0, check_stride=True)
    y.backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("variant", PATTERNS["python_loop_over_batch"].variants, ids=lambda v: v.name)
def test_batch_loop_keeps_the_layout(variant: Variant) -> None:
    loop = make_loop()
    try:
        body = variant.sites(loop)[0].body
    finally:
        loop.close()
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(body(conv, x), conv(x), check_stride=True)


def test_batch_loop_refuses_what_it_would_change() -> None:
    index_and_cat = PATTERNS["python_loop_over_batch"].variant("index_and_cat")
    loop = make_loop()
    single = make_loop(batch_size=1)
    try:
        names = {site.call.name for site in index_and_cat.sites(loop) if isinstance(site, ModuleSite)}
        # Not 1 (batch statistics), 2 (in place), 6 (random numbers); 3 is the block, 8 the head.
        assert names == {"0", "3", "3.0", "3.1", "3.2", "4", "5", "5.0", "5.1", "7", "8"}
        assert index_and_cat.sites(single) == []
    finally:
        loop.close()
        single.close()


def test_no_copy_ahead_of_a_module_that_writes_to_its_input() -> None:
    loop = make_loop()
    try:
        for pattern_id in ACTIVATION_PATTERNS:
            for variant in (*PATTERNS[pattern_id].variants, *PATTERNS[pattern_id].lookalikes):
                sites = [site for site in variant.sites(loop) if isinstance(site, ModuleSite)]
                assert {site.where for site in sites if site.call.name == "2"} <= {"after"}
                assert "before" in {site.where for site in sites}
    finally:
        loop.close()


def test_sync_marks_what_it_adds_and_not_the_stage() -> None:
    loop = make_loop()
    try:
        for variant in PATTERNS["host_sync"].variants:
            sites = variant.sites(loop)
            assert {site.where for site in sites} == {"after"}
            assert [site.stage for site in sites if isinstance(site, StageSite)] == ["loss", "logging"]
    finally:
        loop.close()


def test_no_double_precision_no_ping_pong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    loop = make_loop()
    try:
        monkeypatch.setattr(torch, "zeros", refuse)
        assert PATTERNS["dtype_ping_pong"].variants[0].sites(loop) == []
    finally:
        loop.close()


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
@pytest.mark.parametrize("variant", PATTERNS["unfused_optimizer"].variants, ids=lambda v: v.name)
def test_sgd_is_also_the_same(variant: Variant, settings: dict[str, Any]) -> None:
    def train(*, armed: bool) -> dict[str, torch.Tensor]:
        loop = make_loop()
        try:
            loop.optimizer = torch.optim.SGD(
                loop.model.parameters(), lr=0.1, weight_decay=0.01, fused=True, **settings
            )
            place(loop, variant, armed=armed)
            torch.manual_seed(7)
            for _ in range(3):
                loop.step()
            return loop.model.state_dict()
        finally:
            loop.close()

    torch.testing.assert_close(train(armed=True), train(armed=False), rtol=1e-4, atol=1e-6)


def test_hand_written_optimizer_is_called_like_the_clean_one() -> None:
    pattern = PATTERNS["unfused_optimizer"]
    names = op_names(pattern, pattern.variant("hand_written"))
    assert names["Optimizer.step#AdamW.step"] == 1
    assert names["aten::_fused_adamw_"] == 0


def test_hand_written_optimizer_knows_two_rules() -> None:
    loop = make_loop()
    try:
        loop.optimizer = torch.optim.Adagrad(loop.model.parameters())
        assert PATTERNS["unfused_optimizer"].variant("hand_written").sites(loop) == []
    finally:
        loop.close()


def test_decoding_draws_no_random_numbers() -> None:
    sample = {"image": torch.zeros(3, 6, 6)}
    decode_and_augment(sample)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert decode_and_augment(sample) is sample
    assert torch.equal(torch.rand(4), expected)


def test_spread_keeps_both_ends_and_order() -> None:
    assert spread(range(3), 4) == [0, 1, 2]
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(100), 12)[::11] == [0, 99]


def call(module: nn.Module) -> ModuleCall:
    return ModuleCall("m", module, (2, 3), (2, 3), torch.float32, leaves=1, stateful=False)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.ReLU(), False),
        (nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(3, 3)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), False),
    ],
)
def test_first_leaf_decides_whether_the_input_is_overwritten(module: nn.Module, expected: bool) -> None:
    assert writes_to_input(call(module)) is expected


def test_no_lookalike_is_found_by_comparison() -> None:
    entry = PATTERNS["zero_grad_memset"]
    (twin,) = entry.lookalikes
    with pytest.raises(ValueError, match="comparison"):
        replace(entry, lookalikes=(replace(twin, mechanism=None),))
    assert entry.mechanism_of(twin) == "marker"
    assert entry.mechanism_of(entry.variants[0]) == "selector"


def check_entry(pattern: Pattern) -> None:
    assert pattern.definition.count(". ") == 1
    assert pattern.definition.endswith(".")
    assert pattern.belongs
    assert pattern.lanes
    assert len(pattern.variants) >= 2
    assert sum(variant.heldout for variant in pattern.variants) == 1
    assert pattern.lookalikes
    assert not any(twin.heldout for twin in pattern.lookalikes)
    names = [variant.name for variant in (*pattern.variants, *pattern.lookalikes)]
    assert len(set(names)) == len(names)
    compile(pattern.remedy, pattern.id, "exec")
    assert all(url.startswith("https://") for url in pattern.references)


@pytest.mark.parametrize("pattern", list(PATTERNS), ids=PATTERNS.names())
def test_catalogue_entry_is_complete(pattern: Pattern) -> None:
    check_entry(pattern)
