"""Names of compiled code in a trace, freed of what they tell about the process."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np

from torchtraceap.dataset.trace import Trace

_COMPILE_ID = re.compile(r"((?:Torch-Compiled Region: |compile_id=))(\d+)/(\d+)")
_GRAPH = re.compile(r"(## Call CompiledFxGraph )(\w+)( ##)")


def number_regions(trace: Trace) -> Trace:
    """Number compiled frames, their versions and graphs by first appearance, each from 0.

    ``Torch-Compiled Region: 7/2`` counts what the process has compiled so far, which tells the order in
    which its traces were made; the hash of a graph tells which traces are of one model.

    Apply to a labelled trace: before, equal names in it and in its clean twin mean the same code.
    """
    first = np.full(len(trace.ops), np.iinfo(np.int64).max)
    np.minimum.at(first, trace.events.op, trace.events.start_ns)
    order = [trace.ops[i].name for i in np.argsort(first, kind="stable").tolist()]

    frames: dict[str, int] = {}
    versions: Counter[str] = Counter()
    ids: dict[tuple[str, str], str] = {}
    graphs: dict[str, int] = {}
    for name in order:
        for _, frame, version in _COMPILE_ID.findall(name):
            if (frame, version) not in ids:
                frames.setdefault(frame, len(frames))
                ids[frame, version] = f"{frames[frame]}/{versions[frame]}"
                versions[frame] += 1
        for _, graph, _ in _GRAPH.findall(name):
            graphs.setdefault(graph, len(graphs))

    def renamed(name: str) -> str:
        name = _COMPILE_ID.sub(lambda m: m[1] + ids[m[2], m[3]], name)
        return _GRAPH.sub(lambda m: f"{m[1]}{graphs[m[2]]}{m[3]}", name)

    ops = [msgspec.structs.replace(op, name=renamed(op.name)) for op in trace.ops]
    return replace(trace, ops=ops)
