"""Count, on a CPU, the operators of a model's step that would make the host wait on a GPU.

    python -m torchtraceap.collect.would_block [MODEL...]

Prints a Markdown table, a row a model and mode; without names, of all models for detection and generation.
An operator counts if its result is a number for the host, or of a shape that depends on values: on a GPU both
are known only when it is done. That is an upper bound where a tensor would lie on the host on a GPU too, and
none where a library takes another path there. ``torch.tensor`` of Python data is counted beside them: it
is a blocking copy where the tensor ends up on the device.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from contextlib import closing

import torch

from torchtraceap.collect.dispatch import Call, record
from torchtraceap.collect.loop import TrainingLoop
from torchtraceap.collect.model import ZOO
from torchtraceap.labels.pattern import Mode

TASKS = ("detection", "generation")
LIFT = "aten::lift_fresh"


def would_block(call: Call) -> bool:
    """Whether the host would have to know the result's value or shape."""
    name = call.name.removeprefix("aten::").strip("_")
    if name == "index":
        return _has_mask(call)
    if name in ("index_put", "index_put_impl"):
        return _has_mask(call) and call.inputs[-1].numel > 1  # one value: masked_fill
    tags = call.func.tags
    return (
        torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
        or name == "torchvision::nms"
    )


def _has_mask(call: Call) -> bool:
    return any(value.dtype in (torch.bool, torch.uint8) for value in call.inputs[1:])


def count(calls: Iterable[Call]) -> Counter[str]:
    """How often each such operator was dispatched, and ``LIFT`` for tensors of Python data."""
    return Counter(call.name for call in calls if would_block(call) or call.name == LIFT)


def _row(name: str, mode: Mode) -> str:
    spec = ZOO[name]
    batch_size = spec.batch_sizes["cpu"][mode][0]
    with closing(TrainingLoop(spec, mode, batch_size, torch.device("cpu"), secret="", seed=0)) as loop:
        counts = count(record(loop).calls)
    lifted = counts.pop(LIFT, 0)
    told = ", ".join(f"{operator.partition('::')[2]} {n}" for operator, n in counts.most_common())
    return f"| {name} | {mode} | {batch_size} | {told or 'none'} | {lifted or 'none'} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="a name from `traceap zoo list`")
    names = parser.parse_args().model or [spec.name for spec in ZOO if spec.task in TASKS]
    print("| model | mode | batch | operators that would block | tensors of Python data |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        for mode in ZOO[name].modes:
            if ZOO[name].batch_sizes["cpu"][mode]:
                print(_row(name, mode), flush=True)


if __name__ == "__main__":
    main()
