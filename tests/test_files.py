"""Writing as a whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from torchtraceap.errors import UserError
from torchtraceap.files import replacing, write_text


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_never_replaced(tmp_path, kind):
    path = tmp_path / "out"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = path.stat()
    with pytest.raises(UserError, match="out is not a regular file"):
        write_text(path, "new")
    assert path.stat() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("names_the_file", [False, True])
def test_a_full_disk_is_told_of_the_file_that_was_asked_for(tmp_path, names_the_file):
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left") as caught, replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        # Arrow puts no name into its errors, Python that of the temporary file.
        name = (str(temporary),) if names_the_file else ()
        raise OSError(errno.ENOSPC, "some words", *name)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_an_error_about_another_file_stays_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "out"):
        (tmp_path / "input").read_text()
    assert caught.value.filename == str(tmp_path / "input")


def test_what_cannot_be_removed_hides_no_error(tmp_path, monkeypatch):
    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ValueError, match="the reason"), replacing(tmp_path / "out"):
        raise ValueError("the reason")
