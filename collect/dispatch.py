"""What a clean step dispatches: operators with their tensors, and which of them made the host wait.

This is evidence from outside of any trace. A dispatch mode sees every operator that Python or autograd calls,
with its arguments, and runs it under ``torch.cuda.set_sync_debug_mode("error")``: one that wants to wait for
the device raises before it does, is noted and is run again without. (The mode "warn" reports the same calls,
but only when the outermost Python binding returns, by when several operators may have run.)

Three kinds of wait are invisible to debug mode, and are noted otherwise: calls of ``synchronize``, by
replacing it; copies from pageable memory, which the driver stages while the host waits, by the memory of
their source; and the copy inside of ``torch.tensor(data, device=...)``, which is not dispatched, by the
``lift_fresh`` on its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.labels.pattern import Stage, State

FEW = 16
"""Up to so many elements a tensor stands for a number or a handful of them, not for data."""

WAITING = frozenset(
    {
        "cpu_tensor_create",
        "dynamic_shape_sync",
        "explicit_synchronize",
        "frequent_d2h",
        "host_sync",
        "pageable_h2d",
        "scalar_h2d",
    }
)
"""Patterns whose segments hold a call that makes the host wait for the device or the driver."""

EXPLICIT = ""
"""The operator of a wait that no operator asked for."""

ONE_NAME = {"aten::_index_put_impl_": "aten::index_put", "aten::index_put_": "aten::index_put"}
"""Operators that stand for each other: under a dispatch mode autograd takes another one of them."""

COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
SYNC_ERROR = "synchronizing CUDA operation"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as an operator met it.

    ``number`` is the same whenever the same tensor is met again, also after a write in place; a view has a
    number of its own. ``device`` is a device type.
    """

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    parameter: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One dispatched operator. ``inputs`` are the tensors among its positional arguments, in order."""

    func: OpOverload
    stage: Stage
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """As a trace names it, for example ``aten::add``."""
        return self.func._schema.name


@dataclass(frozen=True, slots=True)
class Wait:
    """A dispatched operator that made the host wait, and the pattern that this makes.

    ``operator`` is its name by :func:`one_name`, or ``EXPLICIT``.
    """

    operator: str
    pattern: str


@dataclass
class Recording:
    """What one step dispatched, in order.

    Attributes:
        calls: The operators.
        waits: Those of them, and the calls of ``synchronize``, that made the host wait.
        batch: Numbers of the batch's tensors.
        recomputes: Whether the backward pass ran operators whose gradient is needed, as a checkpoint does.
        empties_cache: Whether the allocator's cache was emptied.
    """

    calls: list[Call] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    batch: set[int] = field(default_factory=set)
    recomputes: bool = False
    empties_cache: bool = False


def record(
    loop: TrainingLoop,
    *,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    backward: bool = True,
) -> Recording:
    """One step up to its loss or its gradients, run eagerly and on the model itself.

    The model, its buffers, its gradients (None) and the random state are afterwards as they were. Nothing may
    be armed; what is installed runs as it does in a clean step.

    Args:
        loop: Its compiled or distributed wrapper, if there is one, is left out: what that adds is known.
        change: Applied to every tensor of the batch on the device.
        backward: Whether to run the backward pass.
    """
    state = State()
    mode = Recorder(loop.device)
    network, loop.network = loop.network, loop.model
    try:
        with loop.state_kept(), _watched(mode.recording):
            loop.stages["data"](state)
            with mode.at("h2d"):
                loop.stages["h2d"](state)
            if change is not None:
                state.batch = tree_map(
                    lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, state.batch
                )
            mode.recording.batch.update(mode.number(leaf) for leaf in _tensors(state.batch))
            stages: tuple[Stage, ...] = ("forward", "loss", "backward") if backward else ("forward", "loss")
            for stage in stages:
                with mode.at(stage):
                    loop.stages[stage](state)
    finally:
        loop.network = network
        for parameter in loop.model.parameters():
            parameter.grad = None
    return mode.recording


class Recorder(TorchDispatchMode):
    """Notes every operator that is dispatched under :meth:`at`; holds no tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.recording = Recording()
        self.stage: Stage = "forward"
        self._numbers = WeakIdKeyDictionary()
        self._next = 0

    @contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """Note what the block dispatches, here or on a thread of autograd, as work of ``stage``."""
        self.stage = stage
        with self:
            yield

    def number(self, tensor: torch.Tensor) -> int:
        """See :class:`Value`."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._next
            self._next += 1
        number: int = self._numbers[tensor]
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operators (to, contiguous, reshape) arrive whole
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        inputs = list(_tensors(args))
        before = tuple(map(self._value, inputs))
        out, waited = run_noting_wait(func, args, kwargs, self.device)
        call = Call(func, self.stage, before, tuple(map(self._value, _tensors(out))))
        self.recording.calls.append(call)
        # Autograd's own operators run without a gradient, but for the one that makes the first.
        if self.stage == "backward" and torch.is_grad_enabled() and call.name != "aten::ones_like":
            self.recording.recomputes = True
        if waited or _copies_from_pageable(call, inputs):
            self.recording.waits.append(Wait(one_name(call.name), waiting_pattern(call)))
        elif call.name == "aten::lift_fresh" and call.outputs[0].device != "cpu":
            self.recording.waits.append(Wait("aten::_to_copy", waiting_pattern(call)))
        return out

    def _value(self, tensor: torch.Tensor) -> Value:
        return Value(
            number=self.number(tensor),
            shape=tuple(tensor.shape),
            strides=tensor.stride() if tensor.layout == torch.strided else (),
            dtype=tensor.dtype,
            device=tensor.device.type,
            parameter=isinstance(tensor, torch.nn.Parameter),
        )


def one_name(operator: str) -> str:
    """The name under which an operator of a trace and the same one seen by a dispatch mode meet."""
    return ONE_NAME.get(operator, operator)


def run_noting_wait(func: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, bool]:
    """``func(*args, **kwargs)``, and whether it made the host wait, as far as CUDA's debug mode knows."""
    if device.type != "cuda":
        return func(*args, **kwargs), False
    torch.cuda.set_sync_debug_mode("error")
    try:
        return func(*args, **kwargs), False
    except RuntimeError as error:
        if SYNC_ERROR not in str(error):
            raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return func(*args, **kwargs), True


def waiting_pattern(call: Call) -> str:
    """Which pattern an operator is that made the host wait.

    A number for the host is host_sync, and so is a copy of a few elements to it; a larger copy is
    frequent_d2h. A copy to the device is pageable_h2d of the batch, scalar_h2d of a few elements and
    cpu_tensor_create of more, whether it was asked for or is made of an argument that lies on the host.
    What is left waited to know the size of its result.
    """
    if not call.outputs:
        return "host_sync"
    out = call.outputs[0]
    if call.name == "aten::lift_fresh":
        return _to_device(call.stage, out)
    if call.name in COPIES:
        source = call.inputs[-1]  # copy_ has its destination before it
        if source.device == "cpu":
            return _to_device(call.stage, source)
        return "host_sync" if source.numel <= FEW else "frequent_d2h"
    on_host = [value for value in call.inputs if value.device == "cpu" and value.shape]
    if on_host and out.device != "cpu":
        return _to_device(call.stage, on_host[0])
    return "dynamic_shape_sync"


def _to_device(stage: Stage, source: Value) -> str:
    if stage == "h2d":
        return "pageable_h2d"
    return "scalar_h2d" if source.numel <= FEW else "cpu_tensor_create"


def _copies_from_pageable(call: Call, inputs: list[torch.Tensor]) -> bool:
    if call.name not in COPIES or inputs[-1].device.type != "cpu":
        return False
    return call.outputs[0].device not in ("cpu", "meta") and not inputs[-1].is_pinned()


@contextmanager
def _watched(recording: Recording) -> Iterator[None]:
    """Note calls of the device that dispatch nothing."""

    def waits() -> None:
        recording.waits.append(Wait(EXPLICIT, "explicit_synchronize"))

    def empties() -> None:
        recording.empties_cache = True

    def watch(note: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs)

        return watched

    owners: list[tuple[Any, str, Callable[[], None]]] = [
        (torch.cuda, "synchronize", waits),
        (torch.cuda.Stream, "synchronize", waits),
        (torch.cuda.Event, "synchronize", waits),
        (torch.accelerator, "synchronize", waits),
        (torch.cuda, "empty_cache", empties),
        (torch.accelerator, "empty_cache", empties),
    ]
    originals = [getattr(owner, name) for owner, name, _ in owners]
    for (owner, name, note), original in zip(owners, originals, strict=True):
        setattr(owner, name, watch(note, original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(owners, originals, strict=True):
            setattr(owner, name, original)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))
