"""Patterns that set flags, recompute, or change types, layouts and widths: what each must leave as it was."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import deterministic

from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.profiling import LEAD_IN, PROFILED_STEPS, profile_steps
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.pattern import PATTERNS, FunctionSite, ModuleSite, StageSite, State, Variant
from torchtraceap.labels.types import Segment

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
STEPS = LEAD_IN + PROFILED_STEPS


def build() -> nn.Module:
    """A block in a block, and a head. All widths but the image's and the classes' are multiples of eight."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()),
            nn.Conv2d(8, 8, 1),
        ),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def build_unsuited() -> nn.Module:
    """Blocks that a second call would change, or that would change it."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.1)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1)),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU()).requires_grad_(False),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def make_loop(make=build) -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(make), "train", 4, CPU, secret="s", seed=1)


def variant_of(name: str) -> Variant:
    pattern, variant = name.split("/")
    return PATTERNS[pattern].variant(variant)


def armed_loop(name: str, acting: set[str] | None = None, *, armed: bool = True) -> TrainingLoop:
    """A loop in which all places of a variant act, or those at the modules named ``acting``."""
    loop = make_loop()
    sites = variant_of(name).sites(loop)
    chosen = [i for i, s in enumerate(sites) if acting is None or getattr(s, "call", s).name in acting]
    loop.install(Placement(0, sites, frozenset(chosen), armed=armed))
    return loop


def labelled(name: str, acting: set[str] | None = None) -> tuple[Trace, list[Segment], Trace]:
    """A trace with the variant, its segments, and the clean twin, with the lead-in."""
    pattern = PATTERNS[name.split("/")[0]]
    raw = {}
    for armed in (False, True):
        loop = armed_loop(name, acting, armed=armed)
        for _ in range(2):
            loop.step()
        raw[armed] = profile_steps(loop, settle=1)
    clean = strip(raw[False])
    trace, segments = label(raw[True], "s", {0: Armed(0, pattern.mechanism, pattern.selects)}, clean=clean)
    return trace, segments, clean


def split(trace: Trace, segments: list[Segment]) -> tuple[Counter[str], Counter[str]]:
    """How often each name occurs in the steps inside and outside of ``segments``."""
    member = np.zeros(len(trace.names), dtype=bool)
    for segment in segments:
        member[segment.first_event : segment.first_event + segment.event_count] = True
    in_step = trace.step >= 0
    return Counter(trace.names[in_step & member].tolist()), Counter(trace.names[in_step & ~member].tolist())


# -- flags --------------------------------------------------------------------------------------------


def flags() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


@contextmanager
def tf32():
    """What a session on a GPU sets."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SETS = {
    "deterministic_algorithms/whole_step": (True, True, True, True, "high", True),
    "deterministic_algorithms/forward_backward": (True, True, True, True, "high", True),
    "fp32_no_tensor_cores/whole_step": (False, False, True, False, "highest", False),
    "fp32_no_tensor_cores/blocks": (False, False, True, False, "highest", False),
}


@pytest.mark.parametrize("name", list(SETS))
def test_flags_hold_for_the_stage_and_not_longer_even_if_it_fails(name: str) -> None:
    seen = []

    def fail(state: State) -> None:
        seen.append(flags())
        raise RuntimeError("out of memory")

    loop = make_loop()
    with tf32():
        before = flags()
        sites = [site for site in variant_of(name).sites(loop) if isinstance(site, StageSite)]
        for site in sites:
            marks = [nullcontext] if site.where == "inside" else []
            with pytest.raises(RuntimeError, match="out of memory"):
                site.body(State(), fail, *marks)
            assert flags() == before
    assert seen == [SETS[name]] * len(sites)


def test_warnings_of_deterministic_algorithms_stay_silent() -> None:
    def warn(state: State) -> None:
        warnings.warn("has no deterministic algorithm", stacklevel=1)

    (site, *_) = variant_of("deterministic_algorithms/whole_step").sites(make_loop())
    assert isinstance(site, StageSite)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        site.body(State(), warn, nullcontext)
        with pytest.raises(UserWarning, match="deterministic"):
            warn(State())


def test_the_loop_has_its_autocast_back_even_if_the_stage_fails() -> None:
    loop = make_loop()
    loop.autocast = True
    for name in ("whole_step", "loss"):
        for site in variant_of(f"fp32_no_tensor_cores/{name}").sites(loop):
            assert isinstance(site, StageSite)
            output = {"logits": torch.ones(2, dtype=torch.bfloat16)}
            state = State(output=output)

            def fail(state: State) -> None:
                assert not loop.autocast
                raise RuntimeError("out of memory")

            with pytest.raises(RuntimeError, match="out of memory"):
                site.body(state, fail)
            assert loop.autocast
            assert state.output is output


# -- fp32_no_tensor_cores -----------------------------------------------------------------------------


def autocast_run(name: str, *, armed: bool) -> tuple[State, dict[str, torch.Tensor], Counter[str]]:
    """The third step of a loop under bfloat16 autocast, the first of which is clean.

    Returns:
        The step's state, the parameters, and how often each operator ran.
    """
    loop = make_loop()
    loop.autocast = True
    sites = variant_of(name).sites(loop)
    placement = Placement(0, sites, frozenset(range(len(sites))))
    loop.install(placement)
    loop.step()
    placement.armed = armed
    loop.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        state = loop.step()
    return state, loop.model.state_dict(), Counter(event.name for event in profiler.events() or ())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("whole_step", torch.float32),
        ("blocks", torch.bfloat16),
        ("head", torch.bfloat16),
        ("loss", torch.bfloat16),
    ],
)
def test_float32_stays_within_the_rounding_of_autocast(name: str, dtype: torch.dtype) -> None:
    clean, clean_model, _ = autocast_run(f"fp32_no_tensor_cores/{name}", armed=False)
    changed, model, _ = autocast_run(f"fp32_no_tensor_cores/{name}", armed=True)
    assert clean.output.dtype == torch.bfloat16
    assert changed.output.dtype == dtype
    torch.testing.assert_close(changed.output.float(), clean.output.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(changed.loss.float(), clean.loss.float(), rtol=0.02, atol=0.02)
    # Three steps of a length of 1e-4 each, whose sign rounding may turn where a gradient is nearly zero.
    torch.testing.assert_close(model, clean_model, rtol=0, atol=7e-4)


def test_only_blocks_in_float32_have_casts_at_their_borders() -> None:
    casts = {
        (name, armed): autocast_run(f"fp32_no_tensor_cores/{name}", armed=armed)[2]["aten::_to_copy"]
        for name in ("whole_step", "blocks")
        for armed in (False, True)
    }
    assert casts["whole_step", True] < casts["whole_step", False]
    # The outputs of three blocks, the inputs of two (an image is float32), the logits for the loss; and back.
    assert casts["blocks", True] == casts["whole_step", True] + 2 * (3 + 2 + 1)


def test_blocks_are_the_outermost_that_multiply() -> None:
    sites = variant_of("fp32_no_tensor_cores/blocks").sites(make_loop())
    names = {site.call.name for site in sites if isinstance(site, ModuleSite)}
    assert names == {"0", "1", "3"}
    (head,) = variant_of("fp32_no_tensor_cores/head").sites(make_loop())
    assert isinstance(head, ModuleSite)
    assert head.call.name == "3"


# -- deterministic_algorithms -------------------------------------------------------------------------


def test_filled_memory_is_what_the_clean_trace_lacks() -> None:
    trace, segments, clean = labelled("deterministic_algorithms/whole_step")
    inside, outside = split(trace, segments)
    _, twin = split(clean, [])
    assert inside["aten::fill_"] > 0
    assert set(inside) <= {"aten::fill_", "aten::empty", "aten::set_"}  # resize_ fills through a new tensor
    assert set(outside) == set(twin)


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("aten::fill_", True),
        ("cudaLaunchKernelExC", True),
        ("cuLaunchKernel", True),
        ("cudaMemsetAsync", True),
        ("Memset (Device)", True),
        ("cudnn::ops::nchwToNhwcKernel", True),
        ("cutlass__5x_cudnn::Kernel", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", True),
        ("cudaMalloc", False),
        ("cudaStreamSynchronize", False),
        ("cuModuleLoadData", False),
        ("hipMalloc", False),
        ("ProfilerStep#3", False),
        ("Optimizer.step#AdamW.step", False),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", False),
    ],
)
def test_selected_are_operators_launches_and_gpu_work(name: str, selected: bool) -> None:
    selects = PATTERNS["deterministic_algorithms"].selects
    assert selects is not None
    assert selects(name) is selected


# -- over_checkpointing -------------------------------------------------------------------------------


def test_recomputation_is_marked_and_nothing_else() -> None:
    trace, segments, clean = labelled("over_checkpointing/blocks", {"1.0"})
    inside, outside = split(trace, segments)
    _, twin = split(clean, [])
    # The block runs once more in each step; of the model's three convolutions only its own does.
    once = {"aten::conv2d", "aten::group_norm", "aten::gelu"}
    assert {name: inside[name] for name in once} == dict.fromkeys(once, STEPS)
    assert not [name for name in inside if "Backward" in name or "backward" in name]
    assert twin - outside == Counter()
    bookkeeping = {"_NoopSaveInputs", "aten::detach", "detach", "aten::empty"}
    assert set(outside - twin) <= bookkeeping


def test_older_checkpoints_mark_the_recomputation_too() -> None:
    trace, segments, clean = labelled("over_checkpointing/reentrant", {"1.0"})
    inside, outside = split(trace, segments)
    _, twin = split(clean, [])
    once = {"aten::conv2d", "aten::group_norm", "aten::gelu"}
    assert {name: inside[name] for name in once} == dict.fromkeys(once, STEPS)
    assert not [name for name in inside if "Backward" in name or "backward" in name]
    assert twin - outside == Counter()
    assert outside["CheckpointFunctionBackward"] == STEPS


def test_a_checkpoint_in_a_checkpoint_recomputes_the_inner_block_twice() -> None:
    trace, segments, _ = labelled("over_checkpointing/blocks")
    inside, _ = split(trace, segments)
    assert inside["aten::native_group_norm"] == 2 * STEPS


@pytest.mark.parametrize("name", ["blocks", "reentrant"])
def test_blocks_that_cannot_be_repeated_get_no_checkpoint(name: str) -> None:
    assert variant_of(f"over_checkpointing/{name}").sites(make_loop(build_unsuited)) == []


def test_first_block_learns_under_an_older_checkpoint() -> None:
    """Its input needs no gradient, with which checkpoints of that kind give no gradients at all."""
    loop = make_loop(
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU()), nn.Flatten(), nn.Linear(128, 5))
    )
    sites = variant_of("over_checkpointing/reentrant").sites(loop)
    loop.install(Placement(0, sites, frozenset(range(len(sites))), armed=True))
    weight = loop.model.get_parameter("0.0.weight")
    before = weight.detach().clone()
    loop.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("name", ["blocks", "reentrant"])
def test_what_a_checkpointed_block_returns_may_be_written_to(name: str) -> None:
    """It returns a view, and a module behind it works in place."""

    def build() -> nn.Module:
        block = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(3, (2, 4)))
        return nn.Sequential(
            nn.Conv2d(3, 3, 1), block, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3 * 6 * 8, 5)
        )

    weights = []
    for armed in (False, True):
        loop = make_loop(build)
        sites = variant_of(f"over_checkpointing/{name}").sites(loop)
        assert len(sites) == 1
        loop.install(Placement(0, sites, frozenset({0}), armed=armed))
        loop.step()
        weights.append(loop.model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# -- misaligned_channels ------------------------------------------------------------------------------


def widths(name: str) -> set[tuple[int, ...]]:
    """Output and input channels of the weights that layers get while all places act."""
    loop = armed_loop(name)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        loop.step()
    events = profiler.events() or ()
    return {tuple(e.input_shapes[1][:2]) for e in events if e.name in ("aten::conv2d", "aten::linear")}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # Places are layers with multiples of eight on both sides: neither the first layer nor the head.
        ("extra_output", {(9, 8), (8, 3), (5, 288)}),
        ("extra_input", {(8, 9), (8, 3), (5, 288)}),
        ("extra_both", {(9, 9), (8, 3), (5, 288)}),
        ("eight_more", {(16, 8), (8, 3), (5, 288)}),
        ("tiny_layer", {(9, 8), (8, 3), (5, 288)}),
    ],
)
def test_layers_get_the_widths_that_they_should(variant: str, expected: set[tuple[int, int]]) -> None:
    assert widths(f"misaligned_channels/{variant}") == expected


def body_for(function: str, variant: str):
    """The body at a layer of 8 to 16 channels that calls ``function``."""
    layer = nn.Linear(8, 16) if function == "linear" else nn.Conv2d(8, 16, 1)
    shape = nn.Flatten(2) if function == "linear" else nn.Identity()

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2) if function == "linear" else x

    loop = make_loop(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), shape, Turned(), layer, nn.Flatten(), nn.Linear(576, 5))
    )
    (site,) = variant_of(f"misaligned_channels/{variant}").sites(loop)
    assert isinstance(site, FunctionSite)
    assert site.call.function == function
    return site.body


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", ["extra_output", "extra_input", "extra_both", "eight_more"])
@pytest.mark.parametrize("size", [(6, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_wider_convolutions_keep_type_layout_and_gradients(
    layout: torch.memory_format, size: tuple[int, int], variant: str, dtype: torch.dtype
) -> None:
    conv = nn.functional.conv2d
    weight, bias = torch.randn(16, 8, 3, 3, dtype=dtype), torch.randn(16, dtype=dtype)
    x = torch.randn(4, 8, *size).to(dtype).contiguous(memory_format=layout)
    body = body_for("conv2d", variant)
    results = []
    for call in (conv, lambda *args: body(conv, *args)):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, weight, bias)]
        y = call(*leaves, 1, 1)
        y.float().square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    largest = max(float(t.detach().abs().max()) for t in results[0])
    for clean, changed in zip(*results, strict=True):
        torch.testing.assert_close(changed, clean, rtol=tolerance, atol=tolerance * math.sqrt(largest))
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize("variant", ["extra_output", "extra_input", "extra_both", "eight_more"])
@pytest.mark.parametrize("shape", [(4, 8), (4, 7, 8), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_wider_linear_layers_keep_layout_and_value(
    with_bias: bool, shape: tuple[int, ...], variant: str
) -> None:
    linear = nn.functional.linear
    weight, bias = torch.randn(16, 8), torch.randn(16) if with_bias else None
    x = torch.randn(shape)
    y = body_for("linear", variant)(linear, x, weight, bias)
    torch.testing.assert_close(y, linear(x, weight, bias), check_stride=True)


# -- layout_ping_pong ---------------------------------------------------------------------------------


def there_and_back(variant: str, x: torch.Tensor) -> torch.Tensor:
    """What a body makes of ``x`` by two copies, equal to it."""
    body = variant_of(f"layout_ping_pong/{variant}").sites(make_loop())[0].body
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        y = body(x)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    assert Counter(event.name for event in profiler.events() or ())["aten::copy_"] == 2
    return y


@pytest.mark.parametrize("name", ["permute", "memory_format", "copy_into"])
@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0)], ids=str
)
def test_any_order_of_an_image_comes_back_from_another(order: tuple[int, ...], name: str) -> None:
    x = torch.randn([(2, 3, 4, 5)[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    assert x.shape == (2, 3, 4, 5)
    assert there_and_back(name, x).stride() == x.stride()


@pytest.mark.parametrize("name", ["permute", "memory_format", "copy_into"])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 20, 3).permute(0, 2, 1).reshape(1, 3, 4, 5),  # tokens made an image
        torch.empty_strided((1, 3, 4, 5), (15, 1, 15, 3)).fill_(1),
        torch.empty_strided((1, 3, 4, 5), (60, 1, 15, 3)).fill_(1),
        torch.randn(3, 4, 5, 1).permute(3, 0, 1, 2),
        torch.randn(1, 3, 4, 5),
    ],
    ids=lambda x: str(x.stride()),
)
def test_an_image_of_one_sample_comes_back_as_what_it_was_taken_for(x: torch.Tensor, name: str) -> None:
    y = there_and_back(name, x)
    # What a convolution asks; ``to`` returns the tensor itself if it has the format.
    for layout in (torch.contiguous_format, torch.channels_last):
        assert (y.to(memory_format=layout) is y) == (x.to(memory_format=layout) is x)


@pytest.mark.parametrize("name", ["permute", "copy_into"])
@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 3, 5), torch.randn(2, 5, 3).mT, torch.randn(3, 5, 1).permute(2, 0, 1)],
    ids=lambda x: str(x.stride()),
)
def test_any_order_of_tokens_comes_back_from_another(x: torch.Tensor, name: str) -> None:
    y = there_and_back(name, x)
    assert y.squeeze().stride() == x.squeeze().stride()  # that of a dimension of one means nothing


def test_no_look_alike_of_the_layout_copies() -> None:
    for name in ("same_format", "views"):
        loop = armed_loop(f"layout_ping_pong/{name}", armed=False)
        twin = armed_loop(f"layout_ping_pong/{name}")
        counts = []
        for one in (loop, twin):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                one.step()
            counts.append(Counter(event.name for event in profiler.events() or ())["aten::copy_"])
        assert counts[0] == counts[1]


def test_where_layout_has_one_order_there_is_no_place() -> None:
    flat = make_loop(lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.Linear(8, 5)))
    assert all(variant.sites(flat) == [] for variant in PATTERNS["layout_ping_pong"].variants)
