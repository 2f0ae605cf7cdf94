"""Which compressed rows of a ratio-4 layer each row of a batch attends to.

The operation that a step calls; `indexer` holds its mathematics. One kernel scores 64 rows of one
query's history to a program, through the block table. Another picks the best of up to 8192 scores
exactly: it finds the score of the last one taken, bit by bit, counting how many reach each
candidate, and compacts what is at or above it in ascending order. Longer histories are picked from
in rounds: the best rows are among the best of their part. Both stop at the lane's own length and
compute a row in one way, whatever its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend as backend_lib
from pallas_kernels import indexer, ring
from pallas_kernels.backend import Backend, Target
from pallas_kernels.dot import dot_onto
from pallas_kernels.indexer import NONE, PAGE_ROWS

DOT_ROWS = 16
"""Index heads of one product."""

SCORE_BYTES = 256 << 20
"""Scores in memory at a time; more rows than that go in groups, one after the other."""

LEAST = jnp.iinfo(jnp.int32).min


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernels cut their work; the same for every number of rows.

    Attributes:
      keys: rows that one program scores.
      part: scores that one program picks from, a power of two, at most 16384.
      warps, stages: of the compiler, for scoring. pick_warps: for picking.
    """

    keys: int = 64
    part: int = 8192
    warps: int = 4
    stages: int = 1
    pick_warps: int = 8


def default_tile(target: Target) -> Tile:
    """A reasonable tile without measurement."""
    return Tile(stages=3, pick_warps=16) if target == "cuda" else Tile()


def select(
    q_THD: Array,
    weight_TH: Array,
    keys: Array,
    layer: int | Array,
    table: Array,
    slot_T: Array,
    visible_T: Array,
    *,
    top_k: int,
    backend: Backend,
    tile: Tile | None = None,
) -> Array:
    """Row numbers of the `top_k` best visible rows of every query, ascending, NONE at the end.

    score = sum_h weight[h] * relu(q[h] . key); ties go to the lower row. With at most `top_k`
    visible rows all of them are selected, and nothing is scored.

    Args:
        q_THD: index queries after rope; the kernel takes bfloat16, D a multiple of 16.
        weight_TH: float32 head weights, scaled, may be negative.
        keys: the whole pool [L, (P+1)*32, D]; layer: which of L.
        table: int32 [S+1, MP]. slot_T: int32. visible_T: int32, rows that the query may see (0 for
            padding).
        top_k: how many to keep, at most half of the tile's part.
        backend: "reference", "interpret" or "triton". The reference takes rows one by one.
        tile: overrides the measured or default tile.

    Returns: int32 [T, top_k].
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
        these dtypes or sizes.
    Source: architecture of DeepSeek-V4, lightning indexer.
    """
    backend = backend_lib.require("indexer", backend)
    t, heads, dim = q_THD.shape
    if not (
        weight_TH.shape == (t, heads)
        and keys.ndim == 3
        and keys.shape[2] == dim
        and slot_T.shape == visible_T.shape == (t,)
    ):
        raise ValueError(
            f"indexer: shapes do not fit: q {list(q_THD.shape)}, weight {list(weight_TH.shape)},"
            f" keys {list(keys.shape)}, slot {list(slot_T.shape)}, visible {list(visible_T.shape)}"
        )
    if backend == "reference":

        def one(row: tuple[Array, ...]) -> Array:
            q, w, s, v = (a[None] for a in row)
            return indexer.top_rows(q, w, keys, layer, table, s, v, top_k=top_k)[0]

        ids: Array = lax.map(one, (q_THD, weight_TH, slot_T, visible_T))
        return ids
    target = backend_lib.target(backend)
    return launch(q_THD, weight_TH, keys, layer, table, slot_T, visible_T, top_k, target, tile=tile)


# --- The kernels ---


def launch(
    q_THD: Array,
    weight_TH: Array,
    keys: Array,
    layer: int | Array,
    table: Array,
    slot_T: Array,
    visible_T: Array,
    top_k: int,
    target: Target,
    *,
    tile: Tile | None = None,
) -> Array:
    """`select` by the kernels written for `target`."""
    t, heads, dim = q_THD.shape
    if q_THD.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"indexer: the kernel takes bfloat16 queries and keys, not {q_THD.dtype} and"
            f" {keys.dtype}"
        )
    if tile is None:
        key = f"{heads}x{dim}"
        tile = backend_lib.tile("indexer", default_tile(target), key=key, target=target)
    if dim % DOT_ROWS or 2 * top_k > tile.part:
        raise NotImplementedError(
            f"indexer: no kernel for {dim} channels (multiples of {DOT_ROWS}) and the best {top_k}"
            f" (at most {tile.part // 2})"
        )
    capacity = table.shape[1] * PAGE_ROWS
    part = min(tile.part, pl.next_power_of_2(max(capacity, 2 * top_k, tile.keys)))
    padded = -(-capacity // part) * part
    number = ring.scalar(layer)
    interpret = target == "interpret"

    def rows(q: Array, weight: Array, slot: Array, visible: Array) -> Array:
        score = backend_lib.pallas(
            functools.partial(_score_kernel, tile=tile, top_k=top_k),
            name="indexer_score",
            grid=(-(-capacity // tile.keys), q.shape[0]),
            out_shape=jax.ShapeDtypeStruct((q.shape[0], padded), jnp.float32),
            num_warps=tile.warps,
            num_stages=tile.stages,
            interpret=interpret,
        )(number, slot, visible, table, q, weight, keys)
        return pick(score, visible, top_k, part, tile.pick_warps, interpret=interpret)

    group = max(1, min(t, SCORE_BYTES // (4 * padded)))
    while t % group:
        group -= 1
    operands = (q_THD, weight_TH, slot_T, visible_T)
    if group == t:
        return rows(*operands)
    grouped = jax.tree.map(lambda a: a.reshape(t // group, group, *a.shape[1:]), operands)
    ids: Array = lax.map(lambda row: rows(*row), grouped)
    return ids.reshape(t, top_k)


def _score_kernel(
    layer_ref: Any,
    slot_ref: Any,
    visible_ref: Any,
    table_ref: Any,
    q_ref: Any,
    weight_ref: Any,
    keys_ref: Any,
    out_ref: Any,
    *,
    tile: Tile,
    top_k: int,
) -> None:
    """Scores of `tile.keys` rows of one query's history."""
    block, t = pl.program_id(0), pl.program_id(1)
    visible = plgpu.load(visible_ref.at[t])

    @pl.when((visible > top_k) & (block * tile.keys < visible))
    def _() -> None:
        heads, dim = q_ref.shape[1:]
        layer = plgpu.load(layer_ref.at[jnp.int32(0)])
        slot = plgpu.load(slot_ref.at[t])
        # Past the end the last row is scored again; nobody reads those.
        row = block * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
        row = jnp.minimum(row, visible - 1)
        page = plgpu.load(table_ref.at[slot, lax.div(row, jnp.int32(PAGE_ROWS))])
        at = page * PAGE_ROWS + lax.rem(row, jnp.int32(PAGE_ROWS))
        width = min(dim & -dim, 128)
        chunks = {c: ring.load_rows(keys_ref, (layer,), at, c, width) for c in range(0, dim, width)}

        def heads_of(i: Array, total: Array) -> Array:
            number = i * DOT_ROWS + jnp.arange(DOT_ROWS, dtype=jnp.int32)
            inside = jnp.minimum(number, heads - 1)
            s = jnp.zeros((DOT_ROWS, tile.keys), jnp.float32)
            for c, chunk in chunks.items():
                s = dot_onto(s, ring.load_rows(q_ref, (t,), inside, c, width), chunk)
            weight = plgpu.load(weight_ref.at[t, inside])
            weight = jnp.where(number < heads, weight, 0.0)
            return total + weight[:, None] * jnp.maximum(s, 0.0)

        # Always all; the compiler does not know, and so does not unroll what would take more
        # registers than RDNA 3 has.
        count = -(-heads // DOT_ROWS) + jnp.minimum(slot, 0)
        total = jnp.zeros((DOT_ROWS, tile.keys), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), count, heads_of, total)
        score = jnp.sum(total, axis=0)
        # -0 becomes +0, so that ties are ties.
        score = jnp.where(score == 0.0, 0.0, score)
        plgpu.store(out_ref.at[t, pl.ds(block * tile.keys, tile.keys)], score)


def pick(
    scores_TS: Array, visible_T: Array, top_k: int, part: int, warps: int, *, interpret: bool
) -> Array:
    """As `indexer.select`, by kernels: rounds that each leave `top_k` of every `part` scores.

    Args: scores_TS: float32, S a multiple of `part`; what is not visible may hold anything.
    """
    ids: Array | None = None
    scores = scores_TS
    while True:
        t, count = scores.shape
        parts = count // part
        of = jax.ShapeDtypeStruct
        shape = (t, parts * top_k)
        outs = (of(shape, jnp.int32), *((of(shape, jnp.float32),) if parts > 1 else ()))
        inputs = (visible_T, scores, *(() if ids is None else (ids,)))
        found = backend_lib.pallas(
            functools.partial(_pick_kernel, top_k=top_k, part=part, first=ids is None),
            name="indexer_pick",
            grid=(parts, t),
            out_shape=outs,
            num_warps=warps,
            num_stages=1,
            interpret=interpret,
        )(*inputs)
        ids = found[0]
        if parts == 1:
            return ids
        # The next round: padded to whole parts, in one part if it fits.
        part = min(part, pl.next_power_of_2(parts * top_k))
        missing = ((0, 0), (0, -(parts * top_k) % part))
        ids = jnp.pad(ids, missing, constant_values=NONE)
        scores = jnp.pad(found[1], missing)


def _pick_kernel(
    visible_ref: Any, scores_ref: Any, *refs: Any, top_k: int, part: int, first: bool
) -> None:
    """The best of one part: row numbers ascending, and their scores if another round follows."""
    ids_ref, (out_ref, *score_ref) = (None, refs) if first else (refs[0], refs[1:])
    block, t = pl.program_id(0), pl.program_id(1)
    here = jnp.arange(part, dtype=jnp.int32)
    number = block * part + here
    visible = plgpu.load(visible_ref.at[t])
    at = (t, pl.ds(block * part, part))
    if ids_ref is None:
        valid, row = number < visible, number
        count = jnp.clip(visible - block * part, 0, part)
    else:
        row = plgpu.load(ids_ref.at[at])
        valid = row != NONE
        count = jnp.sum(valid.astype(jnp.int32))
    score = plgpu.load(scores_ref.at[at])
    bits = lax.bitcast_convert_type(score, jnp.int32)
    # Integers in the order of the floats; what is not there comes below all of them.
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = jnp.where(valid, jnp.maximum(ordered, LEAST + 1), LEAST)
    last = _last_taken(ordered, count, top_k)
    above, equal = ordered > last, ordered == last
    kept = jnp.minimum(count, top_k)
    room = kept - jnp.sum(above.astype(jnp.int32))
    # How many of each kind come before: two counts in one running sum.
    both = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    before = jnp.cumsum(both) - both
    equal_before = before >> 16
    taken = above | (equal & (equal_before < room))
    place = block * top_k + (before & 0xFFFF) + jnp.minimum(equal_before, room)
    plgpu.store(out_ref.at[t, place], row, mask=taken)
    if score_ref:
        plgpu.store(score_ref[0].at[t, place], score, mask=taken)
    rest = jnp.arange(pl.next_power_of_2(top_k), dtype=jnp.int32)
    none = jnp.full(rest.shape, NONE, jnp.int32)
    plgpu.store(out_ref.at[t, block * top_k + rest], none, mask=(rest >= kept) & (rest < top_k))


def _last_taken(ordered: Array, count: Array, top_k: int) -> Array:
    """The largest integer that `top_k` of `ordered` reach; LEAST if there are no more than that."""

    def unsettled(state: tuple[Array, Array, Array]) -> Array:
        bit, _, reach = state
        return (bit >= 0) & (reach > top_k)

    def next_bit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, last, reach = state
        higher = last + (jnp.int32(1) << bit)
        found = jnp.sum((ordered >= higher).astype(jnp.int32))
        more = found >= top_k
        return bit - 1, jnp.where(more, higher, last), jnp.where(more, found, reach)

    start = (jnp.int32(31), jnp.int32(LEAST), count)
    return lax.while_loop(unsettled, next_bit, start)[1]
