"""Segmentation models of segmentation_models_pytorch: a decoder on an encoder.

Encoders ``mit_b*`` stay out: their file is under a licence that forbids commercial use.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtraceap.collect.model import ModelSpec, register
from torchtraceap.collect.zoo._batches import MEDIUM
from torchtraceap.collect.zoo._images import Segmentation

if TYPE_CHECKING:
    from torch import nn

CLASSES = 21


def _build(decoder: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch

    architecture = getattr(segmentation_models_pytorch, decoder)
    return architecture(encoder_name=encoder, encoder_weights=None, classes=CLASSES)


# decoder, its family, encoder, its family, parameters in millions, demo tier
ROWS = [
    ("DeepLabV3Plus", "deeplabv3plus", "resnet34", "resnet", 22.44, False),
    ("FPN", "fpn", "efficientnet-b0", "efficientnet", 5.76, False),
    ("FPN", "fpn", "mobilenet_v2", "mobilenetv2", 4.22, False),
    ("Linknet", "linknet", "resnet18", "resnet", 11.66, True),
    ("MAnet", "manet", "mobilenet_v2", "mobilenetv2", 48.89, False),
    ("PSPNet", "pspnet", "resnet34", "resnet", 21.53, False),
    ("Unet", "unet", "efficientnet-b0", "efficientnet", 6.25, False),
    ("Unet", "unet", "mobilenet_v2", "mobilenetv2", 6.63, True),
    ("Unet", "unet", "resnet34", "resnet", 24.44, False),
]

for _decoder, _family, _encoder, _backbone_family, _params, _small in ROWS:
    register(
        ModelSpec(
            name=f"smp/{_decoder.lower()}-{_encoder}",
            source="smp",
            task="segmentation",
            family=_family,
            backbone_family=_backbone_family,
            licence="MIT",
            params_m=_params,
            build=partial(_build, _decoder, _encoder),
            adapter=Segmentation(classes=CLASSES),
            gpu_size=(3, 512, 512),
            cpu_size=(3, 64, 64),
            batch_sizes=MEDIUM,
            small=_small,
        )
    )
