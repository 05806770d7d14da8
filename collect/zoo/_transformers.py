"""How rows of transformers are built and registered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torchtraceap.collect.model import Adapter, BatchSizes, ModelSpec, register

if TYPE_CHECKING:
    from torch import nn

Size = tuple[int, ...]
Config = dict[str, Any]


def build(architecture: str, config: Config) -> nn.Module:
    """A network of random weights: the class and its configuration, in which a backbone is a dictionary."""
    import transformers

    model = getattr(transformers, architecture)
    return model(model.config_class(**config))


def add(
    name: str,
    architecture: str,
    config: Config,
    task: str,
    families: tuple[str, str],
    params_m: float,
    adapter: Adapter,
    sizes: tuple[Size, Size],
    batch_sizes: BatchSizes,
    small: bool = False,
) -> None:
    """Register a row; ``families`` are of the model and its backbone, ``sizes`` on a GPU and on a CPU."""
    register(
        ModelSpec(
            name=f"transformers/{name}",
            source="transformers",
            task=task,
            family=families[0],
            backbone_family=families[1],
            licence="Apache-2.0",
            params_m=params_m,
            build=partial(build, architecture, config),
            adapter=adapter,
            gpu_size=sizes[0],
            cpu_size=sizes[1],
            batch_sizes=batch_sizes,
            small=small,
        )
    )
