"""Which patterns a clean model is known not to hold by itself, and which of its waits are native."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtraceap.collect import absence, dispatch
from torchtraceap.collect.dispatch import EXPLICIT, WAITING, Call, Recorder, Value, Wait, record
from torchtraceap.collect.evidence import exhaustive, survey
from torchtraceap.collect.labelling import segments_of
from torchtraceap.collect.loop import DISTINCT_BATCHES, Placement, TrainingLoop
from torchtraceap.collect.native import natives, unpaired, waits
from torchtraceap.collect.would_block import LIFT, count
from torchtraceap.dataset.attribution import violations
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.labels import segments as runs_of
from torchtraceap.labels.markers import PREFIX
from torchtraceap.labels.pattern import PATTERNS, Mode, ModuleSite
from torchtraceap.labels.types import Instance, Segment

CPU = torch.device("cpu")
BY_DISPATCH = {
    "cache_flush",
    "cat_in_loop",
    "dtype_ping_pong",
    "layout_ping_pong",
    "over_checkpointing",
    "python_loop_over_batch",
    "recomputed_constant",
    "redundant_copy",
    "unfused_attention",
    "unfused_elementwise",
}

Change = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """``change`` on the activation between two layers."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.change(self.norm(self.conv(x))).flatten(1))


def loop_of(change: Change, mode: Mode = "train") -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(lambda: Net(change)), mode, 4, CPU, secret="s", seed=1)


def absent(loop: TrainingLoop) -> frozenset[str]:
    """What the survey shows, but for what an eager loop on one device cannot hold."""
    return survey(loop).absent - {pattern.id for pattern in PATTERNS if pattern.runtime != "eager"}


# -- absence, from what is dispatched -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.relu(),
        lambda x: x + x.double().sum().item() * 0,  # a single cast: nothing casts back
        lambda x: x.double().relu().relu().relu().float(),  # work in the wide type, three operators of it
        lambda x: x.contiguous().view_as(x).detach(),
        lambda x: x.transpose(2, 3).contiguous(),  # another layout, and no way back
        lambda x: x.to(x.dtype),
        lambda x: torch.cat([x[:, :4], x[:, 4:].relu()], dim=1),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: x.log_softmax(-1),
        lambda x: x * torch.arange(4.0),  # a handful of numbers
        lambda x: x * torch.rand(x.shape),
    ],
)
def test_clean(change: Change, mode: Mode) -> None:
    assert absent(loop_of(change, mode)) == BY_DISPATCH


def _grow(x: torch.Tensor) -> torch.Tensor:
    y = x[:1]
    for i in range(1, len(x)):
        y = torch.cat([y, x[i : i + 1]])
    return y


def _attend(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1) @ x


def _attend_by_exponential(x: torch.Tensor) -> torch.Tensor:
    weights = (x @ x.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ x


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        (lambda x: torch.stack([sample * 2 for sample in x]), "python_loop_over_batch"),
        (lambda x: torch.cat([x[i : i + 1] for i in range(len(x))]), "python_loop_over_batch"),
        (lambda x: x.clone(), "redundant_copy"),
        (lambda x: torch.empty_like(x).copy_(x), "redundant_copy"),
        (lambda x: x.to(x.dtype, copy=True), "redundant_copy"),
        (lambda x: x.double().float(), "dtype_ping_pong"),
        (lambda x: x.double().relu().mul(2).float(), "dtype_ping_pong"),
        (lambda x: x.half().float(), "dtype_ping_pong"),
        (
            lambda x: torch.empty_like(x).copy_(torch.empty_like(x, dtype=torch.float64).copy_(x)),
            "dtype_ping_pong",
        ),
        (_grow, "cat_in_loop python_loop_over_batch"),
        (lambda x: torch.cat([x, torch.cat([x, x]).relu()])[: len(x)], "cat_in_loop"),
        (lambda x: torch.cat([x, x.relu()]) [: len(x)] + torch.cat([x, x.relu()])[: len(x)], "cat_in_loop"),
        (_attend, "unfused_attention"),
        (_attend_by_exponential, "unfused_attention"),
        (_gelu, "unfused_elementwise"),
        (_layer_norm, "unfused_elementwise"),
        (lambda x: x.add(1).mul_(2).add_(1).tanh_(), "unfused_elementwise"),
        (lambda x: x.to(memory_format=torch.channels_last).relu().contiguous(), "layout_ping_pong"),
        (lambda x: x.to(memory_format=torch.channels_last), "layout_ping_pong"),  # flatten copies it back
        (lambda x: torch.empty_like(x.transpose(2, 3)).copy_(x), "layout_ping_pong"),
        (lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous(), "layout_ping_pong"),
        (lambda x: x + torch.arange(128.0).view(8, 4, 4), "recomputed_constant"),
        (lambda x: x + torch.zeros_like(x), "recomputed_constant"),
        (lambda x: x + torch.empty(8, 4, 4).fill_(0.5), "recomputed_constant"),
    ],
)  # fmt: skip
def test_found(change: Change, patterns: str, mode: Mode) -> None:
    assert absent(loop_of(change, mode)) == BY_DISPATCH - set(patterns.split())


def test_work_on_parameters_alone_is_a_recomputed_constant() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.conv2d(x, self.weight - self.weight.mean())

    layer = Standardised(8, 8, 1)
    assert absent(loop_of(layer, "infer")) == BY_DISPATCH - {"recomputed_constant"}


class Autocast(tiny.WithoutWorkers):
    """In bfloat16 on a CPU."""

    def _autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_autocast_of_weights_is_no_round_trip(mode: Mode) -> None:
    def never(change: Change) -> bool:
        loop = Autocast(tiny.spec(lambda: Net(change)), mode, 4, CPU, secret="s", seed=1)
        return "dtype_ping_pong" in survey(loop).absent

    assert never(lambda x: x.relu())  # the head gives bfloat16, which the loss takes as float32
    assert not never(lambda x: x.float().bfloat16())


def test_the_loss_is_looked_at_too() -> None:
    class CopiesInLoss(tiny.Classify):
        def loss(self, output, batch):
            return super().loss(output.clone(), batch)

    loop = tiny.WithoutWorkers(tiny.spec(adapter=CopiesInLoss()), "train", 4, CPU, secret="s", seed=1)
    assert "redundant_copy" not in survey(loop).absent


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_the_backward_pass(use_reentrant: bool) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(torch.tanh, x, use_reentrant=use_reentrant)
        return y

    assert absent(loop_of(change)) == BY_DISPATCH - {"over_checkpointing"}


def test_an_emptied_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def change(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.empty_cache()
        return x

    assert absent(loop_of(change)) == BY_DISPATCH - {"cache_flush"}


def test_other_runtimes_have_patterns_of_their_own() -> None:
    loop = loop_of(torch.relu)
    distributed = {pattern.id for pattern in PATTERNS if pattern.runtime == "distributed"}
    assert distributed <= survey(loop).absent
    loop.runtime = "distributed"
    assert not distributed & survey(loop).absent


def test_what_a_site_does_where_it_is_off_counts() -> None:
    loop = loop_of(torch.relu)
    call = loop.module_calls()[0]
    site = ModuleSite(call, lambda y: y.double().float(), where="after", otherwise=lambda y: y.clone())
    loop.install(Placement(index=0, sites=[site], acting=frozenset({0})))
    assert absent(loop) == BY_DISPATCH - {"redundant_copy"}


def test_looking_leaves_no_trace() -> None:
    loop = loop_of(lambda x: nn.functional.dropout(x))
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    random, synchronize = torch.get_rng_state(), torch.cuda.synchronize
    survey(loop)
    torch.testing.assert_close(loop.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in loop.model.parameters())
    assert torch.cuda.synchronize is synchronize


def calls_of(work: Callable[[], object]) -> list[Call]:
    recorder = Recorder(CPU)
    with recorder.at("forward"):
        work()
    return recorder.recording.calls


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("work", "aligned"),
    [
        (lambda: tensor(3, 16) @ tensor(16, 8), True),  # samples are no channels
        (lambda: tensor(3, 12) @ tensor(12, 8), False),
        (lambda: tensor(8, 16) @ tensor(16, 10), False),
        (lambda: functional.linear(tensor(2, 5, 16), tensor(24, 16), tensor(24)), True),
        (lambda: functional.linear(tensor(2, 5, 16), tensor(21, 16), tensor(21)), False),
        (lambda: torch.bmm(tensor(2, 8, 16), tensor(2, 16, 49)), False),
        (lambda: functional.conv2d(tensor(1, 8, 4, 4), tensor(16, 8, 1, 1)), True),
        (lambda: functional.conv2d(tensor(1, 3, 4, 4), tensor(16, 3, 1, 1)), False),
        (lambda: functional.conv2d(tensor(1, 16, 4, 4), tensor(16, 4, 1, 1), groups=4), False),
        (lambda: functional.conv2d(tensor(1, 16, 4, 4), tensor(16, 1, 3, 3), groups=16), True),
        (lambda: functional.conv2d(tensor(1, 3, 4, 4).float(), tensor(5, 3, 1, 1).float()), True),
    ],
)  # fmt: skip
def test_aligned_channels(work: Callable[[], object], aligned: bool) -> None:
    assert absence.lacks_unaligned_channels(calls_of(work)) is aligned


def test_types_of_products() -> None:
    assert absence.lacks_fp32_products(calls_of(lambda: (tensor(8, 8) @ tensor(8, 8)).float().relu()))
    assert not absence.lacks_fp32_products(calls_of(lambda: tensor(8, 8).float() @ tensor(8, 8).float()))
    image = torch.zeros(1, 8, 4, 4)
    assert not absence.lacks_fp32_products(
        calls_of(lambda: functional.conv2d(image, torch.zeros(8, 8, 1, 1)))
    )


# -- waits, from what is dispatched -------------------------------------------------------------------

DEVICE, HOST = "cuda", "cpu"


def value(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Value:
    return Value(0, shape, (1,) * len(shape), dtype, device, parameter=False)


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "inputs", "outputs", "pattern"),
    [
        (aten._local_scalar_dense.default, [value(DEVICE)], [], "host_sync"),
        (aten.equal.default, [value(DEVICE, 99), value(DEVICE, 99)], [], "host_sync"),
        (aten._to_copy.default, [value(DEVICE, 2)], [value(HOST, 2)], "host_sync"),
        (aten._to_copy.default, [value(DEVICE, 99)], [value(HOST, 99)], "frequent_d2h"),
        (aten.copy_.default, [value(HOST, 99), value(DEVICE, 99)], [value(HOST, 99)], "frequent_d2h"),
        (aten._to_copy.default, [value(HOST)], [value(DEVICE)], "scalar_h2d"),
        (aten._to_copy.default, [value(HOST, 99)], [value(DEVICE, 99)], "cpu_tensor_create"),
        (aten.copy_.default, [value(DEVICE, 99), value(HOST)], [value(DEVICE, 99)], "scalar_h2d"),
        (aten.lift_fresh.default, [value(DEVICE, 3)], [value(DEVICE, 3)], "scalar_h2d"),
        (aten.lift_fresh.default, [value(DEVICE, 99)], [value(DEVICE, 99)], "cpu_tensor_create"),
        (aten.index.Tensor, [value(DEVICE, 9, 9), value(HOST, 99)], [value(DEVICE, 9)], "cpu_tensor_create"),
        (aten.index.Tensor, [value(DEVICE, 9), value(DEVICE, 9)], [value(DEVICE, 3)], "dynamic_shape_sync"),
        (aten.nonzero.default, [value(DEVICE, 9)], [value(DEVICE, 3, 1)], "dynamic_shape_sync"),
        (aten.masked_select.default, [value(DEVICE), value(HOST)], [value(DEVICE, 3)], "dynamic_shape_sync"),
    ],
)
def test_pattern_of_a_wait(func: Any, inputs: list[Value], outputs: list[Value], pattern: str) -> None:
    call = Call(func, "forward", tuple(inputs), tuple(outputs))
    assert dispatch.waiting_pattern(call) == pattern


def test_the_batch_itself_is_a_pattern_of_its_own() -> None:
    call = Call(aten._to_copy.default, "h2d", (value(HOST, 99),), (value(DEVICE, 99),))
    assert dispatch.waiting_pattern(call) == "pageable_h2d"


BLOCKS = {"aten::nonzero", "aten::_local_scalar_dense", "aten::index"}


class DebugMode(TorchDispatchMode):
    """Stands for CUDA: the operators of ``BLOCKS`` raise while debug mode is "error"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.mode = "default"
        self.ran: list[str] = []
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in BLOCKS and self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.ran.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DebugMode, Recorder]]:
    below, recorder = DebugMode(monkeypatch), Recorder(torch.device("cuda"))
    with below, recorder.at("forward"):
        yield below, recorder


def test_operators_that_wait_are_noted_and_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    with recorded_on_cuda(monkeypatch) as (below, recorder):
        assert x.relu().sum().item() == 3
        assert x[x > 0].tolist() == [1.0, 2.0]
        assert torch.nonzero(x).flatten().tolist() == [1, 2]
    assert recorder.recording.waits == [
        Wait("aten::_local_scalar_dense", "host_sync"),
        Wait("aten::index", "dynamic_shape_sync"),
        Wait("aten::nonzero", "dynamic_shape_sync"),
    ]
    assert all(below.ran.count(wait.operator) == 1 for wait in recorder.recording.waits)
    assert below.mode == "default"


def test_other_errors_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_on_cuda(monkeypatch) as (below, _), pytest.raises(RuntimeError, match="size"):
        torch.zeros(2) + torch.zeros(3)
    assert below.mode == "default"


def test_a_backward_pass_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(func: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, bool]:
        return func(*args, **kwargs), func._schema.name == "aten::threshold_backward"

    monkeypatch.setattr(dispatch, "run_noting_wait", note)
    assert record(loop_of(torch.relu)).waits == [Wait("aten::threshold_backward", "dynamic_shape_sync")]
    assert record(loop_of(torch.relu), backward=False).waits == []


def test_with_waits_each_batch_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def change(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x

    assert survey(loop_of(change)).waits == [[Wait(EXPLICIT, "explicit_synchronize")]] * DISTINCT_BATCHES
    assert survey(loop_of(torch.relu)).waits == [[]]


def test_operators_that_would_block_on_a_gpu() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])

    def work() -> None:
        x[x > 0] * torch.tensor(2.0)
        x[torch.arange(2)].sum().item()
        x.nonzero()
        torch.unique(x).relu()
        x[x > 1] = 0.0
        x[x == 0] = torch.tensor([1.0, 1.0])

    assert count(calls_of(work)) == {
        "aten::index": 1, "aten::index_put_": 1, "aten::_local_scalar_dense": 1, "aten::nonzero": 1,
        "aten::_unique2": 1, LIFT: 3,
    }  # fmt: skip


# -- waits, from a trace ------------------------------------------------------------------------------

MAIN, PINNING, STREAM = range(3)


def trace_of(*rows: tuple[int, str, str, int]) -> Trace:
    """Lane, name, category and start of each event; all last 1 ns but steps, which last 100.

    A copy on the stream was launched by the runtime call that starts with it.
    """
    rows = tuple(sorted(rows, key=lambda row: (row[0], row[3])))
    ops = sorted({(name, category) for _, name, category, _ in rows})
    n = len(rows)
    launch = [
        next((j for j, r in enumerate(rows) if r[2] == RUNTIME and r[3] == row[3]), -1)
        if row[0] == STREAM else -1
        for row in rows
    ]  # fmt: skip
    events = Events(
        lane=np.array([row[0] for row in rows], np.int16),
        op=np.array([ops.index((row[1], row[2])) for row in rows], np.int32),
        start_ns=np.array([row[3] for row in rows], np.int64),
        dur_ns=np.array([100 if "Step" in row[1] else 1 for row in rows], np.int64),
        parent=np.full(n, -1, np.int32),
        launch=np.array(launch, np.int32),
        forward=np.full(n, -1, np.int32),
    )
    lanes = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1"), Lane("gpu", "stream 7", 0)]
    return Trace(lanes, [Op(*op) for op in ops], events)


RUNTIME, DRIVER = "cuda_runtime", "cuda_driver"
STEP = (MAIN, "ProfilerStep#0", "user_annotation", 0)
ADD = (MAIN, "aten::add", "cpu_op", 1)


@pytest.mark.parametrize(
    ("name", "category", "blocks"),
    [
        ("cudaStreamSynchronize", RUNTIME, True),
        ("cudaDeviceSynchronize", RUNTIME, True),
        ("cudaEventSynchronize", RUNTIME, True),
        ("hipStreamSynchronize", RUNTIME, True),
        ("hipMemcpyWithStream", RUNTIME, True),
        ("cuStreamSynchronize", DRIVER, True),
        ("cudaMemcpy", RUNTIME, True),
        ("cudaMemcpyAsync", RUNTIME, False),
        ("cudaStreamWaitEvent", RUNTIME, False),
        ("cudaLaunchKernel", RUNTIME, False),
        ("my::cudaStreamSynchronize", "cpu_op", False),
    ],
)
def test_blocking_calls(name: str, category: str, blocks: bool) -> None:
    trace = trace_of(STEP, ADD, (MAIN, name, category, 10))
    assert waits(trace).tolist() == [False, False, blocks]
    known = exhaustive(frozenset(), trace, has_gpu=True)
    assert ("host_sync" in known) is not blocks


def test_waiting_outside_of_steps_or_beside_the_loop_blocks_nothing() -> None:
    sync = "cudaStreamSynchronize"
    trace = trace_of(STEP, ADD, (MAIN, sync, RUNTIME, 500), (PINNING, sync, RUNTIME, 20))
    assert not waits(trace).any()
    assert "host_sync" in exhaustive(frozenset(), trace, has_gpu=True)


def test_a_thread_that_runs_operators_counts() -> None:
    trace = trace_of(
        STEP, ADD, (PINNING, "aten::mul", "cpu_op", 5), (PINNING, "cudaEventSynchronize", RUNTIME, 20)
    )
    assert waits(trace).sum() == 1


@pytest.mark.parametrize(
    ("copies", "known"),
    [
        (["Memcpy HtoD (Pinned -> Device)"], True),
        (["Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"], False),
        (["Memcpy HtoD (Unknown -> Device)"], False),
        (["Memcpy DtoD (Device -> Device)"], False),  # no copy says anything of the batch's memory
        ([], False),
    ],
)
def test_memory_of_the_copies_to_the_device(copies: list[str], known: bool) -> None:
    rows = [(STREAM, name, "gpu_memcpy", 10 * i + 10) for i, name in enumerate(copies)]
    rows += [(MAIN, "cudaMemcpyAsync", RUNTIME, row[3]) for row in rows]
    assert ("pageable_h2d" in exhaustive(frozenset(), trace_of(STEP, ADD, *rows), has_gpu=True)) is known


def test_conversions_of_cudnn_leave_layouts_in_doubt() -> None:
    conversions = ["void nchwToNhwcKernel<...>", "void nhwcToNchwKernel<...>"]
    rows = [(STREAM, name, "kernel", 10 * i + 10) for i, name in enumerate(conversions)]
    absent = {"layout_ping_pong"} & set(PATTERNS.names())
    assert absent <= set(exhaustive(frozenset(absent), trace_of(STEP, ADD, rows[0]), has_gpu=True))
    assert not absent & set(exhaustive(frozenset(absent), trace_of(STEP, ADD, *rows), has_gpu=True))


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "hipMalloc", "cuMemUnmap"])
def test_memory_that_comes_and_goes_is_no_proof_of_a_kept_cache(call: str) -> None:
    assert "cache_flush" in exhaustive({"cache_flush"}, trace_of(STEP, ADD), has_gpu=True)
    trace = trace_of(STEP, ADD, (MAIN, call, RUNTIME, 10))
    assert "cache_flush" not in exhaustive({"cache_flush"}, trace, has_gpu=True)


def test_on_a_cpu_what_needs_a_gpu_cannot_be() -> None:
    known = exhaustive(frozenset({"redundant_copy"}), trace_of(STEP, ADD), has_gpu=False)
    certain = {p.id for p in PATTERNS if p.needs_gpu or not p.native_risk or p.id in WAITING}
    assert known == sorted(certain | {"redundant_copy"})


# -- native segments, in profiles recorded on a GPU ---------------------------------------------------

DATA = Path(__file__).parent / "data" / "h200"
ITEM = Wait("aten::_local_scalar_dense", "host_sync")
COPY = Wait("aten::_to_copy", "pageable_h2d")


def unlabelled(name: str) -> Trace:
    """A profile without its markers, as if what they held were the model's own."""
    raw = read_trace(DATA / f"{name}.json.gz")
    is_marker = np.array([op.name.startswith(PREFIX) for op in raw.ops], dtype=bool)
    trace, _ = raw.select(~is_marker[raw.events.op])
    return trace


def injected(name: str, placement: int) -> tuple[Trace, list[Segment]]:
    """A profile without its markers, and the segments of what ``placement`` injected."""
    raw = read_trace(DATA / f"{name}.json.gz")
    is_marker = np.array([op.name.startswith(PREFIX) for op in raw.ops], dtype=bool)[raw.events.op]
    on = [
        op.name.startswith(PREFIX) and op.name.split("/")[1:][::2] == [str(placement), "1"] for op in raw.ops
    ]
    events = raw.events
    roots = np.array(on, dtype=bool)[events.op]
    member = runs_of.belongs(roots, events.parent, events.launch, events.forward, backward=False)
    trace, _ = raw.select(~is_marker)
    return trace, segments_of(trace, member[~is_marker], instance=0)


def of_pattern(pattern: str) -> Instance:
    return Instance(
        pattern=pattern, variant="v", scope="local", source="injected", state="costly", every_step=True,
        sites=1,
    )  # fmt: skip


def events_in(trace: Trace, segments: list[Segment]) -> set[int]:
    return {s.first_event + i for s in segments for i in range(s.event_count)}


def test_a_read_of_a_value_is_the_operator_with_its_wait_and_its_copy() -> None:
    trace = unlabelled("host_sync_infer")
    reads = Counter(trace.step[trace.names == "aten::item"].tolist())
    found = natives([[], [ITEM] * max(reads.values())], trace, [])
    assert found.disagreements == []
    assert found.unknown == frozenset()
    (instance,) = found.instances
    assert (instance.pattern, instance.variant, instance.source) == ("host_sync", "native", "native")
    assert (instance.state, instance.every_step, instance.sites) == ("undecided", False, max(reads.values()))
    assert np.isnan(instance.cost_ms)
    on_cpu = [s for s in found.segments if s.lane_class == "cpu"]
    assert Counter(s.step for s in on_cpu) == reads
    for segment in on_cpu:
        names = trace.names[segment.first_event : segment.first_event + segment.event_count].tolist()
        assert (names[0], names[-1]) == ("aten::item", "cudaStreamSynchronize")
    on_gpu = [s for s in found.segments if s.lane_class == "gpu"]
    assert Counter(s.step for s in on_gpu) == reads
    assert {trace.names[row] for row in events_in(trace, on_gpu)} == {"Memcpy DtoH (Device -> Pinned)"}
    assert unpaired(trace, found.instances, found.segments) == []
    assert list(violations(TraceRecord(trace, {}, found.instances, found.segments))) == []


def test_a_pageable_batch_is_one_although_it_is_copied_by_the_same_operator() -> None:
    trace = unlabelled("pageable_h2d_infer")
    found = natives([[COPY, COPY]], trace, [])
    assert [(i.pattern, i.every_step, i.sites) for i in found.instances] == [("pageable_h2d", True, 2)]
    assert found.unknown == frozenset()
    assert unpaired(trace, found.instances, found.segments) == []
    names = {trace.names[s.first_event] for s in found.segments}
    assert names == {"aten::to", "Memcpy HtoD (Pageable -> Device)"}
    known = exhaustive(frozenset(), trace, has_gpu=True, found=found)
    assert {"pageable_h2d", "host_sync"} <= set(known)


def test_copies_of_tensors_made_on_the_host_leave_their_making_in_doubt() -> None:
    trace = unlabelled("pageable_h2d_infer")
    created = Wait("aten::_to_copy", "cpu_tensor_create")
    found = natives([[COPY, created]], trace, [])
    assert {instance.pattern for instance in found.instances} == {"cpu_tensor_create", "pageable_h2d"}
    known = set(exhaustive(frozenset(), trace, has_gpu=True, found=found))
    assert "cpu_tensor_create" not in known
    assert "pageable_h2d" in known


@pytest.mark.parametrize(("name", "placement"), [("host_sync_infer", 1), ("pageable_h2d_infer", 0)])
def test_what_was_injected_is_not_native(name: str, placement: int) -> None:
    trace, segments = injected(name, placement)
    found = natives([[]], trace, segments)
    assert (found.instances, found.segments, found.unknown) == ([], [], frozenset())
    pattern = name.removesuffix("_infer")
    assert unpaired(trace, [of_pattern(pattern)], segments) == []


def test_waits_beside_an_injection_are_native() -> None:
    trace, segments = injected("host_sync_infer", 1)
    step = segments[0].step
    labelled = [s for s in segments if s.step != step]
    reads = int(((trace.names == "aten::item") & (trace.step == step)).sum())
    found = natives([[], [ITEM] * reads], trace, labelled)
    assert {s.step for s in found.segments} == {step}
    assert not events_in(trace, found.segments) & events_in(trace, labelled)
    assert found.unknown == frozenset()
    one_less = natives([[], [ITEM] * (reads - 1)], trace, labelled)
    assert one_less.segments == found.segments
    assert one_less.unknown == {"host_sync"}


def test_a_model_waits_inside_of_what_does_not_wait_by_itself() -> None:
    trace, segments = injected("host_sync_infer", 1)
    reads = [int(((trace.names == "aten::item") & (trace.step == step)).sum()) for step in range(3)]
    surveyed = [[ITEM] * count for count in reads if count]
    found = natives(surveyed, trace, segments, waiting=[])  # as if a whole step were in another precision
    assert {s.step for s in found.segments} == {step for step, count in enumerate(reads) if count}
    assert natives(surveyed, trace, segments).segments == []


def test_an_injection_may_stand_for_work_that_waits_by_itself() -> None:
    trace, segments = injected("pageable_h2d_infer", 0)
    assert natives([[COPY, COPY]], trace, segments).unknown == frozenset()
    assert natives([[COPY] * 3], trace, segments).unknown == {"pageable_h2d"}


def test_a_wait_that_no_survey_saw_has_a_label_and_is_no_evidence() -> None:
    trace = unlabelled("host_sync_infer")
    found = natives([[]], trace, [])
    assert [instance.pattern for instance in found.instances] == ["host_sync"]
    assert unpaired(trace, found.instances, found.segments) == []
    assert found.unknown == WAITING
    assert found.disagreements
    assert not WAITING & set(exhaustive(frozenset(), trace, has_gpu=True, found=found))


def test_a_wait_that_only_the_survey_saw_is_a_disagreement() -> None:
    trace = unlabelled("infer_clean")
    found = natives([[ITEM]], trace, [])
    assert found.instances == []
    assert found.unknown == {"host_sync"}
    known = set(exhaustive(frozenset(), trace, has_gpu=True, found=found))
    assert "host_sync" not in known
    assert "pageable_h2d" in known


def test_a_wait_outside_of_any_operator_stands_for_itself() -> None:
    trace = trace_of(STEP, ADD, (MAIN, "cudaDeviceSynchronize", RUNTIME, 10))
    found = natives([[Wait(EXPLICIT, "explicit_synchronize")]], trace, [])
    assert found.unknown == frozenset()
    wanted = ["explicit_synchronize"] if "explicit_synchronize" in PATTERNS.names() else []
    assert [instance.pattern for instance in found.instances] == wanted
    assert [(s.first_event, s.event_count) for s in found.segments] == [(2, 1)] * len(wanted)


def test_violations_are_named() -> None:
    trace, segments = injected("host_sync_infer", 1)
    instance = of_pattern("host_sync")
    on_cpu = next(s for s in segments if s.lane_class == "cpu")
    (one, *_) = unpaired(trace, [instance], [s for s in segments if s is not on_cpu])
    assert "cudaStreamSynchronize" in one
    assert "in no segment" in one
    clean = unlabelled("infer_clean")
    (one,) = unpaired(clean, [instance], [on_cpu])
    assert "host_sync/v" in one
    assert "holds no wait" in one
