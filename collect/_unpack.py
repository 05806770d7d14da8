"""Sets up a bundle (collect/bundle.py) on a machine without internet; runs as the ``__main__`` of the file.

    python3 BUNDLE.pyz FOLDER

Needs nothing but the standard library, and no pip. What the machine has is not touched: packages are
unpacked into FOLDER/site, which FOLDER/traceap puts first. There is no torch there; the machine's is used.
Python 3.8 must be able to run this, if only to say that it is too old.
"""

import hashlib
import io
import json
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from importlib import metadata
from pathlib import Path

MANIFEST = "manifest.json"
DAMAGE = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, RuntimeError)
"""What reading a file raises that has lost something on the way."""
LAUNCHER = """\
#!/bin/sh
PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} -P -c \\
    'import sys; from torchtraceap.cli import main; sys.exit(main())' "$@"
"""


class RefusedError(Exception):
    """The bundle cannot be set up here; says why in a line."""


def main(words: list) -> int:
    """Exit code 0, or 2 and a line on standard error; 130 if interrupted."""
    try:
        if len(words) != 1 or words[0].startswith("-"):
            raise RefusedError(
                "usage: python3 BUNDLE.pyz FOLDER (it is made, and holds all that is unpacked)"
            )
        unpack(Path(__file__).resolve().parent, Path(words[0]).absolute())
    except (RefusedError, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bundle: interrupted", file=sys.stderr)
        return 130
    return 0


def unpack(archive: Path, folder: Path) -> None:
    """Set up ``archive`` in ``folder``, as a whole or not at all."""
    with opened(archive) as bundle:
        manifest = manifest_of(bundle)
        require_machine(manifest)
        if folder.exists():
            raise RefusedError(f"{folder} exists: name another folder, or remove it")
        if ":" in str(folder):
            raise RefusedError(f"{folder}: PYTHONPATH cannot hold a colon, so name another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".bundle-", dir=folder.parent))
        try:
            for name, digest in sorted(manifest["sha256"].items()):
                unpack_wheel(checked(bundle, name, digest), work / "site")
            launcher = work / "traceap"
            site, python = shlex.quote(str(folder / "site")), shlex.quote(sys.executable)
            launcher.write_text(LAUNCHER.format(site=site, python=python))
            launcher.chmod(0o755)
            work.chmod(0o755)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{len(manifest['sha256'])} packages in {folder}; now run")
    print(f"{shlex.quote(str(folder / 'traceap'))} collect -o runs/mine --tier all")


def opened(archive: Path) -> zipfile.ZipFile:
    """The bundle, open."""
    try:
        return zipfile.ZipFile(archive)
    except DAMAGE as error:
        raise RefusedError(f"{archive} is damaged ({error}): copy the bundle again") from None


def manifest_of(bundle: zipfile.ZipFile) -> dict:
    """What the bundle says of itself."""
    try:
        return json.loads(bundle.read(MANIFEST).decode())
    except DAMAGE as error:
        raise RefusedError(f"{MANIFEST} in this file is damaged ({error}): copy the bundle again") from None


def checked(bundle: zipfile.ZipFile, name: str, digest: str) -> bytes:
    """A member of the bundle, if it is what was put in."""
    try:
        content = bundle.read(name)
    except DAMAGE:
        content = b""
    if hashlib.sha256(content).hexdigest() != digest:
        raise RefusedError(f"{name} in this file is damaged: copy the bundle again")
    return content


def require_machine(manifest: dict) -> None:
    """Refuse another Python, another processor, and a machine without PyTorch."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    kind = platform.python_implementation()
    if kind != "CPython" or here != manifest["python"]:
        raise RefusedError(
            f"made for CPython {manifest['python']}, but {sys.executable} is {kind} {here}: run it with that "
            f"version, or make one with BUNDLE_PYTHON={here}"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RefusedError(f"made for CPython with its global lock; {sys.executable} has none")
    if sys.platform != "linux" or platform.machine() != manifest["machine"]:
        raise RefusedError(
            f"made for linux {manifest['machine']}, but this is {sys.platform} {platform.machine()}: make "
            f"one with BUNDLE_MACHINE={platform.machine()}"
        )
    for package in manifest["needs"]:
        if version_of(package) is None:
            raise RefusedError(f"{sys.executable} has no {package}, which a bundle leaves to the machine")
    for package, version in sorted(manifest["left_out"].items()):
        found = version_of(package)
        if found != version:
            note = f"bundle: note: made for a machine with {package} {version}; here it is {found}"
            print(note, file=sys.stderr)


def version_of(package: str):  # type: ignore[no-untyped-def]
    """The version of a package of this Python, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def unpack_wheel(content: bytes, site: Path) -> None:
    """Unpack a wheel's modules; its scripts and headers are of no use here."""
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        for entry in wheel.infolist():
            parts = entry.filename.split("/")
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            if entry.is_dir() or ".." in parts or not all(parts):
                continue
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
