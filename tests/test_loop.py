"""The reference loop: its stages, the places it offers, and how bodies are put there."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from torchtraceap.collect import loop as module_under_test
from torchtraceap.collect.loop import DISTINCT_BATCHES, Placement, TrainingLoop
from torchtraceap.labels.markers import Marker, marker_name
from torchtraceap.labels.pattern import STAGES, Mode, ModuleCall, ModuleSite, Site, StageSite, State

CPU = torch.device("cpu")


def make_loop(mode: Mode = "train", build: Callable[[], nn.Module] = tiny.build) -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(build), mode, 4, CPU, secret="s", seed=1)


def place(loop: TrainingLoop, *sites: Site, index: int = 0, **settings: Any) -> Placement:
    """Install a placement all of whose sites act once it is armed."""
    placement = Placement(index, list(sites), frozenset(range(len(sites))), **settings)
    loop.install(placement)
    return placement


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order; markers are recorded as ``+name`` and ``-name`` in place of annotations."""
    happened: list[str] = []

    @contextmanager
    def annotation(name: str) -> Iterator[None]:
        happened.append(f"+{name}")
        yield
        happened.append(f"-{name}")

    monkeypatch.setattr(module_under_test, "_RecordFunctionFast", annotation)
    return happened


def mark(on: bool, placement: int = 0, site: int = 0) -> str:
    return marker_name("s", Marker(placement, site, on))


# -- stages -------------------------------------------------------------------------------------------


def test_stages_run_in_order_on_one_state() -> None:
    loop = make_loop()
    happened: list[str] = []
    states: list[State] = []

    def watched(stage: str, original: Callable[[State], None]) -> Callable[[State], None]:
        def run(state: State) -> None:
            happened.append(stage)
            states.append(state)
            original(state)

        return run

    for stage in STAGES:
        loop.stages[stage] = watched(stage, loop.stages[stage])
    result = loop.step()
    assert happened == ["data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "logging"]
    assert all(state is result for state in states)
    assert result.output.shape == (4, 5)
    assert result.loss.shape == ()


def test_training_changes_parameters_and_frees_gradients() -> None:
    loop = make_loop()
    before = [p.clone() for p in loop.model.parameters()]
    losses = [loop.step().loss.detach() for _ in range(3)]
    assert all(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert all(p.grad is None for p in loop.model.parameters())
    assert torch.equal(loop._loss_sum, losses[0] + losses[1] + losses[2])


def test_inference_changes_nothing_and_tracks_no_gradients() -> None:
    loop = make_loop("infer")
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    state = loop.step()
    assert state.output.is_inference()
    assert state.loss is None
    assert loop.optimizer is None
    assert not loop.model.training
    torch.testing.assert_close(loop.model.state_dict(), before, rtol=0, atol=0)


def test_equal_seeds_give_equal_steps() -> None:
    losses = []
    for _ in range(2):
        loop = make_loop()
        losses.append([loop.step().loss.item() for _ in range(2)])
    assert losses[0] == losses[1]


def test_batches_differ_and_come_round() -> None:
    loop = make_loop("infer")
    images = [loop.step().host["image"] for _ in range(2 * DISTINCT_BATCHES)]
    for i, image in enumerate(images):
        for other in images[:i]:
            assert torch.equal(image, other) == (image.data_ptr() == other.data_ptr())
    assert len({image.data_ptr() for image in images}) == DISTINCT_BATCHES


def test_another_loader_gives_the_same_batches_by_the_sample() -> None:
    loop = make_loop()
    plain = loop.make_loader()
    seen: list[torch.Size] = []

    def per_sample(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(sample["image"].shape)
        return sample

    by_sample = loop.make_loader(per_sample=per_sample)
    for _ in range(3):
        one, other = next(plain), next(by_sample)
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])
    assert seen == [(3, 6, 6)] * 12


def test_close_ends_the_workers() -> None:
    loop = TrainingLoop(tiny.spec(), "infer", 4, CPU, secret="s", seed=1)
    loop.step()
    (worker,) = loop._iterators[0]._workers
    assert worker.is_alive()
    loop.close()
    assert not worker.is_alive()


# -- places -------------------------------------------------------------------------------------------


def names(loop: TrainingLoop) -> list[str]:
    return [call.name for call in loop.module_calls()]


def call(loop: TrainingLoop, name: str) -> ModuleCall:
    (found,) = [one for one in loop.module_calls() if one.name == name]
    return found


def test_module_calls_in_order_without_those_called_twice() -> None:
    loop = make_loop()
    assert names(loop) == ["0", "1", "2", "3.0", "3.1", "3.2", "3", "4", "5", "6", "7"]
    block = call(loop, "3")
    assert block.module is loop.model[3]
    assert (block.in_shape, block.out_shape) == ((4, 8, 6, 6), (4, 8, 6, 6))
    assert block.dtype == torch.float32
    assert block.leaves == 3
    assert call(loop, "7").out_shape == (4, 5)
    assert loop.module_calls() is loop.module_calls()  # one dry run


def test_stateful_modules_depend_on_the_mode() -> None:
    assert [one.name for one in make_loop("train").module_calls() if one.stateful] == ["1", "6"]
    assert [one.name for one in make_loop("infer").module_calls() if one.stateful] == []


class Counts(nn.Module):
    """Updates a buffer that no library knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 1


class DrawsInside(nn.Module):
    """Random numbers without a module that says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        Counts,
        DrawsInside,
        lambda: StochasticDepth(0.5, "row"),
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        lambda: nn.Sequential(nn.Identity(), nn.Dropout2d(0.3)),
    ],
)
def test_batch_statistics_random_numbers_and_buffers_are_state(make: Callable[[], nn.Module]) -> None:
    loop = make_loop(build=lambda: nn.Sequential(make(), nn.Flatten(), nn.Linear(108, 5)))
    assert call(loop, "0").stateful
    assert not call(loop, "2").stateful


def test_batch_statistics_without_running_ones_are_state_in_inference_too() -> None:
    def build() -> nn.Module:
        norm = nn.BatchNorm2d(3, track_running_stats=False)
        return nn.Sequential(norm, nn.Flatten(), nn.Linear(108, 5))

    assert call(make_loop("infer", build), "0").stateful


class OddCalls(nn.Module):
    """Calls that are no candidates: by keyword, with integers, with two inputs, with a tuple for output."""

    def __init__(self) -> None:
        super().__init__()
        self.by_keyword = nn.Linear(108, 5)
        self.embedding = nn.Embedding(3, 5)
        self.bilinear = nn.Bilinear(5, 5, 5)
        self.recurrent = nn.GRU(5, 5)
        self.never = nn.Linear(1, 1)
        self.good = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.by_keyword(input=x.flatten(1))
        y = y + self.embedding(torch.zeros(4, dtype=torch.long))
        y = self.bilinear(y, y)
        return self.good(self.recurrent(y)[0])


def test_calls_that_a_body_could_not_stand_for_are_left_out() -> None:
    assert names(make_loop(build=OddCalls)) == ["good"]


class Moves(nn.Module):
    """Puts another tensor in a buffer's place, and makes a new buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor
        self.register_buffer("cache", torch.zeros(2))
        self.linear = nn.Linear(108, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.ones(len(x))
        self.register_buffer("late", torch.ones(3), persistent=False)
        return self.linear(x.flatten(1))


def counts_first() -> nn.Module:
    return nn.Sequential(Counts(), nn.Flatten(), nn.Linear(108, 5))


@pytest.mark.parametrize("build", [tiny.build, Moves, counts_first])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_dry_run_leaves_no_trace(build: Callable[[], nn.Module], mode: Mode) -> None:
    loop = make_loop(mode, build)
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    tensors = [value.data_ptr() for value in loop.model.state_dict().values()]
    random = torch.get_rng_state()
    assert loop.module_calls()
    torch.testing.assert_close(loop.model.state_dict(), before, rtol=0, atol=0)
    assert [value.data_ptr() for value in loop.model.state_dict().values()] == tensors
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())
    loop.step()


def test_a_failing_dry_run_cleans_up_too() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    loop = make_loop(build=lambda: nn.Sequential(nn.BatchNorm2d(3), Fails()))
    with pytest.raises(ZeroDivisionError):
        loop.module_calls()
    assert loop.model[0].num_batches_tracked == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())


# -- placements ---------------------------------------------------------------------------------------


def every_site(loop: TrainingLoop) -> list[Site]:
    """A body at each place that would ruin the step, were it to act."""

    def ruin(*_: Any) -> Any:
        raise AssertionError("a body acted")

    wheres = ("before", "around", "after")
    stages = [StageSite(stage, ruin, where, data=ruin) for stage in STAGES for where in wheres]
    return [*stages, *(ModuleSite(one, ruin, where) for one in loop.module_calls() for where in wheres)]


@pytest.mark.parametrize("marking", [False, True])
def test_a_placement_that_is_off_changes_nothing(marking: bool) -> None:
    clean, marked = make_loop(), make_loop()
    marked.module_calls()
    next(clean._batch_iterator)  # the one that the dry run took
    place(marked, *every_site(marked))
    marked.marking = marking
    for _ in range(2):
        torch.manual_seed(3)
        a = clean.step()
        torch.manual_seed(3)
        b = marked.step()
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.loss, b.loss)
    torch.testing.assert_close(marked.model.state_dict(), clean.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("before", ["+on", "body", "-on", "work"]),
        ("around", ["+on", "body", "work", "-on"]),
        ("after", ["work", "+on", "body", "-on"]),
    ],
)
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("kind", ["stage", "module"])
def test_what_a_marker_covers(
    where: Any, expected: list[str], armed: bool, kind: str, record: list[str]
) -> None:
    class Work(nn.Identity):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            record.append("work")
            return input

    loop = make_loop("infer", lambda: nn.Sequential(Work(), nn.Flatten(), nn.Linear(108, 5)))
    calls = loop.module_calls()
    record.clear()

    def stage_body(state: State, *original: Callable[[State], None]) -> None:
        record.append("body")
        for run in original:
            run(state)

    def module_body(*args: Any) -> Any:
        record.append("body")
        *original, x = args
        return original[0](x) if original else x

    site = (
        StageSite("forward", stage_body, where)
        if kind == "stage"
        else ModuleSite(calls[0], module_body, where)
    )
    place(loop, site, armed=armed)
    loop.marking = True
    loop.step()
    state = "on" if armed else "off"
    wanted = [word.replace("on", state) if word[0] in "+-" else word for word in expected]
    found = [word.replace(mark(True), "on").replace(mark(False), "off") for word in record]
    assert found == [word for word in wanted if armed or word != "body"]


def test_bodies_change_the_value_where_they_stand() -> None:
    def shifted(where: Any, body: Callable[..., torch.Tensor]) -> torch.Tensor:
        loop = make_loop("infer", lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 5)))
        linear = loop.module_calls()[1]
        place(loop, ModuleSite(linear, body, where), armed=True)
        return loop.step().output

    plain = shifted("after", lambda y: y)
    assert torch.equal(shifted("after", lambda y: y + 1), plain + 1)
    assert torch.equal(shifted("around", lambda original, x: original(x) * 2), plain * 2)
    zero = shifted("before", lambda x: x * 0)  # of every sample only the bias is left
    assert torch.equal(zero, zero[:1].expand(4, 5))


def path(run: Any) -> Any:
    """What Python runs in ``run``: the code of its functions, with what these call; bodies by their form."""
    if isinstance(run, partial):
        return partial, path(run.func), [path(one) for one in run.args]
    if not inspect.isfunction(run):
        return type(run)
    held = [cell.cell_contents for cell in run.__closure__ or ()]
    if not held:
        return run.__code__.co_argcount
    return run.__code__, [path(one) for one in held if callable(one)]


@pytest.mark.parametrize("where", ["before", "around", "after"])
def test_a_place_runs_by_the_same_path_on_or_off(where: Any) -> None:
    loop = make_loop("infer")
    bodies: dict[str, tuple[Any, Any]] = {
        "around": (lambda state, original: original(state), lambda original, x: original(x)),
        "before": (lambda state: None, lambda x: x),
        "after": (lambda state: None, lambda x: x),
    }
    at_stage, at_module = bodies[where]
    module = loop.module_calls()[1]
    placement = place(loop, StageSite("forward", at_stage, where), ModuleSite(module, at_module, where))
    paths = []
    for placement.armed in (True, False):
        loop.step()
        paths.append((path(loop.stages["forward"]), path(module.module.__dict__["forward"])))
    assert paths[0] == paths[1]


def test_equal_steps_run_the_same_functions() -> None:
    loop = make_loop("infer")
    calls = loop.module_calls()
    sites: list[Site] = [ModuleSite(call, lambda y: y, "after") for call in calls]
    loop.install(Placement(0, sites, frozenset({1}), steps=frozenset({2}), armed=True))
    found = []
    for loop.profiled_step in (0, 1, 2, 0):
        loop.step()
        found.append([call.module.__dict__["forward"] for call in calls])
    assert found[0] == found[1] == found[3]
    assert all(a is not b for a, b in zip(found[0], found[2], strict=True))


def test_no_marker_outside_of_profiles(record: list[str]) -> None:
    loop = make_loop()
    place(loop, *every_site(loop))
    loop.step()
    assert record == []


def test_placements_at_one_module_nest(record: list[str]) -> None:
    loop = make_loop("infer", lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 5)))
    linear = loop.module_calls()[1]

    def body(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return original(x)

    place(loop, ModuleSite(linear, body), index=0, armed=True)
    place(loop, ModuleSite(linear, body), index=1)
    loop.marking = True
    loop.step()
    outer, inner = mark(False, placement=1), mark(True, placement=0)
    assert record == [f"+{outer}", f"+{inner}", f"-{inner}", f"-{outer}"]


def test_only_the_acting_sites_act() -> None:
    loop = make_loop("infer")
    acted: list[int] = []

    def site(number: int) -> StageSite:
        return StageSite("forward", lambda state: acted.append(number), "before")

    loop.install(Placement(0, [site(0), site(1), site(2)], frozenset({0, 2}), armed=True))
    loop.step()
    assert sorted(acted) == [0, 2]


def test_a_site_may_bring_its_own_batch(record: list[str]) -> None:
    loop = make_loop("infer")
    other = {"image": torch.zeros(4, 3, 6, 6), "label": torch.zeros(4, dtype=torch.long)}

    def bring(state: State, original: Callable[[State], None]) -> None:
        record.append("data")
        state.host = other

    def h2d(state: State, original: Callable[[State], None]) -> None:
        record.append("body")
        original(state)

    placement = place(loop, StageSite("h2d", h2d, data=bring))
    loop.marking = True
    assert loop.step().host is not other
    assert record == [f"+{mark(False)}", f"-{mark(False)}"]
    record.clear()
    placement.armed = True
    state = loop.step()
    assert state.host is other
    assert torch.equal(state.batch["image"], other["image"])
    on, off = f"+{mark(True)}", f"-{mark(True)}"
    assert record == [on, "data", off, on, "body", off]


def test_a_subset_of_the_profiled_steps() -> None:
    loop = make_loop("infer")
    acted: list[int | None] = []
    site = StageSite("data", lambda state: acted.append(loop.profiled_step), "after")
    placement = place(loop, site, armed=True, steps=frozenset({0, 2}))
    for loop.profiled_step in (None, 0, 1, 2, None):
        loop.step()
    assert acted == [None, 0, 2, None]  # it warms up, and is measured, in every step
    placement.armed = False
    for loop.profiled_step in (None, 0, 1, 2):
        loop.step()
    assert len(acted) == 4


# -- optimizers ---------------------------------------------------------------------------------------


def test_another_optimizer_has_the_same_parameters_and_settings() -> None:
    loop = make_loop()
    assert loop.optimizer is not None
    twin = loop.make_optimizer()
    assert type(twin) is torch.optim.AdamW
    assert twin is not loop.optimizer
    assert twin.defaults == loop.optimizer.defaults
    assert twin.defaults["fused"] is True
    mine, theirs = (opt.param_groups[0]["params"] for opt in (loop.optimizer, twin))
    assert all(a is b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_changes_to_the_optimizer(foreach: bool) -> None:
    loop = make_loop()
    changed = loop.make_optimizer(fused=False, foreach=foreach, lr=0.5)
    assert changed.defaults["fused"] is False
    assert changed.defaults["foreach"] is foreach
    assert changed.defaults["lr"] == 0.5
    loop.optimizer = changed
    before = [p.clone() for p in loop.model.parameters()]
    loop.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_inference_has_no_optimizer_to_repeat() -> None:
    with pytest.raises(ValueError, match="no optimizer"):
        make_loop("infer").make_optimizer()


def test_a_loop_goes_when_nobody_holds_it() -> None:
    loop = make_loop()
    place(loop, *every_site(loop))
    loop.step()
    gone = weakref.ref(loop.model)
    del loop
    gc.collect()
    assert gone() is None
