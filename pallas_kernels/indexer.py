"""Lightning indexer: which compressed rows of a ratio-4 layer a query attends to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import ring

PAGE_ROWS = 32
"""Ratio-4 rows in a page of 128 tokens."""

BLOCK = 512
"""Rows scored together; a query's blocks are counted from row 0, whatever its neighbours need."""

NONE = jnp.iinfo(jnp.int32).max
"""Row number that stands for 'no row' at the end of a selection."""


def score_block(q_THD: Array, weight_TH: Array, keys_TSD: Array) -> Array:
    """sum_h weight[h] * relu(q[h] . key), float32 [T, S]; -0 becomes +0 so that ties are ties."""
    s = jnp.einsum(
        "thd,tsd->ths",
        q_THD,
        keys_TSD,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    s = jnp.sum(weight_TH[:, :, None] * jax.nn.relu(s), axis=1)
    return jnp.where(s == 0.0, 0.0, s)


def scores(
    q_THD: Array,
    weight_TH: Array,
    keys: Array,
    layer: int | Array,
    table: Array,
    slot_T: Array,
    visible_T: Array,
) -> Array:
    """Scores of all rows of each query's history, -inf where not visible; float32 [T, capacity].

    Loops over blocks up to the longest history among the queries.
    """
    rows_T = slot_T.shape[0]
    blocks = -(-table.shape[1] * PAGE_ROWS // BLOCK)

    def block(i: Array, out: Array) -> Array:
        number = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        row = jnp.broadcast_to(number[None, :], (rows_T, BLOCK))
        at = ring.page_rows(table, slot_T[:, None], row, PAGE_ROWS)
        s = score_block(q_THD, weight_TH, keys[layer, at])
        s = jnp.where(row < visible_T[:, None], s, -jnp.inf)
        return lax.dynamic_update_slice(out, s, (jnp.int32(0), i * BLOCK))

    live = (jnp.max(visible_T) + BLOCK - 1) // BLOCK
    return lax.fori_loop(
        jnp.int32(0), live, block, jnp.full((rows_T, blocks * BLOCK), -jnp.inf, jnp.float32)
    )


def select(scores_TS: Array, visible_T: Array, *, top_k: int) -> Array:
    """Row numbers of the `top_k` best visible scores, ascending, NONE at the end; int32 [T, top_k].

    Ties go to the lower row. With at most `top_k` visible rows all of them are selected.
    """
    k = min(top_k, scores_TS.shape[1])
    ids = lax.top_k(scores_TS, k)[1].astype(jnp.int32)
    ids = jnp.sort(jnp.where(ids < visible_T[:, None], ids, NONE), axis=1)
    return jnp.pad(ids, ((0, 0), (0, top_k - k)), constant_values=NONE)


def top_rows(
    q_THD: Array,
    weight_TH: Array,
    keys: Array,
    layer: int | Array,
    table: Array,
    slot_T: Array,
    visible_T: Array,
    *,
    top_k: int,
) -> Array:
    """Selected rows of every query: int32 [T, top_k], ascending, NONE at the end.

    Args:
        q_THD: index queries after rope. weight_TH: float32 head weights, scaled, may be negative.
        keys: the whole pool [L, (P+1)*32, D]; layer: which of L.
        table: int32 [S+1, MP]. slot_T: int32. visible_T: int32, rows that the query may see.
        top_k: how many to keep.

    Source: architecture of DeepSeek-V4, lightning indexer; selection order: serving rules (ties to
        the lower row, ascending order before attention).
    """

    def by_score() -> Array:
        s = scores(q_THD, weight_TH, keys, layer, table, slot_T, visible_T)
        return select(s, visible_T, top_k=top_k)

    if slot_T.shape[0] > 1:
        return by_score()

    def everything() -> Array:
        row = jnp.arange(top_k, dtype=jnp.int32)[None, :]
        return jnp.where(row < visible_T[:, None], row, NONE)

    return lax.cond(visible_T[0] <= top_k, everything, by_score)
