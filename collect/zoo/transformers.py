"""Depth, pose, segmentation and detection models of transformers, built from configurations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes, ModelSpec, register
from torchtraceap.collect.zoo._batches import LIGHT, MEDIUM
from torchtraceap.collect.zoo._boxes import random_boxes
from torchtraceap.collect.zoo._images import Depth, Pose, Segmentation, normalised, random_images

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SEGMENTATION_CLASSES = 150
DETECTION_CLASSES = 91


def _build(architecture: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    model = getattr(transformers, architecture)
    return model(model.config_class(**config))


@dataclass(frozen=True)
class SetPrediction:
    """Image to a fixed set of boxes and class logits; the model matches them with the targets itself.

    Batch: image uint8 [B, 3, H, W], boxes as relative centre and extent fp32 [B, K, 4], labels int64 [B, K].
    """

    boxes: int = 8

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, self.boxes)
        return {
            "image": random_images(batch_size, size, generator),
            "boxes": torch.cat(random_boxes(batch_size, self.boxes, generator), dim=-1),
            "labels": torch.randint(0, DETECTION_CLASSES, shape, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        pixels = normalised(batch["image"])
        if not training:
            output = model(pixel_values=pixels)
            return {"logits": output.logits, "boxes": output.pred_boxes}
        pairs = zip(batch["boxes"].unbind(), batch["labels"].unbind(), strict=True)
        targets = [{"boxes": boxes, "class_labels": labels} for boxes, labels in pairs]
        return {"loss": model(pixel_values=pixels, labels=targets).loss}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        return output["loss"]


DEPTH = Depth(depth=attrgetter("predicted_depth"))
POSE = Pose(heatmaps=attrgetter("heatmaps"))
SEGMENTATION = Segmentation(SEGMENTATION_CLASSES, logits=attrgetter("logits"))
DETECTION = SetPrediction()

DEPTH_ANYTHING_SMALL = {
    "backbone_config": {
        "model_type": "dinov2",
        "image_size": 518,
        "patch_size": 14,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "out_indices": [3, 6, 9, 12],
        "reshape_hidden_states": False,
    },
    "reassemble_hidden_size": 384,
    "neck_hidden_sizes": [48, 96, 192, 384],
    "fusion_hidden_size": 64,
}
GLPN_B0 = {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 160, 256], "decoder_hidden_size": 64}
GLPN_NYU = {"depths": [3, 8, 27, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 64}


def _vitpose(hidden_size: int, heads: int, simple_decoder: bool = False) -> dict[str, Any]:
    return {
        "backbone_config": {
            "model_type": "vitpose_backbone",
            "image_size": [256, 192],
            "hidden_size": hidden_size,
            "num_hidden_layers": 12,
            "num_attention_heads": heads,
            "out_indices": [12],
        },
        "num_labels": POSE.keypoints,
        "use_simple_decoder": simple_decoder,
    }


SEGFORMER_B0 = {
    "depths": [2, 2, 2, 2],
    "hidden_sizes": [32, 64, 160, 256],
    "decoder_hidden_size": 256,
    "num_labels": SEGMENTATION_CLASSES,
}


def _upernet(backbone: dict[str, Any]) -> dict[str, Any]:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    return {
        "backbone_config": {**backbone, "out_features": stages},
        "use_auxiliary_head": False,
        "num_labels": SEGMENTATION_CLASSES,
    }


UPERNET_SWIN = _upernet({"model_type": "swin"})
DETR_R50 = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]},
    "num_labels": DETECTION_CLASSES,
}
YOLOS_TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": [512, 512],
    "use_mid_position_embeddings": False,
    "num_labels": DETECTION_CLASSES,
}
RT_DETR_R18 = {
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "layer_type": "basic",
        "depths": [2, 2, 2, 2],
        "hidden_sizes": [64, 128, 256, 512],
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_in_channels": [128, 256, 512],
    "decoder_layers": 3,
    "num_labels": DETECTION_CLASSES,
}

# name, class, configuration, task, family, backbone family, parameters in millions, adapter, input size on a
# GPU, on a CPU, batches, demo tier
ROWS: list[
    tuple[
        str, str, dict[str, Any], str, str, str, float, Adapter, tuple[int, int], tuple[int, int], BatchSizes,
        bool,
    ]
] = [
    ("depth-anything-small", "DepthAnythingForDepthEstimation", DEPTH_ANYTHING_SMALL, "depth",
     "depth_anything", "dinov2", 24.79, DEPTH, (518, 518), (112, 112), MEDIUM, False),
    ("glpn-b0", "GLPNForDepthEstimation", GLPN_B0, "depth",
     "glpn", "mix_transformer", 3.66, DEPTH, (480, 640), (96, 96), MEDIUM, True),
    ("glpn-nyu", "GLPNForDepthEstimation", GLPN_NYU, "depth",
     "glpn", "mix_transformer", 61.22, DEPTH, (480, 640), (96, 96), MEDIUM, False),
    ("vitpose-tiny-simple", "VitPoseForPoseEstimation", _vitpose(192, 3, simple_decoder=True), "pose",
     "vitpose", "vit", 5.55, POSE, (256, 192), (256, 192), LIGHT, True),
    ("vitpose-small", "VitPoseForPoseEstimation", _vitpose(384, 6), "pose",
     "vitpose", "vit", 24.29, POSE, (256, 192), (256, 192), LIGHT, False),
    ("vitpose-base", "VitPoseForPoseEstimation", _vitpose(768, 12), "pose",
     "vitpose", "vit", 89.99, POSE, (256, 192), (256, 192), LIGHT, False),
    ("segformer-b0", "SegformerForSemanticSegmentation", SEGFORMER_B0, "segmentation",
     "segformer", "mix_transformer", 3.75, SEGMENTATION, (512, 512), (128, 128), MEDIUM, False),
    ("upernet-swin-tiny", "UperNetForSemanticSegmentation", UPERNET_SWIN, "segmentation",
     "upernet", "swin", 59.02, SEGMENTATION, (512, 512), (128, 128), MEDIUM, False),
    ("detr-resnet-50", "DetrForObjectDetection", DETR_R50, "detection",
     "detr", "resnet", 41.52, DETECTION, (800, 1088), (128, 128), MEDIUM, False),
    ("rt-detr-r18", "RTDetrForObjectDetection", RT_DETR_R18, "detection",
     "rt_detr", "resnet", 26.49, DETECTION, (640, 640), (192, 192), MEDIUM, False),
    ("yolos-tiny", "YolosForObjectDetection", YOLOS_TINY, "detection",
     "yolos", "vit", 5.89, DETECTION, (512, 512), (128, 128), MEDIUM, False),
]  # fmt: skip

for (
    _name, _class, _config, _task, _family, _backbone, _params, _adapter, _gpu, _cpu, _batches, _small,
) in ROWS:  # fmt: skip
    register(
        ModelSpec(
            name=f"transformers/{_name}",
            source="transformers",
            task=_task,
            family=_family,
            backbone_family=_backbone,
            licence="Apache-2.0",
            params_m=_params,
            build=partial(_build, _class, _config),
            adapter=_adapter,
            gpu_size=(3, *_gpu),
            cpu_size=(3, *_cpu),
            batch_sizes=_batches,
            small=_small,
        )
    )
