"""Rules that an expert would apply by hand, one function a pattern, without anything learnt.

Sources: the profiler's own ``torch.profiler._pattern_matcher`` (up to PyTorch 2.11), the recommendations of
the TensorBoard plugin (kineto/tb_plugin, ``run_generator.py``), the idle-time and memory-copy breakdowns of
Holistic Trace Analysis, the expert rules of Nsight Systems (synchronous copies, pageable memory,
synchronisation APIs, GPU gaps), and PyTorch's Performance Tuning Guide.

Every score is the same quantity, so that scores can be compared across patterns: the estimated share of the
step that would be saved without the site, in [0, 1]. How it is estimated is in eval/facts.py (``stall_ns``
for waiting, ``bound_ns`` for work).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torchtraceap.dataset.trace import Op
from torchtraceap.eval.detector import Detector, TraceView, builtin_card, register
from torchtraceap.eval.facts import NO_STEP, Facts, IntArray, dims, kinds
from torchtraceap.eval.findings import Attribution, Finding
from torchtraceap.eval.repeats import Repeat, tandem_repeats
from torchtraceap.eval.submission import Detection, SubmissionCard
from torchtraceap.labels.pattern import PATTERNS

SHOWN_SHARE = 0.001
"""Weaker findings are left out: a tenth of the 1 % from which a pattern counts as costly."""

REPORTED_SHARE = 0.01
"""Threshold of the card: the benchmark calls a pattern costly from 1 % of the step."""

MAX_DETECTIONS = 100
"""Of one trace, lane class and pattern; the scorer looks at no more."""

_SYNC = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|(cu|hip)(Ctx|Stream|Event)Synchronize")
_BLOCKING_COPY = re.compile(r"(cuda|hip)Memcpy|hipMemcpyWithStream")
"""Copies that return when they are done; the Async ones only do so from or to pageable memory."""

COPY_OPS = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda", "aten::cpu"})
SYNC_OPS = COPY_OPS | {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::allclose", "aten::unique", "aten::_unique2", "aten::index",
}  # fmt: skip
"""Ops that wait for the device inside, so that they are the site and not the runtime call below them."""

PAGEABLE_BYTES = 64 * 1024
"""CUDA stages smaller copies from pageable memory and returns at once (CUDA Runtime API, "API
synchronization behavior"), so only larger ones block."""

DATALOADER_SHARE = 0.05
"""From here on tb_plugin recommends more workers."""

LOOP_REPETITIONS = 4
"""Fewer look-alike neighbours are common in models (four branches, three heads are not a batch)."""

SAMPLING_OPS = frozenset({"aten::select", "aten::slice", "aten::narrow"})
SPLITTING_OPS = frozenset({"aten::unbind", "aten::split", "aten::chunk", "aten::split_with_sizes"})
JOINING_OPS = frozenset({"aten::cat", "aten::stack"})
VIEW_OPS = SAMPLING_OPS | SPLITTING_OPS | {
    "aten::view", "aten::reshape", "aten::unsqueeze", "aten::squeeze", "aten::expand", "aten::as_strided",
    "aten::t", "aten::transpose", "aten::permute", "aten::detach", "detach", "aten::alias", "aten::flatten",
    "aten::empty", "aten::empty_like",
}  # fmt: skip

REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in ("sum", "mean", "amax", "amin", "max", "min", "all", "any", "norm", "linalg_vector_norm")
)
PROBES = REDUCTIONS | {
    "aten::detach", "detach", "aten::to", "aten::isfinite", "aten::isnan", "aten::isinf", "aten::abs",
    "aten::eq", "aten::ne", "aten::lt", "aten::gt", "aten::bitwise_not", "aten::logical_not",
}  # fmt: skip
"""Ops that boil a tensor down to the value that the host reads."""
MOST_PROBES = 6

WIDTH = {"c10::Half": 2, "c10::BFloat16": 2, "float": 4, "double": 8}
"""Bytes of the floating types, by Kineto's names."""
CAST_DISTANCE = 4
"""Ops between a cast and the cast back. Further apart, the wider type is likely to be meant."""
WIDE_OPS = frozenset(
    f"aten::{name}"
    for name in (
        "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "softmax", "log_softmax",
        "norm", "linalg_vector_norm", "exp", "log", "pow", "rsqrt", "cumsum", "cumprod", "prod", "sum",
        "mean", "cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
        "binary_cross_entropy", "scaled_dot_product_attention",
    )
)  # fmt: skip
"""Ops that autocast runs in float32 ("CUDA Ops that can autocast to float32"), and attention."""

FUSED_OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Classes of torch.optim that take ``fused=True``."""
UNFUSED_OPS = 32
"""Single-tensor ops in one optimizer step: Adam needs about eight a parameter, a fused implementation a
handful in all."""
FOREACH_OPS = 4
"""Ops on lists of parameters; fused optimizers use one to count their steps."""
UNFUSED_AVOIDABLE = 0.75
"""A fused Adam reads four tensors a parameter and writes three in one pass; op by op it is about four times
as much."""
FOREACH_AVOIDABLE = 0.5


def find(facts: Facts) -> list[Finding]:
    """What all the rules find in a trace, for the patterns of the catalogue."""
    return [finding for name, rule in RULES.items() if name in PATTERNS for finding in rule(facts)]


def host_sync(facts: Facts) -> Iterator[Finding]:
    """The host waits for the device in the middle of a step.

    A synchronisation call, or a copy to the host that blocks (``.item()``, ``.cpu()``, ``bool(t)``,
    ``print``), with the reduction right before that computes what is read. Nsight Systems: "CUDA
    Synchronization APIs"; tuning guide: "Avoid unnecessary CPU-GPU synchronization". A wait below a copy to
    the device is the affair of ``pageable_h2d``.
    """
    copies = _copies_by_call(facts)
    to_device = {_climb(facts, call, COPY_OPS) for call, copy in copies.items() if "HtoD" in copy.name}
    sites: dict[int, list[int]] = {}
    for call in _calls_in_steps(facts):
        name = facts.name(call)
        if _SYNC.fullmatch(name) or _BLOCKING_COPY.fullmatch(name):
            sites.setdefault(_climb(facts, call, SYNC_OPS), []).append(call)
    for root, calls in sites.items():
        unknown = not copies and facts.name(root) in COPY_OPS  # which way it copies: GPU events are missing
        if root not in to_device and not unknown:
            wait = facts.stall_ns(int(facts.start[root]), int(facts.end[calls].max()))
            yield Finding("host_sync", (*_probes_before(facts, root), root), waited_ns=wait)


def pageable_h2d(facts: Facts) -> Iterator[Finding]:
    """A copy to the device from pageable memory: staged through a pinned buffer, and the host waits for it.

    Nsight Systems: "CUDA Async Memcpy with Pageable Memory"; tuning guide and ``SynchronizedDataLoader``
    of the pattern matcher: pin the memory. ROCm traces do not tell pageable from pinned memory; there a
    blocking copy from the host stands for it.
    """
    sites: dict[int, tuple[int, int]] = {}  # copy op: time lost, bytes
    for call, copy in _copies_by_call(facts).items():
        blocking = _BLOCKING_COPY.fullmatch(facts.name(call))
        if _in_step(facts, call) and (
            "HtoD (Pageable" in copy.name or ("HtoD (Host" in copy.name and blocking)
        ):
            root = _climb(facts, call, COPY_OPS)
            lost = facts.stall_ns(int(facts.start[call]), int(facts.end[root])) + copy.dur_ns
            sites[root] = (lost, copy.size)
    # A batch is several tensors: the labels are small, but wait and go with the images.
    for batch in _neighbours(facts, sorted(sites)):
        if sum(sites[root][1] for root in batch) >= PAGEABLE_BYTES:
            yield Finding("pageable_h2d", tuple(batch), waited_ns=sum(sites[root][0] for root in batch))


def dataloader_stall(facts: Facts) -> Iterator[Finding]:
    """The step waits for its batch: ``DataLoader.__next__`` takes more than 5 % of it (tb_plugin).

    Only the time counts in which the GPU idles because of it. Also ``SynchronizedDataLoaderPattern`` of
    the pattern matcher, and the tuning guide: "Enable asynchronous data loading and augmentation".
    """
    for event in _annotations(facts, "enumerate(DataLoader)#"):
        step = int(facts.trace.step[event])
        lost = facts.stall_ns(int(facts.start[event]), int(facts.end[event]))
        if lost >= DATALOADER_SHARE * facts.step_ns(step):
            yield Finding("dataloader_stall", (event,), waited_ns=lost)


def python_loop_over_batch(facts: Facts) -> Iterator[Finding]:
    """The same ops again and again, each time for one sample of the batch.

    ``ForLoopIndexingPattern`` of the pattern matcher looks for repeated ``aten::select``. Here a repetition
    must also compute something on one sample, and samples must be taken one by one (select, slice, or a
    split before) or joined afterwards. That tells it from a stack of equal layers.
    """
    for siblings in _sibling_ops(facts):
        done = 0
        repeats = [
            repeat
            for repeat in tandem_repeats(facts.trace.events.op[siblings], LOOP_REPETITIONS)
            if _by_sample(facts, siblings, repeat)
        ]
        for repeat in sorted(repeats, key=lambda repeat: (repeat.start, -repeat.length)):
            first, last = _with_split_and_join(facts, siblings, repeat)
            if first >= done:
                done = last
                yield Finding(
                    "python_loop_over_batch",
                    tuple(siblings[first:last].tolist()),
                    backward=True,
                    avoidable=1 - 1 / repeat.times,
                )


def dtype_ping_pong(facts: Facts) -> Iterator[Finding]:
    """A tensor is cast to another floating type and, a few ops later, back, with nothing that needs it.

    Seen by the argument types of the copies below ``aten::to``. Each cast reads and writes the whole tensor.
    Between a cast to a wider type and back, the ops that autocast itself runs in float32 count as needing it;
    between a cast to a narrower type and back, every op does: that is mixed precision.
    """
    for siblings in _sibling_ops(facts):
        open_casts: list[tuple[int, _Cast]] = []  # not yet undone, with their position
        for position, root in enumerate(siblings.tolist()):
            cast = _cast(facts, root)
            if cast is None:
                continue
            undone = [entry for entry in open_casts if entry[1] == cast.reversed]
            if not undone:
                open_casts.append((position, cast))
                continue
            open_casts.remove(undone[-1])
            first = undone[-1][0]
            between = facts.names(siblings[first + 1 : position])
            idle = VIEW_OPS.issuperset(between) if cast.widens else WIDE_OPS.isdisjoint(between)
            if idle and len(between) <= CAST_DISTANCE:
                roots = tuple(siblings[first : position + 1].tolist())
                yield Finding("dtype_ping_pong", roots, backward=True, avoidable=1.0)


def redundant_copy(facts: Facts) -> Iterator[Finding]:
    """A copy that the model asks for by itself: ``clone``, or a split that is joined again at once.

    Whether somebody writes to the copy is not in a trace, so this is the least sure of the rules. Copies that
    other ops make inside (``reshape``, ``contiguous``, accumulating gradients) are those ops' affair.
    """
    for siblings in _sibling_ops(facts):
        if facts.op_parent[siblings[0]] >= 0:
            continue
        for before, root in zip([-1, *siblings[:-1].tolist()], siblings.tolist(), strict=True):
            if facts.name(root) == "aten::clone":
                yield Finding("redundant_copy", (root,), backward=True, avoidable=1.0)
            elif before >= 0 and facts.name(root) in JOINING_OPS and facts.name(before) in SPLITTING_OPS:
                yield Finding("redundant_copy", (before, root), backward=True, avoidable=1.0)


def unfused_optimizer(facts: Facts) -> Iterator[Finding]:
    """An optimizer step as many ops, though torch.optim has a fused implementation of it.

    ``OptimizerSingleTensorPattern`` of the pattern matcher; tuning guide: "Fuse optimizer". Only ops that
    the optimizer calls itself are counted, so that an op on a list of parameters counts once.
    """
    for annotation in _annotations(facts, "Optimizer.step#"):
        inside = slice(annotation + 1, annotation + 1 + _descendants(facts, annotation))
        called = facts.cpu_op[inside] & (facts.op_parent[inside] < annotation)
        names = facts.names(np.flatnonzero(called) + inside.start)
        fused = sum(name.startswith("aten::_fused_") for name in names)
        foreach = sum(name.startswith("aten::_foreach_") for name in names)
        optimizer = facts.name(annotation).partition("#")[2].partition(".")[0]
        if fused or optimizer not in FUSED_OPTIMIZERS:
            continue
        if len(names) - foreach >= UNFUSED_OPS:
            yield Finding("unfused_optimizer", (annotation,), avoidable=UNFUSED_AVOIDABLE)
        elif foreach >= FOREACH_OPS:
            yield Finding("unfused_optimizer", (annotation,), avoidable=FOREACH_AVOIDABLE)


RULES: dict[str, Callable[[Facts], Iterator[Finding]]] = {
    "host_sync": host_sync,
    "pageable_h2d": pageable_h2d,
    "dataloader_stall": dataloader_stall,
    "python_loop_over_batch": python_loop_over_batch,
    "dtype_ping_pong": dtype_ping_pong,
    "redundant_copy": redundant_copy,
    "unfused_optimizer": unfused_optimizer,
}


@dataclass(frozen=True)
class _Copy:
    name: str
    size: int
    dur_ns: int


@dataclass(frozen=True)
class _Cast:
    source: str
    target: str
    shape: object

    @property
    def widens(self) -> bool:
        return WIDTH[self.target] > WIDTH[self.source]

    @property
    def reversed(self) -> _Cast:
        return _Cast(self.target, self.source, self.shape)


def _in_step(facts: Facts, event: int) -> bool:
    """Whether a CPU event lies in a profiled step, or the trace has none."""
    return not facts.has_steps or facts.trace.step[event] != NO_STEP


def _annotations(facts: Facts, prefix: str) -> list[int]:
    """CPU annotations in a step whose name begins so."""
    wanted = [op.category == "user_annotation" and op.name.startswith(prefix) for op in facts.trace.ops]
    if not wanted:
        return []
    rows = np.flatnonzero(np.array(wanted, dtype=bool)[facts.trace.events.op])
    return [int(row) for row in rows if _in_step(facts, int(row))]


def _descendants(facts: Facts, event: int) -> int:
    """How many events of the same thread lie inside of this one: they follow it in the order of events."""
    lane_end = int(np.searchsorted(facts.trace.events.lane, facts.trace.events.lane[event], side="right"))
    return int(np.searchsorted(facts.start[event + 1 : lane_end], facts.end[event], side="left"))


def _below_annotations(facts: Facts, prefix: str) -> NDArray[np.bool_]:
    """Whether an event lies inside of such an annotation on its thread, shape (events,)."""
    below = np.zeros(len(facts.trace), dtype=bool)
    for event in _annotations(facts, prefix):
        below[event + 1 : event + 1 + _descendants(facts, event)] = True
    return below


def _calls_in_steps(facts: Facts) -> list[int]:
    """Runtime and driver calls of a step, on threads that launch kernels."""
    calls = np.isin(facts.trace.categories, ("cuda_runtime", "cuda_driver")) & facts.launching
    return [int(call) for call in np.flatnonzero(calls) if _in_step(facts, int(call))]


def _copies_by_call(facts: Facts) -> dict[int, _Copy]:
    """Memory copies on a GPU by the runtime call that asked for them."""
    trace, events = facts.trace, facts.trace.events
    copies = np.flatnonzero((trace.categories == "gpu_memcpy") & (events.launch >= 0))
    return {
        int(events.launch[copy]): _Copy(op.name, op.bytes, int(events.dur_ns[copy]))
        for copy in copies
        for op in (trace.ops[events.op[copy]],)
    }


def _climb(facts: Facts, call: int, ops: frozenset[str]) -> int:
    """The outermost of the call's ancestors that are all in ``ops``; the call itself if its parent is not."""
    event = call
    while (parent := int(facts.trace.events.parent[event])) >= 0:
        if facts.name(parent) not in ops:
            break
        event = parent
    return event


def _sibling_ops(facts: Facts) -> list[IntArray]:
    """The model's CPU ops in order, grouped by thread, enclosing op and step.

    Without those outside of any step, and those of the loader and the optimizer: collating samples is no
    loop of the model, and an optimizer has a rule of its own.
    """
    events, step = facts.trace.events, facts.trace.step
    others = _below_annotations(facts, "enumerate(DataLoader)#") | _below_annotations(facts, "Optimizer.")
    ops = np.flatnonzero(facts.cpu_op & ~others & ((step != NO_STEP) | (not facts.has_steps)))
    if not len(ops):
        return []
    ops = ops[np.lexsort((ops, step[ops], facts.op_parent[ops], events.lane[ops]))]
    keys = np.stack([events.lane[ops], facts.op_parent[ops], step[ops]])
    edges = [0, *(np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1).tolist(), len(ops)]
    return [ops[first:last] for first, last in pairwise(edges)]  # np.split takes 6 us a group


def _siblings_before(facts: Facts, event: int, limit: int) -> list[int]:
    """Up to ``limit`` events that precede this one under the same parent, nearest first."""
    parent = facts.trace.events.parent
    found: list[int] = []
    row = event - 1
    while row >= 0 and len(found) < limit and facts.trace.events.lane[row] == facts.trace.events.lane[event]:
        while row >= 0 and parent[row] != parent[event] and row != parent[event]:
            row = int(parent[row])  # from a descendant of the sibling up to it
        if row < 0 or row == parent[event]:
            break
        found.append(row)
        row -= 1
    return found


def _probes_before(facts: Facts, root: int) -> list[int]:
    """The ops right before a read that reduce a tensor to what is read; none if none of them reduces."""
    probes: list[int] = []
    for event in _siblings_before(facts, root, MOST_PROBES):
        if facts.name(event) not in PROBES:
            break
        probes.insert(0, event)
    return probes if REDUCTIONS.intersection(facts.names(probes)) else []


def _neighbours(facts: Facts, roots: list[int]) -> list[list[int]]:
    """Group sorted roots between which nothing else runs."""
    groups: list[list[int]] = []
    for root in roots:
        near = _siblings_before(facts, root, 1)
        if groups and near and near[0] == groups[-1][-1]:
            groups[-1].append(root)
        else:
            groups.append([root])
    return groups


def _by_sample(facts: Facts, siblings: IntArray, repeat: Repeat) -> bool:
    """Whether a repeated word computes on one sample at a time."""
    trace = facts.trace
    ops = [trace.ops[i] for i in trace.events.op[siblings[repeat.start : repeat.start + repeat.period]]]
    compute = [op for op in ops if op.name not in VIEW_OPS]
    if not compute:
        return False
    first, last = _with_split_and_join(facts, siblings, repeat)
    sampled = first < repeat.start or any(
        op.name in SAMPLING_OPS and _leading(op) in (None, repeat.times) for op in ops
    )
    joined = last > repeat.start + repeat.length
    shaped = [lead for lead in map(_leading, compute) if lead is not None]
    return (sampled or joined) and (not shaped or 1 in shaped)


def _leading(op: Op) -> int | None:
    """First dimension of an op's first tensor, None if it has none or shapes were not recorded."""
    first = next(iter(dims(op.shapes)), ())
    while first and isinstance(first[0], tuple):  # a list of tensors
        first = first[0]
    return first[0] if first and isinstance(first[0], int) else None


def _with_split_and_join(facts: Facts, siblings: IntArray, repeat: Repeat) -> tuple[int, int]:
    """Bounds of a loop with the split of the batch before it and the views and the join behind it."""
    first, last = repeat.start, repeat.start + repeat.length
    if first and facts.name(siblings[first - 1]) in SPLITTING_OPS:
        first -= 1
    word = set(facts.names(siblings[first:last]))
    for position in range(last, min(len(siblings), last + repeat.times + 2 * repeat.period)):
        name = facts.name(siblings[position])
        if name in JOINING_OPS:
            return first, position + 1
        if name not in VIEW_OPS and name not in word:
            break
    return first, last


def _cast(facts: Facts, root: int) -> _Cast | None:
    """The cast between floating types that an op is, by the types of the copy in it."""
    trace = facts.trace
    if facts.name(root) not in COPY_OPS:
        return None
    for event in range(root, root + 1 + _descendants(facts, root)):
        op = trace.ops[trace.events.op[event]]
        types = kinds(op.types)
        if op.name == "aten::copy_" and len(types) >= 2 and types[0] in WIDTH and types[1] in WIDTH:
            shape = next(iter(dims(op.shapes)), ())
            return _Cast(types[1], types[0], shape) if types[0] != types[1] else None
    return None


class Rules(Detector):
    """See the module."""

    name = "rules"

    def card(self) -> SubmissionCard:
        return builtin_card(
            self.name,
            "What an expert would look for, a rule a pattern; scores are estimated shares of the step.",
            REPORTED_SHARE,
        )

    def detect(self, view: TraceView) -> list[Detection]:
        facts = Facts(view.trace)
        found: dict[tuple[str, str], list[Detection]] = {}
        for piece in Attribution(facts, find(facts)).pieces():
            if piece.share >= SHOWN_SHARE and piece.lane_class in PATTERNS[piece.pattern].lanes:
                found.setdefault((piece.pattern, piece.lane_class), []).append(
                    Detection(
                        view.trace_id,
                        piece.pattern,
                        piece.lane_class,
                        piece.start_ns,
                        piece.end_ns,
                        piece.share,
                    )
                )
        return [
            detection
            for group in found.values()
            for detection in sorted(group, key=lambda row: (-row.score, row.start_ns))[:MAX_DETECTIONS]
        ]


register(Rules())
