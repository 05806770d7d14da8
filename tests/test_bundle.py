"""What goes into a bundle, and how it is set up: a bundle of one small wheel, run by this Python."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from torchtraceap.collect import _unpack, bundle
from torchtraceap.collect.bundle import Target, parse_freeze, wanted

HERE = "{}.{}".format(*sys.version_info)
CODE = """
import sys

def main():
    import extra
    print(extra.__file__, sys.argv[1:])
    return 3
"""
RESOLVED = {
    "models": ["torch>=2.9", "hub>=1.0", "numpy>=2.0", "sympy; extra == 'all'"],
    "hub": ["numpy>=1.20", "old; python_version < '3.12'", "fast[more]>=2"],
    "fast": ["inner; extra == 'more'", "never; extra == 'less'"],
    "inner": [],
    "numpy": ["blas"],
    "blas": [],
    "torch": ["cuda-everything"],
    "cuda-everything": [],
    "old": [],
    "sympy": [],
    "never": [],
}


def target(python: str = "3.12", **has: str) -> Target:
    return Target(python, "x86_64", {name: Version(version) for name, version in has.items()})


def test_what_torch_alone_needs_stays_out() -> None:
    inside, left_out = wanted(["models", "torch"], RESOLVED, target())
    assert inside == {"models", "hub", "numpy", "blas", "fast", "inner"}
    assert left_out == {}
    assert "old" in wanted(["models"], RESOLVED, target("3.11"))[0]


def test_what_the_machine_has_stays_out_if_all_can_use_it() -> None:
    inside, left_out = wanted(["models"], RESOLVED, target(numpy="2.1", fast="1.0", sympy="1.13"))
    assert inside == {"models", "hub", "fast", "inner"}
    assert left_out == {"numpy": "2.1"}
    # Too old for one of the two that ask for it, whichever is seen first.
    for roots in (["models"], ["hub", "models"], ["models", "hub"]):
        inside, left_out = wanted(roots, RESOLVED, target(numpy="1.26"))
        assert "numpy" in inside
        assert left_out == {}


def test_freeze_is_read_as_pip_prints_it() -> None:
    text = "# comment\nPyYAML==6.0.1\n-e git+https://x/y\ntorch==2.9.0a0+145a3a7bda.nv25.10\nodd @ file:///x\nbad==x\n"
    assert parse_freeze(text) == {"pyyaml": Version("6.0.1"), "torch": Version("2.9.0a0+145a3a7bda.nv25.10")}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A bundle of a wheel ``torchtraceap`` whose command says which torch it found, and one with data."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "torchtraceap-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchtraceap/__init__.py", "")
        wheel.writestr("torchtraceap/cli.py", CODE)
    with zipfile.ZipFile(wheels / "extra-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("extra-1.data/purelib/extra.py", "")
        wheel.writestr("extra-1.data/scripts/extra", "#!python")
        wheel.writestr("../outside.py", "")
    out = tmp_path / "bundle.pyz"
    bundle._write(out, sorted(wheels.iterdir()), {}, Target(HERE, platform.machine(), {}))
    return out


def changed(made: Path, **changes: Any) -> Path:
    """The bundle with another manifest."""
    out = made.with_name("changed.pyz")
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(out, "w") as copy:
        for name in source.namelist():
            content = source.read(name)
            if name == "manifest.json":
                content = json.dumps(json.loads(content) | {"needs": []} | changes).encode()
            copy.writestr(name, content)
    return out


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=60)


def test_a_bundle_sets_itself_up(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    done = run(sys.executable, changed(made), folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"2 packages in {folder}; now run\n'{folder}/traceap' collect" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["site", "traceap"]
    assert sorted(path.name for path in (folder / "site").iterdir()) == ["extra.py", "torchtraceap"]
    assert not (folder / "outside.py").exists()
    started = run(folder / "traceap", "collect", "-o", "x y")
    assert (started.returncode, started.stdout) == (3, f"{folder}/site/extra.py ['collect', '-o', 'x y']\n")
    again = run(sys.executable, changed(made), folder)
    assert (again.returncode, again.stderr) == (
        2,
        f"bundle: {folder} exists: name another folder, or remove it\n",
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"python": "3.5"}, f"run it with that version, or make one with BUNDLE_PYTHON={HERE}"),
        ({"machine": "vax"}, "made for linux vax, but this is linux"),
        ({"needs": ["no-such-torch"]}, "has no no-such-torch, which a bundle leaves to the machine"),
        ({"sha256": {"extra-1-py3-none-any.whl": "0"}}, "extra-1-py3-none-any.whl in this file is damaged"),
    ],
)
def test_a_machine_that_is_not_fit_is_told_why(made: Path, tmp_path: Path, changes: dict, says: str) -> None:
    done = run(sys.executable, changed(made, **changes), tmp_path / "new" / "folder")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "new" / "folder").exists()
    assert not any(tmp_path.glob("new/.*"))


@pytest.mark.parametrize("place", ["manifest.json", '"sha256"', "PK\x01\x02"])
def test_a_damaged_file_is_told(made: Path, tmp_path: Path, place: str) -> None:
    content = bytearray(made.read_bytes())
    content[content.rindex(place.encode()) + 1] ^= 0xFF
    damaged = tmp_path / "damaged.pyz"
    damaged.write_bytes(content)
    with pytest.raises(_unpack.RefusedError, match=r"is damaged \(.+\): copy the bundle again"):
        _unpack.unpack(damaged, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_python_could_not_find_is_refused(made: Path, tmp_path: Path) -> None:
    done = run(sys.executable, changed(made), tmp_path / "a:b")
    assert done.returncode == 2
    assert "a colon" in done.stderr
    assert not (tmp_path / "a:b").exists()


def test_another_version_than_was_counted_on_is_noted(made: Path, tmp_path: Path) -> None:
    done = run(sys.executable, changed(made, left_out={"numpy": "0.1"}), tmp_path / "folder")
    assert done.returncode == 0
    assert "note: made for a machine with numpy 0.1; here it is" in done.stderr


def test_usage(made: Path) -> None:
    done = run(sys.executable, made, "--help")
    assert (done.returncode, "usage: python3 BUNDLE.pyz FOLDER" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--checkout", "."], "is no checkout of the project: "),
        (["--checkout", ".", "--have", "missing"], "No such file or directory: 'missing'"),
    ],
)
def test_what_a_bundle_cannot_be_made_of_is_told(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "pyproject.toml").write_text("project = [")
    command = [sys.executable, "-m", "torchtraceap.collect.bundle", *words, "-o", "bundle.pyz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "bundle.pyz").exists()
