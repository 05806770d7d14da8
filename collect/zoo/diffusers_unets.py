"""U-Nets that denoise images, latents and clips, at their published sizes."""

from __future__ import annotations

from torchtraceap.collect.model import Adapter, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, HEAVY, LARGE, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._diffusers import (
    SDXL_COMMON,
    Condition,
    Config,
    NoisePrediction,
    add,
    network,
    prompt,
)
from torchtraceap.collect.zoo._rows import Size

DDPM: Config = {
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
}
DOWN, DOWN_ATTENTION, UP, UP_ATTENTION = "DownBlock2D", "AttnDownBlock2D", "UpBlock2D", "AttnUpBlock2D"
DOWN_CROSS, UP_CROSS = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"

DDPM_SMALL: Config = {
    "sample_size": 32,
    "block_out_channels": (32, 64, 64),
    "down_block_types": (DOWN, DOWN_ATTENTION, DOWN),
    "up_block_types": (UP, UP_ATTENTION, UP),
    **DDPM,
}
DDPM_CIFAR10: Config = {
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "down_block_types": (DOWN, DOWN_ATTENTION, DOWN, DOWN),
    "up_block_types": (UP, UP, UP_ATTENTION, UP),
    **DDPM,
}
DDPM_CHURCH: Config = {
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "down_block_types": (DOWN, DOWN, DOWN, DOWN, DOWN_ATTENTION, DOWN),
    "up_block_types": (UP, UP_ATTENTION, UP, UP, UP, UP),
    **DDPM,
}
LDM_CELEBA: Config = {
    "sample_size": 64,
    "block_out_channels": (224, 448, 672, 896),
    "down_block_types": (DOWN, DOWN_ATTENTION, DOWN_ATTENTION, DOWN_ATTENTION),
    "up_block_types": (UP_ATTENTION, UP_ATTENTION, UP_ATTENTION, UP),
    "attention_head_dim": 32,
}
NCSNPP_FFHQ: Config = {
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 256, 256, 256),
    "down_block_types": ("SkipDownBlock2D",) * 4 + ("AttnSkipDownBlock2D",) + ("SkipDownBlock2D",) * 2,
    "up_block_types": ("SkipUpBlock2D",) * 2 + ("AttnSkipUpBlock2D",) + ("SkipUpBlock2D",) * 4,
    "time_embedding_type": "fourier",
    "mid_block_scale_factor": 2**0.5,
    "attention_head_dim": None,
    "norm_eps": 1e-6,
}
RESNET_DOWN, RESNET_UP = "ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D"
CONSISTENCY_IMAGENET64: Config = {
    "sample_size": 64,
    "block_out_channels": (192, 384, 576, 768),
    "layers_per_block": 3,
    "down_block_types": (RESNET_DOWN, DOWN_ATTENTION, DOWN_ATTENTION, DOWN_ATTENTION),
    "up_block_types": (UP_ATTENTION, UP_ATTENTION, UP_ATTENTION, RESNET_UP),
    "downsample_type": "resnet",
    "upsample_type": "resnet",
    "resnet_time_scale_shift": "scale_shift",
    "attention_head_dim": 64,
    "num_class_embeds": 1000,
}
CONDITIONED_SMALL: Config = {
    "sample_size": 32,
    "block_out_channels": (64, 128, 256),
    "down_block_types": (DOWN_CROSS, DOWN_CROSS, DOWN),
    "up_block_types": (UP, UP_CROSS, UP_CROSS),
    "cross_attention_dim": 256,
}
STABLE_DIFFUSION_1: Config = {"sample_size": 64, "cross_attention_dim": 768}
LCM: Config = {**STABLE_DIFFUSION_1, "time_cond_proj_dim": 256}
STABLE_DIFFUSION_2: Config = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
TINY_SD: Config = {
    **STABLE_DIFFUSION_1,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": (DOWN_CROSS, DOWN_CROSS, DOWN_CROSS),
    "up_block_types": (UP_CROSS, UP_CROSS, UP_CROSS),
    "mid_block_type": None,
    "layers_per_block": 1,
}
SMALL_SD: Config = {**STABLE_DIFFUSION_1, "layers_per_block": 1}
UPSCALER_X4: Config = {
    "sample_size": 128,
    "in_channels": 7,
    "block_out_channels": (256, 512, 512, 1024),
    "down_block_types": (DOWN, DOWN_CROSS, DOWN_CROSS, DOWN_CROSS),
    "up_block_types": (UP_CROSS, UP_CROSS, UP_CROSS, UP),
    "only_cross_attention": (True, True, True, False),
    "attention_head_dim": 8,
    "cross_attention_dim": 1024,
    "num_class_embeds": 1000,
    "use_linear_projection": True,
}
SDXL: Config = {**SDXL_COMMON, "sample_size": 128, "up_block_types": (UP_CROSS, UP_CROSS, UP)}
SDXL_REFINER: Config = {
    **SDXL,
    "block_out_channels": (384, 768, 1536, 1536),
    "down_block_types": (DOWN, DOWN_CROSS, DOWN_CROSS, DOWN),
    "up_block_types": (UP, UP_CROSS, UP_CROSS, UP),
    "transformer_layers_per_block": 4,
    "attention_head_dim": (6, 12, 24, 24),
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 2560,
}
SIMPLE_DOWN, SIMPLE_UP = "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D"
SIMPLE: Config = {
    "down_block_types": (RESNET_DOWN, SIMPLE_DOWN, SIMPLE_DOWN, SIMPLE_DOWN),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": (SIMPLE_UP, SIMPLE_UP, SIMPLE_UP, RESNET_UP),
    "layers_per_block": 3,
    "attention_head_dim": 64,
    "resnet_time_scale_shift": "scale_shift",
}
KANDINSKY_22: Config = {
    **SIMPLE,
    "in_channels": 4,
    "out_channels": 8,
    "block_out_channels": (384, 768, 1152, 1536),
    "cross_attention_dim": 768,
    "encoder_hid_dim": 1280,
    "encoder_hid_dim_type": "image_proj",
    "addition_embed_type": "image",
}
DEEPFLOYD: Config = {
    **SIMPLE,
    "sample_size": 64,
    "in_channels": 3,
    "out_channels": 6,
    "act_fn": "gelu",
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 64,
    "encoder_hid_dim": 4096,
}
DEEPFLOYD_M: Config = {**DEEPFLOYD, "block_out_channels": (192, 384, 576, 768), "cross_attention_dim": 768}
DEEPFLOYD_L: Config = {**DEEPFLOYD, "block_out_channels": (320, 640, 960, 1280), "cross_attention_dim": 1280}
ANIMATE_DIFF: Config = {"cross_attention_dim": 768, "use_motion_mid_block": False}
CASCADE_C: Config = {"clip_image_in_channels": 768, "clip_text_in_channels": 1280}

IMAGE = NoisePrediction(latent=False)
CLASS = NoisePrediction(latent=False, conditions=(Condition("class_labels", (), "label", 1000),))
PROMPT_768 = NoisePrediction(conditions=(prompt(77, 768),))
PROMPT_A_FRAME = NoisePrediction(conditions=(prompt(77, 768),), per_frame=True)
PROMPT_1024 = NoisePrediction(conditions=(prompt(77, 1024),))


def _xl(width: int, ids: int) -> NoisePrediction:
    """A prompt, its summary, and numbers that say what size the image had."""
    summary = Condition("added_cond_kwargs.text_embeds", (1280,))
    return NoisePrediction(
        conditions=(prompt(77, width), summary, Condition("added_cond_kwargs.time_ids", (ids,)))
    )


GUIDED = NoisePrediction(conditions=(prompt(77, 768), Condition("timestep_cond", (256,))))
UPSCALING = NoisePrediction(conditions=(prompt(77, 1024), Condition("class_labels", (), "label", 1000)))
MASKED_PROMPT = NoisePrediction(
    conditions=(prompt(77, 4096), Condition("encoder_attention_mask", (77,), "ones"))
)
IMAGE_PROMPT = NoisePrediction(
    conditions=(
        Condition("added_cond_kwargs.image_embeds", (1280,)),
        Condition("encoder_hidden_states", (1, 1280)),  # not looked at
    )
)
PIXEL_PROMPT = NoisePrediction(latent=False, conditions=(prompt(77, 4096),))
CASCADE = NoisePrediction(
    time_name="timestep_ratio",
    time_scale=1e-3,
    conditions=(
        Condition("clip_text_pooled", (1, 1280)),
        Condition("clip_text", (77, 1280)),
        Condition("clip_img", (1, 768)),
    ),
)
CLIP_OF_IMAGE = NoisePrediction(conditions=(prompt(1, 1024), Condition("added_time_ids", (3,))))

PLAIN, CONDITIONED = "UNet2DModel", "UNet2DConditionModel"

# name, class, configuration, family, parameters in millions, adapter, input size on a GPU and on a CPU,
# batches, demo tier
ROWS: list[tuple[str, str, Config, str, float, Adapter, tuple[Size, Size], BatchSizes, bool]] = [
    ("ddpm-small", PLAIN, DDPM_SMALL, "diffusion_unet", 1.62,
     IMAGE, ((3, 32, 32), (3, 32, 32)), MEDIUM, True),
    ("ddpm-cifar10", PLAIN, DDPM_CIFAR10, "diffusion_unet", 35.75,
     IMAGE, ((3, 32, 32), (3, 32, 32)), MEDIUM, False),
    ("ddpm-church-256", PLAIN, DDPM_CHURCH, "diffusion_unet", 113.67,
     IMAGE, ((3, 256, 256), (3, 64, 64)), HEAVY, False),
    ("ldm-celeba-256", PLAIN, LDM_CELEBA, "diffusion_unet", 274.06,
     NoisePrediction(), ((3, 64, 64), (3, 16, 16)), NO_CPU_TRAINING, False),
    ("ncsnpp-ffhq-256", PLAIN, NCSNPP_FFHQ, "diffusion_unet", 65.57,
     IMAGE, ((3, 256, 256), (3, 64, 64)), HEAVY, False),
    ("consistency-imagenet64", PLAIN, CONSISTENCY_IMAGENET64, "diffusion_unet", 295.9,
     CLASS, ((3, 64, 64), (3, 32, 32)), NO_CPU_TRAINING, False),
    ("unet-condition-small", CONDITIONED, CONDITIONED_SMALL, "conditional_unet", 18.15,
     NoisePrediction(conditions=(prompt(77, 256),)), ((4, 32, 32), (4, 16, 16)), MEDIUM, False),
    ("stable-diffusion-1.5", CONDITIONED, STABLE_DIFFUSION_1, "conditional_unet", 859.52,
     PROMPT_768, ((4, 64, 64), (4, 16, 16)), NO_CPU_TRAINING, False),
    ("stable-diffusion-2.1", CONDITIONED, STABLE_DIFFUSION_2, "conditional_unet", 865.91,
     PROMPT_1024, ((4, 96, 96), (4, 16, 16)), NO_CPU_TRAINING, False),
    ("stable-diffusion-tiny", CONDITIONED, TINY_SD, "conditional_unet", 323.38,
     PROMPT_768, ((4, 64, 64), (4, 16, 16)), NO_CPU_TRAINING, False),
    ("stable-diffusion-small", CONDITIONED, SMALL_SD, "conditional_unet", 579.38,
     PROMPT_768, ((4, 64, 64), (4, 16, 16)), NO_CPU_TRAINING, False),
    ("stable-diffusion-lcm", CONDITIONED, LCM, "conditional_unet", 859.6,
     GUIDED, ((4, 64, 64), (4, 16, 16)), NO_CPU_TRAINING, False),
    ("stable-diffusion-x4-upscaler", CONDITIONED, UPSCALER_X4, "conditional_unet", 473.4,
     UPSCALING, ((7, 128, 128), (7, 16, 16)), NO_CPU_TRAINING, False),
    ("sdxl", CONDITIONED, SDXL, "conditional_unet", 2567.46,
     _xl(2048, 6), ((4, 128, 128), (4, 32, 32)), LARGE, False),
    ("sdxl-refiner", CONDITIONED, SDXL_REFINER, "conditional_unet", 2259.53,
     _xl(1280, 5), ((4, 128, 128), (4, 32, 32)), LARGE, False),
    ("kandinsky-2.2", CONDITIONED, KANDINSKY_22, "simple_cross_unet", 1253.06,
     IMAGE_PROMPT, ((4, 64, 64), (4, 16, 16)), LARGE, False),
    ("deepfloyd-if-m", CONDITIONED, DEEPFLOYD_M, "simple_cross_unet", 371.57,
     PIXEL_PROMPT, ((3, 64, 64), (3, 16, 16)), NO_CPU_TRAINING, False),
    ("deepfloyd-if-l", CONDITIONED, DEEPFLOYD_L, "simple_cross_unet", 935.31,
     PIXEL_PROMPT, ((3, 64, 64), (3, 16, 16)), LARGE, False),
    ("stable-video-diffusion", "UNetSpatioTemporalConditionModel", {}, "video_unet", 1524.62,
     CLIP_OF_IMAGE, ((14, 8, 72, 128), (2, 8, 16, 16)), GPU_ONLY, False),
    ("animatediff", "UNetMotionModel", ANIMATE_DIFF, "video_unet", 1276.66,
     PROMPT_A_FRAME, ((4, 16, 64, 64), (4, 2, 16, 16)), LARGE, False),
    ("modelscope-t2v", "UNet3DConditionModel", {}, "video_unet", 1411.23,
     PROMPT_1024, ((4, 16, 32, 32), (4, 2, 16, 16)), LARGE, False),
    ("kandinsky-3", "Kandinsky3UNet", {}, "kandinsky3_unet", 3055.35,
     MASKED_PROMPT, ((4, 128, 128), (4, 32, 32)), GPU_ONLY, False),
    ("stable-cascade-c", "StableCascadeUNet", CASCADE_C, "cascade_unet", 3614.27,
     CASCADE, ((16, 24, 24), (16, 12, 12)), GPU_ONLY, False),
]  # fmt: skip

for _name, _class, _config, _family, _params, _adapter, _sizes, _batches, _small in ROWS:
    add(
        _name, network(_class, _config), (_family, _family), _params, _adapter, _sizes, _batches, _small
    )  # fmt: skip
