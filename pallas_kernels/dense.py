"""Product of rows with one weight matrix, packed or plain: y[t, n] = sum_k x[t, k] w[n, k].

A row's bits depend on that row and the weights alone: whatever the number of rows, products run on
row tiles of one height with one order of K.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import backend as backend_lib
from pallas_kernels import packing
from pallas_kernels.backend import Backend
from pallas_kernels.packing import QuantArray

ROW_TILE = 8
"""Rows of one product in the reference."""


def dense(
    x_TK: Array,
    w: QuantArray | Array,
    *,
    layer: int | Array | None = None,
    backend: Backend,
    out_dtype: Any = None,
) -> Array:
    """x @ w^T, accumulated in float32.

    Args:
      x_TK: activations, bfloat16 or float32.
      w: [N, K], or [L, N, K] with `layer`; a QuantArray, or a bfloat16 or float32 array.
      layer: which of L (an int or an int32 scalar).
      backend: "reference", "interpret" or "triton".
      out_dtype: dtype of the result; None: that of x.
    Returns: y_TN.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
      this format or dtype.
    """
    backend = backend_lib.require("dense", backend)
    lead = w.shape[:-2]
    if x_TK.ndim != 2 or x_TK.shape[1] != w.shape[-1] or len(lead) != (layer is not None):
        raise ValueError(
            f"dense: x {list(x_TK.shape)} and w {list(w.shape)} do not fit"
            f" ({'one' if layer is not None else 'no'} leading axis of w expected)"
        )
    if backend == "reference":
        return reference(x_TK, w, layer=layer, out_dtype=out_dtype)
    raise NotImplementedError("dense: no kernel")


def reference(
    x_TK: Array, w: QuantArray | Array, *, layer: int | Array | None = None, out_dtype: Any = None
) -> Array:
    """The definition: weights in float32, products of eight rows."""
    w_NK = matrix(w, layer)
    rows = x_TK.shape[0]
    tiles = -(-rows // ROW_TILE)
    x = jnp.pad(x_TK, ((0, tiles * ROW_TILE - rows), (0, 0)))
    if tiles == 1:
        y = product(x, w_NK)
    else:
        y = lax.map(lambda tile: product(tile, w_NK), x.reshape(tiles, ROW_TILE, -1))
        y = y.reshape(tiles * ROW_TILE, -1)
    return y[:rows].astype(out_dtype or x_TK.dtype)


def matrix(w: QuantArray | Array, layer: int | Array | None) -> Array:
    """`w`, or its layer, as a plain array; packed weights become float32."""
    if isinstance(w, QuantArray):
        return packing.unpack(w if layer is None else packing.index(w, layer))
    return jnp.asarray(w if layer is None else w[layer])


def product(x_TK: Array, w_NK: Array) -> Array:
    """x @ w^T in float32 (products of bfloat16 values are exact in float32)."""
    return lax.dot_general(
        x_TK.astype(jnp.float32),
        w_NK.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
