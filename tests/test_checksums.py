"""SHA256SUMS as ``sha256sum`` writes it: what it finds, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torchtraceap.dataset.checksums import NAME, differing, read_checksums, write_checksums
from torchtraceap.errors import UserError

FILES = {"README.md": b"card", "data/a b.parquet": b"\x00\xff", "data/c.parquet": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "schema.py").write_text("not published")
    write_checksums(tmp_path, list(FILES))
    return tmp_path


def test_what_is_named_is_what_was_given(folder: Path) -> None:
    assert list(read_checksums(folder)) == sorted(FILES)
    assert list(differing(folder)) == []


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum here")
def test_sha256sum_reads_the_file(folder: Path) -> None:
    subprocess.run(["sha256sum", "--strict", "-c", NAME], cwd=folder, check=True, capture_output=True)


def test_a_changed_file_and_a_missing_one_are_named(folder: Path) -> None:
    (folder / "README.md").write_bytes(b"carf")
    (folder / "data/c.parquet").unlink()
    assert list(differing(folder)) == [
        f"README.md is not the file that {NAME} describes",
        "data/c.parquet is missing",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hello", "line 1: not a digest"),
        (f"{'A' * 64}  README.md", "line 1: not a digest"),
        (f"{'a' * 64}  ../README.md", "is no path within the data set"),
        (f"{'a' * 64}  /etc/passwd", "is no path within the data set"),
        (f"{'a' * 64}  data//x", "is no path within the data set"),
        (f"{'a' * 64}  {NAME}", "is no path within the data set"),
        (f"{'a' * 64}  x\n{'b' * 64}  x", "line 2: x is there twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / NAME).write_text(line + "\n")
    with pytest.raises(UserError, match=says) as error:
        read_checksums(tmp_path)
    assert str(tmp_path / NAME) in str(error.value)


def test_a_folder_without_sums_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has no {NAME}"):
        read_checksums(tmp_path)
