"""The batch is copied to the GPU from pageable memory.

The pageable twin of a batch comes from a second loader of the same batches that does not pin. It stands for
the data stage in the steps in which the pattern is on, unlabelled, so that the h2d stage meets a pageable
batch at no cost of its own: cloning a pinned batch would add a copy in host memory to the step, as large as
the one that is to be measured. The data stage itself only takes a batch that workers have ready, in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register

if TYPE_CHECKING:
    from torch import Tensor


def _pageable(loop: Loop, h2d: Body) -> list[Site]:
    loader = loop.make_loader(pin=False)

    def data(state: State, original: Body) -> None:
        state.host = next(loader)

    return [StageSite("h2d", h2d, data=data)]


def _to_device(loop: Loop) -> list[Site]:
    from torch.utils._pytree import tree_map

    def h2d(state: State, original: Body) -> None:
        state.batch = tree_map(lambda t: t.to(loop.device), state.host)

    return _pageable(loop, h2d)


def _non_blocking(loop: Loop) -> list[Site]:
    return _pageable(loop, lambda state, original: original(state))


def _per_sample(loop: Loop) -> list[Site]:
    import torch
    from torch.utils._pytree import tree_map

    def copy(t: Tensor) -> Tensor:
        return torch.stack([sample.to(loop.device) for sample in t])

    def h2d(state: State, original: Body) -> None:
        state.batch = tree_map(copy, state.host)

    return _pageable(loop, h2d)


def _two_copies(loop: Loop) -> list[Site]:
    import torch
    from torch.utils._pytree import tree_map

    if loop.batch_size < 2:
        return []  # one sample has no two halves

    def copy(t: Tensor) -> Tensor:
        out = torch.empty_like(t, device=loop.device)
        half = (len(t) + 1) // 2
        out[:half].copy_(t[:half], non_blocking=True)
        out[half:].copy_(t[half:], non_blocking=True)
        return out

    def h2d(state: State, original: Body) -> None:
        state.batch = tree_map(copy, state.host)

    return [StageSite("h2d", h2d)]


register(
    Pattern(
        id="pageable_h2d",
        title="Copy from pageable memory",
        definition=(
            "The batch lies in pageable host memory when it is copied to the GPU, so the driver stages it "
            "through a buffer of its own while the host waits. The copy runs well below the bus's speed, and "
            "neither the host nor, for want of launches, the GPU gets on with the step."
        ),
        scope="local",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="marker",
        belongs=(
            "CPU: the operators of the host-to-device stage and their runtime calls with the wait, and the "
            "loader's call ahead of it, in which the main thread unpacks a batch that no thread has pinned. "
            "GPU: the host-to-device copies, and the kernel that stacks samples."
        ),
        needs_gpu=True,
        precondition="Every tensor of a batch has the batch as its first dimension.",
        variants=(
            Variant(
                "to_device",
                "batch.to(device) of an unpinned batch.",
                _to_device,
                settle_steps=2,
                starts_workers=True,
            ),
            Variant(
                "non_blocking",
                "batch.to(device, non_blocking=True) of an unpinned batch, which cannot be asynchronous.",
                _non_blocking,
                settle_steps=2,
                starts_workers=True,
            ),
            Variant(
                "per_sample",
                "Unpinned samples are copied one by one and stacked on the device.",
                _per_sample,
                heldout=True,
                settle_steps=2,
                starts_workers=True,
            ),
        ),
        lookalikes=(Variant("two_copies", "Two asynchronous copies of a pinned batch.", _two_copies),),
        remedy="""\
loader = DataLoader(dataset, batch_size, num_workers=workers, pin_memory=True)
for batch in loader:
    batch = batch.to(device, non_blocking=True)
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
            "https://docs.pytorch.org/docs/stable/data.html#memory-pinning",
            "https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers",
        ),
    )
)
