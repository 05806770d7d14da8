"""Object detectors of transformers: queries that are matched with the objects, and detection by prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, HEAVY, INFER_ONLY, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._boxes import random_boxes
from torchtraceap.collect.zoo._images import normalised, random_images
from torchtraceap.collect.zoo._transformers import Config, add, network

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CLASSES = 91


@dataclass(frozen=True)
class SetPrediction:
    """Image to a fixed set of boxes and class logits; the model matches them with the targets itself.

    Batch: image uint8 [B, 3, H, W], boxes as relative centre and extent fp32 [B, K, 4], labels int64 [B, K],
    and for a model that takes a prompt its tokens int64 [B, T].

    Attributes:
        boxes: Objects an image, K.
        prompt: The classes are words of a prompt (see :func:`class_names`), as many as this; 0 for none.
    """

    boxes: int = 8
    prompt: int = 0

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, self.boxes)
        batch = {
            "image": random_images(batch_size, size, generator),
            "boxes": torch.cat(random_boxes(batch_size, self.boxes, generator), dim=-1),
            "labels": torch.randint(0, self.prompt or CLASSES, shape, generator=generator),
        }
        if self.prompt:
            batch["tokens"] = class_names(batch_size, self.prompt, generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        inputs: dict[str, Any] = {"pixel_values": normalised(batch["image"])}
        if self.prompt:
            inputs["input_ids"] = batch["tokens"]
        if not training:
            output = model(**inputs)
            # Behind the prompt's tokens the model pads its logits with -inf.
            logits = output.logits[..., : inputs["input_ids"].shape[1]] if self.prompt else output.logits
            return {"logits": logits, "boxes": output.pred_boxes}
        pairs = zip(batch["boxes"].unbind(), batch["labels"].unbind(), strict=True)
        targets = [{"boxes": boxes, "class_labels": labels} for boxes, labels in pairs]
        return {"loss": model(**inputs, labels=targets).loss}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        return output["loss"]


def class_names(batch_size: int, count: int, generator: torch.Generator) -> Tensor:
    """Tokens int64 [B, 2 * count + 2] of BERT for "[CLS] word . word . [SEP]", words at random."""
    import torch

    tokens = torch.full((batch_size, 2 * count + 2), 1012)  # full stops
    tokens[:, 0], tokens[:, -1] = 101, 102
    tokens[:, 1:-1:2] = torch.randint(2000, 29000, (batch_size, count), generator=generator)
    return tokens


@dataclass(frozen=True)
class PromptedDetection:
    """Image and a phrase for each class to boxes and scores; the library has no loss for these models.

    Batch: image uint8 [B, 3, H, W], tokens of the phrases int64 [B, classes, 16].
    """

    classes: int = 16

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        shape = (batch_size, self.classes, 16)
        return {
            "image": random_images(batch_size, size, generator),
            "tokens": torch.randint(1, 49000, shape, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        output = model(pixel_values=normalised(batch["image"]), input_ids=batch["tokens"].flatten(0, 1))
        return {"logits": output.logits, "boxes": output.pred_boxes}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        raise NotImplementedError("prompted detectors are not trained here")


DETECTION = SetPrediction()
GROUNDING = SetPrediction(prompt=20)
PROMPTED = PromptedDetection()

BASIC: Config = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
R18: Config = {**BASIC, "depths": [2, 2, 2, 2]}
R34: Config = {**BASIC, "depths": [3, 4, 6, 3]}
R50: Config = {}
R101: Config = {"depths": [3, 4, 23, 3]}


def _detr(resnet: Config, **changes: Any) -> Config:
    """DETR and its kin on the last stage of a ResNet."""
    return {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": {"model_type": "resnet", "out_features": ["stage4"], **resnet},
        "num_labels": CLASSES,
        **changes,
    }


DC5: Config = {"dilation": True, "num_labels": CLASSES}
"""The last stage is dilated; of backbones only timm's can be so, whose ResNet-50 is the default."""
ON_TIMM: Config = {"num_labels": CLASSES}
"""On a ResNet-50 of timm, the default of the classes."""


def _rt_detr(resnet: Config, **changes: Any) -> Config:
    stages = ["stage2", "stage3", "stage4"]
    return {
        "backbone_config": {"model_type": "rt_detr_resnet", "out_features": stages, **resnet},
        "num_labels": CLASSES,
        **changes,
    }


ON_BASIC: Config = {"encoder_in_channels": [128, 256, 512]}
RT_DETR_R18 = _rt_detr(R18, **ON_BASIC, decoder_layers=3)
RT_DETR_R34 = _rt_detr(R34, **ON_BASIC, decoder_layers=4, hidden_expansion=0.5)
RT_DETR_V2_R18 = _rt_detr(R18, **ON_BASIC, decoder_layers=3, hidden_expansion=0.5)
RT_DETR_R50 = _rt_detr(R50)
RT_DETR_R50M = _rt_detr(R50, hidden_expansion=0.5)
RT_DETR_R101 = _rt_detr(
    R101, encoder_hidden_dim=384, encoder_ffn_dim=2048, decoder_in_channels=[384, 384, 384]
)


def _hgnet(
    stem: tuple[int, int],
    inner: tuple[int, ...],
    outer: tuple[int, ...],
    blocks: tuple[int, ...],
    layers: int,
    affine: bool = False,
) -> Config:
    """An HGNetV2 for D-FINE: widths of its stem, of the layers inside of a stage and of a stage's output."""
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, *stem],
        "stage_in_channels": [stem[1], *outer[:-1]],
        "stage_mid_channels": list(inner),
        "stage_out_channels": list(outer),
        "hidden_sizes": list(outer),
        "stage_num_blocks": list(blocks),
        "stage_numb_of_layers": [layers] * len(outer),
        "use_learnable_affine_block": affine,
        "out_indices": [2, 3, 4],
    }


HGNET_B0 = _hgnet((16, 16), (16, 32, 64, 128), (64, 256, 512, 1024), (1, 1, 2, 1), 3, affine=True)
HGNET_B2 = _hgnet((24, 32), (32, 64, 128, 256), (96, 384, 768, 1536), (1, 1, 3, 1), 4, affine=True)
HGNET_B4 = _hgnet((32, 48), (48, 96, 192, 384), (128, 512, 1024, 2048), (1, 1, 3, 1), 6)
HGNET_B5 = _hgnet((32, 64), (64, 128, 256, 512), (128, 512, 1024, 2048), (1, 2, 5, 2), 6)


def _d_fine(backbone: Config, channels: list[int], layers: int, **changes: Any) -> Config:
    return {
        "backbone_config": backbone,
        "encoder_in_channels": channels,
        "decoder_layers": layers,
        "decoder_n_points": [3, 6, 3],
        "num_labels": CLASSES,
        **changes,
    }


D_FINE_N = _d_fine(
    {**HGNET_B0, "out_indices": [3, 4]}, [512, 1024], 3,
    num_feature_levels=2, encoder_ffn_dim=512, encode_proj_layers=[1], d_model=128, encoder_hidden_dim=128,
    decoder_ffn_dim=512, decoder_n_points=[6, 6], decoder_in_channels=[128, 128], feat_strides=[16, 32],
    depth_mult=0.5, hidden_expansion=0.34,
)  # fmt: skip
D_FINE_S = _d_fine(HGNET_B0, [256, 512, 1024], 3, depth_mult=0.34, hidden_expansion=0.5)
D_FINE_M = _d_fine(HGNET_B2, [384, 768, 1536], 4, depth_mult=0.67)
D_FINE_L = _d_fine(HGNET_B4, [512, 1024, 2048], 6)
D_FINE_X = _d_fine(
    HGNET_B5, [512, 1024, 2048], 6,
    encoder_hidden_dim=384, encoder_ffn_dim=2048, decoder_in_channels=[384, 384, 384],
)  # fmt: skip


def _yolos(width: int, heads: int, size: tuple[int, int], layers: int = 12, **changes: Any) -> Config:
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * width,
        "image_size": list(size),
        "num_labels": CLASSES,
        **changes,
    }


YOLOS_TINY = _yolos(192, 3, (512, 512), use_mid_position_embeddings=False)


def _rf_detr(size: int, decoder_layers: int, **backbone: Any) -> Config:
    return {
        "backbone_config": {
            "model_type": "rf_detr_dinov2",
            "hidden_size": 384,
            "num_attention_heads": 6,
            "image_size": size,
            "patch_size": 16,
            "num_windows": 2,
            "out_features": ["stage3", "stage6", "stage9", "stage12"],
            **backbone,
        },
        "decoder_layers": decoder_layers,
        "decoder_n_points": 2,
        "num_labels": CLASSES,
    }


RF_DETR_BASE = _rf_detr(
    518, 3, patch_size=14, num_windows=4, out_features=["stage2", "stage5", "stage8", "stage11"]
)

SIX_LAYERS: Config = {"num_hidden_layers": 6, "window_block_indices": [0, 2, 4], "out_indices": [1, 3, 5]}
TEN_LAYERS: Config = {
    "num_hidden_layers": 10,
    "window_block_indices": [0, 1, 3, 6, 7, 9],
    "out_indices": [2, 4, 5, 9],
}
TWO_SCALES: Config = {
    "projector_scale_factors": [2.0, 0.5],
    "decoder_self_attention_heads": 12,
    "decoder_cross_attention_heads": 24,
    "decoder_n_points": 4,
    "d_model": 384,
}


def _lw_detr(width: int, layers: Config, **changes: Any) -> Config:
    return {
        "backbone_config": {
            "model_type": "lw_detr_vit",
            "image_size": 1024,
            "hidden_size": width,
            "num_attention_heads": 12,
            **layers,
        },
        "projector_scale_factors": [1.0],
        "decoder_n_points": 2,
        "num_labels": CLASSES,
        **changes,
    }


SWIN_BASE: Config = {
    "backbone_config": {
        "model_type": "swin",
        "image_size": 384,
        "window_size": 12,
        "embed_dim": 128,
        "depths": [2, 2, 18, 2],
        "num_heads": [4, 8, 16, 32],
        "out_indices": [2, 3, 4],
    }
}


def _owl(patch: int, size: int, large: bool = False) -> Config:
    """OWL-ViT on a CLIP whose patches are ``patch`` pixels wide."""
    if not large:
        return {"vision_config": {"image_size": size, "patch_size": patch}}
    return {
        "vision_config": {
            "image_size": size,
            "patch_size": patch,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "projection_dim": 768,
    }


DETR, CONDITIONAL = "DetrForObjectDetection", "ConditionalDetrForObjectDetection"
DAB, DEFORMABLE = "DabDetrForObjectDetection", "DeformableDetrForObjectDetection"
RT_DETR, RT_DETR_V2 = "RTDetrForObjectDetection", "RTDetrV2ForObjectDetection"
D_FINE, YOLOS = "DFineForObjectDetection", "YolosForObjectDetection"
RF_DETR, LW_DETR = "RfDetrForObjectDetection", "LwDetrForObjectDetection"
GROUNDING_DINO, OWL = "GroundingDinoForObjectDetection", "OwlViTForObjectDetection"

Sizes = tuple[tuple[int, int], tuple[int, int]]
COCO: Sizes = ((800, 1088), (128, 128))
"""The shorter side is 800 pixels, as on COCO."""
REAL_TIME: Sizes = ((640, 640), (192, 192))
PATCHES: Sizes = ((640, 640), (320, 320))
"""On a CPU no smaller: there must be more patches than queries."""
WIDE: Sizes = ((512, 864), (128, 128))

# name, class, configuration, family, backbone family, parameters in millions, adapter, input size on a GPU
# and on a CPU, batches
ROWS: list[tuple[str, str, Config, str, str, float, Adapter, Sizes, BatchSizes]] = [
    ("detr-resnet-50", DETR, _detr(R50), "detr", "resnet", 41.52, DETECTION, COCO, MEDIUM),
    ("detr-resnet-101", DETR, _detr(R101), "detr", "resnet", 60.46, DETECTION, COCO, MEDIUM),
    ("detr-resnet-50-dc5", DETR, DC5, "detr", "resnet", 41.52, DETECTION, COCO, HEAVY),
    ("table-transformer", "TableTransformerForObjectDetection",
     _detr(R18, num_queries=15), "detr", "resnet", 28.82, DETECTION, COCO, MEDIUM),
    ("conditional-detr-resnet-50", CONDITIONAL, _detr(R50),
     "conditional_detr", "resnet", 43.42, DETECTION, COCO, MEDIUM),
    ("conditional-detr-resnet-101", CONDITIONAL, _detr(R101),
     "conditional_detr", "resnet", 62.36, DETECTION, COCO, MEDIUM),
    ("conditional-detr-resnet-50-dc5", CONDITIONAL, DC5,
     "conditional_detr", "resnet", 43.42, DETECTION, COCO, HEAVY),
    ("dab-detr-resnet-50", DAB, _detr(R50), "dab_detr", "resnet", 43.67, DETECTION, COCO, MEDIUM),
    ("dab-detr-resnet-50-pat3", DAB, _detr(R50, num_patterns=3),
     "dab_detr", "resnet", 43.67, DETECTION, COCO, HEAVY),
    ("dab-detr-resnet-50-dc5", DAB, DC5, "dab_detr", "resnet", 43.67, DETECTION, COCO, HEAVY),
    ("deformable-detr", DEFORMABLE, ON_TIMM, "deformable_detr", "resnet", 40.07, DETECTION, COCO, HEAVY),
    ("deformable-detr-single-scale", DEFORMABLE, {**ON_TIMM, "num_feature_levels": 1},
     "deformable_detr", "resnet", 34.07, DETECTION, COCO, MEDIUM),
    ("deformable-detr-box-refine", DEFORMABLE, {**ON_TIMM, "with_box_refine": True},
     "deformable_detr", "resnet", 40.73, DETECTION, COCO, HEAVY),
    ("deformable-detr-two-stage", DEFORMABLE, {**ON_TIMM, "with_box_refine": True, "two_stage": True},
     "deformable_detr", "resnet", 41.18, DETECTION, ((800, 1088), (160, 160)), HEAVY),
    ("rt-detr-r18", RT_DETR, RT_DETR_R18, "rt_detr", "resnet", 26.49, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-r34", RT_DETR, RT_DETR_R34, "rt_detr", "resnet", 31.44, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-r50-m", RT_DETR, RT_DETR_R50M, "rt_detr", "resnet", 36.62, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-r50", RT_DETR, RT_DETR_R50, "rt_detr", "resnet", 42.91, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-r101", RT_DETR, RT_DETR_R101, "rt_detr", "resnet", 76.58, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-v2-r18", RT_DETR_V2, RT_DETR_V2_R18,
     "rt_detr_v2", "resnet", 20.19, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-v2-r34", RT_DETR_V2, RT_DETR_R34, "rt_detr_v2", "resnet", 31.44, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-v2-r50", RT_DETR_V2, RT_DETR_R50, "rt_detr_v2", "resnet", 42.91, DETECTION, REAL_TIME, MEDIUM),
    ("rt-detr-v2-r101", RT_DETR_V2, RT_DETR_R101, "rt_detr_v2",
     "resnet", 76.58, DETECTION, REAL_TIME, MEDIUM),
    ("d-fine-n", D_FINE, D_FINE_N, "d_fine", "hgnet", 3.78, DETECTION, PATCHES, MEDIUM),
    ("d-fine-s", D_FINE, D_FINE_S, "d_fine", "hgnet", 10.32, DETECTION, REAL_TIME, MEDIUM),
    ("d-fine-m", D_FINE, D_FINE_M, "d_fine", "hgnet", 19.58, DETECTION, REAL_TIME, MEDIUM),
    ("d-fine-l", D_FINE, D_FINE_L, "d_fine", "hgnet", 31.27, DETECTION, REAL_TIME, MEDIUM),
    ("d-fine-x", D_FINE, D_FINE_X, "d_fine", "hgnet", 62.64, DETECTION, REAL_TIME, MEDIUM),
    ("yolos-tiny", YOLOS, YOLOS_TINY, "yolos", "vit", 5.89, DETECTION, ((512, 512), (128, 128)), MEDIUM),
    ("yolos-small", YOLOS, _yolos(384, 6, (512, 864)), "yolos", "vit", 30.68, DETECTION, WIDE, MEDIUM),
    ("yolos-small-dwr", YOLOS, _yolos(330, 6, (512, 864), 14), "yolos",
     "vit", 27.56, DETECTION, WIDE, MEDIUM),
    ("yolos-base", YOLOS, _yolos(768, 12, (800, 1344)),
     "yolos", "vit", 127.8, DETECTION, ((800, 1344), (128, 128)), HEAVY),
    ("rf-detr-nano", RF_DETR, _rf_detr(384, 2),
     "rf_detr", "dinov2", 30.47, DETECTION, ((384, 384), (320, 320)), MEDIUM),
    ("rf-detr-small", RF_DETR, _rf_detr(512, 3),
     "rf_detr", "dinov2", 32.11, DETECTION, ((512, 512), (320, 320)), MEDIUM),
    ("rf-detr-base", RF_DETR, RF_DETR_BASE,
     "rf_detr", "dinov2", 32.17, DETECTION, ((560, 560), (280, 280)), MEDIUM),
    ("rf-detr-medium", RF_DETR, _rf_detr(576, 4),
     "rf_detr", "dinov2", 33.69, DETECTION, ((576, 576), (320, 320)), MEDIUM),
    ("lw-detr-tiny", LW_DETR, _lw_detr(192, SIX_LAYERS, num_queries=100),
     "lw_detr", "vit", 12.05, DETECTION, PATCHES, MEDIUM),
    ("lw-detr-small", LW_DETR, _lw_detr(192, TEN_LAYERS), "lw_detr",
     "vit", 14.56, DETECTION, PATCHES, MEDIUM),
    ("lw-detr-medium", LW_DETR, _lw_detr(384, TEN_LAYERS), "lw_detr",
     "vit", 28.24, DETECTION, PATCHES, MEDIUM),
    ("lw-detr-large", LW_DETR, _lw_detr(384, TEN_LAYERS, **TWO_SCALES),
     "lw_detr", "vit", 46.82, DETECTION, PATCHES, MEDIUM),
    ("lw-detr-xlarge", LW_DETR, _lw_detr(768, TEN_LAYERS, **TWO_SCALES),
     "lw_detr", "vit", 118.03, DETECTION, PATCHES, NO_CPU_TRAINING),
    ("grounding-dino-tiny", GROUNDING_DINO, {},
     "grounding_dino", "swin", 172.25, GROUNDING, ((800, 1088), (256, 256)), HEAVY),
    ("grounding-dino-base", GROUNDING_DINO, SWIN_BASE,
     "grounding_dino", "swin", 232.32, GROUNDING, ((800, 1088), (256, 256)), NO_CPU_TRAINING),
    ("mm-grounding-dino-tiny", "MMGroundingDinoForObjectDetection", {},
     "grounding_dino", "swin", 172.25, GROUNDING, ((800, 1088), (256, 256)), HEAVY),
    ("owlvit-base-patch32", OWL, _owl(32, 768),
     "owlvit", "vit", 153.23, PROMPTED, ((768, 768), (768, 768)), INFER_ONLY),
    ("owlvit-base-patch16", OWL, _owl(16, 768),
     "owlvit", "vit", 152.79, PROMPTED, ((768, 768), (768, 768)), INFER_ONLY),
    ("owlvit-large-patch14", OWL, _owl(14, 840, large=True),
     "owlvit", "vit", 433.89, PROMPTED, ((840, 840), (840, 840)), GPU_ONLY),
    ("owlv2-base-patch16", "Owlv2ForObjectDetection", _owl(16, 960),
     "owlvit", "vit", 154.97, PROMPTED, ((960, 960), (960, 960)), INFER_ONLY),
]  # fmt: skip

for _name, _class, _config, _family, _backbone, _params, _adapter, (_gpu, _cpu), _batches in ROWS:
    add(
        "detection", _name, network(_class, _config), (_family, _backbone), _params, _adapter,
        ((3, *_gpu), (3, *_cpu)), _batches,
    )  # fmt: skip
