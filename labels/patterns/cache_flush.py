"""The allocator's cache is emptied in the step, so that the memory has to be allocated again."""

from __future__ import annotations

from torchtraceap.labels.pattern import Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import call_sites, watching_sites

SETTLE_STEPS = 3
"""What is emptied in one step is missing in the next, and the allocator takes another one or two to arrive at
blocks that fit every request. More than the profiler warms up: the pattern acts in every step or in none, so
that no step without it pays for one with it."""

SELECTED = frozenset(
    prefix + call
    for prefix in ("cuda", "hip")
    for call in (
        "Free",
        "Malloc",
        "DeviceSynchronize",
        "StreamSynchronize",
        "EventSynchronize",
    )
) | frozenset(
    # With expandable segments.
    prefix + call
    for prefix in ("cu", "hip")
    for call in (
        "MemAddressFree",
        "MemAddressReserve",
        "MemCreate",
        "MemMap",
        "MemRelease",
        "MemSetAccess",
        "MemUnmap",
    )
)
"""Runtime and driver calls that give memory back, take it again, or wait so that this is safe."""


def _empty_cache(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, torch.accelerator.empty_cache)


def _synchronize_first(loop: Loop) -> list[Site]:
    import torch

    def flush() -> None:
        torch.accelerator.synchronize(loop.device)
        torch.accelerator.empty_cache()

    return call_sites(loop, flush)


def _free_memory(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, lambda: torch.accelerator.get_memory_info(loop.device))


def _cached_allocation(loop: Loop) -> list[Site]:
    import torch

    # Nobody keeps the tensor, so its memory goes back to the cache at once.
    return watching_sites(loop, torch.empty_like, stages=("forward", "logging"))


register(
    Pattern(
        id="cache_flush",
        title="Allocator's cache emptied",
        definition=(
            "The cache of the device's memory allocator is emptied in every step, which gives memory back to "
            "the driver that the step is about to ask for again. Giving it back waits for the device, and "
            "each new allocation is a slow call of the driver where the cache would have had a block at once."
        ),
        scope="local",
        lanes=frozenset({"cpu"}),
        mechanism="selector",
        belongs=(
            "CPU: the calls that free memory, where the cache is emptied, and those that allocate it again, "
            "wherever later operators ask for it, forward and backward, and the waits that either brings and "
            "that the clean trace lacks. GPU: nothing."
        ),
        selects=SELECTED.__contains__,
        needs_gpu=True,
        variants=(
            Variant(
                "empty_cache",
                "torch.cuda.empty_cache().",
                _empty_cache,
                max_sites=2,
                settle_steps=SETTLE_STEPS,
            ),
            Variant(
                "synchronize_first",
                "torch.cuda.synchronize(), then torch.cuda.empty_cache().",
                _synchronize_first,
                heldout=True,
                max_sites=2,
                settle_steps=SETTLE_STEPS,
            ),
        ),
        lookalikes=(
            Variant(
                "free_memory",
                "The driver is asked how much memory is free.",
                _free_memory,
                max_sites=2,
                mechanism="marker",
            ),
            Variant(
                "cached_allocation",
                "Memory is taken from the cache and given back to it.",
                _cached_allocation,
                max_sites=2,
                mechanism="marker",
            ),
        ),
        remedy="""\
for batch in loader:
    train_step(batch)  # no torch.cuda.empty_cache() in here: the allocator reuses what a step has freed

# Where memory is short because of fragmentation, say so to the allocator, before the first allocation.
import os
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
""",
        references=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
            "https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html",
            "https://github.com/huggingface/transformers/issues/31372",
            "https://github.com/huggingface/transformers/pull/31530",
        ),
    )
)
