"""The catalogue as people read it: docs/patterns.md, and `traceap patterns show`."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path

import pytest

from torchtraceap.cli import main
from torchtraceap.labels import catalogue
from torchtraceap.labels.catalogue import GROUPS, OTHERS, group_of, grouped, needs, page
from torchtraceap.labels.pattern import PATTERNS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "patterns.md"
HOSTILE = 'x[0] = "\\n"  # [bold]not markup[/]\ny = x[::2]\\\n'


def test_every_pattern_has_one_group():
    placed = list(chain(*GROUPS.values()))
    assert sorted(placed) == PATTERNS.names()  # a new pattern goes into labels/catalogue.py


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_a_pattern_in_no_group_comes_last(monkeypatch):
    monkeypatch.setattr(catalogue, "GROUPS", {"First": ("host_sync", "not_written_yet")})
    (title, first), (others, rest) = grouped()
    assert (title, [one.id for one in first]) == ("First", ["host_sync"])
    assert (others, len(rest)) == (OTHERS, len(PATTERNS.names()) - 1)
    assert (group_of("host_sync"), group_of("redundant_copy")) == ("First", OTHERS)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("redundant_copy", "nothing"),
        ("host_sync", "GPU"),
        ("unfused_optimizer", "training"),
        ("tiny_buckets", "several ranks, training"),
    ],
)
def test_what_a_pattern_needs(pattern, words):
    assert needs(PATTERNS[pattern]) == words


def test_the_page_has_all_facts_and_survives_odd_text(monkeypatch):
    one = PATTERNS["redundant_copy"]
    odd = dataclasses.replace(one, belongs="a | b\nc", remedy=HOSTILE)
    monkeypatch.setitem(PATTERNS._entries, "redundant_copy", odd)
    text = page()
    assert "| belongs | a \\| b c |" in text
    assert f"```python\n{HOSTILE}```" in text
    section = text.split("### redundant_copy\n")[1].split("\n### ")[0]
    for value in (one.title, one.definition, *one.references, *(v.summary for v in one.variants)):
        assert value in section
    assert section.count("(held out)") == 1


@pytest.mark.parametrize("pattern", PATTERNS.names())
def test_show_prints_every_fact_as_it_is(capsys, pattern):
    one = PATTERNS[pattern]
    assert main(["patterns", "show", pattern]) == 0
    out = capsys.readouterr().out
    plain = " ".join(out.split())
    facts = [one.title, one.definition, one.scope, one.mechanism, one.precondition, one.belongs, needs(one)]
    facts += [group_of(pattern), *one.references, *sorted(one.lanes)]
    facts += [text for v in (*one.variants, *one.lookalikes) for text in (v.name, v.summary)]
    for fact in facts:
        assert " ".join(fact.split()) in plain
    for line in one.remedy.splitlines():
        assert f"  {line}" in out
    assert out.count("(held out of training)") == sum(v.heldout for v in (*one.variants, *one.lookalikes))


def test_show_escapes_nothing_odd(capsys, monkeypatch):
    odd = dataclasses.replace(PATTERNS["redundant_copy"], belongs="t[0] \\[x] [/] [red]", remedy=HOSTILE)
    monkeypatch.setitem(PATTERNS._entries, "redundant_copy", odd)
    main(["patterns", "show", "redundant_copy"])
    out = capsys.readouterr().out
    assert "belongs      t[0] \\[x] [/] [red]\n" in out
    assert '  x[0] = "\\n"  # [bold]not markup[/]\n  y = x[::2]\\\n' in out
