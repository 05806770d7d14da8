"""The zoo: declarations of every model, and a training and an inference step of the demo tier."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torchtraceap.collect.model import ZOO, ModelSpec, collate, describe, split_batch
from torchtraceap.dataset.schema import MODES
from torchtraceap.errors import UserError

SMALL = [spec for spec in ZOO if spec.small]


def _finite(tree: object) -> bool:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _batch(spec: ModelSpec, batch_size: int = 2) -> dict[str, torch.Tensor]:
    return spec.make_batch(batch_size, spec.size("cpu"), torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("spec", list(ZOO), ids=lambda spec: spec.name)
def test_declaration(spec: ModelSpec) -> None:
    assert len(spec.cpu_size) == len(spec.gpu_size)
    assert all(0 < small <= full for small, full in zip(spec.cpu_size, spec.gpu_size, strict=True))
    assert set(spec.batch_sizes) == {"gpu", "cpu"}
    for by_mode in spec.batch_sizes.values():
        assert set(by_mode) == set(MODES)
        assert all(size >= 2 for size in by_mode["train"])  # BatchNorm behind a global pooling
        assert all(size >= 1 for size in by_mode["infer"])
    assert max(size for by_mode in [spec.batch_sizes["cpu"]] for size in sum(by_mode.values(), ())) <= 4
    assert spec.licence in {"Apache-2.0", "BSD-3-Clause", "MIT"}
    assert describe(spec)["gpu_size"] == list(spec.size("cuda"))


@pytest.mark.parametrize("spec", list(ZOO), ids=lambda spec: spec.name)
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


@pytest.mark.parametrize("spec", list(ZOO), ids=lambda spec: spec.name)
def test_parameters_are_counted(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    # A forward pass of noise, which the meta device cannot answer; it changes biases, and their number not.
    monkeypatch.setattr("torchtraceap.collect.zoo.torchvision.prepare", lambda *args: None)
    try:
        with torch.device("meta"):  # shapes without memory: the largest model would take 3.4 GB
            model = spec.build()
    except NotImplementedError:  # torch 2.11 has no meta kernel for what a RegNet does when it is built
        model = spec.build()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(spec.params_m, rel=0.01)


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_small_model_steps(spec: ModelSpec) -> None:
    torch.manual_seed(0)
    model = spec.build()
    batch = _batch(spec)
    model.eval()
    with torch.inference_mode():
        output = spec.forward(model, batch, training=False)
    assert _finite(output)
    if spec.source == "torchvision" and spec.task == "detection":
        assert all(len(image["boxes"]) <= 100 for image in output)
        assert any(len(image["boxes"]) > 0 for image in output)
    model.train()
    loss = spec.loss(spec.forward(model, batch, training=True), batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert _finite(gradients)
    assert any(bool(gradient.any()) for gradient in gradients)


def test_unknown_model_names_a_close_one() -> None:
    with pytest.raises(UserError, match="Did you mean timm/resnet18"):
        ZOO["timm/resnet-18"]


def test_a_wrong_task_is_refused() -> None:
    fields = {name: getattr(SMALL[0], name) for name in ModelSpec.__dataclass_fields__}
    with pytest.raises(ValueError, match="task 'cooking'"):
        ModelSpec(**{**fields, "task": "cooking"})
