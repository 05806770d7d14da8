"""Patterns of compiled models: each version is compiled once, and a toggle compiles nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from torchtraceap.collect.compiled import MODELS, absent_when_compiled, compile_network
from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement, TrainingLoop
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.regions import number_regions
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.pattern import PATTERNS, Pattern, Variant
from torchtraceap.labels.patterns._compiled import own_code

pytestmark = pytest.mark.usefixtures("one_thread")

GRAPH_BREAK, RECOMPILATION = PATTERNS["graph_break"], PATTERNS["recompilation"]
BREAKS = [pytest.param(variant, id=variant.name) for variant in GRAPH_BREAK.variants]
RECOMPILES = [pytest.param(variant, id=variant.name) for variant in RECOMPILATION.variants]
COMPILED_TWINS = [pytest.param(twin, id=twin.name) for twin in RECOMPILATION.lookalikes]
TWINS = [
    pytest.param(pattern, twin, id=twin.name)
    for pattern in (GRAPH_BREAK, RECOMPILATION)
    for twin in pattern.lookalikes
]


class Block(nn.Module):
    """Two of its kind share their code, and so what Dynamo keeps for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def build() -> nn.Module:
    blocks = nn.Sequential(Block(), Block())
    return tiny.Whole(nn.Sequential(nn.Conv2d(3, 4, 3), blocks, nn.Flatten(), nn.Linear(4 * 16, 5)))


@pytest.fixture
def loop() -> Iterator[TrainingLoop]:
    loop = tiny.WithoutWorkers(tiny.spec(build), "train", 4, torch.device("cpu"), secret="s", seed=1)
    compile_network(loop)
    yield loop
    loop.close()


def install(loop: TrainingLoop, variant: Variant, acting: int | None = None) -> Placement:
    """A placement of which one or all candidates act, once armed."""
    sites = variant.sites(loop)
    placement = Placement(0, sites, frozenset(range(len(sites)) if acting is None else [acting]))
    loop.install(placement)
    return placement


def compiled() -> int:
    return counters["stats"]["unique_graphs"]


def steps(loop: TrainingLoop, count: int = 2) -> int:
    """Run steps and return how many graphs were compiled in them."""
    before = compiled()
    for _ in range(count):
        loop.step()
    return compiled() - before


def trace_of(loop: TrainingLoop, folder: Path) -> Trace:
    """One step with markers."""
    loop.marking = True
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        torch.profiler.record_function("ProfilerStep#0"),
    ):
        loop.step()
    loop.marking = False
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return read_trace(folder / "trace.json")


def regions(trace: Trace) -> list[str]:
    names = [trace.ops[op].name for op in trace.events.op]
    return [name.split(": ")[1] for name in names if name.startswith("Torch-Compiled Region")]


def test_clean_loop_compiles_one_graph_once(loop: TrainingLoop, tmp_path: Path) -> None:
    assert loop.runtime == "compiled"
    assert steps(loop) == 1
    assert absent_when_compiled(loop) == {"graph_break", "recompilation"}
    assert regions(strip(trace_of(loop, tmp_path))) == ["0/0"]


def test_dry_run_compiles_nothing(loop: TrainingLoop) -> None:
    assert [call.name for call in loop.module_calls()][:2] == ["body.0", "body.1.0.conv"]
    assert compiled() == 0


@pytest.mark.parametrize("variant", BREAKS)
def test_toggling_a_break_compiles_nothing_and_leaves_the_clean_graph_whole(
    loop: TrainingLoop, variant: Variant, tmp_path: Path
) -> None:
    placement = install(loop, variant, acting=2)
    assert steps(loop) == 1
    placement.armed = True
    assert steps(loop, variant.settle_steps) > 1
    assert counters["graph_break"]
    toggled = 0
    for armed in (False, True) * 3:
        placement.armed = armed
        toggled += steps(loop, 1)
    assert toggled == 0
    assert len(regions(strip(trace_of(loop, tmp_path)))) > 2
    placement.armed = False
    assert regions(strip(trace_of(loop, tmp_path))) == ["0/0"]


@pytest.mark.parametrize("variant", RECOMPILES)
def test_each_step_compiles_and_the_clean_graph_stays(loop: TrainingLoop, variant: Variant) -> None:
    placement = install(loop, variant, acting=0)
    assert steps(loop) == 1
    placement.armed = True
    assert [steps(loop, 1) for _ in range(9)] == [1] * 9  # Dynamo's own limit is 8
    placement.armed = False
    assert steps(loop) == 0


@pytest.mark.parametrize("twin", COMPILED_TWINS)
def test_lookalike_is_one_graph_compiled_once(loop: TrainingLoop, twin: Variant) -> None:
    placement = install(loop, twin)
    assert steps(loop) == 1
    placement.armed = True
    assert steps(loop, twin.settle_steps) == 1
    assert steps(loop, 4) == 0
    assert not counters["graph_break"]


def labelled(
    loop: TrainingLoop, pattern: Pattern, variant: Variant, folder: Path
) -> tuple[list[str], list[str], Trace]:
    """Names of the topmost labelled events, of those that are not, and the trace."""
    placement = install(loop, variant, acting=0)
    steps(loop)
    clean = strip(trace_of(loop, folder))
    placement.armed = True
    steps(loop)
    armed = {0: Armed(0, pattern.mechanism_of(variant), pattern.selects)}
    trace, segments = label(trace_of(loop, folder), "s", armed, clean)
    names = [trace.ops[op].name for op in trace.events.op]
    mine = {i for s in segments for i in range(s.first_event, s.first_event + s.event_count)}
    top = [names[i] for i in sorted(mine) if int(trace.events.parent[i]) not in mine]
    return top, [name for i, name in enumerate(names) if i not in mine], trace


@pytest.mark.parametrize("variant", BREAKS)
def test_regions_of_a_break_belong_to_it(loop: TrainingLoop, variant: Variant, tmp_path: Path) -> None:
    top, rest, trace = labelled(loop, GRAPH_BREAK, variant, tmp_path)
    assert top
    assert all(GRAPH_BREAK.selects(name) for name in top if GRAPH_BREAK.selects)
    assert not [name for name in rest if name.startswith("Torch-Compiled Region")]
    assert "ProfilerStep#0" in rest
    assert any(name.startswith("Optimizer.step") for name in rest)
    assert regions(number_regions(trace))[0] == "0/0"


@pytest.mark.parametrize("variant", RECOMPILES)
def test_compiling_belongs_to_a_recompilation(loop: TrainingLoop, variant: Variant, tmp_path: Path) -> None:
    top, rest, trace = labelled(loop, RECOMPILATION, variant, tmp_path)
    assert set(top) == {"dynamo", "entire_backward_compile"}
    assert not [name for name in rest if "dynamo_timed" in name]
    assert [name for name in rest if name.startswith("Torch-Compiled Region")]
    assert regions(number_regions(trace)) == ["0/0"]


@pytest.mark.parametrize(("pattern", "twin"), TWINS)
def test_lookalikes_leave_events_and_no_region(
    loop: TrainingLoop, pattern: Pattern, twin: Variant, tmp_path: Path
) -> None:
    top, rest, _ = labelled(loop, pattern, twin, tmp_path)
    assert top
    assert all(name.startswith("aten::") for name in top)
    assert [name for name in rest if name.startswith("Torch-Compiled Region")]


def test_regions_are_numbered_by_first_appearance(loop: TrainingLoop, tmp_path: Path) -> None:
    placement = install(loop, GRAPH_BREAK.variant("item"))
    steps(loop)
    placement.armed = True
    steps(loop)
    trace = strip(trace_of(loop, tmp_path))
    before, after = regions(trace), regions(number_regions(trace))
    assert not any(name.startswith("0/") for name in before)  # the clean graph's
    assert len(set(before)) == len(set(after))
    firsts = list(dict.fromkeys(int(name.split("/")[0]) for name in after))
    assert firsts == sorted(firsts)
    assert firsts[0] == 0
    for name in set(after):
        frame, version = re.fullmatch(r"(\d+)/(\d+)", name).groups()  # type: ignore[union-attr]
        assert f"{frame}/{max(int(version) - 1, 0)}" in after


def test_own_code_runs_alike_and_equals_nothing_compiled() -> None:
    def add(a: int, *, b: int = 2) -> int:
        return a + b + offset

    offset = 3
    copy = own_code(add)
    assert copy(1) == add(1) == 6
    assert copy.__code__ is not add.__code__  # type: ignore[attr-defined]
    block = Block()
    assert own_code(block.forward).__self__ is block  # type: ignore[attr-defined]


def test_a_model_of_a_shared_class_is_refused() -> None:
    loop = tiny.WithoutWorkers(
        tiny.spec(lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 5))),
        "infer", 4, torch.device("cpu"), secret="s", seed=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="class of its own"):
        compile_network(loop)
    loop.close()


def test_models_to_compile_are_of_the_zoo() -> None:
    assert set(MODELS) <= set(ZOO.names())
