"""What an anti-pattern is, and the small interface between its injector and the training loop.

A pattern file (labels/patterns/<id>.py) holds one :class:`Pattern`. Nothing here imports torch; injectors
import it inside of their functions, so that the vocabulary is readable in the base install.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from torchtraceap.errors import UserError
from torchtraceap.labels.types import LaneClass, Scope
from torchtraceap.registry import Registry

if TYPE_CHECKING:
    import torch

Mechanism = Literal["marker", "marker+backward", "selector", "meanwhile"]
"""How a pattern's events are found in its trace; see docs/design.md, "Ground truth"."""

Mode = Literal["train", "infer"]
Runtime = Literal["eager", "compiled", "distributed"]
"""How a workload's clean loop runs: plainly, through ``torch.compile``, or as one of several DDP ranks."""

Stage = Literal["data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "logging"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass
class State:
    """What flows through one step: each stage reads what earlier ones wrote."""

    host: Any = None
    """The batch as the loader gave it: a pytree of CPU tensors."""
    batch: Any = None
    """The batch on the device."""
    output: Any = None
    loss: Any = None


@dataclass(frozen=True)
class ModuleCall:
    """A module that a step calls exactly once with one floating tensor in and one out, found by a dry run.

    Both have at least two dimensions; ``dtype`` is the input's.

    ``stateful`` says that it or a child updates buffers or draws random numbers in this mode (BatchNorm in
    training, dropout): calling it in pieces would change the result.
    """

    name: str
    module: torch.nn.Module
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    leaves: int
    stateful: bool


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function of ``torch.nn.functional`` that a step makes, found by a dry run.

    ``module`` is the innermost module that makes it, one that a step calls exactly once; ``index`` counts
    the calls of this function in that module's forward from 0. ``shapes`` and ``dtypes`` are those of the
    tensors among the positional arguments. ``has`` names the keyword arguments that were neither None, False
    nor 0, and ``positions`` holds the indices of the positional ones that were not.
    """

    function: str
    name: str
    module: torch.nn.Module
    index: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    has: frozenset[str]
    positions: frozenset[int]


class Loop(Protocol):
    """The reference loop as an injector sees it (collect/loop.py implements it).

    The stages read ``optimizer``, ``network`` and ``autocast`` anew in each step, so that a body may put
    something else there for the length of the stage. ``network`` is what the forward stage calls: the model,
    or what wraps it (``torch.compile``, DistributedDataParallel).
    """

    model: torch.nn.Module
    network: torch.nn.Module
    device: torch.device
    mode: Mode
    runtime: Runtime
    autocast: bool
    optimizer: torch.optim.Optimizer | None

    @property
    def stages(self) -> Mapping[Stage, Callable[[State], None]]:
        """What runs at each stage now; a body that takes several passes calls others than its own."""
        ...

    @property
    def batch_size(self) -> int: ...

    def module_calls(self) -> Sequence[ModuleCall]:
        """Candidate places inside of the model, in order of execution."""
        ...

    def function_calls(self, function: str) -> Sequence[FunctionCall]:
        """Calls of ``torch.nn.functional.<function>`` by modules of the model, in order of execution."""
        ...

    def make_loader(self, **changes: Any) -> Any:
        """Another iterator of the loop's batches, alive until the loop is closed; its workers start now.

        ``changes`` are ``workers`` (int), ``pin`` (bool), ``per_sample`` (a function of one sample's pytree
        that stands for decoding and augmentation, run for each sample where the loader runs; the result
        replaces the sample and must equal it). What is left out is as in the loop's own loader.
        """
        ...

    def make_optimizer(self, **changes: Any) -> torch.optim.Optimizer:
        """A second optimizer of the loop's class and settings on the same parameters."""
        ...

    def make_network(self, **changes: Any) -> torch.nn.Module:
        """Another DistributedDataParallel of the model, with its options ``changes``; all ranks must ask."""
        ...


Body = Callable[..., Any]


Where = Literal["around", "before", "after", "inside"]
"""What a site's marker covers: all of the clean work, only what the body adds ahead of or behind it, or
what the body itself marks."""


@dataclass(frozen=True)
class StageSite:
    """A place at a stage.

    When on, ``around``: ``body(state, original)`` stands for the stage's ``original(state)``, and all of it
    is marked. ``before`` and ``after``: ``body(state)`` runs ahead of or behind the stage, and the stage's
    own work is not marked. ``inside``: ``body(state, original, mark)`` stands for the stage, and what runs
    under ``with mark():`` is marked, on whatever thread.

    ``otherwise`` has the form of ``body`` without ``mark`` and runs where the site is off, marked or not like
    it: the same work as a careful user writes it, if the clean loop does not do that work by itself.

    ``exclusive``: no other body may stand for the stage in the same trace, as is always so with ``around``.

    ``data`` goes with a site of a later stage that needs another batch: in the steps in which the site is on,
    ``data(state, original)`` stands for the data stage, and is marked as well.
    """

    stage: Stage
    body: Body
    where: Where = "around"
    otherwise: Body | None = None
    exclusive: bool = False
    data: Body | None = None

    @property
    def replaces(self) -> bool:
        """Whether what lies inside of the stage may not run as another body has it."""
        return self.exclusive or self.where == "around"


@dataclass(frozen=True)
class ModuleSite:
    """A place at a module.

    When on, ``around``: ``body(original, x)`` stands for the module's ``original(x)``, and all of it is
    marked. ``before`` marks ``x = body(x)`` ahead of the call and ``after`` marks ``y = body(y)`` behind it,
    so that the module's own work is not marked. ``inside``: ``body(original, x, mark)`` stands for the call,
    and what runs under ``with mark():`` is marked. ``otherwise`` is as at a :class:`StageSite`.
    """

    call: ModuleCall
    body: Body
    where: Where = "around"
    otherwise: Body | None = None


@dataclass(frozen=True)
class FunctionSite:
    """A place at a function call: when on, ``body(original, *args, **kwargs)`` stands for it, all marked."""

    call: FunctionCall
    body: Body


Site = StageSite | ModuleSite | FunctionSite


@dataclass(frozen=True)
class Variant:
    """One implementation of a pattern, or a harmless twin of it.

    Attributes:
        name: Unique within the pattern.
        summary: One sentence.
        sites: Given the loop, every candidate place with what happens there when it is switched on;
            ``choose`` then picks those that act.
        heldout: Kept out of train and validation (slice ``unseen_variant``).
        max_sites: At most so many places act at once; how many is drawn from 1 to this.
        together: All candidates act, or none: they are one change in several places.
        max_block_steps: At most so many steps between two readings of the clock, where a step takes seconds.
        settle_steps: Steps after a toggle that the cost measurement discards.
        starts_workers: ``sites`` makes a loader with workers. These must be forked before the model
            computes, so such a variant is placed ahead of those that ask for module calls.
        mechanism: How a look-alike's events are found, if not as the pattern's. One of a pattern that is
            found by comparison must say so: the clean trace, which it also goes into, is compared with
            itself there.
    """

    name: str
    summary: str
    sites: Callable[[Loop], list[Site]]
    heldout: bool = False
    max_sites: int = 1
    together: bool = False
    max_block_steps: int | None = None
    settle_steps: int = 1
    starts_workers: bool = False
    mechanism: Mechanism | None = None


@dataclass(frozen=True)
class Pattern:
    """An anti-pattern: what it is, where it applies, how it is injected and what to do about it.

    Attributes:
        id: Snake case; the class name in the data.
        title: A few words.
        definition: Two sentences: what happens, and why it costs time.
        scope: Whether there is a place (``local``) or the whole step is affected (``step``).
        lanes: On which lane classes its events lie.
        mechanism: How its events are found.
        belongs: What in the trace belongs to it, in words.
        selects: With the mechanism "selector": given the name of an event without a counterpart in the
            clean trace, whether it and what lies below it belong to the pattern. With "meanwhile": the same
            of an event that begins while a marker is open, on whatever thread.
        runtime: The kind of workload that it occurs in.
        needs_gpu: Cannot exist on a CPU.
        modes: Loops that it can be injected into.
        precondition: What an injector refuses to break, in words.
        variants: At least two whose op or kernel multisets differ.
        lookalikes: Harmless twins: benign by construction, whatever their events resemble.
        remedy: What to change, as code.
        references: Where the advice comes from.
        alone: Placing it changes the clean loop too (to the good form of what it does badly), in stages that
            other patterns replace, so that a workload with it has no other.
        native_risk: Whether a model may hold the pattern by itself; then only traces with evidence of the
            contrary are exhaustive for it.
    """

    id: str
    title: str
    definition: str
    scope: Scope
    lanes: frozenset[LaneClass]
    mechanism: Mechanism
    belongs: str
    variants: tuple[Variant, ...]
    lookalikes: tuple[Variant, ...]
    remedy: str
    references: tuple[str, ...]
    selects: Callable[[str], bool] | None = None
    runtime: Runtime = "eager"
    needs_gpu: bool = False
    modes: frozenset[Mode] = frozenset({"train", "infer"})
    precondition: str = "none"
    alone: bool = False
    native_risk: bool = True

    def __post_init__(self) -> None:
        if (self.mechanism in ("selector", "meanwhile")) != (self.selects is not None):
            raise ValueError(f"pattern {self.id}: ``selects`` goes with selector and meanwhile alone")
        if any(self.mechanism_of(twin) == "selector" for twin in self.lookalikes):
            raise ValueError(f"pattern {self.id}: a look-alike cannot be found by comparison")

    def variant(self, name: str) -> Variant:
        """The variant or look-alike called ``name``.

        Raises:
            UserError: There is none, as where a trace of a newer catalogue names it.
        """
        known = (*self.variants, *self.lookalikes)
        for variant in known:
            if variant.name == name:
                return variant
        names = ", ".join(one.name for one in known)
        raise UserError(f"Unknown variant {name!r} of pattern {self.id}. Available: {names}.")

    def mechanism_of(self, variant: Variant) -> Mechanism:
        """How the events of one of the variants or look-alikes are found."""
        return variant.mechanism or self.mechanism

    def applies(self, device_type: str, mode: Mode, runtime: Runtime = "eager") -> str | None:
        """None if the pattern can be injected there, else the reason why not."""
        if self.runtime != runtime:
            return f"{self.id} occurs only in {self.runtime} workloads"
        if self.needs_gpu and device_type == "cpu":
            return f"{self.id} needs a GPU"
        if mode not in self.modes:
            return f"{self.id} occurs only in {' and '.join(sorted(self.modes))}"
        return None


PATTERNS: Registry[Pattern] = Registry("pattern", Pattern, "torchtraceap.labels.patterns")


def register(pattern: Pattern) -> Pattern:
    """Add a pattern to the catalogue under its id."""
    return PATTERNS.register(pattern.id, pattern)


def choose(variant: Variant, candidates: Sequence[Site], rng: random.Random) -> list[int]:
    """Draw which candidates act: 1 to ``max_sites`` of them, uniformly, without regard to position."""
    if variant.together:
        return list(range(len(candidates)))
    count = min(len(candidates), rng.randint(1, variant.max_sites))
    return sorted(rng.sample(range(len(candidates)), count))
