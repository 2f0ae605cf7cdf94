"""Matrix products inside a kernel that add onto a given accumulator: c + a @ b^T and c + a @ b.

Pallas' own dot always starts from zero, and the separate addition makes every product wait for the
matrix unit. Given the accumulator, the compiler chains matrix instructions over the whole loop and
hides them behind the decoding of the next weights. Only for kernels; outside it is plain JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.lib.triton import dialect as triton_dialect  # type: ignore[attr-defined]
from jax._src.pallas.triton import lowering as triton_lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir

_dot_p = Primitive("dot_onto")


def dot_onto(c_MN: Array, a_MK: Array, b_NK: Array) -> Array:
    """c + a @ b^T with float32 accumulation.

    Args: c_MN: float32. a_MK, b_NK: bfloat16; M, N and K multiples of 16.
    Returns: float32 [M, N].
    Raises: ValueError on shapes or dtypes that do not fit.
    """
    return _bind(c_MN, a_MK, b_NK, by_columns=False)


def mix_onto(c_MN: Array, a_MK: Array, b_KN: Array) -> Array:
    """c + a @ b: as `dot_onto`, with b as it lies in memory where it is summed over its rows."""
    return _bind(c_MN, a_MK, b_KN, by_columns=True)


def _bind(c: Array, a: Array, b: Array, *, by_columns: bool) -> Array:
    n, k = b.shape[::-1] if by_columns else b.shape
    fits = a.shape[1] == k and c.shape == (a.shape[0], n)
    if not fits or c.shape[0] % 16 or n % 8 or k % 16:
        raise ValueError(
            f"{'mix_onto' if by_columns else 'dot_onto'}: c {c.shape}, a {a.shape} and b {b.shape}"
            " do not fit (M and K multiples of 16, N of 8)"
        )
    if c.dtype != jnp.float32 or a.dtype != jnp.bfloat16 or b.dtype != jnp.bfloat16:
        raise ValueError(f"dot_onto: dtypes {c.dtype}, {a.dtype}, {b.dtype}")
    out: Array = _dot_p.bind(c, a, b, by_columns=by_columns)
    return out


def _plain(c: Array, a: Array, b: Array, *, by_columns: bool) -> Array:
    contract = ((1,), (0 if by_columns else 1,))
    return c + lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


@_dot_p.def_abstract_eval  # type: ignore[misc]
def _abstract(c: Any, a: Any, b: Any, *, by_columns: bool) -> Any:
    del a, b, by_columns
    return c


_dot_p.def_impl(jax.jit(_plain, static_argnames="by_columns"))
mlir.register_lowering(_dot_p, mlir.lower_fun(_plain, multiple_results=False))


@triton_lowering.register_lowering(_dot_p)
def _to_triton(ctx: Any, c: Any, a: Any, b: Any, *, by_columns: bool) -> Any:
    del ctx
    return triton_dialect.dot(a, b if by_columns else triton_dialect.trans(b, (1, 0)), c)
