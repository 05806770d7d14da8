"""Gradients are reduced in many buckets that are far too small."""

from __future__ import annotations

from torchtraceap.labels.pattern import Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._ddp import is_reduction, network_sites


def _small_cap(loop: Loop) -> list[Site]:
    return network_sites(loop, bucket_cap_mb=0.25)


def _per_parameter(loop: Loop) -> list[Site]:
    return network_sites(loop, bucket_cap_mb=1e-6)


def _smaller_cap(loop: Loop) -> list[Site]:
    return network_sites(loop, bucket_cap_mb=15)


register(
    Pattern(
        id="tiny_buckets",
        title="Tiny gradient buckets",
        definition=(
            "DistributedDataParallel reduces its gradients in buckets of a few hundred kilobytes or less, "
            "one for each parameter in the extreme. Each all-reduce has a start-up time that does not depend "
            "on its size, so that many small ones take longer than a few large ones of the same bytes."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="meanwhile",
        selects=is_reduction,
        belongs="The reducer's all-reduces in the backward pass, their runtime calls and kernels.",
        runtime="distributed",
        modes=frozenset({"train"}),
        variants=(
            Variant("small_cap", "bucket_cap_mb=0.25.", _small_cap, together=True),
            Variant(
                "per_parameter",
                "bucket_cap_mb so small that each parameter has its bucket.",
                _per_parameter,
                heldout=True,
                together=True,
            ),
        ),
        lookalikes=(
            Variant(
                "smaller_cap",
                "bucket_cap_mb=15 where 25 is the default: some more buckets, all of them large.",
                _smaller_cap,
                together=True,
            ),
        ),
        remedy="""\
model = torch.nn.parallel.DistributedDataParallel(model)  # bucket_cap_mb=25
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
            "https://docs.pytorch.org/docs/stable/notes/ddp.html",
            "https://arxiv.org/abs/2006.15704",
        ),
        native_risk=False,
    )
)
