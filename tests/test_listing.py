"""The zoo as people read it: docs/zoo.md, the counts in the README, and what `traceap zoo list` selects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from torchtraceap.collect.check import Checked, CheckReport, Stepped
from torchtraceap.collect.listing import BEGIN, END, counts, page, select, with_counts
from torchtraceap.collect.model import ZOO
from torchtraceap.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
REPORT = {"device": "cpu", "hardware": {}, "date": "", "lanes": 1, "time_limit": 1.0, "models": []}


def test_the_page_is_current() -> None:
    checks = sorted((ROOT / "docs" / "measurements").glob("zoo-*.json"))
    assert (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8") == page(checks), "run `make docs`"


def test_the_counts_in_the_readme_are_current() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_counts(text) == text, "run `make docs`"


def test_counts_add_up() -> None:
    head, _, *rows = [line for line in counts().splitlines() if line.startswith("|")]
    cells = {row.split("|")[1].strip(): [int(c.strip() or 0) for c in row.split("|")[2:-1]] for row in rows}
    total = cells.pop("all")
    assert total[-1] == len(ZOO) == sum(total[:-1])
    assert total == [sum(column) for column in zip(*cells.values(), strict=True)]
    column = head.split("|")[2:-1].index(" timm ")
    assert cells["classification"][column] == len(select(task="classification", source="timm"))


def test_the_page_has_every_model_once() -> None:
    text = page()
    assert [name for name in ZOO.names() if text.count(f"| `{name}` |") != 1] == []


def test_the_page_says_what_failed_where(tmp_path: Path) -> None:
    models = [
        Checked("a/passed", "passed", cases=[Stepped("train", 2), Stepped("infer", 1)]),
        Checked("a/odd", "failed", reason="a | [b](c) <i> \\ of this"),
        Checked("a/elsewhere", "not run", reason="no batch size"),
        Checked("a/nowhere", "not run", reason="no batch size"),
    ]
    hardware = {"device_name": "EPYC", "device_kind": "cpu", "cpu_cores": 2, "torch": "2.11.0"}
    path = tmp_path / "zoo-epyc.json"
    path.write_bytes(msgspec.json.encode(CheckReport("cpu", hardware, "2026-11-30", 4, 300.0, models)))
    text = page([path])
    assert "| zoo-epyc.json | EPYC, 2 cores | 2.11.0 | 2026-11-30 | infer, train | 1 | 1 | 0 | 2 |" in text
    assert r"| zoo-epyc.json | failed | a \| \[b\](c) \<i\> \\ of this | `a/odd` |" in text
    assert "| not run | no batch size | `a/elsewhere`, `a/nowhere` |" in text
    assert "a/passed" not in text
    assert "Where they ran" not in page()


def test_counts_are_written_between_the_lines_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "torchtraceap.collect.listing", str(path)], check=True)
    assert path.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{counts()}\n{END}\nafter\n"
    for text in ("", BEGIN, f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n" * 2):
        with pytest.raises(ValueError, match="no text between"):
            with_counts(text)


def test_conditions_are_met_together() -> None:
    chosen = select(family="resnet", min_params=20, max_params=30)
    assert {spec.backbone_family for spec in chosen} == {"resnet"}  # a U-Net with a ResNet in it counts
    assert {"timm/resnet50", "smp/unet-resnet34"} <= {spec.name for spec in chosen}
    assert all(20 <= spec.params_m <= 30 for spec in chosen)
    assert select(source="smp", task="classification") == []
    assert select() == list(ZOO)


@pytest.mark.parametrize("wrong", [{"task": "cooking"}, {"source": "timn"}, {"family": "resnot"}])
def test_what_is_not_in_the_zoo_is_refused_by_name(wrong: dict[str, str]) -> None:
    (what, name) = next(iter(wrong.items()))
    with pytest.raises(UserError, match=f"Unknown {what} '{name}'"):
        select(**wrong)


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(UserError, match="--min-params 3 is above --max-params 2"):
        select(min_params=3, max_params=2)


@pytest.mark.parametrize("text", ['{"hardware":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}", "hardware"])
def test_what_is_no_result_of_a_check_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "check.json").write_text(json.dumps(REPORT) if text == "hardware" else text)
    with pytest.raises(UserError, match=r"check\.json was not written by `traceap zoo check`: "):
        page([tmp_path / "check.json"])


def test_text_of_others_stays_in_its_row(tmp_path: Path) -> None:
    hardware = {"device_name": "A|B\x1b[31m", "cpu_cores": 2, "torch": "2"}
    models = [{"model": "a|b\n# c", "state": "failed", "reason": "no\n\n# heading"}]
    report = {
        "device": "cpu",
        "hardware": hardware,
        "date": "",
        "lanes": 1,
        "time_limit": 1.0,
        "models": models,
    }
    (tmp_path / "check.json").write_text(json.dumps(report))
    text = page([tmp_path / "check.json"])
    assert "\x1b" not in text
    assert "| failed | no\\\\n\\\\n# heading | `a\\|b\\n# c` |" in text
