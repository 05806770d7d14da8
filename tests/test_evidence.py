"""Which patterns a clean model is known not to hold by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from torchtraceap.collect.evidence import absent_by_dispatch, blocking_calls, exhaustive
from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.labels.pattern import PATTERNS, Mode

BY_DISPATCH = {"python_loop_over_batch", "redundant_copy", "dtype_ping_pong"}


class Net(nn.Module):
    """``change`` on the activation between two layers."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.change(self.norm(self.conv(x))).flatten(1))


def loop_of(change: Callable[[torch.Tensor], torch.Tensor], mode: Mode = "train") -> TrainingLoop:
    spec = tiny.spec(lambda: Net(change))
    return tiny.WithoutWorkers(spec, mode, 4, torch.device("cpu"), secret="s", seed=1)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.relu(),
        lambda x: x.to(torch.float64),  # a single cast: the head casts nothing back
        lambda x: x.double().relu().relu().relu().float(),  # work in the wide type, three operators of it
        lambda x: x.contiguous().view_as(x).detach(),
        lambda x: x.transpose(2, 3).contiguous(),  # another layout
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: torch.empty_like(x.transpose(2, 3)).copy_(x),
        lambda x: x.to(x.dtype),
    ],
    ids=["relu", "cast", "wide work", "views", "transposed", "channels_last", "relayout", "no cast"],
)
def test_clean(change: Callable[[torch.Tensor], torch.Tensor], mode: Mode) -> None:
    if change(torch.zeros(1, 1, 1, 1)).dtype == torch.float64:
        first = change

        def change(x: torch.Tensor) -> torch.Tensor:
            return x + first(x).sum().item() * 0

    assert absent_by_dispatch(loop_of(change, mode)) == BY_DISPATCH


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    ("change", "pattern"),
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
    ],
)
def test_found(change: Callable[[torch.Tensor], torch.Tensor], pattern: str, mode: Mode) -> None:
    assert absent_by_dispatch(loop_of(change, mode)) == BY_DISPATCH - {pattern}


def test_autocast_of_weights_is_no_round_trip() -> None:
    class Autocast(tiny.WithoutWorkers):
        def _autocast(self) -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16)

    def absent(mode: Mode, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        loop = Autocast(tiny.spec(lambda: Net(change)), mode, 4, torch.device("cpu"), secret="s", seed=1)
        return "dtype_ping_pong" in absent_by_dispatch(loop)

    for mode in ("train", "infer"):
        assert absent(mode, lambda x: x.relu())  # the head gives bfloat16, which the loss takes as float32
        assert not absent(mode, lambda x: x.float().bfloat16())


def test_the_loss_is_looked_at_too() -> None:
    class CopiesInLoss(tiny.Classify):
        def loss(self, output, batch):
            return super().loss(output.clone(), batch)

    spec = tiny.spec(adapter=CopiesInLoss())
    loop = tiny.WithoutWorkers(spec, "train", 4, torch.device("cpu"), secret="s", seed=1)
    assert "redundant_copy" not in absent_by_dispatch(loop)


def test_looking_leaves_no_trace() -> None:
    loop = loop_of(lambda x: nn.functional.dropout(x))
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    random = torch.get_rng_state()
    absent_by_dispatch(loop)
    torch.testing.assert_close(loop.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in loop.model.parameters())


# -- from a trace -------------------------------------------------------------------------------------

MAIN, PINNING, STREAM = range(3)


def trace_of(*rows: tuple[int, str, str, int]) -> Trace:
    """Lane, name, category and start of each event; all last 1 ns but steps, which last 100."""
    rows = tuple(sorted(rows, key=lambda row: (row[0], row[3])))
    ops = sorted({(name, category) for _, name, category, _ in rows})
    n = len(rows)
    events = Events(
        lane=np.array([row[0] for row in rows], np.int16),
        op=np.array([ops.index((row[1], row[2])) for row in rows], np.int32),
        start_ns=np.array([row[3] for row in rows], np.int64),
        dur_ns=np.array([100 if "Step" in row[1] else 1 for row in rows], np.int64),
        parent=np.full(n, -1, np.int32),
        launch=np.full(n, -1, np.int32),
        forward=np.full(n, -1, np.int32),
    )
    lanes = [Lane("cpu", "thread 0"), Lane("cpu", "thread 1"), Lane("gpu", "stream 7", 0)]
    return Trace(lanes, [Op(*op) for op in ops], events)


STEP = (MAIN, "ProfilerStep#0", "user_annotation", 0)
ADD = (MAIN, "aten::add", "cpu_op", 1)
RUNTIME, DRIVER = "cuda_runtime", "cuda_driver"


@pytest.mark.parametrize(
    ("name", "category", "blocks"),
    [
        ("cudaStreamSynchronize", RUNTIME, True),
        ("cudaDeviceSynchronize", RUNTIME, True),
        ("cudaEventSynchronize", RUNTIME, True),
        ("hipStreamSynchronize", RUNTIME, True),
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
    assert blocking_calls(trace).tolist() == [False, False, blocks]
    known = exhaustive(set(), trace, has_gpu=True)
    assert ("host_sync" in known) is not blocks


def test_waiting_outside_of_steps_or_beside_the_loop_blocks_nothing() -> None:
    sync = "cudaStreamSynchronize"
    trace = trace_of(STEP, ADD, (MAIN, sync, RUNTIME, 500), (PINNING, sync, RUNTIME, 20))
    assert not blocking_calls(trace).any()
    assert "host_sync" in exhaustive(set(), trace, has_gpu=True)


def test_a_thread_that_runs_operators_counts() -> None:
    trace = trace_of(
        STEP, ADD, (PINNING, "aten::mul", "cpu_op", 5), (PINNING, "cudaEventSynchronize", RUNTIME, 20)
    )
    assert blocking_calls(trace).sum() == 1


@pytest.mark.parametrize(
    ("copies", "known"),
    [
        (["Memcpy HtoD (Pinned -> Device)"], True),
        (["Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"], False),
        (["Memcpy DtoD (Device -> Device)"], False),  # no copy says anything of the batch's memory
        ([], False),
    ],
)
def test_memory_of_the_copies_to_the_device(copies: list[str], known: bool) -> None:
    rows = [(STREAM, name, "gpu_memcpy", 10 * i + 10) for i, name in enumerate(copies)]
    assert ("pageable_h2d" in exhaustive(set(), trace_of(STEP, ADD, *rows), has_gpu=True)) is known


def test_on_a_cpu_what_needs_a_gpu_cannot_be() -> None:
    known = exhaustive({"redundant_copy"}, trace_of(STEP, ADD), has_gpu=False)
    certain = {p.id for p in PATTERNS if p.needs_gpu or not p.native_risk}
    assert known == sorted(certain | {"redundant_copy"})
