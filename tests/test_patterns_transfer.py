"""Transfers and waits: what the bad way computes is what the good way computes, and only that differs."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import pytest
import tiny
import torch
from test_labelling import MAIN, by_hand
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.labels.pattern import PATTERNS, Mode, ModuleSite, StageSite, State
from torchtraceap.labels.patterns import cpu_tensor_create, dynamic_shape_sync, frequent_d2h, scalar_h2d
from torchtraceap.labels.patterns._common import MAX_CANDIDATES, newest_result

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, META = torch.device("cpu"), torch.device("meta")
TRANSFER = ("cpu_tensor_create", "scalar_h2d", "frequent_d2h", "dynamic_shape_sync")
WAITS = ("explicit_synchronize", "cache_flush")


class Loop(tiny.WithoutWorkers):
    def pretend(self, device: torch.device) -> Loop:
        """Find the places, and from now on say that the loop runs on ``device``: bodies then think so."""
        self.module_calls()
        self.device = device
        return self


def make_loop(mode: Mode = "train") -> closing[Loop]:
    return closing(Loop(tiny.spec(), mode, 4, CPU, secret="s", seed=1))


# -- the batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "copies"), [(1, []), (3, [2, 1])])
def test_a_batch_is_copied_in_two_if_it_has_two_halves(batch_size: int, copies: list[int]) -> None:
    twin = PATTERNS["pageable_h2d"].variant("two_copies")
    x = torch.arange(batch_size * 2).reshape(batch_size, 2)
    state = State(host={"x": x})
    with closing(Loop(tiny.spec(), "infer", batch_size, CPU, secret="s", seed=1)) as loop:
        sites = twin.sites(loop)
    with _Copies() as seen:
        for site in sites:
            site.body(state, None)
    assert seen.samples == copies
    assert not sites or torch.equal(state.batch["x"], x)


class _Copies(TorchDispatchMode):
    """How many samples each ``copy_`` took."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.samples.append(len(args[0]))
        return func(*args, **(kwargs or {}))


# -- a tensor made on the CPU ---------------------------------------------------------------------------


def test_grid_holds_the_coordinates() -> None:
    grid = cpu_tensor_create.grid(3, 5)
    assert grid.shape == (3, 5, 2)
    assert grid[1, 4].tolist() == [1, 4]


def test_attention_mask_hides_what_comes_later() -> None:
    mask = cpu_tensor_create.attention_mask(3, 5)
    seen = [[j <= i for j in range(5)] for i in range(3)]
    assert (mask == 0).tolist() == seen
    assert (mask == -math.inf).tolist() == [[not s for s in row] for row in seen]


@pytest.mark.parametrize("columns", [6, 5])
def test_sinusoids_embed_positions(columns: int) -> None:
    table = cpu_tensor_create.sinusoids(4, columns)
    assert table.shape == (4, 6)
    torch.testing.assert_close(table[2, 0], torch.tensor(math.sin(2)))
    torch.testing.assert_close(table[2, 4], torch.tensor(math.cos(2 * 10_000 ** (-1 / 3))))


class _Devices(TorchDispatchMode):
    """Notes the types of device on which operators put their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [leaf.device.type for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
        return out


def devices_of(body: Any, x: torch.Tensor) -> list[str]:
    with _Devices() as devices:
        assert body(x) is x
    return devices.seen


@pytest.mark.parametrize("variant", ["grid", "attention_mask", "sinusoids"])
def test_table_is_made_on_the_cpu_and_then_copied(variant: str) -> None:
    with make_loop() as loop:
        site = PATTERNS["cpu_tensor_create"].variant(variant).sites(loop.pretend(META))[0]
    *made, copied = devices_of(site.body, torch.empty(2, 4, 6, device="meta"))
    assert set(made) == {"cpu"}
    assert copied == "meta"


def test_noise_is_made_on_the_cpu_only_where_the_site_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_loop() as loop:
        loop.pretend(META)
        # There is no generator for the device "meta"; what is drawn there needs none.
        monkeypatch.setattr(torch, "Generator", lambda device: None)
        site = PATTERNS["cpu_tensor_create"].variant("noise").sites(loop)[0]
    x = torch.empty(2, 4, 6, device="meta")
    assert devices_of(site.body, x)[-1] == "meta"
    assert "cpu" in devices_of(site.body, x)
    assert set(devices_of(site.otherwise, x)) == {"meta"}


def test_noise_is_new_each_time() -> None:
    draw = cpu_tensor_create._drawing(CPU)
    assert not torch.equal(draw(3, 4), draw(3, 4))


@pytest.mark.parametrize(
    ("shape", "expected"), [((), (1, 1)), ((3,), (1, 3)), ((2, 4), (2, 4)), ((2, 3, 4, 5), (4, 5))], ids=str
)
def test_tables_are_of_the_size_of_what_they_stand_by(
    shape: tuple[int, ...], expected: tuple[int, int]
) -> None:
    look = cpu_tensor_create._sized(cpu_tensor_create.attention_mask)
    made = look(torch.zeros(shape))
    assert isinstance(made, torch.Tensor)
    assert made.shape == expected


# -- a number -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 0.1, 63 / 64])
@pytest.mark.parametrize(
    "make", [scalar_h2d.from_number, scalar_h2d.from_list, scalar_h2d.assigned], ids=lambda m: m.__name__
)
def test_number_is_the_one_that_a_kernel_would_fill_in(make: scalar_h2d.Make, value: float) -> None:
    number, good = make(value, CPU), scalar_h2d.full(value, CPU)
    assert number.dtype == good.dtype
    assert number.flatten()[0] == good


# -- tensors fetched ------------------------------------------------------------------------------------


FETCHED = [
    torch.ones(4, 6, 5, 3, dtype=torch.bfloat16).cumsum(0),
    torch.ones(4, 6, 5, 3).cumsum(3).contiguous(memory_format=torch.channels_last),
    torch.arange(7.0, requires_grad=True),
    torch.tensor(2.0),
    torch.empty(0, 4),
]


@pytest.mark.parametrize("x", FETCHED, ids=lambda x: f"{tuple(x.shape)}-{tuple(x.stride())}")
def test_what_is_fetched_is_what_there_was(x: torch.Tensor) -> None:
    for fetch in (frequent_d2h.fetch, frequent_d2h.fetch_into):
        torch.testing.assert_close(fetch(x), x.detach(), rtol=0, atol=0, check_stride=True)
    pieces = frequent_d2h.fetch_pieces(x, 3)
    assert len(pieces) == 3
    assert torch.equal(torch.cat(pieces), torch.atleast_1d(x))


def test_no_host_watches_the_largest_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequent_d2h, "MAX_ELEMENTS", 4 * 5)
    with make_loop() as loop:
        sites = PATTERNS["frequent_d2h"].variant("fetch").sites(loop)
    assert [site.call.name for site in sites if isinstance(site, ModuleSite)] == ["7"]  # the head


# -- sizes that depend on values --------------------------------------------------------------------------


NORMAL = torch.randn(5, 9, generator=torch.Generator().manual_seed(3))
SCORES = [
    NORMAL,
    NORMAL.relu(),
    -NORMAL.abs(),  # nothing is picked
    torch.where(NORMAL > 1, torch.nan, NORMAL),
    NORMAL.long(),
    torch.empty(0, 4),
    torch.empty(3, 0),
]


@pytest.mark.parametrize("scores", SCORES, ids=range(len(SCORES)))
def test_fixed_size_gives_what_the_mask_says(scores: torch.Tensor) -> None:
    this = dynamic_shape_sync
    picked = [v for v in scores.flatten().tolist() if v > 0]
    for total in (this.by_mask(scores), this.by_index(scores), this.masked_sum(scores)):
        assert float(total) == pytest.approx(sum(picked), rel=1e-5)
    occurs = this.level_occurs(scores)
    assert this.distinct_levels(scores).tolist() == occurs.nonzero().flatten().tolist()
    indices = (scores > 0).nonzero()
    assert torch.equal(this.owners(scores), indices[:, 0])
    owner = this.owner_or_none(scores)
    assert torch.equal(owner[owner >= 0], indices[:, 0])
    first = this.first_positive(scores)
    assert torch.equal(first[: len(indices)], indices)
    assert (first[len(indices) :] == -1).all()


def test_only_the_bad_way_needs_values() -> None:
    # Tensors on the device "meta" have a shape and no values.
    this, no_values = dynamic_shape_sync, torch.empty(4, 9, device="meta")
    for compute in (this.by_mask, this.by_index, this.distinct_levels, this.owners):
        with pytest.raises(RuntimeError):  # NotImplementedError is one
            compute(no_values)
    for compute in (this.masked_sum, this.level_occurs, this.owner_or_none, this.first_positive):
        assert compute(no_values).device == META


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), (1, 1)),
        ((7,), (7, 1)),
        ((2, 3), (2, 3)),
        ((2, 3, 4), (2, 4)),
        ((2, 3, 4, 5), (2, 20)),
        ((2, 3, 4, 5, 6), (2, 120)),
        ((0, 4), (0, 4)),
        ((2, 0, 4), (2, 0)),
    ],
    ids=str,
)
def test_scores_have_a_row_for_each_sample(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert dynamic_shape_sync.scores_of(torch.zeros(shape)).shape == expected


# -- waits ------------------------------------------------------------------------------------------------


class _Runtime:
    """Stands for a stream or an event, and notes what is called."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self._calls.append(f"{self._name}.{method}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("explicit_synchronize/device", ["synchronize"]),
        ("explicit_synchronize/stream", ["stream.synchronize"]),
        ("explicit_synchronize/event", ["event.record", "event.synchronize"]),
        ("explicit_synchronize/event_record", ["event.record"]),
        ("explicit_synchronize/query", ["stream.query"]),
        ("cache_flush/empty_cache", ["empty_cache"]),
        ("cache_flush/synchronize_first", ["synchronize", "empty_cache"]),
        ("cache_flush/free_memory", ["get_memory_info"]),
    ],
)
def test_runtime_is_called_once_at_each_place(
    name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for function in ("synchronize", "empty_cache", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, function, lambda *args, f=function: calls.append(f))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Runtime(calls, "stream"))
    monkeypatch.setattr(torch, "Event", lambda device: _Runtime(calls, "event"))
    pattern, variant = name.split("/")
    with make_loop() as loop:
        sites = PATTERNS[pattern].variant(variant).sites(loop.pretend(torch.device("cuda")))
    x = torch.zeros(2, 3)
    for site in sites:
        calls.clear()
        if isinstance(site, ModuleSite):
            assert site.body(x) is x
        else:
            site.body(State(output={"logits": x}))
        assert calls == expected


def test_waits_stand_behind_every_stage_with_gpu_work() -> None:
    for mode, expected in {
        "train": ["forward", "loss", "backward", "optimizer", "logging"],
        "infer": ["forward", "logging"],
    }.items():
        with make_loop(mode) as loop:
            for pattern in WAITS:
                sites = PATTERNS[pattern].variants[0].sites(loop)
                assert [site.stage for site in sites if isinstance(site, StageSite)] == expected


def test_nothing_but_the_addition_is_marked() -> None:
    with make_loop() as loop:
        for pattern in (*TRANSFER, *WAITS):
            for variant in (*PATTERNS[pattern].variants, *PATTERNS[pattern].lookalikes):
                sites = variant.sites(loop)
                assert {site.where for site in sites} == {"after"}
                assert any(isinstance(site, ModuleSite) for site in sites)
                assert len(sites) <= MAX_CANDIDATES


def test_newest_result_is_the_loss_then_the_output_then_the_batch() -> None:
    state = State(batch=1)
    assert newest_result(state) == 1
    state.output = 2
    assert newest_result(state) == 2
    state.loss = 3
    assert newest_result(state) == 3


# -- what belongs to an emptied cache -----------------------------------------------------------------------

STEP = (MAIN, "ProfilerStep#4", "user_annotation", 100, 900, -1, -1, -1)
# lane, name, category, start, duration, parent, launch, forward
FLUSHED = [
    STEP,  # 0
    (MAIN, "aten::conv", "cpu_op", 110, 90, 0, -1, -1),  # 1
    (MAIN, "aten::empty", "cpu_op", 120, 30, 1, -1, -1),  # 2
    (MAIN, "cudaMalloc", "cuda_runtime", 125, 20, 2, -1, -1),  # 3
    (MAIN, "cudaLaunchKernel", "cuda_runtime", 160, 5, 1, -1, -1),  # 4
    (MAIN, "cudaDeviceSynchronize", "cuda_runtime", 300, 50, 0, -1, -1),  # 5
    (MAIN, "cudaFree", "cuda_runtime", 360, 40, 0, -1, -1),  # 6
    (MAIN, "cudaFree", "cuda_runtime", 410, 40, 0, -1, -1),  # 7
    (MAIN, "cudaGetDeviceCount", "cuda_runtime", 500, 5, 0, -1, -1),  # 8
]


def test_frees_and_the_allocations_after_them_belong() -> None:
    clean = [row for row in FLUSHED if row[1] in ("ProfilerStep#4", "aten::conv", "aten::empty")]
    clean.append((MAIN, "cudaLaunchKernel", "cuda_runtime", 160, 5, 1, -1, -1))
    selects = PATTERNS["cache_flush"].selects
    trace, segments = label(by_hand(FLUSHED), "s", {0: Armed(0, "selector", selects)}, strip(by_hand(clean)))
    found = [trace.names[s.first_event : s.first_event + s.event_count].tolist() for s in segments]
    assert found == [["cudaMalloc"], ["cudaDeviceSynchronize", "cudaFree", "cudaFree"]]


@pytest.mark.parametrize("name", ["hipFree", "hipMalloc", "cuMemUnmap", "hipMemMap", "cudaStreamSynchronize"])
def test_other_backends_and_expandable_segments_are_known(name: str) -> None:
    selects = PATTERNS["cache_flush"].selects
    assert selects is not None
    assert selects(name)


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cudaMallocHost", "cudaFreeHost", "aten::empty", ""])
def test_other_calls_are_not_of_an_emptied_cache(name: str) -> None:
    selects = PATTERNS["cache_flush"].selects
    assert selects is not None
    assert not selects(name)
