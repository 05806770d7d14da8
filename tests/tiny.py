"""A model that steps in a millisecond, for tests of the collector."""

from __future__ import annotations

import torch
from torch import nn

from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.collect.model import ModelSpec


class Twice(nn.Module):
    """Calls its only child twice, so that neither call is a place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(x))


class SelfAttention(nn.Module):
    """Attention of tokens to each other, without weights of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


def build() -> nn.Module:
    """Buffers that each call updates, random numbers, a write in place, and blocks of none of these."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()),
        Twice(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 36, 5),
    )


class Whole(nn.Module):
    """A model with a class of its own, which a compiled one must have."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Classify:
    """Images and labels."""

    def make_batch(self, batch_size, size, generator):
        return {
            "image": torch.rand(batch_size, *size, generator=generator),
            "label": torch.randint(0, 5, (batch_size,), generator=generator),
        }

    def forward(self, model, batch, training):
        return model(batch["image"])

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch["label"])


def spec(build=build, name: str = "tiny/net", adapter=None) -> ModelSpec:
    """A row of the zoo around ``build``, which takes 3 x 6 x 6 images."""
    sizes = {kind: {"train": (4,), "infer": (4,)} for kind in ("cpu", "gpu")}
    return ModelSpec(
        name=name, source="tiny", task="classification", family="tiny", backbone_family="tiny",
        licence="Apache-2.0", params_m=0.01, build=build, adapter=adapter or Classify(), gpu_size=(3, 6, 6),
        cpu_size=(3, 6, 6), batch_sizes=sizes,
    )  # fmt: skip


class WithoutWorkers(TrainingLoop):
    """Starting and stopping workers takes a second; only what is about loaders needs them."""

    def make_loader(self, **changes):
        return super().make_loader(**changes | {"workers": 0})
