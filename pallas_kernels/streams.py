"""Residual streams between two sublayers, in two kernels.

`mix` writes the output of the last sublayer back to the streams, and multiplies what comes out with
the map weights of the next one. `read` makes the maps (Sinkhorn included), the next sublayer's
input and its normalisation of it. Between them lies one number per map entry and chunk of channels:
a row is too long for one program, and its square sum is needed before anything can be read.

`hyper` is the definition. Here sums run over chunks of channels of one fixed size, in one fixed
order, whatever the number of rows.
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

from pallas_kernels import backend as backend_lib
from pallas_kernels import hyper, norm
from pallas_kernels.backend import Backend
from pallas_kernels.ring import grid_index, scalar

CHUNK = 128
"""Channels of every stream that are summed up together, at most; they decide the maps' bits."""

MIX_ROWS = 32
"""Rows that one program of `mix` serves, at most: it reads the map weights once for them."""

MIX_ENTRIES = 16
"""Entries of the maps that one program of `mix` adds up."""

COLUMNS = 32
"""Columns of a chunk in the result of `mix`: products with map weights, the square sum last."""

NARROW = 1024
"""Channels that one program of `read` holds in one register tile, at most."""


class Pending(NamedTuple):
    """Streams with a sublayer's output that is not written to them yet. T rows, n streams."""

    streams_TC: Array  # bfloat16 [T, n D], stream after stream
    parts: tuple[Array, ...]  # float32 [P, T, D] each; the output is the sum of their sums
    ids_TP: Array | None  # int32; parts of the first array whose number is negative do not count
    post_TN: Array  # float32
    comb_TNN: Array  # float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Constants of a model: streams, Sinkhorn iterations and the epsilons."""

    n: int
    iters: int
    hc_eps: float
    rms_eps: float


def none(streams_TND: Array, parts: tuple[tuple[int, int], ...] = ((1, 0),)) -> Pending:
    """Streams to which nothing is to be written: post 0, comb the identity.

    Args: parts: (P, slots) of every array of parts; slots above 0 for the one that has `ids`.
    """
    t, n, d = streams_TND.shape
    ids = next((jnp.full((t, p), -1, jnp.int32) for p, slots in parts if slots), None)
    return Pending(
        streams_TND.reshape(t, n * d),
        tuple(jnp.zeros((p, t, d), jnp.float32) for p, _ in parts),
        ids,
        jnp.zeros((t, n), jnp.float32),
        jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), (t, n, n)),
    )


def mix(p: Pending, fn_LOC: Array, *, layer: int | Array, backend: Backend) -> tuple[Array, Array]:
    """Write what is pending to the streams, and multiply them with the next map weights.

    Args:
        p: the streams and what is pending; the sublayer's output is rounded to their dtype first.
        fn_LOC: float32 [L, O, n D], O below 32. layer: which of L.

    Returns: streams_TC as they are now, and float32 [T, chunks * 32]: of every chunk of channels O
        products and, in column 31, the sum of squares.
    Raises: ValueError on shapes that disagree; NotImplementedError if `backend` has no kernel for
        these sizes or dtypes.
    Source: architecture of DeepSeek-V4, whole model and hyper-connection maps.
    """
    backend = backend_lib.require("streams", backend)
    _check_mix(p, fn_LOC)
    if backend == "reference":
        return _mix_reference(p, fn_LOC[layer])
    target = backend_lib.target(backend)
    return launch_mix(p, fn_LOC, layer, target)


def _check_mix(p: Pending, fn_LOC: Array) -> None:
    t, n = p.post_TN.shape
    wide = p.streams_TC.shape[-1]
    ok = (
        p.streams_TC.shape == (t, wide)
        and wide % n == 0
        and p.comb_TNN.shape == (t, n, n)
        and all(a.shape[1:] == (t, wide // n) for a in p.parts)
        and (p.ids_TP is None or p.ids_TP.shape == (t, p.parts[0].shape[0]))
        and fn_LOC.ndim == 3
        and fn_LOC.shape[2] == wide
        and fn_LOC.shape[1] < COLUMNS
    )
    if not ok:
        raise ValueError(
            f"streams: shapes do not fit: streams {list(p.streams_TC.shape)}, parts"
            f" {[list(a.shape) for a in p.parts]}, post {list(p.post_TN.shape)}, map weights"
            f" {list(fn_LOC.shape)}"
        )


def _mix_reference(p: Pending, fn_OC: Array) -> tuple[Array, Array]:
    t, n = p.post_TN.shape
    y = jnp.zeros(p.parts[0].shape[1:], jnp.float32)
    for i, parts in enumerate(p.parts):
        if i == 0 and p.ids_TP is not None:
            parts = jnp.where(p.ids_TP.T[:, :, None] >= 0, parts, 0.0)
        y = y + jnp.sum(parts, axis=0)
    old = p.streams_TC.reshape(t, n, -1)
    new = hyper.write(old, y.astype(old.dtype), p.post_TN, p.comb_TNN).reshape(t, -1)
    # What was stored, even where the compiler would rather go on with what was rounded.
    f = lax.reduce_precision(new.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    m = lax.dot_general(f, fn_OC, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    squares = jnp.sum(f * f, axis=-1, keepdims=True)
    wide = jnp.pad(m, ((0, 0), (0, COLUMNS - 1 - m.shape[1])))
    return new, jnp.concatenate([wide, squares], axis=1)


def read(
    streams_TC: Array,
    mixed: Array,
    scale_L3: Array,
    base_LO: Array,
    norm_LD: Array,
    *,
    layer: int | Array,
    sizes: Sizes,
    backend: Backend,
) -> tuple[Array, Array, Array]:
    """Normalised input of a sublayer, and the maps that will write its output back.

    Args:
        streams_TC, mixed: from `mix`.
        scale_L3, base_LO, norm_LD: float32 stacks; layer: which of L.

    Returns: h_TD (dtype of the streams), post_TN and comb_TNN float32.
    Raises: NotImplementedError if `backend` has no kernel for these sizes or dtypes.
    """
    backend = backend_lib.require("streams", backend)
    if backend == "reference":
        return _read_reference(
            streams_TC, mixed, scale_L3[layer], base_LO[layer], norm_LD[layer], sizes
        )
    target = backend_lib.target(backend)
    h, post, comb = launch_read(
        streams_TC, mixed, scale_L3, base_LO, norm_LD, layer, sizes, head=False,
        interpret=target == "interpret",
    )  # fmt: skip
    return h, post, comb


def read_head(
    streams_TC: Array,
    mixed: Array,
    scale_1: Array,
    base_N: Array,
    norm_D: Array,
    *,
    sizes: Sizes,
    backend: Backend,
) -> Array:
    """Normalised input of the head as two bfloat16 addends [2, T, D] (the head's input is float32).

    Args: as of `read`, without an axis of layers.
    Source: architecture of DeepSeek-V4, head collapse.
    """
    backend = backend_lib.require("streams", backend)
    if backend == "reference":
        total, n = _total(mixed), sizes.n
        m = total[:, :n] * _scale(total, streams_TC.shape[1], sizes)
        pre = jax.nn.sigmoid(m * scale_1[0] + jnp.broadcast_to(base_N, m.shape)) + sizes.hc_eps
        x = streams_TC.reshape(streams_TC.shape[0], n, -1).astype(jnp.float32)
        y = norm.rms_norm(jnp.einsum("tn,tnd->td", pre, x), norm_D, eps=sizes.rms_eps)
        high = y.astype(jnp.bfloat16)
        return jnp.stack([(y - high.astype(jnp.float32)).astype(jnp.bfloat16), high])
    target = backend_lib.target(backend)
    [h] = launch_read(
        streams_TC, mixed, scale_1[None], base_N[None], norm_D[None], 0, sizes, head=True,
        interpret=target == "interpret",
    )  # fmt: skip
    return h


def _total(mixed: Array) -> Array:
    return jnp.sum(mixed.reshape(mixed.shape[0], -1, COLUMNS), axis=1)


def _scale(total: Array, count: int, sizes: Sizes) -> Array:
    return lax.rsqrt(total[:, COLUMNS - 1 :] / count + sizes.rms_eps)


def _read_reference(
    streams_TC: Array, mixed: Array, scale_3: Array, base_O: Array, norm_D: Array, sizes: Sizes
) -> tuple[Array, Array, Array]:
    n, total = sizes.n, _total(mixed)
    m = total * _scale(total, streams_TC.shape[1], sizes)
    base = jnp.broadcast_to(base_O, (m.shape[0], base_O.shape[0]))
    pre = jax.nn.sigmoid(m[:, :n] * scale_3[0] + base[:, :n]) + sizes.hc_eps
    post = 2.0 * jax.nn.sigmoid(m[:, n : 2 * n] * scale_3[1] + base[:, n : 2 * n])
    logits = m[:, 2 * n : (2 + n) * n] * scale_3[2] + base[:, 2 * n :]
    comb = hyper.sinkhorn(logits.reshape(-1, n, n), iters=sizes.iters, eps=sizes.hc_eps)
    x = streams_TC.reshape(streams_TC.shape[0], n, -1).astype(jnp.float32)
    collapsed = jnp.einsum("tn,tnd->td", pre, x).astype(streams_TC.dtype)
    return norm.rms_norm(collapsed, norm_D, eps=sizes.rms_eps), post, comb


# --- The kernels ---


def launch_mix(
    p: Pending, fn_LOC: Array, layer: int | Array, target: backend_lib.Target
) -> tuple[Array, Array]:
    """`mix` by its kernel."""
    (t, n), wide = p.post_TN.shape, p.streams_TC.shape[1]
    dim = wide // n
    size = min(dim & -dim, CHUNK)
    if p.streams_TC.dtype != jnp.bfloat16 or size < 32:
        raise NotImplementedError(
            f"streams: the kernel takes bfloat16 streams of a multiple of 32 channels, not"
            f" {p.streams_TC.dtype} of {dim}"
        )
    operands = {"layer": scalar(layer), "fn": fn_LOC.astype(jnp.float32)}
    operands |= {"streams": p.streams_TC, "post": p.post_TN, "comb": p.comb_TNN}
    operands |= {f"y{i}": a for i, a in enumerate(p.parts)}
    if p.ids_TP is not None:
        operands["ids"] = p.ids_TP
    rows = max(1, min(MIX_ROWS, t // 64))
    new, mixed = backend_lib.pallas(
        functools.partial(
            _mix_kernel, names=tuple(operands), parts=len(p.parts), size=size, rows=rows
        ),
        name="streams_mix",
        grid=(dim // size, COLUMNS // MIX_ENTRIES, -(-t // rows)),
        out_shape=(
            jax.ShapeDtypeStruct(p.streams_TC.shape, p.streams_TC.dtype),
            jax.ShapeDtypeStruct((t, dim // size * COLUMNS), jnp.float32),
        ),
        num_warps=2 if size == CHUNK else 1,
        num_stages=1,
        interpret=target == "interpret",
    )(*operands.values())
    return new, mixed


def _mix_kernel(*refs: Any, names: tuple[str, ...], parts: int, size: int, rows: int) -> None:
    """A chunk of channels of all streams, some map entries; some rows, one after the other."""
    by_name = dict(zip(names, refs, strict=False))
    new_ref, mixed_ref = refs[len(names) :]
    chunk, half, tile = (pl.program_id(i) for i in range(3))
    layer = plgpu.load(by_name["layer"].at[jnp.int32(0)])
    fn_ref, (count, n) = by_name["fn"], by_name["post"].shape
    dim = new_ref.shape[1] // n
    starts = [j * dim + chunk * size for j in range(n)]
    entry = half * MIX_ENTRIES + jnp.arange(MIX_ENTRIES, dtype=jnp.int32)
    kept = jnp.minimum(entry, fn_ref.shape[1] - 1)
    weights = []
    for c in starts:
        at = grid_index(kept, c, size)
        weights.append(plgpu.load(fn_ref.at[layer, at[0], at[1]]))
    squares = jnp.broadcast_to((entry == COLUMNS - 1)[:, None], (MIX_ENTRIES, size))

    def one(row: Array) -> None:
        old = [plgpu.load(by_name["streams"].at[row, pl.ds(c, size)]) for c in starts]
        old = [x.astype(jnp.float32) for x in old]
        y = _pending(by_name, row, pl.ds(chunk * size, size), parts)
        total = jnp.zeros((MIX_ENTRIES, size), jnp.float32)
        for k, start in enumerate(starts):
            number = jnp.int32(k)
            new = plgpu.load(by_name["post"].at[row, number]) * y
            for j in range(n):
                new += plgpu.load(by_name["comb"].at[row, jnp.int32(j), number]) * old[j]
            x = new.astype(jnp.bfloat16)

            @pl.when(half == 0)
            def _(x: Array = x, start: Array = start) -> None:
                plgpu.store(new_ref.at[row, pl.ds(start, size)], x)

            f = jnp.broadcast_to(x.astype(jnp.float32)[None, :], total.shape)
            total += jnp.where(squares, f, weights[k]) * f
        first = chunk * COLUMNS + half * MIX_ENTRIES
        plgpu.store(mixed_ref.at[row, pl.ds(first, MIX_ENTRIES)], jnp.sum(total, axis=1))

    if rows == 1:
        one(tile)
    else:
        first = tile * rows
        last = jnp.minimum(first + rows, count)
        lax.fori_loop(first, last, lambda row, _: one(row), None)


def _pending(refs: dict[str, Any], row: Array, at: Any, parts: int) -> Array:
    """The sublayer's output, rounded to bfloat16: float32 [size]."""

    def part(i: int, p: int) -> Array:
        y: Array = plgpu.load(refs[f"y{i}"].at[jnp.int32(p), row, at])
        if i == 0 and "ids" in refs:  # a part that does not count was never written
            y = jnp.where(plgpu.load(refs["ids"].at[row, jnp.int32(p)]) >= 0, y, 0.0)
        return y

    groups = [
        functools.reduce(jnp.add, [part(i, p) for p in range(refs[f"y{i}"].shape[0])])
        for i in range(parts)
    ]
    total: Array = functools.reduce(jnp.add, groups)
    return total.astype(jnp.bfloat16).astype(jnp.float32)


def launch_read(
    streams_TC: Array,
    mixed: Array,
    scale: Array,
    base: Array,
    weight_LD: Array,
    layer: int | Array,
    sizes: Sizes,
    *,
    head: bool,
    interpret: bool,
) -> tuple[Array, ...]:
    """`read`, or `read_head`, by its kernel."""
    (t, wide), n = streams_TC.shape, sizes.n
    dim = wide // n
    width = min(dim & -dim, NARROW)
    if streams_TC.dtype != jnp.bfloat16 or n & (n - 1) or width < 16:
        raise NotImplementedError(
            f"streams: the kernel takes a power of two of bfloat16 streams of a multiple of 16"
            f" channels, not {n} of {dim} {streams_TC.dtype}"
        )
    of = jax.ShapeDtypeStruct
    shapes: tuple[Any, ...] = (of((2, t, dim), jnp.bfloat16),)
    if not head:
        shapes = (of((t, dim), jnp.bfloat16), of((t, n), jnp.float32), of((t, n, n), jnp.float32))
    out: tuple[Array, ...] = backend_lib.pallas(
        functools.partial(_read_kernel, sizes=sizes, dim=dim, width=width, head=head),
        name="streams_read_head" if head else "streams_read",
        grid=(1 if head else 2, t),
        out_shape=shapes,
        # All of them repeat Sinkhorn's iterations: more would wait for one another.
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(scalar(layer), streams_TC, mixed, scale, base, weight_LD)
    return out


def _read_kernel(
    layer_ref: Any,
    streams_ref: Any,
    mixed_ref: Any,
    scale_ref: Any,
    base_ref: Any,
    weight_ref: Any,
    *out_refs: Any,
    sizes: Sizes,
    dim: int,
    width: int,
    head: bool,
) -> None:
    # Read here: emulation knows program numbers at the top level only.
    which, t = pl.program_id(0), pl.program_id(1)
    layer = plgpu.load(layer_ref.at[jnp.int32(0)])
    total = functools.partial(_entries, mixed_ref, t)

    @pl.when(which == 0)
    def _() -> None:
        _read_streams(
            total, streams_ref, scale_ref, base_ref, weight_ref, out_refs[0], t, layer,
            sizes=sizes, dim=dim, width=width, head=head,
        )  # fmt: skip

    if head:
        return

    # The maps of writing come from the same sums, and take as long: a program of their own.
    @pl.when(which == 1)
    def _() -> None:
        _write_maps(total, scale_ref, base_ref, out_refs[1], out_refs[2], t, layer, sizes, dim)


def _entries(mixed_ref: Any, t: Array, entry: Array) -> Array:
    """Entries of the maps, summed over chunks: float32, shape of `entry`."""
    chunks = mixed_ref.shape[1] // COLUMNS
    chunk = jnp.arange(1 << (chunks - 1).bit_length(), dtype=jnp.int32)
    wide = chunk.reshape(-1, *(1,) * entry.ndim)
    at = jnp.minimum(wide, chunks - 1) * COLUMNS + entry[None]
    got = plgpu.load(mixed_ref.at[t, at])
    return jnp.sum(jnp.where(wide < chunks, got, 0.0), axis=0)


def _read_streams(
    total: Callable[[Array], Array], streams_ref: Any, scale_ref: Any, base_ref: Any,
    weight_ref: Any, out_ref: Any, t: Array, layer: Array, *, sizes: Sizes, dim: int, width: int,
    head: bool,
) -> None:  # fmt: skip
    n = sizes.n
    entry = jnp.arange(n, dtype=jnp.int32)
    squares = total(jnp.full((n,), COLUMNS - 1, jnp.int32))
    scale = lax.rsqrt(squares / (n * dim) + sizes.rms_eps)
    base = plgpu.load(base_ref.at[layer, entry])
    logits = total(entry) * scale * plgpu.load(scale_ref.at[layer, jnp.int32(0)]) + base
    pre = jax.nn.sigmoid(logits) + sizes.hc_eps
    weights = [jnp.sum(jnp.where(entry == j, pre, 0.0)) for j in range(n)]
    starts = range(0, dim, width)
    parts = []
    for c in starts:
        x = jnp.zeros((width,), jnp.float32)
        for j in range(n):
            one = plgpu.load(streams_ref.at[t, pl.ds(j * dim + c, width)])
            x += one.astype(jnp.float32) * weights[j]
        parts.append(x if head else x.astype(jnp.bfloat16).astype(jnp.float32))
    mean = sum(jnp.sum(x * x) for x in parts) / dim
    share = lax.rsqrt(mean + sizes.rms_eps)
    for c, x in zip(starts, parts, strict=True):
        y = x * share * plgpu.load(weight_ref.at[layer, pl.ds(c, width)]).astype(jnp.float32)
        high = y.astype(jnp.bfloat16)
        if head:
            low = (y - high.astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.store(out_ref.at[jnp.int32(0), t, pl.ds(c, width)], low)
            plgpu.store(out_ref.at[jnp.int32(1), t, pl.ds(c, width)], high)
        else:
            plgpu.store(out_ref.at[t, pl.ds(c, width)], high)


def _write_maps(
    total: Callable[[Array], Array], scale_ref: Any, base_ref: Any, post_ref: Any, comb_ref: Any,
    t: Array, layer: Array, sizes: Sizes, dim: int,
) -> None:  # fmt: skip
    n, count = sizes.n, (2 + sizes.n) * sizes.n
    entry = jnp.arange(COLUMNS, dtype=jnp.int32)
    got = total(entry)
    squares = jnp.sum(jnp.where(entry == COLUMNS - 1, got, 0.0))
    own, others = (plgpu.load(scale_ref.at[layer, jnp.int32(i)]) for i in (1, 2))
    base = plgpu.load(base_ref.at[layer, jnp.minimum(entry, count - 1)])
    scale = lax.rsqrt(squares / (n * dim) + sizes.rms_eps)
    logits = got * scale * jnp.where(entry < 2 * n, own, others) + base
    stream = jnp.arange(n, dtype=jnp.int32)
    mine = entry[None, :] == n + stream[:, None]
    post = jnp.sum(jnp.where(mine, logits[None, :], 0.0), axis=1)
    plgpu.store(post_ref.at[t, stream], 2.0 * jax.nn.sigmoid(post))
    # Numbers instead of a small array: every step would cost exchanges between lanes.
    numbers = [
        [jnp.sum(jnp.where(entry == 2 * n + n * i + j, logits, 0.0)) for j in range(n)]
        for i in range(n)
    ]
    for i, row in enumerate(_sinkhorn(numbers, sizes)):
        for j, c in enumerate(row):
            plgpu.store(comb_ref.at[t, jnp.int32(i), jnp.int32(j)], c)


def _sinkhorn(a: list[list[Array]], sizes: Sizes) -> list[list[Array]]:
    """`hyper.sinkhorn` of one row, [n][n] numbers."""
    eps = sizes.hc_eps
    turned = lambda c: [list(x) for x in zip(*c, strict=True)]  # noqa: E731

    def over_rows(c: list[list[Array]]) -> list[list[Array]]:
        share = [1.0 / (functools.reduce(jnp.add, row) + eps) for row in c]
        return [[x * s for x in row] for row, s in zip(c, share, strict=True)]

    def over_columns(c: list[list[Array]]) -> list[list[Array]]:
        return turned(over_rows(turned(c)))

    c = []
    for row in a:
        e = [jnp.exp(x - functools.reduce(jnp.maximum, row)) for x in row]
        share = 1.0 / functools.reduce(jnp.add, e)
        c.append([x * share + eps for x in e])
    done: list[list[Array]] = lax.fori_loop(
        0, sizes.iters - 1, lambda _, c: over_columns(over_rows(c)), over_columns(c)
    )
    return done
