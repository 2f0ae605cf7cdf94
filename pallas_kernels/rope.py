"""Interleaved rotary embedding from exact angle tables.

An angle p * f with p near 1e6 is off by a hundredth of a radian in float32. The position is split,
p = 1024 a + b, cosines and sines of 1024 a f and of b f are tabulated once in float64, and the
addition theorem joins them: float32 accuracy at any position, no transcendental function in a step.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

SPLIT = 1024
"""Positions per row of the coarse table."""


def inverse_frequencies(rope_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """theta^(-2i/rope_dim) for i = 0 .. rope_dim/2 - 1, float64."""
    return np.asarray(theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim))


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float,
    original_len: int,
    beta_fast: float,
    beta_slow: float,
) -> npt.NDArray[np.float64]:
    """Frequencies stretched by YaRN; cos and sin get no magnitude factor.

    Source: architecture of DeepSeek-V4, rotary section (layers with a compression ratio above 0).
    """
    freqs = inverse_frequencies(rope_dim, theta)

    def correction(turns: float) -> float:
        wavelengths = original_len / (2 * math.pi * turns)
        return rope_dim * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high: float = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    if high == low:
        high += 0.001
    ramp = np.clip((np.arange(rope_dim // 2) - low) / (high - low), 0.0, 1.0)
    return np.asarray(freqs / factor * ramp + freqs * (1 - ramp))


def angle_tables(freqs: npt.NDArray[np.float64], max_pos: int) -> npt.NDArray[np.float32]:
    """float32 [2, rows, 2, rope_dim/2]: (fine | coarse) x position x (cos | sin) x frequency.

    Args:
        freqs: float64 [rope_dim/2], radians per position.
        max_pos: largest position that will be asked for; the coarse part covers it.
    """
    rows = max(SPLIT, max_pos // SPLIT + 1)
    fine = np.arange(rows, dtype=np.float64)[:, None] * freqs
    coarse = np.arange(rows, dtype=np.float64)[:, None] * SPLIT * freqs
    both = np.stack([fine, coarse])
    return np.stack([np.cos(both), np.sin(both)], axis=2).astype(np.float32)


def cos_sin(tables: Array, pos_T: Array) -> Array:
    """float32 [T, 2, rope_dim/2]: cosine and sine of every frequency at each position.

    Args:
        tables: as made by `angle_tables`.
        pos_T: int32, at least 0.
    """
    fine, coarse = tables[0, pos_T % SPLIT], tables[1, pos_T // SPLIT]
    (c1, s1), (c2, s2) = (fine[:, 0], fine[:, 1]), (coarse[:, 0], coarse[:, 1])
    return jnp.stack([c1 * c2 - s1 * s2, s1 * c2 + c1 * s2], axis=1)


def rotate(x_THD: Array, cs_TR: Array, *, inverse: bool = False) -> Array:
    """Rotate the trailing channels of every head by the angles of its token.

    (a, b) = (x[2i], x[2i+1]) -> (a cos - b sin, a sin + b cos), in float32, cast back.

    Args:
        x_THD: [T, ..., D]; the last `2 * cs.shape[-1]` channels are rotated, the others kept.
        cs_TR: [T, 2, R/2] from `cos_sin`.
        inverse: rotate by the opposite angle.

    Returns: out_THD, dtype of x_THD.
    """
    half = cs_TR.shape[-1]
    keep = x_THD.shape[-1] - 2 * half
    x = x_THD[..., keep:].astype(jnp.float32)
    x = x.reshape(*x.shape[:-1], half, 2)
    lead = (x.shape[0],) + (1,) * (x.ndim - 3) + (half,)
    cos = jnp.broadcast_to(cs_TR[:, 0].reshape(lead), x.shape[:-1])
    sin = jnp.broadcast_to(cs_TR[:, 1].reshape(lead), x.shape[:-1])
    if inverse:
        sin = -sin
    a, b = x[..., 0], x[..., 1]
    y = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    y = y.reshape(*x_THD.shape[:-1], 2 * half).astype(x_THD.dtype)
    return jnp.concatenate([x_THD[..., :keep], y], axis=-1) if keep else y


# --- Inside kernels ---


def turned(x: Array, cs_ref: Any, t: Array, first: int, *, inverse: bool = False) -> Array:
    """As `rotate` on channels in a register tile; float32.

    Cosines are cut to 16 bits, so that their products with bfloat16 are exact: whether a compiler
    fuses a multiplication and an addition cannot show in the result.

    Args:
        x: bfloat16 [..., W], W even.
        cs_ref: reference to float32 [T, 2, R/2]; t: which of T.
        first: number of the first channel of x among those that are rotated; negative ones are
            kept as they are.
    """
    half = cs_ref.shape[2]
    x = x.astype(jnp.float32)
    number = first + jnp.arange(x.shape[-1], dtype=jnp.int32)
    pair = jnp.clip(number >> 1, 0, half - 1)
    cos, sin = (_cut(plgpu.load(cs_ref.at[t, jnp.int32(i), pair])) for i in (0, 1))
    second = (number & 1) == 1
    sin = jnp.where(second == inverse, -sin, sin)
    if x.ndim == 2:
        cos, sin, number = cos[None, :], sin[None, :], number[None, :]
    return jnp.where(number >= 0, x * cos + _other(x) * sin, x)


def _cut(x: Array) -> Array:
    """float32 without its last eight bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-256), jnp.float32)


def _other(x: Array) -> Array:
    """Every channel's partner in its pair."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    second = lax.broadcasted_iota(jnp.int32, pairs.shape, pairs.ndim - 1) == 1
    a = jnp.sum(jnp.where(second, 0.0, pairs), axis=-1, keepdims=True)
    b = jnp.sum(jnp.where(second, pairs, 0.0), axis=-1, keepdims=True)
    return jnp.where(second, a, b).reshape(x.shape)
