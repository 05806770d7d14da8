"""The leak audit: it finds leaks that were put in, passes what has none, and leaves no loop changed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
import torch
from traces import random_record

from torchtraceap.cli import main
from torchtraceap.collect import audit as gathering
from torchtraceap.collect.audit import (
    PLACEMENTS,
    Taken,
    Workload,
    empty_placements,
    marks_of,
    write_examples,
)
from torchtraceap.collect.labelling import strip
from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.dataset import sites
from torchtraceap.dataset.parquet import read_table, write_traces
from torchtraceap.dataset.trace import Events, Lane, Op, Trace
from torchtraceap.eval import audit
from torchtraceap.labels.markers import Marker, marker_name
from torchtraceap.labels.pattern import PATTERNS, FunctionSite, ModuleSite, StageSite

SECRET = "s"
PLACES = 16
FAMILIES = 8
CPU = torch.device("cpu")


# -- made-up profiles -----------------------------------------------------------------------------------


class Clock:
    """Grows the events of one thread in order; ``events`` holds name, start, duration, parent, forward."""

    def __init__(self, rng: random.Random, speed: float) -> None:
        self.rng, self.speed, self.now = rng, speed, 0
        self.events: list[list[Any]] = []
        self.around: list[int] = []

    def wait(self, ns: float) -> None:
        self.now += int(ns * self.speed * self.rng.lognormvariate(0, 0.3))

    def open(self, name: str, forward: int = -1) -> int:
        self.events.append([name, self.now, 0, self.around[-1] if self.around else -1, forward])
        self.around.append(len(self.events) - 1)
        return self.around[-1]

    def close(self) -> None:
        event = self.events[self.around.pop()]
        event[2] = self.now - event[1]

    def trace(self) -> Trace:
        names = list(dict.fromkeys(event[0] for event in self.events))
        _, start, dur, parent, forward = zip(*self.events, strict=True)
        columns = {
            "lane": [0] * len(start),
            "op": [names.index(event[0]) for event in self.events],
            "start_ns": start, "dur_ns": dur, "parent": parent, "forward": forward,
            "launch": [-1] * len(start),
        }  # fmt: skip
        arrays = {key: np.array(column, dtype=Events.DTYPES[key]) for key, column in columns.items()}
        ops = [Op(name, "user_annotation" if "Step" in name else "cpu_op") for name in names]
        return Trace([Lane("cpu", "thread 0")], ops, Events(**arrays))


def profile(
    rng: random.Random,
    speed: float,
    acting: frozenset[int] | None,
    *,
    marker_ns: float = 0,
    on_ns: float = 0,
) -> Trace:
    """Three steps of ``PLACES`` modules, each with an op inside of an op; a place ahead of every module.

    Places are marked unless ``acting`` is None.
    """
    clock = Clock(rng, speed)
    for step in range(3):
        clock.open(f"ProfilerStep#{step}")
        clock.wait(3000)
        first = -1
        for place in range(PLACES):
            clock.wait(5000)
            if acting is not None:
                on = place in acting
                clock.open(marker_name(SECRET, Marker(0, place, on)))
                clock.now += int(marker_ns + on_ns * on)
                clock.close()
            op = clock.open(f"aten::outer{place % 7}", forward=first)
            first = op if first < 0 else first
            clock.wait(1000)
            clock.open(f"aten::inner{place % 3}")
            clock.wait(4000)
            clock.close()
            clock.wait(700)
            clock.close()
        clock.wait(2000)
        clock.close()
    return clock.trace()


def make_examples(folder: Path, *, renumbered: bool = True, **leak: float) -> list[Path]:
    paths = []
    for family in range(FAMILIES):
        rng = random.Random(family)
        marked = profile(rng, 1, frozenset())
        taken = []
        half = frozenset(rng.sample(range(PLACES), PLACES // 2))
        for acting in (half, frozenset(range(PLACES)) - half) * 2:
            for arm in sites.ARMS:
                # What a wrapper leaves is made like a marker and then stripped.
                raw = profile(rng, 1 + 0.4 * family, acting if arm == "wrapped" else None, **leak)
                published = strip(raw)
                if not renumbered:
                    kept = np.array([not op.name.startswith("ttap-") for op in raw.ops])[raw.events.op]
                    forward = raw.events.forward[kept]
                    published = replace(published, events=replace(published.events, forward=forward))
                taken.append(Taken(arm, published, frozenset((0, place) for place in acting)))
        paths.append(folder / f"family{family}.parquet")
        spec = replace(tiny.spec(), name=f"tiny/{family}", family=f"family{family}")
        write_examples(paths[-1], spec, "train", strip(marked), marks_of(marked, SECRET), taken)
    return paths


@pytest.fixture
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LEAST_EXAMPLES", FAMILIES * 4 * 3 * PLACES // 2)


@pytest.mark.parametrize(
    ("leak", "passes", "tells"),
    [
        ({}, {"off": True, "selected": True}, None),
        ({"marker_ns": 20_000}, {"off": False, "selected": True}, {"gap_in"}),
        ({"on_ns": 20_000}, {"off": True, "selected": False}, {"gap_in", "gap_in_elsewhere"}),
        ({"renumbered": False}, {"off": False, "selected": True}, {"forward_offset"}),
    ],
    ids=["nothing", "a gap", "a gap where it acts", "references not renumbered"],
)
@pytest.mark.usefixtures("few_examples")
def test_a_leak_is_found_and_named(
    leak: dict[str, Any], passes: dict[str, bool], tells: set[str] | None, tmp_path: Path
) -> None:
    arms = audit.audit_examples(make_examples(tmp_path, **leak))
    assert {arm.name: arm.passed for arm in arms} == passes
    assert arms[0].positives == arms[0].negatives  # though all places are bare in all bare profiles
    for arm in arms:
        if not arm.passed:
            assert arm.low > 0.6
            assert tells is not None
            assert tells & arm.telling.keys()
        else:
            assert arm.low <= arm.auroc <= arm.high <= audit.LIMIT


def test_too_few_examples_pass_nothing(tmp_path: Path) -> None:
    for arm in audit.audit_examples(make_examples(tmp_path)[:1]):
        assert not arm.passed
        assert "1000 examples" in arm.reason


def test_groups_count_equally_and_those_of_one_class_not_at_all() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.9, 0.1, 7.0])
    label = np.array([False, True, False, True, False, True, True])
    group = np.array([0, 0, 1, 1, 2, 2, 3])
    value, low, high = audit.grouped_auroc(scores, label, group, seed=0)
    assert value == pytest.approx((1 + 0.5 + 0) / 3)
    assert low < value < high


# -- places ---------------------------------------------------------------------------------------------


def test_a_place_is_found_again_in_a_trace_without_markers() -> None:
    rng = random.Random(0)
    raw = profile(rng, 1, frozenset(), marker_ns=500)
    marked, bare = strip(raw), profile(rng, 1, None)
    where = [sorted(here) for here in marks_of(raw, SECRET)]
    assert [len(here) for here in where] == [PLACES] * 3
    for trace in (marked, bare):
        steps = sites.steps(trace)
        assert sites.sequence(trace, steps[0]) == sites.sequence(bare, sites.steps(bare)[2])
        columns = sites.describe(trace, steps, where)
        assert set(columns["after"]) == {f"aten::outer{i}<" for i in range(7)}
        assert columns["before"][0] == "ProfilerStep#0<"
        start = {int(i): trace.events.start_ns[i] for i in range(len(trace))}
        second = steps[0].event[where[0][1].enter]
        ahead = int(steps[0].event[where[0][1].enter - 1])
        gap = start[int(second)] - trace.events.end_ns[ahead]
        assert columns["gap_in"][1] == pytest.approx(np.log2(gap + 100))
        assert (columns["depth"] == 1).all()
        assert (columns["empty"] == 1).all()


def test_what_a_marker_encloses_lies_between_the_ends_of_its_place() -> None:
    clock = Clock(random.Random(0), 1)
    for name in ("ProfilerStep#0", marker_name(SECRET, Marker(0, 0, True)), "aten::a"):
        clock.open(name)
        clock.wait(1000)
    for _ in range(3):
        clock.close()
        clock.wait(1000)
    (here,) = marks_of(clock.trace(), SECRET)
    assert here == {sites.Place(1, 3): {(0, 0)}}


def test_sets_of_examples_leave_out_what_is_equal_to_no_marked_step(tmp_path: Path) -> None:
    rng = random.Random(0)
    raw = profile(rng, 1, frozenset())
    other = replace(strip(raw), ops=[replace_name(op) for op in strip(raw).ops])
    nothing: frozenset[Any] = frozenset()
    taken = [Taken("wrapped", strip(raw), nothing), Taken("bare", other, nothing)]
    out = tmp_path / "a.parquet"
    gathered = write_examples(out, tiny.spec(), "train", strip(raw), marks_of(raw, SECRET), taken)
    assert (gathered.wrapped, gathered.bare, gathered.unmatched_steps) == (3 * PLACES, 0, 3)


def test_candidates_that_share_a_place_say_nothing_of_it_unless_they_agree(tmp_path: Path) -> None:
    rng = random.Random(0)
    raw = profile(rng, 1, frozenset())
    marks = marks_of(raw, SECRET)
    for here in marks:
        for place, candidates in here.items():
            candidates.add((1, place.enter % 2))
    acting = frozenset({(0, 0), (0, 1), (1, 0)})
    out = tmp_path / "a.parquet"
    write_examples(out, tiny.spec(), "train", strip(raw), marks, [Taken("wrapped", strip(raw), acting)])
    first = read_table(out, sites.EXAMPLES).to_pylist()[:PLACES]
    for number, row in enumerate(first):
        both = {number < 2, row["enter"] % 2 == 0}
        assert row["selected"] == (int(both.pop()) if len(both) == 1 else -1)


def replace_name(op: Op) -> Op:
    return Op(op.name.replace("outer0", "another"), op.category)


# -- the loop -------------------------------------------------------------------------------------------


def make_loop(mode: Any = "train") -> TrainingLoop:
    return tiny.WithoutWorkers(tiny.spec(), mode, 4, CPU, secret=SECRET, seed=1)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_empty_placements_change_nothing(mode: Any) -> None:
    plain, loop = make_loop(mode), make_loop(mode)
    empty_placements(plain, random.Random(0))  # the search for places takes batches
    placements = empty_placements(loop, random.Random(0))
    assert len(placements) == PLACEMENTS
    for placement in placements:
        loop.install(placement)
        placement.acting = frozenset(range(len(placement.sites)))
        placement.armed = True
    for _ in range(2):
        torch.manual_seed(0)
        expected = plain.step()
        torch.manual_seed(0)
        found = loop.step()
        torch.testing.assert_close(found.output, expected.output, rtol=0, atol=0)
    torch.testing.assert_close(loop.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_every_kind_of_place_in_the_catalogue_can_be_emptied() -> None:
    def place(site: type, where: str) -> Any:
        call = make_loop("infer").module_calls()[0]
        if site is StageSite:
            return StageSite("forward", lambda *_: pytest.fail("the real body ran"), where)  # type: ignore[arg-type]
        return ModuleSite(call, lambda *_: pytest.fail("the real body ran"), where)  # type: ignore[arg-type]

    state, x = object(), torch.ones(1)
    marked: list[bool] = []

    class Mark:
        def __enter__(self) -> None:
            marked.append(True)

        def __exit__(self, *error: object) -> None: ...

    for kind in (StageSite, ModuleSite):
        first, second = (state, lambda s: (s, "ran")) if kind is StageSite else (lambda v: (v, "ran"), x)
        value = state if kind is StageSite else x
        assert gathering._emptied(place(kind, "around")).body(first, second) == (value, "ran")
        assert gathering._emptied(place(kind, "inside")).body(first, second, Mark) == (value, "ran")
        assert gathering._emptied(place(kind, "after")).body(x) is x
        assert gathering._emptied(place(kind, "before")).body(x) is x
    assert marked == [True, True]
    function: Any = FunctionSite(call=None, body=lambda *_: pytest.fail("the real body ran"))  # type: ignore[arg-type]
    assert gathering._emptied(function).body(lambda *a, **k: (a, k), 1, b=2) == ((1,), {"b": 2})


def test_a_bare_loop_has_nothing_of_the_placements() -> None:
    loop = make_loop("infer")
    stages = dict(loop.stages)
    for placement in empty_placements(loop, random.Random(0)):
        placement.acting, placement.armed = frozenset(range(len(placement.sites))), True
        loop.install(placement)
    loop.step()
    wrapped = {m for m in loop.model.modules() if "forward" in m.__dict__}
    assert loop.stages != stages or wrapped
    with gathering._bare(loop):
        loop.step()
        assert loop.stages == stages
        assert not any("forward" in m.__dict__ for m in loop.model.modules())
    loop.step()
    assert {m for m in loop.model.modules() if "forward" in m.__dict__} == wrapped


@pytest.mark.usefixtures("one_thread")
def test_gathering_from_a_loop(tmp_path: Path) -> None:
    out = tmp_path / "tiny.parquet"
    workload = Workload("tiny/net", "infer", 4, seed=3, profiles=1)
    gathered = gathering._gather(make_loop("infer"), workload, SECRET, out)
    assert gathered.unmatched_steps == 0
    assert gathered.wrapped == gathered.bare > 0
    rows = read_table(out, sites.EXAMPLES).to_pylist()
    keys = [{(r["step"], r["enter"], r["leave"]) for r in rows if r["arm"] == arm} for arm in sites.ARMS]
    assert keys[0] == keys[1]
    assert {r["selected"] for r in rows if r["arm"] == "bare"} == {-1}
    assert {0, 1} <= {r["selected"] for r in rows if r["arm"] == "wrapped"}
    assert "ttap-" not in out.read_bytes().decode("latin-1")


GATHERER = """
import sys
from pathlib import Path
from torchtraceap.collect.audit import Workload, gather
endless = Workload("timm/resnet18", "infer", 1, seed=0, profiles=100_000)
gather([endless], Path(sys.argv[1]), device="cpu", time_limit=600.0, on_event=print)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_workload_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", GATHERER, str(tmp_path)]) as command:
        here = psutil.Process(command.pid)
        wait_until(lambda: bool(here.children()))
        (workload,) = here.children()
        command.kill()
    wait_until(lambda: not workload.is_running() or workload.status() == psutil.STATUS_ZOMBIE)
    assert list(tmp_path.iterdir()) == []


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0  # on a busy machine
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


# -- metadata and the command ---------------------------------------------------------------------------


def make_dataset(folder: Path, records: int) -> Path:
    made = [random_record(seed, events=60 + 40 * (seed % 2), state=("costly", "benign")[seed % 2])
            for seed in range(records)]  # fmt: skip
    write_traces(folder / "data" / "traces-test-00000-of-00001.parquet", made)
    return folder


def test_counts_tell_what_only_they_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "RESAMPLES", 100)
    rows = audit.audit_metadata(make_dataset(tmp_path, 40))
    by = {(row.question, row.given): row for row in rows}
    assert by["bad", "counts and lengths"].auroc > 0.95  # bad traces have 60 events and good ones 100
    assert by["bad", "counts and lengths"].positives == by["bad", "counts and lengths"].negatives == 20


@pytest.mark.usefixtures("few_examples")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = make_dataset(tmp_path / "data", 4)
    for name, leak, code in (("clean", 0, 0), ("leaky", 20_000, 1)):
        (tmp_path / name).mkdir()
        make_examples(tmp_path / name, marker_ns=leak)
        assert main(["audit", str(dataset), "--examples", str(tmp_path / name), "--json"]) == code
        shown = json.loads(capsys.readouterr().out)
        assert shown["passed"] is (code == 0)
        assert [arm["name"] for arm in shown["arms"]] == ["off", "selected"]
    assert main(["audit", str(dataset)]) == 1  # what was not audited has not passed
    assert "collect-audit" in capsys.readouterr().err
    assert main(["audit", str(dataset), "--examples", str(tmp_path / "nothing")]) == 2
    assert "collect-audit" in capsys.readouterr().err


def test_command_to_gather_wants_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["collect-audit", "-o", str(tmp_path / "a")]) == 2
    assert main(["collect-audit", "-o", str(tmp_path / "a"), "--model", "no/such"]) == 2
    assert not (tmp_path / "a").exists()
    capsys.readouterr()


def test_catalogue_has_places_to_empty() -> None:
    assert any(not variant.starts_workers for pattern in PATTERNS for variant in pattern.variants)
