"""One registry for everything with a name: patterns, models, detectors.

A new entry is one new file in the registry's package; nothing else has to learn about it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Generic, TypeVar

from torchtraceap.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named objects of one kind, imported on first use.

    Args:
        kind: What an entry is called in messages, for example ``"pattern"``.
        base: Class that every entry must be an instance of.
        package: Dotted package whose modules register entries when imported.
    """

    def __init__(self, kind: str, base: type[T], package: str) -> None:
        self.kind = kind
        self._base = base
        self._package = package
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str, entry: T) -> T:
        """Add ``entry`` under ``name``.

        Raises:
            TypeError: ``entry`` is not an instance of the registry's base class.
            ValueError: ``name`` is taken.
        """
        if not isinstance(entry, self._base):
            raise TypeError(f"{self.kind} {name!r} is a {type(entry).__name__}, not a {self._base.__name__}")
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)

    def __getitem__(self, name: str) -> T:
        self._load()
        try:
            return self._entries[name]
        except KeyError:
            raise UserError(self._unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[T]:
        return (self._entries[name] for name in self.names())

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self._package}.{module.name}")
        self._loaded = True

    def _unknown(self, name: str) -> str:
        names = self.names()
        close = difflib.get_close_matches(name, names, n=3)
        if close:
            hint = f"Did you mean {' or '.join(close)}?"
        elif len(names) <= 40:
            hint = f"Available: {', '.join(names) or 'none'}."
        else:
            hint = f"{len(names)} are available; list them with the `list` command."
        return f"Unknown {self.kind} {name!r}. {hint}"
