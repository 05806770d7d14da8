"""Which models of the zoo run on a machine: each is built and steps at the batch sizes of its row.

The folder of a check is that of a run (collect/runner.py) without shards: what came of a model is in its line
of ``log.jsonl``. When a check ends, all of it is in ``check.json``, which is the file to keep.

Lanes share the device here, as a check measures no cost: a model may take memory that another would need. So
what does not fit beside others is tried once more alone.
"""

from __future__ import annotations

import gc
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchtraceap.collect import CHECK_TIME_LIMIT
from torchtraceap.collect.failures import Failed, Failure, describe
from torchtraceap.collect.model import ZOO, Adapter, Batch, DeviceKind, ModelSpec, kind_of
from torchtraceap.collect.plan import in_turns
from torchtraceap.collect.run_folder import LogLine, read_log
from torchtraceap.collect.runner import JobEvent, RunReport, Work, run_jobs
from torchtraceap.collect.turn import Turn
from torchtraceap.dataset.schema import MODES
from torchtraceap.errors import UserError
from torchtraceap.files import write_text
from torchtraceap.labels.pattern import Mode, State

if TYPE_CHECKING:
    import torch

    from torchtraceap.collect.server import Request

STATES = ("passed", "failed", "left", "not run")

MIB = 2**20


class Case(msgspec.Struct, frozen=True):
    """A mode and a batch size."""

    mode: Mode
    batch_size: int

    def __str__(self) -> str:
        return f"{self.mode} at batch {self.batch_size}"


class Check(msgspec.Struct, frozen=True):
    """A model and what it has to do."""

    model: str
    cases: list[Case]

    @property
    def name(self) -> str:
        """Unique among models whose names differ in more than punctuation."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.model)


class Stepped(msgspec.Struct):
    """What came of a case.

    ``step_ms`` is the second step's, ``peak_mib`` the most memory that tensors had on the device, or on a CPU
    the process up to here.
    """

    mode: Mode
    batch_size: int
    step_ms: float | None = None
    peak_mib: float | None = None
    error: str = ""


class Checked(msgspec.Struct):
    """What came of a model.

    Attributes:
        model: Its name.
        state: ``passed``; ``failed``; ``left`` if the check ended before it; ``not run`` if its row has no
            batch size for this kind of device.
        reason: Why it failed, in one line.
        build_s: Seconds to build it on the CPU.
        alone: Whether some of it only fitted while no other model had the device.
        cases: What was tried.
    """

    model: str
    state: str
    reason: str = ""
    build_s: float | None = None
    alone: bool = False
    cases: list[Stepped] = []


class CheckReport(msgspec.Struct):
    """The content of ``check.json``. ``date`` is that of its end; step times are of a device that ``lanes``
    models shared."""

    device: str
    hardware: dict[str, Any]
    date: str
    lanes: int
    time_limit: float
    models: list[Checked]

    @property
    def machine(self) -> str:
        """What the models ran on, in words."""
        name = str(self.hardware["device_name"])
        on_cpu = self.hardware.get("device_kind") == "cpu"
        return f"{name}, {self.hardware['cpu_cores']} cores" if on_cpu else name

    @property
    def modes(self) -> list[str]:
        """The modes that models were tried in."""
        return sorted({case.mode for one in self.models for case in one.cases})

    def count(self, state: str) -> int:
        """How many models have the state."""
        return sum(one.state == state for one in self.models)


def make_checks(models: Sequence[str], *, device_type: str, modes: Sequence[Mode] = MODES) -> list[Check]:
    """A check for each model that runs on the device at all, tasks by turns.

    On an accelerator the smallest and the largest batch size of each mode are tried, on a CPU the smallest.

    Raises:
        UserError: A model is unknown.
    """
    kind = kind_of(device_type)
    specs = [ZOO[name] for name in dict.fromkeys(models)]
    checks = [Check(spec.name, _cases(spec, kind, modes)) for spec in in_turns(specs)]
    return [check for check in checks if check.cases]


def _cases(spec: ModelSpec, kind: DeviceKind, modes: Sequence[Mode]) -> list[Case]:
    cases = []
    # Training first: what a model keeps of a forward pass in inference mode cannot be trained with.
    for mode in (mode for mode in ("train", "infer") if mode in modes):
        if sizes := spec.batch_sizes[kind][mode]:
            chosen = {min(sizes), max(sizes)} if kind == "gpu" else {min(sizes)}
            cases += [Case(mode, size) for size in sorted(chosen)]
    return cases


def check(
    models: Sequence[str],
    folder: Path,
    *,
    devices: Sequence[str],
    device_type: str,
    modes: Sequence[Mode] = MODES,
    lanes: int = 1,
    resume: bool = False,
    time_limit: float = CHECK_TIME_LIMIT,
    memory_limit: int | None = None,
    budget: float = math.inf,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> tuple[CheckReport, RunReport]:
    """Check models and write ``check.json``; see :func:`runner.run_jobs` for the arguments.

    Returns:
        What came of all models, also of an earlier part of a resumed check, and how this run went.

    Raises:
        UserError: A model is unknown, none runs on the device, or ``folder`` holds something else.
    """
    checks = make_checks(models, device_type=device_type, modes=modes)
    if not checks:
        raise UserError(f"nothing to check: none of {len(models)} models runs on {device_type}")
    ran = run_jobs(
        checks,
        folder,
        Work("check", lambda one, batch_size: one),
        devices=devices,
        lanes=lanes,
        resume=resume,
        time_limit=time_limit,
        memory_limit=memory_limit,
        budget=budget,
        on_event=on_event,
    )
    report = CheckReport(
        device=devices[0],
        hardware=_hardware(devices[0]),
        date=datetime.now(UTC).date().isoformat(),
        lanes=lanes,
        time_limit=time_limit,
        models=_checked(models, checks, read_log(folder)),
    )
    write_text(folder / "check.json", msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return report, ran


def read_report(path: Path) -> CheckReport:
    """Read a ``check.json``.

    Raises:
        UserError: It is none.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=CheckReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{path} was not written by `traceap zoo check`: {error}") from None
    if lacking := {"device_name", "cpu_cores", "torch"} - report.hardware.keys():
        raise UserError(
            f"{path} was not written by `traceap zoo check`: its hardware lacks {', '.join(sorted(lacking))}"
        )
    return report


def _hardware(device: str) -> dict[str, Any]:
    import torch

    from torchtraceap.collect import devices

    return devices.hardware(torch.device(device))


def _checked(models: Sequence[str], checks: Sequence[Check], log: Mapping[str, LogLine]) -> list[Checked]:
    """All models by name: what the log says last of each."""
    by_model = {one.model: one for one in checks}
    found = []
    for model in sorted(set(models)):
        if model not in by_model:
            found.append(Checked(model, "not run", "its row has no batch size for such a device"))
            continue
        ended = log.get(by_model[model].name)
        if ended is None:
            found.append(Checked(model, "left"))
            continue
        done = ended.event == "done"
        reason = "" if done else ended.error
        if not done and not ended.result:  # it was killed: the log says at what
            reason += f" ({ended.stage})"
        told = {"model": model, "state": "passed" if done else "failed", "reason": reason}
        try:
            found.append(msgspec.convert({**(ended.result or {}), **told}, Checked))
        except msgspec.ValidationError:  # not a line that a check has written
            found.append(Checked(model, "left"))
    return found


# -- in the process of a model ----------------------------------------------------------------------------


def run_request(request: Request, progress: Callable[[str], None]) -> dict[str, Any]:
    """Check the model of a request to the fork server; in this process.

    Returns:
        The fields of :class:`Checked` that are measured.

    Raises:
        Failed: A case failed. What came of the others is its result.
        Whatever the model raises when it is built.
    """
    from torchtraceap.collect import devices

    one = msgspec.json.decode(request.arguments, type=Check)
    device = devices.prepare(request.device)
    progress("building")
    spec = ZOO[one.model]
    begin = time.monotonic()
    built = _built(spec)
    build_s = time.monotonic() - begin
    turn = Turn(Path(request.gate) if request.gate else None, progress)

    tried: dict[Case, tuple[Stepped, Failure | None]] = {}
    with turn.taken(shared=True):
        tried.update(_step_all(built, one.cases, device, progress))
    again = [case for case, (_, failure) in tried.items() if failure and failure.kind == "out_of_memory"]
    if again and request.gate:
        built = _built(spec)  # anew, as it has left training behind; the one before gives its memory back
        gc.collect()
        devices.empty_cache(device)
        with turn.taken():
            tried.update(_step_all(built, again, device, progress))
    failed = {case: failure for case, (_, failure) in tried.items() if failure}
    result = {
        "build_s": round(build_s, 3),
        "alone": any(case not in failed for case in again),
        "cases": [msgspec.to_builtins(stepped) for stepped, _ in tried.values()],
    }
    if failed:
        is_device = any(failure.kind == "device" for failure in failed.values())
        raise Failed(Failure(_reason(failed), "device" if is_device else "error", result=result))
    return result


def _built(spec: ModelSpec) -> ModelSpec:
    """The row of a model that is built once, for all its cases, and so are batches of each size."""
    model = spec.build()
    return replace(spec, build=lambda: model, adapter=_OneBatch(spec.adapter))


class _OneBatch:
    """An adapter that makes one batch of each size: a loop asks for several, and random numbers take long."""

    def __init__(self, adapter: Adapter) -> None:
        self.forward = adapter.forward
        self.loss = adapter.loss
        self._adapter = adapter
        self._batches: dict[int, Batch] = {}

    def make_batch(self, batch_size: int, size: tuple[int, ...], generator: torch.Generator) -> Batch:
        if batch_size not in self._batches:
            self._batches[batch_size] = self._adapter.make_batch(batch_size, size, generator)
        return self._batches[batch_size]


def _reason(failed: Mapping[Case, Failure]) -> str:
    """One line: each error with the cases that it ended."""
    by_error: dict[str, list[str]] = {}
    for case, failure in failed.items():
        by_error.setdefault(failure.error, []).append(str(case))
    return "; ".join(f"{', '.join(cases)}: {error}" for error, cases in by_error.items())


def _step_all(
    spec: ModelSpec, cases: Sequence[Case], device: torch.device, progress: Callable[[str], None]
) -> Iterator[tuple[Case, tuple[Stepped, Failure | None]]]:
    """Try the cases in turn, until a failure has spoilt this process's context on the device for the rest."""
    import traceback

    from torchtraceap.collect import devices

    for case in cases:
        progress(str(case))
        stepped, failure = Stepped(case.mode, case.batch_size), None
        try:
            stepped.step_ms = _step_ms(spec, case, device)
        except Exception as error:
            traceback.print_exc()
            failure = describe(error)
            stepped.error = failure.error
        spoilt = failure is not None and failure.kind == "device" and not _computes(device)
        if not spoilt:
            gc.collect()
            stepped.peak_mib = _peak_mib(device)
            devices.empty_cache(device)
        yield case, (stepped, failure)
        if spoilt:
            return


def _computes(device: torch.device) -> bool:
    from torchtraceap.collect import devices

    try:
        devices.compute(device)
    except RuntimeError:
        return False
    return True


def _step_ms(spec: ModelSpec, case: Case, device: torch.device) -> float:
    """Take a step to warm up and a second one, in milliseconds.

    Raises:
        RuntimeError: The loss of one is not finite; or at inference, some of its outputs.
        Whatever the model raises.
    """
    from torchtraceap.collect import devices
    from torchtraceap.collect.loop import TrainingLoop

    class Loop(TrainingLoop):
        """Without loader workers, which must not be forked once the case before has computed."""

        def make_loader(self, **changes: Any) -> Any:
            return super().make_loader(**{"workers": 0} | changes)

    loop = Loop(spec, case.mode, case.batch_size, device, secret="", seed=0)
    with closing(loop):
        _require_finite(loop.step(), case.mode)
        devices.synchronize(device)
        begin = time.perf_counter()
        state = loop.step()
        devices.synchronize(device)
        step_ms = round((time.perf_counter() - begin) * 1e3, 3)
        _require_finite(state, case.mode)  # in training it shows what the gradients of the first were
    return step_ms


def _require_finite(state: State, mode: Mode) -> None:
    """Raise RuntimeError unless the loss of a step is finite, or at inference all of its outputs."""
    import torch
    from torch.utils._pytree import tree_leaves

    if mode == "train":
        if not math.isfinite(loss := state.loss.item()):
            raise RuntimeError(f"the loss is {loss}")
        return
    tensors = [leaf for leaf in tree_leaves(state.output) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise RuntimeError("no tensor is among the outputs")
    infinite = sum(int(tensor.isinf().sum()) for tensor in tensors)
    undefined = sum(int(tensor.isnan().sum()) for tensor in tensors)
    if infinite or undefined:
        count = sum(tensor.numel() for tensor in tensors)
        raise RuntimeError(f"of {count} outputs {undefined} are not a number and {infinite} infinite")


def _peak_mib(device: torch.device) -> float:
    from torchtraceap.collect import devices

    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return round(peak / MIB if sys.platform == "darwin" else peak / 1024, 1)
    return round(devices.take_peak(device) / MIB, 1)
