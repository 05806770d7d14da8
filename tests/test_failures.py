"""What kind of failure an exception is, and what the question to a device answers."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
import torch

from torchtraceap.collect import probe
from torchtraceap.collect.failures import Failed, Failure, describe
from torchtraceap.collect.server import Request
from torchtraceap.errors import UserError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
            "out_of_memory",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (torch.AcceleratorError("unspecified launch failure", 719), "device"),
        (RuntimeError("rank 1: AcceleratorError: CUDA error: unspecified launch failure"), "device"),
        (RuntimeError("No CUDA GPUs are available"), "device"),
        (UserError("no device 'cuda:0'; here are: cpu"), "device"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/shards/b.parquet"), "disk_full"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "runs/a/shards/b.parquet"), "error"),
        (ValueError("mat1 and mat2 shapes cannot be multiplied"), "error"),
    ],
)
def test_the_kind_of_a_failure(error: BaseException, kind: str) -> None:
    assert describe(error).kind == kind


def test_a_full_disk_names_the_file() -> None:
    assert describe(OSError(errno.ENOSPC, "no", "runs/a/b")).path == "runs/a/b"


def test_a_failure_is_one_line_of_bounded_length() -> None:
    assert describe(ValueError("a\x1b[2J\nb")).error == "ValueError: a\\x1b[2J"
    assert describe(ValueError()).error == "ValueError: no message"
    assert len(describe(ValueError("x" * 9999)).error) < 400
    assert (
        describe(UserError("what, where,\nand what is possible")).error
        == "what, where,\\nand what is possible"
    )
    assert describe(Failed(Failure("kept", "device", result={"a": 1}))) == Failure(
        "kept", "device", "", {"a": 1}
    )


def test_a_device_that_works_says_so_and_one_that_is_not_there_does_not() -> None:
    request = Request("probe", msgspec.Raw(b"null"), "cpu", probe.TIME_LIMIT, scratch="")
    assert probe.run_request(request, print) == {}
    with pytest.raises(UserError, match="no device 'cuda:99'") as caught:
        probe.run_request(msgspec.structs.replace(request, device="cuda:99"), print)
    assert describe(caught.value).kind == "device"
