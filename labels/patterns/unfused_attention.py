"""Attention is computed step by step, with all its scores in memory."""

from __future__ import annotations

import math
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
    from torch import Tensor

FUNCTION = "scaled_dot_product_attention"
DROPOUT_POSITION = 4

MAX_SCORES = 2**28
"""1 GiB in float32. Several tensors of this size are alive until the backward pass."""


def _can_unfuse(call: FunctionCall) -> bool:
    if "dropout_p" in call.has or DROPOUT_POSITION in call.positions:
        return False  # another order of operations draws other random numbers
    if len(call.shapes) < 3:
        return False  # query, key or value went by name
    query, key = call.shapes[:2]
    if query[:-2] != key[:-2] and "enable_gqa" not in call.has:
        return False  # dimensions that broadcast
    return math.prod(query[:-1]) * key[-2] <= MAX_SCORES


def _sites(loop: Loop, body: Body) -> list[Site]:
    calls = [call for call in loop.function_calls(FUNCTION) if _can_unfuse(call)]
    return [FunctionSite(call, body) for call in spread(calls)]


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """True where a key may be seen, bool, shape (queries, keys)."""
    import torch

    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Weights from scores, both of shape (..., queries, keys). A query that may see no key gets zeros."""
    import torch

    if mask is None:
        return scores.softmax(-1)
    if mask.dtype != torch.bool:
        return (scores + mask).softmax(-1)
    hidden = ~mask
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)


def _like_fused(y: Tensor, query: Tensor) -> Tensor:
    """Lay out a result of four dimensions as the fused kernels do, in the order of the query's strides.

    Most models hold the heads of a token together, and merge them next. The copy that this would take here
    is the pattern's, and so belongs inside of it.
    """
    order = _order(query)
    if y.ndim != 4 or order == [0, 1, 2, 3]:
        return y
    return y.permute(order).contiguous().permute(_inverse(order))


def _gradient_like_fused(x: Tensor) -> Tensor:
    """``x`` through views that give its gradient the memory order of ``x``, as the fused kernels do.

    The gradients of the products have the plain order. Where a model splits heads by a view, its backward
    would copy them, which is the pattern's copy, too. A view into a larger tensor is left alone: its backward
    writes into a gradient of that tensor, in whatever order.
    """
    order = _order(x)
    dense = x.permute(order)
    if not x.requires_grad or order == sorted(order) or not dense.is_contiguous():
        return x
    return dense.view(-1).view(dense.shape).permute(_inverse(order))


def _order(x: Tensor) -> list[int]:
    """Dimensions from the one with the largest stride to the one with the smallest."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _share_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of grouped queries, repeated for every head of the query."""
    groups = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(groups, -3), value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)


def _written_out(attend: Body) -> Body:
    """``attend(query, key, value, mask, scale)`` with the signature of scaled_dot_product_attention."""

    def body(
        original: Body,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value = map(_gradient_like_fused, (query, key, value))
        if enable_gqa:
            key, value = _share_heads(query, key, value)
        mask = _causal_mask(query, key) if is_causal else attn_mask
        y: Tensor = attend(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale)
        return _like_fused(y, query)

    return body


def _matmul_softmax(loop: Loop) -> list[Site]:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return _softmax((query * scale) @ key.mT, mask) @ value

    return _sites(loop, _written_out(attend))


def _baddbmm(loop: Loop) -> list[Site]:
    import torch

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        shape = (*query.shape[:-1], key.shape[-2])
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        bias = torch.empty(1, 1, 1, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(bias, q, k.mT, beta=0, alpha=scale)
        weights = _softmax(scores.view(shape), mask).view(scores.shape)
        return torch.bmm(weights, v).view(*query.shape[:-1], v.shape[-1])

    return _sites(loop, _written_out(attend))


def _einsum(loop: Loop) -> list[Site]:
    import torch

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = torch.einsum("...qc,...kc->...qk", query * scale, key)
        return torch.einsum("...qk,...kc->...qc", _softmax(scores, mask), value)

    return _sites(loop, _written_out(attend))


def _one_query(loop: Loop) -> list[Site]:
    def body(original: Body, query: Tensor, key: Tensor, *args: object, **kwargs: object) -> Tensor:
        if key.shape[:-2] == query.shape[:-2]:  # else queries are grouped
            (query.detach()[..., :1, :] @ key.detach().mT).softmax(-1)
        y: Tensor = original(query, key, *args, **kwargs)
        return y

    return _sites(loop, body)


register(
    Pattern(
        id="unfused_attention",
        title="Attention without a fused kernel",
        definition=(
            "Attention is written as a product, a softmax and another product instead of one call of "
            "scaled_dot_product_attention. The scores of all queries with all keys go to memory and back "
            "several times, forward and backward, where a fused kernel keeps them on the chip."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker+backward",
        belongs=(
            "The products, the scaling, the mask, the softmax, the copies that put the heads of the result "
            "and of gradients back in order, their backward operators, and the kernels of all of these."
        ),
        precondition=(
            "The model calls torch.nn.functional.scaled_dot_product_attention without dropout, once in a "
            f"step at the place, with at most 2**{MAX_SCORES.bit_length() - 1} scores; no row of a floating "
            "mask hides every key."
        ),
        variants=(
            Variant("matmul_softmax", "query @ key.mT, softmax, @ value.", _matmul_softmax, max_sites=6),
            Variant("baddbmm", "torch.baddbmm, softmax and torch.bmm.", _baddbmm, max_sites=6),
            Variant("einsum", "Two torch.einsum around a softmax.", _einsum, heldout=True, max_sites=6),
        ),
        lookalikes=(
            Variant(
                "one_query",
                "The fused call, and the weights of the first query alone, as for a picture of them.",
                _one_query,
                max_sites=2,
            ),
        ),
        remedy="""\
y = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
            "https://docs.pytorch.org/tutorials/intermediate/scaled_dot_product_attention_tutorial.html",
            "https://arxiv.org/abs/2205.14135",
        ),
    )
)
