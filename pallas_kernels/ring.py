"""Rings addressed by absolute position, and paged rows addressed through a block table.

A ring holds the row of position p of slot s at [s, p mod R]. Nothing is ever shifted, flushed or
rolled back: a row is a pure function of its position, and positions that were rejected are simply
overwritten. The last slot and the last page are the trash, where masked writes go.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu


def read_window(
    ring: Array,
    layer: int | Array,
    slot_T: Array,
    pos_T: Array,
    count: int,
    *,
    step_T: Array | None = None,
    run_T: Array | None = None,
) -> tuple[Array, Array]:
    """Rows at positions pos - count + 1 .. pos of every row's own slot, in that order.

    Args:
        ring: [L, S+1, R, ...]. layer: which of L.
        slot_T, pos_T: int32.
        count: how many positions; at most R if all of them come from the ring.
        step_T: rows of this step [T, ...] that the ring does not hold yet; those of one slot are
            consecutive. None: the ring has been written already.
        run_T: int32 index of each row among the rows of its slot in this step (with step_T).

    Returns: rows [T, count, ...] and valid [T, count] (False below position 0).
    """
    offset = jnp.arange(1 - count, 1, dtype=jnp.int32)
    at = pos_T[:, None] + offset[None, :]
    rows = ring[layer, slot_T[:, None], at % ring.shape[2]]
    if step_T is not None and run_T is not None:
        own = jnp.arange(pos_T.shape[0], dtype=jnp.int32)[:, None] + offset[None, :]
        here = -offset[None, :] <= run_T[:, None]
        here = here.reshape(here.shape + (1,) * (rows.ndim - 2))
        rows = jnp.where(here, step_T[jnp.maximum(own, 0)], rows)
    return rows, at >= 0


def write(
    ring: Array, layer: int | Array, slot_T: Array, pos_T: Array, rows_T: Array, keep_T: Array
) -> Array:
    """Store each row at its position; rows with keep False go nowhere.

    Kept rows must be distinct in (slot, pos mod R).
    """
    # Every row has a place of its own, those that go nowhere outside: a GPU need not take turns.
    nowhere = ring.shape[1] + jnp.arange(slot_T.shape[0], dtype=slot_T.dtype)
    slot = jnp.where(keep_T, slot_T, nowhere)
    return ring.at[layer, slot, pos_T % ring.shape[2]].set(
        rows_T.astype(ring.dtype), mode="drop", unique_indices=True
    )


def page_rows(table: Array, slot: Array, row: Array, rows_per_page: int) -> Array:
    """Index of compressed row number `row` of `slot` in a pool stored page after page.

    Args:
        table: int32 [S+1, MP], physical page or the trash page.
        slot, row: int32 of one shape (or broadcastable by the caller); row numbers past the table
            are clamped, the caller masks them.
    """
    page = jnp.minimum(row // rows_per_page, table.shape[1] - 1)
    return table[slot, page] * rows_per_page + row % rows_per_page


# --- For kernels ---


def scalar(x: int | Array) -> Array:
    """An int32 operand of one element (kernels take arrays only; this costs no launch)."""
    return jnp.asarray(x, jnp.int32).reshape(1)


def load_rows(ref: Any, lead: tuple[Any, ...], rows_S: Array, first: Any, width: int) -> Array:
    """ref[lead, rows, first : first + width] -> [S, width], rows by number."""
    return plgpu.load(ref.at[(*lead, *grid_index(rows_S, first, width))])


def store_rows(
    ref: Any, lead: tuple[Any, ...], rows_S: Array, first: Any, value: Array, live_S: Array
) -> None:
    """Store value [S, width] at `rows` from column `first` on, live rows only."""
    at = grid_index(rows_S, first, value.shape[1])
    mask = jnp.broadcast_to(live_S[:, None], value.shape)
    plgpu.store(ref.at[(*lead, *at)], value, mask=mask)


def grid_index(rows_S: Array, first: Any, width: int) -> tuple[Array, Array]:
    """Indices of rows by number and `width` columns from `first` on, each [S, width]."""
    shape = (rows_S.shape[0], width)
    columns = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.broadcast_to(rows_S[:, None], shape), columns
