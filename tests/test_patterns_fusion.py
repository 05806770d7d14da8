"""Patterns that write out what PyTorch has a kernel for, and that do the same work again."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional

from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.profiling import LEAD_IN, PROFILED_STEPS, profile_steps
from torchtraceap.labels.pattern import PATTERNS, FunctionSite, Mode, ModuleSite, Variant

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 4e-3)}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def make_loop(build: Callable[[], nn.Module] = tiny.build, mode: Mode = "train") -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(build), mode, 4, CPU, secret="s", seed=1)


def names_of_sites(variant: Variant, build: Callable[[], nn.Module], mode: Mode = "train") -> list[str]:
    sites = variant.sites(make_loop(build, mode))
    return [site.call.name for site in sites if isinstance(site, FunctionSite | ModuleSite)]


def same(y: torch.Tensor, expected: torch.Tensor, *, stride: bool = True) -> None:
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(y, expected, rtol=rtol, atol=atol, check_stride=stride)


def forms(variant: Variant, build: Callable[[], nn.Module]) -> dict[str, Callable[..., Any]]:
    """For each function that ``build``'s model calls what the variant puts in its place."""
    sites = [site for site in variant.sites(make_loop(build)) if isinstance(site, FunctionSite)]
    return {site.call.function: site.body for site in sites}


# -- unfused_elementwise ------------------------------------------------------------------------------


def all_functions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.GroupNorm(2, 8), nn.GELU(),
        nn.Flatten(2), nn.LayerNorm(36), nn.Softmax(dim=-1), nn.Flatten(), nn.Linear(8 * 36, 5),
    )  # fmt: skip


def in_place() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.SiLU(inplace=True), nn.SiLU())


class WithoutDim(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the second call is the deprecated one
            return functional.softmax(functional.softmax(x.flatten(1), dim=1)[:, :5])


# Arguments behind the first, which has shape (4, 8, 6, 6).
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("gelu", (), {}),
    ("gelu", (), {"approximate": "tanh"}),
    ("silu", (), {}),
    ("softmax", (-1,), {}),
    ("softmax", (), {"dim": 1, "dtype": torch.float32}),
    ("layer_norm", ((6, 6),), {}),
    ("layer_norm", ((6,), torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6), 1e-3), {}),
    ("group_norm", (2, torch.linspace(0.5, 2, 8), torch.linspace(-1, 1, 8)), {}),
    ("group_norm", (4,), {"eps": 1e-3}),
    ("batch_norm", (torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)), {}),
    ("batch_norm", (None, None, torch.linspace(0.5, 2, 8), torch.linspace(-1, 1, 8), True, 0.1, 1e-3), {}),
]
ELEMENTWISE = pytest.mark.parametrize(
    "variant", PATTERNS["unfused_elementwise"].variants, ids=lambda v: v.name
)


def converted(args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    return [arg.to(dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]


@TYPES
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@ELEMENTWISE
def test_what_is_written_out_is_the_same(
    variant: Variant, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    written = forms(variant, all_functions)
    assert set(written) == {name for name, _, _ in CALLS}
    torch.manual_seed(3)
    values = 2 * torch.randn(4, 8, 6, 6)
    gradient = torch.randn(4, 8, 6, 6)
    for name, args, kwargs in CALLS:
        results = []
        for function in (getattr(functional, name), lambda *a, name=name, **k: written[name](None, *a, **k)):
            x = values.to(dtype).contiguous(memory_format=layout).requires_grad_()
            y = function(x, *converted(args, dtype), **kwargs)
            y.backward(gradient.to(y.dtype))
            results.append((y, x.grad))
        (y, grad), (expected, expected_grad) = results[1], results[0]
        same(y, expected)
        same(grad, expected_grad, stride=False)


@ELEMENTWISE
def test_autocast_gives_what_is_written_out_the_type_of_the_function(variant: Variant) -> None:
    written = forms(variant, all_functions)
    for x in (torch.randn(4, 8, 6, 6), torch.randn(4, 8, 6, 6, dtype=torch.bfloat16)):
        for name, args, kwargs in CALLS:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
                expected = getattr(functional, name)(x, *args, **kwargs)
                same(written[name](None, x, *args, **kwargs), expected)


@ELEMENTWISE
def test_written_out_batch_norm_updates_the_running_statistics(variant: Variant) -> None:
    written = forms(variant, all_functions)["batch_norm"]
    x = torch.randn(4, 8, 6, 6) + 3
    kept = []
    for function in (functional.batch_norm, lambda *args: written(None, *args)):
        statistics = torch.zeros(8), torch.ones(8)
        function(x, *statistics, None, None, True, 0.3)
        kept.append(statistics)
    torch.testing.assert_close(kept[1], kept[0])


@pytest.mark.parametrize("mode", ["train", "infer"])
@ELEMENTWISE
def test_no_place_where_writing_out_would_change_what_is_seen(variant: Variant, mode: Mode) -> None:
    assert names_of_sites(variant, in_place, mode) == ["3"]  # not 2, which writes to its input
    (only,) = variant.sites(make_loop(lambda: nn.Sequential(WithoutDim(), nn.Linear(5, 5)), mode))
    assert isinstance(only, FunctionSite)
    assert only.call.index == 0


# -- unfused_attention --------------------------------------------------------------------------------

ATTENTION = pytest.mark.parametrize("variant", PATTERNS["unfused_attention"].variants, ids=lambda v: v.name)


def attends() -> nn.Module:
    return nn.Sequential(nn.Flatten(2), tiny.SelfAttention(heads=2), nn.Flatten(), nn.Linear(108, 5))


def attention(variant: Variant) -> Callable[..., torch.Tensor]:
    body = forms(variant, attends)
    return lambda *args, **kwargs: body["scaled_dot_product_attention"](None, *args, **kwargs)


MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.3
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": 0.5},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": MASK},
    "by head": {"attn_mask": MASK.expand(2, 3, 5, 7)},
    "hidden query": {"attn_mask": MASK & (torch.arange(5) != 2)[:, None]},
    "float": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "-inf": {"attn_mask": torch.zeros(5, 7).masked_fill(~MASK, -torch.inf)},
    "grouped": {"enable_gqa": True},
}


@TYPES
@pytest.mark.parametrize("case", list(MASKS))
@ATTENTION
def test_attention_written_out_is_the_same(variant: Variant, case: str, dtype: torch.dtype) -> None:
    kwargs = dict(MASKS[case])
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        kwargs["attn_mask"] = mask.to(dtype)
    heads = 1 if case == "grouped" else 3
    torch.manual_seed(3)
    inputs = torch.randn(2, 3, 5, 4), torch.randn(2, heads, 7, 4), torch.randn(2, heads, 7, 6)
    results = []
    for function in (functional.scaled_dot_product_attention, attention(variant)):
        query, key, value = (x.to(dtype).requires_grad_() for x in inputs)
        y = function(query, key, value, **kwargs)
        y.float().square().sum().backward()
        results.append((y, query.grad, key.grad, value.grad))
    for found, expected in zip(results[1], results[0], strict=True):
        same(found, expected, stride=False)


@ATTENTION
def test_attention_has_the_layout_of_the_fused_kernel(variant: Variant) -> None:
    heads_outside = torch.randn(2, 3, 5, 4)
    heads_inside = torch.randn(2, 5, 3, 4).transpose(1, 2)
    parts_of_one = torch.randn(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)[1]
    without_heads = torch.randn(2, 5, 4)
    for x in (heads_outside, heads_inside, parts_of_one, without_heads):
        same(attention(variant)(x, x, x), functional.scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ATTENTION
def test_attention_has_the_type_that_autocast_gives(variant: Variant, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        for kwargs in ({}, {"is_causal": True}):
            expected = functional.scaled_dot_product_attention(x, x, x, **kwargs)
            same(attention(variant)(x, x, x, **kwargs), expected)


def test_written_out_attention_has_the_signature_of_the_function() -> None:
    """It is called as the function is, by position or by name."""
    doc = functional.scaled_dot_product_attention.__doc__ or ""
    documented = doc[doc.index("(") + 1 : doc.index(")")].replace("\n", " ").split(",")
    names = [part.split("=")[0].strip() for part in documented]
    for variant in PATTERNS["unfused_attention"].variants:
        (site,) = variant.sites(make_loop(attends))
        taken = list(inspect.signature(site.body).parameters)[1:]
        assert taken == [name for name in names if name != "*"]


class Encoder(nn.Module):
    """nn.MultiheadAttention, which gives its dropout by position."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(36, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(108, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2)
        return self.head(self.attend(x, x, x, need_weights=False)[0].flatten(1))


class ByName(nn.Module):
    """Calls of the function with dropout, of keys that broadcast, and of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(108, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).unsqueeze(1)
        y = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        z = functional.scaled_dot_product_attention(x, x[:1], x[:1])
        return self.head((functional.scaled_dot_product_attention(x, y, z, dropout_p=0.0)).flatten(1))


@ATTENTION
def test_attention_without_dropout_is_found(variant: Variant) -> None:
    assert names_of_sites(variant, Encoder) == ["attend"]
    assert names_of_sites(variant, lambda: Encoder(dropout=0.1)) == []
    (only,) = variant.sites(make_loop(ByName))
    assert isinstance(only, FunctionSite)
    assert only.call.index == 2


@ATTENTION
def test_no_place_where_the_scores_would_fill_the_memory(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtraceap.labels.patterns import unfused_attention

    monkeypatch.setattr(unfused_attention, "MAX_SCORES", 4 * 2 * 3 * 3)
    assert names_of_sites(variant, Encoder) == ["attend"]
    monkeypatch.setattr(unfused_attention, "MAX_SCORES", 4 * 2 * 3 * 3 - 1)
    assert names_of_sites(variant, Encoder) == []


# -- unfused_grad_clip --------------------------------------------------------------------------------


def stepped(variant: Variant | None, *, armed: bool, steps: int = 3) -> TrainingLoop:
    loop = make_loop()
    if variant is not None:
        sites = variant.sites(loop)
        loop.install(Placement(0, sites, frozenset(range(len(sites))), armed=armed))
    torch.manual_seed(7)
    for _ in range(steps):
        loop.step()
    return loop


@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize(
    "variant",
    [*PATTERNS["unfused_grad_clip"].variants, *PATTERNS["unfused_grad_clip"].lookalikes],
    ids=lambda v: v.name,
)
def test_clipping_changes_no_gradient(variant: Variant, armed: bool) -> None:
    clipped = stepped(variant, armed=armed).model.state_dict()
    torch.testing.assert_close(clipped, stepped(None, armed=False).model.state_dict(), rtol=0, atol=0)


def test_all_arms_clip_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "torch.nn.utils.clip_grad_norm_", lambda parameters, norm, *, foreach: asked.append(foreach)
    )
    variant = PATTERNS["unfused_grad_clip"].variant("for_loop")
    for armed in (False, True):
        stepped(variant, armed=armed, steps=1)
    assert asked == [True, False]


# -- zero_grad_memset ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fill", "fills"),
    [
        ("set_to_zero", "aten::_foreach_zero_", 1),
        ("for_loop", "aten::zero_", 12),
        ("zeros_like", "aten::zeros_like", 12),
    ],
)
def test_fills_and_the_additions_to_them_are_found(name: str, fill: str, fills: int) -> None:
    """Twelve parameters; the additions of a step follow from the fills of the one before."""
    pattern = PATTERNS["zero_grad_memset"]
    variant = pattern.variant(name)
    clean = strip(profile_steps(stepped(variant, armed=False), settle=1))
    raw = profile_steps(stepped(variant, armed=True), settle=1)
    trace, segments = label(raw, "s", {0: Armed(0, pattern.mechanism, pattern.selects)}, clean)
    member = np.zeros(len(trace.names), dtype=bool)
    for segment in segments:
        member[segment.first_event : segment.first_event + segment.event_count] = True
    steps = LEAD_IN + PROFILED_STEPS
    inside = Counter(trace.names[member].tolist())
    assert inside["aten::add_"] == 12 * steps
    assert inside[fill] >= fills * steps
    assert Counter(trace.names[~member].tolist()) <= Counter(clean.names.tolist())


# -- cat_in_loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", PATTERNS["cat_in_loop"].variants, ids=lambda v: v.name)
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 6, 5, 3),
        torch.randn(40, 3),
        torch.randn(4, 9, 5).transpose(1, 2),
        torch.randn(2, 5, 6, 3).permute(0, 3, 1, 2),
        torch.randn(5, 4, 6, 3).permute(1, 3, 0, 2),
    ],
    ids=["one sample", "many samples", "transposed", "channels last", "permuted"],
)
def test_what_grows_keeps_value_and_layout(variant: Variant, x: torch.Tensor) -> None:
    body = variant.sites(make_loop())[0].body
    torch.testing.assert_close(body(x), x, rtol=0, atol=0, check_stride=True)
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)
    body(x).backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


# -- recomputed_constant ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", PATTERNS["recomputed_constant"].variants, ids=lambda v: v.name)
def test_a_constant_depends_on_nothing_but_shapes(variant: Variant) -> None:
    """Whatever the input holds, the same operators give the same values."""
    sites = variant.sites(make_loop())
    assert sites
    for site in sites:
        assert isinstance(site, ModuleSite)
        seen = [Results() for _ in range(2)]
        for x, results in zip(
            (torch.zeros(site.call.in_shape), torch.ones(site.call.in_shape)), seen, strict=True
        ):
            with results:
                assert site.body(x) is x
        assert len(seen[0].values) > 3
        for first, second in zip(seen[0].values, seen[1].values, strict=True):
            assert torch.equal(first, second)


class Results(torch.overrides.TorchFunctionMode):
    """Keeps the tensors that functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.values.append(result)
        return result


def test_no_mask_for_a_map_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtraceap.labels.patterns import recomputed_constant

    variant = PATTERNS["recomputed_constant"].variant("window_mask")
    monkeypatch.setattr(recomputed_constant, "MAX_TOKENS", 35)
    assert variant.sites(make_loop()) == []  # all maps have 36
