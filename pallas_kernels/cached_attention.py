"""Attention of a ragged batch of rows over the cache: window and compressed rows where they lie.

The operation that a step calls; `attention` holds its mathematics. The kernels give one row's
heads to a program, 16 at a time, and find keys in the ring, in the pool through the block table, or
among the rows of the step. Keys come in the order of `attention`, cut into splits of 64 that depend
on the row's own position only. Scores are powers of two, and the running maximum is a whole
number: rescaling is exact, so that splits give the same bits whether they ran in one program or in
several, and a row's bits depend on nothing but the row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import attention, indexer, ring, rope
from pallas_kernels import backend as backend_lib
from pallas_kernels.backend import Backend, Target
from pallas_kernels.dot import dot_onto, mix_onto


class Window(NamedTuple):
    """Where the raw rows of a query's window lie."""

    ring: Array
    """[L, S+1, R, D], the row of position p of slot s at [s, p mod R]."""
    layer: int | Array
    """Which of L."""
    slot_T: Array
    """int32."""
    pos_T: Array
    """int32, absolute position of each query."""
    step_TD: Array | None = None
    """Rows of this step that the ring does not hold yet; those of one slot are consecutive. None:
    the ring has been written already."""
    run_T: Array | None = None
    """int32, index of each row among the rows of its slot in this step (with `step_TD`)."""


class Compressed(NamedTuple):
    """Where the compressed rows lie that a query may see."""

    pool: Array
    """[L, rows, D], page after page."""
    layer: int | Array
    """Which of L."""
    table: Array
    """int32 [S+1, MP], physical page."""
    visible_T: Array
    """int32, rows that each query may see."""
    selected_TK: Array | None = None
    """int32 row numbers from the indexer, ascending, min(visible, K) of them, NONE behind (ratio 4:
    32 rows a page). None: all visible rows (ratio 128: one row a page)."""


def attend(
    q_THD: Array,
    sink_LH: Array,
    window: Window,
    comp: Compressed | None = None,
    *,
    layer: int | Array,
    size: int,
    cs_TR: Array | None = None,
    backend: Backend,
    tile: Tile | None = None,
) -> tuple[Array, Array]:
    """Attention of a ragged batch of rows over window and compressed rows, read where they lie.

    Args:
        q_THD: queries after rope; the kernel takes bfloat16, D a multiple of 16.
        sink_LH: float32 stack of sinks; layer: which of L.
        window, comp: the keys; comp None: ratio 0. Rows of padding: visible 0, any position.
        size: positions of the window, the query's own included.
        cs_TR: float32 [T, 2, R/2] from `rope.cos_sin` at the query's position: the result is
            rotated back by these angles. None: it stays rotated.
        backend: "reference", "interpret" or "triton".
        tile: overrides the measured or default tile.

    Returns: out_THD, dtype of q, and the ring. Use the returned ring from here on: with `step_TD`
        it passes through the kernel, so that writing it cannot overtake reading it.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
        these dtypes or sizes.
    Source: architecture of DeepSeek-V4, "what a query sees".
    """
    backend = backend_lib.require("attention", backend)
    _check(q_THD, sink_LH, window, comp, size)
    if backend == "reference":
        return _reference(q_THD, sink_LH[layer], window, comp, size, cs_TR), window.ring
    target = backend_lib.target(backend)
    return launch(q_THD, sink_LH, window, comp, layer, size, cs_TR, target, tile=tile)


def _reference(
    q_THD: Array, sink_H: Array, window: Window, comp: Compressed | None, size: int,
    cs_TR: Array | None,
) -> Array:  # fmt: skip
    """One row after the other, so that a row's bits depend on nothing but the row."""
    keys_TWD, valid_TW = ring.read_window(
        window.ring, window.layer, window.slot_T, window.pos_T, size, step_T=window.step_TD,
        run_T=window.run_T,
    )  # fmt: skip
    rows = {"q": q_THD, "keys": keys_TWD, "valid": valid_TW, "slot": window.slot_T}
    found = {"cs": cs_TR}
    if comp is not None:
        found |= {"visible": comp.visible_T, "selected": comp.selected_TK}
    rows |= {k: v for k, v in found.items() if v is not None}

    def one(row: dict[str, Array]) -> Array:
        row = {k: v[None] for k, v in row.items()}
        seen: dict[str, Any] = {}
        if comp is not None:
            seen = {"pool": comp.pool, "layer": comp.layer, "table": comp.table,
                    "slot_T": row["slot"], "visible_T": row["visible"],
                    "selected_TK": row.get("selected")}  # fmt: skip
        out = attention.attend(row["q"], sink_H, row["keys"], row["valid"], **seen)
        return rope.rotate(out, row["cs"], inverse=True)[0] if "cs" in row else out[0]

    out: Array = lax.map(one, rows)
    return out


def _check(
    q_THD: Array, sink_LH: Array, window: Window, comp: Compressed | None, size: int
) -> None:
    t, heads, dim = q_THD.shape
    step = window.step_TD
    ok = (
        sink_LH.ndim == 2
        and sink_LH.shape[1] == heads
        and window.ring.ndim == 4
        and window.ring.shape[3] == dim
        and window.slot_T.shape == window.pos_T.shape == (t,)
        and (step is None) == (window.run_T is None)
        and (step is None or step.shape == (t, dim))
        and (step is not None or size <= window.ring.shape[2])
        and (comp is None or (comp.pool.ndim == 3 and comp.pool.shape[2] == dim))
    )
    if not ok:
        raise ValueError(
            f"attention: shapes do not fit: q {list(q_THD.shape)}, sink {list(sink_LH.shape)}, ring"
            f" {list(window.ring.shape)} for {size} positions,"
            f" pool {None if comp is None else list(comp.pool.shape)},"
            f" step {None if step is None else list(step.shape)}"
        )


# --- The kernels ---

SPLIT = 64
"""Keys of one partial result. It decides the result's bits."""

DOT_ROWS = 16
"""Heads of one product, at least."""

LOG2_E = 1.4426950408889634

LEAST = -1.0e5
"""A power of two that no score comes down to."""

MERGED = 8
"""Partial results that the merging kernel reads at a time."""

PARTIAL_BYTES = 256 << 20
"""Partial results in memory at a time; where they were more, a program takes all of a row."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernels cut their work. None of it changes the result.

    Attributes:
      heads: heads of one program: 16, or more where the matrix unit sums in the same way whatever
        its height (NVIDIA; not on AMD, whose instructions of 32 rows differ).
      width: channels of the keys that are loaded at a time, a power of two.
      channels: channels of the result of one program where it takes all splits of a row (others
        compute the scores again); 0: all.
      grid_rows: largest number of rows for which splits run as separate programs.
      num_warps, num_stages: of the compiler.
    """

    heads: int = DOT_ROWS
    width: int = 128
    channels: int = 0
    grid_rows: int = 16
    num_warps: int = 4
    num_stages: int = 1


def default_tile(t: int, heads: int, dim: int, target: Target) -> Tile:
    """A reasonable tile without measurement."""
    width = _largest_power_in(dim, 128)
    if target == "cuda":
        if t > Tile.grid_rows and heads % 32 == 0:
            return Tile(heads=32, width=width, num_warps=8, num_stages=3)
        return Tile(width=width, num_stages=4)
    if target == "rocm" and t > Tile.grid_rows and dim % 256 == 0:
        # All of 512 channels do not fit into the registers of RDNA 3.
        return Tile(width=64, channels=256)
    return Tile(width=width)


def _largest_power_in(n: int, most: int) -> int:
    """Largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the kernels know when they are compiled."""

    names: tuple[str, ...]
    heads: int
    dim: int
    size: int
    keys: int
    """Most compressed ones of a row."""
    page_rows: int

    @property
    def window_splits(self) -> int:
        """Splits of the window."""
        return -(-self.size // SPLIT)

    @property
    def comp_splits(self) -> int:
        """Most splits of compressed keys."""
        return -(-self.keys // SPLIT)


def launch(
    q_THD: Array,
    sink_LH: Array,
    window: Window,
    comp: Compressed | None,
    layer: int | Array,
    size: int,
    cs_TR: Array | None,
    target: Target,
    *,
    tile: Tile | None = None,
) -> tuple[Array, Array]:
    """`attend` by the kernels written for `target`."""
    t, heads, dim = q_THD.shape
    if q_THD.dtype != jnp.bfloat16 or window.ring.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"attention: the kernel takes bfloat16 queries and rows, not {q_THD.dtype} and"
            f" {window.ring.dtype}"
        )
    if tile is None:
        rows = "few" if t <= Tile.grid_rows else "many"
        default = default_tile(t, heads, dim, target)
        tile = backend_lib.tile("attention", default, key=f"{heads}x{dim}/{rows}", target=target)
    channels = tile.channels or dim
    if dim % channels or channels % tile.width or tile.width % DOT_ROWS or tile.heads % DOT_ROWS:
        raise NotImplementedError(
            f"attention: no kernel for {dim} channels with {tile}: channels must divide them, width"
            f" (a multiple of {DOT_ROWS}) must divide channels"
        )
    operands, facts = _operands(q_THD, sink_LH, window, comp, layer, size, cs_TR)
    splits, tiles = facts.comp_splits + facts.window_splits, -(-heads // tile.heads)
    in_grid = t <= tile.grid_rows and 4 * t * splits * heads * dim <= PARTIAL_BYTES
    out: Any = jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype)
    shapes: tuple[Any, ...] = (out,)
    if in_grid:
        of = jax.ShapeDtypeStruct
        part = of((t, splits, heads), jnp.float32)
        shapes = (part, part, of((t, splits, heads, dim), jnp.float32))
    aliases = {}
    if "step" in facts.names:  # the ring passes through
        aliases = {facts.names.index("raw"): len(shapes)}
        shapes = (*shapes, jax.ShapeDtypeStruct(window.ring.shape, window.ring.dtype))
    interpret = target == "interpret"
    run = backend_lib.pallas(
        functools.partial(_split_kernel if in_grid else _whole_kernel, facts=facts, tile=tile),
        name="attention_splits" if in_grid else "attention",
        grid=(tiles, splits if in_grid else dim // channels, t),
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases=aliases,
    )
    got: list[Array] = list(run(*operands.values()))
    raw = got.pop() if aliases else window.ring
    if not in_grid:
        return got[0], raw
    small = {k: v for k, v in operands.items() if k in ("layer", "pos", "visible", "sink", "cs")}
    merged = backend_lib.pallas(
        functools.partial(_merge_kernel, facts=dataclasses.replace(facts, names=tuple(small))),
        name="attention_merge",
        grid=(heads, t),
        out_shape=out,
        num_warps=4 if target == "cuda" else 2,
        num_stages=1,
        interpret=interpret,
    )(*small.values(), *got)
    return merged, raw


def _operands(
    q_THD: Array,
    sink_LH: Array,
    window: Window,
    comp: Compressed | None,
    layer: int | Array,
    size: int,
    cs_TR: Array | None,
) -> tuple[dict[str, Array], _Facts]:
    found: dict[str, Array | None] = {
        "layer": ring.scalar(layer), "raw_layer": ring.scalar(window.layer), "slot": window.slot_T,
        "pos": window.pos_T, "run": window.run_T, "q": q_THD, "sink": sink_LH, "raw": window.ring,
        "step": window.step_TD, "cs": cs_TR,
    }  # fmt: skip
    keys, page_rows = 0, 1
    if comp is not None:
        found |= {"comp_layer": ring.scalar(comp.layer), "pool": comp.pool, "table": comp.table,
                  "visible": comp.visible_T, "ids": comp.selected_TK}  # fmt: skip
        keys = comp.table.shape[1] if comp.selected_TK is None else comp.selected_TK.shape[1]
        page_rows = 1 if comp.selected_TK is None else indexer.PAGE_ROWS
    operands = {k: v for k, v in found.items() if v is not None}
    facts = _Facts(
        names=tuple(operands), heads=q_THD.shape[1], dim=q_THD.shape[2], size=size, keys=keys,
        page_rows=page_rows,
    )  # fmt: skip
    return operands, facts


class _Row(NamedTuple):
    """Scalars of the program's row."""

    t: Array
    slot: Array
    pos: Array
    keys: Array  # compressed ones
    first: Array  # split of the window that holds the oldest key
    layers: dict[str, Array]  # "layer" (of the weights), "raw_layer", "comp_layer"


def _row(refs: dict[str, Any], facts: _Facts, t: Array) -> _Row:
    pos = plgpu.load(refs["pos"].at[t])
    keys = jnp.int32(0)
    if "visible" in refs:
        keys = jnp.minimum(plgpu.load(refs["visible"].at[t]), facts.keys)
    first = jnp.maximum(facts.window_splits - 1 - lax.div(pos, jnp.int32(SPLIT)), 0)
    numbers = {k: plgpu.load(refs[k].at[jnp.int32(0)]) for k in refs if k.endswith("layer")}
    slot = plgpu.load(refs["slot"].at[t]) if "slot" in refs else jnp.int32(0)
    return _Row(t, slot, pos, keys, first, numbers)


Load = Callable[[Any, int], Array]
"""(first channel, channels) -> bfloat16 [SPLIT, channels]."""


def _compressed_keys(
    refs: dict[str, Any], facts: _Facts, row: _Row, i: Array
) -> tuple[Load, Array]:
    """Keys of one split of the compressed rows, and which of them count."""
    number = i * SPLIT + jnp.arange(SPLIT, dtype=jnp.int32)
    valid = number < row.keys
    # Past the end the last row is read again: a finite one, and no load needs a mask.
    number = jnp.minimum(number, row.keys - 1)
    if "ids" in refs:
        number = plgpu.load(refs["ids"].at[row.t, number])
        valid &= number != indexer.NONE
        number = jnp.minimum(number, refs["table"].shape[1] * facts.page_rows - 1)
    page = plgpu.load(refs["table"].at[row.slot, lax.div(number, jnp.int32(facts.page_rows))])
    at = page * facts.page_rows + lax.rem(number, jnp.int32(facts.page_rows))

    def load(first: Any, width: int) -> Array:
        return ring.load_rows(refs["pool"], (row.layers["comp_layer"],), at, first, width)

    return load, valid


def _window_keys(refs: dict[str, Any], facts: _Facts, row: _Row, i: Array) -> tuple[Load, Array]:
    """Keys of one split of the window, and which of them count."""
    back = (facts.window_splits - i) * SPLIT - 1 - jnp.arange(SPLIT, dtype=jnp.int32)
    oldest = jnp.minimum(row.pos, facts.size - 1)
    valid = back <= oldest
    back = jnp.minimum(back, oldest)
    raw = refs["raw"]
    at = lax.rem(row.pos - back, jnp.int32(raw.shape[2]))
    here = back <= plgpu.load(refs["run"].at[row.t]) if "run" in refs else None

    def load(first: Any, width: int) -> Array:
        lead = (row.layers["raw_layer"], row.slot)
        if here is None:
            return ring.load_rows(raw, lead, at, first, width)
        own = ring.load_rows(refs["step"], (), jnp.maximum(row.t - back, 0), first, width)
        return jnp.where(here[:, None], own, ring.load_rows(raw, lead, at, first, width))

    return load, valid


def _weights(q: Load, keys: Load, valid: Array, facts: _Facts, tile: Tile) -> tuple[Array, ...]:
    """Largest score rounded up [heads], sum of weights [heads], weights bfloat16 [heads, SPLIT]."""

    def chunk(c: Array, s: Array) -> Array:
        return dot_onto(s, q(c * tile.width, tile.width), keys(c * tile.width, tile.width))

    # A loop, not a row of products: products that feed one another in one block of code make the
    # compiler give every warp the same work.
    s = jnp.zeros((tile.heads, SPLIT), jnp.float32)
    s = lax.fori_loop(0, facts.dim // tile.width, chunk, s)
    s = jnp.where(valid[None, :], s * jnp.float32(facts.dim**-0.5 * LOG2_E), -jnp.inf)
    top = jnp.ceil(jnp.max(s, axis=1))
    weight = jnp.exp2(s - top[:, None])
    high = weight.astype(jnp.bfloat16)
    low = (weight - high.astype(jnp.float32)).astype(jnp.bfloat16)
    # The matrix unit adds in one order, whatever the number of warps.
    ones = jnp.ones((DOT_ROWS, SPLIT), jnp.bfloat16)
    total = dot_onto(jnp.zeros((tile.heads, DOT_ROWS), jnp.float32), low, ones)
    return top, jnp.max(dot_onto(total, high, ones), axis=1), high


def _mixed(weight: Array, keys: Load, c: Any, tile: Tile) -> Array:
    """weights @ keys, float32 [heads, width]."""
    zeros = jnp.zeros((tile.heads, tile.width), jnp.float32)
    return mix_onto(zeros, weight, keys(c, tile.width))


def power_of_two(exponent: Array) -> Array:
    """2^exponent, exact, for whole numbers up to 0; 0 below -126."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


class _Sum(NamedTuple):
    """Running softmax of one or more heads, in chunks of channels."""

    top: Array
    total: Array
    parts: tuple[Array, ...]


def _start(sink: Array, parts: tuple[Array, ...]) -> _Sum:
    """The sink alone."""
    sink = jnp.maximum(sink * LOG2_E, LEAST)
    top = jnp.ceil(sink)
    return _Sum(top, jnp.exp2(sink - top), parts)


def _joined(acc: _Sum, top: Array, total: Array, part: Callable[[int], Array]) -> _Sum:
    """One more partial result, part(i) its chunk i, taken into the running softmax."""
    new_top = jnp.maximum(acc.top, top)
    # Powers of two: nothing is rounded but the sum.
    factors = old, new = power_of_two(acc.top - new_top), power_of_two(top - new_top)
    wide_old, wide_new = (f[:, None] for f in factors)
    parts = tuple(x * wide_old + part(i) * wide_new for i, x in enumerate(acc.parts))
    return _Sum(new_top, acc.total * old + total * new, parts)


def _finished(refs: dict[str, Any], facts: _Facts, t: Array, acc: _Sum, i: int, c: Any) -> Array:
    """Part i of the output, from channel c on, bfloat16."""
    share = 1.0 / acc.total
    part = acc.parts[i]
    out = (part * share[:, None]).astype(jnp.bfloat16)
    if "cs" not in refs:
        return out
    first = facts.dim - 2 * refs["cs"].shape[2]
    if isinstance(c, int) and c + part.shape[-1] <= first:
        return out
    return rope.turned(out, refs["cs"], t, c - first, inverse=True).astype(jnp.bfloat16)


def _heads(facts: _Facts, tile: Tile) -> tuple[Any, Array | None]:
    """Heads of the program as an index, and which of them exist (None: all)."""
    head = pl.program_id(0) * tile.heads
    if facts.heads % tile.heads == 0:
        return pl.ds(head, tile.heads), None
    number = head + jnp.arange(tile.heads, dtype=jnp.int32)
    return number, number < facts.heads


def _queries(refs: dict[str, Any], facts: _Facts, t: Array, heads: Any) -> Load:
    def load(first: Any, width: int) -> Array:
        if isinstance(heads, pl.Slice):
            return plgpu.load(refs["q"].at[t, heads, pl.ds(first, width)])
        number = jnp.minimum(heads, facts.heads - 1)
        return ring.load_rows(refs["q"], (t,), number, first, width)

    return load


def _store(
    ref: Any, lead: tuple[Any, ...], heads: Any, live: Array | None, value: Array, c: Any
) -> None:
    """Store [heads] or [heads, width] at channel c."""
    if live is None:
        at = (*lead, heads) if value.ndim == 1 else (*lead, heads, pl.ds(c, value.shape[1]))
        plgpu.store(ref.at[at], value)
    elif value.ndim == 1:
        plgpu.store(ref.at[(*lead, heads)], value, mask=live)
    else:
        ring.store_rows(ref, lead, heads, c, value, live)


def _split_kernel(*refs: Any, facts: _Facts, tile: Tile) -> None:
    """Partial result of one split: [T, splits, heads] twice and [T, splits, heads, channels]."""
    by_name = dict(zip(facts.names, refs, strict=False))
    top_ref, total_ref, acc_ref = refs[len(facts.names) :][:3]
    heads, live = _heads(facts, tile)
    split, t = pl.program_id(1), pl.program_id(2)
    row = _row(by_name, facts, t)

    def part(keys: Load, valid: Array) -> None:
        q = _queries(by_name, facts, t, heads)
        top, total, weight = _weights(q, keys, valid, facts, tile)
        _store(top_ref, (t, split), heads, live, top, 0)
        _store(total_ref, (t, split), heads, live, total, 0)

        def chunk(c: Array, carry: int) -> int:
            mixed = _mixed(weight, keys, c * tile.width, tile)
            _store(acc_ref, (t, split), heads, live, mixed, c * tile.width)
            return carry

        lax.fori_loop(0, facts.dim // tile.width, chunk, 0)

    if facts.comp_splits:

        @pl.when(split * SPLIT < row.keys)
        def of_pool() -> None:
            part(*_compressed_keys(by_name, facts, row, split))

    @pl.when(split >= facts.comp_splits + row.first)
    def of_window() -> None:
        part(*_window_keys(by_name, facts, row, split - facts.comp_splits))


def _merge_kernel(*refs: Any, facts: _Facts) -> None:
    """The partial results of one row and head, joined in order."""
    *inputs, out_ref = refs
    by_name = dict(zip(facts.names, inputs, strict=False))
    top_ref, total_ref, acc_ref = inputs[len(facts.names) :][:3]
    head, t = pl.program_id(0), pl.program_id(1)
    row = _row(by_name, facts, t)
    # One head as a tile of one, so that all arithmetic is what the other kernel compiles to.
    one = pl.ds(head, 1)
    width = _largest_power_in(facts.dim, 1024)
    chunks = range(0, facts.dim, width)

    def load(number: Array, live: Array) -> tuple[Array, Array, Callable[[int], Array]]:
        # What is not live is read from a split that is; it joins with factors 1 and 0.
        top = jnp.where(live, plgpu.load(top_ref.at[t, number, one]), 2 * LEAST)
        total = plgpu.load(total_ref.at[t, number, one])
        parts = tuple(plgpu.load(acc_ref.at[t, number, one, pl.ds(c, width)]) for c in chunks)
        return top, total, parts.__getitem__

    def joined(acc: _Sum, part: tuple[Array, Array, Callable[[int], Array]]) -> _Sum:
        return _joined(acc, *part)

    def batch(i: Array, acc: _Sum) -> _Sum:
        numbers = [i * MERGED + j for j in range(MERGED)]
        read = [load(jnp.minimum(n, splits - 1), n < splits) for n in numbers]
        return functools.reduce(joined, read, acc)

    zeros = tuple(jnp.zeros((1, width), jnp.float32) for _ in chunks)
    acc = _start(plgpu.load(by_name["sink"].at[row.layers["layer"], one]), zeros)
    if facts.comp_splits:
        splits = lax.div(row.keys + (SPLIT - 1), jnp.int32(SPLIT))
        batches = lax.div(splits + (MERGED - 1), jnp.int32(MERGED))
        acc = lax.fori_loop(jnp.int32(0), batches, batch, acc)
    window = [jnp.int32(i) for i in range(facts.window_splits)]
    read = [load(facts.comp_splits + jnp.maximum(i, row.first), i >= row.first) for i in window]
    acc = functools.reduce(joined, read, acc)
    for i, c in enumerate(chunks):
        _store(out_ref, (t,), one, None, _finished(by_name, facts, t, acc, i, c), c)


def _whole_kernel(*refs: Any, facts: _Facts, tile: Tile) -> None:
    """All splits of one row, in order."""
    by_name = dict(zip(facts.names, refs, strict=False))
    out_ref = refs[len(facts.names)]
    heads, live = _heads(facts, tile)
    channels = tile.channels or facts.dim
    first = 0 if channels == facts.dim else pl.program_id(1) * channels
    t = pl.program_id(2)
    row = _row(by_name, facts, t)
    q = _queries(by_name, facts, t, heads)

    def joined(acc: _Sum, keys: Load, valid: Array) -> _Sum:
        top, total, weight = _weights(q, keys, valid, facts, tile)

        def part(i: int) -> Array:
            # Always true; the compiler does not know, and so cannot load all parts at once, for
            # which RDNA has too few registers.
            zeros = jnp.zeros((tile.heads, tile.width), jnp.float32)
            at = first + i * tile.width
            return lax.cond(row.pos >= 0, lambda: _mixed(weight, keys, at, tile), lambda: zeros)

        return _joined(acc, top, total, part)

    def compressed(i: Array, acc: _Sum) -> _Sum:
        return joined(acc, *_compressed_keys(by_name, facts, row, i))

    def windowed(i: Array, acc: _Sum) -> _Sum:
        return joined(acc, *_window_keys(by_name, facts, row, i))

    number = pl.program_id(0) * tile.heads + jnp.arange(tile.heads, dtype=jnp.int32)
    sink = plgpu.load(by_name["sink"].at[row.layers["layer"], jnp.minimum(number, facts.heads - 1)])
    parts = range(channels // tile.width)
    acc = _start(sink, tuple(jnp.zeros((tile.heads, tile.width), jnp.float32) for _ in parts))
    if facts.comp_splits:
        splits = lax.div(row.keys + (SPLIT - 1), jnp.int32(SPLIT))
        acc = lax.fori_loop(jnp.int32(0), splits, compressed, acc)
    acc = lax.fori_loop(row.first, jnp.int32(facts.window_splits), windowed, acc)
    for i in parts:
        c = first + i * tile.width
        _store(out_ref, (t,), heads, live, _finished(by_name, facts, t, acc, i, c), c)
