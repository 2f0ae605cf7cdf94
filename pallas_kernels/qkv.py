"""What lies between a layer's projections and its attention, in two kernels.

`inputs` takes the projections of the normalised row (in parts of K, as `dense.several` leaves them)
to the query's low-rank row, the key row (normalised, rotated and written to its place in the ring)
and the compressors' values and gates. `heads` normalises and rotates every query head. Each row, or
head of a row, is one program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend as backend_lib
from pallas_kernels import norm, ring, rope
from pallas_kernels.backend import Backend

NARROW = 1024
"""Channels in one register tile, at most."""


class Compress(NamedTuple):
    """Projections of one compressor: parts [S, T, C] of values and gates; its position terms."""

    values: Array  # float32
    gates: Array
    ape_LRC: Array  # float32 [L, ratio, C], added to the gates


class Projected(NamedTuple):
    """Projections of the normalised rows, parts float32 [S, T, N] each."""

    q: Array
    kv: Array
    compress: tuple[Compress, ...] = ()
    weight: Array | None = None  # of the index heads


class Inputs(NamedTuple):
    """Results of `inputs`. T rows."""

    q_TQ: Array  # bfloat16, normalised
    ring: Array  # with the rows of the step, unless `step_TD` was asked for
    step_TD: Array | None  # bfloat16 key rows
    states: tuple[Array, ...]  # float32 [T, 2, C]: value and gate of each compressor
    weight_TI: Array | None  # float32, scaled


def inputs(
    p: Projected,
    q_norm_LQ: Array,
    kv_norm_LD: Array,
    raw: Array,
    slot_T: Array,
    pos_T: Array,
    cs_TR: Array,
    *,
    layer: int | Array,
    ring_layer: int | Array,
    keep: bool,
    weight_scale: float,
    eps: float,
    backend: Backend,
) -> Inputs:
    """Normalise, rotate and place what the projections of a layer's input gave.

    Args:
        p: projections. q_norm_LQ, kv_norm_LD: stacks of norm weights; layer: which of L.
        raw: ring [M, S+1, R, D]; ring_layer: which of M. slot_T, pos_T: int32.
        cs_TR: float32 [T, 2, R/2], angles at the positions.
        keep: write the key rows to the ring (in place); False: return them as `step_TD`.
        weight_scale: factor of the index heads' weights.

    Raises: NotImplementedError if `backend` has no kernel for these sizes or dtypes.
    Source: architecture of DeepSeek-V4, projections and compressor.
    """
    backend = backend_lib.require("qkv", backend)
    if backend == "reference":
        return _inputs_reference(
            p, q_norm_LQ[layer], kv_norm_LD[layer], raw, slot_T, pos_T, cs_TR, layer, ring_layer,
            keep, weight_scale, eps,
        )  # fmt: skip
    interpret = backend_lib.target(backend) == "interpret"
    return launch_inputs(
        p, q_norm_LQ, kv_norm_LD, raw, slot_T, pos_T, cs_TR, layer, ring_layer, keep, weight_scale,
        eps, interpret=interpret,
    )  # fmt: skip


def _total(parts: Array) -> Array:
    total = parts[0]
    for s in range(1, parts.shape[0]):
        total = total + parts[s]
    return total


def _inputs_reference(
    p: Projected, q_norm_Q: Array, kv_norm_D: Array, raw: Array, slot_T: Array, pos_T: Array,
    cs_TR: Array, layer: int | Array, ring_layer: int | Array, keep: bool, weight_scale: float,
    eps: float,
) -> Inputs:  # fmt: skip
    dtype = raw.dtype
    q = norm.rms_norm(_total(p.q).astype(dtype), q_norm_Q, eps=eps)
    kv = norm.rms_norm(_total(p.kv).astype(dtype), kv_norm_D, eps=eps)
    kv = rope.rotate(kv, cs_TR)
    states = []
    for c in p.compress:
        ape = c.ape_LRC[layer]
        gate = _total(c.gates) + ape[pos_T % ape.shape[0]]
        states.append(jnp.stack([_total(c.values), gate], axis=1))
    weight = None if p.weight is None else _total(p.weight) * jnp.float32(weight_scale)
    if keep:
        raw = ring.write(raw, ring_layer, slot_T, pos_T, kv, jnp.ones_like(pos_T, bool))
    return Inputs(q, raw, None if keep else kv, tuple(states), weight)


def heads(
    parts: tuple[Array, ...], cs_TR: Array, dims: tuple[tuple[int, bool], ...], *, eps: float,
    backend: Backend,
) -> list[Array]:  # fmt: skip
    """Query heads from their projections: an unweighted norm where asked for, then rotation.

    Args:
        parts: float32 [S, T, H D] for every kind of head. dims: (D, with norm) of every kind.
        cs_TR: float32 [T, 2, R/2].

    Returns: bfloat16 [T, H, D] for every kind; the projection is rounded to bfloat16 first.
    Raises: NotImplementedError if `backend` has no kernel for these sizes.
    """
    backend = backend_lib.require("qkv", backend)
    if backend == "reference":
        out = []
        for part, (dim, normed) in zip(parts, dims, strict=True):
            q = _total(part).astype(jnp.bfloat16).reshape(part.shape[1], -1, dim)
            q = norm.rms_norm(q, None, eps=eps) if normed else q
            out.append(rope.rotate(q, cs_TR))
        return out
    interpret = backend_lib.target(backend) == "interpret"
    return launch_heads(parts, cs_TR, dims, eps, interpret=interpret)


# --- The kernels ---


def _pieces(n: int, what: str) -> list[tuple[int, int]]:
    """(first, width) of register tiles that cover n channels."""
    width = min(n & -n, NARROW)
    if width < 4:
        raise NotImplementedError(f"qkv: the kernel takes {what} by multiples of 4, not {n}")
    return [(c, width) for c in range(0, n, width)]


def launch_inputs(
    p: Projected, q_norm: Array, kv_norm: Array, raw: Array, slot_T: Array, pos_T: Array,
    cs_TR: Array, layer: int | Array, ring_layer: int | Array, keep: bool, weight_scale: float,
    eps: float, *, interpret: bool,
) -> Inputs:  # fmt: skip
    """`inputs` by its kernel."""
    if raw.dtype != jnp.bfloat16:
        raise NotImplementedError(f"qkv: the kernel takes bfloat16 rows, not {raw.dtype}")
    t, dim = p.kv.shape[1:]
    operands = {
        "layer": ring.scalar(layer), "ring_layer": ring.scalar(ring_layer), "slot": slot_T,
        "pos": pos_T, "cs": cs_TR, "q": p.q, "kv": p.kv, "q_norm": q_norm, "kv_norm": kv_norm,
        "raw": raw,
    }  # fmt: skip
    of = jax.ShapeDtypeStruct
    shapes = {"q_out": of((t, p.q.shape[2]), jnp.bfloat16)}
    shapes["kv_out"] = of(raw.shape if keep else (t, dim), jnp.bfloat16)
    aliases = {tuple(operands).index("raw"): 1} if keep else {}
    for i, c in enumerate(p.compress):
        operands |= {f"v{i}": c.values, f"g{i}": c.gates, f"ape{i}": c.ape_LRC}
        shapes[f"state{i}"] = of((t, 2, c.values.shape[2]), jnp.float32)
    if p.weight is not None:
        operands["w"] = p.weight
        shapes["w_out"] = of(p.weight.shape[1:], jnp.float32)
    names = (*operands, *shapes)
    pieces = {
        k: _pieces(operands[k].shape[2], k) for k in operands if k in ("q", "kv", "w", "v0", "v1")
    }
    out = backend_lib.pallas(
        functools.partial(
            _inputs_kernel, names=names, pieces=pieces, keep=keep, scale=weight_scale, eps=eps
        ),
        name="qkv_inputs",
        grid=(2 + len(p.compress) + (p.weight is not None), t),
        out_shape=tuple(shapes.values()),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        aliases=aliases,
    )(*operands.values())
    got = dict(zip(shapes, out, strict=True))
    return Inputs(
        got["q_out"], got["kv_out"] if keep else raw, None if keep else got["kv_out"],
        tuple(got[f"state{i}"] for i in range(len(p.compress))), got.get("w_out"),
    )  # fmt: skip


def _sum(ref: Any, t: Array, first: Any, width: int) -> Array:
    """Sum over the parts of row t, first part first."""
    total = plgpu.load(ref.at[jnp.int32(0), t, pl.ds(first, width)])
    for s in range(1, ref.shape[0]):
        total += plgpu.load(ref.at[jnp.int32(s), t, pl.ds(first, width)])
    return total


def _rounded(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _normed(parts: list[Array], count: int, eps: float) -> list[Array]:
    """x / sqrt(mean(x^2) + eps), float32."""
    total = jnp.sum(parts[0] * parts[0])
    for x in parts[1:]:
        total += jnp.sum(x * x)
    scale = jax.lax.rsqrt(total / count + eps)
    return [x * scale for x in parts]


def _inputs_kernel(
    *all_refs: Any, names: tuple[str, ...], pieces: dict[str, list[tuple[int, int]]], keep: bool,
    scale: float, eps: float,
) -> None:  # fmt: skip
    refs = dict(zip(names, all_refs, strict=True))
    part, t = pl.program_id(0), pl.program_id(1)
    layer, ring_layer = (plgpu.load(refs[k].at[jnp.int32(0)]) for k in ("layer", "ring_layer"))
    pos = plgpu.load(refs["pos"].at[t])

    def normed(name: str) -> list[Array]:
        at = pieces[name]
        x = [_rounded(_sum(refs[name], t, c, width)) for c, width in at]
        x = _normed(x, refs[name].shape[2], eps)
        weight = [
            plgpu.load(refs[f"{name}_norm"].at[layer, pl.ds(c, width)]).astype(jnp.float32)
            for c, width in at
        ]
        return [(a * b).astype(jnp.bfloat16) for a, b in zip(x, weight, strict=True)]

    @pl.when(part == 0)
    def _() -> None:
        for (c, width), x in zip(pieces["q"], normed("q"), strict=True):
            plgpu.store(refs["q_out"].at[t, pl.ds(c, width)], x)

    @pl.when(part == 1)
    def _() -> None:
        kept = refs["kv"].shape[2] - 2 * refs["cs"].shape[2]
        for (c, width), x in zip(pieces["kv"], normed("kv"), strict=True):
            if c + width > kept:
                x = rope.turned(x, refs["cs"], t, c - kept).astype(jnp.bfloat16)
            if keep:
                slot = plgpu.load(refs["slot"].at[t])
                entry = jax.lax.rem(pos, jnp.int32(refs["raw"].shape[2]))
                at = refs["kv_out"].at[ring_layer, slot, entry, pl.ds(c, width)]
            else:
                at = refs["kv_out"].at[t, pl.ds(c, width)]
            plgpu.store(at, x)

    number = 2
    for i in range(sum(name.startswith("ape") for name in names)):

        @pl.when(part == number)
        def _(i: int = i) -> None:
            ape = refs[f"ape{i}"]
            entry = jax.lax.rem(pos, jnp.int32(ape.shape[1]))
            for c, width in pieces[f"v{i}"]:
                at = pl.ds(c, width)
                gate = _sum(refs[f"g{i}"], t, c, width) + plgpu.load(ape.at[layer, entry, at])
                out = refs[f"state{i}"]
                plgpu.store(out.at[t, jnp.int32(0), at], _sum(refs[f"v{i}"], t, c, width))
                plgpu.store(out.at[t, jnp.int32(1), at], gate)

        number += 1
    if "w" in refs:

        @pl.when(part == number)
        def _() -> None:
            for c, width in pieces["w"]:
                x = _sum(refs["w"], t, c, width) * jnp.float32(scale)
                plgpu.store(refs["w_out"].at[t, pl.ds(c, width)], x)


def launch_heads(
    parts: tuple[Array, ...], cs_TR: Array, dims: tuple[tuple[int, bool], ...], eps: float, *,
    interpret: bool,
) -> list[Array]:  # fmt: skip
    """`heads` by its kernel."""
    t = parts[0].shape[1]
    counts = [part.shape[2] // dim for part, (dim, _) in zip(parts, dims, strict=True)]
    if any(dim & (dim - 1) or dim < 16 for dim, _ in dims):
        raise NotImplementedError(
            f"qkv: the kernel takes heads of a power of two of at least 16 channels, not"
            f" {[dim for dim, _ in dims]}"
        )
    out: list[Array] = backend_lib.pallas(
        functools.partial(_heads_kernel, dims=dims, counts=counts, eps=eps),
        name="qkv_heads",
        grid=(sum(counts), t),
        out_shape=[
            jax.ShapeDtypeStruct((t, count, dim), jnp.bfloat16)
            for count, (dim, _) in zip(counts, dims, strict=True)
        ],
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(cs_TR, *parts)
    return out


def _heads_kernel(
    cs_ref: Any, *refs: Any, dims: tuple[tuple[int, bool], ...], counts: list[int], eps: float
) -> None:
    program, t = pl.program_id(0), pl.program_id(1)
    first = 0
    for i, ((dim, normed), count) in enumerate(zip(dims, counts, strict=True)):

        @pl.when((program >= first) & (program < first + count))
        def _(i: int = i, dim: int = dim, normed: bool = normed, first: int = first) -> None:
            head = program - first
            x = _rounded(_sum(refs[i], t, head * dim, dim))
            if normed:
                [x] = _normed([x], dim, eps)
            kept = dim - 2 * cs_ref.shape[2]
            y = rope.turned(x.astype(jnp.bfloat16), cs_ref, t, -kept)
            plgpu.store(refs[len(dims) + i].at[t, head, pl.ds(0, dim)], y.astype(jnp.bfloat16))

        first += count
