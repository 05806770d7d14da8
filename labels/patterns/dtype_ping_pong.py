"""An activation is cast to a wider type and straight back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import activation_sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _wider() -> dict[torch.dtype, torch.dtype]:
    """The next wider type of each; a round trip through it is exact."""
    import torch

    return {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def _has_float64(device: torch.device) -> bool:
    import torch

    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def _sites(loop: Loop, body: Body) -> list[Site]:
    if not _has_float64(loop.device):
        return []
    wider = _wider()
    return activation_sites(loop, body, suits=lambda call: call.dtype in wider)


def _round_trip(loop: Loop) -> list[Site]:
    wider = _wider()
    return _sites(loop, lambda x: x.to(wider[x.dtype]).to(x.dtype))


def _wide_op(loop: Loop) -> list[Site]:
    wider = _wider()
    return _sites(loop, lambda x: x.to(wider[x.dtype]).mul(1.0).to(x.dtype))


def _buffer_copy(loop: Loop) -> list[Site]:
    import torch

    wider = _wider()

    def body(x: Tensor) -> Tensor:
        wide = torch.empty_like(x, dtype=wider[x.dtype], requires_grad=False).copy_(x)
        return torch.empty_like(x, requires_grad=False).copy_(wide)

    return _sites(loop, body)


def _no_op_cast(loop: Loop) -> list[Site]:
    return _sites(loop, lambda x: x.to(x.dtype))


def _scalar_cast(loop: Loop) -> list[Site]:
    wider = _wider()

    def body(x: Tensor) -> Tensor:
        x.detach().select(-1, 0).flatten()[:1].to(wider[x.dtype])
        return x

    return _sites(loop, body)


register(
    Pattern(
        id="dtype_ping_pong",
        title="Cast there and back",
        definition=(
            "An activation is cast to a wider floating type and back to its own, though nothing in between "
            "needs the precision. Each cast reads and writes the whole tensor, and the backward pass does it "
            "again."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs="The two casts, what runs in the wide type between them, and their backward operators.",
        precondition="The device has float64, and the activation is float16, bfloat16 or float32.",
        variants=(
            Variant("round_trip", "x.to(wide).to(x.dtype).", _round_trip, max_sites=8),
            Variant("wide_op", "A multiplication by one in the wide type.", _wide_op, max_sites=8),
            Variant(
                "buffer_copy",
                "copy_ into an empty tensor of the wide type, and back.",
                _buffer_copy,
                heldout=True,
                max_sites=8,
            ),
        ),
        lookalikes=(
            Variant("no_op_cast", "x.to(x.dtype), which returns x.", _no_op_cast, max_sites=8),
            Variant("scalar_cast", "One element is cast, as for a log.", _scalar_cast, max_sites=8),
        ),
        remedy="""\
with torch.autocast(device.type, dtype=torch.bfloat16):
    output = model(x)  # autocast picks the type an operator needs; drop .float() and .to(...) around it
""",
        references=(
            "https://docs.pytorch.org/docs/stable/amp.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
    )
)
