"""One code path for CUDA, ROCm, XPU, MPS and CPU: everything that depends on the device is here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from torchtraceap.collect.cores import GIVEN
from torchtraceap.errors import UserError

BESIDE_THREADS = 4
"""CPU threads of a workload on an accelerator."""

LIBRARIES = ("torch", "torchvision", "timm", "diffusers", "transformers", "segmentation-models-pytorch")


def resolve(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the accelerator if one works, else the CPU.

    Raises:
        UserError: There is no such device here.
    """
    # current_accelerator() names the backend that torch was built for, whether or not it can be used.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    here = _available(accelerator)
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if f"{device.type}:{device.index or 0}" in (*here, "cpu:0"):
            return device
    raise UserError(f"no device {name!r}; here are: {', '.join(here)}")


def prepare(name: str, rank: int = 0) -> torch.device:
    """The device called ``name``, or the one of ``rank`` beside it, as the one that this process works on.

    Raises:
        UserError: See :func:`of_rank`.
    """
    device = of_rank(resolve(name), rank) if rank else resolve(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
        torch.set_float32_matmul_precision("high")
        # What this process computes on the CPU must leave cores to the one whose step time is measured.
        torch.set_num_threads(min(BESIDE_THREADS, torch.get_num_threads()))
    return device


def groups(name: str, size: int = 1) -> list[torch.device]:
    """The first devices of as many groups of ``size`` as there are; ``auto`` means all, a name one.

    Raises:
        UserError: There is no such device here, or not one for each of ``size`` ranks.
    """
    first = resolve(name)
    of_rank(first, size - 1)
    if name != "auto" or first.type == "cpu":
        return [first]
    count = torch.accelerator.device_count()
    return [torch.device(first.type, start) for start in range(0, count - size + 1, size)]


def of_rank(device: torch.device, rank: int) -> torch.device:
    """The device of a rank whose rank 0 has ``device``: the next ones; a CPU is shared by all.

    Raises:
        UserError: There is none, or ranks of this kind of device cannot reduce their gradients.
    """
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"distributed workloads run on CUDA, ROCm and the CPU, not on {device.type}")
    try:
        return resolve(f"{device.type}:{(device.index or 0) + rank}")
    except UserError as error:
        raise UserError(f"rank {rank} needs a GPU of its own: {error}") from None


def _available(accelerator: torch.device | None) -> list[str]:
    if accelerator is None:
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def compute(device: torch.device) -> None:
    """Compute something there.

    Raises:
        RuntimeError: It cannot: the device is gone, or an earlier error has spoilt this process's context.
    """
    numbers = torch.ones(1024, device=device)
    if numbers.sum().item() != len(numbers):
        raise RuntimeError(f"{device} cannot add")


def take_peak(device: torch.device) -> int:
    """The most bytes that tensors had on an accelerator since the last call; 0 where it does not say."""
    if device.type == "mps":  # it counts no peak
        return 0
    peak = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return peak


def empty_cache(device: torch.device) -> None:
    """Give memory that no tensor has back to the device, for other processes."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler records there."""
    kinds = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA"}
    extra = kinds.get(device.type)
    return [ProfilerActivity.CPU] + ([getattr(ProfilerActivity, extra)] if extra else [])


def hardware(device: torch.device, count: int = 1) -> dict[str, Any]:
    """A row of the table ``hardware`` (``schema.HARDWARE``).

    Args:
        device: The device of a workload, or the first of those of its ranks.
        count: How many the workload has; what else is in the machine, it does not use.
    """
    import psutil

    cpu = _cpu_name()
    row: dict[str, Any] = {
        "device_kind": "cpu",
        "device_name": cpu,
        "device_count": 1,
        "compute_units": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "driver": "",
        "runtime": "",
        "cpu_name": cpu,
        "cpu_cores": len(GIVEN),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "libraries": json.dumps({name: version for name in LIBRARIES if (version := _version(name))}),
        "emulated": False,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hip = torch.version.hip
        row |= {
            "device_kind": "rocm" if hip else "cuda",
            "device_name": properties.name,
            "device_count": count,
            "compute_units": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _cuda_driver(),
            "runtime": f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}",
        }
    elif device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        row |= {
            "device_kind": "xpu",
            "device_name": xpu.name,
            "device_count": count,
            "compute_units": xpu.max_compute_units,
            "memory_gib": round(xpu.total_memory / 2**30, 1),
            "driver": xpu.driver_version,
        }
    elif device.type != "cpu":
        row |= {"device_kind": device.type, "device_name": device.type, "compute_units": 0}
    row["hardware_id"] = _hardware_id(row)
    return row


def _hardware_id(row: dict[str, Any]) -> str:
    """A slug that is equal on equal machines with equal software: the device, and a digest of the rest."""
    name = re.sub(r"[^a-z0-9]+", "-", str(row["device_name"]).lower()).strip("-")
    if row["device_kind"] == "cpu":
        name = f"cpu-{name}-{row['cpu_cores']}c"
    elif row["device_count"] > 1:
        name = f"{name}-x{row['device_count']}"
    # Software changes traces as much as hardware does: another torch or driver is another id.
    identity = [row[key] for key in sorted(row) if key not in ("memory_gib", "ram_gib")]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:6]
    return f"{name}-{digest}"


def _cpu_name() -> str:
    found = re.search(r"^model name\s*: (.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def _cuda_driver() -> str:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read("/proc/driver/nvidia/version"))
    return found.group(1) if found else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
