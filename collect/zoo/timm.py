"""Image classifiers of timm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtraceap.collect.zoo._batches import by_cost
from torchtraceap.collect.zoo._images import Classification
from torchtraceap.collect.zoo._rows import add
from torchtraceap.collect.zoo._timm_rows import ROWS

if TYPE_CHECKING:
    from torch import nn

SMALL = ("mobilenetv3_large_100", "resnet18")
"""The demo tier."""


def _build(model: str) -> nn.Module:
    import timm

    return timm.create_model(model, pretrained=False, num_classes=1000)


for _model, _family, _params, _gpu, _cpu, _costs in ROWS:
    add(
        "timm", "Apache-2.0", "classification", _model, partial(_build, _model), (_family, _family), _params,
        Classification(), ((3, _gpu, _gpu), (3, _cpu, _cpu)), by_cost(*_costs), _model in SMALL,
    )  # fmt: skip
