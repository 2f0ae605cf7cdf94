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
      unroll: blocks of K in one iteration of the loop.
      num_warps, num_stages: of the compiler.
    """

    rows: int = 64
    splits: int = 1
    grid_rows: int = 32
    dots: int = 4
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
    dots = min(tile.dots, -(-t // DOT_ROWS))
    in_grid = t <= tile.grid_rows
    splits = tile.splits if in_grid else 1
    names = [f for f in packing.FIELDS if getattr(w, f) is not None]
    kernel = functools.partial(
        _kernel, fmt=fmt, names=names, tile=tile, dots=dots, in_grid=in_grid, target=target,
        cols=w.cols,
    )  # fmt: skip
    partial = tile.splits > 1 and in_grid
    shape = (splits, t, n) if partial else (t, n)
    y = backend_lib.pallas(
        kernel,
        name=f"dense_{w.format}",
        grid=(n // tile.rows, splits, -(-t // (DOT_ROWS * dots))),
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
    t0 = pl.program_id(2) * (DOT_ROWS * dots)
    lead = (plgpu.load(layer_ref.at[jnp.int32(0)]),) if weights["codes"].ndim == 3 else ()
    blocks = fmt.padded(cols) // (fmt.block * tile.splits)
    one = functools.partial(
        accumulate, fmt, weights, lead, row, tile.rows, x_ref=x_ref,
        t_of=[t0 + DOT_ROWS * d for d in range(dots)], blocks=blocks, cols=cols, unroll=tile.unroll, target=target,
    )  # fmt: skip
    if in_grid:
        totals = one(first=pl.program_id(1) * blocks)
    else:
        totals = one(first=0)
        for s in range(1, tile.splits):
            totals = [a + b for a, b in zip(totals, one(first=s * blocks), strict=True)]
    rows = x_ref.shape[0]
    for d, total in enumerate(totals):
        at: tuple[Any, ...] = (pl.ds(t0 + DOT_ROWS * d, DOT_ROWS), pl.ds(row, tile.rows))
        if len(out_ref.shape) == 3:
            at = (pl.program_id(1), *at)
        live = t0 + DOT_ROWS * d + jnp.arange(DOT_ROWS, dtype=jnp.int32) < rows
        mask = None if rows % (DOT_ROWS * dots) == 0 else live[:, None]
        plgpu.store(out_ref.at[at], total.T.astype(out_ref.dtype), mask=mask)


def accumulate(
    fmt: formats.Format,
    weights: dict[str, Any],
    lead: tuple[Any, ...],
    row: Array,
    rows: int,
    *,
    x_ref: Any,
    t_of: list[Any],
    first: Any,
    blocks: int,
    cols: int,
    unroll: int,
    target: decode.Target,
) -> list[Array]:
    """Products of weight rows with tiles of 16 activation rows, over some blocks of K.

    Args:
      lead, row, rows: which rows of which matrix.
      t_of: first activation row of each tile; rows past the end of x count as 0.
      first, blocks: the blocks of K; cols: K without padding. unroll: blocks per iteration.
    Returns: per tile float32 [rows, 16].
    """
    total_rows = x_ref.shape[0]

    def body(i: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        for u in range(unroll):
            accs = one_block(first + i * unroll + u, accs)
        return accs

    def one_block(block: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        raw = decode.load(fmt, weights, lead, row, rows, block)
        out = list(accs)
        for j, (tile, factor) in enumerate(decode.tiles(fmt, raw, target)):
            k0 = block * fmt.block + decode.TILE_K * j
            for d, t in enumerate(t_of):
                live = t + jnp.arange(DOT_ROWS, dtype=jnp.int32) < total_rows
                mask = live[:, None]
                if cols % fmt.block:
                    mask &= (k0 + jnp.arange(decode.TILE_K, dtype=jnp.int32) < cols)[None, :]
                at = (pl.ds(t, DOT_ROWS), pl.ds(k0, decode.TILE_K))
                x = plgpu.load(x_ref.at[at], mask=mask, other=0.0)
                y = jnp.dot(tile, x.T, preferred_element_type=jnp.float32)
                out[d] = out[d] + (y if factor is None else y * factor[:, None])
        return tuple(out)

    zero = jnp.zeros((rows, DOT_ROWS), jnp.float32)
    accs = lax.fori_loop(0, blocks // unroll, body, (zero,) * len(t_of))
    up = jnp.float32(2.0 ** decode.shift(fmt))
    return [a * up for a in accs]
