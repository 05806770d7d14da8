"""Depth, pose, keypoints, matting and super-resolution models of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, Batch, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, HEAVY, INFER_ONLY, LIGHT, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._images import Depth, Pose, normalised, random_images
from torchtraceap.collect.zoo._masks import boxes_and_masks
from torchtraceap.collect.zoo._rows import Size
from torchtraceap.collect.zoo._transformers import Config, add, network

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class PromptedDepth:
    """Image and a coarse depth map of it, as a phone's lidar has, to a fine one.

    Batch: image uint8 [B, 3, H, W], ``coarse`` fp32 [B, 1, H / 4, W / 4] and depth fp32 [B, H, W] in metres.
    """

    max_depth: float = 10.0

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        coarse = torch.rand(batch_size, 1, height // 4, width // 4, generator=generator)
        return {
            "image": random_images(batch_size, size, generator),
            "coarse": coarse * self.max_depth,
            "depth": torch.rand(batch_size, height, width, generator=generator) * self.max_depth,
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return model(normalised(batch["image"]), prompt_depth=batch["coarse"]).predicted_depth

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import l1_loss

        return l1_loss(output, batch["depth"])


@dataclass(frozen=True)
class ExpertPose(Pose):
    """Pose by a network that has experts for several data sets. Batch: as before, ``expert`` int64 [B]."""

    experts: int = 6

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        batch = super().make_batch(batch_size, size, generator)
        batch["expert"] = torch.randint(0, self.experts, (batch_size,), generator=generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return self.heatmaps(model(normalised(batch["image"]), dataset_index=batch["expert"]))


@dataclass(frozen=True)
class Keypoints:
    """Image, or two of a scene, to keypoints and what matches them; the library has no loss for these.

    Batch: image uint8 [B, *size], of size [3, H, W], or [2, 3, H, W] for a pair.
    """

    outputs: tuple[str, ...]

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        return {"image": random_images(batch_size, size, generator)}

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        output = model(batch["image"].float().div_(255))
        return {name: output[name] for name in self.outputs}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        raise NotImplementedError("keypoint models are not trained here")


@dataclass(frozen=True)
class Matting:
    """Image and a rough map of the foreground to its opacity.

    Batch: image uint8 [B, 4, H, W], whose fourth channel is the map, and opacity fp32 [B, 1, H, W].
    """

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        _, height, width = size
        _, masks = boxes_and_masks(batch_size, 1, (height, width), generator)
        return {"image": random_images(batch_size, size, generator), "opacity": masks.float()}

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return model(pixel_values=normalised(batch["image"])).alphas

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import l1_loss

        return l1_loss(output, batch["opacity"])


@dataclass(frozen=True)
class SuperResolution:
    """Image to a larger one. Batch: image uint8 [B, 3, H, W], large uint8 [B, 3, scale * H, scale * W]."""

    scale: int

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        channels, height, width = size
        large = (channels, self.scale * height, self.scale * width)
        return {
            "image": random_images(batch_size, size, generator),
            "large": random_images(batch_size, large, generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return model(pixel_values=batch["image"].float().div_(255)).reconstruction

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import l1_loss

        return l1_loss(output, batch["large"].float().div_(255))


DEPTH = Depth(depth=attrgetter("predicted_depth"))
POSE = Pose(heatmaps=attrgetter("heatmaps"))
EXPERT_POSE = ExpertPose(heatmaps=attrgetter("heatmaps"))
MATCHES = Keypoints(("matches", "matching_scores", "keypoints"))

# width, layers, heads of a ViT, and after which layers its features are taken
VIT_SMALL, VIT_BASE, VIT_LARGE = (
    (384, 12, 6, [3, 6, 9, 12]),
    (768, 12, 12, [3, 6, 9, 12]),
    (1024, 24, 16, [5, 12, 18, 24]),
)
Vit = tuple[int, int, int, list[int]]


def _dinov2(vit: Vit, **changes: Any) -> Config:
    width, layers, heads, taken = vit
    return {
        "model_type": "dinov2",
        "image_size": 518,
        "patch_size": 14,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "out_indices": taken,
        "reshape_hidden_states": False,
        **changes,
    }


def _depth_anything(vit: Vit, necks: list[int], fusion: int) -> Config:
    return {
        "backbone_config": _dinov2(vit),
        "reassemble_hidden_size": vit[0],
        "neck_hidden_sizes": necks,
        "fusion_hidden_size": fusion,
    }


DEPTH_ANYTHING_SMALL = _depth_anything(VIT_SMALL, [48, 96, 192, 384], 64)
DEPTH_ANYTHING_BASE = _depth_anything(VIT_BASE, [96, 192, 384, 768], 128)
DEPTH_ANYTHING_LARGE = _depth_anything(VIT_LARGE, [256, 512, 1024, 1024], 256)


def _beit(vit: Vit, size: int) -> Config:
    width, layers, heads, _ = vit
    return {
        "model_type": "beit",
        "image_size": size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "use_relative_position_bias": True,
        "reshape_hidden_states": False,
        "out_indices": [layers * part // 4 for part in (1, 2, 3, 4)],
    }


def _swinv2(width: int, heads: int, depth: int, size: int, window: int, pretrained: list[int]) -> Config:
    return {
        "model_type": "swinv2",
        "image_size": size,
        "embed_dim": width,
        "depths": [2, 2, depth, 2],
        "num_heads": [heads, 2 * heads, 4 * heads, 8 * heads],
        "window_size": window,
        "pretrained_window_sizes": pretrained,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
        "reshape_hidden_states": False,
    }


def _dpt(backbone: Config, necks: list[int], **changes: Any) -> Config:
    return {"backbone_config": backbone, "neck_hidden_sizes": necks, **changes}


def _dpt_dinov2(vit: Vit, necks: list[int]) -> Config:
    return _dpt(
        _dinov2(vit, apply_layernorm=False), necks, use_bias_in_fusion_residual=False, add_projection=True
    )


DPT_LARGE: Config = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "backbone_out_indices": [5, 11, 17, 23],
    "neck_hidden_sizes": [256, 512, 1024, 1024],
}
DPT_HYBRID: Config = {
    "is_hybrid": True,
    "backbone_config": {
        "model_type": "bit",
        "global_padding": "same",
        "layer_type": "bottleneck",
        "depths": [3, 4, 9],
        "out_features": ["stage1", "stage2", "stage3"],
        "embedding_dynamic_padding": True,
    },
    "backbone_featmap_shape": [1, 1024, 24, 24],
    "neck_ignore_stages": [0, 1],
    "reassemble_factors": [1, 1, 1, 0.5],
    "neck_hidden_sizes": [256, 512, 768, 768],
}
DPT_BEIT_BASE = _dpt(_beit(VIT_BASE, 384), [96, 192, 384, 768])
DPT_BEIT_LARGE = _dpt(_beit(VIT_LARGE, 512), [256, 512, 1024, 1024])
NO_WINDOW, SMALLER_WINDOW = [0, 0, 0, 0], [12, 12, 12, 6]
DPT_SWIN_TINY = _dpt(_swinv2(96, 3, 6, 256, 16, NO_WINDOW), [96, 192, 384, 768])
DPT_SWIN_BASE = _dpt(_swinv2(128, 4, 18, 384, 24, SMALLER_WINDOW), [128, 256, 512, 1024])
DPT_SWIN_LARGE = _dpt(_swinv2(192, 6, 18, 384, 24, SMALLER_WINDOW), [192, 384, 768, 1536])

GLPN_B0: Config = {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 160, 256], "decoder_hidden_size": 64}
GLPN_NYU: Config = {"depths": [3, 8, 27, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 64}

ZOE: Config = {"backbone_config": _beit(VIT_LARGE, 384), "neck_hidden_sizes": [256, 512, 1024, 1024]}
ZOE_TWO: Config = {
    **ZOE,
    "bin_configurations": [
        {"name": "nyu", "n_bins": 64, "min_depth": 0.001, "max_depth": 10.0},
        {"name": "kitti", "n_bins": 64, "min_depth": 0.001, "max_depth": 80.0},
    ],
    "num_patch_transformer_layers": 4,
    "patch_transformer_hidden_size": 128,
    "patch_transformer_intermediate_size": 1024,
    "patch_transformer_num_attention_heads": 4,
}

DEPTH_PRO_VIT: Config = {
    "model_type": "dinov2",
    "image_size": 384,
    "patch_size": 16,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
DEPTH_PRO: Config = {
    "image_model_config": DEPTH_PRO_VIT,
    "patch_model_config": DEPTH_PRO_VIT,
    "fov_model_config": DEPTH_PRO_VIT,
    "use_fov_model": True,
}


def _vitpose(
    width: int, heads: int, layers: int = 12, simple_decoder: bool = False, experts: int = 1, part: int = 0
) -> Config:
    """ViTPose; of its experts' features ``part`` channels are an expert's own."""
    return {
        "backbone_config": {
            "model_type": "vitpose_backbone",
            "image_size": [256, 192],
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_experts": experts,
            "part_features": part,
            "out_indices": [layers],
        },
        "num_labels": POSE.keypoints,
        "use_simple_decoder": simple_decoder,
    }


SUPERPOINT: Config = {"max_keypoints": 1024}
ON_SUPERPOINT: Config = {"keypoint_detector_config": {"model_type": "superpoint", **SUPERPOINT}}


def _vitmatte(width: int, heads: int) -> Config:
    return {
        "backbone_config": {
            "model_type": "vitdet",
            "num_channels": 4,
            "image_size": 512,
            "hidden_size": width,
            "num_attention_heads": heads,
            "window_size": 14,
            "window_block_indices": [0, 1, 3, 4, 6, 7, 9, 10],
            "residual_block_indices": [2, 5, 8, 11],
            "use_relative_position_embeddings": True,
            "out_features": ["stage12"],
        },
        "hidden_size": width,
        "convstream_hidden_sizes": [48, 96, 192],  # the default is a tuple, to which the library adds a list
        "fusion_hidden_sizes": [256, 128, 64, 32],
    }


def _swin2sr(upscale: int, upsampler: str, width: int = 180, blocks: int = 6) -> Config:
    return {
        "embed_dim": width,
        "depths": [6] * blocks,
        "num_heads": [6] * blocks,
        "upscale": upscale,
        "upsampler": upsampler,
    }


DEPTH_ANYTHING, PROMPT_DEPTH = "DepthAnythingForDepthEstimation", "PromptDepthAnythingForDepthEstimation"
DPT, GLPN, ZOE_DEPTH = "DPTForDepthEstimation", "GLPNForDepthEstimation", "ZoeDepthForDepthEstimation"
VITPOSE, VITMATTE, SWIN2SR = (
    "VitPoseForPoseEstimation",
    "VitMatteForImageMatting",
    "Swin2SRForImageSuperResolution",
)

Sizes = tuple[Size, Size]
DINO: Sizes = ((3, 518, 518), (3, 112, 112))
MIDAS: Sizes = ((3, 384, 384), (3, 128, 128))
FIXED: Sizes = ((3, 384, 384), (3, 384, 384))
"""Windows or position embeddings are made for this size."""
NYU: Sizes = ((3, 480, 640), (3, 96, 96))
PERSON: Sizes = ((3, 256, 192), (3, 256, 192))
PAIR: Sizes = ((2, 3, 480, 640), (2, 3, 128, 160))
PATCH: Sizes = ((3, 128, 128), (3, 32, 32))

# name, class, configuration, task, family, backbone family, parameters in millions, adapter, input size on a
# GPU and on a CPU, batches, demo tier
ROWS: list[tuple[str, str, Config, str, str, str, float, Adapter, Sizes, BatchSizes, bool]] = [
    ("depth-anything-small", DEPTH_ANYTHING, DEPTH_ANYTHING_SMALL, "depth",
     "depth_anything", "dinov2", 24.79, DEPTH, DINO, MEDIUM, False),
    ("depth-anything-base", DEPTH_ANYTHING, DEPTH_ANYTHING_BASE, "depth",
     "depth_anything", "dinov2", 97.47, DEPTH, DINO, MEDIUM, False),
    ("depth-anything-large", DEPTH_ANYTHING, DEPTH_ANYTHING_LARGE, "depth",
     "depth_anything", "dinov2", 335.32, DEPTH, DINO, NO_CPU_TRAINING, False),
    ("prompt-depth-anything-small", PROMPT_DEPTH, DEPTH_ANYTHING_SMALL, "depth",
     "depth_anything", "dinov2", 25.08, PromptedDepth(), ((3, 756, 1008), (3, 112, 112)), HEAVY, False),
    ("prompt-depth-anything-large", PROMPT_DEPTH, DEPTH_ANYTHING_LARGE, "depth",
     "depth_anything", "dinov2", 340.05, PromptedDepth(), ((3, 756, 1008), (3, 112, 112)), NO_CPU_TRAINING,
     False),
    ("dpt-large", DPT, DPT_LARGE, "depth", "dpt", "vit", 343.03, DEPTH, MIDAS, NO_CPU_TRAINING, False),
    ("dpt-hybrid", DPT, DPT_HYBRID, "depth", "dpt", "vit_hybrid", 122.38, DEPTH, FIXED, MEDIUM, False),
    ("dpt-beit-base", DPT, DPT_BEIT_BASE, "depth", "dpt", "beit", 110.76, DEPTH, MIDAS, MEDIUM, False),
    ("dpt-beit-large", DPT, DPT_BEIT_LARGE, "depth",
     "dpt", "beit", 343.99, DEPTH, ((3, 512, 512), (3, 128, 128)), NO_CPU_TRAINING, False),
    ("dpt-swinv2-tiny", DPT, DPT_SWIN_TINY, "depth",
     "dpt", "swinv2", 40.93, DEPTH, ((3, 256, 256), (3, 256, 256)), MEDIUM, False),
    ("dpt-swinv2-base", DPT, DPT_SWIN_BASE, "depth", "dpt", "swinv2", 101.35, DEPTH, FIXED, MEDIUM, False),
    ("dpt-swinv2-large", DPT, DPT_SWIN_LARGE, "depth", "dpt",
     "swinv2", 211.87, DEPTH, FIXED, NO_CPU_TRAINING, False),
    ("dpt-dinov2-small", DPT, _dpt_dinov2(VIT_SMALL, [48, 96, 192, 384]), "depth",
     "dpt", "dinov2", 37.2, DEPTH, DINO, MEDIUM, False),
    ("dpt-dinov2-base", DPT, _dpt_dinov2(VIT_BASE, [96, 192, 384, 768]), "depth",
     "dpt", "dinov2", 111.95, DEPTH, DINO, MEDIUM, False),
    ("dpt-dinov2-large", DPT, _dpt_dinov2(VIT_LARGE, [128, 256, 512, 1024]), "depth",
     "dpt", "dinov2", 339.74, DEPTH, DINO, NO_CPU_TRAINING, False),
    ("glpn-b0", GLPN, GLPN_B0, "depth", "glpn", "mix_transformer", 3.66, DEPTH, NYU, MEDIUM, True),
    ("glpn-nyu", GLPN, GLPN_NYU, "depth", "glpn", "mix_transformer", 61.22, DEPTH, NYU, MEDIUM, False),
    ("zoedepth-nyu", ZOE_DEPTH, ZOE, "depth",
     "zoedepth", "beit", 343.79, DEPTH, ((3, 384, 512), (3, 128, 128)), NO_CPU_TRAINING, False),
    ("zoedepth-nyu-kitti", ZOE_DEPTH, ZOE_TWO, "depth",
     "zoedepth", "beit", 345.07, DEPTH, ((3, 384, 512), (3, 128, 128)), NO_CPU_TRAINING, False),
    ("depth-pro", "DepthProForDepthEstimation", DEPTH_PRO, "depth",
     "depth_pro", "dinov2", 951.99, DEPTH, ((3, 1536, 1536), (3, 1536, 1536)), GPU_ONLY, False),
    ("chmv2", "CHMv2ForDepthEstimation", {}, "depth",
     "dpt", "dinov3", 336.9, DEPTH, ((3, 416, 416), (3, 128, 128)), NO_CPU_TRAINING, False),
    ("tipsv2-dpt-base", "Tipsv2DptForDepthEstimation", {}, "depth",
     "dpt", "vit", 110.24, DEPTH, ((3, 448, 448), (3, 112, 112)), MEDIUM, False),
    ("vitpose-tiny-simple", VITPOSE, _vitpose(192, 3, simple_decoder=True), "pose",
     "vitpose", "vit", 5.55, POSE, PERSON, LIGHT, True),
    ("vitpose-small", VITPOSE, _vitpose(384, 6), "pose", "vitpose", "vit", 24.29, POSE, PERSON, LIGHT, False),
    ("vitpose-base-simple", VITPOSE, _vitpose(768, 12, simple_decoder=True), "pose",
     "vitpose", "vit", 85.91, POSE, PERSON, LIGHT, False),
    ("vitpose-base", VITPOSE, _vitpose(768, 12), "pose", "vitpose", "vit", 89.99, POSE, PERSON, LIGHT, False),
    ("vitpose-large", VITPOSE, _vitpose(1024, 16, 24), "pose",
     "vitpose", "vit", 308.54, POSE, PERSON, NO_CPU_TRAINING, False),
    ("vitpose-huge", VITPOSE, _vitpose(1280, 16, 32), "pose",
     "vitpose", "vit", 637.21, POSE, PERSON, NO_CPU_TRAINING, False),
    ("vitpose-plus-small", VITPOSE, _vitpose(384, 12, experts=6, part=96), "pose",
     "vitpose", "vit", 33.14, EXPERT_POSE, PERSON, LIGHT, False),
    ("vitpose-plus-base", VITPOSE, _vitpose(768, 12, experts=6, part=192), "pose",
     "vitpose", "vit", 125.4, EXPERT_POSE, PERSON, LIGHT, False),
    ("vitpose-plus-large", VITPOSE, _vitpose(1024, 16, 24, experts=6, part=256), "pose",
     "vitpose", "vit", 434.4, EXPERT_POSE, PERSON, NO_CPU_TRAINING, False),
    ("superpoint", "SuperPointForKeypointDetection", SUPERPOINT, "other", "superpoint", "superpoint", 1.3,
     Keypoints(("keypoints", "scores", "descriptors")), ((3, 480, 640), (3, 128, 160)), INFER_ONLY, False),
    ("superglue", "SuperGlueForKeypointMatching", ON_SUPERPOINT, "other",
     "superglue", "superpoint", 13.32, MATCHES, PAIR, INFER_ONLY, False),
    ("lightglue-superpoint", "LightGlueForKeypointMatching", ON_SUPERPOINT, "other",
     "lightglue", "superpoint", 13.74, MATCHES, PAIR, INFER_ONLY, False),
    ("efficientloftr", "EfficientLoFTRForKeypointMatching", {}, "other",
     "efficientloftr", "repvgg", 16.03, MATCHES, PAIR, INFER_ONLY, False),
    ("vitmatte-small", VITMATTE, _vitmatte(384, 6), "other",
     "vitmatte", "vit", 25.81, Matting(), ((4, 512, 512), (4, 128, 128)), MEDIUM, False),
    ("vitmatte-base", VITMATTE, _vitmatte(768, 12), "other",
     "vitmatte", "vit", 96.69, Matting(), ((4, 512, 512), (4, 128, 128)), HEAVY, False),
    ("swin2sr-classical-x2", SWIN2SR, _swin2sr(2, "pixelshuffle"), "other",
     "swin2sr", "swinv2", 12.09, SuperResolution(2), PATCH, MEDIUM, False),
    ("swin2sr-classical-x4", SWIN2SR, _swin2sr(4, "pixelshuffle"), "other",
     "swin2sr", "swinv2", 12.24, SuperResolution(4), PATCH, MEDIUM, False),
    ("swin2sr-lightweight-x2", SWIN2SR, _swin2sr(2, "pixelshuffledirect", 60, 4), "other",
     "swin2sr", "swinv2", 1.01, SuperResolution(2), PATCH, MEDIUM, False),
    ("swin2sr-realworld-x4", SWIN2SR, _swin2sr(4, "nearest+conv"), "other",
     "swin2sr", "swinv2", 12.05, SuperResolution(4), PATCH, MEDIUM, False),
]  # fmt: skip

for (
    _name, _class, _config, _task, _family, _backbone, _params, _adapter, _sizes, _batches, _small,
) in ROWS:  # fmt: skip
    add(
        _task, _name, network(_class, _config), (_family, _backbone), _params, _adapter, _sizes, _batches,
        _small,
    )  # fmt: skip
