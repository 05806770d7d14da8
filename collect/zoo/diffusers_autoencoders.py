"""Autoencoders of images and clips, and the networks that steer denoising ones."""

from __future__ import annotations

from torchtraceap.collect.model import Adapter, BatchSizes
from torchtraceap.collect.zoo._batches import GPU_ONLY, HEAVY, INFER_ONLY, MEDIUM, NO_CPU_TRAINING
from torchtraceap.collect.zoo._diffusers import (
    SDXL_COMMON,
    Condition,
    Config,
    Control,
    Reconstruction,
    add,
    network,
    picture,
    prompt,
)
from torchtraceap.collect.zoo._rows import Size

DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"

KL_F8: Config = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": (DOWN,) * 4,
    "up_block_types": (UP,) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
KL_16_CHANNELS: Config = {
    **KL_F8,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TEMPORAL: Config = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": (DOWN,) * 4,
    "layers_per_block": 2,
}
VQ_F4: Config = {
    "block_out_channels": (128, 256, 512),
    "down_block_types": (DOWN,) * 3,
    "up_block_types": (UP,) * 3,
    "layers_per_block": 2,
    "latent_channels": 3,
    "num_vq_embeddings": 8192,
}
ASYMMETRIC: Config = {
    "down_block_types": (DOWN,) * 4,
    "down_block_out_channels": (128, 256, 512, 512),
    "layers_per_down_block": 2,
    "up_block_types": (UP,) * 4,
    "up_block_out_channels": (192, 384, 768, 768),
    "layers_per_up_block": 3,
}
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
WIDTHS, SCALES = (128, 256, 512, 512, 1024, 1024), ((), (), (), (5,), (5,), (5,))
DC_F32: Config = {
    "latent_channels": 32,
    "encoder_block_types": BLOCKS,
    "decoder_block_types": BLOCKS,
    "encoder_block_out_channels": WIDTHS,
    "decoder_block_out_channels": WIDTHS,
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": SCALES,
    "decoder_qkv_multiscales": SCALES,
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
}
FLUX_CONTROL: Config = {"num_layers": 5, "num_single_layers": 0, "guidance_embeds": True}


def _same(size: Size) -> Size:
    return size


def _sequence(size: Size) -> Size:
    return (size[1] * size[2], size[0])


def _places(size: Size) -> Size:
    return (size[1] * size[2], 3)


RECONSTRUCTION = Reconstruction()
PICTURE = Condition("controlnet_cond", picture)
CONTROL = Control(conditions=(prompt(77, 768), PICTURE))
XL_CONTROL = Control(
    conditions=(
        prompt(77, 2048),
        PICTURE,
        Condition("added_cond_kwargs.text_embeds", (1280,)),
        Condition("added_cond_kwargs.time_ids", (6,)),
    )
)
SD3_CONTROL = Control(
    sample_name="hidden_states",
    time_scale=1.0,
    conditions=(
        prompt(333, 4096),
        Condition("pooled_projections", (2048,)),
        Condition("controlnet_cond", _same),
    ),
)
FLUX_STEERED = Control(
    sample_name="hidden_states",
    time_scale=1e-3,
    packed=True,
    conditions=(
        prompt(512, 4096),
        Condition("pooled_projections", (768,)),
        Condition("guidance", (), "ones"),
        Condition("controlnet_cond", _sequence),
        Condition("img_ids", _places, "zeros", shared=True),
        Condition("txt_ids", (512, 3), "zeros", shared=True),
    ),
)

IMAGE: tuple[Size, Size] = ((3, 256, 256), (3, 64, 64))
CLIP: tuple[Size, Size] = ((3, 17, 256, 256), (3, 5, 64, 64))
OF_EIGHTS: tuple[Size, Size] = ((3, 17, 256, 256), (3, 9, 64, 64))
"""A frame and whole groups of eight; of other clips these networks give back more or fewer frames."""

# name, class, configuration, family, parameters in millions, adapter, input size on a GPU and on a CPU,
# batches
ROWS: list[tuple[str, str, Config, str, float, Adapter, tuple[Size, Size], BatchSizes]] = [
    ("autoencoder-kl-f8", "AutoencoderKL", KL_F8, "autoencoder_kl", 83.65, RECONSTRUCTION, IMAGE, HEAVY),
    ("autoencoder-kl-16-channels", "AutoencoderKL", KL_16_CHANNELS, "autoencoder_kl", 83.82,
     RECONSTRUCTION, IMAGE, HEAVY),
    ("autoencoder-kl-flux2", "AutoencoderKLFlux2", {}, "autoencoder_kl", 84.05, RECONSTRUCTION, IMAGE, HEAVY),
    ("autoencoder-asymmetric", "AsymmetricAutoencoderKL", ASYMMETRIC, "autoencoder_kl", 194.3,
     RECONSTRUCTION, IMAGE, HEAVY),
    ("autoencoder-vq-f4", "VQModel", VQ_F4, "autoencoder_vq", 55.32, RECONSTRUCTION, IMAGE, HEAVY),
    ("autoencoder-tiny", "AutoencoderTiny", {}, "autoencoder_tiny", 2.45, RECONSTRUCTION, IMAGE, MEDIUM),
    ("autoencoder-dc-f32", "AutoencoderDC", DC_F32, "autoencoder_dc", 312.25,
     RECONSTRUCTION, ((3, 512, 512), (3, 64, 64)), NO_CPU_TRAINING),
    ("autoencoder-svd", "AutoencoderKLTemporalDecoder", TEMPORAL, "autoencoder_temporal", 97.74,
     Reconstruction(frames_first=True), ((8, 3, 256, 256), (2, 3, 64, 64)), HEAVY),
    ("autoencoder-wan", "AutoencoderKLWan", {}, "autoencoder_3d", 126.89, RECONSTRUCTION, CLIP, HEAVY),
    ("autoencoder-cogvideox", "AutoencoderKLCogVideoX", {}, "autoencoder_3d", 215.58,
     RECONSTRUCTION, OF_EIGHTS, NO_CPU_TRAINING),
    ("autoencoder-ltx", "AutoencoderKLLTXVideo", {}, "autoencoder_3d", 419.19,
     RECONSTRUCTION, OF_EIGHTS, NO_CPU_TRAINING),
    ("autoencoder-hunyuan-video", "AutoencoderKLHunyuanVideo", {}, "autoencoder_3d", 246.48,
     RECONSTRUCTION, CLIP, NO_CPU_TRAINING),
    ("autoencoder-mochi", "AutoencoderKLMochi", {}, "autoencoder_3d", 459.75,
     RECONSTRUCTION, ((3, 13, 256, 256), (3, 7, 64, 64)), NO_CPU_TRAINING),
    ("controlnet-sd-1.5", "ControlNetModel", {"cross_attention_dim": 768}, "controlnet", 361.28,
     CONTROL, ((4, 64, 64), (4, 16, 16)), INFER_ONLY),
    ("controlnet-sdxl", "ControlNetModel", SDXL_COMMON, "controlnet", 1251.01,
     XL_CONTROL, ((4, 128, 128), (4, 16, 16)), GPU_ONLY),
    ("controlnet-sd3", "SD3ControlNetModel", {}, "mmdit", 894.68,
     SD3_CONTROL, ((16, 128, 128), (16, 16, 16)), GPU_ONLY),
    ("controlnet-flux", "FluxControlNetModel", FLUX_CONTROL, "flux", 1791.61,
     FLUX_STEERED, ((64, 64, 64), (64, 8, 8)), GPU_ONLY),
]  # fmt: skip

for _name, _class, _config, _family, _params, _adapter, _sizes, _batches in ROWS:
    add(_name, network(_class, _config), (_family, _family), _params, _adapter, _sizes, _batches)
