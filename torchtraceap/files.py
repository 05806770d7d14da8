"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it onto ``path`` when the block succeeds.

    The temporary name starts with a dot and ends in ``.tmp``: globs for data files never match it, and a
    killed writer leaves only such a file behind. It is removed when the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path`` as a whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
