"""PyTorch profiler traces of vision models with measured performance anti-patterns.

Subpackages: ``labels`` (the anti-patterns), ``dataset`` (tables), ``collect`` (needs torch), ``eval``.
"""

__version__ = "0.1.0"
