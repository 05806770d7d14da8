"""Names of devices, and what is told of the machine."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.profiler import ProfilerActivity

from torchtraceap.collect import devices
from torchtraceap.dataset.schema import HARDWARE
from torchtraceap.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("without_accelerator")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "gpu", "", "cpu:1", "cuda:-1", "meta", "a\nb"])
def test_no_such_device(name: str) -> None:
    with pytest.raises(UserError) as raised:
        devices.resolve(name)
    assert str(raised.value) == f"no device {name!r}; here are: cpu"
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("without_accelerator")
def test_cpu() -> None:
    assert devices.resolve("auto").type == "cpu"
    assert devices.resolve("cpu").type == "cpu"
    devices.synchronize(CPU)
    assert devices.activities(CPU) == [ProfilerActivity.CPU]


@pytest.mark.usefixtures("two_gpus")
def test_groups_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(map(str, devices.groups("auto"))) == ["cuda:0", "cuda:1"]
    assert list(map(str, devices.groups("auto", 2))) == ["cuda:0"]
    assert list(map(str, devices.groups("cuda:1"))) == ["cuda:1"]
    assert list(map(str, devices.groups("cpu", 2))) == ["cpu"]
    for name, size in (("auto", 3), ("cuda:1", 2)):
        with pytest.raises(UserError, match="needs a GPU of its own"):
            devices.groups(name, size)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
    assert list(map(str, devices.groups("auto", 2))) == ["cuda:0", "cuda:2"]


@pytest.mark.usefixtures("two_gpus")
def test_two_gpus() -> None:
    assert devices.resolve("auto") == torch.device("cuda")
    assert devices.resolve("cuda:1") == torch.device("cuda:1")
    assert devices.resolve("cpu").type == "cpu"
    for name in ("cuda:2", "xpu"):
        with pytest.raises(UserError, match="here are: cpu, cuda:0, cuda:1"):
            devices.resolve(name)
    assert devices.activities(torch.device("cuda:1")) == [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def test_hardware_is_a_row_of_its_table() -> None:
    row = devices.hardware(CPU)
    assert set(row) == set(HARDWARE.names)
    table = pa.Table.from_pylist([row], schema=HARDWARE)
    assert all(table.column(name).null_count == 0 for name in HARDWARE.names)
    assert row["device_kind"] == "cpu"
    assert row["cpu_cores"] >= 1
    assert row["ram_gib"] > 0
    assert json.loads(row["libraries"])["torch"].split("+")[0] == row["torch"].split("+")[0]
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+c-[0-9a-f]{6}", row["hardware_id"])
    assert devices.hardware(CPU) == row


def test_hardware_ids_tell_software_and_counts_apart() -> None:
    row: dict[str, Any] = devices.hardware(CPU) | {"device_kind": "cuda", "device_name": "NVIDIA H200"}
    one = devices._hardware_id(row)
    assert re.fullmatch(r"nvidia-h200-[0-9a-f]{6}", one)
    assert devices._hardware_id(row | {"torch": "9.9"}) != one
    assert devices._hardware_id(row | {"driver": "1.2"}) != one
    assert devices._hardware_id(row | {"device_count": 8}).startswith("nvidia-h200-x8-")
    assert devices._hardware_id(row | {"ram_gib": 1.0, "memory_gib": 2.0}) == one  # varies from boot to boot


def test_hardware_says_nothing_of_whose_machine_it_is() -> None:
    import getpass
    import platform

    text = json.dumps(devices.hardware(CPU))
    assert platform.node() not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.usefixtures("two_gpus")
def test_ranks_have_devices_of_their_own() -> None:
    assert devices.of_rank(torch.device("cuda"), 1) == torch.device("cuda:1")
    assert devices.of_rank(torch.device("cuda:1"), 0) == torch.device("cuda:1")
    assert devices.of_rank(CPU, 3) == CPU
    with pytest.raises(
        UserError, match=r"rank 1 needs a GPU of its own: no device 'cuda:2'; here are: cpu, cuda:0, cuda:1"
    ):
        devices.of_rank(torch.device("cuda:1"), 1)
    with pytest.raises(UserError, match="not on xpu"):
        devices.of_rank(torch.device("xpu"), 0)
