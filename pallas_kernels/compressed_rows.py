"""The compressors of a layer for a batch of rows: state into its ring, finished rows into the pool.

The operation that a step calls; `compressor` holds its mathematics. A program takes one row: it
writes the row's state and, if the row ends a window, pools the window, normalises and rotates the
result and writes it to its page. State of rows of the same step is read from the step, older state
from the ring, so that programs do not wait for one another. Rings and pools are updated in place.
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
from pallas_kernels import compressor, ring, rope
from pallas_kernels.backend import Backend, Target
from pallas_kernels.cached_attention import LOG2_E, power_of_two

PAGE_TOKENS = 128
"""Positions of a page."""

BLOCK = 16
"""Rows of a window that are pooled at a time. It decides the result's bits."""


class State(NamedTuple):
    """What one compressor keeps, and what it gets in a step. C = overlap * D."""

    ring: Array
    """float32 [L, S+1, R, 2, C]: value and gate of position p of slot s at [s, p mod R]."""
    pool: Array
    """[L, rows, D], page after page."""
    step_T2C: Array
    """float32, value and gate of each row, the gate's position term already added."""
    norm_ND: Array
    """Stack of norm weights."""


class Rows(NamedTuple):
    """Where the rows of a step stand; those of one slot are consecutive. int32 [T] each."""

    slot: Array
    """The last slot (trash) for padding."""
    pos: Array
    run: Array
    """Index of each row among the rows of its slot in this step."""
    after: Array
    """Rows of the same slot that follow."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel cuts its work; the same for every number of rows."""

    num_warps: int = 8


def update(
    states: tuple[State, ...],
    rows: Rows,
    table: Array,
    cs_TR: Array,
    *,
    layer: int | Array,
    index: int | Array,
    ratio: int,
    eps: float,
    chunk: bool,
    backend: Backend,
    tile: Tile | None = None,
) -> tuple[tuple[Array, Array], ...]:
    """Take the rows of a step into rings and pools.

    Args:
        states: the layer's compressors (of ratio 4: attention's and the indexer's).
        rows, table: where the rows stand; int32 [S+1, MP], physical page.
        cs_TR: float32 [T, 2, R/2] from `rope.cos_sin` at pos - pos % ratio.
        layer: entry of the norm stacks. index: entry of rings and pools.
        ratio: tokens per row. eps: of the norm.
        chunk: a slot may have more rows than its ring holds beside what a window needs. The ring
            is then read as it was before the step and gets the last rows afterwards. False: R is at
            least overlap * ratio - 1 + the rows of a slot.
        backend: "reference", "interpret" or "triton". The reference takes rows one by one.
        tile: overrides the measured or default tile.

    Returns: ring and pool of every state.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
        these dtypes.
    Source: architecture of DeepSeek-V4, compressor; rings and pages as `ring`.
    """
    backend = backend_lib.require("compressor", backend)
    for s in states:
        _check(s, rows, ratio)
    if backend == "reference":
        return tuple(
            _reference(s, rows, table, cs_TR, layer, index, ratio, eps, chunk) for s in states
        )
    target = backend_lib.target(backend)
    return launch(states, rows, table, cs_TR, layer, index, ratio, eps, chunk, target, tile=tile)


def _check(s: State, rows: Rows, ratio: int) -> None:
    t, width = len(rows.pos), s.pool.shape[-1]
    c = compressor.overlap(ratio) * width
    if not (
        s.ring.ndim == 5
        and s.ring.shape[3:] == (2, c)
        and s.step_T2C.shape == (t, 2, c)
        and s.norm_ND.shape[1:] == (width,)
        and rows.slot.shape == rows.run.shape == rows.after.shape == (t,)
        and PAGE_TOKENS % ratio == 0
    ):
        raise ValueError(
            f"compressor: shapes do not fit ratio {ratio}: ring {list(s.ring.shape)}, pool"
            f" {list(s.pool.shape)}, step {list(s.step_T2C.shape)}, norm {list(s.norm_ND.shape)},"
            f" {t} positions"
        )


def _reference(
    s: State, rows: Rows, table: Array, cs_TR: Array, layer: int | Array, index: int | Array,
    ratio: int, eps: float, chunk: bool,
) -> tuple[Array, Array]:  # fmt: skip
    live = rows.slot != s.ring.shape[1] - 1
    keep = live & (rows.after < s.ring.shape[2]) if chunk else live
    count = compressor.overlap(ratio) * ratio
    got, valid = ring.read_window(
        s.ring, index, rows.slot, rows.pos, count, step_T=s.step_T2C, run_T=rows.run
    )

    def one(row: tuple[Array, ...]) -> Array:
        got, valid, cs = (a[None] for a in row)
        pooled = compressor.pool(got[:, :, 0], got[:, :, 1], valid, ratio=ratio)
        return compressor.finish(pooled, s.norm_ND[layer], cs, eps=eps, dtype=s.pool.dtype)[0]

    made = lax.map(one, (got, valid, cs_TR))
    emits = live & ((rows.pos + 1) % ratio == 0)
    at = ring.page_rows(table, rows.slot, rows.pos // ratio, PAGE_TOKENS // ratio)
    pool = s.pool.at[index, jnp.where(emits, at, s.pool.shape[1] - 1)].set(made)
    return ring.write(s.ring, index, rows.slot, rows.pos, s.step_T2C, keep), pool


# --- The kernels ---


def launch(
    states: tuple[State, ...],
    rows: Rows,
    table: Array,
    cs_TR: Array,
    layer: int | Array,
    index: int | Array,
    ratio: int,
    eps: float,
    chunk: bool,
    target: Target,
    *,
    tile: Tile | None = None,
) -> tuple[tuple[Array, Array], ...]:
    """`update` by the kernels written for `target`."""
    for s in states:
        if s.pool.dtype != jnp.bfloat16 or {s.ring.dtype, s.step_T2C.dtype} != {
            jnp.dtype("float32")
        }:
            raise NotImplementedError(
                f"compressor: the kernel takes float32 states and bfloat16 rows, not"
                f" {s.ring.dtype}, {s.step_T2C.dtype} and {s.pool.dtype}"
            )
    if tile is None:
        tile = backend_lib.tile("compressor", Tile(), key=f"ratio{ratio}", target=target)
    entry = ring.scalar(index)
    common = (ring.scalar(layer), entry, rows.slot, rows.pos, rows.run, table, cs_TR)
    kept = (x for s in states for x in (s.ring, s.pool))
    operands = (*common, *kept, *(x for s in states for x in (s.step_T2C, s.norm_ND)))
    call = functools.partial(
        backend_lib.pallas, grid=(len(rows.pos), len(states)), num_stages=1,
        num_warps=tile.num_warps, interpret=target == "interpret",
    )  # fmt: skip

    def like(arrays: list[Array]) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)

    both = [x for s in states for x in (s.ring, s.pool)]
    # The rings pass through in any case: writing them cannot overtake reading them.
    got = call(
        functools.partial(_kernel, count=len(states), ratio=ratio, eps=eps, store=not chunk),
        name="compressor",
        out_shape=like(both),
        aliases={len(common) + i: i for i in range(len(both))},
    )(*operands)
    rings, pools = list(got[::2]), list(got[1::2])
    if chunk:
        steps = [s.step_T2C for s in states]
        rings = call(
            functools.partial(_store_kernel, count=len(states)),
            name="compressor_store",
            out_shape=like(rings),
            aliases={4 + i: i for i in range(len(states))},
        )(entry, rows.slot, rows.pos, rows.after, *rings, *steps)
    return tuple(zip(rings, pools, strict=True))


def _kernel(*refs: Any, count: int, ratio: int, eps: float, store: bool) -> None:
    """One row of one compressor: store its state, pool what it ends."""
    layer_ref, entry, slots, positions, runs, table_ref, cs_ref, *refs_ = refs
    kept, given = refs_[: 2 * count], refs_[2 * count : 4 * count]
    out = refs_[4 * count :]
    t, which = pl.program_id(0), pl.program_id(1)
    layer, index = (plgpu.load(ref.at[jnp.int32(0)]) for ref in (layer_ref, entry))
    slot, pos = plgpu.load(slots.at[t]), plgpu.load(positions.at[t])
    run = plgpu.load(runs.at[t])
    for i in range(count):
        (ring_ref, _), (step_ref, norm_ref) = kept[2 * i : 2 * i + 2], given[2 * i : 2 * i + 2]
        new_ring, new_pool = out[2 * i : 2 * i + 2]
        live = (which == i) & (slot != ring_ref.shape[1] - 1)

        @pl.when(live & (lax.rem(pos + 1, jnp.int32(ratio)) == 0))
        def _(
            ring_ref: Any = ring_ref, step_ref: Any = step_ref, norm_ref: Any = norm_ref,
            new_pool: Any = new_pool,
        ) -> None:  # fmt: skip
            dim = norm_ref.shape[1]
            pooled = _pooled(ring_ref, step_ref, t, index, slot, pos, run, dim, ratio)
            row = _finished(pooled, norm_ref, cs_ref, t, layer, dim, eps)
            per_page = PAGE_TOKENS // ratio
            page = plgpu.load(table_ref.at[slot, lax.div(pos, jnp.int32(PAGE_TOKENS))])
            at = page * per_page + lax.rem(lax.div(pos, jnp.int32(ratio)), jnp.int32(per_page))
            _store(new_pool, (index, at), row, dim)

        if store:

            @pl.when(live)
            def _(
                ring_ref: Any = ring_ref, step_ref: Any = step_ref, new_ring: Any = new_ring
            ) -> None:
                _copy_state(step_ref, new_ring, t, index, slot, pos)


def _store_kernel(*refs: Any, count: int) -> None:
    """One row of one compressor: store its state if the ring has room for it."""
    entry, slots, positions, afters, *rest = refs
    steps, out = rest[count : 2 * count], rest[2 * count :]
    t, which = pl.program_id(0), pl.program_id(1)
    index = plgpu.load(entry.at[jnp.int32(0)])
    slot, pos = plgpu.load(slots.at[t]), plgpu.load(positions.at[t])
    after = plgpu.load(afters.at[t])
    for i, (step_ref, new_ring) in enumerate(zip(steps, out, strict=True)):
        live = (slot != new_ring.shape[1] - 1) & (after < new_ring.shape[2])

        @pl.when((which == i) & live)
        def _(step_ref: Any = step_ref, new_ring: Any = new_ring) -> None:
            _copy_state(step_ref, new_ring, t, index, slot, pos)


def _columns(dim: int) -> tuple[Array, Array | None]:
    """Channels in a register tile, and which of them exist (None: all)."""
    number = jnp.arange(pl.next_power_of_2(dim), dtype=jnp.int32)
    return number, None if len(number) == dim else number < dim


def _store(ref: Any, lead: tuple[Any, ...], value: Array, dim: int) -> None:
    number, inside = _columns(dim)
    plgpu.store(ref.at[(*lead, number)], value.astype(ref.dtype), mask=inside)


def _copy_state(
    step_ref: Any, ring_ref: Any, t: Array, index: Array, slot: Array, pos: Array
) -> None:
    width = step_ref.shape[2]
    number, inside = _columns(width)
    at = lax.rem(pos, jnp.int32(ring_ref.shape[2]))
    for kind in (jnp.int32(0), jnp.int32(1)):
        value = plgpu.load(step_ref.at[t, kind, number], mask=inside)
        plgpu.store(ring_ref.at[index, slot, at, kind, number], value, mask=inside)


def _pooled(
    ring_ref: Any, step_ref: Any, t: Array, index: Array, slot: Array, pos: Array, run: Array,
    dim: int, ratio: int,
) -> Array:  # fmt: skip
    """Pooled row of the window that ends at pos, float32 [channels]."""
    count = compressor.overlap(ratio) * ratio
    size = min(count, BLOCK)
    channel, inside = _columns(dim)
    shape = (size, len(channel))

    def block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        number = i * size + jnp.arange(size, dtype=jnp.int32)
        back = count - 1 - number
        valid, here = back <= pos, back <= run
        # The newer of two windows gives the trailing half of its channels.
        shift = jnp.where(number >= ratio, dim, 0) if count > ratio else jnp.zeros_like(number)
        column = shift[:, None] + jnp.broadcast_to(channel[None, :], shape)
        at = lax.rem(jnp.maximum(pos - back, 0), jnp.int32(ring_ref.shape[2]))

        def load(kind: int) -> Array:
            exists = valid[:, None] if inside is None else valid[:, None] & inside[None, :]
            mine = exists & here[:, None]
            own_at = (jnp.maximum(t - back, 0), jnp.int32(kind))
            own = _load(step_ref, own_at, column, mine)
            old = _load(
                ring_ref, (index, slot, at, jnp.int32(kind)), column, exists & ~here[:, None]
            )
            return jnp.where(here[:, None], own, old)

        gate = jnp.where(valid[:, None], load(1) * LOG2_E, -jnp.inf)
        new_top = jnp.maximum(top, jnp.ceil(jnp.max(gate, axis=0)))
        weight = jnp.exp2(gate - new_top[None, :])
        old = power_of_two(top - new_top)
        total = total * old + jnp.sum(weight, axis=0)
        mixed = mixed * old + jnp.sum(weight * load(0), axis=0)
        return new_top, total, mixed

    zeros = jnp.zeros(channel.shape, jnp.float32)
    start = (jnp.full(channel.shape, -1e30, jnp.float32), zeros, zeros)
    _, total, mixed = lax.fori_loop(0, count // size, block, start)
    return mixed / total


def _load(ref: Any, lead: tuple[Array, ...], column: Array, mask: Array) -> Array:
    """ref[lead, column], rows of `lead` by number; 0 where masked."""
    wide = tuple(x if x.ndim == 0 else jnp.broadcast_to(x[:, None], column.shape) for x in lead)
    return plgpu.load(ref.at[(*wide, column)], mask=mask, other=0.0)


def _finished(
    pooled: Array, norm_ref: Any, cs_ref: Any, t: Array, layer: Array, dim: int, eps: float
) -> Array:
    """As `compressor.finish`, bfloat16."""
    channel, inside = _columns(dim)
    x = pooled.astype(jnp.bfloat16).astype(jnp.float32)
    x = x if inside is None else jnp.where(inside, x, 0.0)
    weight = plgpu.load(norm_ref.at[layer, jnp.minimum(channel, dim - 1)]).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x * x) / dim + eps)
    y = (x * scale * weight).astype(jnp.bfloat16)
    return rope.turned(y, cs_ref, t, 2 * cs_ref.shape[2] - dim)
