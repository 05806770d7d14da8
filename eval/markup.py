"""Untrusted text (event names, ids, cards) in HTML and SVG."""

from __future__ import annotations

import html
import itertools
import re
import unicodedata

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # controls; XML 1.0 cannot hold most of them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction of the text around them
    "\ud800-\udfff\ufffe\uffff]"  # no characters
)

MAX_MARKS = 4
"""Accents and the like on one character; no script needs more, and a pile of them covers the lines around."""


def visible(text: object, limit: int = 200) -> str:
    """Text on one line of at most ``limit`` characters, with what cannot or must not be shown replaced."""
    line = _UNSAFE.sub("\ufffd", str(text))
    if not line.isascii():
        runs = itertools.groupby(line, key=lambda character: unicodedata.category(character)[0] == "M")
        line = "".join("".join(itertools.islice(run, MAX_MARKS if marks else None)) for marks, run in runs)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escaped(text: object, limit: int = 200) -> str:
    """:func:`visible`, for element content and quoted attributes of HTML and XML."""
    return html.escape(visible(text, limit))
