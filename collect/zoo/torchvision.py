"""Classification, detection, segmentation and video models of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes, ModelSpec, register
from torchtraceap.collect.zoo._batches import HEAVY, LIGHT, MEDIUM
from torchtraceap.collect.zoo._boxes import random_boxes
from torchtraceap.collect.zoo._detectors import prepare
from torchtraceap.collect.zoo._images import Classification, Segmentation, random_images

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DETECTION_CLASSES = 91
SEGMENTATION_CLASSES = 21
VIDEO_CLASSES = 400


def _build(model: str, **options: Any) -> nn.Module:
    import torchvision.models

    return torchvision.models.get_model(model, weights=None, **options)


def _build_detector(model: str, size: tuple[int, int]) -> nn.Module:
    detector = _build(model, weights_backbone=None)
    prepare(detector, DETECTION_CLASSES, size)
    return detector


@dataclass(frozen=True)
class Detection:
    """Image to boxes, labels and scores; losses in training.

    Batch: image uint8 [B, 3, H, W], boxes as corner coordinates in pixels fp32 [B, K, 4], labels int64
    [B, K] from 1. Every image holds the same number of boxes, so that nothing is padded: dropping a padding
    would wait for the device.
    """

    boxes: int = 8

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        shape = (batch_size, self.boxes)
        centres, extents = random_boxes(batch_size, self.boxes, generator)
        corners = torch.cat([centres - extents / 2, centres + extents / 2], dim=-1)
        return {
            "image": random_images(batch_size, size, generator),
            "boxes": corners * torch.tensor([width, height, width, height]),
            "labels": torch.randint(1, DETECTION_CLASSES, shape, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        images = list(batch["image"].float().div_(255).unbind())  # the model subtracts means itself
        if not training:
            return model(images)
        pairs = zip(batch["boxes"].unbind(), batch["labels"].unbind(), strict=True)
        return model(images, [{"boxes": boxes, "labels": labels} for boxes, labels in pairs])

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        import torch

        return torch.stack(list(output.values())).sum()


def _add(
    model: str,
    task: str,
    families: tuple[str, str],
    params_m: float,
    build: Callable[[], nn.Module],
    adapter: Adapter,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
    batch_sizes: BatchSizes,
    small: bool = False,
) -> None:
    register(
        ModelSpec(
            name=f"torchvision/{model}",
            source="torchvision",
            task=task,
            family=families[0],
            backbone_family=families[1],
            licence="BSD-3-Clause",
            params_m=params_m,
            build=build,
            adapter=adapter,
            gpu_size=sizes[0],
            cpu_size=sizes[1],
            batch_sizes=batch_sizes,
            small=small,
        )
    )


# model, family, parameters in millions, options
CLASSIFIERS = [
    ("googlenet", "googlenet", 6.62, {"aux_logits": False, "init_weights": False}),
    ("mnasnet1_0", "mnasnet", 4.38, {}),
    ("shufflenet_v2_x1_0", "shufflenet", 2.28, {}),
    ("squeezenet1_1", "squeezenet", 1.24, {}),
    ("vgg11_bn", "vgg", 132.87, {}),
]

# model, family, backbone family, parameters in millions, input size on a GPU, on a CPU, demo tier
DETECTORS = [
    ("fasterrcnn_mobilenet_v3_large_320_fpn", "faster_rcnn", "mobilenetv3", 19.41,
     (320, 320), (128, 128), False),
    ("fasterrcnn_resnet50_fpn", "faster_rcnn", "resnet", 41.81, (800, 1088), (128, 128), False),
    ("fcos_resnet50_fpn", "fcos", "resnet", 32.32, (800, 1088), (128, 128), False),
    ("retinanet_resnet50_fpn", "retinanet", "resnet", 34.07, (800, 1088), (128, 128), False),
    ("ssd300_vgg16", "ssd", "vgg", 35.64, (300, 300), (300, 300), False),
    ("ssdlite320_mobilenet_v3_large", "ssd", "mobilenetv3", 3.44, (320, 320), (160, 160), True),
]  # fmt: skip

# model, family, backbone family, parameters in millions, demo tier
SEGMENTERS = [
    ("deeplabv3_mobilenet_v3_large", "deeplabv3", "mobilenetv3", 11.03, False),
    ("fcn_resnet50", "fcn", "resnet", 32.96, False),
    ("lraspp_mobilenet_v3_large", "lraspp", "mobilenetv3", 3.22, True),
]

for _model, _family, _params, _options in CLASSIFIERS:
    _add(
        _model, "classification", (_family, _family), _params, partial(_build, _model, **_options),
        Classification(), ((3, 224, 224), (3, 96, 96)), LIGHT,
    )  # fmt: skip

for _model, _family, _backbone, _params, _gpu, _cpu, _small in DETECTORS:
    _add(
        _model, "detection", (_family, _backbone), _params, partial(_build_detector, _model, _cpu),
        Detection(), ((3, *_gpu), (3, *_cpu)), MEDIUM, _small,
    )  # fmt: skip

for _model, _family, _backbone, _params, _small in SEGMENTERS:
    _add(
        _model, "segmentation", (_family, _backbone), _params,
        partial(_build, _model, weights_backbone=None, num_classes=SEGMENTATION_CLASSES),
        Segmentation(SEGMENTATION_CLASSES, logits=itemgetter("out")), ((3, 520, 520), (3, 96, 96)), MEDIUM,
        _small,
    )  # fmt: skip

_add(
    "r3d_18", "classification", ("resnet3d", "resnet3d"), 33.37, partial(_build, "r3d_18"),
    Classification(VIDEO_CLASSES), ((3, 16, 112, 112), (3, 8, 56, 56)), HEAVY,
)  # fmt: skip
