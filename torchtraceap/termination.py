"""Ending in order on SIGTERM, which batch systems send before they kill."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM asked this process to end; what ends in order on Ctrl-C does so on this too."""


@contextmanager
def terminable() -> Iterator[threading.Event]:
    """Let SIGTERM raise :class:`Terminated` in the block, and set the event that is yielded."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield asked
        return

    def end(number: int, frame: object) -> None:
        asked.set()
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
