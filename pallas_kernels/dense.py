"""Product of rows with one weight matrix, packed or plain: y[t, n] = sum_k x[t, k] w[n, k].

`grouped` is the block-diagonal form: every group of outputs reads its own columns of the row.

A row's bits depend on that row and the weights alone. The kernel multiplies tiles of rows (one
matrix instruction, whatever the number of rows) with 128 weights at a time, in one order; K is cut
into the same number of splits for every number of rows, and splits are added in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
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
from pallas_kernels.ring import grid_index

ROW_TILE = 8
"""Rows of one product in the reference."""

DOT_ROWS = 16
"""Rows of one product in the kernel."""

FEW_DOT_ROWS = 8
"""The same, for as few rows: the width of one matrix instruction of NVIDIA's. AMD has 16."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel cuts its work. None of it changes the result.

    Attributes:
      rows: weight rows (outputs) per program.
      grid_rows: largest number of activation rows for which splits run as separate programs.
      dot_rows: activation rows of one product: 16, or another number where the matrix unit sums in
        the same way whatever the width (NVIDIA; not on AMD, whose instructions of 32 rows differ).
      dots: products of `dot_rows` rows that one program serves, at most.
      unroll: blocks of K in one iteration of the loop.
      num_warps, num_stages: of the compiler.
    """

    rows: int = 64
    grid_rows: int = 64
    dot_rows: int = DOT_ROWS
    dots: int = 4
    unroll: int = 1
    num_warps: int = 4
    num_stages: int = 3


def default_splits(n: int, k: int, block: int) -> int:
    """Parts that K is cut into; a rule of the matrix alone, since it decides the result's bits.

    Enough programs to fill a large GPU with short rows of work, but at least 512 weights of a row
    each.
    """
    splits = 1
    while n // 64 * splits < 512 and k % (2 * splits * block) == 0 and k // (2 * splits) >= 512:
        splits *= 2
    return min(splits, 8)


_LARGE = frozenset({"float32", "iq2_xxs", "q8_0", "rocmfp8", "rocmfp6", "rocmfp2_mix"})
"""What takes more registers to decode than the other formats."""


def default_tile(format: str, t: int, n: int, target: decode.Target) -> Tile:
    """A reasonable tile without measurement. n: outputs of one group."""
    rows = 64
    while n % rows:
        rows //= 2
    if target == "rocm":
        # More products of 16 rows beside the decoded weights than this spill on RDNA 3.
        roomy = block_of(format) == 128 and format not in _LARGE
        dots = 2 if roomy else 1
        return Tile(rows=rows, dots=dots, num_warps=max(1, rows // 16), num_stages=1)
    if t > DOT_ROWS:
        # One wide product; the accumulator bounds its rows.
        wide = 1 << (t - 1).bit_length()
        if n % 128 == 0 and block_of(format) == 128 and format not in _LARGE:
            if wide > 128:
                return Tile(rows=128, dot_rows=256, dots=1, num_warps=8)
            rows = 128 if wide <= 64 and n >= 4096 else rows
        return Tile(rows=rows, dot_rows=min(128, wide), dots=1)
    return Tile(rows=min(rows, 32), num_warps=2, dot_rows=few_dot_rows(t, target))


def few_dot_rows(t: int, target: decode.Target) -> int:
    """Rows of the narrowest product that holds `t` rows of a small batch."""
    return FEW_DOT_ROWS if t <= FEW_DOT_ROWS and target != "rocm" else DOT_ROWS


def dense(
    x_TK: Array,
    w: QuantArray | Array,
    *,
    layer: int | Array | None = None,
    live: Array | None = None,
    backend: Backend,
    out_dtype: Any = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Array:
    """x @ w^T, accumulated in float32.

    Args:
      x_TK: activations, bfloat16 or float32.
      w: [N, K], or [L, N, K] with `layer`; a QuantArray, or a bfloat16 or float32 array.
      layer: which of L (an int or an int32 scalar).
      live: int32 scalar, how many of the rows matter: what comes out for the others, behind them,
        may be anything, and whole tiles of them cost nothing. None: all.
      backend: "reference", "interpret" or "triton". Kernels round weights to bfloat16.
      out_dtype: dtype of the result; None: that of x.
      tile: overrides the measured or default tile.
      splits: overrides the number of parts of K (it decides the result's bits).
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
    return launch(
        x_TK, w, layer, out_dtype or x_TK.dtype, target, live=live, tile=tile, splits=splits
    )


def grouped(
    x_TGK: Array,
    w: QuantArray | Array,
    *,
    layer: int | Array | None = None,
    live: Array | None = None,
    backend: Backend,
    out_dtype: Any = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Array:
    """z[t, g] = w[g] @ x[t, g] with w [G N, K] seen as [G, N, K]; see `dense`.

    Args: x_TGK: activations. w: [G N, K], or [L, G N, K] with `layer`.
    Returns: z_TGN.
    Raises: as `dense`.
    """
    backend = backend_lib.require("dense", backend)
    t, groups, k = x_TGK.shape
    n = w.shape[-2]
    if k != w.shape[-1] or n % groups or len(w.shape[:-2]) != (layer is not None):
        raise ValueError(f"grouped: x {list(x_TGK.shape)} and w {list(w.shape)} do not fit")
    if backend == "reference":
        w_GNK = matrix(w, layer).reshape(groups, n // groups, k)
        parts = [reference(x_TGK[:, g], w_GNK[g], out_dtype=out_dtype) for g in range(groups)]
        return jnp.stack(parts, 1)
    target = backend_lib.target(backend)
    x = x_TGK.reshape(t, groups * k)
    dtype = out_dtype or x.dtype
    y = launch(x, w, layer, dtype, target, live=live, tile=tile, splits=splits, groups=groups)
    return y.reshape(t, groups, n // groups)


def several(
    x_TK: Array,
    ws: Sequence[QuantArray | Array],
    *,
    layer: int | Array | None = None,
    live: Array | None = None,
    backend: Backend,
    tile: Tile | None = None,
) -> list[Array]:
    """Products of the same rows with several matrices, in one kernel; their types may differ.

    What comes next adds the parts up, in order (`in_order`): a kernel of its own would cost more.

    Args: ws: as `w` of `dense`, all with the same K. The others as of `dense`.
    Returns: per matrix float32 [S, T, N], S parts (1 or more) whose sum in order is the product.
    Raises: as `dense`.
    """
    backend = backend_lib.require("dense", backend)
    for w in ws:
        fits = x_TK.ndim == 2 and x_TK.shape[1] == w.shape[-1]
        if not fits or len(w.shape[:-2]) != (layer is not None):
            raise ValueError(f"several: x {list(x_TK.shape)} and w {list(w.shape)} do not fit")
    if backend == "reference":
        return [reference(x_TK, w, layer=layer, out_dtype=jnp.float32)[None] for w in ws]
    target = backend_lib.target(backend)
    found = launch_several(x_TK, ws, layer, jnp.float32, target, live=live, tile=tile)
    return [y if y.ndim == 3 else y[None] for y in found]


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


def launch(
    x_TK: Array,
    w: QuantArray | Array,
    layer: int | Array | None,
    out_dtype: Any,
    target: decode.Target,
    *,
    live: Array | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
    groups: int = 1,
) -> Array:
    """`dense` (or `grouped`, with x [T, groups * K]) by the kernel written for `target`."""
    [y] = launch_several(
        x_TK, [w], layer, out_dtype, target, live=live, tile=tile, splits=splits, groups=groups
    )
    return y if y.ndim == 2 else in_order(y).astype(out_dtype)


def in_order(parts: Array) -> Array:
    """Sum over the first axis, first part first."""
    total = parts[0]
    for s in range(1, parts.shape[0]):
        total = total + parts[s]
    return total


def launch_several(
    x_TK: Array,
    ws: Sequence[QuantArray | Array],
    layer: int | Array | None,
    out_dtype: Any,
    target: decode.Target,
    *,
    live: Array | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
    groups: int = 1,
) -> list[Array]:
    """One kernel for all of `ws`: per matrix y [T, N], or its parts of K, float32 [S, T, N]."""
    if x_TK.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dense: the kernel takes bfloat16 activations, not {x_TK.dtype}")
    t, cols, wanted = x_TK.shape[0], ws[0].shape[-1], [w.shape[-2] for w in ws]
    if groups == 1:
        ws = [_tall(w) for w in ws]
    parts = [_part(w, splits) for w in ws]
    if tile is None:
        tile = _tile(parts, t, groups, target)
    for p in parts:
        step = p.splits * p.block * tile.unroll
        if p.n // groups % tile.rows or tile.rows % DOT_ROWS or p.k % step:
            raise NotImplementedError(
                f"dense: {p.format} [{p.n}, {p.k}] needs N a multiple of {tile.rows} (and of"
                f" {DOT_ROWS}) and K of {step}"
            )
    dots = min(tile.dots, -(-t // tile.dot_rows))
    in_grid = t <= tile.grid_rows
    numbers = [_layer_operand(layer)]
    if live is not None and t > tile.dot_rows * dots:
        numbers.append(live.reshape(1))
    kernel = functools.partial(
        _kernel, parts=parts, tile=tile, dots=dots, groups=groups, in_grid=in_grid, target=target,
        cols=cols, numbers=len(numbers),
    )  # fmt: skip
    shapes = [
        jax.ShapeDtypeStruct((p.splits, t, p.n), jnp.float32)
        if in_grid and p.splits > 1
        else jax.ShapeDtypeStruct((t, p.n), out_dtype)
        for p in parts
    ]
    most = max(p.splits for p in parts) if in_grid else 1
    out: list[Array] = backend_lib.pallas(
        kernel,
        name="dense_" + "_".join(dict.fromkeys(p.format for p in parts)),
        grid=(sum(p.n for p in parts) // tile.rows, most, -(-t // (tile.dot_rows * dots))),
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=target == "interpret",
    )(*numbers, x_TK, *(a for w in ws for a in operands(w)[1]))
    return [y if y.shape[-1] == n else y[..., :n] for y, n in zip(out, wanted, strict=True)]


def _tall(w: QuantArray | Array) -> QuantArray | Array:
    """`w` with rows enough for one product: only toy models have matrices of fewer."""
    lacking = DOT_ROWS - w.shape[-2]
    if lacking <= 0:
        return w
    if isinstance(w, QuantArray):
        return packing.pad_rows(w, DOT_ROWS)
    return jnp.pad(w, [*[(0, 0)] * (w.ndim - 2), (0, lacking), (0, 0)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """What a kernel knows about one of its matrices; k is padded to whole blocks."""

    format: str
    names: tuple[str, ...]
    n: int
    k: int
    block: int
    splits: int


def _part(w: QuantArray | Array, splits: int | None) -> _Part:
    format, (n, cols) = kernel_format("dense", w), w.shape[-2:]
    block = block_of(format)
    k = -(-cols // block) * block
    return _Part(
        format=format, names=tuple(operands(w)[0]), n=n, k=k, block=block,
        splits=splits or default_splits(n, k, block),
    )  # fmt: skip


def _tile(parts: Sequence[_Part], t: int, groups: int, target: decode.Target) -> Tile:
    """The measured tile of these matrices, or a default one that suits all of them."""
    found = [default_tile(p.format, t, p.n // groups, target) for p in parts]
    least = min(found, key=lambda tile: tile.rows)
    default = dataclasses.replace(least, dots=min(tile.dots for tile in found))
    if len(parts) > 1 and default.dot_rows > 128:  # the registers of the parts add up
        default = dataclasses.replace(default, rows=64, dot_rows=128, num_warps=4)
    size = "few" if t <= DOT_ROWS else "many"
    names = "+".join(p.format for p in parts)
    key = f"{names}/{sum(p.n for p in parts)}x{parts[0].k}/{size}"
    tile = backend_lib.tile("dense", default, key=key, target=target)
    # What is right for thousands of rows wastes most of a product on a few dozen.
    widest = max(few_dot_rows(t, target), 1 << (t - 1).bit_length())
    return dataclasses.replace(tile, dot_rows=min(tile.dot_rows, widest))


def _layer_operand(layer: int | Array | None) -> Array:
    return jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)


def kernel_format(op: str, w: QuantArray | Array) -> str:
    """What a kernel decodes: the format's name, or the dtype of a plain array.

    Raises: NotImplementedError for what no kernel decodes.
    """
    name = w.format if isinstance(w, QuantArray) else str(w.dtype)
    have = {*decode.DECODABLE, *PLAIN}
    if name not in have:
        raise NotImplementedError(
            f"{op}: no kernel for {name} weights; there is one for {', '.join(sorted(have))}"
        )
    return name


PLAIN = ("bfloat16", "float32")
"""Plain dtypes that kernels take."""


def block_of(format: str) -> int:
    """Weights of a row that a kernel loads at a time."""
    return decode.BLOCK_K if format in PLAIN else formats.get(format).block


def operands(w: QuantArray | Array) -> tuple[list[str], list[Array]]:
    """Names and arrays that a kernel takes for a weight."""
    if isinstance(w, QuantArray):
        tables = decode.tables(w.format)
        arrays = [*w.arrays(), *map(jnp.asarray, tables.values())]
        return [*packing.fields_of(w), *tables], arrays
    return ["plain"], [w]


def _kernel(
    *refs: Any,
    parts: Sequence[_Part],
    tile: Tile,
    dots: int,
    groups: int,
    in_grid: bool,
    target: decode.Target,
    cols: int,
    numbers: int,
) -> None:
    out_refs = refs[len(refs) - len(parts) :]
    # Read here: emulation knows program numbers at the top level only.
    program, split, t = (pl.program_id(i) for i in range(3))
    layer, *live = (plgpu.load(ref.at[jnp.int32(0)]) for ref in refs[:numbers])
    x_ref, refs = refs[numbers], refs[numbers + 1 :]
    first = used = 0
    for part, out_ref in zip(parts, out_refs, strict=True):
        weights = dict(zip(part.names, refs[used : used + len(part.names)], strict=True))
        run = functools.partial(
            _multiply, part, weights, layer, (program - first) * tile.rows, split,
            t * (tile.dot_rows * dots), x_ref, out_ref, tile=tile, dots=dots, groups=groups,
            in_grid=in_grid, target=target, cols=cols,
        )  # fmt: skip
        last = first + part.n // tile.rows
        wanted = [t * (tile.dot_rows * dots) < count for count in live]
        if len(parts) > 1:
            wanted += [program >= first, program < last]
            wanted += [split < part.splits] if in_grid else []
        if wanted:
            pl.when(functools.reduce(jnp.logical_and, wanted))(run)
        else:
            run()
        first, used = last, used + len(part.names)


def _multiply(
    part: _Part,
    weights: dict[str, Any],
    layer: Array,
    row: Array,
    split: Array,
    t0: Array,
    x_ref: Any,
    out_ref: Any,
    *,
    tile: Tile,
    dots: int,
    groups: int,
    in_grid: bool,
    target: decode.Target,
    cols: int,
) -> None:
    """`tile.rows` outputs of one matrix from row `row` on, for the rows of x from `t0` on."""
    rows, size = x_ref.shape[0], tile.dot_rows
    matrix_ref = weights[part.names[0]]
    lead = (layer,) if len(matrix_ref.shape) == 3 else ()
    blocks = part.k // part.block // part.splits
    starts = [t0 + size * d for d in range(dots)]
    exact = rows % (size * dots) == 0
    # Of grouped products every weight row reads its own group's columns.
    column = row // (matrix_ref.shape[-2] // groups) * cols if groups > 1 else 0
    numbers = [t + jnp.arange(size, dtype=jnp.int32) for t in starts]
    lives = [None if exact else n < rows for n in numbers]
    if exact or target != "rocm":
        taken = [
            Rows(size=size, start=t, column=column, live=live)
            for t, live in zip(starts, lives, strict=True)
        ]
    else:
        # Masked loads cost RDNA 3 the registers it lacks: read the last row again instead.
        taken = [Rows(size=size, number=jnp.minimum(n, rows - 1), column=column) for n in numbers]

    def one(first: Any) -> list[Array]:
        accs = accumulate(
            part.format, weights, lead, row, tile.rows, x_ref=x_ref, groups=taken, first=first,
            blocks=blocks, cols=cols, unroll=tile.unroll, target=target,
        )  # fmt: skip
        return [finish(part.format, weights, lead, acc) for acc in accs]

    if in_grid:
        totals = one(split * blocks)
    else:
        totals = one(0)
        if part.splits > 1:

            def add(s: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
                return tuple(a + b for a, b in zip(totals, one(s * blocks), strict=True))

            totals = list(lax.fori_loop(1, part.splits, add, tuple(totals)))
    for start, live, total in zip(starts, lives, totals, strict=True):
        at: tuple[Any, ...] = (pl.ds(start, size), pl.ds(row, tile.rows))
        if len(out_ref.shape) == 3:
            at = (split, *at)
        mask = None if live is None else live[:, None]
        plgpu.store(out_ref.at[at], total.T.astype(out_ref.dtype), mask=mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Activation rows of one product, from `column` on: a run of rows, or rows by number."""

    size: int
    column: Any = 0
    start: Any = None
    number: Any = None
    live: Any = None
    """bool [size]: rows that exist; the others count as 0. None: all."""

    def load(
        self, x_ref: Any, k0: Array, width: int, cols: int, whole_k: bool, apart: Array | None
    ) -> Array:
        """bfloat16 [size, width] from column k0 on; columns from `cols` on count as 0.

        apart: where the columns are, counted from k0 (all inside `cols`); None: in a row.
        """
        mask = None if self.live is None else self.live[:, None]
        if apart is not None:
            number = self.number
            if number is None:
                number = self.start + jnp.arange(self.size, dtype=jnp.int32)
            row, _ = grid_index(number, 0, width)
            column = jnp.broadcast_to((k0 + self.column + apart)[None, :], row.shape)
            at = x_ref.at[row, column]
            if mask is None:
                return plgpu.load(at)
            return plgpu.load(at, mask=jnp.broadcast_to(mask, row.shape), other=0.0)
        if not whole_k:
            inside = (k0 + jnp.arange(width, dtype=jnp.int32) < cols)[None, :]
            mask = inside if mask is None else mask & inside
        first = k0 + self.column if isinstance(self.column, Array) else k0
        if self.number is None:
            at = x_ref.at[(pl.ds(self.start, self.size), pl.ds(first, width))]
        else:
            at = x_ref.at[grid_index(self.number, first, width)]
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)


def accumulate(
    format: str,
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

    size, width = block_of(format), _width(format, target)
    fmt = None if format in PLAIN else formats.get(format)
    apart = decode.columns(fmt, target) if fmt else None

    def one_block(block: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        out = list(accs)
        tiles = _tiles(format, weights, lead, row, rows, block, cols, target)
        for j, (parts, factor) in enumerate(tiles):
            k0 = decode.tile_start(fmt, target, block, j) if fmt else block * size + width * j
            for g, group in enumerate(groups):
                x = group.load(x_ref, k0, width, cols, cols % size == 0, apart)
                for part in parts:
                    if factor is None:
                        out[g] = dot_onto(out[g], part, x)
                    else:
                        out[g] += dot_onto(jnp.zeros_like(out[g]), part, x) * factor[:, None]
        return tuple(out)

    def body(i: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        for u in range(unroll):
            accs = one_block(first + i * unroll + u, accs)
        return accs

    zeros = tuple(jnp.zeros((rows, g.size), jnp.float32) for g in groups)
    return list(lax.fori_loop(0, blocks // unroll, body, zeros))


def _tiles(
    format: str,
    weights: dict[str, Any],
    lead: tuple[Any, ...],
    row: Array,
    rows: int,
    block: Array,
    cols: int,
    target: decode.Target,
) -> Iterator[tuple[list[Array], Array | None]]:
    """Tiles of weights as bfloat16 addends (three for float32), and a factor of the product."""
    if format not in PLAIN:
        fmt = formats.get(format)
        raw = decode.load(fmt, weights, lead, row, rows, block)
        for tile, factor in decode.tiles(fmt, raw, target):
            yield [tile], factor
        return
    width = _width(format, target)
    for k0 in (block * decode.BLOCK_K + start for start in range(0, decode.BLOCK_K, width)):
        ref = weights["plain"].at[(*lead, pl.ds(row, rows), pl.ds(k0, width))]
        if cols % decode.BLOCK_K == 0:
            w = plgpu.load(ref)
        else:
            inside = (k0 + jnp.arange(width, dtype=jnp.int32) < cols)[None, :]
            w = plgpu.load(ref, mask=jnp.broadcast_to(inside, (rows, width)), other=0.0)
        yield addends(w), None


def _width(format: str, target: decode.Target) -> int:
    """Columns of one tile; three addends of a float32 weight take their room."""
    return decode.tile_width(target) // (2 if format == "float32" else 1)


def addends(w: Array) -> list[Array]:
    """bfloat16 arrays that add up to `w` (exactly, for float32: three), smallest first."""
    if w.dtype == jnp.bfloat16:
        return [w]
    # Cut off instead of rounded: eight bits of the significand each, and no slow conversions.
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(w, jnp.int32)
        top = lax.shift_right_logical(bits, jnp.full_like(bits, 16)).astype(jnp.int16)
        parts.append(lax.bitcast_convert_type(top, jnp.bfloat16))
        w = w - lax.bitcast_convert_type(bits & jnp.int32(-65536), jnp.float32)
    return parts[::-1]


def finish(format: str, weights: dict[str, Any], lead: tuple[Any, ...], acc: Array) -> Array:
    """What `accumulate` left out: the power of two of the tiles and the matrix's factor."""
    shift = 0 if format in PLAIN else decode.shift(formats.get(format))
    up = jnp.float32(2.0**shift)
    if "factor" not in weights:
        return acc * up if shift else acc
    ref = weights["factor"]
    if len(ref.shape) == len(lead):
        return acc * (plgpu.load(ref.at[lead]) * up)
    # Two interleaved matrices, a factor each.
    a, b = (plgpu.load(ref.at[(*lead, jnp.int32(i))]) * up for i in (0, 1))
    row = lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    return acc * jnp.where(row // packing.RUN % 2 == 0, a, b)
