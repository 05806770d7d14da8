"""Classification, detection, pose, segmentation, video and optical flow models of torchvision.

Classifiers that timm holds stay out, unless they are written differently here; so do quantised models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Batch
from torchtraceap.collect.zoo import _rows
from torchtraceap.collect.zoo._batches import by_cost
from torchtraceap.collect.zoo._boxes import random_boxes
from torchtraceap.collect.zoo._detectors import prepare
from torchtraceap.collect.zoo._images import Classification, Segmentation, normalised, random_images

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DETECTION_CLASSES = 91
PERSON_CLASSES = 2
KEYPOINTS = 17
SEGMENTATION_CLASSES = 21
VIDEO_CLASSES = 400

SMALL = ("lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large")
"""The demo tier."""


def _build(model: str, **options: Any) -> nn.Module:
    import torchvision.models

    return torchvision.models.get_model(model, weights=None, **options)


def _build_detector(model: str, classes: int, size: tuple[int, int]) -> nn.Module:
    detector = _build(model, weights_backbone=None)
    prepare(detector, classes, size)
    return detector


@dataclass(frozen=True)
class Detection:
    """Image to boxes, labels and scores (with masks or keypoints, where asked for); losses in training.

    Batch: image uint8 [B, 3, H, W], boxes as corner coordinates in pixels fp32 [B, K, 4], labels int64
    [B, K] from 1, masks uint8 [B, K, H, W], keypoints as x, y in pixels and visibility fp32 [B, K, 17, 3].
    Every image holds the same number of boxes, so that nothing is padded: dropping a padding would wait for
    the device.
    """

    classes: int = DETECTION_CLASSES
    boxes: int = 8
    masks: bool = False
    keypoints: bool = False

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        shape = (batch_size, self.boxes)
        centres, extents = random_boxes(batch_size, self.boxes, generator)
        corners = torch.cat([centres - extents / 2, centres + extents / 2], dim=-1)
        batch = {
            "image": random_images(batch_size, size, generator),
            "boxes": corners * torch.tensor([width, height, width, height]),
            "labels": torch.randint(1, self.classes, shape, generator=generator),
        }
        if self.masks:
            batch["masks"] = _filled(batch["boxes"], height, width)
        if self.keypoints:
            inside = torch.rand(*shape, KEYPOINTS, 2, generator=generator) - 0.5
            points = (centres[:, :, None] + inside * extents[:, :, None]) * torch.tensor([width, height])
            batch["keypoints"] = torch.cat([points, torch.ones(*shape, KEYPOINTS, 1)], dim=-1)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        images = list(batch["image"].float().div_(255).unbind())  # the model subtracts means itself
        if not training:
            return model(images)
        names = [name for name in batch if name != "image"]
        samples = zip(*(batch[name].unbind() for name in names), strict=True)
        return model(images, [dict(zip(names, sample, strict=True)) for sample in samples])

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        import torch

        return torch.stack(list(output.values())).sum()


def _filled(boxes: Tensor, height: int, width: int) -> Tensor:
    """The ellipses in boxes [B, K, 4] as masks uint8 [B, K, height, width]."""
    import torch

    left, top, right, bottom = boxes[..., None, None].unbind(2)
    x = (2 * torch.arange(width) - left - right) / (right - left)
    y = (2 * torch.arange(height)[:, None] - top - bottom) / (bottom - top)
    return (x.square() + y.square() <= 1).to(torch.uint8)


@dataclass(frozen=True)
class Flow:
    """Two frames to the motion from the first to the second, refined in rounds.

    Batch: frames uint8 [B, 2, 3, H, W], flow as x, y in pixels fp32 [B, 2, H, W].
    """

    decay: float = 0.8
    """Weight of a round's error beside that of the next (gamma in the paper of RAFT)."""

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, 2, *size[-2:])
        return {
            "frames": random_images(batch_size, size, generator),
            "flow": torch.randn(shape, generator=generator).mul_(8),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        first, second = normalised(batch["frames"]).unbind(1)
        rounds = model(first, second)
        return rounds if training else rounds[-1]

    def loss(self, output: list[Tensor], batch: Batch) -> Tensor:
        total = (output[0] - batch["flow"]).abs().mean()
        for flow in output[1:]:
            total = total * self.decay + (flow - batch["flow"]).abs().mean()
        return total


# model, family, parameters in millions, input size on a GPU, on a CPU, costs (activations in MB and GFLOP
# by _measure.py), options
CLASSIFIERS: list[tuple[str, str, float, int, int, tuple[float, float], dict[str, Any]]] = [
    ("alexnet", "alexnet", 61.1, 224, 96, (3.6, 0.32), {}),
    ("googlenet", "googlenet", 6.62, 224, 96, (46.0, 0.55), {"aux_logits": False, "init_weights": False}),
    ("maxvit_t", "maxvit", 30.92, 224, 224, (293.1, 11.12), {}),
    ("mnasnet0_75", "mnasnet", 3.17, 224, 96, (37.0, 0.08), {}),
    ("mnasnet1_0", "mnasnet", 4.38, 224, 96, (42.3, 0.12), {}),
    ("mnasnet1_3", "mnasnet", 6.28, 224, 96, (56.8, 0.2), {}),
    ("shufflenet_v2_x0_5", "shufflenet", 1.37, 224, 96, (10.6, 0.02), {}),
    ("shufflenet_v2_x1_0", "shufflenet", 2.28, 224, 96, (19.5, 0.05), {}),
    ("shufflenet_v2_x1_5", "shufflenet", 3.5, 224, 96, (27.3, 0.11), {}),
    ("shufflenet_v2_x2_0", "shufflenet", 7.39, 224, 96, (36.6, 0.22), {}),
    ("squeezenet1_0", "squeezenet", 1.25, 224, 96, (34.1, 0.27), {}),
    ("squeezenet1_1", "squeezenet", 1.24, 224, 96, (20.1, 0.11), {}),
    ("swin_s", "swin", 49.61, 224, 96, (162.1, 3.97), {}),
    ("swin_t", "swin", 28.29, 224, 96, (101.7, 2.21), {}),
    ("swin_v2_s", "swinv2", 49.74, 256, 128, (283.0, 6.26), {}),
    ("swin_v2_t", "swinv2", 28.35, 256, 128, (175.1, 3.45), {}),
    ("vgg11", "vgg", 132.86, 224, 96, (46.6, 3.0), {}),
    ("vgg11_bn", "vgg", 132.87, 224, 96, (74.9, 3.0), {}),
    ("vgg13", "vgg", 133.05, 224, 96, (65.0, 4.36), {}),
    ("vgg13_bn", "vgg", 133.05, 224, 96, (111.7, 4.36), {}),
    ("vgg16", "vgg", 138.36, 224, 96, (70.0, 5.88), {}),
    ("vgg16_bn", "vgg", 138.37, 224, 96, (121.7, 5.88), {}),
    ("vgg19", "vgg", 143.67, 224, 96, (74.9, 7.41), {}),
    ("vgg19_bn", "vgg", 143.68, 224, 96, (131.6, 7.41), {}),
    ("vit_b_16", "vit", 86.57, 224, 224, (147.8, 35.13), {}),
    ("vit_b_32", "vit", 88.22, 224, 224, (33.9, 8.82), {}),
]  # fmt: skip

COCO, REDUCED = (800, 1088), (128, 128)

# model, family, backbone family, parameters in millions, input size on a GPU, on a CPU, costs as above
DETECTORS = [
    ("fasterrcnn_mobilenet_v3_large_320_fpn", "faster_rcnn", "mobilenetv3", 19.41,
     (320, 320), REDUCED, (115.6, 7.71)),
    ("fasterrcnn_mobilenet_v3_large_fpn", "faster_rcnn", "mobilenetv3", 19.41, COCO, REDUCED, (766.4, 7.83)),
    ("fasterrcnn_resnet50_fpn", "faster_rcnn", "resnet", 41.81, COCO, REDUCED, (1662.5, 20.85)),
    ("fasterrcnn_resnet50_fpn_v2", "faster_rcnn", "resnet", 43.71, COCO, REDUCED, (2068.4, 139.76)),
    ("fcos_resnet50_fpn", "fcos", "resnet", 32.32, COCO, REDUCED, (1790.9, 6.56)),
    ("maskrcnn_resnet50_fpn", "mask_rcnn", "resnet", 44.45, COCO, REDUCED, (1685.0, 70.86)),
    ("maskrcnn_resnet50_fpn_v2", "mask_rcnn", "resnet", 46.36, COCO, REDUCED, (2095.9, 189.78)),
    ("retinanet_resnet50_fpn", "retinanet", "resnet", 34.07, COCO, REDUCED, (2050.3, 7.75)),
    ("retinanet_resnet50_fpn_v2", "retinanet", "resnet", 38.2, COCO, REDUCED, (2192.0, 7.78)),
    ("ssd300_vgg16", "ssd", "vgg", 35.64, (300, 300), (300, 300), (139.5, 69.72)),
    ("ssdlite320_mobilenet_v3_large", "ssd", "mobilenetv3", 3.44, (320, 320), (160, 160), (92.3, 0.3)),
]  # fmt: skip

# model, family, backbone family, parameters in millions, costs as above
SEGMENTERS = [
    ("deeplabv3_mobilenet_v3_large", "deeplabv3", "mobilenetv3", 11.03, (336.1, 0.69)),
    ("deeplabv3_resnet101", "deeplabv3", "resnet", 58.63, (1920.9, 16.96)),
    ("deeplabv3_resnet50", "deeplabv3", "resnet", 39.64, (1079.1, 11.5)),
    ("fcn_resnet101", "fcn", "resnet", 51.95, (1875.5, 15.18)),
    ("fcn_resnet50", "fcn", "resnet", 32.96, (1033.7, 9.73)),
    ("lraspp_mobilenet_v3_large", "lraspp", "mobilenetv3", 3.22, (319.0, 0.14)),
]

# model, family, parameters in millions, frames, height and width on a GPU, on a CPU, costs as above
VIDEO: list[tuple[str, str, float, tuple[int, int, int], tuple[int, int, int], tuple[float, float]]] = [
    ("mc3_18", "resnet3d", 11.7, (16, 112, 112), (8, 56, 56), (221.3, 11.34)),
    ("mvit_v1_b", "mvit", 36.61, (16, 224, 224), (16, 224, 224), (1281.8, 141.2)),
    ("mvit_v2_s", "mvit", 34.54, (16, 224, 224), (16, 224, 224), (1465.1, 128.45)),
    ("r2plus1d_18", "resnet3d", 31.51, (16, 112, 112), (8, 56, 56), (478.3, 10.32)),
    ("r3d_18", "resnet3d", 33.37, (16, 112, 112), (8, 56, 56), (161.0, 10.36)),
    ("s3d", "s3d", 8.32, (16, 224, 224), (14, 224, 224), (467.2, 32.28)),
    ("swin3d_b", "swin3d", 88.05, (32, 224, 224), (8, 64, 64), (5499.0, 11.46)),
    ("swin3d_s", "swin3d", 49.82, (32, 224, 224), (8, 64, 64), (4129.7, 6.61)),
    ("swin3d_t", "swin3d", 28.16, (32, 224, 224), (8, 64, 64), (2571.8, 3.81)),
]  # fmt: skip

# model, parameters in millions, costs as above
FLOW = [
    ("raft_large", 5.26, (2296.9, 25.87)),
    ("raft_small", 0.99, (968.0, 5.71)),
]

add = partial(_rows.add, "torchvision", "BSD-3-Clause")

for _model, _family, _params, _gpu_edge, _cpu_edge, _costs, _options in CLASSIFIERS:
    add(
        "classification", _model, partial(_build, _model, **_options), (_family, _family), _params,
        Classification(), ((3, _gpu_edge, _gpu_edge), (3, _cpu_edge, _cpu_edge)), by_cost(*_costs),
    )  # fmt: skip

for _model, _family, _backbone, _params, _gpu, _cpu, _costs in DETECTORS:
    add(
        "detection", _model, partial(_build_detector, _model, DETECTION_CLASSES, _cpu), (_family, _backbone),
        _params, Detection(masks=_family == "mask_rcnn"), ((3, *_gpu), (3, *_cpu)), by_cost(*_costs),
        _model in SMALL,
    )  # fmt: skip

add(
    "pose", "keypointrcnn_resnet50_fpn",
    partial(_build_detector, "keypointrcnn_resnet50_fpn", PERSON_CLASSES, REDUCED),
    ("keypoint_rcnn", "resnet"), 59.19, Detection(PERSON_CLASSES, keypoints=True),
    ((3, *COCO), (3, *REDUCED)), by_cost(1690.0, 558.68),
)  # fmt: skip

for _model, _family, _backbone, _params, _costs in SEGMENTERS:
    add(
        "segmentation", _model,
        partial(_build, _model, weights_backbone=None, num_classes=SEGMENTATION_CLASSES),
        (_family, _backbone), _params, Segmentation(SEGMENTATION_CLASSES, logits=itemgetter("out")),
        ((3, 520, 520), (3, 96, 96)), by_cost(*_costs), _model in SMALL,
    )  # fmt: skip

for _model, _family, _params, _gpu_clip, _cpu_clip, _costs in VIDEO:
    add(
        "classification", _model, partial(_build, _model), (_family, _family), _params,
        Classification(VIDEO_CLASSES), ((3, *_gpu_clip), (3, *_cpu_clip)), by_cost(*_costs),
    )  # fmt: skip

for _model, _params, _costs in FLOW:
    add(
        "other", _model, partial(_build, _model), ("raft", "raft"), _params, Flow(),
        ((2, 3, 400, 720), (2, 3, 128, 128)), by_cost(*_costs),
    )  # fmt: skip
