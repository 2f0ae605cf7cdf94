"""The model for research scripts: load, init, prefill and decode as pure functions.

    import ds4jax

    cfg, params = ds4jax.load("nano")
    run = ds4jax.RuntimeConfig(max_ctx=512, num_slots=1)
    cache = ds4jax.init(cfg, run)
    cache, logits, seen = ds4jax.prefill(
        params, cache, token_T, cfg=cfg, run=run, capture=("L3.streams_out",)
    )

Everything may be jitted, with `cfg`, `run` and `capture` static and the cache donated; nothing here
does so. Pages of the cache are dealt out in order, a fixed range per slot: sharing a pool between
lanes is the executor's work (`ds4jax.engine`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ds4jax import cache as cache_lib
from ds4jax import model
from ds4jax.cache import Cache
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params

CAPTURES = (
    "attn_hc_pre", "attn_hc_post", "attn_hc_comb", "q", "kv", "index_ids", "heads_out",
    "attn_out", "ffn_hc_pre", "ffn_hc_post", "ffn_hc_comb", "router_ids", "router_weights",
    "ffn_out", "streams_out",
)  # fmt: skip
"""Names of activations; ask for them as "L{layer}.{name}"."""


def load(
    source: str | os.PathLike[str] = "nano", run: RuntimeConfig | None = None, **kwargs: Any
) -> tuple[ModelConfig, Params]:
    """Configuration and weights of a model.

    Args:
        source: GGUF file, checkpoint directory, or "nano", the model in the package.
        run: dtype, backend and max_ctx are used; None: float32 on the reference backend.
        kwargs: as of `ds4jax.weights.load`; quantised weights are decoded unless
            cpu_weights="packed".

    Raises:
        ds4jax.errors.ModelFileError: the model cannot be opened; everything wrong is listed.
    """
    from ds4jax import weights

    kwargs.setdefault("cpu_weights", "decoded")
    return weights.load(source, run or RuntimeConfig(), **kwargs)


def init(cfg: ModelConfig, run: RuntimeConfig) -> Cache:
    """An empty cache whose slots own `max_ctx` positions each.

    Raises:
        ValueError: `run.num_pages` is too small for that.
    """
    need = run.num_slots * run.pages_per_slot
    if run.pages < need:
        raise ValueError(f"init: num_pages is {run.pages}, {run.num_slots} slots need {need}")
    cache = cache_lib.init(cfg, run)
    owned = jnp.arange(need, dtype=jnp.int32).reshape(run.num_slots, run.pages_per_slot)
    return cache.replace(table=cache.table.at[: run.num_slots].set(owned))  # type: ignore[attr-defined]


def _names(cfg: ModelConfig, capture: Iterable[str]) -> frozenset[str]:
    known = {f"L{i}.{name}" for i in range(cfg.num_layers) for name in CAPTURES}
    wanted = frozenset(capture)
    unknown = sorted(wanted - known)
    if unknown:
        raise ValueError(
            f"capture: unknown names {unknown}; they are L0..L{cfg.num_layers - 1} with one of"
            f" {list(CAPTURES)}"
        )
    return wanted


def _rows(slot: Array, pos: Array, token: Array, run_index: Array, after: Array) -> model.Plan:
    count = token.shape[0]
    nothing = jnp.full((count,), -1, jnp.int32)
    return model.Plan(
        slot=slot,
        pos=pos,
        token=token,
        run=run_index,
        after=after,
        table_idx=nothing,
        table_page=nothing,
        emit=jnp.arange(count, dtype=jnp.int32),
        num_rows=jnp.int32(count),
        num_emit=jnp.int32(count),
    )


def prefill(
    params: Params,
    cache: Cache,
    token_T: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    slot: int | Array = 0,
    start: int | Array = 0,
    capture: Iterable[str] = (),
) -> tuple[Cache, Array, dict[str, Array]]:
    """Feed known tokens of one sequence, at positions start .. start + T - 1.

    Args:
        token_T: int32 ids. slot: which sequence. start: its length so far; a smaller one truncates,
            to 0 or by at most `run.max_drafts` positions (rings hold no more of the past).
            capture: names of `CAPTURES`.

    Returns: cache, logits_TV float32 (row i: after token i), captured activations by name [T, ...].
    Raises:
        ValueError: unknown names in `capture`.
    """
    index = jnp.arange(token_T.shape[0], dtype=jnp.int32)
    slot_T = jnp.full_like(index, slot)
    start = jnp.asarray(start, jnp.int32)
    cache = cache.replace(length=cache.length.at[slot].set(start))  # type: ignore[attr-defined]
    plan = _rows(slot_T, start + index, token_T.astype(jnp.int32), index, index[::-1])
    cache, out = model.forward(
        params, cache, plan, cfg=cfg, run=run, capture=_names(cfg, capture), chunk=_chunk(run)
    )
    return cache, out.logits, out.captured


def decode(
    params: Params,
    cache: Cache,
    token_B: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    slot_B: Array | None = None,
    capture: Iterable[str] = (),
) -> tuple[Cache, Array, dict[str, Array]]:
    """Feed one token to each of B sequences, at the position after its last one.

    Args: token_B: int32 ids. slot_B: int32, distinct; None: slots 0 .. B-1.
    Returns: cache, logits_BV float32, captured activations by name [B, ...].
    Raises:
        ValueError: unknown names in `capture`.
    """
    index = jnp.arange(token_B.shape[0], dtype=jnp.int32)
    slot_B = index if slot_B is None else slot_B.astype(jnp.int32)
    zero = jnp.zeros_like(index)
    plan = _rows(slot_B, cache.length[slot_B], token_B.astype(jnp.int32), zero, zero)
    cache, out = model.forward(params, cache, plan, cfg=cfg, run=run, capture=_names(cfg, capture))
    return cache, out.logits, out.captured


def _chunk(run: RuntimeConfig) -> bool:
    return run.backend != "reference"


def logit_lens(params: Params, streams_TND: Array, *, cfg: ModelConfig) -> Array:
    """Logits that the head gives for residual streams of any layer.

    Args: streams_TND: a captured "L{i}.streams_out", [T, n, D].
    Returns: logits_TV float32.
    """
    return model.head_logits(params, streams_TND, cfg=cfg)
