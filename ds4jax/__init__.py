"""DeepSeek-V4 inference in pure functional JAX.

Public names are imported on first use, so that `import ds4jax` alone (and with it the command line,
`inspect`, `tokenize` and every report of a bad file) does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = frozenset({"config", "quant"})
"""Submodules reachable as attributes of the package."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ds4jax.{name}")
    raise AttributeError(f"module 'ds4jax' has no attribute {name!r}")
