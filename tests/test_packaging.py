"""The map from folders to subpackages, and what a wheel holds."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import torchtraceap

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
MODULES = {folder: sorted(ROOT.joinpath(folder).glob("*.py")) for folder in FOLDERS.values()}


def test_every_folder_of_modules_is_a_package_and_no_other_is():
    tops = sorted({folder.partition("/")[0] for folder in FOLDERS.values()})
    with_code = {
        str(path.parent.relative_to(ROOT)) for top in tops for path in ROOT.joinpath(top).rglob("*.py")
    }
    assert sorted(FOLDERS) == sorted(PACKAGES)
    assert with_code == set(FOLDERS.values())


@pytest.mark.parametrize("folder", sorted(FOLDERS.values()))
def test_package_has_an_init(folder):
    assert ROOT.joinpath(folder, "__init__.py") in MODULES[folder]


def test_lock_pins_every_direct_dependency_of_the_environment():
    lines = ROOT.joinpath("requirements.lock").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["collect"], *extras["scale"], *extras["dev"]]
    assert {name.partition(">=")[0].lower().replace("_", "-") for name in wanted} <= pinned
    assert pinned == {name.lower().replace("_", "-") for name in pinned}


def test_version_is_the_one_of_the_package():
    assert PYPROJECT["project"]["version"] == torchtraceap.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from a copy of the tracked layout, without build isolation or network."""
    pytest.importorskip("setuptools", minversion="77")
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    tops = {folder.partition("/")[0] for folder in FOLDERS.values()}
    for name in ("pyproject.toml", "README.md", "LICENSE", *tops):
        source.joinpath(name).symlink_to(ROOT / name)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def test_wheel_holds_the_code_and_templates_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        package.replace(".", "/") + "/" + path.name
        for package, folder in FOLDERS.items()
        for pattern in ("*.py", "*.j2", "py.typed")
        for path in ROOT.joinpath(folder).glob(pattern)
    }
    info = f"torchtraceap-{torchtraceap.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    assert info + "licenses/LICENSE" in names


def test_installed_wheel_imports_and_runs(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = [
        f"{package}.{path.stem}".removesuffix(".__init__")
        for package, folder in FOLDERS.items()
        for path in MODULES[folder]
        if path.stem != "__main__"
    ]
    script = f"""
import importlib, pathlib, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", str(f))]
sys.path.insert(0, {str(tmp_path)!r})
import torchtraceap
assert pathlib.Path(torchtraceap.__file__).is_relative_to({str(tmp_path)!r}), torchtraceap.__file__
for name in {modules!r}:
    importlib.import_module(name)
from torchtraceap.cli import main
sys.exit(main(["--version"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"traceap {torchtraceap.__version__}\n"


def test_a_checkout_imports_where_it_is_not_installed():
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
sys.path += {[sysconfig.get_path(name) for name in ("purelib", "platlib")]!r}
from torchtraceap.eval.detectors import rules
print(rules.__file__)
"""
    done = subprocess.run(  # -S: without the hooks of an editable installation
        [sys.executable, "-S", "-c", script], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(ROOT / "eval" / "detectors" / "rules.py")
