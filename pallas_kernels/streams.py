"""Residual streams between two sublayers, in two kernels.

`mix` writes the output of the last sublayer back to the streams and multiplies what comes out with
the map weights of the next one; `read` makes the maps (Sinkhorn included), the next sublayer's
input and its normalisation of it. Between them lies one number per map entry and chunk of channels:
a row is too long for one program, and its square sum is needed before anything can be read.

`hyper` is the definition. Here sums run over chunks of channels of one fixed size, in one fixed
order, whatever the number of rows.
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
from pallas_kernels import hyper, norm
from pallas_kernels.backend import Backend
from pallas_kernels.dense import DOT_ROWS, addends
from pallas_kernels.dot import dot_onto
from pallas_kernels.ring import grid_index

CHUNK = 32
"""Channels of one program of `mix`; it decides the bits of the maps."""

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
    return launch_mix(p, fn_LOC, layer, interpret=target == "interpret")


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
    f = new.astype(jnp.float32)
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
    p: Pending, fn_LOC: Array, layer: int | Array, *, interpret: bool
) -> tuple[Array, Array]:
    """`mix` by its kernel."""
    (t, n), wide = p.post_TN.shape, p.streams_TC.shape[1]
    dim = wide // n
    if p.streams_TC.dtype != jnp.bfloat16 or dim % CHUNK:
        raise NotImplementedError(
            f"streams: the kernel takes bfloat16 streams of a multiple of {CHUNK} channels, not"
            f" {p.streams_TC.dtype} of {dim}"
        )
    operands = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1), "streams": p.streams_TC,
        "post": p.post_TN, "comb": p.comb_TNN.reshape(t, n * n), "fn": fn_LOC.astype(jnp.float32),
    }  # fmt: skip
    operands |= {f"y{i}": a for i, a in enumerate(p.parts)}
    if p.ids_TP is not None:
        operands["ids"] = p.ids_TP
    new, mixed = backend_lib.pallas(
        functools.partial(_mix_kernel, names=tuple(operands), n=n, dim=dim, parts=len(p.parts)),
        name="streams_mix",
        grid=(dim // CHUNK, -(-t // DOT_ROWS)),
        out_shape=(
            jax.ShapeDtypeStruct(p.streams_TC.shape, p.streams_TC.dtype),
            jax.ShapeDtypeStruct((t, dim // CHUNK * COLUMNS), jnp.float32),
        ),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        aliases={1: 0},
    )(*operands.values())
    return new, mixed


def _mix_kernel(*refs: Any, names: tuple[str, ...], n: int, dim: int, parts: int) -> None:
    by_name = dict(zip(names, refs, strict=False))
    new_ref, mixed_ref = refs[len(names) :]
    chunk, tile = pl.program_id(0), pl.program_id(1)
    count = by_name["streams"].shape[0]
    number = tile * DOT_ROWS + jnp.arange(DOT_ROWS, dtype=jnp.int32)
    live, row = number < count, jnp.minimum(number, count - 1)
    layer = plgpu.load(by_name["layer"].at[jnp.int32(0)])
    at = grid_index(row, chunk * CHUNK, CHUNK)
    y = _pending(by_name, row, at, parts)
    # One tile for all streams, summed over its first axis: a compiler for AMD gives everything that
    # leads to a product without a reduction the product's layout, which takes too many registers.
    wide = (n, DOT_ROWS, CHUNK)
    j = lax.broadcasted_iota(jnp.int32, wide, 0)
    rows3, columns3 = (jnp.broadcast_to(a[None], wide) for a in at)
    old = plgpu.load(by_name["streams"].at[rows3, columns3 + j * dim]).astype(jnp.float32)
    row_of = jnp.broadcast_to(row[None, :], (n, DOT_ROWS))
    j_of = lax.broadcasted_iota(jnp.int32, (n, DOT_ROWS), 0)
    fn = by_name["fn"]
    entry = jnp.minimum(jnp.arange(COLUMNS, dtype=jnp.int32), fn.shape[1] - 1)
    at_fn = grid_index(entry, chunk * CHUNK, CHUNK)
    # Stored by the true number: emulation writes old values back where a mask is off.
    to = grid_index(number, chunk * CHUNK, CHUNK)
    mask = jnp.broadcast_to(live[:, None], (DOT_ROWS, CHUNK))

    # All streams have been read: they may be written in place, one after the other.
    def stream(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        acc, squares = carry
        comb = plgpu.load(by_name["comb"].at[row_of, j_of * n + k])
        total = jnp.sum(comb[:, :, None] * old, axis=0)
        x = (total + _column(by_name["post"], row, k) * y).astype(jnp.bfloat16)
        plgpu.store(new_ref.at[to[0], to[1] + k * dim], x, mask=mask)
        for part in addends(plgpu.load(fn.at[layer, at_fn[0], at_fn[1] + k * dim])):
            acc = dot_onto(acc, part, x)
        return acc, squares + x.astype(jnp.float32) * x.astype(jnp.float32)

    zeros = jnp.zeros((COLUMNS, DOT_ROWS), jnp.float32), jnp.zeros((DOT_ROWS, CHUNK), jnp.float32)
    acc, squares = lax.fori_loop(jnp.int32(0), jnp.int32(n), stream, zeros)
    last = lax.broadcasted_iota(jnp.int32, (DOT_ROWS, COLUMNS), 1) == COLUMNS - 1
    mixed = jnp.where(last, jnp.sum(squares, axis=1)[:, None], acc.T)
    mask = jnp.broadcast_to(live[:, None], mixed.shape)
    plgpu.store(mixed_ref.at[grid_index(number, chunk * COLUMNS, COLUMNS)], mixed, mask=mask)


def _column(ref: Any, row: Array, column: int | Array) -> Array:
    """ref[row, column] as [rows, 1]."""
    at = jnp.full(row.shape, column, jnp.int32)
    return plgpu.load(ref.at[row, at])[:, None]


def _pending(refs: dict[str, Any], row: Array, at: tuple[Array, Array], parts: int) -> Array:
    """The sublayer's output, rounded to bfloat16: float32 [rows, CHUNK]."""

    def part(i: int, p: int) -> Array:
        y: Array = plgpu.load(refs[f"y{i}"].at[jnp.int32(p), at[0], at[1]])
        if i == 0 and "ids" in refs:  # a part that does not count was never written
            y = jnp.where(_column(refs["ids"], row, p) >= 0, y, 0.0)
        return y

    groups = [
        functools.reduce(jnp.add, (part(i, p) for p in range(refs[f"y{i}"].shape[0])))
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
        grid=(t,),
        out_shape=shapes,
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), streams_TC, mixed, scale, base, weight_LD)
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
    t, n = pl.program_id(0), sizes.n
    layer = plgpu.load(layer_ref.at[jnp.int32(0)])
    chunks = mixed_ref.shape[1] // COLUMNS
    chunk = jnp.arange(1 << (chunks - 1).bit_length(), dtype=jnp.int32)

    def total(entry: Array) -> Array:
        """Entries of the maps, summed over chunks: float32, shape of `entry`."""
        wide = chunk.reshape(-1, *(1,) * entry.ndim)
        at = jnp.minimum(wide, chunks - 1) * COLUMNS + entry[None]
        got = plgpu.load(mixed_ref.at[t, at])
        return jnp.sum(jnp.where(wide < chunks, got, 0.0), axis=0)

    entry = jnp.arange(n, dtype=jnp.int32)
    squares = total(jnp.full((n,), COLUMNS - 1, jnp.int32))
    scale = lax.rsqrt(squares / (n * dim) + sizes.rms_eps)

    def logits(entry: Array, i: int, scale: Array) -> Array:
        base = plgpu.load(base_ref.at[layer, entry])
        return total(entry) * scale * plgpu.load(scale_ref.at[layer, jnp.int32(i)]) + base

    pre = jax.nn.sigmoid(logits(entry, 0, scale)) + sizes.hc_eps
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
            plgpu.store(out_refs[0].at[jnp.int32(0), t, pl.ds(c, width)], low)
            plgpu.store(out_refs[0].at[jnp.int32(1), t, pl.ds(c, width)], high)
        else:
            plgpu.store(out_refs[0].at[t, pl.ds(c, width)], high)
    if head:
        return
    plgpu.store(out_refs[1].at[t, entry], 2.0 * jax.nn.sigmoid(logits(n + entry, 1, scale)))
    source = lax.broadcasted_iota(jnp.int32, (n, n), 0)
    to = lax.broadcasted_iota(jnp.int32, (n, n), 1)
    comb = _sinkhorn(logits(2 * n + n * source + to, 2, scale[None, :]), sizes)
    plgpu.store(out_refs[2].at[t, source, to], comb)


def _sinkhorn(a: Array, sizes: Sizes) -> Array:
    """`hyper.sinkhorn` of one row, [n, n]."""
    eps = sizes.hc_eps

    def over(c: Array, axis: int) -> Array:
        return c / (jnp.sum(c, axis=axis, keepdims=True) + eps)

    e = jnp.exp(a - jnp.max(a, axis=1, keepdims=True))
    c = over(e / jnp.sum(e, axis=1, keepdims=True) + eps, 0)
    return lax.fori_loop(0, sizes.iters - 1, lambda _, c: over(over(c, 1), 0), c)
