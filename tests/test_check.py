"""Which models run: the steps of a check on tiny models, and whole checks through the fork server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import tiny
import torch

from torchtraceap import console
from torchtraceap.cli import main
from torchtraceap.collect import devices, lane
from torchtraceap.collect.check import Case, Check, check, make_checks, read_report, run_request
from torchtraceap.collect.failures import Failed
from torchtraceap.collect.model import ZOO
from torchtraceap.collect.server import WAITING, Request
from torchtraceap.errors import UserError

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
BOTH = [Case("infer", 2), Case("train", 2)]


class Fails(tiny.Classify):
    """Raises what it is given in training, as often as it is told."""

    def __init__(self, error: Exception, times: int = 100) -> None:
        self.error = error
        self.times = times

    def loss(self, output, batch):
        if self.times:
            self.times -= 1
            raise self.error
        return super().loss(output, batch)


class NotANumber(tiny.Classify):
    def loss(self, output, batch):
        return super().loss(output, batch) * torch.nan


class Outputs(tiny.Classify):
    """Predicts what it is given."""

    def __init__(self, outputs: object) -> None:
        self.outputs = outputs

    def forward(self, model, batch, training):
        return super().forward(model, batch, training) if training else self.outputs


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Check a tiny model with an adapter, in this process."""

    def run(adapter=None, cases=BOTH, gate="", said=None):
        monkeypatch.setitem(ZOO._entries, "tiny/net", tiny.spec(adapter=adapter))
        arguments = msgspec.Raw(msgspec.json.encode(Check("tiny/net", cases)))
        request = Request("check", arguments, "cpu", 60.0, scratch="", gate=gate)
        return run_request(request, (said if said is not None else []).append)

    return run


def test_a_model_steps_in_every_case(run) -> None:
    said: list[str] = []
    result = run(said=said)
    assert said == ["building", "infer at batch 2", "train at batch 2"]
    assert [(case["mode"], case["batch_size"], case["error"]) for case in result["cases"]] == [
        ("infer", 2, ""),
        ("train", 2, ""),
    ]
    assert all(case["step_ms"] > 0 and case["peak_mib"] > 0 for case in result["cases"])
    assert not result["alone"]


def test_what_fails_in_training_is_said_and_the_rest_is_kept(run) -> None:
    with pytest.raises(Failed) as caught:
        run(Fails(ValueError("no\nsecond line")), [*BOTH, Case("train", 4)])
    failure = caught.value.failure
    assert failure.error == "train at batch 2, train at batch 4: ValueError: no"
    assert failure.kind == "error"
    assert failure.result is not None
    assert [bool(case["error"]) for case in failure.result["cases"]] == [False, True, True]


def test_a_loss_that_is_no_number_is_a_failure(run) -> None:
    with pytest.raises(Failed, match="train at batch 2: RuntimeError: the loss is nan"):
        run(NotANumber())


def test_a_loss_that_is_no_number_after_an_update_is_a_failure(run) -> None:
    class Bursts(tiny.Classify):
        def loss(self, output, batch):
            loss = super().loss(output, batch)
            return loss + (loss - loss.detach()).sqrt()  # of 0, whose gradient is infinite

    with pytest.raises(Failed, match="train at batch 2: RuntimeError: the loss is nan"):
        run(Bursts())


@pytest.mark.parametrize(
    ("outputs", "fault"),
    [
        ({"logits": torch.tensor([1.0, torch.nan, -torch.inf]), "classes": torch.tensor([3])},
         "of 4 outputs 1 are not a number and 1 infinite"),
        ("an image", "no tensor is among the outputs"),
    ],
)  # fmt: skip
def test_outputs_that_are_no_numbers_are_a_failure(run, outputs: object, fault: str) -> None:
    with pytest.raises(Failed) as caught:
        run(Outputs(outputs))
    assert caught.value.failure.error == f"infer at batch 2: RuntimeError: {fault}"


def test_a_detector_may_find_nothing(run) -> None:
    run(Outputs([{"boxes": torch.empty(0, 4), "labels": torch.empty(0, dtype=torch.int64)}]))


def test_what_does_not_fit_beside_others_is_tried_alone(run, tmp_path: Path) -> None:
    said: list[str] = []
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    result = run(Fails(error, times=1), gate=str(tmp_path / "lock"), said=said)
    assert result["alone"]
    assert [(case["mode"], case["error"]) for case in result["cases"]] == [("infer", ""), ("train", "")]
    assert said == ["building", WAITING, "infer at batch 2", "train at batch 2", WAITING, "train at batch 2"]
    with pytest.raises(Failed, match="train at batch 2: RuntimeError: CUDA out of memory"):
        run(Fails(error), gate=str(tmp_path / "lock"))


def test_nothing_is_tried_in_a_spoilt_context(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(devices, "compute", fail)
    with pytest.raises(Failed) as caught:
        run(Fails(RuntimeError("CUDA error: an illegal memory access")), [*BOTH, Case("infer", 4)])
    assert caught.value.failure.kind == "device"
    assert caught.value.failure.result is not None
    assert len(caught.value.failure.result["cases"]) == 2
    monkeypatch.undo()  # a library that refused its arguments has spoilt nothing
    with pytest.raises(Failed) as caught:
        run(Fails(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")), [*BOTH, Case("infer", 4)])
    assert caught.value.failure.result is not None
    assert len(caught.value.failure.result["cases"]) == 3


def test_cases_are_the_smallest_and_on_a_gpu_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "gpu": {"train": (64, 32, 128), "infer": (1, 128)},
        "cpu": {"train": (2, 4), "infer": (1,)},
    }
    monkeypatch.setitem(ZOO._entries, "tiny/net", replace(tiny.spec(), batch_sizes=sizes))
    (one,) = make_checks(["tiny/net"], device_type="cuda")
    assert [str(case) for case in one.cases] == [
        "train at batch 32",
        "train at batch 128",
        "infer at batch 1",
        "infer at batch 128",
    ]
    (one,) = make_checks(["tiny/net"], device_type="cpu", modes=["train"])
    assert one.cases == [Case("train", 2)]


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of models that the fake server knows what to do with, and one that does not run on a CPU."""
    monkeypatch.setattr(lane, "SERVER", (sys.executable, FAKE_SERVER))
    nowhere = {"gpu": {"train": (), "infer": (1,)}, "cpu": {"train": (), "infer": ()}}
    names = [f"tiny/{name}" for name in ("ok", "error", "half", "killed", "gpu")]
    for name in names:
        spec = tiny.spec(name=name)
        monkeypatch.setitem(
            ZOO._entries, name, replace(spec, batch_sizes=nowhere) if name == "tiny/gpu" else spec
        )
    return names


def test_every_model_is_in_the_report(zoo: list[str], tmp_path: Path) -> None:
    report, ran = check(zoo, tmp_path, devices=["cpu"], device_type="cpu")
    assert {one.model: (one.state, one.reason) for one in report.models} == {
        "tiny/error": ("failed", r"ValueError: [red]no\x1b[2J\u202e good\ud800 [/red] (infer at batch 4)"),
        "tiny/gpu": ("not run", "its row has no batch size for such a device"),
        "tiny/half": ("failed", "train at batch 4: no"),
        "tiny/killed": ("failed", report.models[3].reason),
        "tiny/ok": ("passed", ""),
    }
    assert report.models[3].reason.startswith(
        "killed by SIGKILL (out of memory?), for the second time (pids "
    )
    assert report.models[2].cases == report.models[4].cases
    assert (report.models[4].build_s, report.models[4].cases[0].step_ms) == (0.5, 1.5)
    assert len(ran.failed) == 3
    assert read_report(tmp_path / "check.json") == report


def test_resume_tries_again_what_failed_and_starts_what_was_left(zoo: list[str], tmp_path: Path) -> None:
    report, _ = check(zoo[:2], tmp_path, devices=["cpu"], device_type="cpu", budget=-1.0)
    assert [one.state for one in report.models] == ["left", "left"]
    check(zoo[:2], tmp_path, devices=["cpu"], device_type="cpu", resume=True)
    report, ran = check(zoo[:2], tmp_path, devices=["cpu"], device_type="cpu", resume=True)
    assert (ran.skipped, list(ran.failed)) == (["tiny-ok"], ["tiny-error"])
    assert [one.state for one in report.models] == ["failed", "passed"]


def test_the_command(zoo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [word for name in zoo[:2] for word in ("--model", name)]
    console.err.cache_clear()
    elsewhere = ["--model", "tiny/gpu"]  # is not counted among those to do
    assert main(["zoo", "check", "-o", str(tmp_path / "a"), "--device", "cpu", *chosen, *elsewhere]) == 1
    text, told = capsys.readouterr()
    assert "[1/2] tiny-error: failed" in told
    assert "1 passed, 1 failed, 0 left, 1 not run" in text
    assert r"ValueError: [red]no\x1b[2J" in text
    assert main(["zoo", "check", "-o", str(tmp_path / "b"), "--device", "cpu", *chosen[:2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["state"] == "passed"
    assert main(["zoo", "check", "-o", str(tmp_path / "c"), "--task", "pose", *chosen]) == 2
    assert main(["zoo", "check", "-o", str(tmp_path / "c"), "--device", "cpu", "--model", "tiny/gpu"]) == 2
    assert not (tmp_path / "c").exists()


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text('{"device": 3}')
    with pytest.raises(UserError, match="was not written by `traceap zoo check`"):
        read_report(tmp_path / "check.json")
