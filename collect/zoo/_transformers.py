"""How rows of transformers are built and registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.zoo import _rows

if TYPE_CHECKING:
    from torch import Tensor, nn

Config = dict[str, Any]

NOISE = (128, 128)
"""Height and width of the image whose statistics frozen batch norms get: 16 places at a stride of 32."""


def build(architecture: str, config: Config) -> nn.Module:
    """A network of random weights: the class and its configuration, in which a backbone is a dictionary."""
    import transformers

    model = getattr(transformers, architecture)
    network = model(model.config_class(**config))
    _settle(network)
    return network


def _settle(network: nn.Module) -> None:
    """Give frozen batch norms the statistics of a forward pass of noise through the backbone.

    A checkpoint would bring statistics that go with its weights. Means of 0 and variances of 1 do not go with
    random ones: each residual block doubles the variance then, activations of a ResNet-101 end at 1e5, and
    gradients of a detector behind it can overflow.
    """
    import torch

    def measure(norm: Any, inputs: tuple[Tensor]) -> None:
        norm.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        norm.running_var.copy_(inputs[0].var((0, 2, 3)))

    frozen = [one for one in network.modules() if type(one).__name__.endswith("FrozenBatchNorm2d")]
    if not frozen:
        return
    hooks = [norm.register_forward_pre_hook(measure) for norm in frozen]
    backbone = next(one for name, one in network.named_modules() if name.split(".")[-1] == "backbone")
    with torch.no_grad():
        backbone(torch.randn(1, 3, *NOISE), torch.ones(1, *NOISE, dtype=torch.bool))
    for hook in hooks:
        hook.remove()


def network(architecture: str, config: Config) -> Callable[[], nn.Module]:
    """:func:`build`, later."""
    return partial(build, architecture, config)


add = partial(_rows.add, "transformers", "Apache-2.0")
