"""Templates of the cards: Markdown with Jinja, filled with numbers that the code computes from the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder.

    The filter ``cell`` makes any text safe inside of a table. A value that the template names and the caller
    forgot raises ``jinja2.UndefinedError``.

    Args:
        template: File name, for example ``dataset.md.j2``.
        values: What the template refers to.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown; text from data goes through `cell`
    )
    environment.filters["cell"] = cell
    return environment.get_template(template).render(**values)


def cell(value: object) -> str:
    """``value`` as text that stays in its table cell and is neither HTML nor Markdown."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    for character in "\\`*[]|":
        text = text.replace(character, f"\\{character}")
    return text.replace("<", "&lt;")
