"""Which batch sizes are worth tracing, by how heavy a model is."""

from __future__ import annotations

from torchtraceap.collect.model import BatchSizes

LIGHT: BatchSizes = {
    "gpu": {"train": (32, 128), "infer": (1, 128)},
    "cpu": {"train": (2, 4), "infer": (1, 4)},
}
"""Classifiers and the like: at the small size a GPU waits for launches, at the large one it is full."""

MEDIUM: BatchSizes = {
    "gpu": {"train": (2, 8), "infer": (1, 8)},
    "cpu": {"train": (2,), "infer": (1, 2)},
}
"""Dense prediction and detection."""

HEAVY: BatchSizes = {
    "gpu": {"train": (2, 4), "infer": (1, 4)},
    "cpu": {"train": (2,), "infer": (1,)},
}
"""High resolutions, video and diffusion models."""

NO_CPU_TRAINING: BatchSizes = {
    "gpu": {"train": (2, 4), "infer": (1, 4)},
    "cpu": {"train": (), "infer": (1,)},
}
"""Hundreds of millions of parameters: gradients and optimizer states are out of a CPU's reach."""

INFER_ONLY: BatchSizes = {
    "gpu": {"train": (), "infer": (1, 8)},
    "cpu": {"train": (), "infer": (1,)},
}
"""Models whose library has no loss for them."""

GPU_ONLY: BatchSizes = {
    "gpu": {"train": (), "infer": (1, 4)},
    "cpu": {"train": (), "infer": ()},
}
"""Billions of parameters, or minutes a step on a CPU."""

LARGE: BatchSizes = {
    "gpu": {"train": (2,), "infer": (1, 4)},
    "cpu": {"train": (), "infer": ()},
}
"""One to three billion parameters (with gradients and optimizer states 40 GB), or minutes a step on a CPU."""

LARGEST = 128
"""Samples a batch at most: more of a small model's would be a test of the loader."""

ROOM_MB = 16 * 1024
"""Activations of the large batch at most, counted in fp32: half of it under bfloat16 autocast. An H200 is
busy with that for most of a step, which is what the large batch is for; twice as much takes twice as long to
measure and shows the same."""

QUICK_GFLOP, SLOW_GFLOP = 3.0, 30.0
"""Forward pass of one sample, above which a CPU runs no large batch, and does not train."""


def by_cost(activations_mb: float, cpu_gflop: float) -> BatchSizes:
    """Batch sizes of a model by what ``collect/zoo/_measure.py`` counts.

    The large one of a GPU is the largest power of two whose activations fit into ``ROOM_MB``, from 4 to
    ``LARGEST``: there the device is the bound. The small one is an eighth of it, at which the host may be.

    Args:
        activations_mb: What backward needs of a forward pass of one sample at ``gpu_size``, in fp32.
        cpu_gflop: Operations of a forward pass of one sample at ``cpu_size``.
    """
    large = 4
    while large < LARGEST and 2 * large * activations_mb <= ROOM_MB:
        large *= 2
    small = max(2, large // 8)
    train: tuple[int, ...] = (2,)
    infer: tuple[int, ...] = (1, 2)
    if cpu_gflop <= QUICK_GFLOP:
        train, infer = (2, 4), (1, 4)
    elif cpu_gflop > SLOW_GFLOP:
        train, infer = (), (1,)
    return {
        "gpu": {"train": (small, large), "infer": (1, large)},
        "cpu": {"train": train, "infer": infer},
    }
