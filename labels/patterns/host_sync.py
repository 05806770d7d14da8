"""The host reads a value from the GPU in the middle of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, Pattern, Site, Stage, Variant, register
from torchtraceap.labels.patterns._common import Look, watching_sites

if TYPE_CHECKING:
    from torch import Tensor


def _sites(loop: Loop, look: Look) -> list[Site]:
    """``look(tensor)`` at activations and, once it is there and in the logging stage, at the loss.

    In inference a tensor of the output stands for the loss.
    """
    stages: tuple[Stage, ...] = ("loss", "logging") if loop.mode == "train" else ("forward", "logging")
    return watching_sites(loop, lambda tensor: look(tensor.detach()), stages=stages)


def _item(loop: Loop) -> list[Site]:
    return _sites(loop, lambda x: x.float().mean().item())


def _cpu_copy(loop: Loop) -> list[Site]:
    return _sites(loop, lambda x: float(x.float().norm().cpu()))


def _finite_check(loop: Loop) -> list[Site]:
    import torch

    def look(x: Tensor) -> None:
        if not torch.isfinite(x).all():
            # Where a training script would raise. An untrained network in half precision may well overflow,
            # and what it computes must not depend on whether somebody looks.
            pass

    return _sites(loop, look)


def _cpu_item(loop: Loop) -> list[Site]:
    import torch

    return _sites(loop, lambda x: torch.tensor([1, *x.shape], device="cpu").prod().item())


def _device_metric(loop: Loop) -> list[Site]:
    return _sites(loop, lambda x: x.float().mean())


register(
    Pattern(
        id="host_sync",
        title="Host reads a GPU value",
        definition=(
            "In the middle of a step the host reads a value that the GPU has yet to compute, so it waits "
            "until all work queued so far is done. Meanwhile it launches nothing, and afterwards the GPU "
            "idles until the queue fills again."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators that compute and read the value, and the runtime calls in them with the "
            "wait. GPU: the small kernels and the device-to-host copy that they launch."
        ),
        needs_gpu=True,
        variants=(
            Variant(
                "item", "The mean of an activation, or the loss, is read with .item().", _item, max_sites=6
            ),
            Variant("cpu_copy", "A norm is fetched with .cpu().", _cpu_copy, max_sites=6),
            Variant(
                "finite_check",
                "The host branches on torch.isfinite(x).all().",
                _finite_check,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant("cpu_item", ".item() on a tensor that lives on the CPU.", _cpu_item, max_sites=6),
            Variant(
                "device_metric", "The same mean, left on the GPU and not read.", _device_metric, max_sites=6
            ),
        ),
        remedy="""\
# Keep the value on the device, and read it once in a while, after the step has been launched.
running_loss += loss.detach()
if step % log_every == 0:
    log(running_loss.item() / log_every)
    running_loss.zero_()

# Checks: accumulate a flag on the device instead of branching on it.
all_finite &= torch.isfinite(activation).all()
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://docs.pytorch.org/docs/stable/notes/cuda.html",
            "https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
        ),
    )
)
