"""Workloads whose network goes through ``torch.compile``.

The clean loop compiles the whole model once, in its first step, and nothing afterwards. What is compiled for
an injection is kept apart from it (labels/patterns/_compiled.py), so that a toggle compiles nothing either.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch._dynamo
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from torch import nn

    from torchtraceap.collect.loop import TrainingLoop

MODELS = (
    "smp/unet-mobilenet_v2",
    "timm/convnext_tiny",
    "timm/mixer_s16_224",
    "timm/mobilenetv3_large_100",
    "timm/regnety_008",
    "timm/resnet18",
    "timm/vit_small_patch16_224",
    "torchvision/lraspp_mobilenet_v3_large",
    "transformers/vitpose-tiny-simple",
)
"""Models that compile into one graph in both modes, in seconds, and draw no random numbers (see below)."""

RECOMPILE_LIMIT = 10_000
"""Dynamo gives up after eight versions of a function and runs it eagerly from then on: the pattern
``recompilation`` would turn into another one in the middle of its measurement."""


def compile_network(loop: TrainingLoop, backend: str | None = None) -> None:
    """Let the forward stage call the compiled model; call before anything is installed or has run.

    Shapes are static, as a user has it whose batches are all alike. The loop's ``close`` undoes it and
    forgets what was compiled.

    A model that draws random numbers has other ones where it is split into several graphs, as inductor draws
    one seed a graph; so those of :data:`MODELS` draw none.

    Args:
        loop: A loop that has not been compiled.
        backend: Of ``torch.compile``. By default inductor on an accelerator, and on a CPU ``aot_eager``,
            which needs no C++ compiler.

    Raises:
        ValueError: The model is of a class of torch itself. Dynamo starts such a one from a function that all
            of them share, and so does what it keeps for them.
    """
    if type(loop.model).__module__.startswith("torch."):
        raise ValueError(f"{loop.spec.name}: wrap {type(loop.model).__name__} in a module class of its own")
    backend = backend or ("aot_eager" if loop.device.type == "cpu" else "inductor")
    closing = loop.closing
    closing.callback(torch._dynamo.reset)
    closing.enter_context(
        torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
        )
    )
    closing.enter_context(_empty_caches())
    if backend == "inductor":
        from torch._inductor import config as inductor

        # In this process: a pool of workers would compile beside the steps that are measured, and outlive
        # a child that is killed.
        closing.enter_context(inductor.patch(compile_threads=1))
    torch._dynamo.reset()
    counters.clear()
    loop.runtime = "compiled"
    loop.network = cast("nn.Module", torch.compile(loop.model, backend=backend, dynamic=False))


def absent_when_compiled(loop: TrainingLoop) -> set[str]:
    """Patterns of compiled workloads that the clean loop does not hold.

    Call when it is warm and no placement has acted yet. It takes two steps.

    Returns:
        ``graph_break`` if Dynamo saw no reason for one, ``recompilation`` if two more steps compile nothing.
    """
    absent = set() if counters["graph_break"] else {"graph_break"}
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(2):
        loop.step()
    if counters["stats"]["unique_graphs"] == compiled:
        absent.add("recompilation")
    return absent


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Caches on disk that begin empty and go away.

    Otherwise what a compilation costs would depend on what has been compiled on this machine before.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="traceap-compiled-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder, name.lower())) for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
