"""Segmentation models of segmentation_models_pytorch: a decoder on an encoder.

Encoders ``mit_b*`` stay out: their file is under a licence that forbids commercial use.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtraceap.collect.zoo._batches import by_cost
from torchtraceap.collect.zoo._images import Segmentation
from torchtraceap.collect.zoo._rows import add

if TYPE_CHECKING:
    from torch import nn

CLASSES = 21

SMALL = (("Linknet", "resnet18"), ("Unet", "mobilenet_v2"))
"""The demo tier."""


def _build(decoder: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch

    architecture = getattr(segmentation_models_pytorch, decoder)
    return architecture(encoder_name=encoder, encoder_weights=None, classes=CLASSES)


# decoder, encoder, its family, parameters in millions, input size on a GPU, on a CPU, costs (activations
# in MB and GFLOP by _measure.py)
ROWS = [
    ("DPT", "tu-vit_base_patch16_384", "vit", 122.08, 384, 384, (892.9, 251.79)),
    ("DPT", "tu-vit_base_patch32_384", "vit", 124.56, 384, 384, (455.3, 159.45)),
    ("DPT", "tu-vit_small_patch16_384", "vit", 52.79, 384, 384, (625.7, 166.48)),
    ("DPT", "tu-vit_tiny_patch16_384", "vit", 34.96, 384, 384, (492.0, 143.22)),
    ("DeepLabV3", "efficientnet-b0", "efficientnet", 7.31, 512, 64, (1357.7, 0.8)),
    ("DeepLabV3", "mobilenet_v2", "mobilenetv2", 12.65, 512, 64, (1076.8, 1.59)),
    ("DeepLabV3", "resnet18", "resnet", 15.9, 512, 64, (304.0, 2.09)),
    ("DeepLabV3", "resnet50", "resnet", 39.64, 512, 64, (1046.1, 5.11)),
    ("DeepLabV3", "se_resnet50", "senet", 42.17, 512, 64, (1306.2, 5.11)),
    ("DeepLabV3", "timm-skresnet34", "sknet", 26.49, 512, 64, (772.1, 3.41)),
    ("DeepLabV3Plus", "efficientnet-b4", "efficientnet", 18.62, 512, 64, (1605.0, 0.57)),
    ("DeepLabV3Plus", "mobilenet_v2", "mobilenetv2", 4.38, 512, 64, (596.6, 0.19)),
    ("DeepLabV3Plus", "resnet101", "resnet", 45.67, 512, 64, (832.2, 1.75)),
    ("DeepLabV3Plus", "resnet34", "resnet", 22.44, 512, 64, (305.0, 0.99)),
    ("DeepLabV3Plus", "timm-tf_efficientnet_lite0", "efficientnet", 4.28, 512, 64, (606.6, 0.18)),
    ("DeepLabV3Plus", "tu-resnest14d", "resnest", 11.74, 512, 64, (473.3, 0.66)),
    ("FPN", "densenet121", "densenet", 9.3, 512, 64, (736.7, 0.77)),
    ("FPN", "efficientnet-b0", "efficientnet", 5.76, 512, 64, (530.4, 0.31)),
    ("FPN", "inceptionv4", "inception_v4", 43.57, 512, 64, (640.0, 1.62)),
    ("FPN", "mobilenet_v2", "mobilenetv2", 4.22, 512, 64, (477.9, 0.3)),
    ("FPN", "resnet50", "resnet", 26.12, 512, 64, (515.1, 0.97)),
    ("FPN", "resnext50_32x4d", "resnet", 25.59, 512, 64, (646.1, 1.0)),
    ("FPN", "tu-hrnet_w18", "hrnet", 13.07, 512, 64, (693.1, 0.84)),
    ("Linknet", "efficientnet-b1", "efficientnet", 6.67, 512, 64, (764.9, 0.1)),
    ("Linknet", "mobilenet_v2", "mobilenetv2", 4.32, 512, 64, (516.1, 0.07)),
    ("Linknet", "resnet18", "resnet", 11.66, 512, 64, (325.3, 0.33)),
    ("Linknet", "resnet50", "resnet", 31.18, 512, 64, (762.1, 0.91)),
    ("Linknet", "se_resnet50", "senet", 33.71, 512, 64, (851.2, 0.88)),
    ("Linknet", "timm-skresnet18", "sknet", 11.93, 512, 64, (400.3, 0.33)),
    ("MAnet", "efficientnet-b2", "efficientnet", 13.44, 512, 64, (882.3, 0.43)),
    ("MAnet", "mobilenet_v2", "mobilenetv2", 48.89, 512, 64, (612.9, 0.68)),
    ("MAnet", "mobileone_s1", "mobileone", 53.27, 512, 64, (615.0, 0.98)),
    ("MAnet", "resnet34", "resnet", 31.79, 512, 64, (436.9, 1.06)),
    ("MAnet", "vgg13_bn", "vgg", 22.63, 512, 64, (981.4, 2.64)),
    ("PAN", "efficientnet-b0", "efficientnet", 4.1, 512, 128, (579.5, 0.48)),
    ("PAN", "mobilenet_v2", "mobilenetv2", 2.42, 512, 128, (496.8, 0.39)),
    ("PAN", "resnet34", "resnet", 21.48, 512, 128, (212.0, 3.73)),
    ("PAN", "resnet50", "resnet", 24.27, 512, 128, (521.6, 4.34)),
    ("PAN", "resnext50_32x4d", "resnet", 23.74, 512, 128, (667.7, 4.34)),
    ("PSPNet", "dpn68", "dpn", 12.31, 512, 64, (347.2, 0.18)),
    ("PSPNet", "efficientnet-b3", "efficientnet", 10.85, 512, 64, (812.2, 0.12)),
    ("PSPNet", "mobilenet_v2", "mobilenetv2", 2.36, 512, 64, (407.9, 0.05)),
    ("PSPNet", "resnet101", "resnet", 43.39, 512, 64, (386.2, 0.38)),
    ("PSPNet", "resnet34", "resnet", 21.53, 512, 64, (180.0, 0.3)),
    ("PSPNet", "vgg16_bn", "vgg", 15.61, 512, 64, (678.2, 2.37)),
    ("Segformer", "densenet121", "densenet", 8.03, 512, 64, (828.7, 0.73)),
    ("Segformer", "efficientnet-b0", "efficientnet", 4.48, 512, 64, (588.9, 0.25)),
    ("Segformer", "mobilenet_v2", "mobilenetv2", 2.93, 512, 64, (532.3, 0.24)),
    ("Segformer", "resnet34", "resnet", 21.88, 512, 64, (319.0, 0.82)),
    ("Segformer", "tu-convnext_nano", "convnext", 15.53, 512, 64, (469.5, 0.56)),
    ("UPerNet", "efficientnet-b0", "efficientnet", 11.62, 512, 64, (672.4, 1.71)),
    ("UPerNet", "mobilenet_v2", "mobilenetv2", 13.03, 512, 64, (621.8, 1.74)),
    ("UPerNet", "resnet50", "resnet", 37.29, 512, 64, (686.3, 2.44)),
    ("UPerNet", "resnext50_32x4d", "resnet", 36.76, 512, 64, (817.3, 2.47)),
    ("UPerNet", "tu-convnext_tiny", "convnext", 37.05, 512, 64, (782.5, 2.41)),
    ("Unet", "densenet169", "densenet", 21.21, 512, 64, (1040.9, 1.22)),
    ("Unet", "dpn68", "dpn", 16.95, 512, 64, (720.3, 0.86)),
    ("Unet", "efficientnet-b0", "efficientnet", 6.25, 512, 64, (661.9, 0.39)),
    ("Unet", "mobilenet_v2", "mobilenetv2", 6.63, 512, 64, (608.1, 0.44)),
    ("Unet", "mobileone_s0", "mobileone", 8.59, 512, 64, (616.2, 0.6)),
    ("Unet", "resnet34", "resnet", 24.44, 512, 64, (392.5, 1.0)),
    ("Unet", "se_resnext50_32x4d", "senet", 34.53, 512, 64, (928.3, 1.38)),
    ("Unet", "tu-mobilenetv3_large_100", "mobilenetv3", 6.69, 512, 64, (436.9, 0.41)),
    ("Unet", "tu-regnety_008", "regnet", 9.38, 512, 64, (450.8, 0.54)),
    ("Unet", "vgg11_bn", "vgg", 18.26, 512, 64, (659.5, 1.83)),
    ("Unet", "vgg16_bn", "vgg", 23.76, 512, 64, (903.5, 3.12)),
    ("Unet", "xception", "xception", 28.77, 512, 64, (931.7, 1.34)),
    ("UnetPlusPlus", "densenet121", "densenet", 30.08, 512, 64, (1767.7, 6.92)),
    ("UnetPlusPlus", "efficientnet-b0", "efficientnet", 6.57, 512, 64, (877.9, 0.71)),
    ("UnetPlusPlus", "inceptionresnetv2", "inception_resnet_v2", 71.09, 512, 64, (1572.5, 5.74)),
    ("UnetPlusPlus", "mobilenet_v2", "mobilenetv2", 6.83, 512, 64, (738.1, 0.58)),
    ("UnetPlusPlus", "resnet18", "resnet", 15.97, 512, 64, (810.5, 2.02)),
    ("UnetPlusPlus", "resnet34", "resnet", 26.08, 512, 64, (860.5, 2.32)),
]

for _decoder, _encoder, _backbone_family, _params, _gpu, _cpu, _costs in ROWS:
    add(
        "smp", "MIT", "segmentation", f"{_decoder.lower()}-{_encoder}", partial(_build, _decoder, _encoder),
        (_decoder.lower(), _backbone_family), _params, Segmentation(classes=CLASSES),
        ((3, _gpu, _gpu), (3, _cpu, _cpu)), by_cost(*_costs), (_decoder, _encoder) in SMALL,
    )  # fmt: skip
