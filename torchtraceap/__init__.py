"""PyTorch profiler traces of vision models with measured performance anti-patterns.

Subpackages: ``labels`` (the anti-patterns), ``dataset`` (tables), ``collect`` (needs torch), ``eval``.
"""

from pathlib import Path

__version__ = "0.2.0"

# In a checkout the subpackages lie beside this folder, as pyproject.toml maps them. An editable installation
# knows; any other fails on them when Python runs in the checkout and so finds this file before its own.
_root = Path(__file__).parent.parent
if (_root / "labels" / "pattern.py").is_file():
    __path__.append(str(_root))
del _root, Path
