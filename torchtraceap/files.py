"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtraceap.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it onto ``path`` when the block succeeds.

    The temporary name starts with a dot and ends in ``.tmp``: globs for data files never match it, and a
    killed writer leaves only such a file behind. It is removed when the block raises.

    Raises:
        UserError: ``path`` is a folder, a device or a pipe, which a rename would fail on or do away with.
        OSError: The disk is full, say; names ``path``, which the writers of Arrow do not.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file, so it cannot be replaced by one")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        with suppress(OSError):  # there may be none; and where nothing can be written, that was said already
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path`` as a whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
