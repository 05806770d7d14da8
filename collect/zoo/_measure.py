"""Count what a row of the zoo states of its model: parameters, activations and operations.

    python -m torchtraceap.collect.zoo._measure [MODEL...]

Prints a line a model. Most models are run on the meta device, which knows shapes and computes nothing. One
whose step depends on values (a detector) runs on the CPU, at its full size too, which takes gigabytes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from torchtraceap.collect.model import ZOO, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLES = {"meta": 2, "cpu": 1}
"""A batch: BatchNorm behind a global pooling refuses a single value a channel, which no detector has; one
sample of theirs takes gigabytes."""


@dataclass(frozen=True)
class Counted:
    """Facts of a model.

    Attributes:
        params_m: Parameters in millions.
        activations_mb: 2**20 bytes that autograd keeps of a sample at ``gpu_size`` for its backward, in fp32.
        cpu_gflop: Floating-point operations of a forward pass of a sample at ``cpu_size``, in 10**9.
    """

    params_m: float
    activations_mb: float
    cpu_gflop: float


def count(spec: ModelSpec) -> Counted:
    """Build the model and run a training forward pass at each of its two sizes."""
    try:
        with torch.device("meta"):
            model = spec.build()
        return _count(spec, model, "meta")
    except (NotImplementedError, RuntimeError):
        return _count(spec, spec.build(), "cpu")


def _count(spec: ModelSpec, model: nn.Module, device: str) -> Counted:
    model.train()
    return Counted(
        params_m=sum(p.numel() for p in model.parameters()) / 1e6,
        activations_mb=_forward(spec, model, spec.gpu_size, device)[0] / 2**20,
        cpu_gflop=_forward(spec, model, spec.cpu_size, device)[1] / 1e9,
    )


def _forward(spec: ModelSpec, model: nn.Module, size: tuple[int, ...], device: str) -> tuple[float, float]:
    """Bytes that autograd keeps of a sample, apart from weights, and operations of a sample."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no other storage can have its address
        return tensor

    samples = SAMPLES[device]
    batch = spec.make_batch(samples, size, torch.Generator().manual_seed(0))
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    with FlopCounterMode(display=False) as operations, saved_tensors_hooks(keep, lambda tensor: tensor):
        spec.loss(spec.forward(model, batch, training=True), batch)
    return sum(s.nbytes() for s in kept.values()) / samples, operations.get_total_flops() / samples


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="a name from `traceap zoo list`; all without")
    print("model, parameters in millions, (activations in MB, operations in GFLOP)", flush=True)
    for name in parser.parse_args().model or ZOO.names():
        counted = count(ZOO[name])
        print(
            f"{name}, {counted.params_m:.2f}, ({counted.activations_mb:.1f}, {counted.cpu_gflop:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
