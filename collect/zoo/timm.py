"""Image classifiers of timm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtraceap.collect.model import ModelSpec, register
from torchtraceap.collect.zoo._batches import LIGHT
from torchtraceap.collect.zoo._images import Classification

if TYPE_CHECKING:
    from torch import nn


def _build(model: str) -> nn.Module:
    import timm

    return timm.create_model(model, pretrained=False)


# model, family, parameters in millions, input size on a GPU, on a CPU, demo tier
ROWS = [
    ("resnet18", "resnet", 11.69, 224, 96, True),
    ("resnet50", "resnet", 25.56, 224, 128, False),
    ("vit_small_patch16_224", "vit", 22.05, 224, 224, False),
]  # fmt: skip

for _model, _family, _params, _gpu, _cpu, _small in ROWS:
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
            batch_sizes=LIGHT,
            small=_small,
        )
    )
