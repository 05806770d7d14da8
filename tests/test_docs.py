"""The pages for readers: their examples run as written, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtraceap import __version__
from torchtraceap.dataset.schema import SCHEMA_VERSION
from torchtraceap.eval.scorer import score
from torchtraceap.eval.submission import read_submission
from torchtraceap.eval.truth import Truth

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def run(code, folder):
    """In a folder where only the data set lies, as a program of its own."""
    (folder / "dataset").symlink_to(ROOT / "dataset")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_submission_written_from_nothing_is_scored(tmp_path):
    (code,) = python_blocks("docs/submitting.md")
    run(code, tmp_path)
    result = score(
        Truth.load(ROOT / "dataset", "test"), read_submission(tmp_path / "my-submission"), resamples=0
    )
    assert result.card.name == "waits"
    found = result.scores["segment_map"].value
    assert found is not None
    assert found > 0  # it reports one pattern of several, on one of its two lanes


def test_the_data_set_loads_as_the_readme_says(tmp_path):
    with_datasets, with_numpy = python_blocks("README.md")
    shown = run(f"{with_datasets}\nprint(len(traces['test']), windows.num_rows)\n{with_numpy}", tmp_path)
    counts, *rows = shown.splitlines()
    traces, windows = map(int, counts.split())
    assert windows > traces == len(rows) > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_changelog_has_its_form_and_names_the_versions():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *releases = re.findall(r"^## (.*)$", text, re.M)
    assert first == "Unreleased"
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", heading) for heading in releases]
    assert all(dated), releases
    assert next(found[1] for found in dated if found) == __version__
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds
    schemas = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)
    assert [int(number) for number, _ in schemas] == list(range(1, SCHEMA_VERSION + 1))
    assert {version for _, version in schemas} <= {first, *(found[1] for found in dated if found)}
