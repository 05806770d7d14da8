"""The zoo: declarations of all models, counts of a sample, steps of the demo tier and of each adapter."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torchtraceap.collect.model import ZOO, ModelSpec, collate, describe, split_batch
from torchtraceap.collect.zoo._batches import LARGEST, QUICK_GFLOP, ROOM_MB, SLOW_GFLOP, by_cost
from torchtraceap.collect.zoo._diffusers import Reconstruction
from torchtraceap.collect.zoo._measure import count
from torchtraceap.dataset.schema import MODES, TASKS
from torchtraceap.dataset.splits import meant_for_test
from torchtraceap.errors import UserError

SMALL = [spec for spec in ZOO if spec.small]
QUICK_PARAMS_M = 5.0
SAMPLE = 40
LICENCES = {"Apache-2.0", "BSD-3-Clause", "MIT"}


def _sampled(specs: list[ModelSpec], size: int) -> list:
    """All of ``specs`` as parameters, all but a random sample marked as slow.

    The sample is of models that can be built in memory within a second or two, if it comes to that.
    """
    quick = [spec for spec in specs if spec.params_m < 200]
    chosen = {spec.name for spec in random.Random(0).sample(quick, size)}
    return [
        pytest.param(spec, id=spec.name, marks=() if spec.name in chosen else pytest.mark.slow)
        for spec in specs
    ]


def _of_their_kind() -> list:
    """Names of models whose inputs or outputs no small model has, those that take a CPU seconds as slow.

    The smallest of each adapter, of those that train on a CPU if any does; and detectors with more outputs.
    """
    seen = {type(spec.adapter) for spec in SMALL}
    names = ["torchvision/keypointrcnn_resnet50_fpn", "torchvision/maskrcnn_resnet50_fpn"]
    on_cpu = [spec for spec in ZOO if spec.batch_sizes["cpu"]["infer"]]
    for spec in sorted(on_cpu, key=lambda spec: (not spec.batch_sizes["cpu"]["train"], spec.params_m)):
        if type(spec.adapter) not in seen:
            seen.add(type(spec.adapter))
            names.append(spec.name)
    return [
        pytest.param(name, marks=() if ZOO[name].params_m < QUICK_PARAMS_M else pytest.mark.slow)
        for name in names
    ]


def _finite(tree: object) -> bool:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _batch(spec: ModelSpec, batch_size: int = 2) -> dict[str, torch.Tensor]:
    return spec.make_batch(batch_size, spec.size("cpu"), torch.Generator().manual_seed(0))


def _build_on_meta(spec: ModelSpec) -> torch.nn.Module:
    try:
        with torch.device("meta"):  # shapes without memory: the largest model would take 3.4 GB
            return spec.build()
    except NotImplementedError:  # torch 2.11 has no meta kernel for what a RegNet does when it is built
        return spec.build()


def test_listing_the_zoo_imports_no_library() -> None:
    program = (
        "import sys; from torchtraceap.collect.model import ZOO, describe; "
        "assert [describe(spec) for spec in ZOO]; "
        "heavy = {'torch', 'timm', 'torchvision', 'diffusers', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_demo_tier_covers_the_tasks() -> None:
    assert len(SMALL) >= 9
    tasks = {spec.task for spec in SMALL}
    assert tasks == {"classification", "detection", "segmentation", "generation", "depth", "pose"}
    assert {spec.source for spec in SMALL} == {"timm", "torchvision", "smp", "diffusers", "transformers"}


def test_declarations() -> None:
    wrong = {spec.name: faults for spec in ZOO if (faults := _faults(spec))}
    assert wrong == {}


def _faults(spec: ModelSpec) -> list[str]:
    """What a row must hold to, and does not."""
    sizes = spec.batch_sizes
    pairs = list(zip(spec.cpu_size, spec.gpu_size, strict=False))
    demands = {
        "sizes have equally many dimensions": len(spec.cpu_size) == len(spec.gpu_size),
        "a CPU's size is no larger than a GPU's": all(0 < small <= full for small, full in pairs),
        "batch sizes are of a GPU and a CPU": set(sizes) == {"gpu", "cpu"},
        "batch sizes are of both modes": all(set(by_mode) == set(MODES) for by_mode in sizes.values()),
        # BatchNorm behind a global pooling
        "batches of training hold two samples": all(n >= 2 for kind in sizes.values() for n in kind["train"]),
        "batches hold a sample": all(n >= 1 for kind in sizes.values() for n in kind["infer"]),
        "batches of a CPU are small": all(n <= 4 for mode in MODES for n in sizes["cpu"][mode]),
        "it runs on a GPU": any(sizes["gpu"].values()),
        "the licence is a permissive one": spec.licence in LICENCES,
        "families are words": all(
            name.replace("_", "").isalnum() for name in (spec.family, spec.backbone_family)
        ),
        "parameters are counted": spec.params_m > 0,
        "its description has its size": describe(spec)["gpu_size"] == list(spec.size("cuda")),
    }
    return [demand for demand, met in demands.items() if not met]


def test_the_zoo_is_as_large_as_promised() -> None:
    tasks = Counter(spec.task for spec in ZOO)
    promised = {"classification": 450, "detection": 40, "segmentation": 90, "generation": 60}
    assert {task: tasks[task] for task in promised if tasks[task] < promised[task]} == {}
    assert tasks["depth"] + tasks["pose"] + tasks["other"] >= 20
    assert tasks.total() >= 700


def test_equal_backbones_have_one_family() -> None:
    names = ["timm/resnet50", "torchvision/fcn_resnet50", "smp/unet-resnet34", "transformers/detr-resnet-50"]
    assert {ZOO[name].backbone_family for name in names} == {"resnet"}


@pytest.mark.parametrize(
    "spec", {repr(spec.adapter): spec for spec in ZOO}.values(), ids=lambda spec: spec.name
)
def test_batches_split_and_collate(spec: ModelSpec) -> None:
    batch = _batch(spec, 3)
    samples = split_batch(batch)
    again = collate(samples)
    assert len(samples) == 3
    assert list(again) == list(batch)
    for name, tensor in batch.items():
        assert tensor.device.type == "cpu"
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)


def test_masks_and_keypoints_lie_in_their_boxes() -> None:
    batch = _batch(ZOO["torchvision/maskrcnn_resnet50_fpn"])
    for box, mask in zip(batch["boxes"].flatten(0, 1), batch["masks"].flatten(0, 1), strict=True):
        rows, columns = mask.nonzero().unbind(1)
        left, top, right, bottom = box.tolist()
        assert left <= columns.min() and columns.max() <= right  # noqa: PT018
        assert top <= rows.min() and rows.max() <= bottom  # noqa: PT018
        assert mask.sum() == pytest.approx(torch.pi / 4 * (right - left) * (bottom - top), rel=0.15)
    batch = _batch(ZOO["torchvision/keypointrcnn_resnet50_fpn"])
    low, high = batch["boxes"][:, :, None].split(2, dim=-1)
    points = batch["keypoints"][..., :2]
    assert ((low <= points) & (points <= high)).all()


@pytest.mark.parametrize("spec", _sampled(list(ZOO), SAMPLE))
def test_parameters_are_counted(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    # A forward pass of noise, which the meta device cannot answer; it changes biases, and their number not.
    monkeypatch.setattr("torchtraceap.collect.zoo.torchvision.prepare", lambda *args: None)
    model = _build_on_meta(spec)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(spec.params_m, rel=0.01)


COUNTED = [spec for spec in ZOO if spec.source in ("timm", "smp")]


@pytest.mark.parametrize("spec", _sampled(COUNTED, 6))
def test_batch_sizes_fit_what_the_model_costs(spec: ModelSpec) -> None:
    counted = count(spec)
    expected = by_cost(counted.activations_mb, counted.cpu_gflop)["gpu"]["train"][-1]
    assert expected / 2 <= spec.batch_sizes["gpu"]["train"][-1] <= expected * 2


def test_batch_sizes_by_cost() -> None:
    for activations in (0.1, 20.0, 128.0, 1000.0, 8000.0):
        small, large = by_cost(activations, 1.0)["gpu"]["train"]
        assert large == LARGEST or 2 * large * activations > ROOM_MB
        assert large == 4 or large * activations <= ROOM_MB
        assert small == max(2, large // 8)
    assert by_cost(1.0, QUICK_GFLOP)["cpu"] == {"train": (2, 4), "infer": (1, 4)}
    assert by_cost(1.0, SLOW_GFLOP)["cpu"] == {"train": (2,), "infer": (1, 2)}
    assert by_cost(1.0, SLOW_GFLOP + 1)["cpu"] == {"train": (), "infer": (1,)}


@pytest.mark.parametrize("name", [*(spec.name for spec in SMALL), *_of_their_kind()])
def test_model_steps(name: str) -> None:
    spec = ZOO[name]
    trains = bool(spec.batch_sizes["cpu"]["train"])
    torch.manual_seed(0)
    model = spec.build()
    batch = _batch(spec, 2 if trains else 1)
    model.eval()
    with torch.inference_mode():
        output = spec.forward(model, batch, training=False)
    assert _finite(output)
    if spec.source == "torchvision" and "boxes" in batch:
        assert all(len(image["boxes"]) <= 100 for image in output)
        assert any(len(image["boxes"]) > 0 for image in output)
    if not trains:
        return
    model.train()
    loss = spec.loss(spec.forward(model, batch, training=True), batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert _finite(gradients)
    assert any(bool(gradient.any()) for gradient in gradients)


AUTOENCODERS = [spec for spec in ZOO if isinstance(spec.adapter, Reconstruction)]
AUTOENCODERS.remove(ZOO["diffusers/autoencoder-svd"])  # some parameters stay on the CPU, wherever it is built


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("spec", AUTOENCODERS, ids=lambda spec: spec.name)
def test_what_is_reconstructed_has_the_size_of_what_was_given(spec: ModelSpec, kind: str) -> None:
    batch = spec.make_batch(2, spec.size(kind), torch.Generator())
    model = _build_on_meta(spec)
    device = next(model.parameters()).device
    output = spec.forward(model, {name: tensor.to(device) for name, tensor in batch.items()}, training=True)
    assert output["reconstruction"].shape == output["pixels"].shape


def test_frozen_batch_norms_fit_the_weights() -> None:
    torch.manual_seed(0)
    spec = ZOO["transformers/table-transformer"]
    model = spec.build().eval()
    deviations = []
    for module in model.modules():
        if type(module).__name__ == "TableTransformerFrozenBatchNorm2d":
            module.register_forward_hook(lambda _, inputs, output: deviations.append(output.std().item()))
    with torch.inference_mode():
        spec.forward(model, _batch(spec), training=False)
    assert len(deviations) == 20
    assert all(0.5 < deviation < 2 for deviation in deviations)


def test_unknown_model_names_a_close_one() -> None:
    with pytest.raises(UserError, match="Did you mean timm/resnet18"):
        ZOO["timm/resnet-18"]


def test_a_wrong_task_is_refused() -> None:
    fields = {name: getattr(SMALL[0], name) for name in ModelSpec.__dataclass_fields__}
    with pytest.raises(ValueError, match="task 'cooking'"):
        ModelSpec(**{**fields, "task": "cooking"})


def test_the_families_meant_for_test_suit_the_zoo():
    models = {task: [spec for spec in ZOO if spec.task == task] for task in TASKS}
    for task, specs in models.items():
        share = sum(meant_for_test(spec.backbone_family) for spec in specs) / len(specs)
        if len({spec.backbone_family for spec in specs}) > 2:
            assert 0.15 < share < 0.45, f"{task}: {share:.0%}"
    assert not meant_for_test("resnet")
    assert not meant_for_test("vit")
