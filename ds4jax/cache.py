"""The state of all lanes on the device: rings, pages of compressed rows, block tables.

Shapes depend on capacity only, never on how many tokens exist. Every array has one slot or page
more than asked for, the trash, where masked writes go. State is addressed by absolute position, so
a sequence is cut short by a smaller length and nothing else. The byte counts of `plan_bytes` are
the allocator's own formulas: `init` allocates exactly these arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from ds4jax.config import PAGE_TOKENS, ModelConfig, RuntimeConfig

ROWS4 = PAGE_TOKENS // 4
"""Ratio-4 rows of one page."""


@struct.dataclass
class Cache:
    """Device state of all slots. S slots, P pages, one trash entry each; L layers of the kind.

    Rows are in the compute dtype; partial compressor state is float32: axis 3 is (value, gate).
    """

    raw: Array  # [L, S+1, R, D] window rows at (slot, pos mod R)
    comp4: Array  # [L4, (P+1)*32, D] at page*32 + (pos mod 128)//4
    comp128: Array  # [L128, P+1, D] at page
    index4: Array  # [L4, (P+1)*32, J] as comp4
    state4: Array  # [L4, S+1, R4, 2, 2D]
    istate4: Array  # [L4, S+1, R4, 2, 2J]
    state128: Array  # [L128, S+1, R128, 2, D]
    table: Array  # int32 [S+1, MP], physical page or the trash page P
    length: Array  # int32 [S+1], committed tokens
    tokens: Array  # int32 [S+1, max_ctx+1], token ids by position


def ring_len(needed: int, rows: int) -> int:
    """Ring entries so that `needed` positions survive a step of `rows` rows that are rejected.

    Rounded up to 16. With one row a step, `needed` itself is enough.
    """
    return -(-(needed + rows - 1) // 16) * 16


def shapes(cfg: ModelConfig, run: RuntimeConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array of the cache, by field name."""
    rows = run.max_drafts + 1
    slots, pages = run.num_slots + 1, run.pages + 1
    n4, n128 = len(cfg.layers_of_ratio(4)), len(cfg.layers_of_ratio(128))
    d, di = cfg.head_dim, cfg.index_head_dim
    ring, ring4 = ring_len(cfg.sliding_window, rows), ring_len(8, rows)
    ring128 = ring_len(128, rows)
    cd, f32, i32 = jnp.dtype(run.dtype), jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
    dims: dict[str, tuple[tuple[int, ...], jnp.dtype]] = {
        "raw": ((cfg.num_layers, slots, ring, d), cd),
        "comp4": ((n4, pages * ROWS4, d), cd),
        "comp128": ((n128, pages, d), cd),
        "index4": ((n4, pages * ROWS4, di), cd),
        "state4": ((n4, slots, ring4, 2, 2 * d), f32),
        "istate4": ((n4, slots, ring4, 2, 2 * di), f32),
        "state128": ((n128, slots, ring128, 2, d), f32),
        "table": ((slots, run.pages_per_slot), i32),
        "length": ((slots,), i32),
        "tokens": ((slots, run.max_ctx + 1), i32),
    }
    return {k: jax.ShapeDtypeStruct(s, t) for k, (s, t) in dims.items()}


def abstract(cfg: ModelConfig, run: RuntimeConfig) -> Cache:
    """The cache as shapes and dtypes."""
    arrays: dict[str, Any] = dict(shapes(cfg, run))
    return Cache(**arrays)


def plan_bytes(cfg: ModelConfig, run: RuntimeConfig) -> dict[str, int]:
    """Bytes of every array of the cache, by field name."""
    return {k: s.size * s.dtype.itemsize for k, s in shapes(cfg, run).items()}


def init(cfg: ModelConfig, run: RuntimeConfig) -> Cache:
    """An empty cache: zeros, every table entry at the trash page."""
    arrays: dict[str, Any] = {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes(cfg, run).items()}
    arrays["table"] = jnp.full(arrays["table"].shape, run.pages, jnp.int32)
    return Cache(**arrays)
