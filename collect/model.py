"""What the harness knows of a model, and the batches it feeds on.

A row of the zoo is one :class:`ModelSpec`: facts, a function that builds the network with random weights,
and an :class:`Adapter` that says how a batch, a forward pass and a loss look for such a model. Importing
this module or the zoo imports neither torch nor a model library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchtraceap.dataset.schema import MODES, TASKS
from torchtraceap.labels.pattern import Mode
from torchtraceap.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
"""Named tensors whose first dimension is the batch, so that a loader can cut any batch into samples."""

DeviceKind = Literal["gpu", "cpu"]
BatchSizes = Mapping[DeviceKind, Mapping[Mode, tuple[int, ...]]]


def kind_of(device_type: str) -> DeviceKind:
    """The kind of ``cpu``, ``cuda``, ``xpu`` and so on."""
    return "cpu" if device_type == "cpu" else "gpu"


class Adapter(Protocol):
    """How one kind of model is fed and trained; stateless, shared by many rows."""

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        """A batch of random samples on the CPU, with targets; ``size`` is the shape of one input sample."""
        ...

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        """Prepare the inputs on the batch's device (uint8 to normalised floats) and call ``model`` once.

        ``model`` may be wrapped (compiled, DDP), so nothing but its call may be used. Returns a pytree of
        tensors: what :meth:`loss` needs in training, predictions otherwise.
        """
        ...

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Scalar loss of a training ``forward``; it must not wait for the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of the zoo.

    Attributes:
        name: ``<source>/<model>``, unique.
        source: Library that the code comes from.
        task: One of ``schema.TASKS``.
        family: Outermost architecture (a U-Net with a ResNet encoder: ``unet``).
        backbone_family: Architecture of the feature extractor (there: ``resnet``); equal to ``family``
            when the model is its own backbone.
        licence: SPDX identifier of the model's code.
        params_m: Parameters in millions.
        build: Makes the network with random weights, offline, in fp32 on the current default device.
        adapter: How it is fed.
        gpu_size: Shape of one input sample at the published resolution, for example (3, 224, 224).
        cpu_size: A smaller one that a CPU can step through in seconds.
        batch_sizes: Batch sizes worth tracing by device kind and mode: small ones are bound by launches,
            large ones by the device. An empty tuple: do not run there.
        small: Belongs to the demo tier: quick on two CPU cores.
    """

    name: str
    source: str
    task: str
    family: str
    backbone_family: str
    licence: str
    params_m: float
    build: Callable[[], nn.Module] = field(repr=False)
    adapter: Adapter = field(repr=False)
    gpu_size: tuple[int, ...]
    cpu_size: tuple[int, ...]
    batch_sizes: BatchSizes = field(repr=False)
    small: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"model {self.name}: task {self.task!r} is none of {', '.join(TASKS)}")
        if self.name.split("/")[0] != self.source:
            raise ValueError(f"model {self.name}: the name must start with its source, {self.source}/")

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The loops that it can run in on some device."""
        return tuple(mode for mode in MODES if any(kind[mode] for kind in self.batch_sizes.values()))

    def size(self, device_type: str) -> tuple[int, ...]:
        """Shape of one input sample on a device type (``cpu``, ``cuda``, ...)."""
        return self.cpu_size if device_type == "cpu" else self.gpu_size

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        """See :meth:`Adapter.make_batch`."""
        return self.adapter.make_batch(batch_size, size, generator)

    def forward(self, model: nn.Module, batch: Batch, training: bool) -> Any:
        """See :meth:`Adapter.forward`."""
        return self.adapter.forward(model, batch, training)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """See :meth:`Adapter.loss`."""
        return self.adapter.loss(output, batch)


ZOO: Registry[ModelSpec] = Registry("model", ModelSpec, "torchtraceap.collect.zoo")


def register(spec: ModelSpec) -> ModelSpec:
    """Add a model to the zoo under its name."""
    return ZOO.register(spec.name, spec)


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The facts of a model as JSON values."""
    return {
        "name": spec.name,
        "source": spec.source,
        "task": spec.task,
        "family": spec.family,
        "backbone_family": spec.backbone_family,
        "licence": spec.licence,
        "params_m": spec.params_m,
        "modes": list(spec.modes),
        "gpu_size": list(spec.gpu_size),
        "cpu_size": list(spec.cpu_size),
        "batch_sizes": {
            kind: {mode: list(sizes) for mode, sizes in by_mode.items()}
            for kind, by_mode in spec.batch_sizes.items()
        },
        "small": spec.small,
    }


def split_batch(batch: Batch) -> list[Batch]:
    """The samples of a batch: views without the batch dimension."""
    rows = zip(*(tensor.unbind() for tensor in batch.values()), strict=True)
    return [dict(zip(batch, row, strict=True)) for row in rows]


def collate(samples: Sequence[Batch]) -> Batch:
    """The inverse of :func:`split_batch`: stack samples of equal shapes into a batch."""
    import torch

    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
