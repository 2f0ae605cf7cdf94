"""One transformer layer as a pure function of a batch of rows and the cache.

Each row is one token of one lane. The same code serves one row (the CPU runs rows one after the
other, so that a row's bits cannot depend on the others) and many rows at once (kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from ds4jax import linear, sequence
from ds4jax.cache import ROWS4, Cache
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import LayerInfo, Weights
from pallas_kernels import (
    attention,
    compressor,
    hyper,
    indexer,
    norm,
    ring,
    rope,
    rounding,
    router,
)

F32 = jnp.float32


@struct.dataclass
class Rows:
    """The rows of a step, T of them; rows of one lane are consecutive, live rows come first."""

    slot: Array  # int32 [T]; the trash slot for padding
    pos: Array  # int32 [T], absolute
    token: Array  # int32 [T]
    live: Array  # bool [T]
    run: Array  # int32 [T], index among the rows of the same lane
    after: Array  # int32 [T], rows of the same lane that follow
    cs_main: Array  # float32 [T, 2, R/2], angles at pos without scaling
    cs: Array  # the same for layers that compress
    cs4: Array  # at pos - pos % 4, for a row of ratio 4
    cs128: Array  # at pos - pos % 128


@dataclass(frozen=True)
class Context:
    """Static facts of a step that every layer needs."""

    cfg: ModelConfig
    run: RuntimeConfig
    chunk: bool = False
    """True: a lane may have more rows than the rings hold; the rings are read as they were before
    the step and written after it, and the step's own rows are read directly."""
    capture: frozenset[str] = frozenset()
    first_expert: int = 0
    sequence_len: int = 0
    """Above 0: the differentiable form. The rows are whole sequences of this many tokens, all from
    position 0, one after the other; no cache is read or written (`ds4jax.sequence`)."""

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype."""
        return jnp.dtype(self.run.dtype)


class Captured(dict[str, Array]):
    """Activations asked for by name ("L3.attn_out"), collected on the way."""

    def __init__(self, wanted: frozenset[str], prefix: str) -> None:
        super().__init__()
        self._wanted, self._prefix = wanted, prefix

    def add(self, name: str, value: Array) -> None:
        """Keep `value` if somebody asked for it."""
        key = f"{self._prefix}{name}"
        if key in self._wanted:
            self[key] = value


def _linear(ctx: Context, x: Array, w: Any, out_dtype: Any = None) -> Array:
    return linear.matmul(x, w, out_dtype=out_dtype or ctx.dtype)


def _hyper_read(ctx: Context, x: Array, w: Weights, name: str) -> tuple[Array, Array, Array]:
    cfg = ctx.cfg
    return hyper.read(
        x,
        w[f"hc_{name}_fn"],
        w[f"hc_{name}_scale"],
        w[f"hc_{name}_base"],
        iters=cfg.hc_sinkhorn_iters,
        hc_eps=cfg.hc_eps,
        rms_eps=cfg.rms_norm_eps,
    )


@struct.dataclass
class Projected:
    """What a layer computes of a row from its input alone, for attention."""

    post: Array  # maps that will write the output of attention back
    comb: Array
    q: Array  # [T, H, D] after norm and rope
    kv: Array  # [T, D]
    state: Array | None  # float32 [T, 2, C]: compressor value and gate
    istate: Array | None  # the same for the indexer
    iq: Array | None  # [T, I, J] index queries
    iw: Array | None  # float32 [T, I] index head weights


def no_projection(ctx: Context, info: LayerInfo, w: Weights, streams_TND: Array) -> Projected:
    """Rows of which nothing is known yet."""
    cfg, (t, n, _) = ctx.cfg, streams_TND.shape

    def state(key: str) -> Array:
        return jnp.zeros((t, 2, w[key].shape[-2]), F32)

    iheads, isize = cfg.index_num_heads, cfg.index_head_dim
    indexed = info.ratio == 4
    return Projected(
        post=jnp.zeros((t, n), F32), comb=jnp.zeros((t, n, n), F32),
        q=jnp.zeros((t, cfg.num_heads, cfg.head_dim), ctx.dtype),
        kv=jnp.zeros((t, cfg.head_dim), ctx.dtype),
        state=state("attn.compressor.wkv") if info.ratio else None,
        istate=state("attn.indexer.compressor.wkv") if indexed else None,
        iq=jnp.zeros((t, iheads, isize), ctx.dtype) if indexed else None,
        iw=jnp.zeros((t, iheads), F32) if indexed else None,
    )  # fmt: skip


def _angles(info: LayerInfo, rows: Rows) -> Array:
    return rows.cs if info.ratio else rows.cs_main


def _compressor_state(ctx: Context, x: Array, w: Weights, prefix: str, rows: Rows) -> Array:
    ratio = w[f"{prefix}.ape"].shape[0]
    u = _linear(ctx, x.astype(F32), w[f"{prefix}.wkv"], F32)
    g = _linear(ctx, x.astype(F32), w[f"{prefix}.wgate"], F32)
    g = g + w[f"{prefix}.ape"].astype(F32)[rows.pos % ratio]
    return jnp.stack([u, g], axis=1)


def project(
    ctx: Context, info: LayerInfo, w: Weights, streams_TND: Array, rows: Rows
) -> tuple[Projected, dict[str, Array]]:
    """First part of a layer: attention's input read from the streams, and its projections.

    Returns: projections, captured activations.
    """
    cap = Captured(ctx.capture, f"L{info.layer}.")
    x, post, comb = _hyper_read(ctx, streams_TND, w, "attn")
    for name, value in (("pre", x), ("post", post), ("comb", comb)):
        cap.add(f"attn_hc_{name}", value)
    x = norm.rms_norm(x, w["attn_norm"], eps=ctx.cfg.rms_norm_eps)
    cfg, cs = ctx.cfg, _angles(info, rows)
    t = x.shape[0]
    qr = norm.rms_norm(_linear(ctx, x, w["attn.wq_a"]), w["attn.q_norm"], eps=cfg.rms_norm_eps)
    q = _linear(ctx, qr, w["attn.wq_b"]).reshape(t, cfg.num_heads, cfg.head_dim)
    q = rope.rotate(norm.rms_norm(q, None, eps=cfg.rms_norm_eps), cs)
    kv = norm.rms_norm(_linear(ctx, x, w["attn.wkv"]), w["attn.kv_norm"], eps=cfg.rms_norm_eps)
    kv = rope.rotate(kv, cs)
    if ctx.run.numerics != "plain":
        kv = rounding.fp8_round_trip(kv, cfg.nope_head_dim)
    state = istate = iq = iw = None
    if info.ratio:
        state = _compressor_state(ctx, x, w, "attn.compressor", rows)
    if info.ratio == 4:
        if ctx.sequence_len:  # the indexer learns by distillation and teaches nobody
            x, qr = lax.stop_gradient(x), lax.stop_gradient(qr)
        istate = _compressor_state(ctx, x, w, "attn.indexer.compressor", rows)
        iq = _linear(ctx, qr, w["attn.indexer.wq_b"])
        iq = rope.rotate(iq.reshape(t, cfg.index_num_heads, cfg.index_head_dim), cs)
        if ctx.run.numerics == "official":
            iq = rounding.fp4_round_trip(rounding.hadamard(iq)).astype(ctx.dtype)
        scale = cfg.index_head_dim**-0.5 * cfg.index_num_heads**-0.5
        iw = _linear(ctx, x.astype(F32), w["attn.indexer.weights_proj"], F32) * F32(scale)
    cap.add("q", q)
    cap.add("kv", kv)
    return Projected(post, comb, q, kv, state, istate, iq, iw), dict(cap)


def store_rows(ring_: Array, index: int | Array, rows: Rows, values: Array, ctx: Context) -> Array:
    """The rows of a step written to a ring."""
    # Of more rows than the ring holds only the last are kept; rows that run one after the other
    # simply overwrite.
    keep = rows.live & (rows.after < ring_.shape[2]) if ctx.chunk else rows.live
    return ring.write(ring_, index, rows.slot, rows.pos, values, keep)


def _pooled(
    ctx: Context, state: Array, index: int | Array, rows: Rows, step: Array | None,
    norm_w: Array, ratio: int,
) -> Array:  # fmt: skip
    """The compressed row that ends at each row's position (meaningless where none does)."""
    count = compressor.overlap(ratio) * ratio
    got, valid = ring.read_window(
        state, index, rows.slot, rows.pos, count,
        step_T=step, run_T=rows.run if step is not None else None,
    )  # fmt: skip
    row = compressor.pool(got[:, :, 0], got[:, :, 1], valid, ratio=ratio)
    cs = rows.cs4 if ratio == 4 else rows.cs128
    return compressor.finish(row, norm_w, cs, eps=ctx.cfg.rms_norm_eps, dtype=ctx.dtype)


def _rounded(ctx: Context, row: Array, kind: str) -> Array:
    """A compressed row as the numerics profile stores it."""
    if kind == "attention" and ctx.run.numerics != "plain":
        return rounding.fp8_round_trip(row, ctx.cfg.nope_head_dim)
    if kind == "index" and ctx.run.numerics == "official":
        return rounding.fp4_round_trip(rounding.hadamard(row)).astype(ctx.dtype)
    return row


def _emit(
    ctx: Context, pool: Array, state: Array, index: int | Array, rows: Rows, step: Array | None,
    table: Array, norm_w: Array, ratio: int, kind: str,
) -> Array:  # fmt: skip
    """Write the compressed rows that this step completes; the others go to the trash page."""
    per_page = ROWS4 if ratio == 4 else 1
    emits = rows.live & ((rows.pos + 1) % ratio == 0)
    at = ring.page_rows(table, rows.slot, rows.pos // ratio, per_page)
    at = jnp.where(emits, at, pool.shape[1] - 1)

    def make() -> Array:
        row = _pooled(ctx, state, index, rows, step, norm_w, ratio)
        return _rounded(ctx, row, kind).astype(pool.dtype)

    if rows.pos.shape[0] == 1:
        shape = (1, pool.shape[-1])
        row = lax.cond(emits[0], make, lambda: jnp.zeros(shape, pool.dtype))
    else:
        row = make()
    return pool.at[index, at].set(row)


def _attend_cached(
    ctx: Context, info: LayerInfo, w: Weights, p: Projected, cache: Cache, rows: Rows,
    cap: Captured,
) -> tuple[Array, Cache]:  # fmt: skip
    """Attention output [T, H, D], still rotated, and the cache with this layer's rows."""
    cfg, layer, index = ctx.cfg, info.layer, info.ratio_index
    raw, step = cache.raw, p.kv if ctx.chunk else None
    if not ctx.chunk:
        raw = store_rows(raw, layer, rows, p.kv, ctx)
    comp: dict[str, Any] = {}
    updates: dict[str, Array] = {}
    if info.ratio == 4:
        names = (("state4", "comp4", p.state, "attn.compressor", "attention"),
                 ("istate4", "index4", p.istate, "attn.indexer.compressor", "index"))  # fmt: skip
    elif info.ratio == 128:
        names = (("state128", "comp128", p.state, "attn.compressor", "attention"),)  # type: ignore[assignment]
    else:
        names = ()  # type: ignore[assignment]
    for state_name, pool_name, values, prefix, kind in names:
        if values is None:
            continue
        old = getattr(cache, state_name)
        state = old if ctx.chunk else store_rows(old, index, rows, values, ctx)
        updates[pool_name] = _emit(
            ctx, getattr(cache, pool_name), state, index, rows, values if ctx.chunk else None,
            cache.table, w[f"{prefix}.norm"], info.ratio, kind,
        )  # fmt: skip
        updates[state_name] = store_rows(old, index, rows, values, ctx) if ctx.chunk else state
    if info.ratio:
        visible = jnp.where(rows.live, (rows.pos + 1) // info.ratio, 0)
        pool_name = "comp4" if info.ratio == 4 else "comp128"
        comp = {
            "pool": updates[pool_name], "layer": index, "table": cache.table,
            "slot_T": rows.slot, "visible_T": visible,
        }  # fmt: skip
        if p.iq is not None and p.iw is not None:
            comp["selected_TK"] = indexer.top_rows(
                p.iq, p.iw, updates["index4"], index, cache.table, rows.slot, visible,
                top_k=cfg.index_topk,
            )  # fmt: skip
            cap.add("index_ids", comp["selected_TK"])
    window, valid = ring.read_window(
        raw, layer, rows.slot, rows.pos, cfg.sliding_window, step_T=step, run_T=rows.run
    )
    o = attention.attend(p.q, w["attn.attn_sink"], window, valid, **comp)
    if ctx.chunk:
        raw = store_rows(raw, layer, rows, p.kv, ctx)
    return o, cache.replace(raw=raw, **updates)  # type: ignore[attr-defined]


def _group_rows(
    ctx: Context, state: Array, norm_w: Array, rows: Rows, ratio: int, kind: str
) -> Array:
    """All compressed rows of whole sequences: [B, S, D]."""
    lanes = state.shape[0] // ctx.sequence_len
    got, valid = sequence.group_windows(state, lanes, ratio)
    row = compressor.pool(got[:, :, 0], got[:, :, 1], valid, ratio=ratio)
    groups = ctx.sequence_len // ratio
    cs = rows.cs.reshape(lanes, ctx.sequence_len, *rows.cs.shape[1:])[:, : groups * ratio : ratio]
    cs = cs.reshape(lanes * groups, *rows.cs.shape[1:])
    row = compressor.finish(row, norm_w, cs, eps=ctx.cfg.rms_norm_eps, dtype=ctx.dtype)
    return _rounded(ctx, row, kind).astype(ctx.dtype).reshape(lanes, groups, -1)


def _attend_sequences(
    ctx: Context, info: LayerInfo, w: Weights, p: Projected, rows: Rows, cap: Captured
) -> Array:
    """As `_attend_cached` for whole sequences."""
    cfg, ratio, length = ctx.cfg, info.ratio, ctx.sequence_len
    lanes = p.q.shape[0] // length

    def by_lane(a: Array) -> Array:
        return a.reshape(lanes, length, *a.shape[1:])

    comp = mask = scores = None
    seen = sequence.visible(length, length // ratio if ratio else 0, ratio or 1)
    if p.state is not None and length >= ratio:
        comp = _group_rows(ctx, p.state, w["attn.compressor.norm"], rows, ratio, "attention")
        mask = jnp.broadcast_to(seen[None], (lanes, *seen.shape))
        if p.istate is not None and p.iq is not None and p.iw is not None:
            keys = _group_rows(
                ctx, p.istate, w["attn.indexer.compressor.norm"], rows, ratio, "index"
            )
            scores = sequence.index_scores(by_lane(p.iq), by_lane(p.iw), keys)
            mask = sequence.select(scores, seen, top_k=cfg.index_topk)
            cap.add("index_mask", mask.reshape(lanes * length, -1))
    o, weight = sequence.attend(
        by_lane(p.q), w["attn.attn_sink"], by_lane(p.kv), cfg.sliding_window, comp, mask
    )
    if scores is not None and weight is not None:
        cap.add("index_loss", sequence.distillation_loss(scores, weight, seen).reshape(-1))
    return o.reshape(p.q.shape)


def attend(
    ctx: Context, info: LayerInfo, w: Weights, streams_TND: Array, p: Projected,
    cache: Cache | None, rows: Rows,
) -> tuple[Array, Cache | None, dict[str, Array]]:  # fmt: skip
    """Second part of a layer: attention, and its output written to the streams.

    Returns: streams, cache with this layer's rows, captured activations.
    """
    cfg = ctx.cfg
    cap = Captured(ctx.capture, f"L{info.layer}.")
    if cache is None:
        o = _attend_sequences(ctx, info, w, p, rows, cap)
    else:
        o, cache = _attend_cached(ctx, info, w, p, cache, rows, cap)
    o = rope.rotate(o, _angles(info, rows), inverse=True)
    cap.add("heads_out", o)
    z = linear.grouped_matmul(
        o.reshape(o.shape[0], cfg.o_groups, -1), w["attn.wo_a"],
        out_dtype=ctx.dtype,
    )  # fmt: skip
    y = _linear(ctx, z.reshape(z.shape[0], -1), w["attn.wo_b"])
    cap.add("attn_out", y)
    return hyper.write(streams_TND, y, p.post, p.comb), cache, dict(cap)


def _limit(limits: tuple[float, ...], layer: int | Array) -> Any:
    """SwiGLU limit of a layer: a float where it is known or common to all."""
    if isinstance(layer, int):
        return limits[layer]
    return limits[0] if len(set(limits)) == 1 else jnp.asarray(limits, F32)[layer]


def shared_expert(ctx: Context, x: Array, w: Weights, limit: Any) -> Array:
    """The expert that every row takes: clamped SwiGLU without a routing weight; float32 [T, M]."""
    g = _linear(ctx, x, w["ffn.shared_experts.w1"], F32)
    u = _linear(ctx, x, w["ffn.shared_experts.w3"], F32)
    if ctx.run.clamp_shared_expert:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    return _linear(ctx, (norm.silu(g) * u).astype(ctx.dtype), w["ffn.shared_experts.w2"], F32)


@struct.dataclass
class Routed:
    """Rows between the two halves of a layer: what the routed experts take, and what is kept."""

    streams: Array  # [T, n, D], as attention left them
    h: Array  # [T, D], normalised input of the experts
    ids: Array  # int32 [T, K], -1 for padding rows
    weights: Array  # float32 [T, K]
    shared: Array  # float32 [T, D], output of the shared expert
    post: Array  # maps that will write the output back
    comb: Array


def no_routes(ctx: Context, streams_TND: Array) -> Routed:
    """Rows of which nothing but the streams is known yet; none of them is live."""
    cfg, (t, n, d) = ctx.cfg, streams_TND.shape
    k = ctx.run.num_experts_per_tok or cfg.num_experts_per_tok
    return Routed(
        streams=streams_TND, h=jnp.zeros((t, d), ctx.dtype), ids=jnp.full((t, k), -1, jnp.int32),
        weights=jnp.zeros((t, k), F32), shared=jnp.zeros((t, d), F32),
        post=jnp.zeros((t, n), F32), comb=jnp.zeros((t, n, n), F32),
    )  # fmt: skip


def route(
    ctx: Context, info: LayerInfo, w: Weights, streams_TND: Array, rows: Rows
) -> tuple[Routed, dict[str, Array]]:
    """Third part of a layer: the experts' input, the choice of experts, and the shared expert.

    Returns: the rows between the parts, captured activations.
    """
    cfg = ctx.cfg
    cap = Captured(ctx.capture, f"L{info.layer}.")
    x, post, comb = _hyper_read(ctx, streams_TND, w, "ffn")
    for name, value in (("pre", x), ("post", post), ("comb", comb)):
        cap.add(f"ffn_hc_{name}", value)
    h = norm.rms_norm(x, w["ffn_norm"], eps=cfg.rms_norm_eps)
    ids, weights = router.route(
        h,
        w["ffn.gate"],
        bias_E=w.get("ffn.gate.bias"),
        table_VK=w["ffn.gate.tid2eid"] if info.is_hash else None,
        token_T=rows.token,
        top_k=ctx.run.num_experts_per_tok or cfg.num_experts_per_tok,
        scaling=cfg.routed_scaling_factor,
        normalise=cfg.norm_topk_prob,
    )
    cap.add("router_ids", ids)
    cap.add("router_weights", weights)
    shared = shared_expert(ctx, h, w, _limit(cfg.shared_swiglu_limits, info.layer))
    ids = jnp.where(rows.live[:, None], ids, -1)
    return Routed(streams_TND, h, ids, weights, shared, post, comb), dict(cap)


def routed_experts(ctx: Context, info: LayerInfo, w: Weights, r: Routed) -> Array:
    """Output of the routed experts, float32 [T, D]; a row's bits do not depend on the others."""
    stacks = (w["ffn.experts.w1"], w["ffn.experts.w3"], w["ffn.experts.w2"])
    limit = _limit(ctx.cfg.swiglu_limits, info.layer)
    if ctx.sequence_len:
        return linear.grouped_experts(r.h, r.ids, r.weights, *stacks, limit=limit)
    return linear.routed_experts(
        r.h, r.ids, r.weights, *stacks, first_expert=ctx.first_expert, limit=limit
    )


def finish(ctx: Context, info: LayerInfo, r: Routed, y_TD: Array) -> tuple[Array, dict[str, Array]]:
    """Last part: the streams with the output of all experts, y_TD being that of the routed ones."""
    cap = Captured(ctx.capture, f"L{info.layer}.")
    y = (y_TD + r.shared).astype(ctx.dtype)
    cap.add("ffn_out", y)
    streams = hyper.write(r.streams, y, r.post, r.comb)
    cap.add("streams_out", streams)
    return streams, dict(cap)


def layer(
    ctx: Context, info: LayerInfo, w: Weights, streams_TND: Array, cache: Cache | None, rows: Rows
) -> tuple[Array, Cache | None, dict[str, Array]]:
    """One layer: attention and experts, each read from and written back to the residual streams.

    Args:
        streams_TND: [T, n, D] compute dtype.
        cache: the whole cache; only this layer's rows change. None for whole sequences
            (`Context.sequence_len`), which need none.

    Returns: streams, cache, captured activations [T, ...] by name.
    Source: architecture of DeepSeek-V4, whole model.
    """
    with jax.named_scope("attention"):
        p, projected = project(ctx, info, w, streams_TND, rows)
        streams_TND, cache, attended = attend(ctx, info, w, streams_TND, p, cache, rows)
    with jax.named_scope("experts"):
        r, routed = route(ctx, info, w, streams_TND, rows)
        streams_TND, done = finish(ctx, info, r, routed_experts(ctx, info, w, r))
    return streams_TND, cache, projected | attended | routed | done
