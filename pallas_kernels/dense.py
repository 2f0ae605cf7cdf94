"""Product of rows with one weight matrix, packed or plain: y[t, n] = sum_k x[t, k] w[n, k].

A row's bits depend on that row and the weights alone. The kernel multiplies tiles of 16 rows (one
matrix instruction shape, whatever the number of rows) with 128 weights at a time, in ascending k; K
is cut into the same number of splits for every number of rows, and splits are added in order.
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
from pallas_kernels import decode, formats, packing
from pallas_kernels.backend import Backend
from pallas_kernels.dot import dot_onto
from pallas_kernels.packing import QuantArray

ROW_TILE = 8
"""Rows of one product in the reference."""

DOT_ROWS = 16
"""Rows of one product in the kernel."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel cuts its work.

    Attributes:
      rows: weight rows (outputs) per program.
      splits: parts of K; changes the bits of the result, so it may not depend on the number of
        activation rows.
      grid_rows: largest number of activation rows for which splits run as separate programs.
      dots: tiles of 16 activation rows that one program serves, at most.
      dot_rows: activation rows of one product (16, or more where the matrix unit sums in the
        same way whatever the width).
      unroll: blocks of K in one iteration of the loop.
      num_warps, num_stages: of the compiler.
    """

    rows: int = 64
    splits: int = 1
    grid_rows: int = 32
    dots: int = 4
    dot_rows: int = DOT_ROWS
    unroll: int = 1
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def default(cls, n: int, k: int, block: int) -> Tile:
        """Enough programs to fill a large GPU, each with at least 1024 weights of a row."""
        splits = 1
        while (
            n // 64 * splits < 512 and k % (2 * splits * block) == 0 and k // (2 * splits) >= 1024
        ):
            splits *= 2
        return cls(splits=splits)


def dense(
    x_TK: Array,
    w: QuantArray | Array,
    *,
    layer: int | Array | None = None,
    backend: Backend,
    out_dtype: Any = None,
    tile: Tile | None = None,
) -> Array:
    """x @ w^T, accumulated in float32.

    Args:
      x_TK: activations, bfloat16 or float32.
      w: [N, K], or [L, N, K] with `layer`; a QuantArray, or a bfloat16 or float32 array.
      layer: which of L (an int or an int32 scalar).
      backend: "reference", "interpret" or "triton". Kernels round weights to bfloat16.
      out_dtype: dtype of the result; None: that of x.
      tile: overrides the measured or default tile.
    Returns: y_TN.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
      this format or dtype.
    """
    backend = backend_lib.require("dense", backend)
    lead = w.shape[:-2]
    if x_TK.ndim != 2 or x_TK.shape[1] != w.shape[-1] or len(lead) != (layer is not None):
        raise ValueError(
            f"dense: x {list(x_TK.shape)} and w {list(w.shape)} do not fit"
            f" ({'one' if layer is not None else 'no'} leading axis of w expected)"
        )
    if backend == "reference":
        return reference(x_TK, w, layer=layer, out_dtype=out_dtype)
    target = backend_lib.target(backend)
    return _kernel_call(x_TK, w, layer, out_dtype or x_TK.dtype, target, tile)


def reference(
    x_TK: Array, w: QuantArray | Array, *, layer: int | Array | None = None, out_dtype: Any = None
) -> Array:
    """The definition: weights in float32, products of eight rows."""
    w_NK = matrix(w, layer)
    rows = x_TK.shape[0]
    tiles = -(-rows // ROW_TILE)
    x = jnp.pad(x_TK, ((0, tiles * ROW_TILE - rows), (0, 0)))
    if tiles == 1:
        y = product(x, w_NK)
    else:
        y = lax.map(lambda tile: product(tile, w_NK), x.reshape(tiles, ROW_TILE, -1))
        y = y.reshape(tiles * ROW_TILE, -1)
    return y[:rows].astype(out_dtype or x_TK.dtype)


def matrix(w: QuantArray | Array, layer: int | Array | None) -> Array:
    """`w`, or its layer, as a plain array; packed weights become float32."""
    if isinstance(w, QuantArray):
        return packing.unpack(w if layer is None else packing.index(w, layer))
    return jnp.asarray(w if layer is None else w[layer])


def product(x_TK: Array, w_NK: Array) -> Array:
    """x @ w^T in float32 (products of bfloat16 values are exact in float32)."""
    y: Array = lax.dot_general(
        x_TK.astype(jnp.float32),
        w_NK.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    return y


# --- The kernel ---


def _kernel_call(
    x_TK: Array,
    w: QuantArray | Array,
    layer: int | Array | None,
    out_dtype: Any,
    target: decode.Target,
    tile: Tile | None,
) -> Array:
    if not isinstance(w, QuantArray) or w.format not in decode.DECODABLE:
        what = f"format {w.format}" if isinstance(w, QuantArray) else f"plain {w.dtype} weights"
        raise NotImplementedError(
            f"dense: no kernel for {what}; there is one for {', '.join(sorted(decode.DECODABLE))}"
        )
    if x_TK.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dense: the kernel takes bfloat16 activations, not {x_TK.dtype}")
    fmt = formats.get(w.format)
    t, n, k = x_TK.shape[0], w.rows, fmt.padded(w.cols)
    if tile is None:
        default = Tile.default(n, k, fmt.block)
        tile = backend_lib.tile("dense", default, key=f"{w.format}/{n}x{k}")
    step = tile.splits * fmt.block * tile.unroll
    if n % tile.rows or k % step:
        raise NotImplementedError(
            f"dense: {w.format} [{n}, {k}] needs N a multiple of {tile.rows} and K of {step}"
        )
    dots = min(tile.dots, -(-t // tile.dot_rows))
    in_grid = t <= tile.grid_rows
    splits = tile.splits if in_grid else 1
    kernel = functools.partial(
        _kernel, fmt=fmt, names=packing.fields_of(w), tile=tile, dots=dots, in_grid=in_grid,
        target=target, cols=w.cols,
    )  # fmt: skip
    partial = tile.splits > 1 and in_grid
    shape = (splits, t, n) if partial else (t, n)
    y = backend_lib.pallas(
        kernel,
        name=f"dense_{w.format}",
        grid=(n // tile.rows, splits, -(-t // (tile.dot_rows * dots))),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if partial else out_dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=target == "interpret",
    )(_layer_operand(layer), x_TK, *w.arrays())
    if not partial:
        return y
    total = y[0]
    for s in range(1, splits):
        total = total + y[s]
    return total.astype(out_dtype)


def _layer_operand(layer: int | Array | None) -> Array:
    return jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)


def _kernel(
    layer_ref: Any,
    x_ref: Any,
    *refs: Any,
    fmt: formats.Format,
    names: list[str],
    tile: Tile,
    dots: int,
    in_grid: bool,
    target: decode.Target,
    cols: int,
) -> None:
    *weight_refs, out_ref = refs
    weights = dict(zip(names, weight_refs, strict=True))
    row = pl.program_id(0) * tile.rows
    t0 = pl.program_id(2) * (tile.dot_rows * dots)
    rows, size = x_ref.shape[0], tile.dot_rows
    lead = (plgpu.load(layer_ref.at[jnp.int32(0)]),) if len(weights["codes"].shape) == 3 else ()
    blocks = fmt.padded(cols) // (fmt.block * tile.splits)
    starts = [t0 + size * d for d in range(dots)]
    exact = rows % (size * dots) == 0
    groups = [
        Rows(
            size=size,
            start=t,
            live=None if exact else t + jnp.arange(size, dtype=jnp.int32) < rows,
        )
        for t in starts
    ]
    one = functools.partial(
        accumulate, fmt, weights, lead, row, tile.rows, x_ref=x_ref, groups=groups, blocks=blocks,
        cols=cols, unroll=tile.unroll, target=target,
    )  # fmt: skip
    if in_grid:
        totals = one(first=pl.program_id(1) * blocks)
    else:
        totals = one(first=0)
        for s in range(1, tile.splits):
            totals = [a + b for a, b in zip(totals, one(first=s * blocks), strict=True)]
    for group, total in zip(groups, totals, strict=True):
        y = finish(fmt, weights, lead, total).T.astype(out_ref.dtype)
        at: tuple[Any, ...] = (pl.ds(group.start, size), pl.ds(row, tile.rows))
        if len(out_ref.shape) == 3:
            at = (pl.program_id(1), *at)
        mask = None if group.live is None else group.live[:, None]
        plgpu.store(out_ref.at[at], y, mask=mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Activation rows of one product: a run of rows, or rows by number."""

    size: int
    start: Any = None
    number: Any = None
    live: Any = None
    """bool [size]: rows that exist; the others count as 0. None: all."""

    def load(self, x_ref: Any, k0: Array, cols: int, whole_k: bool) -> Array:
        """bfloat16 [size, 128] from column k0 on; columns from `cols` on count as 0."""
        mask = None if self.live is None else self.live[:, None]
        if not whole_k:
            inside = (k0 + jnp.arange(decode.TILE_K, dtype=jnp.int32) < cols)[None, :]
            mask = inside if mask is None else mask & inside
        if self.number is None:
            at = x_ref.at[(pl.ds(self.start, self.size), pl.ds(k0, decode.TILE_K))]
        else:
            at = x_ref.at[grid_index(self.number, k0, decode.TILE_K)]
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)


def grid_index(rows: Array, first: Array, size: int) -> tuple[Array, Array]:
    """Indices of rows by number and `size` columns from `first` on, each [rows, size]."""
    shape = (rows.shape[0], size)
    cols = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.broadcast_to(rows[:, None], shape), cols


def accumulate(
    fmt: formats.Format,
    weights: dict[str, Any],
    lead: tuple[Any, ...],
    row: Array,
    rows: int,
    *,
    x_ref: Any,
    groups: list[Rows],
    first: Any,
    blocks: int,
    cols: int,
    unroll: int,
    target: decode.Target,
) -> list[Array]:
    """Products of weight rows with groups of activation rows, over some blocks of K.

    Args:
      lead, row, rows: which rows of which matrix.
      x_ref: bfloat16 activations [T, K].
      first, blocks: the blocks of K; cols: K without padding. unroll: blocks per iteration.
    Returns: per group float32 [rows, group size].
    """

    def one_block(block: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        raw = decode.load(fmt, weights, lead, row, rows, block)
        out = list(accs)
        for j, (tile, factor) in enumerate(decode.tiles(fmt, raw, target)):
            k0 = block * fmt.block + decode.TILE_K * j
            for g, group in enumerate(groups):
                x = group.load(x_ref, k0, cols, cols % fmt.block == 0)
                if factor is None:
                    out[g] = dot_onto(out[g], tile, x)
                else:
                    out[g] += dot_onto(jnp.zeros_like(out[g]), tile, x) * factor[:, None]
        return tuple(out)

    def body(i: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        for u in range(unroll):
            accs = one_block(first + i * unroll + u, accs)
        return accs

    zeros = tuple(jnp.zeros((rows, g.size), jnp.float32) for g in groups)
    return list(lax.fori_loop(0, blocks // unroll, body, zeros))


def finish(
    fmt: formats.Format, weights: dict[str, Any], lead: tuple[Any, ...], acc: Array
) -> Array:
    """What `accumulate` left out: the power of two of the tiles and the matrix's factor."""
    up = jnp.float32(2.0 ** decode.shift(fmt))
    if "factor" not in weights:
        return acc * up if decode.shift(fmt) else acc
    ref = weights["factor"]
    if len(ref.shape) == len(lead):
        return acc * (plgpu.load(ref.at[lead]) * up)
    # Two interleaved matrices, a factor each.
    a, b = (plgpu.load(ref.at[(*lead, jnp.int32(i))]) * up for i in (0, 1))
    row = lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    return acc * jnp.where(row // packing.RUN % 2 == 0, a, b)
