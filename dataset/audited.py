"""leak_audit.json: what the leak audit of a data set found, beside the data that it was made of.

The audit itself is ``eval/audit.py``; docs/leak_audit.md says what it asks. Its outcome is published whatever
it is. It holds for the files that it was made of, which it names by a digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchtraceap.dataset import checksums
from torchtraceap.errors import UserError
from torchtraceap.files import write_text

NAME = "leak_audit.json"


class Arm(msgspec.Struct, frozen=True):
    """One question to the classifier; numbers are null where there were too few examples."""

    name: str
    passed: bool
    auroc: float | None
    low: float | None
    high: float | None


class Audit(msgspec.Struct, frozen=True):
    """The part of the file that is read again. ``data`` is :func:`data_digest`; arms may be none."""

    data: str
    passed: bool
    arms: list[Arm]
    metadata: list[dict[str, Any]]


def data_digest(folder: Path) -> str:
    """A digest, in hex, of the names and contents of all data files."""
    files = sorted((folder / "data").glob("*.parquet"))
    lines = [f"{checksums.sha256(file)}  {file.name}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_audit(folder: Path) -> Audit:
    """What is recorded.

    Raises:
        UserError: Nothing is, or something else.
    """
    path = folder / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Audit)
    except FileNotFoundError:
        raise UserError(f"there is no {NAME}; write one with `traceap audit {folder} --record`") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{NAME} is not as `traceap audit --record` writes it: {error}") from None


def record_audit(folder: Path, outcome: Mapping[str, Any]) -> Path:
    """Write what an audit found into the data set that it was made of, and name the file in SHA256SUMS.

    Args:
        folder: Of the data set.
        outcome: As ``eval.audit.to_dict`` gives it.

    Raises:
        UserError: A file of the data set is not what SHA256SUMS says, so that new sums would hide it.
    """
    if differing := list(checksums.differing(folder)):
        raise UserError(f"{folder}: {differing[0]}, so nothing is recorded beside it")
    path = folder / NAME
    content = {"data": data_digest(folder), **outcome}
    write_text(path, json.dumps(_without_nan(content), indent=1) + "\n")
    checksums.write_checksums(folder, sorted({*checksums.read_checksums(folder), NAME}))
    return path


def _without_nan(value: Any) -> Any:
    """``value`` with null for numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
