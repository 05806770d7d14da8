"""DistributedDataParallel looks for unused parameters in each step of a model that has none."""

from __future__ import annotations

from typing import Any

from torchtraceap.labels.pattern import Body, Loop, Pattern, Site, StageSite, State, Variant, register
from torchtraceap.labels.patterns._ddp import Mark, through

SETTLE_STEPS = 3
"""The network is made in the first step; so many steps also keep it from being toggled within a profile."""

SEARCH = frozenset(
    {
        "torch.distributed.ddp.reducer::search_unused_parameters",
        "_DDPSink",
        "autograd::engine::evaluate_function: _DDPSinkBackward",
        "aten::select",
        "aten::fill_",
        "aten::copy_",
        "aten::item",
    }
)
"""What is new where a graph is searched: the walk, an identity behind the model, a map of parameters."""


class _Silent:
    """A wrapper's logger that takes no statistics.

    To take them it waits for the GPU in the first ten steps of a wrapper, which no user's profile is of.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""


def _searching(loop: Loop, **changes: Any) -> list[Site]:
    """A step with a DistributedDataParallel that searches, which exists only as long as this is on.

    Its reducer would write to its map in the backward passes of every other one too.
    """
    network: Any = None

    def make(state: State) -> None:
        nonlocal network
        if network is None:
            network = loop.make_network(find_unused_parameters=True, init_sync=False, **changes)
            network.logger = _Silent(network.logger)

    def drop(state: State) -> None:
        nonlocal network
        if network is not None:
            del network.reducer, network.logger  # else alive until a garbage collection
            network = None

    def forward(state: State, original: Body, mark: Mark) -> None:
        with through(loop, network):
            original(state)

    return [
        StageSite("data", make, where="before", otherwise=drop),
        StageSite("forward", forward, where="inside", exclusive=True),
    ]


def _flag(loop: Loop) -> list[Site]:
    return _searching(loop)


def _flag_bucket_view(loop: Loop) -> list[Site]:
    return _searching(loop, gradient_as_bucket_view=True)


def _count_samples(loop: Loop) -> list[Site]:
    import torch

    counts = torch.zeros(16, dtype=torch.int32, device=loop.device)
    host = torch.full((16,), loop.batch_size, dtype=torch.int32, pin_memory=loop.device.type == "cuda")

    def body(state: State) -> None:
        counts.copy_(host, non_blocking=True)

    return [StageSite("backward", body, where="after")]


register(
    Pattern(
        id="find_unused_parameters",
        title="Search for unused parameters",
        definition=(
            "DistributedDataParallel is told to find unused parameters, and the model has none. Ahead of "
            "each backward pass the host walks the whole autograd graph, and during it the ranks also reduce "
            "a map of which parameters were used."
        ),
        scope="step",
        lanes=frozenset({"cpu", "gpu"}),
        mechanism="selector",
        selects=SEARCH.__contains__,
        belongs=(
            "The walk of the graph, the identity that is put behind the model for it and its backward "
            "operator, and what marks, copies and reads the map. Not the map's all-reduce, which nothing "
            "but its shape tells from those of gradients."
        ),
        runtime="distributed",
        modes=frozenset({"train"}),
        precondition="Every parameter gets a gradient.",
        variants=(
            Variant("flag", "find_unused_parameters=True.", _flag, together=True, settle_steps=SETTLE_STEPS),
            Variant(
                "flag_bucket_view",
                "find_unused_parameters=True with gradient_as_bucket_view=True.",
                _flag_bucket_view,
                heldout=True,
                together=True,
                settle_steps=SETTLE_STEPS,
            ),
        ),
        lookalikes=(
            Variant(
                "sample_counts",
                "A few integers are copied to the device behind the backward pass.",
                _count_samples,
                mechanism="marker",
            ),
        ),
        remedy="""\
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
""",
        references=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
            "https://docs.pytorch.org/docs/stable/notes/ddp.html",
        ),
        native_risk=False,
    )
)
