"""An activation function or a normalisation is written out in elementary operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import (
    Body,
    FunctionCall,
    FunctionSite,
    Loop,
    Pattern,
    Site,
    Variant,
    register,
)
from torchtraceap.labels.patterns._common import spread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FUNCTIONS = ("gelu", "silu", "softmax", "layer_norm", "group_norm", "batch_norm")
"""What is written out, where a model calls it in torch.nn.functional, be it in a module such as nn.GELU."""


def _can_write_out(call: FunctionCall) -> bool:
    if not call.shapes:
        return False
    if call.function == "softmax":
        return "dim" in call.has or 1 in call.positions  # without one, it depends on the number of dimensions
    # What writes to its input may have other readers of it.
    return call.function != "silu" or not ("inplace" in call.has or 1 in call.positions)


def _sites(loop: Loop, forms: dict[str, Body]) -> list[Site]:
    """``forms[function](*arguments)`` instead of the function, at calls spread through the model."""

    def without_original(form: Body) -> Body:
        return lambda original, *args, **kwargs: form(*args, **kwargs)

    return [FunctionSite(call, without_original(forms[call.function])) for call in _calls(loop)]


def _calls(loop: Loop) -> list[FunctionCall]:
    calls = [call for function in FUNCTIONS for call in loop.function_calls(function)]
    return spread([call for call in calls if _can_write_out(call)])


def _result_type(x: Tensor) -> torch.dtype:
    """Type of a softmax and of a layer or group normalisation: autocast on a GPU makes it float32."""
    import torch

    kind = x.device.type
    return torch.float32 if kind != "cpu" and torch.is_autocast_enabled(kind) else x.dtype


def _group_norm_input(x: Tensor) -> Tensor:
    """``x`` in the layout of its group normalisation: only the kernel for CPUs knows channels_last."""
    import torch

    keeps = x.device.type == "cpu" and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if keeps else x.contiguous()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _by_channel(vector: Tensor | None, ndim: int) -> Tensor | None:
    """Channels, shape (channels,), as (1, channels, 1, ...) of ``ndim`` dimensions."""
    return None if vector is None else vector.view(1, -1, *[1] * (ndim - 2))


Moments = Callable[["Tensor", tuple[int, ...]], tuple["Tensor", "Tensor"]]
"""``moments(x, dims)``: mean and biased variance over ``dims``, which stay as dimensions of one."""

Standardize = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""``standardize(x, mean, variance)``; the variance is not zero."""


def _norms(moments: Moments, standardize: Standardize) -> dict[str, Body]:
    """The normalisations with the signatures of torch.nn.functional, in float32 as their kernels compute."""
    import torch

    def normalize(x: Tensor, dims: range, eps: float) -> Tensor:
        mean, variance = moments(x, tuple(dims))
        return standardize(x, mean, variance + eps)

    def layer_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        # The kernel's result is contiguous, whatever its input is.
        y = normalize(input.contiguous().float(), range(-len(normalized_shape), 0), eps)
        y = _affine(y, weight, bias).to(_result_type(input))
        if y.requires_grad:
            # So is its gradient; a strided one, passed on, would make the layers before this one copy theirs.
            y.register_hook(lambda gradient: gradient.contiguous())
        return y

    def group_norm(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        groups = _group_norm_input(input).float().unflatten(1, (num_groups, -1))
        y = normalize(groups, range(2, groups.ndim), eps).flatten(1, 2)
        weight, bias = _by_channel(weight, input.ndim), _by_channel(bias, input.ndim)
        return _affine(y, weight, bias).to(_result_type(input))

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        x, ndim = input.float(), input.ndim
        mean, variance = _by_channel(running_mean, ndim), _by_channel(running_var, ndim)
        if training or mean is None or variance is None:
            mean, variance = moments(x, (0, *range(2, ndim)))
            if running_mean is not None and running_var is not None:
                count = x.numel() // x.shape[1]
                with torch.no_grad():
                    running_mean.lerp_(mean.flatten(), momentum)
                    running_var.lerp_(variance.flatten() * (count / (count - 1)), momentum)
        y = standardize(x, mean, variance + eps)
        return _affine(y, _by_channel(weight, ndim), _by_channel(bias, ndim)).to(input.dtype)

    return {"layer_norm": layer_norm, "group_norm": group_norm, "batch_norm": batch_norm}


def _softmax(exponentials: Callable[[Tensor, int], Tensor]) -> Body:
    def softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        # Contiguous like the kernel's result.
        return exponentials(input.contiguous().float(), dim).to(dtype or _result_type(input))

    return softmax


def _operators(loop: Loop) -> list[Site]:
    import torch

    def gelu(input: Tensor, approximate: str = "none") -> Tensor:
        if approximate == "tanh":
            inner = math.sqrt(2 / math.pi) * (input + 0.044715 * input**3)
            return 0.5 * input * (1 + torch.tanh(inner))
        return 0.5 * input * (1 + torch.erf(input / math.sqrt(2)))

    def silu(input: Tensor, inplace: bool = False) -> Tensor:
        return input * torch.sigmoid(input)

    def exponentials(x: Tensor, dim: int) -> Tensor:
        e = torch.exp(x - x.detach().amax(dim, keepdim=True))
        return e / e.sum(dim, keepdim=True)

    def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        mean = x.mean(dims, keepdim=True)
        return mean, ((x - mean) ** 2).mean(dims, keepdim=True)

    def standardize(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return (x - mean) / torch.sqrt(variance)

    activations: dict[str, Body] = {"gelu": gelu, "silu": silu, "softmax": _softmax(exponentials)}
    return _sites(loop, activations | _norms(moments, standardize))


def _functions(loop: Loop) -> list[Site]:
    import torch

    def gelu(input: Tensor, approximate: str = "none") -> Tensor:
        half = torch.mul(input, 0.5)
        if approximate == "tanh":
            inner = torch.addcmul(input, input, torch.pow(input, 2), value=0.044715)
            return torch.addcmul(half, half, torch.tanh(torch.mul(inner, math.sqrt(2 / math.pi))))
        return torch.addcmul(half, half, torch.erf(torch.mul(input, math.sqrt(0.5))))

    def silu(input: Tensor, inplace: bool = False) -> Tensor:
        half = torch.mul(input, 0.5)
        return torch.addcmul(half, half, torch.tanh(half))

    def exponentials(x: Tensor, dim: int) -> Tensor:
        return torch.exp(torch.sub(x, torch.logsumexp(x, dim, keepdim=True)))

    def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return mean, variance

    def standardize(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.mul(torch.sub(x, mean), torch.rsqrt(variance))

    activations: dict[str, Body] = {"gelu": gelu, "silu": silu, "softmax": _softmax(exponentials)}
    return _sites(loop, activations | _norms(moments, standardize))


def _one_row(loop: Loop) -> list[Site]:
    def body(original: Body, input: Tensor, *args: object, **kwargs: object) -> Tensor:
        row = input.detach()[(slice(0, 1),) * (input.ndim - 1)]
        row * row.sigmoid()
        y: Tensor = original(input, *args, **kwargs)
        return y

    return [FunctionSite(call, body) for call in _calls(loop)]


register(
    Pattern(
        id="unfused_elementwise",
        title="Activation or normalisation written out",
        definition=(
            "An activation function or a normalisation is a chain of elementary operators instead of one "
            "call that PyTorch has a kernel for. Each of them reads and writes the whole tensor and is "
            "launched by itself, and the backward pass goes through all of them again."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs="The chain of operators, casts included, their backward operators, and the kernels of all.",
        precondition=(
            "The model calls gelu, silu, softmax, layer_norm, group_norm or batch_norm of "
            "torch.nn.functional, itself or in a module that a step calls once, and not in place."
        ),
        variants=(
            Variant("operators", "The textbook's formula in Python's operators.", _operators, max_sites=6),
            Variant(
                "functions",
                "torch.var_mean, rsqrt, addcmul, logsumexp and the like.",
                _functions,
                heldout=True,
                max_sites=6,
            ),
        ),
        lookalikes=(
            Variant(
                "one_row",
                "The fused call, and an activation of one row of its input in two operators.",
                _one_row,
            ),
        ),
        remedy="""\
y = torch.nn.functional.gelu(x)  # nn.GELU, nn.SiLU, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, ...

# What PyTorch has no kernel for:
function = torch.compile(function)  # once
y = function(x)
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://docs.pytorch.org/docs/stable/nn.functional.html",
            "https://github.com/huggingface/nanotron/issues/86",
        ),
    )
)
