"""Whose turn it is on a device that several processes want."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from torchtraceap.collect.cores import Cores, confine
from torchtraceap.collect.processes import locked
from torchtraceap.collect.server import WAITING


class Turn:
    """A workload's turn on a device; without a gate nobody else wants it.

    What is not timed may share the device with what others do not time. Given ``cores``, the process has
    those of what is timed while it has the device alone, and else those of all the rest.
    """

    def __init__(
        self, gate: Path | None, progress: Callable[[str], None], cores: Cores | None = None
    ) -> None:
        self._gate = gate
        self._progress = progress
        self._cores = cores
        self._held = ExitStack()
        if cores is not None:
            confine(cores.others)

    def take(self, *, shared: bool = False) -> None:
        """Say that one waits for it, and wait; it must not be held."""
        if self._gate is not None:
            self._progress(WAITING)
            self._held.enter_context(locked(self._gate, shared=shared))
            if self._cores is not None and not shared:
                self._held.callback(confine, self._cores.others)  # before the next may be there
                confine(self._cores.timed)

    def close(self) -> None:
        """Let others have it, until it is taken again."""
        self._held.close()

    @property
    def timed_cores(self) -> int | None:
        """How many logical CPUs are kept for what is timed; None if none are."""
        return None if self._cores is None else len(self._cores.timed)

    @contextmanager
    def taken(self, *, shared: bool = False) -> Iterator[None]:
        """Have it while the block runs."""
        self.take(shared=shared)
        with closing(self):
            yield
