"""Routed experts of a batch of rows: gate, up, clamped SwiGLU, routing weight, down, ordered sum.

Only experts that a live row chose are read. Pairs of (row, slot) are grouped by expert; the sum
over a row's slots runs in slot order, so a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import backend as backend_lib
from pallas_kernels import packing
from pallas_kernels.backend import Backend
from pallas_kernels.dense import ROW_TILE, product
from pallas_kernels.packing import QuantArray

Weights = QuantArray | Array


def experts(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    *,
    layer: int | Array | None = None,
    first_expert: int | Array = 0,
    limit: float,
    backend: Backend,
) -> Array:
    """sum_s w2[e] (silu(min(w1[e] x, limit)) * clip(w3[e] x, -limit, limit) * weight[s]).

    Here e = ids[s].

    Args:
      x_TM: normalised rows, bfloat16 or float32.
      ids_TS: int32 expert numbers of the whole model in slot order; a row's live ids are distinct.
        Slots whose id is outside [first_expert, first_expert + E) (padding: negative) add nothing
        and cost nothing.
      weights_TS: float32 routing weights.
      w1, w3: gate and up, [E, F, M], or [L, E, F, M] with `layer`; w2: down, [E, M, F] likewise.
        E: the experts held here.
      layer: which of L.
      first_expert: number of the first expert held here.
      limit: clamp of the gate (from above) and of up (both sides).
    Returns: y_TM float32. The activation is rounded to the dtype of x before w2.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
      these formats or dtypes.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    backend = backend_lib.require("experts", backend)
    _check(x_TM, ids_TS, weights_TS, w1, w3, w2, layer)
    if backend == "reference":
        return reference(
            x_TM,
            ids_TS,
            weights_TS,
            w1,
            w3,
            w2,
            layer=layer,
            first_expert=first_expert,
            limit=limit,
        )
    raise NotImplementedError("experts: no kernel")


def _check(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    layer: int | Array | None,
) -> None:
    lead = 2 if layer is not None else 1
    if not len(w1.shape) == len(w3.shape) == len(w2.shape) == lead + 2:
        raise ValueError(
            f"experts: w1 {list(w1.shape)}, w3 {list(w3.shape)} and w2 {list(w2.shape)} need"
            f" {'[L, E, N, K]' if lead == 2 else '[E, N, K]'}"
        )
    f, m = w1.shape[-2:]
    ok = (
        x_TM.shape[1:] == (m,)
        and w3.shape == w1.shape
        and w2.shape == (*w1.shape[:-2], m, f)
        and ids_TS.shape == weights_TS.shape
        and ids_TS.shape[0] == x_TM.shape[0]
    )
    if not ok:
        raise ValueError(
            f"experts: shapes do not fit: x {list(x_TM.shape)}, ids {list(ids_TS.shape)}, weights"
            f" {list(weights_TS.shape)}, w1 {list(w1.shape)}, w3 {list(w3.shape)}, w2"
            f" {list(w2.shape)}"
        )


def activate(gate: Array, up: Array, weight: Array, *, limit: float) -> Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) * weight, in float32."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(gate) * jnp.clip(up, -limit, limit) * weight


def reference(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    *,
    layer: int | Array | None = None,
    first_expert: int | Array = 0,
    limit: float,
) -> Array:
    """The definition: live pairs sorted by expert, tiles of eight rows of one expert."""
    slots, num = ids_TS.shape[1], w1.shape[-3]
    pairs = ids_TS.size
    local = ids_TS.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < num), local, num)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    count = jnp.bincount(local, length=num + 1)[:num].astype(jnp.int32)
    end = jnp.cumsum(count, dtype=jnp.int32)
    tiles_end = jnp.cumsum((count + ROW_TILE - 1) // ROW_TILE, dtype=jnp.int32)

    def of(w: Weights, expert: Array) -> Array:
        if layer is not None:
            w = packing.index(w, layer) if isinstance(w, QuantArray) else w[layer]
        if isinstance(w, QuantArray):
            return packing.unpack(packing.index(w, expert))
        return jnp.asarray(w[expert])

    def tile(i: Array, out: Array) -> Array:
        expert = jnp.searchsorted(tiles_end, i, side="right").astype(jnp.int32)
        before = jnp.where(expert > 0, tiles_end[expert - 1], 0)
        start = end[expert] - count[expert] + (i - before) * ROW_TILE
        at = start + jnp.arange(ROW_TILE, dtype=jnp.int32)
        pair = jnp.where(at < end[expert], order[jnp.minimum(at, pairs - 1)], pairs)
        row = jnp.minimum(pair // slots, x_TM.shape[0] - 1)
        weight = weights_TS.reshape(-1)[jnp.minimum(pair, pairs - 1)][:, None]
        x = x_TM[row]
        gate, up = product(x, of(w1, expert)), product(x, of(w3, expert))
        h = activate(gate, up, weight, limit=limit).astype(x_TM.dtype)
        return out.at[pair].set(product(h, of(w2, expert)))

    # The last row takes what fills up tiles.
    out = jnp.zeros((pairs + 1, x_TM.shape[1]), jnp.float32)
    out = lax.fori_loop(jnp.int32(0), tiles_end[-1], tile, out)
    return combine(out[:pairs].reshape(*ids_TS.shape, -1))


def combine(out_TSM: Array) -> Array:
    """Sum over slots, first slot first."""
    y = out_TSM[:, 0]
    for s in range(1, out_TSM.shape[1]):
        y = y + out_TSM[:, s]
    return y
