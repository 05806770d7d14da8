"""One file that collects on a machine without internet: this project, and packages that the machine lacks.

    python -m torchtraceap.collect.bundle --checkout . --python 3.12 -o bundle.pyz

The file is a zip of wheels that Python runs (a zipapp): collect/_unpack.py sets it up. PyTorch and
torchvision are never in it, as those of the machine fit its driver; nor is what only they need. pip resolves
and fetches the rest for the machine's Python, at the versions of requirements.lock. Given a list of what the
machine has (``pip freeze``), packages that will do are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchtraceap import console
from torchtraceap.errors import UserError
from torchtraceap.files import replacing

NEEDS = ("torch", "torchvision")
"""What a bundle leaves to the machine in any case."""

GLIBC = range(28, 4, -1)
"""Minor versions of glibc that wheels may ask for: what images of the last years have."""


class Target(NamedTuple):
    """The machine: its Python as ``3.12``, its processor as ``x86_64``, and its packages."""

    python: str
    machine: str
    has: Mapping[str, Version]

    @property
    def pip_options(self) -> list[str]:
        """That make pip choose wheels for this machine."""
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in GLIBC] + [f"manylinux2014_{self.machine}"]
        platforms = [word for name in names for word in ("--platform", name)]
        return ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}", *platforms]

    @property
    def environment(self) -> dict[str, str]:
        """Of markers in requirements."""
        return {
            "implementation_name": "cpython", "implementation_version": f"{self.python}.0",
            "os_name": "posix", "platform_machine": self.machine, "platform_python_implementation": "CPython",
            "platform_release": "", "platform_system": "Linux", "platform_version": "",
            "python_full_version": f"{self.python}.0", "python_version": self.python, "sys_platform": "linux",
            "extra": "",
        }  # fmt: skip


def parse_freeze(text: str) -> dict[str, Version]:
    """Packages and versions of what ``pip freeze`` or ``pip list --format=freeze`` prints."""
    found: dict[str, Version] = {}
    for line in text.splitlines():
        name, separator, version = line.strip().partition("==")
        if separator and not name.startswith("#"):
            try:
                found[canonicalize_name(name)] = Version(version.partition(";")[0].strip())
            except InvalidVersion:
                continue  # a build of somebody's own: as if it were not there
    return found


def wanted(
    roots: Iterable[str], resolved: Mapping[str, Sequence[str]], target: Target
) -> tuple[set[str], dict[str, str]]:
    """Which of the ``resolved`` packages go into the bundle, and which are left to the machine.

    Starts at ``roots`` and follows what packages ask for, but not behind what the machine has.

    Args:
        roots: Requirements of the project.
        resolved: Canonical names of all packages that pip would install, with their own requirements.
        target: The machine.

    Returns:
        Names of those to put in; versions of those that are left out because the machine has one that all
        others can use.
    """
    asked: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    inside: set[str] = set()
    waiting = [(text, frozenset({""})) for text in roots]
    followed: set[tuple[str, str]] = set()
    while waiting:
        text, extras = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({**target.environment, "extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        if name in NEEDS:
            continue
        asked[name] &= requirement.specifier
        fits = name in target.has and asked[name].contains(target.has[name], prereleases=True)
        for extra in {"", *requirement.extras} if not fits else ():
            if (name, extra) not in followed:
                followed.add((name, extra))
                inside.add(name)
                waiting += [(line, frozenset({extra})) for line in resolved.get(name, ())]
    left_out = {name: str(target.has[name]) for name in asked if name not in inside}
    return inside, left_out


def make(checkout: Path, out: Path, target: Target) -> None:
    """Write the bundle of the project in ``checkout``.

    Raises:
        UserError: ``checkout`` is none, or pip finds no wheels for the machine.
    """
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{checkout} is no checkout of the project: {error}") from None
    roots = [*project["dependencies"], *project["optional-dependencies"]["collect"]]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        console.note(f"resolving for CPython {target.python} on {target.machine}")
        resolved, versions = _resolve(roots, checkout / "requirements.lock", target, work)
        inside, left_out = wanted(roots, resolved, target)
        pins = [f"{name}=={versions[name]}" for name in sorted(inside)]
        console.note(f"fetching {len(pins)} wheels")
        _pip("download", "--no-deps", f"--dest={work / 'wheels'}", *target.pip_options, *pins)
        _pip("wheel", "--no-deps", f"--wheel-dir={work / 'wheels'}", str(checkout))
        _write(out, sorted((work / "wheels").glob("*.whl")), left_out, target)
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    print(f"{out}: {out.stat().st_size / 1e6:.0f} MB, {len(pins) + 1} packages, sha256 {digest}")


def _resolve(
    roots: Sequence[str], lock: Path, target: Target, work: Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What pip would install for ``roots``: requirements and version of each package."""
    report = work / "report.json"
    _pip(
        "install", "--dry-run", "--ignore-installed", f"--report={report}", f"--target={work / 'nothing'}",
        f"--constraint={lock}", *target.pip_options, *roots,
    )  # fmt: skip
    requirements: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        metadata: dict[str, Any] = item["metadata"]
        name = canonicalize_name(metadata["name"])
        requirements[name] = metadata.get("requires_dist", [])
        versions[name] = metadata["version"]
    return requirements, versions


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        lines = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise UserError(f"pip {words[0]} failed: {' '.join(lines)}")


def _write(out: Path, wheels: Sequence[Path], left_out: Mapping[str, str], target: Target) -> None:
    manifest = {
        "python": target.python,
        "machine": target.machine,
        "needs": NEEDS,
        "left_out": left_out,
        "sha256": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels},
    }
    with replacing(out) as temporary:
        with temporary.open("wb") as file:
            file.write(b"#!/usr/bin/env python3\n")
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as bundle:  # wheels are compressed
                bundle.write(Path(__file__).with_name("_unpack.py"), "__main__.py")
                bundle.writestr("manifest.json", json.dumps(manifest, indent=2))
                for wheel in wheels:
                    bundle.write(wheel, wheel.name)
        temporary.chmod(0o755)


def main() -> None:
    """Read the command line and write a bundle."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path(), help="where pyproject.toml lies")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), help="of the machine: 3.12")
    parser.add_argument("--machine", default=platform.machine(), choices=("x86_64", "aarch64"))
    parser.add_argument("--have", type=Path, help="what `pip freeze` printed on the machine")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        # Other encodings than ours do no harm: names and versions of packages are ASCII.
        has = parse_freeze(options.have.read_text("utf-8", "replace")) if options.have else {}
        make(options.checkout.resolve(), options.out, Target(options.python, options.machine, has))
    except (UserError, OSError) as error:
        console.note(f"bundle: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
