"""`jax.jit` for programs that run a few times: compiling them well takes longer than it saves.

Their bits may be other ones than those of what `jax.jit` makes: compare them with each other only.
On a GPU, where tests are about what the compiler really makes, this is `jax.jit`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from ds4jax import evaluate

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones do not have it
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


_plain = jax.jit  # tests may put `jit` in its place


def jit(fn: Any, **kwargs: Any) -> Any:
    """As `jax.jit`."""
    if jax.default_backend() != "cpu":
        return _plain(fn, **kwargs)
    return _plain(fn, compiler_options=OPTIONS, **kwargs)


@functools.cache
def evaluator_step() -> Any:
    """What `Evaluator` runs; put it in the place of `evaluate._step`."""
    static = ("cfg", "run", "bucket")
    return jit(evaluate._step.__wrapped__, static_argnames=static, donate_argnums=1)
