"""The training loop waits for the next batch.

What a sample costs here stands for an input pipeline of ordinary size: one 500 x 400 JPEG is decoded,
cropped, resized to 224 x 224, flipped and normalised, whatever the workload's own samples are. The result
is dropped and the sample passed on unchanged.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def _jpeg() -> Tensor:
    """A photograph-like image as JPEG bytes: smooth shapes with some noise, about 100 kB."""
    import torch
    from torchvision.io import encode_jpeg

    generator = torch.Generator().manual_seed(0)
    shapes = torch.rand(1, 3, 50, 63, generator=generator)
    image = torch.nn.functional.interpolate(shapes, size=(400, 500), mode="bicubic")[0]
    image = image + 0.05 * torch.randn(image.shape, generator=generator)
    return cast("Tensor", encode_jpeg((image.clamp(0, 1) * 255).to(torch.uint8), quality=90))


def decode_and_augment(sample: Any) -> Any:
    """Do the work of a usual image pipeline and return ``sample`` itself.

    Draws no random numbers: in the main process they would come from the generator that dropout uses.
    """
    import torch
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2 import functional

    image = cast("Tensor", decode_jpeg(_jpeg()))
    image = functional.resized_crop(image, 20, 30, 360, 440, [224, 224], antialias=True)
    image = functional.to_dtype(functional.horizontal_flip(image), torch.float32, scale=True)
    functional.normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    return sample


def copy_sample(sample: Any) -> Any:
    """Work that a worker has no trouble to keep up with; returns an equal sample."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(torch.clone, sample)


def _from_loader(loop: Loop, **changes: Any) -> list[Site]:
    loader = loop.make_loader(**changes)

    def data(state: State, original: Body) -> None:
        state.host = next(loader)

    return [StageSite("data", data)]


def _main_process(loop: Loop) -> list[Site]:
    return _from_loader(loop, workers=0, per_sample=decode_and_augment)


def _starved_worker(loop: Loop) -> list[Site]:
    return _from_loader(loop, workers=1, per_sample=decode_and_augment)


def _in_memory(loop: Loop) -> list[Site]:
    return _from_loader(loop, workers=0)


def _light_workers(loop: Loop) -> list[Site]:
    return _from_loader(loop, per_sample=copy_sample)


def _views(loop: Loop) -> list[Site]:
    from torch.utils._pytree import tree_leaves

    def data(state: State, original: Body) -> None:
        original(state)
        for tensor in tree_leaves(state.host):
            tensor.unbind()

    return [StageSite("data", data)]


register(
    Pattern(
        id="dataloader_stall",
        title="Waiting for the data loader",
        definition=(
            "The loop asks for the next batch before the loader has it, because decoding and augmentation "
            "run in the main process or in too few workers. Each step then waits for the input pipeline, "
            "whatever the model costs."
        ),
        scope="step",
        lanes=frozenset({"cpu"}),
        mechanism="marker",
        belongs="Everything on the loop's thread from asking for a batch to having it, the wait included.",
        variants=(
            Variant("main_process", "No workers: samples are decoded in the loop's process.", _main_process),
            Variant(
                "starved_worker",
                "One worker decodes and cannot keep up.",
                _starved_worker,
                heldout=True,
                # Until the batches that the worker had ready are used up.
                settle_steps=4,
                starts_workers=True,
            ),
        ),
        lookalikes=(
            Variant("in_memory", "No workers, but nothing to do: batches lie in memory.", _in_memory),
            Variant(
                "light_workers",
                "Workers with light work, which keep up.",
                _light_workers,
                settle_steps=2,
                starts_workers=True,
            ),
            Variant("views", "The loop's process takes a view of every sample of the batch.", _views),
        ),
        remedy="""\
loader = DataLoader(
    dataset,
    batch_size,
    num_workers=8,  # raise it until next() returns at once, up to the number of cores
    persistent_workers=True,
    prefetch_factor=4,
    pin_memory=True,
)
""",
        references=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            "https://docs.pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading",
            # SynchronizedDataLoaderPattern
            "https://github.com/pytorch/pytorch/blob/v2.9.0/torch/profiler/_pattern_matcher.py",
        ),
        native_risk=False,
    )
)
