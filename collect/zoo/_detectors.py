"""Untrained torchvision detectors that find a realistic number of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 100
"""Class scores an image that pass a detector's threshold; non-maximum suppression leaves some of them."""

CLASSES_PRESENT = 10
"""An image shows few of the classes; were all 90 equally likely, none could reach a threshold of 0.05."""

SPREAD = 0.5
"""Deviation of the class biases: features of random weights may be the same everywhere."""
MARGIN = 0.01
"""Logits by which the last candidate passes, so that rounding does not decide."""
DETECTIONS = 100
"""At most so many an image, as COCO's metric counts them."""


def _keep_size(image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
    return image, target


def prepare(detector: Any, classes: int, size: tuple[int, int]) -> None:
    """Take images at the size they come in (a loader has resized them), and shift the class biases.

    With random weights all scores are alike: either none passes the threshold, or all do, and then the step
    is little but 90,000 operations of non-maximum suppression. One forward pass of noise tells by how much
    the biases of the foreground classes (or, under a softmax, of the background) must move for ``CANDIDATES``
    scores to pass.
    """
    import torch

    detector.transform.resize = _keep_size
    owner = getattr(detector, "roi_heads", detector)
    head = owner.box_predictor.cls_score if owner is not detector else detector.head.classification_head
    owner.detections_per_img = DETECTIONS
    biases = [bias.detach().view(-1, classes) for bias in _class_biases(head)]
    generator = torch.Generator().manual_seed(0)
    for bias in biases:
        bias.add_(torch.randn(bias.shape, generator=generator), alpha=SPREAD)
        bias[:, CLASSES_PRESENT + 1 :].sub_(10)
    threshold, owner.score_thresh = owner.score_thresh, 1.0
    logits: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, args, output: logits.append(output))
    image = torch.rand(3, *size, generator=generator)
    detector.eval()
    with torch.no_grad():
        detector([image])
    hook.remove()
    detector.train()
    owner.score_thresh = threshold

    scores = logits[0].detach().reshape(-1, classes)
    if hasattr(head, "cls_logits"):  # RetinaNet and FCOS: a sigmoid a class
        if hasattr(detector.head.regression_head, "bbox_ctrness"):  # score: root of class times centerness
            threshold = threshold**2 / 0.5
        shift = torch.tensor(threshold).logit() - scores.flatten().topk(CANDIDATES).values[-1]
        for bias in biases:
            bias.add_(shift + MARGIN)
    else:
        # p(class) > threshold  <=>  background logit < log(exp(class) / threshold - sum(exp(classes)))
        foreground = scores[:, 1:]
        odds = 1 / threshold - (foreground.logsumexp(1, keepdim=True) - foreground).exp()
        limit = foreground + odds.clamp(min=1e-9).log() - scores[:, :1]
        shift = limit.flatten().topk(CANDIDATES).values[-1]
        for bias in biases:
            bias[:, :1].add_(shift - MARGIN)


def _class_biases(head: Any) -> list[Tensor]:
    """The biases of those layers of a classification head whose outputs are logits."""
    if hasattr(head, "cls_logits"):
        return [head.cls_logits.bias]
    if hasattr(head, "module_list"):  # SSD: a level each; SSDlite: a depthwise block before it
        return [(level if hasattr(level, "bias") else level[-1]).bias for level in head.module_list]
    return [head.bias]
