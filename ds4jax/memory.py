"""Bytes that a model and its state take on a device, told without JAX and before loading anything.

The formulas are those of the arrays that `ds4jax.cache` allocates (a test holds them together).
Work space of compiled programs is not in here: only a compiled program knows it.
"""

from __future__ import annotations

from typing import Any

from ds4jax.config import PAGE_TOKENS, ModelConfig, RuntimeConfig

_ROWS4 = PAGE_TOKENS // 4


def cache_bytes(cfg: ModelConfig, run: RuntimeConfig) -> dict[str, int]:
    """Bytes of every array of the cache, by field name of `ds4jax.cache.Cache`.

    Slots and pages count one more each, the one that takes masked writes.
    """
    number = 4 if run.dtype == "float32" else 2  # bytes of a cached number
    slots, pages = run.num_slots + 1, run.pages + 1
    layers4, layers128 = len(cfg.layers_of_ratio(4)), len(cfg.layers_of_ratio(128))
    head, index = cfg.head_dim, cfg.index_head_dim

    def ring(needed: int) -> int:  # entries, so that rejected drafts overwrite nothing
        return -(-(needed + run.max_drafts) // 16) * 16

    state4 = layers4 * slots * ring(8) * 2 * 2 * 4  # times the channels of (value, gate), float32
    return {
        "raw": cfg.num_layers * slots * ring(cfg.sliding_window) * head * number,
        "comp4": layers4 * pages * _ROWS4 * head * number,
        "comp128": layers128 * pages * head * number,
        "index4": layers4 * pages * _ROWS4 * index * number,
        "state4": state4 * head,
        "istate4": state4 * index,
        "state128": layers128 * slots * ring(128) * 2 * head * 4,
        "table": slots * run.pages_per_slot * 4,
        "length": slots * 4,
        "tokens": slots * (run.max_ctx + 1) * 4,
    }


def plan(cfg: ModelConfig, run: RuntimeConfig, weights_bytes: int) -> dict[str, Any]:
    """Memory plan, JSON-ready.

    Args:
        weights_bytes: of the model's tensors as the file stores them.
    """
    cache = cache_bytes(cfg, run)
    total = sum(cache.values())
    return {
        "ctx": run.max_ctx,
        "lanes": run.num_slots,
        "dtype": run.dtype,
        "weights_bytes": weights_bytes,
        "cache_bytes": total,
        "cache": cache,
        "total_bytes": weights_bytes + total,
    }
