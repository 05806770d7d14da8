"""Markers: the annotations that say, while a profile is made, where an injector could act and where it did.

Every candidate place is wrapped in one, whether it acts or not. A profile with markers is taken for its
labels alone: these are carried over to one without (``collect/transfer.py``), which is published.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "ttap-"
"""No published event name starts so; `build` refuses one that does."""


class Marker(NamedTuple):
    """``placement`` counts the injections of a workload, ``site`` the candidate places of one."""

    placement: int
    site: int
    on: bool


def marker_name(secret: str, marker: Marker) -> str:
    """The annotation's text. ``secret`` is drawn anew for each session: no other annotation equals it."""
    return f"{PREFIX}{secret}/{marker.placement}/{marker.site}/{int(marker.on)}"


def parse_marker(secret: str, name: str) -> Marker | None:
    """The marker that ``name`` stands for, or None if it is none of this session's."""
    head = f"{PREFIX}{secret}/"
    if not name.startswith(head):
        return None
    placement, site, on = name[len(head) :].split("/")
    return Marker(int(placement), int(site), on == "1")
