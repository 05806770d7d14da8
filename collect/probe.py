"""Whether a device works: asked after a workload failed on it, in a process of its own as workloads are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtraceap.collect.server import Request

TIME_LIMIT = 60.0
"""Seconds that a device may take to answer."""


def run_request(request: Request, progress: Callable[[str], None]) -> dict[str, Any]:
    """Compute something on the device.

    Raises:
        Whatever the device is not able to.
    """
    from torchtraceap.collect import devices

    devices.compute(devices.prepare(request.device))
    return {}
