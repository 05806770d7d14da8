"""The reference loop in named stages. It is the good loop; an injector changes stages or modules of it.

A :class:`Placement` is one pattern put into one loop. What runs at its candidate places is decided anew for
each step, so that clean and injected steps are steps of the same process.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from torchtraceap.collect import loader
from torchtraceap.collect.distributed import World
from torchtraceap.collect.model import ModelSpec
from torchtraceap.labels.markers import Marker, marker_name
from torchtraceap.labels.pattern import (
    STAGES,
    Body,
    FunctionCall,
    FunctionSite,
    Mode,
    ModuleCall,
    ModuleSite,
    Runtime,
    Site,
    Stage,
    StageSite,
    State,
)

StageRun = Callable[[State], None]
Arrangement = tuple[dict[Stage, StageRun], dict[nn.Module, Callable[..., Any]]]
"""What the stages and the modules' forwards are that an injector may change; others are bare."""

DISTINCT_BATCHES = 4
LEARNING_RATE = 1e-4


@dataclass(eq=False)
class Placement:
    """A variant's candidate places in a loop, and which of them act when.

    Attributes:
        index: Number of this placement in its session.
        sites: All candidates.
        acting: Indices of the candidates whose body acts when armed.
        steps: Profiled steps in which it acts; None for every step.
        armed: Whether the current arm of the experiment has it.
    """

    index: int
    sites: list[Site]
    acting: frozenset[int]
    steps: frozenset[int] | None = None
    armed: bool = False

    def active(self, step: int | None) -> frozenset[int]:
        """The candidates whose body acts; ``step`` is None outside of the profiled steps."""
        acts = self.armed and (step is None or self.steps is None or step in self.steps)
        return self.acting if acts else frozenset()

    def on(self, site: int, step: int | None) -> bool:
        """Whether the body at ``site`` acts."""
        return site in self.active(step)


class TrainingLoop:
    """One model in the loop that a careful user would write for it.

    The batch comes from workers through pinned memory and a non-blocking copy, the precision is bfloat16
    autocast on an accelerator and float32 on a CPU, the optimizer is fused, gradients are set to None, the
    loss is accumulated on the device. For inference the forward stage runs in ``inference_mode`` and the
    stages behind it do nothing.

    Args:
        spec: The model.
        mode: "train" or "infer".
        batch_size: Samples a batch.
        device: Where it runs.
        secret: This session's part of marker names.
        seed: For weights and data.
        rank: Which of several processes that train together this is; each has batches of its own.
        take_device: Called once the model is built, before the device is first used.

    Raises:
        Whatever the model raises when it is built.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mode: Mode,
        batch_size: int,
        device: torch.device,
        *,
        secret: str,
        seed: int,
        rank: int = 0,
        take_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.mode: Mode = mode
        self.batch_size = batch_size
        self.device = device
        self.marking = False
        self.profiled_step: int | None = None
        self.runtime: Runtime = "eager"
        self.world = World()
        self._secret = secret
        self._marker_names: dict[tuple[int, int, bool], str] = {}
        self.closing = ExitStack()
        self._iterators: list[Any] = []
        self.placements: list[Placement] = []
        self._bare_stages: dict[Stage, StageRun] = {}
        self._bare_forwards: dict[nn.Module, tuple[Callable[..., Any], bool]] = {}  # and whether its own
        self._arranged: tuple[Any, ...] | None = None
        self._arrangements: dict[tuple[Any, ...], Arrangement] = {}
        self._calls: list[ModuleCall] | None = None

        generator = torch.Generator().manual_seed(seed + rank)
        size = spec.size(device.type)
        self._batches = [
            loader.shared(spec.make_batch(batch_size, size, generator)) for _ in range(DISTINCT_BATCHES)
        ]
        # Workers start before the model computes: a process that has computed must not be forked.
        self._batch_iterator = self.make_loader()

        torch.manual_seed(seed)
        self.model: nn.Module = spec.build()
        take_device()
        self.model.train(mode == "train").to(device)
        self.network: nn.Module = self.model
        self.autocast = device.type != "cpu"
        self.optimizer: torch.optim.Optimizer | None = None
        if mode == "train":
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        self.precision = "bf16-autocast" if self.autocast else "fp32"
        self._loss_sum = torch.zeros((), device=device)
        self.stages: dict[Stage, Callable[[State], None]] = {
            "data": self._data,
            "h2d": self._h2d,
            "forward": self._forward,
            "loss": self._loss,
            "backward": self._backward,
            "optimizer": self._optimize,
            "zero_grad": self._zero_grad,
            "logging": self._log,
        }

    def step(self) -> State:
        """Run all stages once and return what they produced."""
        self._arrange()
        state = State()
        for stage in STAGES:
            self.stages[stage](state)
        return state

    def rewind(self) -> None:
        """Let the next step have the first of the batches again, from whichever loader."""
        for iterator in self._iterators:
            loader.rewind(iterator, DISTINCT_BATCHES)

    def close(self) -> None:
        """Stop the loaders' workers, and undo what was done for as long as the loop lives (``closing``)."""
        for iterator in self._iterators:
            loader.close(iterator)
        self.closing.close()

    # -- stages ---------------------------------------------------------------------------------------

    def _data(self, state: State) -> None:
        state.host = next(self._batch_iterator)

    def _h2d(self, state: State) -> None:
        state.batch = tree_map(self._to_device, state.host)

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def _forward(self, state: State) -> None:
        with self._grad_mode(), self._autocast():
            state.output = self.spec.forward(self.network, state.batch, self.mode == "train")

    def _loss(self, state: State) -> None:
        if self.mode == "train":
            with self._autocast():
                state.loss = self.spec.loss(state.output, state.batch)

    def _backward(self, state: State) -> None:
        if self.mode == "train":
            state.loss.backward()

    def _optimize(self, state: State) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _zero_grad(self, state: State) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def _log(self, state: State) -> None:
        if self.mode == "train":
            self._loss_sum += state.loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()

    def _grad_mode(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mode == "train" else torch.inference_mode()

    # -- what an injector uses (labels.pattern.Loop) --------------------------------------------------

    def make_loader(self, **changes: Any) -> Any:
        on_gpu = self.device.type != "cpu"
        settings = {"workers": 2 if on_gpu else 1, "pin": self.device.type == "cuda"}
        iterator = loader.endless(self._batches, **settings | changes)
        self._iterators.append(iterator)
        return iterator

    def make_optimizer(self, **changes: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("an inference loop has no optimizer")
        kind = type(self.optimizer)
        # `defaults` also holds what a base class decided; only what the constructor takes can be passed on.
        takes = inspect.signature(kind).parameters
        settings = {key: value for key, value in self.optimizer.defaults.items() if key in takes}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return kind(parameters, **settings | changes)

    def make_network(self, **changes: Any) -> DistributedDataParallel:
        if self.runtime != "distributed":
            raise ValueError("a loop of one process has no use for DistributedDataParallel")
        # Its defaults, which most users have: buffers are those of rank 0 in each forward pass, the graph may
        # change, and gradients are no views of buckets, so that another reducer may have them in a next step.
        # No device_ids: the batch is on the device already, and would be looked through in vain.
        return DistributedDataParallel(self.model, **changes)

    def module_calls(self) -> list[ModuleCall]:
        if self._calls is None:
            self._calls = self._probe()
        return self._calls

    def function_calls(self, function: str) -> list[FunctionCall]:
        """See :meth:`labels.pattern.Loop.function_calls`; a dry run for each question."""
        names = {module: name for name, module in self.model.named_modules()}
        stack: list[nn.Module] = []
        entered: Counter[nn.Module] = Counter()
        found: list[FunctionCall] = []
        made: Counter[nn.Module] = Counter()

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            stack.append(module)
            entered[module] += 1

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            stack.pop()

        def watch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if stack:
                module = stack[-1]
                tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
                found.append(
                    FunctionCall(
                        function=function,
                        name=names[module],
                        module=module,
                        index=made[module],
                        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                        dtypes=tuple(tensor.dtype for tensor in tensors),
                        has=frozenset(key for key, value in kwargs.items() if _is_given(value)),
                        positions=frozenset(i for i, value in enumerate(args) if _is_given(value)),
                    )
                )
                made[module] += 1
            return original(*args, **kwargs)

        handles = [module.register_forward_pre_hook(enter) for module in names]
        handles += [module.register_forward_hook(leave) for module in names]
        try:
            with _replaced_function(function, watch):
                self._dry_run()
        finally:
            for handle in handles:
                handle.remove()
        return [call for call in found if entered[call.module] == 1]

    def _dry_run(self) -> None:
        """The first three stages once, without a gradient and without a trace in buffers or random state."""
        with self.plain(), self.state_kept(), torch.no_grad():
            state = State()
            for stage in STAGES[:3]:
                self.stages[stage](state)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the forward stage call the model itself, where hooks and modes see what compiling hides."""
        network, self.network = self.network, self.model
        try:
            yield
        finally:
            self.network = network

    def _probe(self) -> list[ModuleCall]:
        """Run one forward pass with hooks on every module, and put buffers and random state back."""
        names = {module: name for name, module in self.model.named_modules()}
        before: dict[nn.Module, Any] = {}
        calls: dict[nn.Module, ModuleCall | None] = {}

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            before[module] = self._random_state(), _buffer_versions(module)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            stateful = before[module] != (self._random_state(), _buffer_versions(module))
            twice = module in calls
            calls[module] = (
                None if twice else _module_call(names[module], module, args, kwargs, output, stateful)
            )

        handles = [m.register_forward_pre_hook(enter) for m in names if m is not self.model]
        handles += [m.register_forward_hook(leave, with_kwargs=True) for m in names if m is not self.model]
        try:
            self._dry_run()
        finally:
            for handle in handles:
                handle.remove()
        return [call for call in calls.values() if call is not None]

    def _random_state(self) -> list[bytes]:
        """State of the generators that a model may draw from; it changes with every draw."""
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return [state.numpy().tobytes() for state in states]

    @contextmanager
    def state_kept(self) -> Iterator[None]:
        """Put the model's buffers and the random state back afterwards, for a dry run."""
        kept = [
            (module, key, buffer, buffer.clone())
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        on_cpu = self.device.type == "cpu"
        kind = "cuda" if on_cpu else self.device.type
        try:
            with torch.random.fork_rng(devices=[] if on_cpu else [self.device], device_type=kind):
                yield
        finally:
            with torch.no_grad():
                for module, key, buffer, value in kept:
                    buffer.copy_(value)
                    module._buffers[key] = buffer  # a call may have put another tensor in its place

    # -- placements -----------------------------------------------------------------------------------

    def install(self, placement: Placement) -> None:
        """Let the candidate places of ``placement`` do what it says from the next step on."""
        for site in placement.sites:
            if isinstance(site, StageSite):
                for stage in (site.stage, *(("data",) if site.data is not None else ())):
                    self._bare_stages.setdefault(stage, self.stages[stage])
            else:
                module = site.call.module
                self._bare_forwards.setdefault(module, (module.forward, "forward" in module.__dict__))
        self.placements.append(placement)
        self._arrangements.clear()  # those from before know fewer places
        self._arrange()

    def _arrange(self) -> None:
        """Put into every candidate place what this step needs there.

        A wrapper that asked at each call whether its place acts would leave a gap of some microseconds in
        every published trace. So it is asked once a step: outside of the profiled steps only if the answer
        changed, in them always, so that all of them begin alike.
        """
        wanted = (self.marking, *((one, one.active(self.profiled_step)) for one in self.placements))
        if wanted == self._arranged and self.profiled_step is None:
            return
        self._arranged = wanted
        if wanted not in self._arrangements:
            self._arrangements[wanted] = self._arrangement()
        stages, forwards = self._arrangements[wanted]
        self.stages.update(stages)
        for module, (bare, is_own) in self._bare_forwards.items():
            # On the instance: a module hook would leave nodes of its own in the autograd graph.
            if module in forwards or is_own:
                module.__dict__["forward"] = forwards.get(module, bare)
            else:
                module.__dict__.pop("forward", None)

    def _arrangement(self) -> Arrangement:
        """What stages and modules run in this step.

        Python that runs in a place leaves a gap there, so it is as little as can be, and where a place is
        off a body that does nothing runs by the same path: otherwise gaps would tell which places act. It is
        kept for the next such step, as functions made anew run slower at first.
        """
        stages, forwards = dict(self._bare_stages), dict[nn.Module, Callable[..., Any]]()
        for placement in self.placements:
            for number, site in enumerate(placement.sites):
                if isinstance(site, StageSite):
                    if site.data is not None and placement.on(number, self.profiled_step):
                        bring = _with_original(site.data, stages["data"])
                        mark = partial(self._mark, placement, number)
                        stages["data"] = self._marked(mark, bring, covers=True)
                    stages[site.stage] = self._at_stage(placement, number, site, stages[site.stage])
                    continue
                module = site.call.module
                inner = forwards.get(module) or self._bare_forwards[module][0]
                at = self._at_module if isinstance(site, ModuleSite) else self._at_function
                forwards[module] = at(placement, number, site, inner)  # type: ignore[arg-type]
        return stages, forwards

    def _at_stage(self, placement: Placement, number: int, site: StageSite, inner: StageRun) -> StageRun:
        """What runs at a stage in this step, around what others put there."""
        on = placement.on(number, self.profiled_step)
        mark = self._marker_of(placement, number)
        if site.where in ("around", "inside"):
            inside = on and site.where == "inside"
            body = site.body if on else site.otherwise or _run
            run = _marking_inside(body, inner, mark) if inside else _with_original(body, inner)
            return self._marked(mark, run, covers=site.where == "around")
        extra = self._marked(mark, site.body if on else site.otherwise or _same, covers=True)
        first, second = (extra, inner) if site.where == "before" else (inner, extra)

        def both(state: State) -> None:
            first(state)
            second(state)

        return both

    def _at_module(
        self, placement: Placement, number: int, site: ModuleSite, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The same of a module's forward, which takes one argument (see :meth:`module_calls`)."""
        on = placement.on(number, self.profiled_step)
        mark = self._marker_of(placement, number)
        if site.where in ("around", "inside"):
            run: Callable[..., Any] = partial(site.body if on else site.otherwise or _apply, inner)
            if on and site.where == "inside":
                run = _with_last(run, mark)
            return self._marked(mark, run, covers=site.where == "around")
        extra = self._marked(mark, site.body if on else site.otherwise or _same, covers=True)
        return (lambda x: inner(extra(x))) if site.where == "before" else (lambda x: extra(inner(x)))

    def _at_function(
        self, placement: Placement, number: int, site: FunctionSite, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The same of the forward of the module that calls the function, which is replaced meanwhile."""
        on = placement.on(number, self.profiled_step)
        name, wanted = site.call.function, site.call.index
        mark = self._marker_of(placement, number)
        act = site.body if on else _original
        marked = self._marked(mark, act, covers=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            original = getattr(functional, name)
            calls = -1

            def watch(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return marked(original, *args, **kwargs) if calls == wanted else original(*args, **kwargs)

            setattr(functional, name, watch)
            try:
                return inner(*args, **kwargs)
            finally:
                setattr(functional, name, original)

        return forward

    def _marked(
        self, mark: Callable[[], AbstractContextManager[Any]], run: Callable[..., Any], *, covers: bool
    ) -> Callable[..., Any]:
        """``run`` in its marker, or behind an empty one that says whether the place acts; only if marking."""
        if not self.marking:
            return run

        def marked(*args: Any, **kwargs: Any) -> Any:
            with mark():
                if covers:
                    return run(*args, **kwargs)
            return run(*args, **kwargs)

        return marked

    def _marker_of(self, placement: Placement, site: int) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the marker of a site; of one that marks nothing, unless marking."""
        return partial(self._mark, placement, site) if self.marking else _no_mark

    def _mark(self, placement: Placement, site: int) -> AbstractContextManager[Any]:
        """Marks what runs while it is entered, in profiles with markers.

        The annotation is the one that compiled code uses, which takes a microsecond where ``record_function``
        takes twenty: where two profiles of a workload do not correspond, the marked ones are published.
        """
        # Code that is being compiled ignores ``record_function``, and would break its graph at this one.
        if not self.marking or torch.compiler.is_compiling():
            return _NO_MARK
        marker = (placement.index, site, placement.on(site, self.profiled_step))
        if marker not in self._marker_names:
            self._marker_names[marker] = marker_name(self._secret, Marker(*marker))
        return _RecordFunctionFast(self._marker_names[marker])


def _run(state: State, original: StageRun) -> None:
    original(state)


def _same(value: Any) -> Any:
    return value


def _apply(original: Callable[[Any], Any], x: Any) -> Any:
    return original(x)


def _original(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _with_original(body: Body, original: StageRun) -> StageRun:
    return lambda state: body(state, original)


def _marking_inside(body: Body, original: StageRun, mark: Callable[[], Any]) -> StageRun:
    return lambda state: body(state, original, mark)


def _with_last(body: Body, mark: Callable[[], Any]) -> Body:
    return lambda x: body(x, mark)


def _no_mark() -> AbstractContextManager[Any]:
    return _NO_MARK


_NO_MARK: AbstractContextManager[Any] = nullcontext()


@contextmanager
def _replaced_function(name: str, watch: Callable[..., Any]) -> Iterator[None]:
    """``torch.nn.functional.<name>(...)`` becomes ``watch(original, ...)`` while the block runs."""
    original = getattr(functional, name)
    setattr(functional, name, partial(watch, original))
    try:
        yield
    finally:
        setattr(functional, name, original)


def _is_given(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or bool(value)


def _module_call(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, stateful: bool
) -> ModuleCall | None:
    """What :meth:`TrainingLoop.module_calls` promises of a module, or None if it is no candidate.

    ``stateful`` says that this call drew random numbers or updated buffers.
    """
    if len(args) != 1 or kwargs or not (_is_activation(args[0]) and _is_activation(output)):
        return None
    children = list(module.modules())
    return ModuleCall(
        name=name,
        module=module,
        in_shape=tuple(args[0].shape),
        out_shape=tuple(output.shape),
        dtype=args[0].dtype,
        leaves=sum(1 for child in children if not list(child.children())),
        stateful=stateful or any(_uses_batch_statistics(child) for child in children),
    )


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _buffer_versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which tensors the buffers are, and how often each was written to (unknown in inference mode)."""
    return [(id(b), -1 if b.is_inference() else b._version) for b in module.buffers()]


def _uses_batch_statistics(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return module.training or module.running_mean is None
