"""Whole tensors are fetched from the GPU in every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, ModuleCall, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import Look, output_of, watching_sites

if TYPE_CHECKING:
    from torch import Tensor

MAX_ELEMENTS = 2**23
"""Of an activation. Who watches activations picks some that a host can look at; outputs are as large as they
are."""


def fetch(x: Tensor) -> Tensor:
    """A copy on the CPU."""
    return x.detach().cpu()


def fetch_into(x: Tensor) -> Tensor:
    """The same, into memory that is there before the copy starts."""
    import torch

    return torch.empty_like(x, device="cpu").copy_(x.detach())


def fetch_pieces(x: Tensor, pieces: int) -> list[Tensor]:
    """The same, in ``pieces`` along the first dimension, as of samples that are handled one by one."""
    import torch

    return [piece.cpu() for piece in torch.atleast_1d(x.detach()).tensor_split(pieces)]


def _sites(loop: Loop, look: Look) -> list[Site]:
    """``look`` at activations and, behind the forward stage and at the end of the step, at the output."""
    return watching_sites(loop, look, stages=("forward", "logging"), read=output_of, suits=_can_be_watched)


def _can_be_watched(call: ModuleCall) -> bool:
    return math.prod(call.out_shape) <= MAX_ELEMENTS


def _fetch(loop: Loop) -> list[Site]:
    return _sites(loop, fetch)


def _fetch_into(loop: Loop) -> list[Site]:
    return _sites(loop, fetch_into)


def _fetch_pieces(loop: Loop) -> list[Site]:
    return _sites(loop, lambda x: fetch_pieces(x, loop.batch_size))


def _pinned(loop: Loop) -> list[Site]:
    import torch

    has_gpu = loop.device.type != "cpu"  # without one there is no memory to pin

    def look(x: Tensor) -> None:
        sample = torch.atleast_1d(x.detach())[:1]
        # The allocator of pinned memory does not reuse it before the copy is done.
        torch.empty_like(sample, device="cpu", pin_memory=has_gpu).copy_(sample, non_blocking=True)

    return _sites(loop, look)


def _kept(loop: Loop) -> list[Site]:
    import torch

    return _sites(loop, lambda x: torch.atleast_1d(x.detach())[:1].clone())


register(
    Pattern(
        id="frequent_d2h",
        title="Tensors fetched in every step",
        definition=(
            "Whole outputs or activations are copied to the CPU in every step, for metrics, statistics or "
            "storage (host_sync: the host reads one number). The host waits for all work queued so far and "
            "then for the copy into pageable memory, and the GPU has nothing to do until it launches again."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators that take the tensor and copy it, and the runtime calls with the wait. "
            "GPU: the device-to-host copies."
        ),
        needs_gpu=True,
        precondition="The activation has at most 2**23 elements.",
        variants=(
            Variant("fetch", "y.detach().cpu().", _fetch, max_sites=6),
            Variant("fetch_into", "copy_ into a tensor on the CPU.", _fetch_into, max_sites=6),
            Variant(
                "fetch_pieces",
                "As many pieces as the batch has samples are fetched one by one.",
                _fetch_pieces,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant(
                "pinned",
                "One sample is copied into pinned memory, and nobody waits.",
                _pinned,
                max_sites=6,
            ),
            Variant("kept", "A copy of one sample is kept on the GPU.", _kept, max_sites=6),
        ),
        remedy="""\
# Metrics: accumulate on the device, and fetch the result at the end of the epoch.
cell = (target * classes + output.argmax(1)).flatten()
confusion.index_add_(0, cell, torch.ones_like(cell))  # torch.bincount would make the host wait, too

# What the CPU needs whole: pinned memory, and a look at it when the next step has been launched.
host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
host.copy_(output, non_blocking=True)
copied = torch.cuda.Event()
copied.record()
launch_next_step()
copied.synchronize()
store(host)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
            "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
            "https://github.com/huggingface/trl/pull/1154",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/3050",
        ),
    )
)
