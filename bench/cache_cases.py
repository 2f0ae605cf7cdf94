"""The kernels of a layer that read and write the cache, for timing and for tests on a device.

As `kernel_cases`; up to 64 lanes with a history each, and rows of one lane one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel_cases import Case, Rows
from ds4jax.config import PAGE_TOKENS, ModelConfig
from pallas_kernels import cached_attention, compressed_rows, compressor, indexer, row_selection
from pallas_kernels.backend import Backend

LANES = 64
"""Lanes that attention and indexer read from, at most."""

Tile = cached_attention.Tile | row_selection.Tile | compressed_rows.Tile


def cases(
    cfg: ModelConfig, rows: int, *, tokens: int = 4096, tile: Tile | None = None
) -> Iterator[Case]:
    """All of them, in the order of a layer. tokens: history of a lane. tile: for those it fits."""
    own = tile if isinstance(tile, compressed_rows.Tile) else None
    for ratio in (4, 128):
        yield _compressor(cfg, rows, ratio, own)
    yield _indexer(cfg, rows, tokens, tile if isinstance(tile, row_selection.Tile) else None)
    mine = tile if isinstance(tile, cached_attention.Tile) else None
    for ratio in (0, 4, 128):
        yield _attention(cfg, rows, ratio, tokens, mine)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def _places(rows: int, tokens: int) -> tuple[int, jax.Array, jax.Array]:
    """Lanes, and slot and position of every row: the last ones of their lane's history."""
    lanes = min(rows, LANES)
    number = np.arange(rows, dtype=np.int32)
    each = -(-rows // lanes)
    return lanes, jnp.asarray(number // each), jnp.asarray(tokens - each + number % each)


def _table(lanes: int, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Shuffled pages of every lane, and of the trash."""
    pages = -(-tokens // PAGE_TOKENS)
    order = np.random.default_rng(0).permutation(lanes * pages).astype(np.int32)
    return np.concatenate([order.reshape(lanes, pages), np.full((1, pages), lanes * pages)]).astype(
        np.int32
    )


def _attention(
    cfg: ModelConfig, rows: int, ratio: int, tokens: int, tile: cached_attention.Tile | None
) -> Case:
    h, d, r, top_k = cfg.num_heads, cfg.head_dim, cfg.rope_head_dim, cfg.index_topk
    lanes, slot, pos = _places(rows, tokens)
    table = _table(lanes, tokens)
    ring = cfg.sliding_window + 16
    angle = _normal(4, rows, r // 2)
    args = {
        "q": _normal(0, rows, h, d).astype(jnp.bfloat16), "sink": _normal(1, 2, h),
        "raw": _normal(2, 1, lanes + 1, ring, d).astype(jnp.bfloat16), "slot": slot, "pos": pos,
        "cs": jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1), "table": jnp.asarray(table),
    }  # fmt: skip
    keys = min(tokens, cfg.sliding_window)
    if ratio:
        per_page = PAGE_TOKENS // ratio
        args["pool"] = _normal(3, 1, (table.max() + 1) * per_page, d).astype(jnp.bfloat16)
        args["visible"] = (pos + 1) // ratio
        keys += tokens // ratio
    if ratio == 4:
        ids = np.full((rows, top_k), indexer.NONE, np.int32)
        rng = np.random.default_rng(1)
        for t, v in enumerate(np.asarray(args["visible"])):
            ids[t, : min(v, top_k)] = np.sort(rng.permutation(v)[:top_k])
        args["ids"] = jnp.asarray(ids)
        keys = min(tokens, cfg.sliding_window) + min(tokens // ratio, top_k)

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        comp = None
        if ratio:
            ids = a["ids"][at] if ratio == 4 else None
            comp = cached_attention.Compressed(a["pool"], 0, a["table"], a["visible"][at], ids)
        window = cached_attention.Window(a["raw"], 0, a["slot"][at], a["pos"][at])
        out, _ = cached_attention.attend(
            a["q"][at], a["sink"], window, comp, layer=1, size=cfg.sliding_window,
            cs_TR=a["cs"][at], backend=backend, tile=tile,
        )  # fmt: skip
        return (out,)

    return Case(f"attention_ratio{ratio}", args, run, 2 * keys * d + 4 * h * d)


def _indexer(cfg: ModelConfig, rows: int, tokens: int, tile: row_selection.Tile | None) -> Case:
    h, d = cfg.index_num_heads, cfg.index_head_dim
    lanes, slot, pos = _places(rows, tokens)
    table = _table(lanes, tokens)

    def whole(seed: int, *shape: int) -> jax.Array:
        # Sums of small whole numbers are exact: the selection must be the reference's to the row.
        return jax.random.randint(jax.random.key(seed), shape, -2, 3).astype(jnp.bfloat16)

    args = {
        "q": whole(0, rows, h, d), "weight": whole(1, rows, h).astype(jnp.float32),
        "keys": whole(2, 1, (table.max() + 1) * indexer.PAGE_ROWS, d), "slot": slot,
        "visible": (pos + 1) // 4, "table": jnp.asarray(table),
    }  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        return (
            row_selection.select(
                a["q"][at], a["weight"][at], a["keys"], 0, a["table"], a["slot"][at],
                a["visible"][at], top_k=cfg.index_topk, backend=backend, tile=tile,
            ),
        )  # fmt: skip

    return Case("indexer", args, run, tokens // 4 * (2 * d + 4), tolerance=0.0)


def _compressor(cfg: ModelConfig, rows: int, ratio: int, tile: compressed_rows.Tile | None) -> Case:
    """Every row of a lane of its own, and every row ends a window: the most that can be to do."""
    overlap, per_page = compressor.overlap(ratio), PAGE_TOKENS // ratio
    dims = (cfg.head_dim, cfg.index_head_dim) if ratio == 4 else (cfg.head_dim,)
    args: dict[str, Any] = {}
    for i, d in enumerate(dims):
        c = overlap * d
        args |= {
            f"ring{i}": _normal(i, 1, rows + 1, overlap * ratio + 16, 2, c),
            f"pool{i}": jnp.zeros((1, (rows + 1) * per_page, d), jnp.bfloat16),
            f"step{i}": _normal(i + 2, rows, 2, c), f"norm{i}": _normal(i + 4, 2, d),
        }  # fmt: skip
    pos = jnp.full((rows,), PAGE_TOKENS - 1, jnp.int32)
    angle = _normal(9, rows, cfg.rope_head_dim // 2)
    args["cs"] = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        zero = jnp.zeros_like(at)
        states = tuple(
            compressed_rows.State(a[f"ring{i}"], a[f"pool{i}"], a[f"step{i}"][at], a[f"norm{i}"])
            for i in range(len(dims))
        )
        table = jnp.arange(rows + 1, dtype=jnp.int32)[:, None]
        got = compressed_rows.update(
            states, compressed_rows.Rows(at, pos[at], zero, zero), table, a["cs"][at], layer=1,
            index=0, ratio=ratio, eps=cfg.rms_norm_eps, chunk=False, backend=backend, tile=tile,
        )  # fmt: skip
        out: list[jax.Array] = []
        for ring, pool in got:
            out += [ring[0, at, pos[at] % ring.shape[2]], pool[0, at * per_page + per_page - 1]]
        return tuple(out)

    count = sum(overlap * d for d in dims)
    moved = 2 * 4 * count * (overlap * ratio + 2) // overlap + 2 * sum(dims)
    return Case(f"compressor_ratio{ratio}", args, run, moved)


def few_like_many(case: Case, rows: int, backend: Backend) -> None:
    """Rows of a small batch must have the bits that they have in one of all rows.

    Raises: RuntimeError if they do not.
    """
    one = jax.jit(case.run, static_argnames="backend")
    whole = one(case.args, jnp.arange(rows, dtype=jnp.int32), backend=backend)
    rng = np.random.default_rng(rows)
    for few in (1, 5, 16):
        at = jnp.asarray(np.sort(rng.permutation(rows)[:few]), jnp.int32)
        for a, b in zip(one(case.args, at, backend=backend), whole, strict=True):
            if not np.array_equal(np.asarray(a), np.asarray(b)[np.asarray(at)]):
                raise RuntimeError(f"{case.name}: {few} rows have other bits than {rows}")
