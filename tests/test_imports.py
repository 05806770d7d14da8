"""What must stay importable without torch, each in a fresh interpreter, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "timm", "torchvision", "transformers", "diffusers", "datasets", "pandas", "ray")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """Top-level names of ``HEAVY`` that are in sys.modules after ``code``."""
    report = "import sys; print('loaded', *sorted(m for m in sys.modules if '.' not in m))"
    return set(run(f"{code}\n{report}").splitlines()[-1].split()[1:]) & set(HEAVY)


def test_the_probe_sees_a_heavy_import():
    assert loaded("import pandas") == {"pandas"}


@pytest.mark.parametrize("package", ["", ".labels", ".dataset", ".eval", ".cli"])
def test_package_imports_no_torch(package):
    assert loaded(f"import torchtraceap{package}") == set()


def test_catalogue_of_patterns_imports_no_torch():
    assert loaded("from torchtraceap.labels.pattern import PATTERNS; PATTERNS.names()") == set()


def test_catalogue_of_models_imports_no_torch():
    assert loaded("from torchtraceap.collect.model import ZOO; ZOO.names()") == set()


def test_no_help_page_imports_torch_and_each_command_has_an_example():
    # One interpreter for all pages: a page that loads torch leaves it in sys.modules for the report.
    script = """
import contextlib, io, typer
from torchtraceap.cli import app, main

def pages(command, words):
    yield words, not hasattr(command, "commands")
    for name, child in getattr(command, "commands", {}).items():
        yield from pages(child, [*words, name])

for words, leaf in pages(typer.main.get_command(app), []):
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        assert main([*words, "--help"]) == 0, words
    text = " ".join(page.getvalue().split())
    assert " ".join(["Usage: traceap", *words]) in text, text
    assert not leaf or " ".join(["Example: traceap", *words]) in text, text
"""
    assert loaded(script) == set()


MAY_IMPORT = {
    "labels": {"labels"},
    "dataset": {"labels", "dataset", "cards"},
    "cards": {"cards"},
    "collect": {"labels", "dataset", "collect"},
    "eval": {"labels", "dataset", "eval"},
}
BASE = {"console", "errors", "files", "parallel", "registry"}


def subpackages_imported(source: str) -> set[str]:
    """First names under ``torchtraceap`` that a module imports, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "torchtraceap":
            names |= {f"torchtraceap.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names.add(str(node.module))
    return {name.split(".")[1] for name in names if name.startswith("torchtraceap.")}


def test_the_scan_sees_every_form_of_import():
    lines = [
        "import os, torchtraceap.a.x",
        "def f():",
        "  from torchtraceap.b import y",
        "from torchtraceap import c",
    ]
    assert subpackages_imported("\n".join(lines)) == {"a", "b", "c"}


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_go_one_way(folder):
    files = sorted(ROOT.joinpath(folder).rglob("*.py"))
    assert files
    for path in files:
        found = subpackages_imported(path.read_text(encoding="utf-8"))
        assert found <= MAY_IMPORT[folder] | BASE | {"__version__"}, path
