"""What is left of a trace without its labels, against its clean twin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from test_labelling import CONSEQUENCES, MAIN, ON, ROWS, by_hand

from torchtraceap.collect.labelling import Armed, label, strip
from torchtraceap.collect.loop import Placement
from torchtraceap.collect.twins import Difference, difference, steps_without
from torchtraceap.dataset.kineto import read_trace
from torchtraceap.labels.markers import PREFIX, Marker, marker_name, parse_marker

DATA = Path(__file__).parent / "data" / "h200"


def test_each_step_is_compared_with_the_clean_step_most_like_it():
    clean = [Counter(mul=2, add=1), Counter(mul=5)]
    rest = [Counter(mul=5, item=1), Counter(mul=2), Counter(mul=2, add=1)]
    assert difference(rest, clean) == Difference(extra=1, missing=1, names={"add": -1, "item": 1})
    assert difference([], clean) == Difference(0, 0, {})


def test_what_differs_most_is_kept_by_name():
    step = Counter({f"op{i}": i for i in range(1, 20)})
    found = difference([step, step], [Counter()])
    assert found.extra == 2 * sum(range(1, 20))
    assert list(found.names.items())[:2] == [("op19", 38), ("op18", 36)]
    assert len(found.names) == 8


LEFT = Counter({"aten::conv": 1, "aten::relu": 1, "aten::tanh": 1, "ReluBackward0": 1})
"""Of step 0 by hand: relu is at a place that does not act, tanh below a stranger's marker."""
ACTING = Placement(5, [], frozenset({0}))


def test_labels_acting_places_and_runtime_calls_are_left_out():
    off = marker_name("s", Marker(5, 0, False))
    twin = by_hand([(MAIN, off, *row[2:]) if row[1] == ON else row for row in ROWS])
    _, segments = label(by_hand(), "s", {5: Armed(0, "marker+backward")})
    for trace, found in ((by_hand(), segments), (by_hand(), []), (twin, [])):
        rest = steps_without(trace, "s", [(ACTING, "marker+backward")], found)
        assert rest == [LEFT, Counter({"aten::conv": 1})]
    assert steps_without(by_hand(), "s", [], segments) == [LEFT, Counter({"aten::conv": 1})]


def test_backward_that_has_no_label_is_extra():
    _, segments = label(by_hand(), "s", {5: Armed(0, "marker")})
    rest = steps_without(by_hand(), "s", [(ACTING, "marker")], segments)
    assert difference(rest[:1], [LEFT]) == Difference(extra=1, missing=0, names={"CloneBackward0": 1})


def test_a_selector_is_left_out_by_its_segments():
    clean = by_hand([CONSEQUENCES[0], CONSEQUENCES[1], (*CONSEQUENCES[3][:5], 0, -1, -1), CONSEQUENCES[6]])
    trace = by_hand(CONSEQUENCES)
    selector = Armed(0, "selector", lambda name: "add" in name)
    _, segments = label(trace, "s", {3: selector}, strip(clean))
    places = [(Placement(3, [], frozenset({0})), "selector")]
    rest = steps_without(trace, "s", places, segments)
    assert difference(rest, steps_without(clean, "s", places, [])) == Difference(1, 0, {"aten::conv": 1})


@pytest.mark.parametrize(
    ("name", "clean", "mechanism", "index", "expected"),
    [
        ("dtype_ping_pong_train", "dtype_ping_pong_train_clean", "marker+backward", 0, Difference(0, 0, {})),
        ("host_sync_infer", "infer_clean", "marker", 1, Difference(0, 0, {})),
        # Its batch comes from a loader without pinned memory: unpacked on the main thread, outside of the
        # copy that the label is about.
        (
            "pageable_h2d_infer", "infer_clean", "marker", 0,
            Difference(12, 0, {"aten::empty": 6, "aten::set_": 6}),
        ),
    ],
)  # fmt: skip
def test_recorded_traces_and_their_twins(name, clean, mechanism, index, expected):
    raw, twin = (read_trace(DATA / f"{one}.json.gz") for one in (name, clean))
    secret = next(op.name for op in raw.ops if op.name.startswith(PREFIX)).removeprefix(PREFIX).split("/")[0]
    _, segments = label(raw, secret, {index: Armed(0, mechanism)})
    on = [m for op in raw.ops if (m := parse_marker(secret, op.name)) and m.on]
    places = [(Placement(index, [], frozenset(m.site for m in on)), mechanism)]
    rest, clean_rest = steps_without(raw, secret, places, segments), steps_without(twin, secret, places, [])
    assert min(map(len, rest)) > 5
    assert difference(rest, clean_rest) == expected
