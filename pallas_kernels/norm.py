"""Root-mean-square normalisation. The reference; kernels fuse it into their neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x_TM: Array, weight_M: Array | None, *, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, one cast at the end.

    Args:
        x_TM: any leading axes, float32 or bfloat16.
        weight_M: float32 or bfloat16 [M], or None for the unweighted form (per-head query norm).
        eps: added to the mean square.

    Returns: out_TM, dtype of x_TM.
    Source: architecture of DeepSeek-V4, numerics of the official inference code (RMSNorm rows).
    """
    x = x_TM.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    y = x * scale
    if weight_M is not None:
        y = y * jnp.broadcast_to(weight_M.astype(jnp.float32), y.shape)
    return y.astype(x_TM.dtype)


def silu(x: Array) -> Array:
    """x * sigmoid(x), computed in the dtype given."""
    return x * jax.nn.sigmoid(x)
