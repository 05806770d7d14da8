"""Batches for the loop: prepared once, held in memory, served for ever by a real DataLoader.

The loader is the good one: workers that keep up, pinned memory on a GPU. What it serves is prepared before
any step, so that a clean step never waits for data, whatever the machine's disk and cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchtraceap.collect.model import collate, split_batch

PerSample = Callable[[Any], Any]


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            yield index
            index += 1


class BatchDataset(Dataset[Any]):
    """A few prepared batches, over and over.

    With ``per_sample`` each batch is taken apart, every sample goes through that function where the loader
    runs (a worker, or the main process), and the results are collated again.
    """

    def __init__(self, batches: list[Any], per_sample: PerSample | None = None) -> None:
        self._batches = batches
        self._per_sample = per_sample

    def __getitem__(self, index: int) -> Any:
        batch = self._batches[index % len(self._batches)]
        if self._per_sample is None:
            return batch
        return collate([self._per_sample(sample) for sample in split_batch(batch)])


def shared(batch: Any) -> Any:
    """The batch in shared memory: a worker then sends a handle, not a copy."""
    return tree_map(lambda t: t.share_memory_() if isinstance(t, torch.Tensor) else t, batch)


def endless(
    batches: list[Any], *, workers: int, pin: bool, per_sample: PerSample | None = None
) -> _BaseDataLoaderIter:
    """An iterator of ``batches`` without end; its workers start now, before the model computes anything."""
    loader = DataLoader(
        BatchDataset(batches, per_sample),
        batch_size=None,
        sampler=_Endless(),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=2 if workers else None,
        persistent_workers=bool(workers),
    )
    return iter(loader)


def rewind(iterator: _BaseDataLoaderIter, batches: int) -> None:
    """Take batches until the first of ``batches`` is the next."""
    while iterator._num_yielded % batches:
        next(iterator)


def close(iterator: _BaseDataLoaderIter) -> None:
    """Stop the workers of an iterator now and not when it is collected."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
