"""Matrix product inside a kernel that adds onto a given accumulator: c + a @ b^T.

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
    fits = a_MK.shape[1] == b_NK.shape[1] and c_MN.shape == (a_MK.shape[0], b_NK.shape[0])
    if not fits or any(n % 16 for n in (*c_MN.shape, a_MK.shape[1])):
        raise ValueError(
            f"dot_onto: c {c_MN.shape}, a {a_MK.shape} and b {b_NK.shape} do not fit"
            " (multiples of 16 needed)"
        )
    if c_MN.dtype != jnp.float32 or a_MK.dtype != jnp.bfloat16 or b_NK.dtype != jnp.bfloat16:
        raise ValueError(f"dot_onto: dtypes {c_MN.dtype}, {a_MK.dtype}, {b_NK.dtype}")
    out: Array = _dot_p.bind(c_MN, a_MK, b_NK)
    return out


def _plain(c_MN: Array, a_MK: Array, b_NK: Array) -> Array:
    return c_MN + lax.dot_general(
        a_MK, b_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


@_dot_p.def_abstract_eval  # type: ignore[misc]
def _abstract(c_MN: Any, a_MK: Any, b_NK: Any) -> Any:
    del a_MK, b_NK
    return c_MN


_dot_p.def_impl(jax.jit(_plain))
mlir.register_lowering(_dot_p, mlir.lower_fun(_plain, multiple_results=False))


@triton_lowering.register_lowering(_dot_p)
def _to_triton(ctx: Any, c_MN: Any, a_MK: Any, b_NK: Any) -> Any:
    del ctx
    return triton_dialect.dot(a_MK, triton_dialect.trans(b_NK, (1, 0)), c_MN)
