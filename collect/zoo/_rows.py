"""How a row of any source is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtraceap.collect.model import Adapter, BatchSizes, ModelSpec, register

if TYPE_CHECKING:
    from torch import nn

Size = tuple[int, ...]


def add(
    source: str,
    licence: str,
    task: str,
    name: str,
    build: Callable[[], nn.Module],
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
            name=f"{source}/{name}",
            source=source,
            task=task,
            family=families[0],
            backbone_family=families[1],
            licence=licence,
            params_m=params_m,
            build=build,
            adapter=adapter,
            gpu_size=sizes[0],
            cpu_size=sizes[1],
            batch_sizes=batch_sizes,
            small=small,
        )
    )
