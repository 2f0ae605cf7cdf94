"""DeepSeek-V4 inference in pure functional JAX.

For research: `load`, `init`, `prefill`, `decode` and `logit_lens` (see `ds4jax.functional`), with
`RuntimeConfig` for precision and capacity. Public names are imported on first use, so that
`import ds4jax` alone (and with it `inspect`, `tokenize` and every report of a bad file) does not
import JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "load": "functional",
    "init": "functional",
    "prefill": "functional",
    "decode": "functional",
    "logit_lens": "functional",
    "ModelConfig": "config",
    "RuntimeConfig": "config",
    "SamplingParams": "config",
    "StoppingCriteria": "config",
    "ModelFileError": "errors",
    "Client": "client",
    "AsyncClient": "client",
}
"""Public name -> submodule that defines it."""

_MODULES = frozenset({"cache", "config", "engine", "functional", "model", "params", "quant"})
"""Submodules reachable as attributes of the package."""

__all__ = [*_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"ds4jax.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"ds4jax.{name}")
    raise AttributeError(f"module 'ds4jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
