"""Random objects with masks, and adapters of models that predict a set of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Batch
from torchtraceap.collect.zoo._boxes import random_boxes
from torchtraceap.collect.zoo._images import normalised, random_images

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def boxes_and_masks(
    batch_size: int, count: int, size: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Boxes as relative centre and extent fp32 [B, K, 4], and their areas as bool [B, K, *size]."""
    import torch

    centres, extents = random_boxes(batch_size, count, generator)
    low, high = centres - extents / 2, centres + extents / 2
    x = (torch.arange(size[1]) + 0.5) / size[1]
    y = (torch.arange(size[0]) + 0.5) / size[0]
    columns = (x >= low[..., :1]) & (x < high[..., :1])
    rows = (y >= low[..., 1:]) & (y < high[..., 1:])
    return torch.cat([centres, extents], dim=-1), rows.unsqueeze(-1) & columns.unsqueeze(-2)


@dataclass(frozen=True)
class MaskSet:
    """Image to a fixed set of masks and class logits; the model matches them with the targets itself.

    Batch: image uint8 [B, 3, H, W], masks bool [B, K, H, W], labels int64 [B, K], and for a model that is
    told its task in words their tokens int64 [B, 77].

    Attributes:
        classes: Number of classes.
        objects: Masks an image, K.
        told: Whether the model is told its task.
    """

    classes: int = 150
    objects: int = 8
    told: bool = False

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        _, masks = boxes_and_masks(batch_size, self.objects, (height, width), generator)
        shape = (batch_size, self.objects)
        batch = {
            "image": random_images(batch_size, size, generator),
            "masks": masks,
            "labels": torch.randint(0, self.classes, shape, generator=generator),
        }
        if self.told:
            batch["task"] = torch.randint(1, 49000, (batch_size, 77), generator=generator)
        return batch

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        inputs: dict[str, Any] = {"pixel_values": normalised(batch["image"])}
        if self.told:
            inputs["task_inputs"] = batch["task"]
        if not training:
            output = model(**inputs)
            return {"classes": output.class_queries_logits, "masks": output.masks_queries_logits}
        masks, labels = list(batch["masks"].float().unbind()), list(batch["labels"].unbind())
        return {"loss": model(**inputs, mask_labels=masks, class_labels=labels).loss.squeeze()}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        return output["loss"]


@dataclass(frozen=True)
class BoxesWithMasks:
    """Image to a set of boxes, classes and masks, matched by the model itself.

    Batch: image uint8 [B, 3, H, W], boxes fp32 [B, K, 4], masks bool [B, K, H, W], labels int64 [B, K].
    """

    classes: int
    objects: int = 8

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        boxes, masks = boxes_and_masks(batch_size, self.objects, (height, width), generator)
        shape = (batch_size, self.objects)
        return {
            "image": random_images(batch_size, size, generator),
            "boxes": boxes,
            "masks": masks,
            "labels": torch.randint(0, self.classes, shape, generator=generator),
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        pixels = normalised(batch["image"])
        if not training:
            output = model(pixel_values=pixels)
            return {"logits": output.logits, "boxes": output.pred_boxes, "masks": output.pred_masks}
        columns = [batch[name].unbind() for name in ("boxes", "labels", "masks")]
        keys = ("boxes", "class_labels", "masks")
        targets = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        return {"loss": model(pixel_values=pixels, labels=targets).loss}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        return output["loss"]


@dataclass(frozen=True)
class PointToMask:
    """Image and a point to the mask of the object there; trained with cross-entropy and the Dice loss.

    Batch: image uint8 [B, 3, H, W], points in pixels fp32 [B, 1, 1, 2] (image, object, point), ``inside``
    int64 [B, 1, 1] (1: the point is of the object), mask bool [B, H / 4, W / 4].
    """

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        boxes, masks = boxes_and_masks(batch_size, 1, (height // 4, width // 4), generator)
        return {
            "image": random_images(batch_size, size, generator),
            "points": (boxes[..., :2] * torch.tensor([width, height])).unsqueeze(2),
            "inside": torch.ones(batch_size, 1, 1, dtype=torch.int64),
            "mask": masks[:, 0],
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> dict[str, Tensor]:
        output = model(
            pixel_values=normalised(batch["image"]),
            input_points=batch["points"],
            input_labels=batch["inside"],
            multimask_output=not training,
        )
        return {"masks": output.pred_masks, "scores": output.iou_scores}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        logits, mask = output["masks"].squeeze((1, 2)).float(), batch["mask"].float()
        probability = logits.sigmoid()
        overlap = (probability * mask).sum((1, 2))
        dice = 1 - (2 * overlap + 1) / (probability.sum((1, 2)) + mask.sum((1, 2)) + 1)
        return binary_cross_entropy_with_logits(logits, mask) + dice.mean()


@dataclass(frozen=True)
class PhraseToMask:
    """Image and a phrase to the mask of what it names.

    Batch: image uint8 [B, 3, H, W], tokens of the phrase int64 [B, 77], mask bool [B, H, W].
    """

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        import torch

        _, height, width = size
        _, masks = boxes_and_masks(batch_size, 1, (height, width), generator)
        return {
            "image": random_images(batch_size, size, generator),
            "tokens": torch.randint(1, 49000, (batch_size, 77), generator=generator),
            "mask": masks[:, 0],
        }

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Tensor:
        return model(
            pixel_values=normalised(batch["image"]),
            input_ids=batch["tokens"],
            interpolate_pos_encoding=True,
        ).logits

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(output, batch["mask"].float())
