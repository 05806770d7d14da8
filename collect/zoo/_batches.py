"""Which batch sizes are worth tracing, by how heavy a model is."""

from __future__ import annotations

from torchtraceap.collect.model import BatchSizes

LIGHT: BatchSizes = {
    "gpu": {"train": (32, 128), "infer": (1, 128)},
    "cpu": {"train": (2, 4), "infer": (1, 4)},
}
"""Classifiers and the like: at the small size a GPU waits for launches, at the large one it is full."""

MEDIUM: BatchSizes = {
    "gpu": {"train": (8, 32), "infer": (1, 16)},
    "cpu": {"train": (2,), "infer": (1, 2)},
}
"""Dense prediction and detection."""

HEAVY: BatchSizes = {
    "gpu": {"train": (2, 8), "infer": (1, 8)},
    "cpu": {"train": (2,), "infer": (1,)},
}
"""High resolutions, video and diffusion models."""

NO_CPU_TRAINING: BatchSizes = {
    "gpu": {"train": (2, 8), "infer": (1, 8)},
    "cpu": {"train": (), "infer": (1,)},
}
"""Hundreds of millions of parameters: gradients and optimizer states are out of a CPU's reach."""
