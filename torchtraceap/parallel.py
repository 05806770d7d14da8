"""The same function on many items: here, in processes of this machine, or on a Ray cluster.

What goes to another process is pickled by the standard library or by Ray, on the way between processes of one
user. Nothing that comes from outside is ever unpickled.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torchtraceap.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2
"""Items that are under way for each process, so that none waits for its next."""


CONNECT_SECONDS = 10.0


class Where(NamedTuple):
    """Where :func:`map_on` works: in ``jobs`` processes of this machine, or on the cluster at ``ray``."""

    jobs: int = 1
    ray: str = ""


HERE = Where()


def map_on(where: Where, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Apply ``function`` to every item and yield the results in the order of ``items``.

    With one job and no cluster it is ``map``. On a cluster each item is a task of one CPU, which Ray runs
    again if its node is lost; paths in the items must mean the same on all nodes.

    Args:
        where: See :class:`Where`.
        function: A function of a module (or a ``functools.partial`` of one) that may run twice on an item.
        items: Read as far as there is room for.

    Raises:
        UserError: As ``function`` raises it; or a process was killed, or the cluster cannot be reached.
    """
    if where.ray:
        return _on_ray(where.ray, function, items)
    if where.jobs > 1:
        return _in_processes(where.jobs, function, items)
    return map(function, items)


def _in_processes(jobs: int, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Not forked: threads of Arrow and NumPy would not be there in the children, their locks would.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin_process)
    try:
        yield from _windowed(
            jobs * AHEAD, lambda item: pool.submit(function, item), lambda future: future.result(), items
        )
    except BrokenProcessPool:
        raise UserError("a process was killed (out of memory?): try fewer --jobs") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    """Let the parent alone say when a process of the pool ends.

    Ctrl-C reaches the whole group and is ignored here. Of a parent that was killed the queue says nothing,
    as all processes hold both of its ends.
    """
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _on_ray(address: str, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    with connected(address) as ray:
        task = ray.remote(num_cpus=1)(function)
        room = max(1, int(ray.cluster_resources().get("CPU", 0))) * AHEAD
        try:
            yield from _windowed(room, task.remote, ray.get, items)
        except ray.exceptions.RayTaskError as error:
            raise user_error(error) from None
        except ray.exceptions.RayError as error:
            raise UserError(f"Ray gave up: {first_line(error)}") from None


def _windowed(
    room: int, submit: Callable[[Any], Any], result: Callable[[Any], Result], items: Iterable[Any]
) -> Iterator[Result]:
    """Results in order, of never more than ``room`` items at once."""
    source = iter(items)
    pending = deque(submit(item) for item in itertools.islice(source, room))
    while pending:
        yield result(pending.popleft())
        pending.extend(submit(item) for item in itertools.islice(source, 1))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ``ray``, connected to the cluster at ``address`` while the block runs.

    Args:
        address: ``auto`` for the one that this machine is part of, ``HOST:PORT``, ``ray://HOST:PORT``, or
            ``local`` for one of this machine alone, which ends with the block.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--ray needs Ray: pip install 'torchtraceap[scale]'") from None
    _require_listener(address)
    if address == "local":  # which else writes a token into the home folder
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises bare ones too
        raise UserError(f"--ray {address}: {first_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Ask at ``HOST:PORT`` first: Ray tries for minutes to reach what is not there, without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: nobody answers there ({error})") from None


def user_error(error: Any) -> Exception:
    """What to raise for a task that raised: its own error, if that is one that a user can mend.

    Args:
        error: A ``ray.exceptions.RayTaskError``.
    """
    cause = error.cause
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ImportError):
        return UserError(f"a node of the cluster lacks something ({cause}): install the same there as here")
    return RuntimeError(f"a task on the cluster failed:\n{error}")


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
