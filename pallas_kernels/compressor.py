"""Compression of the history: one pooled row per `ratio` tokens, weighted per channel by gates."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels import norm, rope


def overlap(ratio: int) -> int:
    """Windows that one row pools: 2 for ratio 4 (the previous one too), else 1."""
    return 2 if ratio == 4 else 1


def pool(values_TWC: Array, gates_TWC: Array, valid_TW: Array, *, ratio: int) -> Array:
    """Pooled row of the group of `ratio` tokens that ends at each row's own position.

    Args:
        values_TWC, gates_TWC: float32, the projections of the last overlap * ratio positions in
            ascending order, C = overlap * dim; gates with their position term already added.
        valid_TW: False for positions below 0 (weight 0).
        ratio: tokens per row.

    Returns: row_TD float32, D = dim. With overlap, the older window gives the leading half of its
        channels and the newer one the trailing half, in one softmax over both.
    Source: architecture of DeepSeek-V4, compressor.
    """
    width = values_TWC.shape[-1]
    if overlap(ratio) == 2:
        dim = width // 2
        values_TWC = jnp.concatenate(
            [values_TWC[:, :ratio, :dim], values_TWC[:, ratio:, dim:]], axis=1
        )
        gates_TWC = jnp.concatenate(
            [gates_TWC[:, :ratio, :dim], gates_TWC[:, ratio:, dim:]], axis=1
        )
    gates = jnp.where(valid_TW[:, :, None], gates_TWC, -jnp.inf)
    weight = jnp.exp(gates - jnp.max(gates, axis=1, keepdims=True))
    values = jnp.where(valid_TW[:, :, None], values_TWC, 0.0)
    return jnp.sum(weight * values, axis=1) / jnp.sum(weight, axis=1)


def finish(row_TD: Array, norm_D: Array, cs_TR: Array, *, eps: float, dtype: jnp.dtype) -> Array:
    """Normalise a pooled row and rotate it to the position of its first token.

    Args:
        row_TD: float32 from `pool`. norm_D: weight. cs_TR: angles of position w * ratio.
        dtype: compute dtype, to which the row is cast before the norm.

    Returns: row_TD in `dtype`.
    """
    return rope.rotate(norm.rms_norm(row_TD.astype(dtype), norm_D, eps=eps), cs_TR)
