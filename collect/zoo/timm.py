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

    return timm.create_model(model, pretrained=False, num_classes=1000)


# model, family, parameters in millions, input size on a GPU, on a CPU (fixed by position embeddings or
# windows where they are equal), demo tier
ROWS = [
    ("cait_xxs24_224", "cait", 11.96, 224, 224, False),
    ("coatnet_0_rw_224", "coatnet", 27.44, 224, 224, False),
    ("convnext_tiny", "convnext", 28.59, 224, 96, False),
    ("deit3_small_patch16_224", "deit", 22.06, 224, 224, False),
    ("densenet121", "densenet", 7.98, 224, 96, False),
    ("edgenext_small", "edgenext", 5.59, 256, 128, False),
    ("efficientnet_b0", "efficientnet", 5.29, 224, 96, False),
    ("eva02_tiny_patch14_224", "eva", 5.7, 224, 224, False),
    ("ghostnet_100", "ghostnet", 5.18, 224, 96, False),
    ("levit_128s", "levit", 7.78, 224, 224, False),
    ("maxvit_tiny_tf_224", "maxvit", 30.92, 224, 224, False),
    ("mixer_s16_224", "mlp_mixer", 18.53, 224, 224, False),
    ("mobilenetv3_large_100", "mobilenetv3", 5.48, 224, 96, True),
    ("mobilevit_s", "mobilevit", 5.58, 256, 128, False),
    ("nfnet_f0", "nfnet", 71.49, 192, 96, False),
    ("poolformer_s12", "poolformer", 11.92, 224, 96, False),
    ("pvt_v2_b0", "pvt", 3.67, 224, 96, False),
    ("regnety_008", "regnet", 6.26, 224, 96, False),
    ("repvgg_a2", "repvgg", 28.21, 224, 96, False),
    ("resnet18", "resnet", 11.69, 224, 96, True),
    ("resnet50", "resnet", 25.56, 224, 96, False),
    ("swin_tiny_patch4_window7_224", "swin", 28.29, 224, 224, False),
    ("vit_small_patch16_224", "vit", 22.05, 224, 224, False),
    ("xcit_tiny_12_p16_224", "xcit", 6.72, 224, 224, False),
]

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
