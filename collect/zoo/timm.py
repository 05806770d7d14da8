"""Image classifiers of timm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtraceap.collect.model import ModelSpec, register
from torchtraceap.collect.zoo._batches import by_cost
from torchtraceap.collect.zoo._images import Classification
from torchtraceap.collect.zoo._timm_rows import ROWS

if TYPE_CHECKING:
    from torch import nn

SMALL = ("mobilenetv3_large_100", "resnet18")
"""The demo tier."""


def _build(model: str) -> nn.Module:
    import timm

    return timm.create_model(model, pretrained=False, num_classes=1000)


for _model, _family, _params, _gpu, _cpu, _costs in ROWS:
    register(
        ModelSpec(
            name=f"timm/{_model}",
            source="timm",
            task="classification",
            family=_family,
            backbone_family=_family,
            licence="Apache-2.0",
            params_m=_params,
            build=partial(_build, _model),
            adapter=Classification(),
            gpu_size=(3, _gpu, _gpu),
            cpu_size=(3, _cpu, _cpu),
            batch_sizes=by_cost(*_costs),
            small=_model in SMALL,
        )
    )
