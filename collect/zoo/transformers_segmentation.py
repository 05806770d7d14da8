"""Semantic, universal, instance and prompted segmentation models of transformers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torchtraceap.collect.model import Adapter, BatchSizes
from torchtraceap.collect.zoo._batches import HEAVY, LARGE, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._images import Segmentation
from torchtraceap.collect.zoo._masks import BoxesWithMasks, MaskSet, PhraseToMask, PointToMask
from torchtraceap.collect.zoo._transformers import Config, add, network

CLASSES = 150
PANOPTIC_CLASSES = 250
DETECTION_CLASSES = 91

SEGMENTATION = Segmentation(CLASSES, logits=attrgetter("logits"))
UNIVERSAL = MaskSet(CLASSES)
TOLD = MaskSet(CLASSES, told=True)
PANOPTIC = BoxesWithMasks(PANOPTIC_CLASSES)
INSTANCE = BoxesWithMasks(DETECTION_CLASSES)
POINT = PointToMask()

STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _swin(width: int, heads: int, depth: int, window: int = 7) -> Config:
    """Swin with ``depth`` blocks in its third stage; ``width`` and ``heads`` of the first, then doubled."""
    return {
        "model_type": "swin",
        "image_size": 32 * window,
        "embed_dim": width,
        "depths": [2, 2, depth, 2],
        "num_heads": [heads, 2 * heads, 4 * heads, 8 * heads],
        "window_size": window,
        "out_features": STAGES,
    }


SWIN_TINY, SWIN_SMALL = _swin(96, 3, 6), _swin(96, 3, 18)
SWIN_BASE, SWIN_LARGE = _swin(128, 4, 18, 12), _swin(192, 6, 18, 12)


def _convnext(width: int, depth: int) -> Config:
    return {
        "model_type": "convnext",
        "depths": [3, 3, depth, 3],
        "hidden_sizes": [width, 2 * width, 4 * width, 8 * width],
        "out_features": STAGES,
    }


CONVNEXT_LARGE = _convnext(192, 27)


def _resnet(depth: int) -> Config:
    """ResNet-50 or -101, by the blocks in its third stage."""
    return {"model_type": "resnet", "depths": [3, 4, depth, 3], "out_features": STAGES}


R50, R101 = _resnet(6), _resnet(23)


def _segformer(depths: tuple[int, ...], decoder: int, width: int = 64) -> Config:
    return {
        "depths": list(depths),
        "hidden_sizes": [width, 2 * width, 5 * width, 8 * width],
        "decoder_hidden_size": decoder,
        "num_labels": CLASSES,
    }


def _on(backbone: Config, **changes: Any) -> Config:
    """A head on a backbone of four stages."""
    return {"backbone_config": backbone, "num_labels": CLASSES, **changes}


def _upernet(backbone: Config) -> Config:
    return _on(backbone, use_auxiliary_head=False)


def _eomt(width: int, layers: int, heads: int, blocks: int, **changes: Any) -> Config:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_blocks": blocks,
        "num_labels": CLASSES,
        **changes,
    }


BEIT_BASE: Config = {
    "image_size": 640,
    "use_relative_position_bias": True,
    "out_indices": [3, 5, 7, 11],
    "num_labels": CLASSES,
}
LARGE_VIT: Config = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
BEIT_LARGE: Config = {**BEIT_BASE, **LARGE_VIT, "out_indices": [7, 11, 15, 23]}
DPT_LARGE: Config = {
    **LARGE_VIT,
    "image_size": 480,
    "backbone_out_indices": [5, 11, 17, 23],
    "neck_hidden_sizes": [256, 512, 1024, 1024],
    "num_labels": CLASSES,
}


def _mobilevit(widths: tuple[int, ...], necks: tuple[int, ...], expand: float) -> Config:
    return {
        "image_size": 512,
        "hidden_sizes": list(widths),
        "neck_hidden_sizes": list(necks),
        "expand_ratio": expand,
        "output_stride": 16,
        "num_labels": CLASSES,
    }


MOBILEVIT_XXS = _mobilevit((64, 80, 96), (16, 16, 24, 48, 64, 80, 320), 2.0)
MOBILEVIT_XS = _mobilevit((96, 120, 144), (16, 32, 48, 64, 80, 96, 384), 4.0)
MOBILEVIT_S = _mobilevit((144, 192, 240), (16, 32, 64, 96, 128, 160, 640), 4.0)


def _sam(width: int, layers: int, heads: int, attend: list[int]) -> Config:
    """The image encoder of Segment Anything, of which layers ``attend`` to all of the image."""
    return {
        "vision_config": {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "mlp_dim": 4 * width,
            "global_attn_indexes": attend,
        }
    }


SAM_BASE = _sam(768, 12, 12, [2, 5, 8, 11])
SAM_LARGE = _sam(1024, 24, 16, [5, 11, 17, 23])
SAM_HUGE = _sam(1280, 32, 16, [7, 15, 23, 31])


def _sam2(
    width: int,
    heads: int,
    blocks: list[int],
    attend: list[int],
    windows: tuple[int, ...] = (8, 4, 14, 7),
    background: int = 7,
) -> Config:
    """Segment Anything 2 on a Hiera, whose width and heads double in each of four stages."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    return {
        "vision_config": {
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": width,
                "num_attention_heads": heads,
                "blocks_per_stage": blocks,
                "embed_dim_per_stage": widths,
                "num_attention_heads_per_stage": [heads, 2 * heads, 4 * heads, 8 * heads],
                "window_size_per_stage": list(windows),
                "window_positional_embedding_background_size": [background, background],
                "global_attention_blocks": attend,
            },
            "backbone_channel_list": widths[::-1],
        }
    }


EDGE_TAM: Config = {
    "vision_config": {
        "backbone_config": {
            "model_type": "timm_wrapper",
            "architecture": "repvit_m1",
            "num_classes": 2,  # unused, but the library wants to know
            "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
        }
    }
}


def _panoptic(backbone: Config) -> Config:
    return {"backbone_config": backbone, "num_labels": PANOPTIC_CLASSES}


def _rf_detr(size: int, decoder_layers: int, queries: int, windows: int = 2) -> Config:
    return {
        "backbone_config": {
            "model_type": "rf_detr_dinov2",
            "hidden_size": 384,
            "num_attention_heads": 6,
            "image_size": size,
            "patch_size": 12,
            "num_windows": windows,
            "out_features": ["stage3", "stage6", "stage9", "stage12"],
        },
        "decoder_layers": decoder_layers,
        "decoder_n_points": 2,
        "num_queries": queries,
        "class_loss_coefficient": 5.0,
        "num_labels": DETECTION_CLASSES,
    }


CLIPSEG: Config = {"vision_config": {"patch_size": 16}}

SEGFORMER, UPERNET = "SegformerForSemanticSegmentation", "UperNetForSemanticSegmentation"
MASK2FORMER, MASKFORMER = "Mask2FormerForUniversalSegmentation", "MaskFormerForInstanceSegmentation"
ONEFORMER, EOMT = "OneFormerForUniversalSegmentation", "EomtForUniversalSegmentation"
EOMT_DINOV3 = "EomtDinov3ForUniversalSegmentation"
BEIT, MOBILEVIT = "BeitForSemanticSegmentation", "MobileViTForSemanticSegmentation"
DETR, RF_DETR = "DetrForSegmentation", "RfDetrForInstanceSegmentation"
CLIPSEG_MODEL = "CLIPSegForImageSegmentation"

Sizes = tuple[tuple[int, int], tuple[int, int]]
ADE: Sizes = ((512, 512), (128, 128))
ADE_LARGE: Sizes = ((640, 640), (128, 128))
COCO: Sizes = ((800, 1088), (128, 128))
FIXED: Sizes = ((640, 640), (640, 640))
ANYTHING: Sizes = ((1024, 1024), (1024, 1024))
"""Positions in the image are embedded at these sizes."""

# OneFormer is built without the text encoder of its contrastive loss: the library would run it at inference
# too. The other losses are as published.

# name, class, configuration, family, backbone family, parameters in millions, adapter, input size on a GPU
# and on a CPU, batches
ROWS: list[tuple[str, str, Config, str, str, float, Adapter, Sizes, BatchSizes]] = [
    ("segformer-b0", SEGFORMER, _segformer((2, 2, 2, 2), 256, 32),
     "segformer", "mix_transformer", 3.75, SEGMENTATION, ADE, MEDIUM),
    ("segformer-b1", SEGFORMER, _segformer((2, 2, 2, 2), 256),
     "segformer", "mix_transformer", 13.72, SEGMENTATION, ADE, MEDIUM),
    ("segformer-b2", SEGFORMER, _segformer((3, 4, 6, 3), 768),
     "segformer", "mix_transformer", 27.46, SEGMENTATION, ADE, MEDIUM),
    ("segformer-b3", SEGFORMER, _segformer((3, 4, 18, 3), 768),
     "segformer", "mix_transformer", 47.34, SEGMENTATION, ADE, MEDIUM),
    ("segformer-b4", SEGFORMER, _segformer((3, 8, 27, 3), 768),
     "segformer", "mix_transformer", 64.11, SEGMENTATION, ADE, MEDIUM),
    ("segformer-b5", SEGFORMER, _segformer((3, 6, 40, 3), 768),
     "segformer", "mix_transformer", 84.71, SEGMENTATION, ADE_LARGE, MEDIUM),
    ("upernet-swin-tiny", UPERNET, _upernet(SWIN_TINY),
     "upernet", "swin", 59.02, SEGMENTATION, ADE, MEDIUM),
    ("upernet-swin-small", UPERNET, _upernet(SWIN_SMALL),
     "upernet", "swin", 80.34, SEGMENTATION, ADE, MEDIUM),
    ("upernet-swin-base", UPERNET, _upernet(SWIN_BASE),
     "upernet", "swin", 120.2, SEGMENTATION, ADE_LARGE, MEDIUM),
    ("upernet-swin-large", UPERNET, _upernet(SWIN_LARGE),
     "upernet", "swin", 232.16, SEGMENTATION, ADE_LARGE, NO_CPU_TRAINING),
    ("upernet-convnext-tiny", UPERNET, _upernet(_convnext(96, 9)),
     "upernet", "convnext", 59.32, SEGMENTATION, ADE, MEDIUM),
    ("upernet-convnext-small", UPERNET, _upernet(_convnext(96, 27)),
     "upernet", "convnext", 80.95, SEGMENTATION, ADE, MEDIUM),
    ("upernet-convnext-base", UPERNET, _upernet(_convnext(128, 27)),
     "upernet", "convnext", 120.88, SEGMENTATION, ADE_LARGE, MEDIUM),
    ("upernet-convnext-large", UPERNET, _upernet(CONVNEXT_LARGE),
     "upernet", "convnext", 233.19, SEGMENTATION, ADE_LARGE, NO_CPU_TRAINING),
    ("upernet-convnext-xlarge", UPERNET, _upernet(_convnext(256, 27)),
     "upernet", "convnext", 388.74, SEGMENTATION, ADE_LARGE, NO_CPU_TRAINING),
    ("mask2former-swin-tiny", MASK2FORMER, _on(SWIN_TINY),
     "mask2former", "swin", 47.44, UNIVERSAL, ADE, MEDIUM),
    ("mask2former-swin-small", MASK2FORMER, _on(SWIN_SMALL),
     "mask2former", "swin", 68.76, UNIVERSAL, ADE, MEDIUM),
    ("mask2former-swin-base", MASK2FORMER, _on(SWIN_BASE),
     "mask2former", "swin", 106.92, UNIVERSAL, ADE_LARGE, HEAVY),
    ("mask2former-swin-large", MASK2FORMER, _on(SWIN_LARGE, num_queries=200),
     "mask2former", "swin", 215.54, UNIVERSAL, ADE_LARGE, NO_CPU_TRAINING),
    ("mask2former-resnet-50", MASK2FORMER, _on(R50),
     "mask2former", "resnet", 44.04, UNIVERSAL, ADE, MEDIUM),
    ("mask2former-resnet-101", MASK2FORMER, _on(R101),
     "mask2former", "resnet", 63.03, UNIVERSAL, ADE, MEDIUM),
    ("maskformer-swin-tiny", MASKFORMER, _on(SWIN_TINY),
     "maskformer", "swin", 41.76, UNIVERSAL, ADE, MEDIUM),
    ("maskformer-swin-small", MASKFORMER, _on(SWIN_SMALL),
     "maskformer", "swin", 63.08, UNIVERSAL, ADE, MEDIUM),
    ("maskformer-swin-base", MASKFORMER, _on(SWIN_BASE),
     "maskformer", "swin", 101.83, UNIVERSAL, ADE_LARGE, HEAVY),
    ("maskformer-swin-large", MASKFORMER, _on(SWIN_LARGE),
     "maskformer", "swin", 211.58, UNIVERSAL, ADE_LARGE, NO_CPU_TRAINING),
    ("maskformer-resnet-50", MASKFORMER, _on(R50),
     "maskformer", "resnet", 41.31, UNIVERSAL, ADE, MEDIUM),
    ("maskformer-resnet-101", MASKFORMER, _on(R101),
     "maskformer", "resnet", 60.3, UNIVERSAL, ADE, MEDIUM),
    ("oneformer-swin-tiny", ONEFORMER, _on(SWIN_TINY),
     "oneformer", "swin", 50.74, TOLD, ADE, HEAVY),
    ("oneformer-swin-large", ONEFORMER, _on(SWIN_LARGE),
     "oneformer", "swin", 218.79, TOLD, ADE_LARGE, NO_CPU_TRAINING),
    ("oneformer-convnext-large", ONEFORMER, _on(CONVNEXT_LARGE),
     "oneformer", "convnext", 219.82, TOLD, ADE_LARGE, NO_CPU_TRAINING),
    ("eomt-small", EOMT, _eomt(384, 12, 6, 3),
     "eomt", "dinov2", 23.98, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("eomt-base", EOMT, _eomt(768, 12, 12, 3),
     "eomt", "dinov2", 93.68, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("eomt-large", EOMT, _eomt(1024, 24, 16, 4),
     "eomt", "dinov2", 316.71, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("eomt-dinov3-small", EOMT_DINOV3, _eomt(384, 12, 6, 3, intermediate_size=1536),
     "eomt", "dinov3", 23.36, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("eomt-dinov3-base", EOMT_DINOV3, _eomt(768, 12, 12, 3, intermediate_size=3072),
     "eomt", "dinov3", 92.44, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("eomt-dinov3-large", EOMT_DINOV3, _eomt(1024, 24, 16, 4),
     "eomt", "dinov3", 315.05, UNIVERSAL, FIXED, NO_CPU_TRAINING),
    ("beit-base", BEIT, BEIT_BASE, "beit", "beit", 163.41, SEGMENTATION, ((640, 640), (224, 224)), MEDIUM),
    ("beit-large", BEIT, BEIT_LARGE,
     "beit", "beit", 441.27, SEGMENTATION, ((640, 640), (224, 224)), NO_CPU_TRAINING),
    ("dpt-large-ade", "DPTForSemanticSegmentation", DPT_LARGE,
     "dpt", "vit", 344.29, SEGMENTATION, ((480, 480), (128, 128)), NO_CPU_TRAINING),
    ("mobilevit-xx-small", MOBILEVIT, MOBILEVIT_XXS, "deeplabv3",
     "mobilevit", 1.89, SEGMENTATION, ADE, MEDIUM),
    ("mobilevit-x-small", MOBILEVIT, MOBILEVIT_XS, "deeplabv3", "mobilevit", 2.98, SEGMENTATION, ADE, MEDIUM),
    ("mobilevit-small", MOBILEVIT, MOBILEVIT_S, "deeplabv3", "mobilevit", 6.39, SEGMENTATION, ADE, MEDIUM),
    ("mobilevitv2-1.0", "MobileViTV2ForSemanticSegmentation",
     {"image_size": 512, "output_stride": 16, "num_labels": CLASSES},
     "deeplabv3", "mobilevitv2", 13.38, SEGMENTATION, ADE, MEDIUM),
    ("deeplabv3-mobilenet-v2", "MobileNetV2ForSemanticSegmentation",
     {"image_size": 513, "output_stride": 16, "num_labels": CLASSES},
     "deeplabv3", "mobilenetv2", 2.56, SEGMENTATION, ((513, 513), (129, 129)), MEDIUM),
    ("detr-resnet-50-panoptic", DETR, _panoptic(R50), "detr", "resnet", 42.9, PANOPTIC, COCO, HEAVY),
    ("detr-resnet-101-panoptic", DETR, _panoptic(R101), "detr", "resnet", 61.84, PANOPTIC, COCO, HEAVY),
    ("rf-detr-seg-nano", RF_DETR, _rf_detr(312, 4, 100, windows=1),
     "rf_detr", "dinov2", 33.58, INSTANCE, ((312, 312), (192, 192)), MEDIUM),
    ("rf-detr-seg-medium", RF_DETR, _rf_detr(432, 5, 200),
     "rf_detr", "dinov2", 35.69, INSTANCE, ((432, 432), (192, 192)), MEDIUM),
    ("rf-detr-seg-xlarge", RF_DETR, _rf_detr(624, 6, 300),
     "rf_detr", "dinov2", 38.11, INSTANCE, ((624, 624), (240, 240)), NO_CPU_TRAINING),
    ("sam-base", "SamModel", SAM_BASE, "sam", "vit", 93.74, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam-large", "SamModel", SAM_LARGE, "sam", "vit", 312.34, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam-huge", "SamModel", SAM_HUGE, "sam", "vit", 641.09, POINT, ANYTHING, LARGE),
    ("sam-hq-base", "SamHQModel", SAM_BASE, "sam", "vit", 94.81, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam2-hiera-tiny", "Sam2Model", _sam2(96, 1, [1, 2, 7, 2], [5, 7, 9]),
     "sam2", "hiera", 31.44, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam2-hiera-small", "Sam2Model", _sam2(96, 1, [1, 2, 11, 2], [7, 10, 13]),
     "sam2", "hiera", 38.54, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam2-hiera-base-plus", "Sam2Model", _sam2(112, 2, [2, 3, 16, 3], [12, 16, 20], background=14),
     "sam2", "hiera", 73.33, POINT, ANYTHING, NO_CPU_TRAINING),
    ("sam2-hiera-large", "Sam2Model", _sam2(144, 2, [2, 6, 36, 4], [23, 33, 43], (8, 4, 16, 8)),
     "sam2", "hiera", 216.92, POINT, ANYTHING, NO_CPU_TRAINING),
    ("edgetam", "EdgeTamModel", EDGE_TAM, "edgetam", "repvit", 9.12, POINT, ANYTHING, NO_CPU_TRAINING),
    ("clipseg-rd64", CLIPSEG_MODEL, CLIPSEG,
     "clipseg", "vit", 150.69, PhraseToMask(), ((352, 352), (224, 224)), MEDIUM),
    ("clipseg-rd64-refined", CLIPSEG_MODEL, {**CLIPSEG, "use_complex_transposed_convolution": True},
     "clipseg", "vit", 150.75, PhraseToMask(), ((352, 352), (224, 224)), MEDIUM),
]  # fmt: skip

for _name, _class, _config, _family, _backbone, _params, _adapter, (_gpu, _cpu), _batches in ROWS:
    add(
        "segmentation", _name, network(_class, _config), (_family, _backbone), _params, _adapter,
        ((3, *_gpu), (3, *_cpu)), _batches,
    )  # fmt: skip
