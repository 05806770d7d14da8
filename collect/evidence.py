"""Which patterns a clean workload is known not to hold by itself, from evidence outside of its labels.

Only where every instance is known can a further prediction be called a false alarm. What is found here is
conservative: without proof a pattern is left out, and predictions of it are then not counted.

* Loop-level patterns (``Pattern.native_risk`` is False): the loop is ours. So are compilation and ranks, and
  without them there is no pattern of them.
* Waiting patterns: all natives of the trace are labelled and agree with the survey (collect/native.py).
* Model-level patterns: what a clean step dispatches holds nothing like them (collect/absence.py).
* Without a GPU, everything that needs one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtraceap.collect.absence import absent
from torchtraceap.collect.dispatch import WAITING, Wait, record
from torchtraceap.collect.loop import DISTINCT_BATCHES, TrainingLoop
from torchtraceap.collect.native import RUNTIME_CATEGORIES, Natives, natives
from torchtraceap.dataset.trace import Trace
from torchtraceap.labels.pattern import PATTERNS

ALLOCATIONS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap", "cuMemUnmap")
"""Beginnings of the names of runtime calls that take memory from the driver or give it back."""


@dataclass(frozen=True)
class Survey:
    """What clean steps showed.

    Attributes:
        absent: Patterns that they do not hold.
        waits: For each surveyed step the operators that made the host wait, in order.
    """

    absent: frozenset[str]
    waits: list[list[Wait]]


def survey(loop: TrainingLoop) -> Survey:
    """Run some steps of a loop in which nothing is armed, and leave it as it was.

    What is installed has a part in clean steps too (``otherwise`` of a site), so it is best there already.

    A host that never waits cannot know what the data are, so each step dispatches the same, and one is
    enough. With waits, as many steps as there are distinct batches.
    """
    first = record(loop)
    doubled = record(loop, change=lambda leaf: torch.cat([leaf, leaf]), backward=False)
    steps = [first.waits]
    if first.waits:
        steps += [record(loop).waits for _ in range(DISTINCT_BATCHES - 1)]
    elsewhere = {pattern.id for pattern in PATTERNS if pattern.runtime not in ("eager", loop.runtime)}
    return Survey(absent(first, doubled, loop.device.type) | elsewhere, steps)


def exhaustive(
    absent: set[str] | frozenset[str], trace: Trace, has_gpu: bool, found: Natives | None = None
) -> list[str]:
    """Ids of the patterns all of whose instances are known in a trace, sorted.

    Args:
        absent: :attr:`Survey.absent`.
        trace: The workload's clean trace, whichever of its traces is asked about: an injection need not
            speak for itself.
        has_gpu: Whether it ran on a GPU: without one nothing can wait for it.
        found: Natives of the trace that is asked about. Without them a waiting pattern is known only if
            nothing in ``trace`` waits.
    """
    known = {pattern.id for pattern in PATTERNS if not pattern.native_risk} | absent
    if has_gpu:
        found = found or natives([], trace, [])
        known |= WAITING - found.unknown
        known -= _in_doubt(trace, found)
    else:
        known |= WAITING | {pattern.id for pattern in PATTERNS if pattern.needs_gpu}
    return sorted(known & set(PATTERNS.names()))


def _in_doubt(trace: Trace, found: Natives) -> set[str]:
    """Patterns that the trace itself speaks for, or on which it is silent."""
    doubt = set()
    to_device = [op.name for op in trace.ops if op.category == "gpu_memcpy" and "HtoD" in op.name]
    if not (to_device and all("Pinned" in name or "Pageable" in name for name in to_device)):
        doubt.add("pageable_h2d")  # nothing tells from what memory copies came
    if any(instance.pattern == "cpu_tensor_create" for instance in found.instances):
        doubt.add("cpu_tensor_create")  # the copies are labelled, but not what made their sources
    kernels = [op.name for op in trace.ops if op.category == "kernel"]
    if any("nchwToNhwc" in name for name in kernels) and any("nhwcToNchw" in name for name in kernels):
        doubt.add("layout_ping_pong")  # cuDNN converts around a convolution, below what is dispatched
    if any(op.category in RUNTIME_CATEGORIES and op.name.startswith(ALLOCATIONS) for op in trace.ops):
        doubt.add("cache_flush")  # memory comes and goes for some other reason
    return doubt
