"""SHA256SUMS: which files a published data set consists of, and what is in them.

The file is as ``sha256sum`` writes it, so that ``sha256sum -c SHA256SUMS`` checks a download without this
package. It names every published file but itself: what it does not name is not part of the data set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from torchtraceap.errors import UserError
from torchtraceap.files import write_text

NAME = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def sha256(path: Path) -> str:
    """Digest of a file's contents, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, names: list[str]) -> None:
    """Write the sums of the files ``names``, paths relative to ``folder`` with forward slashes."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    write_text(folder / NAME, "".join(lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """Path relative to ``folder`` to the digest that its file should have.

    Raises:
        UserError: There is no such file, or it is broken or names what lies outside of ``folder``.
    """
    path = folder / NAME
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {NAME}, which says what belongs to a data set; `traceap build` and "
            "`traceap cards` write it"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text") from None
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UserError(f"{path}, line {number}: not a digest, two spaces and a path")
        digest, name = match.groups()
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or str(parts) != name or name == NAME:
            raise UserError(f"{path}, line {number}: {name} is no path within the data set")
        if name in sums:
            raise UserError(f"{path}, line {number}: {name} is there twice")
        sums[name] = digest
    return sums


def differing(folder: Path) -> Iterator[str]:
    """A line for each file that is missing or is not what its sum says.

    Raises:
        UserError: As for :func:`read_checksums`.
    """
    for name, digest in read_checksums(folder).items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif sha256(path) != digest:
            yield f"{name} is not the file that {NAME} describes"
