"""What went wrong with a workload: one line for people, and a kind on which the runner acts."""

from __future__ import annotations

import errno
from typing import Any, Literal

import msgspec

from torchtraceap import console
from torchtraceap.errors import UserError

Kind = Literal["error", "out_of_memory", "device", "disk_full", "killed", "memory_limit", "time_limit"]
"""``error``
    Of the model, its library or this harness: it would happen again.
``out_of_memory``
    The batch does not fit; a smaller one may.
``device``
    The device or its driver refused. That may be the workload's own fault, such as an illegal access, or the
    device is gone, which shows when it befalls one workload after another.
``disk_full``
    A file could not be written; so will the next.
``killed``
    By a signal that was not ours: the system's, for memory, or a crash.
``memory_limit``, ``time_limit``
    Killed by us.
"""

LINE = 300
"""Characters of a message that are kept."""

_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator", "STATUS_ALLOC_FAILED")
_DEVICE = (
    "CUDA error", "CUDA driver", "CUDA unknown error", "No CUDA GPUs", "no CUDA-capable device", "no device ",
    "HIP error", "No HIP GPUs", "cuDNN error", "CUBLAS_STATUS", "CUSOLVER_STATUS", "NCCL error", "UR error",
)  # fmt: skip
"""What PyTorch and our own ``devices.resolve`` say, and how calls of libraries end on a broken context."""


class Failure(msgspec.Struct, frozen=True):
    """How a workload failed. ``path`` is the file that could not be written, where that was it."""

    error: str
    kind: Kind = "error"
    path: str = ""
    result: dict[str, Any] | None = None


class Failed(Exception):
    """Raised by a workload that has a result to keep in spite of its failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def describe(error: BaseException) -> Failure:
    """The failure that an exception of a workload is."""
    if isinstance(error, Failed):
        return error.failure
    text = str(error).strip()
    line = (text.splitlines() or ["no message"])[0][:LINE]
    path = ""
    if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
        kind: Kind = "out_of_memory"
    elif type(error).__name__ == "AcceleratorError" or any(sign in text for sign in _DEVICE):
        kind = "device"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = "disk_full"
        path = str(error.filename or "")
    else:
        kind = "error"
    shown = text if isinstance(error, UserError) else f"{type(error).__name__}: {line}"
    return Failure(console.visible(shown), kind, path)
