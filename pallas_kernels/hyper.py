"""Manifold hyper-connections: the maps that read a sublayer's input from the residual streams and
write its output back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def _mixed(streams_TND: Array, fn_OC: Array, eps: float) -> Array:
    """(fn @ f) * rsqrt(mean(f^2) + eps) for f = the flattened streams; float32 [T, O]."""
    f = streams_TND.astype(jnp.float32).reshape(streams_TND.shape[0], -1)
    scale = lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    m = lax.dot_general(
        f, fn_OC.astype(jnp.float32), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return m * scale


def _collapse(streams_TND: Array, pre_TN: Array) -> Array:
    x = streams_TND.astype(jnp.float32)
    return jnp.sum(x * pre_TN[:, :, None], axis=1).astype(streams_TND.dtype)


def sinkhorn(logits_TNN: Array, *, iters: int, eps: float) -> Array:
    """Doubly stochastic map from logits: one row softmax, then alternating normalisations.

    Columns first; with `iters` iterations there are `iters` column and `iters - 1` row
    normalisations, so the last one is a column normalisation.

    Args: logits_TNN: float32 [T, n, n].
    Returns: comb_TNN, float32; rows are the source stream, columns the destination.
    """
    c = jax.nn.softmax(logits_TNN, axis=-1) + eps
    c = c / (jnp.sum(c, axis=1, keepdims=True) + eps)

    def body(_: int, c: Array) -> Array:
        c = c / (jnp.sum(c, axis=2, keepdims=True) + eps)
        return c / (jnp.sum(c, axis=1, keepdims=True) + eps)

    return lax.fori_loop(0, iters - 1, body, c)


def read(
    streams_TND: Array,
    fn_OC: Array,
    scale_3: Array,
    base_O: Array,
    *,
    iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[Array, Array, Array]:
    """Sublayer input and the two maps that will write its output back.

    Args:
        streams_TND: residual streams [T, n, D], compute dtype.
        fn_OC: [(2 + n) n, n D]; scale_3: [3]; base_O: [(2 + n) n]; float32.
        iters: Sinkhorn iterations. hc_eps: added to pre and inside Sinkhorn. rms_eps: norm epsilon.

    Returns: x_TD (dtype of the streams), post_TN float32, comb_TNN float32.
    Source: architecture of DeepSeek-V4, hyper-connection maps.
    """
    n = streams_TND.shape[1]
    m = _mixed(streams_TND, fn_OC, rms_eps)
    base = jnp.broadcast_to(base_O, m.shape)
    pre = jax.nn.sigmoid(m[:, :n] * scale_3[0] + base[:, :n]) + hc_eps
    post = 2.0 * jax.nn.sigmoid(m[:, n : 2 * n] * scale_3[1] + base[:, n : 2 * n])
    logits = (m[:, 2 * n :] * scale_3[2] + base[:, 2 * n :]).reshape(-1, n, n)
    return _collapse(streams_TND, pre), post, sinkhorn(logits, iters=iters, eps=hc_eps)


def write(streams_TND: Array, y_TD: Array, post_TN: Array, comb_TNN: Array) -> Array:
    """post[k] * y + sum_j comb[j, k] * streams[j], in float32, one cast at the end.

    Returns: streams_TND, dtype of the input streams.
    """
    x = streams_TND.astype(jnp.float32)
    mixed = jnp.sum(comb_TNN[:, :, :, None] * x[:, :, None, :], axis=1)
    out = post_TN[:, :, None] * y_TD.astype(jnp.float32)[:, None, :] + mixed
    return out.astype(streams_TND.dtype)


def collapse_head(
    streams_TND: Array,
    fn_NC: Array,
    scale_1: Array,
    base_N: Array,
    *,
    hc_eps: float,
    rms_eps: float,
) -> Array:
    """Weighted sum of the streams in front of the final norm (no Sinkhorn).

    Returns: x_TD float32 (the head runs in float32).
    """
    m = _mixed(streams_TND, fn_NC, rms_eps)
    pre = jax.nn.sigmoid(m * scale_1[0] + jnp.broadcast_to(base_N, m.shape)) + hc_eps
    return _collapse(streams_TND.astype(jnp.float32), pre)
