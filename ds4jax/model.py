"""The whole model as pure functions: rows in, state in, logits out, state out.

Prefill, decode and verification are one function, `forward`, over a ragged batch of rows (slot,
position, token). On the reference backend each row passes through a layer alone, one after the
other, in loops whose trip count is the number of live rows: whatever the batch, a row meets the
same operations with the same shapes, so its bits depend on its own lane only. Other backends run
all rows at once through the kernels of `fused`. Nothing here jits or donates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from ds4jax import fused, layers, linear
from ds4jax import params as params_lib
from ds4jax.cache import Cache
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.layers import Context, Rows
from ds4jax.params import Group, LayerInfo, Params, Weights
from pallas_kernels import hyper, norm, rope

FROM_HISTORY = -1
"""Token of a row whose token the device already holds (sampled by an earlier step)."""


@struct.dataclass
class Plan:
    """What one step computes. T rows, live ones first, rows of one lane consecutive and ascending.

    All int32. A row may carry one update of its lane's block table, applied before anything else.
    """

    slot: Array  # [T]; the trash slot for padding
    pos: Array  # [T], absolute; -1-d means d positions past the lane's committed length
    token: Array  # [T], id or FROM_HISTORY
    run: Array  # [T], index among the rows of the same lane in this step
    after: Array  # [T], rows of the same lane that follow
    table_idx: Array  # [T], block table entry to set, or -1
    table_page: Array  # [T], physical page for it
    emit: Array  # [E], numbers of the rows whose logits are wanted, live ones first
    num_rows: Array  # [], live rows
    num_emit: Array  # [], live entries of emit


@struct.dataclass
class Output:
    """What a step computed: E emitted rows, and activations by name."""

    logits: Array  # float32 [E, V]; entries past num_emit are zero (rows one after the other)
    slot: Array  # int32 [E], slot of each emitted row; the trash slot for padding
    pos: Array  # int32 [E], absolute position of each emitted row
    captured: dict[str, Array]  # [T, ...] by name


def _apply_plan(params: Params, cache: Cache, plan: Plan, rows_alone: bool) -> tuple[Cache, Rows]:
    """Update tables, lengths and history; resolve positions and tokens."""
    count, trash = plan.slot.shape[0], cache.length.shape[0] - 1
    live = jnp.arange(count, dtype=jnp.int32) < plan.num_rows
    slot = jnp.where(live, plan.slot, trash)
    pos = jnp.where(plan.pos >= 0, plan.pos, cache.length[slot] - 1 - plan.pos)
    pos = jnp.where(live, pos, 0)
    last = cache.tokens.shape[1] - 1
    token = jnp.where(plan.token >= 0, plan.token, cache.tokens[slot, jnp.minimum(pos, last)])
    token = jnp.where(live, token, 0)
    paged = live & (plan.table_idx >= 0)
    table = cache.table.at[jnp.where(paged, slot, trash), jnp.where(paged, plan.table_idx, 0)].set(
        jnp.where(paged, plan.table_page, cache.table[trash, 0])
    )
    tokens = cache.tokens.at[slot, jnp.minimum(pos, last)].set(token)
    length = cache.length.at[slot].max(jnp.where(live, pos + 1, 0))
    cache = cache.replace(  # type: ignore[attr-defined]
        table=table, tokens=tokens, length=length.at[trash].set(0)
    )
    if rows_alone:
        cs = lax.map(lambda p: _angles(params, p[None]), pos)
    else:
        cs = jax.vmap(lambda p: _angles(params, p[None]))(pos)
    return cache, Rows(
        slot=slot, pos=pos, token=token, live=live, run=plan.run, after=plan.after,
        cs_main=cs[0][:, 0], cs=cs[1][:, 0], cs4=cs[2][:, 0], cs128=cs[3][:, 0],
    )  # fmt: skip


def _angles(params: Params, pos: Array) -> tuple[Array, Array, Array, Array]:
    compress = params.rope_compress
    return (
        rope.cos_sin(params.rope_main, pos),
        rope.cos_sin(compress, pos),
        rope.cos_sin(compress, pos - pos % 4),
        rope.cos_sin(compress, pos - pos % 128),
    )


def _one(tree: Any, t: Array) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, t, 1), tree)


def _put(tree: Any, t: Array, row: Any) -> Any:
    return jax.tree.map(lambda a, v: lax.dynamic_update_slice_in_dim(a, v, t, 0), tree, row)


def _rows_alone(
    ctx: Context, info: LayerInfo, w: Weights, x: Array, cache: Cache, rows: Rows, num_rows: Array
) -> tuple[Array, Cache, dict[str, Array]]:
    """A layer for one row at a time, live rows only, in passes over the rows.

    The rows go through one part of the layer after the other, and through the routed experts expert
    by expert: so few weights are met between two rows that they stay in the processor's cache.
    """
    count = x.shape[0]

    def run(part: Callable[[Any, Any, Rows], Any], given: Any, empty: Any, state: Any) -> Any:
        """(row of `given`, state, row) -> (row, state, captured), for every live row."""

        def one(t: Array, carry: Any) -> Any:
            out, state, caps = carry
            row, state, got = part(_one(given, t), state, _one(rows, t))
            return _put(out, t, row), state, _put(caps, t, got)

        shapes = {}
        if ctx.capture:  # tracing a layer takes a fifth of a second: not twice for nothing
            first = (_one(given, jnp.int32(0)), state, _one(rows, jnp.int32(0)))
            shapes = jax.eval_shape(lambda: part(*first)[2])
        caps = {k: jnp.zeros((count, *s.shape[1:]), s.dtype) for k, s in shapes.items()}
        return lax.fori_loop(jnp.int32(0), num_rows, one, (empty, state, caps))

    def project(x: Array, _: None, row: Rows) -> Any:
        p, got = layers.project(ctx, info, w, x, row)
        return p, None, got

    def attend(given: Any, cache: Cache, row: Rows) -> Any:
        streams, projected = given
        return layers.attend(ctx, info, w, streams, projected, cache, row)

    def route(x: Array, _: None, row: Rows) -> Any:
        r, got = layers.route(ctx, info, w, x, row)
        return r, None, got

    def finish(given: Any, _: None, row: Rows) -> Any:
        x, got = layers.finish(ctx, info, *given)
        return x, None, got

    p, _, projected = run(project, x, layers.no_projection(ctx, info, w, x), None)
    x, cache, attended = run(attend, (x, p), x, cache)
    r, _, routed = run(route, x, layers.no_routes(ctx, x), None)
    x, _, done = run(finish, (r, layers.routed_experts(ctx, info, w, r)), r.streams, None)
    return x, cache, projected | attended | routed | done


def _embed(ctx: Context, params: Params, token: Array) -> Array:
    x = linear.take_rows(params.top["embed"], token, ctx.dtype)
    return jnp.broadcast_to(x[:, None, :], (x.shape[0], ctx.cfg.hc_mult, x.shape[1]))


def _final(ctx: Context, params: Params, x_END: Array) -> tuple[Array, Array]:
    """Collapsed hidden state before the final norm, and logits; both float32."""
    top, cfg = params.top, ctx.cfg
    hidden = hyper.collapse_head(
        x_END, top["hc_head_fn"], top["hc_head_scale"], top["hc_head_base"],
        hc_eps=cfg.hc_eps, rms_eps=cfg.rms_norm_eps,
    )  # fmt: skip
    normed = norm.rms_norm(hidden, top["norm"], eps=cfg.rms_norm_eps)
    logits = linear.matmul(normed, top["head"], out_dtype=jnp.float32)
    return hidden, logits


def head_logits(params: Params, streams_TND: Array, *, cfg: ModelConfig) -> Array:
    """Logits that the head would give for residual streams of any layer (logit lens).

    Args: streams_TND: [T, n, D], for example the captured "L3.streams_out".
    Returns: logits_TV float32.
    """
    ctx = Context(cfg, RuntimeConfig())
    return _final(ctx, params, streams_TND)[1]


def forward(
    params: Params,
    cache: Cache,
    plan: Plan,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    chunk: bool = False,
    capture: frozenset[str] = frozenset(),
    batched: bool | None = None,
) -> tuple[Cache, Output]:
    """One step of the model over a ragged batch of rows.

    Args:
        params, cache: device trees. plan: the rows.
        cfg, run: static.
        chunk: static; True if a lane may have more rows than its rings (batched form only).
        capture: names of activations to return, "L{layer}.{name}" with the names of `layers`.
        batched: static; on the reference backend False (and None) runs rows one after the other,
            exact whatever the batch, True all at once. The kernels are exact all at once.

    Returns: cache, output.
    """
    ctx = Context(cfg, run, chunk, capture)
    rows_alone = run.backend == "reference" if batched is None else not batched
    if rows_alone and run.backend != "reference":
        raise NotImplementedError(f"backend {run.backend!r} has no form for rows one by one")
    cache, rows = _apply_plan(params, cache, plan, rows_alone or run.backend == "interpret")
    x = _embed(ctx, params, rows.token)
    captured: dict[str, Array] = {}
    if run.backend != "reference":
        out, mixed, cache, captured = fused.run_layers(ctx, params, x, cache, rows)
        return _output(
            cache, plan, rows, fused.logits(ctx, params, out, mixed, plan.emit), captured
        )

    def one_layer(info: LayerInfo, weights: Weights, x: Array, cache: Cache) -> Any:
        w = _unpacked(ctx, weights)
        if rows_alone:
            return _rows_alone(ctx, info, w, x, cache, rows, plan.num_rows)
        return layers.layer(ctx, info, w, x, cache, rows)

    for group, units in zip(params.layout, params.groups, strict=True):
        x, cache, got = _run_group(ctx, group, units, one_layer, x, cache)
        captured |= got
    return _output(cache, plan, rows, _emit_logits(ctx, params, x, plan, rows_alone), captured)


def _output(
    cache: Cache, plan: Plan, rows: Rows, logits: Array, captured: dict[str, Array]
) -> tuple[Cache, Output]:
    live = jnp.arange(plan.emit.shape[0], dtype=jnp.int32) < plan.num_emit
    slot = jnp.where(live, rows.slot[plan.emit], cache.length.shape[0] - 1)
    return cache, Output(logits=logits, slot=slot, pos=rows.pos[plan.emit], captured=captured)


def sequences(
    params: Params,
    token_BT: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    capture: frozenset[str] = frozenset(),
    remat: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """Logits of whole sequences, each from position 0: `forward` in differentiable form.

    No cache, static trip counts, rows grouped by expert: the same mathematics, other roundings.
    Gradients with respect to the indexer come only through "L{i}.index_loss" (the divergence of its
    scores from the attention, one number a row), which this form captures besides "L{i}.index_mask"
    (selected rows) and the names of `layers`.

    Args:
        token_BT: int32 ids; T up to the positions that the angle tables of `params` cover.
        cfg, run: static; the backend must be "reference".
        capture: activations to return, rows in the order of the tokens.
        remat: compute the inside of a layer again for its gradient instead of keeping it.

    Returns: logits_BTV float32, activations [B*T, ...] by name.

    Raises:
        ValueError: for another backend, or scanned layers whose SwiGLU limits differ.
    """
    if run.backend != "reference":
        raise ValueError(f"sequences: backend is {run.backend!r}, must be 'reference'")
    lanes, length = token_BT.shape
    ctx = Context(cfg, run, capture=capture, sequence_len=length)
    line = jnp.arange(length, dtype=jnp.int32)
    pos, *angles = (jnp.concatenate([a] * lanes) for a in (line, *_angles(params, line)))
    cs_main, cs, cs4, cs128 = angles
    zero = jnp.zeros_like(pos)
    rows = Rows(
        slot=zero, pos=pos, token=token_BT.reshape(-1), live=jnp.ones_like(pos, bool), run=pos,
        after=length - 1 - pos, cs_main=cs_main, cs=cs, cs4=cs4, cs128=cs128,
    )  # fmt: skip
    x = _embed(ctx, params, rows.token)
    captured: dict[str, Array] = {}
    for group, units in zip(params.layout, params.groups, strict=True):
        x, got = _sequence_group(ctx, group, units, x, rows, remat)
        captured |= got
    logits = _final(ctx, params, x)[1]
    return logits.reshape(lanes, length, -1), {k: captured[k] for k in captured if k in capture}


def _sequence_group(
    ctx: Context, group: Group, units: tuple[Weights, ...], x: Array, rows: Rows, remat: bool
) -> tuple[Array, dict[str, Array]]:
    """All layers of a group on whole sequences: a scan whose body is the unit's layers.

    The body carries the numbers of the first repetition; what it captures is named afterwards.
    """
    size = len(group.unit)

    def numbers(u: int) -> list[int]:
        return [group.first + r * size + u for r in range(group.count)]

    limits = [
        {(ctx.cfg.swiglu_limits[i], ctx.cfg.shared_swiglu_limits[i]) for i in numbers(u)}
        for u in range(size)
    ]
    if any(len(found) > 1 for found in limits):
        raise ValueError(f"sequences: layers {group.first}.. differ in their SwiGLU limits")
    leaves = {name.partition(".")[2] for name in ctx.capture}
    own = replace(
        ctx, capture=frozenset(f"L{info.layer}.{leaf}" for info in group.unit for leaf in leaves)
    )

    def layer_of(info: LayerInfo) -> Callable[..., tuple[Array, dict[str, Array]]]:
        def fn(x: Array, w: Weights) -> tuple[Array, dict[str, Array]]:
            y, _, got = layers.layer(own, info, _unpacked(own, w), x, None, rows)
            return y, got

        return jax.checkpoint(fn) if remat else fn

    def body(x: Array, weights: tuple[Weights, ...]) -> tuple[Array, dict[str, Array]]:
        got: dict[str, Array] = {}
        for info, w in zip(group.unit, weights, strict=True):
            x, more = layer_of(info)(x, w)
            got |= more
        return x, got

    if group.count > 1:
        x, stacked = lax.scan(body, x, units)
    else:
        x, single = body(x, tuple(params_lib.layer_weights(w, 0) for w in units))
        stacked = {k: v[None] for k, v in single.items()}
    captured = {
        f"L{i}.{leaf}": stacked[f"L{info.layer}.{leaf}"][r]
        for u, info in enumerate(group.unit)
        for r, i in enumerate(numbers(u))
        for leaf in leaves
        if f"L{info.layer}.{leaf}" in stacked
    }
    return x, captured


def _run_group(
    ctx: Context,
    group: Group,
    units: tuple[Weights, ...],
    one_layer: Callable[[LayerInfo, Weights, Array, Cache], Any],
    x: Array,
    cache: Cache,
) -> tuple[Array, Cache, dict[str, Array]]:
    """All layers of a group: a scan over its repetitions, or one after the other if there is one.

    Groups with a captured layer are unrolled, since each capture has a name of its own.
    """

    def unit(x: Array, cache: Cache, r: int | Array) -> tuple[Array, Cache, dict[str, Array]]:
        captured: dict[str, Array] = {}
        for u, info in enumerate(group.unit):
            info = params_lib.repeat_info(group, info, r)
            x, cache, got = one_layer(info, _entry(units[u], r, group.count), x, cache)
            captured |= got
        return x, cache, captured

    last = group.first + group.count * len(group.unit)
    names = tuple(f"L{i}." for i in range(group.first, last))
    if group.count > 1 and not any(name.startswith(names) for name in ctx.capture):

        def body(carry: tuple[Array, Cache], r: Array) -> tuple[tuple[Array, Cache], None]:
            return unit(*carry, r)[:2], None

        (x, cache), _ = lax.scan(body, (x, cache), jnp.arange(group.count, dtype=jnp.int32))
        return x, cache, {}
    captured: dict[str, Array] = {}
    for r in range(group.count):
        x, cache, got = unit(x, cache, r)
        captured |= got
    return x, cache, captured


def _entry(stack: Weights, index: int | Array, count: int) -> Weights:
    """One layer's weights; matrices of a real stack stay in it (kernels take stack and number)."""
    if count == 1:
        return params_lib.layer_weights(stack, 0)
    number = jnp.asarray(index, jnp.int32)
    return {
        k: linear.Stacked(v, number) if k in params_lib.MATRIX_KEYS else v[index]
        for k, v in stack.items()
    }


def _unpacked(ctx: Context, weights: Mapping[str, Any]) -> Weights:
    """Packed weights decoded once per step; experts stay packed, only live ones are decoded."""
    return {
        k: v
        if k.startswith("ffn.experts.")
        else linear.decoded(v, params_lib.weight_dtype(k, ctx.dtype))
        for k, v in weights.items()
    }


def _emit_logits(ctx: Context, params: Params, x: Array, plan: Plan, rows_alone: bool) -> Array:
    if not rows_alone:
        return _final(ctx, params, x[plan.emit])[1]
    vocab = ctx.cfg.vocab_size
    top = {k: v if k == "embed" else linear.decoded(v, jnp.float32) for k, v in params.top.items()}
    plain = params.replace(top=top)  # type: ignore[attr-defined]

    def body(e: Array, out: Array) -> Array:
        logits = _final(ctx, plain, _one(x, plan.emit[e]))[1]
        return _put(out, e, logits)

    out = jnp.zeros((plan.emit.shape[0], vocab), jnp.float32)
    return lax.fori_loop(jnp.int32(0), plan.num_emit, body, out)
