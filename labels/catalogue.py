"""The catalogue of patterns in a reader's order, and as the page docs/patterns.md (``make docs``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchtraceap.labels.pattern import PATTERNS, Pattern, Variant

GROUPS: dict[str, tuple[str, ...]] = {
    "Data and transfer": (
        "dataloader_stall", "pageable_h2d", "cpu_tensor_create", "scalar_h2d", "frequent_d2h",
    ),
    "Synchronisation": ("host_sync", "explicit_synchronize", "dynamic_shape_sync", "cache_flush"),
    "Launch and fusion": (
        "python_loop_over_batch", "unfused_elementwise", "unfused_attention", "unfused_optimizer",
        "unfused_grad_clip", "zero_grad_memset", "graph_break", "recompilation",
    ),
    "Precision and layout": (
        "fp32_no_tensor_cores", "dtype_ping_pong", "layout_ping_pong", "misaligned_channels",
    ),
    "Redundant work": (
        "redundant_copy", "recomputed_constant", "over_checkpointing", "cat_in_loop",
        "deterministic_algorithms",
    ),
    "Distributed": (
        "unoverlapped_allreduce", "tiny_buckets", "find_unused_parameters", "barrier_every_step",
        "missing_no_sync",
    ),
}  # fmt: skip
"""What is wasted, and the patterns that waste it."""

OTHERS = "Others"

_HEAD = """\
# Anti-patterns

<!-- Written by `make docs` from labels/patterns/; a test compares. -->

{count} patterns, each with at least two implementations, of which one is held out of training, and with
harmless look-alikes that go into clean code. What a mechanism is, and how a cost is measured, stands in
[design.md](design.md#ground-truth-by-intervention); how to add a pattern in
[adding_a_pattern.md](adding_a_pattern.md).

*local*: there is a place in the timeline. *step*: the whole step is affected.

| pattern | | scope | lanes | mechanism | needs |
|---|---|---|---|---|---|
"""


def grouped() -> list[tuple[str, list[Pattern]]]:
    """All registered patterns by group, in the order of :data:`GROUPS`; those in no group come last."""
    known = set(PATTERNS.names())
    placed = {name for names in GROUPS.values() for name in names}
    found = [(title, [PATTERNS[n] for n in names if n in known]) for title, names in GROUPS.items()]
    found.append((OTHERS, [PATTERNS[name] for name in sorted(known - placed)]))
    return [(title, patterns) for title, patterns in found if patterns]


def group_of(pattern: str) -> str:
    """The title of a pattern's group."""
    return next((title for title, names in GROUPS.items() if pattern in names), OTHERS)


def needs(pattern: Pattern) -> str:
    """In which workloads it can occur, in words: ``GPU, training``."""
    parts = ["GPU"] if pattern.needs_gpu else []
    if pattern.runtime != "eager":
        parts.append({"compiled": "torch.compile", "distributed": "several ranks"}[pattern.runtime])
    if len(pattern.modes) == 1:
        parts += [{"train": "training", "infer": "inference"}[mode] for mode in pattern.modes]
    return ", ".join(parts) or "nothing"


def page() -> str:
    """The text of docs/patterns.md."""
    return _HEAD.format(count=len(PATTERNS.names())) + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for _, patterns in grouped():
        for one in patterns:
            cells = (
                f"[{one.id}](#{one.id})",
                one.title,
                one.scope,
                _listed(one.lanes),
                one.mechanism,
                needs(one),
            )
            yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    for title, patterns in grouped():
        yield f"\n## {title}"
        for one in patterns:
            yield from _section(one)


def _section(one: Pattern) -> Iterator[str]:
    facts = {
        "scope": one.scope,
        "lanes": _listed(one.lanes),
        "mechanism": one.mechanism,
        "needs": needs(one),
        "precondition": one.precondition,
        "belongs": one.belongs,
        "natives": "a model may hold it by itself" if one.native_risk else "none: the loop is the harness's",
    }
    yield f"\n### {one.id}\n\n{one.title}. {one.definition}\n\n| | |\n|---|---|"
    yield from (f"| {name} | {_cell(text)} |" for name, text in facts.items())
    for title, variants in (("Variants", one.variants), ("Look-alikes", one.lookalikes)):
        yield f"\n{title}:\n"
        yield from (f"- `{v.name}`{_heldout(v)}: {v.summary}" for v in variants)
    yield f"\nRemedy:\n\n```python\n{one.remedy.rstrip()}\n```\n\nSee:\n"
    yield from (f"- <{reference}>" for reference in one.references)


def _heldout(variant: Variant) -> str:
    return " (held out)" if variant.heldout else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
