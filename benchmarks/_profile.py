"""A trace to measure with, where none is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

STEPS = 20


@contextmanager
def given_or_made(files: list[Path]) -> Iterator[list[Path]]:
    """``files``; without any, a profile of ResNet-18 training on the CPU, there while the block runs."""
    if files:
        yield files
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "resnet18.json"
        _make(path)
        yield [path]


def _make(path: Path) -> None:
    import torch
    import torchvision
    from torch.profiler import ProfilerActivity, profile

    model = torchvision.models.resnet18(weights=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
