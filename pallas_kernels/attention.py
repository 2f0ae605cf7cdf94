"""Attention of a query row over its raw window and the compressed rows it may see, with a sink.

Keys are values, one head. The key order is [compressed ascending | raw ascending], cut into blocks
at places that depend on the row's own position only; partial results join in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import indexer, ring

BLOCK = 128
"""Compressed rows per block where all visible rows are attended to (ratio 128)."""


class Partial(NamedTuple):
    """Running softmax: largest score, denominator and weighted sum so far."""

    max_TH: Array  # float32
    sum_TH: Array  # float32
    acc_THD: Array  # float32


def start(q_THD: Array, sink_H: Array) -> Partial:
    """The sink alone: one score per head that joins the denominator only."""
    shape = q_THD.shape[:2]
    sink = jnp.broadcast_to(sink_H.astype(jnp.float32), shape)
    return Partial(sink, jnp.ones(shape, jnp.float32), jnp.zeros(q_THD.shape, jnp.float32))


def scores(q_THD: Array, keys_TSD: Array) -> Array:
    """q . key * D^-0.5 for every head and key, float32 [T, H, S]."""
    s = jnp.einsum(
        "thd,tsd->ths",
        q_THD,
        keys_TSD,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    return s * jnp.float32(q_THD.shape[-1] ** -0.5)


def join(p: Partial, scores_THS: Array, keys_TSD: Array, valid_TS: Array) -> Partial:
    """Take one more block of finite keys with their scores into the running softmax.

    Probabilities are cast to the dtype of the keys before the value product. The result does not
    depend on the running maximum, so no gradient passes through it.
    """
    valid = valid_TS[:, None, :]
    s = jnp.where(valid, scores_THS, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(p.max_TH, jnp.max(s, axis=-1)))
    weight = jnp.where(valid, jnp.exp(s - top[:, :, None]), 0.0)
    alpha = jnp.exp(p.max_TH - top)
    out = jnp.einsum(
        "ths,tsd->thd",
        weight.astype(keys_TSD.dtype),
        keys_TSD,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    return Partial(
        top,
        p.sum_TH * alpha + jnp.sum(weight, axis=-1),
        p.acc_THD * alpha[:, :, None] + out,
    )


def add_block(p: Partial, q_THD: Array, keys_TSD: Array, valid_TS: Array) -> Partial:
    """Attend to one more block of keys; invalid ones weigh nothing, whatever they hold."""
    # A page may hold what an earlier lane left there: 0 * NaN must not reach this row.
    keys_TSD = jnp.where(valid_TS[:, :, None], keys_TSD, 0)
    return join(p, scores(q_THD, keys_TSD), keys_TSD, valid_TS)


def attend(
    q_THD: Array,
    sink_H: Array,
    window_TWD: Array,
    window_valid_TW: Array,
    *,
    pool: Array | None = None,
    layer: int | Array = 0,
    table: Array | None = None,
    slot_T: Array | None = None,
    visible_T: Array | None = None,
    selected_TK: Array | None = None,
) -> Array:
    """softmax([q . key * D^-0.5, sink]) @ keys, the sink's column dropped.

    Args:
        q_THD: queries after rope, compute dtype. sink_H: float32.
        window_TWD: raw rows of the window in ascending order; window_valid_TW masks them.
        pool: compressed rows [L, rows, D], or None (ratio 0); layer: which of L.
        table, slot_T: block table and slots. visible_T: compressed rows each query may see.
        selected_TK: ratio 4: row numbers from the indexer, ascending, NONE at the end. None: all
            visible rows, in blocks counted from row 0 (ratio 128: one row a page).

    Returns: out_THD, dtype of q, still rotated (the caller applies the inverse rotation).
    Source: architecture of DeepSeek-V4, "what a query sees".
    """
    p = start(q_THD, sink_H)
    if pool is not None and table is not None and slot_T is not None and visible_T is not None:
        if selected_TK is not None:
            valid = selected_TK != indexer.NONE
            row = jnp.where(valid, selected_TK, 0)
            at = ring.page_rows(table, slot_T[:, None], row, indexer.PAGE_ROWS)
            p = add_block(p, q_THD, pool[layer, at], valid)
        else:
            slots, visible, rows = slot_T, visible_T, pool

            def block(i: Array, p: Partial) -> Partial:
                number = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
                row = jnp.broadcast_to(number[None, :], (q_THD.shape[0], BLOCK))
                at = ring.page_rows(table, slots[:, None], row, 1)
                return add_block(p, q_THD, rows[layer, at], row < visible[:, None])

            blocks = (jnp.max(visible_T) + BLOCK - 1) // BLOCK
            p = lax.fori_loop(jnp.int32(0), blocks, block, p)
    p = add_block(p, q_THD, window_TWD, window_valid_TW)
    return (p.acc_THD / p.sum_TH[:, :, None]).astype(q_THD.dtype)
