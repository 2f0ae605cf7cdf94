"""Routed experts of a batch of rows: gate, up, clamped SwiGLU, routing weight, down, ordered sum.

Only experts that a live row chose are read. Pairs (row, slot) are grouped by expert; the sum over a
row's slots runs in slot order, so a row's bits do not depend on its neighbours. Gate and up of an
expert are one matrix with their rows interleaved (`packing.interleave`), so that one program holds
both halves of what it activates.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend as backend_lib
from pallas_kernels import decode, packing
from pallas_kernels.backend import Backend
from pallas_kernels.dense import (
    DOT_ROWS,
    ROW_TILE,
    Rows,
    accumulate,
    block_of,
    few_dot_rows,
    finish,
    kernel_format,
    operands,
    product,
)
from pallas_kernels.packing import RUN, QuantArray
from pallas_kernels.ring import grid_index, scalar

Weights = QuantArray | Array


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the two kernels cut their work; see `dense.Tile`.

    Attributes:
      up_*: the gate-and-up kernel, whose K may not be split. down_*: the down kernel.
      wide: one product for all rows of a group (where the matrix unit sums in the same way
        whatever the width), instead of several of 16.
    """

    up_rows: int = 64
    up_unroll: int = 1
    up_warps: int = 4
    up_stages: int = 3
    down_rows: int = 64
    down_unroll: int = 1
    down_warps: int = 4
    down_stages: int = 3
    wide: bool = False


FEW_PER_EXPERT = 512
"""Rows up to which most groups of a model of many experts are small."""


def default_tile(t: int, target: decode.Target) -> Tile:
    """A reasonable tile without measurement."""
    if target == "rocm":
        return Tile(up_stages=1, down_stages=1)
    if t > FEW_PER_EXPERT:
        return Tile(up_rows=128, up_warps=8, down_rows=128, down_stages=2, wide=True)
    return Tile(up_warps=2, down_warps=2, wide=t > DOT_ROWS)


def experts(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w13: Weights,
    w2: Weights,
    *,
    layer: int | Array | None = None,
    first_expert: int | Array = 0,
    limit: float,
    backend: Backend,
    tile: Tile | None = None,
) -> Array:
    """sum_s w2[e] (silu(min(w1[e] x, limit)) * clip(w3[e] x, -limit, limit) * weight[s]).

    Here e = ids[s].

    Args:
      x_TM: normalised rows, bfloat16 or float32.
      ids_TS: int32 expert numbers of the whole model in slot order; a row's live ids are distinct.
        Slots whose id is outside [first_expert, first_expert + E) (padding: negative) add nothing
        and cost nothing.
      weights_TS: float32 routing weights.
      w13: gate and up, `packing.interleave(w1, w3)`: [E, 2 F, M], or [L, E, 2 F, M] with `layer`.
      w2: down, [E, M, F] likewise. E: the experts held here.
      layer: which of L.
      first_expert: number of the first expert held here.
      limit: clamp of the gate (from above) and of up (both sides).
      tile: overrides the measured or default tile.
    Returns: y_TM float32. The activation is rounded to the dtype of x before w2.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
      these formats or dtypes.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    backend = backend_lib.require("experts", backend)
    _check(x_TM, ids_TS, weights_TS, w13, w2, layer)
    if backend == "reference":
        return reference(
            x_TM, ids_TS, weights_TS, w13, w2, layer=layer, first_expert=first_expert, limit=limit
        )
    target = backend_lib.target(backend)
    out, ids = launch(
        x_TM, ids_TS, weights_TS, w13, w2, layer, first_expert, limit, target, tile=tile
    )
    # Slots that are not live were never written.
    return combine(jnp.where(ids.T[:, :, None] >= 0, out, 0.0))


def by_slot(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w13: Weights,
    w2: Weights,
    *,
    layer: int | Array | None = None,
    first_expert: int | Array = 0,
    limit: float,
    backend: Backend,
    tile: Tile | None = None,
) -> tuple[Array, Array]:
    """`experts` before the sum over slots, which whatever comes next makes on the way.

    Args: as of `experts`.
    Returns: out_STM float32, and int32 [T, S]: negative where a slot adds nothing and its part of
      `out` holds anything at all.
    Raises: as `experts`.
    """
    backend = backend_lib.require("experts", backend)
    _check(x_TM, ids_TS, weights_TS, w13, w2, layer)
    if backend == "reference":
        y = reference(
            x_TM, ids_TS, weights_TS, w13, w2, layer=layer, first_expert=first_expert, limit=limit
        )
        first = jnp.arange(ids_TS.shape[1], dtype=jnp.int32)[None, :] > 0
        ids = jnp.where(jnp.broadcast_to(first, ids_TS.shape), -1, 0)
        return jnp.broadcast_to(y, (ids_TS.shape[1], *y.shape)), ids
    target = backend_lib.target(backend)
    return launch(x_TM, ids_TS, weights_TS, w13, w2, layer, first_expert, limit, target, tile=tile)


def _check(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w13: Weights,
    w2: Weights,
    layer: int | Array | None,
) -> None:
    lead = 2 if layer is not None else 1
    if not len(w13.shape) == len(w2.shape) == lead + 2:
        raise ValueError(
            f"experts: w13 {list(w13.shape)} and w2 {list(w2.shape)} need"
            f" {'[L, E, N, K]' if lead == 2 else '[E, N, K]'}"
        )
    m, f = w2.shape[-2:]
    ok = (
        x_TM.shape[1:] == (m,)
        and w13.shape == (*w2.shape[:-2], 2 * f, m)
        and ids_TS.shape == weights_TS.shape
        and ids_TS.shape[0] == x_TM.shape[0]
        and f % RUN == 0
    )
    if not ok:
        raise ValueError(
            f"experts: shapes do not fit: x {list(x_TM.shape)}, ids {list(ids_TS.shape)}, weights"
            f" {list(weights_TS.shape)}, w13 {list(w13.shape)}, w2 {list(w2.shape)}"
        )


def activate(gate: Array, up: Array, weight: Array, *, limit: float) -> Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) * weight, in float32."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(gate) * jnp.clip(up, -limit, limit) * weight


class Groups(NamedTuple):
    """Live pairs in tiles of one expert each; the first `used` tiles are in use."""

    used: Array  # int32 scalar
    expert: Array  # int32 [tiles], number among the experts held here
    pair: Array  # int32 [tiles, rows]; row * slots + slot, or the number of pairs where empty


def group(ids_TS: Array, first_expert: int | Array, num: int, rows: int) -> Groups:
    """Pairs sorted by expert (else in their own order) and cut into tiles of `rows`."""
    pairs = ids_TS.size
    local = ids_TS.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < num), local, num)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    count = jnp.bincount(local, length=num + 1)[:num].astype(jnp.int32)
    end = jnp.cumsum(count, dtype=jnp.int32)
    tiles_end = jnp.cumsum((count + rows - 1) // rows, dtype=jnp.int32)
    tile = jnp.arange(max_tiles(pairs, num, rows), dtype=jnp.int32)
    # Comparing all is one launch on a GPU; a binary search is one a halving.
    expert = jnp.searchsorted(tiles_end, tile, side="right", method="compare_all")
    expert = jnp.minimum(expert, num - 1).astype(jnp.int32)
    before = jnp.where(expert > 0, tiles_end[expert - 1], 0)
    start = end[expert] - count[expert] + (tile - before) * rows
    at = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    live = (at < end[expert][:, None]) & (tile < tiles_end[-1])[:, None]
    pair = jnp.where(live, order[jnp.minimum(at, pairs - 1)], pairs)
    return Groups(tiles_end[-1], expert, pair)


def max_tiles(pairs: int, num: int, rows: int) -> int:
    """Largest number of tiles that `pairs` pairs over `num` experts can need."""
    return min(pairs, num) + pairs // rows if pairs >= rows else min(pairs, num)


def reference(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w13: Weights,
    w2: Weights,
    *,
    layer: int | Array | None = None,
    first_expert: int | Array = 0,
    limit: float,
) -> Array:
    """The definition: live pairs sorted by expert, tiles of eight rows of one expert."""
    slots, num, f = ids_TS.shape[1], w2.shape[-3], w2.shape[-1]
    pairs = ids_TS.size
    groups = group(ids_TS, first_expert, num, ROW_TILE)

    def of(w: Weights, expert: Array) -> Array:
        if layer is not None:
            w = packing.index(w, layer) if isinstance(w, QuantArray) else w[layer]
        if isinstance(w, QuantArray):
            return packing.unpack(packing.index(w, expert))
        return jnp.asarray(w[expert])

    def tile(i: Array, out: Array) -> Array:
        expert, pair = groups.expert[i], groups.pair[i]
        real = jnp.minimum(pair, pairs - 1)
        weight = weights_TS.reshape(-1)[real][:, None]
        gate_up = product(x_TM[real // slots], of(w13, expert))
        gate_up = gate_up.reshape(ROW_TILE, f // RUN, 2, RUN)
        gate, up = (gate_up[:, :, i].reshape(ROW_TILE, f) for i in (0, 1))
        h = activate(gate, up, weight, limit=limit).astype(x_TM.dtype)
        return out.at[pair].set(product(h, of(w2, expert)))

    # The last row takes what fills up tiles.
    out = jnp.zeros((pairs + 1, x_TM.shape[1]), jnp.float32)
    out = lax.fori_loop(jnp.int32(0), groups.used, tile, out)
    return combine(out[:pairs].reshape(*ids_TS.shape, -1).transpose(1, 0, 2))


def combine(out_STM: Array) -> Array:
    """Sum over slots, first slot first."""
    y = out_STM[0]
    for s in range(1, out_STM.shape[0]):
        y = y + out_STM[s]
    return y


# --- The kernels ---


def launch(
    x_TM: Array,
    ids_TS: Array,
    weights_TS: Array,
    w13: Weights,
    w2: Weights,
    layer: int | Array | None,
    first_expert: int | Array,
    limit: float,
    target: decode.Target,
    *,
    tile: Tile | None = None,
) -> tuple[Array, Array]:
    """`by_slot` by the kernels written for `target`."""
    kinds = [kernel_format("experts", w) for w in (w13, w2)]
    if x_TM.dtype != jnp.bfloat16:
        raise NotImplementedError(f"experts: the kernel takes bfloat16 rows, not {x_TM.dtype}")
    (t, slots), (num, m, f) = ids_TS.shape, w2.shape[-3:]
    if tile is None:
        size = "few" if t <= DOT_ROWS else "many"
        default = default_tile(t, target)
        key = f"{kinds[0]}+{kinds[1]}/{size}"
        tile = backend_lib.tile("experts", default, key=key, target=target)
    if slots > 8:
        raise NotImplementedError(f"experts: the kernel takes at most 8 slots, not {slots}")
    pairs, few = t * slots, t <= DOT_ROWS
    if few:
        # Groups are found by the programs themselves; any pair may lead one.
        rows, tiles = few_dot_rows(t, target), pairs
        found: tuple[Array, ...] = (ids_TS,)
    else:
        narrow = DOT_ROWS * (2 if all(block_of(k) == 128 for k in kinds) else 1)
        rows = _group_rows(pairs, num, 128 if tile.wide else narrow)
        groups, tiles = group(ids_TS, first_expert, num, rows), max_tiles(pairs, num, rows)
        found = (groups.used.reshape(1), groups.expert, groups.pair)
    common = _Common(
        t=t, slots=slots, num=num, rows=rows, few=few, stacked=layer is not None, target=target,
        dot_rows=rows if tile.wide or few else DOT_ROWS,
    )  # fmt: skip
    numbers = [scalar(0 if layer is None else layer), scalar(first_expert)]
    shared = (*numbers, *found, weights_TS.reshape(-1))
    h, *own = _call(
        "experts_up", common, w13, x_TM, shared, limit=limit, tiles=tiles, n=tile.up_rows,
        unroll=tile.up_unroll, num_warps=tile.up_warps, num_stages=tile.up_stages,
        shapes=(jax.ShapeDtypeStruct((tiles * rows if few else pairs, f), x_TM.dtype),
                *[jax.ShapeDtypeStruct(ids_TS.shape, jnp.int32)] * few),
    )  # fmt: skip
    [out] = _call(
        "experts_down", common, w2, h, shared, limit=None, tiles=tiles, n=tile.down_rows,
        unroll=tile.down_unroll, num_warps=tile.down_warps, num_stages=tile.down_stages,
        shapes=(jax.ShapeDtypeStruct((slots, t, m), jnp.float32),),
    )  # fmt: skip
    if few:
        return out, own[0]
    local = ids_TS - first_expert
    return out, jnp.where((local >= 0) & (local < num), local, -1)


def _group_rows(pairs: int, num: int, most: int) -> int:
    """Rows of a group: about what an expert gets on average, 16 to `most`."""
    rows = DOT_ROWS
    while rows < most and rows * num < pairs:
        rows *= 2
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Common:
    t: int
    slots: int
    num: int
    rows: int
    dot_rows: int
    few: bool
    stacked: bool
    target: decode.Target


def _call(
    name: str,
    common: _Common,
    w: Weights,
    x: Array,
    shared: tuple[Array, ...],
    *,
    limit: float | None,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    tiles: int,
    n: int,
    unroll: int,
    num_warps: int,
    num_stages: int,
) -> list[Array]:
    format, (rows, cols) = kernel_format(name, w), w.shape[-2:]
    step = block_of(format) * unroll
    while rows % n and n > DOT_ROWS:
        n //= 2  # a tile measured on a larger model
    if rows % n or -(-cols // block_of(format)) * block_of(format) % step:
        raise NotImplementedError(
            f"{name}: {format} [{rows}, {cols}] needs N a multiple of {n} and K of {step}"
        )
    names, arrays = operands(w)
    kernel = functools.partial(
        _kernel, c=common, format=format, names=names, n=n, unroll=unroll, cols=cols, limit=limit
    )
    y: list[Array] = backend_lib.pallas(
        kernel,
        name=f"{name}_{format}",
        grid=(rows // n, tiles),
        out_shape=shapes,
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=common.target == "interpret",
    )(*shared, x, *arrays)
    return y


def _kernel(
    layer_ref: Any,
    first_ref: Any,
    *refs: Any,
    c: _Common,
    format: str,
    names: list[str],
    n: int,
    unroll: int,
    cols: int,
    limit: float | None,
) -> None:
    group_refs, refs = (refs[:1], refs[1:]) if c.few else (refs[:3], refs[3:])
    (weight_ref, x_ref), refs = refs[:2], refs[2:]
    weights, out_refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    out_ref = out_refs[0]
    # Read here: emulation knows program numbers at the top level only.
    column, group_ = (pl.program_id(i) for i in range(2))
    blocks = -(-cols // block_of(format))
    if c.few:
        first = plgpu.load(first_ref.at[jnp.int32(0)])
        expert, few_pairs, used = _group_of(group_refs[0], group_, first, c)
        if len(out_refs) > 1:

            @pl.when(column == 0)
            def _() -> None:
                plgpu.store(out_refs[1].at[_row_and_slot(group_, c)], expert)

    else:
        used = group_ < plgpu.load(group_refs[0].at[jnp.int32(0)])

    @pl.when(used)
    def _() -> None:
        if c.few:
            lead: tuple[Any, ...] = (expert,)
            pairs = [few_pairs]
        else:
            lead = (plgpu.load(group_refs[1].at[group_]),)
            pairs = [
                plgpu.load(group_refs[2].at[group_, pl.ds(start, c.dot_rows)])
                for start in range(0, c.rows, c.dot_rows)
            ]
        if c.stacked:
            lead = (plgpu.load(layer_ref.at[jnp.int32(0)]), *lead)
        hits = [p < c.t * c.slots for p in pairs]
        if c.few:  # every row has its own place in a group: runs of rows load faster
            start = jnp.int32(0) if limit is not None else group_ * c.rows
            rows = [Rows(size=c.rows, start=start, live=hits[0])]
        else:
            rows = [
                Rows(size=c.dot_rows, number=p if limit is None else p // c.slots, live=hit)
                for p, hit in zip(pairs, hits, strict=True)
            ]
        totals = accumulate(
            format, weights, lead, column * n, n, x_ref=x_ref,
            groups=rows, first=0, blocks=blocks, cols=cols, unroll=unroll, target=c.target,
        )  # fmt: skip
        for pair, hit, acc in zip(pairs, hits, totals, strict=True):
            y = finish(format, weights, lead, acc)
            if limit is not None:
                weight = plgpu.load(weight_ref.at[pair], mask=hit, other=0.0)
                y = _activated(y, weight, limit)
            width, number = y.shape[0], pair
            if c.few and limit is not None:
                number = group_ * c.rows + jnp.arange(c.rows, dtype=jnp.int32)
            at: tuple[Any, ...] = grid_index(number, column * width, width)
            mask = jnp.broadcast_to(hit[:, None], at[0].shape)
            if limit is None:
                slots = jnp.full(at[0].shape, c.slots, jnp.int32)
                at = (lax.rem(at[0], slots), lax.div(at[0], slots), at[1])
            plgpu.store(out_ref.at[at], y.T.astype(out_ref.dtype), mask=mask)


def _row_and_slot(pair: Array, c: _Common) -> tuple[Array, Array]:
    slots = jnp.int32(c.slots)
    return lax.div(pair, slots), lax.rem(pair, slots)


def _group_of(ids_ref: Any, pair: Array, first: Array, c: _Common) -> tuple[Array, Array, Array]:
    """The group that a pair leads, of at most 16 rows of at most 8 slots.

    Returns: the pair's expert among those held here, or -1; of every row its pair with that expert,
        int32 [rows], the number of pairs where it has none; whether the pair is the first of them.
    """
    local = plgpu.load(ids_ref.at[_row_and_slot(pair, c)]) - first
    expert = jnp.where((local >= 0) & (local < c.num), local, -1)
    row = lax.broadcasted_iota(jnp.int32, (c.rows, 8), 0)
    slot = lax.broadcasted_iota(jnp.int32, row.shape, 1)
    inside = (row < c.t) & (slot < c.slots)
    at = (jnp.minimum(row, c.t - 1), jnp.minimum(slot, c.slots - 1))
    same = inside & (plgpu.load(ids_ref.at[at]) - first == expert)
    pairs = c.t * c.slots
    own = jnp.min(jnp.where(same, row * c.slots + slot, pairs), axis=1)
    return expert, own, (expert >= 0) & (jnp.min(own) == pair)


def _activated(total: Array, weight: Array, limit: float) -> Array:
    """[2 n, rows] with gate and up in runs of eight -> [n, rows]."""
    n2, rows = total.shape
    both = total.reshape(n2 // (2 * RUN), 2, RUN, rows)
    is_up = lax.broadcasted_iota(jnp.int32, both.shape, 1) == 1
    gate = jnp.sum(jnp.where(is_up, 0.0, both), axis=1)
    up = jnp.sum(jnp.where(is_up, both, 0.0), axis=1)
    return activate(gate, up, weight[None, None, :], limit=limit).reshape(n2 // 2, rows)
