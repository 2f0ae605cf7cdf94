"""Simulated storage of the official inference code: FP8 rows, Hadamard + FP4 index vectors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

FP8_MAX = 448.0
FP8_GROUP = 64
FP4_GROUP = 32


def _exp2_ceil_log2(x: Array) -> Array:
    """2^ceil(log2(x)) for positive normal float32 x, exact (on the bits, not by a logarithm)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def fp8_round_trip(x: Array, channels: int) -> Array:
    """Round the first `channels` of the last axis to FP8-E4M3 in groups of 64 (the last: the rest).

    s = 2^ceil(log2(max(amax, 1e-4) / 448)), v -> e4m3(clamp(v / s)) * s. Other channels are kept.

    Returns: same shape and dtype as x.
    """
    groups = []
    for start in range(0, channels, FP8_GROUP):
        v = x[..., start : min(start + FP8_GROUP, channels)].astype(jnp.float32)
        amax = jnp.maximum(jnp.max(jnp.abs(v), axis=-1, keepdims=True), 1e-4)
        s = _exp2_ceil_log2(amax / FP8_MAX)
        q = jnp.clip(v / s, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
        groups.append((q.astype(jnp.float32) * s).astype(x.dtype))
    return jnp.concatenate([*groups, x[..., channels:]], axis=-1)


def hadamard(x: Array) -> Array:
    """Multiply the last axis by the Sylvester Hadamard matrix scaled by dim^-0.5; float32."""
    dim = x.shape[-1]
    y = x.astype(jnp.float32).reshape(-1, dim)
    h = 1
    while h < dim:
        y = y.reshape(-1, dim // (2 * h), 2, h)
        y = jnp.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], axis=2)
        h *= 2
    return y.reshape(x.shape) * np.float32(dim**-0.5)


def fp4_round_trip(x: Array) -> Array:
    """Round the last axis to FP4-E2M1 in groups of 32, s = 2^ceil(log2(amax / 6)).

    Ties go to the even code, zero groups stay zero. Returns: same shape and dtype as x.
    """
    v = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, FP4_GROUP)
    amax = jnp.max(jnp.abs(v), axis=-1, keepdims=True)
    s = jnp.where(amax > 0, _exp2_ceil_log2(jnp.maximum(amax / 6.0, 2.0**-126)), 1.0)
    a = jnp.abs(v / s)
    step = jnp.where(a < 2.0, 0.5, jnp.where(a < 4.0, 1.0, 2.0))
    q = jnp.minimum(jnp.round(a / step) * step, 6.0)
    return (jnp.sign(v) * q * s).reshape(x.shape).astype(x.dtype)
