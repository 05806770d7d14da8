"""Locks that processes take turns by."""

from __future__ import annotations

import threading
from pathlib import Path

from torchtraceap.collect.processes import locked

SECONDS = 20
"""More than anything here takes."""


class Taker:
    """A thread that takes the lock, notes its name, and has the lock until it is told to end."""

    def __init__(self, path: Path, name: str, taken: list[str], *, shared: bool) -> None:
        self.has, self.may_end = threading.Event(), threading.Event()

        def take() -> None:
            with locked(path, shared=shared):
                taken.append(name)
                self.has.set()
                self.may_end.wait(SECONDS)

        self.thread = threading.Thread(target=take, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.may_end.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def test_who_wants_a_lock_alone_goes_first_and_the_others_have_it_together(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    taken: list[str] = []
    first = Taker(path, "first", taken, shared=False)
    assert first.has.wait(SECONDS)
    sharing = [Taker(path, name, taken, shared=True) for name in ("left", "right")]
    assert not any(one.has.wait(0.1) for one in sharing)
    alone = Taker(path, "alone", taken, shared=False)
    assert not alone.has.wait(0.1)
    first.end()
    assert alone.has.wait(SECONDS)
    assert not any(one.has.wait(0.1) for one in sharing)
    alone.end()
    assert all(one.has.wait(SECONDS) for one in sharing)  # both before either ends
    last = Taker(path, "last", taken, shared=False)
    assert not last.has.wait(0.1)
    late = Taker(path, "late", taken, shared=True)
    assert not late.has.wait(0.1)
    for one in sharing:
        one.end()
    assert last.has.wait(SECONDS)
    last.end()
    assert late.has.wait(SECONDS)
    late.end()
    assert (taken[:2], set(taken[2:4]), taken[4:]) == (
        ["first", "alone"],
        {"left", "right"},
        ["last", "late"],
    )
