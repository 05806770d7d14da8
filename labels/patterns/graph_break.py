"""Code in the middle of a compiled model that the compiler cannot trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Loop, ModuleCall, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import spread, watching_sites
from torchtraceap.labels.patterns._compiled import Forward, own_code, version_site

if TYPE_CHECKING:
    from torch import Tensor

LOG = logging.getLogger(__name__)


def _sites(loop: Loop, look: Forward) -> list[Site]:
    """``look(y)`` behind modules spread through the model, inside of the compiled code."""
    root = own_code(loop.model.forward)

    def looked_at(call: ModuleCall) -> Forward:
        original = call.module.forward

        def forward(x: Tensor) -> Tensor:
            return look(original(x))

        return own_code(forward)

    return [
        version_site({loop.model: root, call.module: looked_at(call)}) for call in spread(loop.module_calls())
    ]


def _log(loop: Loop) -> list[Site]:
    def look(y: Tensor) -> Tensor:
        LOG.debug("activation of shape %s", y.shape)
        return y

    return _sites(loop, look)


def _item(loop: Loop) -> list[Site]:
    def look(y: Tensor) -> Tensor:
        y.detach().float().mean().item()
        return y

    return _sites(loop, look)


def _branch(loop: Loop) -> list[Site]:
    import torch

    def look(y: Tensor) -> Tensor:
        # Both ways give y; an overflow in half precision must not change what is computed.
        return y if torch.isfinite(y.detach()).all() else y.view_as(y)

    return _sites(loop, look)


def _eager_metric(loop: Loop) -> list[Site]:
    import torch

    total = torch.zeros((), device=loop.device)

    def look(y: Tensor) -> None:
        total.add_(y.detach().float().mean())

    # At stages alone: modules run inside of the compiled code.
    return watching_sites(loop, look, stages=("forward", "logging"), suits=lambda call: False)


def _selects(name: str) -> bool:
    return name.startswith("Torch-Compiled Region") or name in ("aten::item", "aten::is_nonzero")


register(
    Pattern(
        id="graph_break",
        title="Graph break in a compiled model",
        definition=(
            "A compiled model runs code that the compiler cannot trace, so that its graph is broken into "
            "several with Python between them. Each part checks its guards and launches its kernels by "
            "itself, and nothing is fused across a break."
        ),
        # One break splits the code of every module that encloses it: the regions behind it lie inside of
        # each other and reach to the end of the forward pass. No part of the step is the break.
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="selector",
        belongs=(
            "The compiled regions that stand for the one region of the clean forward pass, the reads of a "
            "value that break it, all operators and runtime calls in these, and the kernels that they launch."
        ),
        selects=_selects,
        runtime="compiled",
        precondition="The compiled model draws no random numbers.",
        variants=(
            Variant("log", "A logger is told the shape of an activation.", _log, max_sites=3, settle_steps=2),
            Variant("item", "The mean of an activation is read.", _item, max_sites=3, settle_steps=2),
            Variant(
                "branch",
                "Python branches on whether an activation is finite.",
                _branch,
                heldout=True,
                max_sites=3,
                settle_steps=2,
            ),
        ),
        lookalikes=(
            Variant(
                "eager_metric",
                "The mean of the output is added up on the device, behind the compiled code.",
                _eager_metric,
                max_sites=2,
                mechanism="marker",
            ),
        ),
        remedy="""\
model = torch.compile(model, fullgraph=True)  # an error with the reason, where there would be a break


def forward(self, x):
    y = self.block(x)
    if not torch.compiler.is_compiling():
        logger.debug("activation of shape %s", y.shape)
    return torch.where(torch.isfinite(y).all(), y, torch.zeros_like(y))  # no branch on a tensor's value
""",
        references=(
            "https://docs.pytorch.org/docs/stable/compile/programming_model.common_graph_breaks.html",
            "https://docs.pytorch.org/docs/stable/compile/programming_model.graph_breaks_index.html",
        ),
    )
)
