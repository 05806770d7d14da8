"""What no text in a data set may hold: markers of the harness, and what tells whose machine made it."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache

from torchtraceap.labels.markers import PREFIX

_PRIVATE = {
    "a path": (
        r"(?<![\w/)>:.-])/(?:home|root|Users|tmp|mnt|media|var|opt|usr|etc|srv|run|proc|dev|private|work\w*"
        r"|data|scratch|nfs|lustre|content|kaggle|app|code|projects?)(?![\w.-])"
        r"|(?<![\w/])~/|\bfile://|(?<!\w)[A-Za-z]:\\\w"
        r"|\b(?:site|dist)-packages\b"
    ),
    "an e-mail address": r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.-]*\w",
    "a network address": (
        r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
        r"|\bip-\d+-\d+-\d+-\d+\b|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"
    ),
    "a host name": r"\b[\w-]+\.(?:local|localdomain|internal|lan|corp|intranet)\b",
    "a process id": r"\b(?:pid|tid|process id|thread id)\s*[=:#]?\s*\d+",
    "an address in memory": r"\b0x[0-9a-fA-F]{7,16}\b",
    "a serial number": r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
}
_SHAPES = re.compile(r"[\d\[\], -]*")
"""Most texts are lists of numbers, which say nothing."""

_COMMON = frozenset({"root", "user", "admin", "ubuntu", "runner", "localhost", "docker", "nobody", "host"})
"""Names of users and hosts that say nothing."""

LINKS = frozenset({"a network address", "a host name", "a serial number"})
"""What a page for people may hold: links, and the canary."""


@cache
def _kinds() -> dict[str, re.Pattern[str]]:
    """Everything private, and the names of this user and host, which mostly are those of the build."""
    kinds = dict(_PRIVATE)
    names = {socket.gethostname().partition(".")[0]}
    with suppress(KeyError, OSError):  # a user without a name
        names.add(getpass.getuser())
    if telling := [name for name in sorted(names) if len(name) > 3 and name.lower() not in _COMMON]:
        kinds["the name of this user or host"] = rf"(?<!\w)(?:{'|'.join(map(re.escape, telling))})(?!\w)"
    return {kind: re.compile(pattern) for kind, pattern in kinds.items()}


def private(texts: Iterable[str], allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """What each of the texts holds that it may not, in words, but for the kinds that are ``allowed``."""
    for text in dict.fromkeys(texts):
        for kind, at in () if _SHAPES.fullmatch(text) else _found(text):
            if kind not in allowed:
                yield f"{kind} in {_cut(text, at)!r}"


@lru_cache(maxsize=1 << 16)  # traces share most of their names
def _found(text: str) -> list[tuple[str, int]]:
    """Each private kind in a text, and where."""
    matches = ((kind, pattern.search(text)) for kind, pattern in _kinds().items())
    return [(kind, match.start()) for kind, match in matches if match]


def markers(texts: Iterable[str]) -> Iterator[str]:
    """Each text with a marker in it."""
    yield from (f"{_cut(text, text.index(PREFIX))!r}" for text in dict.fromkeys(texts) if PREFIX in text)


def _cut(text: str, at: int) -> str:
    return text[max(0, at - 30) : at + 50]
