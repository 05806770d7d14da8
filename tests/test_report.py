"""Pictures and pages: sizes and places worked out by hand, and nothing hostile gets through."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from traces import random_record

from torchtraceap.dataset.trace import Events, Lane, Op, Trace, TraceRecord
from torchtraceap.errors import UserError
from torchtraceap.eval import report
from torchtraceap.eval.detector import DETECTORS, TraceView
from torchtraceap.eval.diagnose import diagnose, to_text
from torchtraceap.eval.leaderboard import ALL_COLUMNS
from torchtraceap.eval.markup import escaped, visible
from torchtraceap.eval.report import diagnosis_html, write_diagnosis, write_report
from torchtraceap.eval.scorer import Score, ScoreResult
from torchtraceap.eval.submission import Detection, SubmissionCard
from torchtraceap.eval.timeline import GUTTER, RIGHT, timeline_svg
from torchtraceap.labels.types import Instance, Segment

HOSTILE = [
    "</script><b>x</b>",
    '" onload="x',
    "nul\x00",
    "\u202egnp.exe",
    "[bold]x[/bold]",
    "\ud800",
    "a" * 5000,
]
SVG = "{http://www.w3.org/2000/svg}"


def flat_trace(rows: list[tuple[str, int, int]], category: str = "cpu_op") -> Trace:
    """Events of one thread that do not overlap: name, start, duration."""
    count = len(rows)
    columns = {
        "lane": [0] * count, "op": range(count), "start_ns": [row[1] for row in rows],
        "dur_ns": [row[2] for row in rows], "parent": [-1] * count, "launch": [-1] * count,
        "forward": [-1] * count,
    }  # fmt: skip
    events = Events(**{name: np.array(columns[name], dtype) for name, dtype in Events.DTYPES.items()})
    return Trace([Lane("cpu", "thread 0")], [Op(row[0], category) for row in rows], events)


def hostile_record() -> TraceRecord:
    trace = flat_trace([(name, 1000 * i, 900) for i, name in enumerate(HOSTILE)])
    instance = Instance(
        pattern=HOSTILE[0],
        variant=HOSTILE[1],
        scope="local",
        source="injected",
        state="costly",
        every_step=True,
        sites=1,
    )
    segment = Segment(
        instance=0, lane=0, lane_class="cpu", step=-1, start_ns=0, end_ns=900, first_event=0, event_count=1
    )
    meta = {"trace_id": HOSTILE[0], "model": HOSTILE[1], "task": HOSTILE[3]}
    return TraceRecord(trace, meta, [instance], [segment])


HOSTILE_FOUND = [Detection(HOSTILE[0], name, "cpu", 2000, 3000, 0.5) for name in HOSTILE]


def rects(svg: str) -> list[tuple[str, float, float, str]]:
    """Class, left edge, width and tooltip of each rectangle that has one."""
    return [
        (rect.attrib["class"], float(rect.attrib["x"]), float(rect.attrib["width"]), title.text or "")
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")
        for title in rect.iter(f"{SVG}title")
    ]


def test_text_loses_what_cannot_or_must_not_be_shown():
    assert visible("a\x00b\x1bc\u202ed\ud800") == "a\ufffdb\ufffdc\ufffdd\ufffd"
    assert visible("abcdef", 4) == "abc…"
    assert escaped('<a href="x">&') == "&lt;a href=&quot;x&quot;&gt;&amp;"
    assert visible("aten::名前") == "aten::名前"
    assert visible("e" + 50 * "\u0301" + "x" + 2 * "\u0300") == "e" + 4 * "\u0301" + "x" + 2 * "\u0300"


def test_a_picture_puts_events_segments_and_detections_where_they_are():
    trace = flat_trace([("aten::conv2d", 0, 400_000), ("aten::relu", 500_000, 500_000)])
    instance = Instance(
        pattern="host_sync",
        variant="item",
        scope="local",
        source="injected",
        state="benign",
        every_step=True,
        sites=1,
    )
    segment = Segment(
        instance=0,
        lane=0,
        lane_class="cpu",
        step=-1,
        start_ns=500_000,
        end_ns=750_000,
        first_event=1,
        event_count=1,
    )
    found = Detection("t", "host_sync", "cpu", 250_000, 500_000, 0.25)
    plot = 1020  # of a millisecond
    svg = timeline_svg(trace, [segment], [instance], [found], width=GUTTER + plot + RIGHT)
    assert rects(svg) == [
        ("found", GUTTER + plot / 4, plot / 4, "detected host_sync, score 0.25"),
        ("op", GUTTER, 407.5, "aten::conv2d, 0.400 ms"),
        ("op", GUTTER + plot / 2, 509.5, "aten::relu, 0.500 ms"),
        ("truth benign", GUTTER + plot / 2, plot / 4, "host_sync · benign, 0.250 ms"),
    ]
    assert [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")].count("host_sync · benign") == 1


def test_a_stretch_shows_only_what_lies_in_it():
    trace = flat_trace([("aten::conv2d", 0, 400_000), ("aten::relu", 500_000, 500_000)])
    found = [Detection("t", "host_sync", "cpu", 0, 100_000, 0.25)]
    svg = timeline_svg(trace, detections=found, start_ns=600_000, end_ns=800_000, width=GUTTER + 1020 + RIGHT)
    assert rects(svg) == [("op", GUTTER, 1019.5, "aten::relu, 0.500 ms")]


@pytest.mark.parametrize("bounds", [(5, 5), (10, 5)])
def test_an_empty_stretch_is_refused(bounds):
    with pytest.raises(ValueError, match="nothing lies between"):
        timeline_svg(flat_trace([("aten::relu", 0, 100)]), start_ns=bounds[0], end_ns=bounds[1])


def test_an_empty_trace_can_be_drawn():
    assert rects(timeline_svg(flat_trace([]))) == []


def test_events_of_a_pixel_are_merged_and_the_longest_keep_their_tooltip():
    short = [(f"aten::op{i}", 10 * i, 5) for i in range(50_000)]
    svg = timeline_svg(flat_trace([*short, ("aten::long", 500_000, 100_000)]))
    assert [title for *_, title in rects(svg)] == ["aten::long, 0.100 ms"]
    assert len(svg) < 10_000


def test_the_size_of_a_picture_hardly_depends_on_the_number_of_events():
    record = random_record(1, events=30_000)
    found = DETECTORS["random"].detect(TraceView.of(record))
    assert len(timeline_svg(record.trace, record.segments, record.instances, found)) < 200_000


@pytest.mark.parametrize("seed", range(6))
def test_every_picture_is_well_formed(seed):
    record = random_record(seed, gpu=seed % 2 == 0)
    found = DETECTORS["random"].detect(TraceView.of(record))
    ET.fromstring(timeline_svg(record.trace, record.segments, record.instances, found))


def test_hostile_names_stay_text_in_a_picture():
    record = hostile_record()
    root = ET.fromstring(timeline_svg(record.trace, record.segments, record.instances, HOSTILE_FOUND))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "style", "defs", "pattern", "path", "rect", "text", "title",
    }  # fmt: skip
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)
    titles = [title for *_, title in rects(ET.tostring(root, encoding="unicode"))]
    assert any("</script><b>x</b>" in title for title in titles)
    assert not re.search("[\x00\u202e\ud800]", "".join(titles))


class Page(HTMLParser):
    """The tags and the content of style and script elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {"style": [], "script": []}
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data):
        if self._inside in self.content:
            self.content[self._inside].append(data)

    def handle_endtag(self, tag):
        self._inside = ""


def check_page(html: str) -> None:
    """Only the page's own style and script, by their hashes, and nothing that loads."""
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"img", "iframe", "object", "embed", "link", "base", "form", "a", "use", "image"}
    (policy,) = [
        attrs["content"] for tag, attrs in page.tags if "content-security-policy" in str(attrs).lower()
    ]
    assert "default-src 'none'" in policy
    for kind in ("style", "script"):
        (content,) = ["".join(page.content[kind])]
        assert [tag for tag, _ in page.tags].count(kind) == 1
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for _, attrs in page.tags:
        assert not any(name.startswith("on") or name in ("style", "src", "href") for name in attrs)


def result(name: str, value: float) -> ScoreResult:
    return ScoreResult(
        card=SubmissionCard(name=name, version="1", description="d", threshold=0.5, trained_on="nothing"),
        scores={metric: Score(value, value - 0.05, value + 0.05) for metric in ALL_COLUMNS},
        without_ignoring={},
        classes={"local": ["host_sync"], "step": []},
        class_rule={},
        dropped={},
        counts={"traces": 3, "split_units": 2},
        provenance={"labels_sha256": "x", "split": "test", "seed": 0, "resamples": 1},
        samples={metric: np.array([value]) for metric in ALL_COLUMNS},
    )


def test_a_report_holds_scores_best_first_traces_detections_and_remedies(tmp_path):
    records = [random_record(seed, state="costly") for seed in (0, 1)]
    found = [Detection(records[0].trace_id, "pageable_h2d", "cpu", 0, 1_500_000, 0.75)]
    write_report(tmp_path / "r.html", records, found, [result("weak", 0.1), result("strong", 0.6)], "Title")
    html = (tmp_path / "r.html").read_text()
    check_page(html)
    assert html.index("strong 1") < html.index("weak 1")
    assert "0.600" in html
    assert "0.550 to 0.650" in html
    assert html.count('<details class="trace"') == 2
    assert all(record.trace_id in html for record in records)
    assert '<td class="n">1.500</td><td class="n">0.75</td>' in html
    assert "pin_memory=True" in html  # the remedy of what was detected
    assert "Detected pageable_h2d on the CPU at 0.000 ms, 1.500 ms long" in html


def test_hostile_names_stay_text_in_a_report(tmp_path):
    write_report(
        tmp_path / "r.html", [hostile_record()], HOSTILE_FOUND, [result("<b>x</b>", 0.5)], HOSTILE[0]
    )
    html = (tmp_path / "r.html").read_text()
    check_page(html)
    assert "<b>x</b>" not in html
    assert "&lt;b&gt;x&lt;/b&gt; 1" in html
    assert not re.search("[\x00\u202e]", html)


def test_a_detection_outside_of_the_trace_does_no_harm(tmp_path):
    record = random_record(0)
    far = [Detection(record.trace_id, "host_sync", "cpu", at, at + 5, 1.0) for at in (-(2**62), 2**61)]
    write_report(tmp_path / "r.html", [record], far)
    assert "Detected" not in (tmp_path / "r.html").read_text()


def test_a_report_that_grows_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_BYTES", 20_000)
    with pytest.raises(UserError, match="show fewer traces"):
        write_report(tmp_path / "r.html", [random_record(0)])
    assert list(tmp_path.iterdir()) == []


def kineto(tmp_path, step: str = "ProfilerStep#3"):
    """A file with a step of 10 ms that waits 2 ms for the loader and clones for 0.05 ms."""
    rows = [
        ("user_annotation", step, 0, 10_000),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 2_000),
        ("cpu_op", "aten::clone", 3_000, 50),
        ("cpu_op", "[bold]<b>x</b>", 4_000, 50),
    ]
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for cat, name, ts, dur in rows
    ]
    path = tmp_path / "[bold]t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_diagnosis_names_cause_cost_place_and_remedy(tmp_path):
    found = diagnose(kineto(tmp_path))
    assert [(cause.pattern, cause.sites) for cause in found.causes] == [
        ("dataloader_stall", 1),
        ("redundant_copy", 1),
    ]
    assert found.step_ms == pytest.approx(10)
    assert found.gpu_busy is None
    assert found.causes[0].lost_ms == pytest.approx(2)
    assert found.causes[0].share == pytest.approx(0.2)
    assert found.causes[0].places == (("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1),)
    assert [cause.pattern for cause in found.major] == ["dataloader_stall"]
    assert [cause.pattern for cause in found.minor] == ["redundant_copy"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(to_text(found))
    text = console.export_text()
    assert "[bold]t.json.gz" in text
    assert "about 2.00 ms a step (20%)" in text
    assert "num_workers" in text
    assert "Below 1 %: redundant_copy (0.5%)" in text


def test_a_diagnosis_page_is_as_safe_as_a_report(tmp_path):
    found = diagnose(kineto(tmp_path))
    check_page(diagnosis_html(found))
    write_diagnosis(tmp_path / "d.html", found)
    assert "about 2.00 ms a step (20%)" in (tmp_path / "d.html").read_text()


def test_without_steps_the_whole_trace_counts_and_the_reader_is_told(tmp_path):
    found = diagnose(kineto(tmp_path, step="my loop"))
    assert found.steps == 0
    assert {cause.pattern for cause in found.major} == {"dataloader_stall", "redundant_copy"}
    assert any("No ProfilerStep" in note for note in found.notes)


def test_a_trace_without_causes_says_so(tmp_path):
    found = diagnose(flat_trace([("ProfilerStep#0", 0, 1000)], "user_annotation"))
    assert found.causes == ()
    assert "No pattern costs 1 % of a step." in diagnosis_html(found)
