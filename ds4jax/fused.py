"""The layers as kernels: what `layers.layer` defines, for all rows of a step at once.

Few launches and nothing between them: weights stay in their stacks and kernels get the number of
the layer; a product is left in parts for the kernel that comes next; a sublayer's output is written
to the residual streams by the kernel that reads them for the next one, so what travels from layer
to layer is `streams.Pending`. Caches are updated in place.

Rows keep their bits because each operation keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ds4jax import layers
from ds4jax import params as params_lib
from ds4jax.cache import Cache
from ds4jax.config import RuntimeConfig
from ds4jax.layers import Context, Rows
from ds4jax.params import Group, LayerInfo, Params
from pallas_kernels import (
    backend,
    cached_attention,
    compressed_rows,
    dense,
    experts,
    qkv,
    router,
    row_selection,
    streams,
)

Backends = backend.Resolved

CAPTURES = (".streams_out", ".router_ids")
"""Activations that the kernels leave in memory anyway."""


def backends(run: RuntimeConfig) -> Backends:
    """The backend of every operation, and a line about each to be logged at start-up.

    Raises: ValueError, NotImplementedError: as `backend.resolve`.
    """
    return backend.resolve(run.backend, overrides=dict(run.op_backends))


class Seen(NamedTuple):
    """What a layer leaves behind for captures."""

    start: Array  # [T, n D], streams at its start
    ids: Array  # int32 [T, K], experts; negative for padding


class Step:
    """What all layers of a step share: the context, the backends and the rows."""

    def __init__(self, ctx: Context, rows: Rows) -> None:
        self.ctx, self.rows, self.on = ctx, rows, backends(ctx.run)
        cfg, run = ctx.cfg, ctx.run
        if run.dtype != "bfloat16" or run.numerics != "plain":
            raise NotImplementedError(
                f"the kernels compute in bfloat16 with plain numerics, not {run.dtype} with"
                f" {run.numerics}: backend 'reference' does"
            )
        other = sorted(x for x in ctx.capture if not x.endswith(CAPTURES))
        if other:
            raise NotImplementedError(
                f"captures {other}: the kernels give {' and '.join(CAPTURES)} only, backend"
                " 'reference' gives all"
            )
        self.sizes = streams.Sizes(
            n=cfg.hc_mult, iters=cfg.hc_sinkhorn_iters, hc_eps=cfg.hc_eps, rms_eps=cfg.rms_norm_eps
        )
        self.top_k = run.num_experts_per_tok or cfg.num_experts_per_tok
        # What every layer would work out again, in launches of its own.
        self.live = rows.live.astype(jnp.int32)
        self.count = jnp.sum(self.live)  # live rows come first
        self.visible = {
            ratio: jnp.where(rows.live, (rows.pos + 1) // (ratio or 1), 0)
            for ratio in sorted(set(cfg.compress_ratios))
        }

    def read(
        self, p: streams.Pending, w: Mapping[str, Any], name: str, r: int | Array
    ) -> tuple[Array, Array, Array, Array]:
        """Streams with all written to them, a sublayer's normalised input, post and comb."""
        on = self.on["streams"]
        x, mixed = streams.mix(p, w[f"hc_{name}_fn"], layer=r, backend=on)
        h, post, comb = streams.read(
            x, mixed, w[f"hc_{name}_scale"], w[f"hc_{name}_base"], w[f"{name}_norm"], layer=r,
            sizes=self.sizes, backend=on,
        )  # fmt: skip
        return x, h, post, comb

    def layer(
        self, info: LayerInfo, w: Mapping[str, Any], r: int | Array, p: streams.Pending,
        cache: Cache,
    ) -> tuple[streams.Pending, Cache, Seen]:  # fmt: skip
        """One layer, and what there was to see. w: stacks of weights, r: the entry."""
        with jax.named_scope("attention"):
            start, h, post, comb = self.read(p, w, "attn", r)
            y, cache = self.attention(info, w, r, h, cache)
            p = streams.Pending(start, (y,), None, post, comb)
        with jax.named_scope("experts"):
            x, h, post, comb = self.read(p, w, "ffn", r)
            parts, owned, ids = self.experts(info, w, r, h)
            p = streams.Pending(x, parts, owned, post, comb)
        return p, cache, Seen(start, ids)

    def several(self, x: Array, ws: list[Any], r: int | Array) -> list[Array]:
        """Products of the live rows, in parts."""
        return dense.several(x, ws, layer=r, live=self.count, backend=self.on["dense"])

    # ---- attention -----------------------------------------------------------------------------

    def attention(
        self, info: LayerInfo, w: Mapping[str, Any], r: int | Array, h: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        """Attention output in parts [S, T, D], and the cache with the layer's rows."""
        cfg, rows, chunk = self.ctx.cfg, self.rows, self.ctx.chunk
        cs = rows.cs if info.ratio else rows.cs_main
        prefixes = ("attn.compressor", "attn.indexer.compressor")[: _compressors(info.ratio)]
        names = ["attn.wq_a", "attn.wkv"]
        names += [f"{x}.{part}" for x in prefixes for part in ("wkv", "wgate")]
        names += ["attn.indexer.weights_proj"] if info.ratio == 4 else []
        got = self.several(h, [w[k] for k in names], r)
        found = dict(zip(names, got, strict=True))
        compress = tuple(
            qkv.Compress(found[f"{x}.wkv"], found[f"{x}.wgate"], w[f"{x}.ape"]) for x in prefixes
        )
        made = qkv.inputs(
            qkv.Projected(
                found["attn.wq_a"], found["attn.wkv"], compress,
                found.get("attn.indexer.weights_proj"),
            ),
            w["attn.q_norm"], w["attn.kv_norm"], cache.raw, rows.slot, rows.pos, cs, layer=r,
            ring_layer=info.layer, keep=not chunk, eps=cfg.rms_norm_eps,
            weight_scale=cfg.index_head_dim**-0.5 * cfg.index_num_heads**-0.5,
            backend=self.on["qkv"],
        )  # fmt: skip
        cache = cache.replace(raw=made.ring)  # type: ignore[attr-defined]
        kinds = {"attn.wq_b": (cfg.head_dim, True)}
        if info.ratio == 4:
            kinds["attn.indexer.wq_b"] = (cfg.index_head_dim, False)
        parts = self.several(made.q_TQ, [w[k] for k in kinds], r)
        q, *index_q = qkv.heads(
            tuple(parts), cs, tuple(kinds.values()), eps=cfg.rms_norm_eps, backend=self.on["qkv"],
        )  # fmt: skip
        cache = self.compress(info, w, r, made, cache)
        visible = self.visible[info.ratio]
        selected = None
        if info.ratio == 4:
            assert made.weight_TI is not None
            selected = self.select(index_q[0], made.weight_TI, info, cache, visible)
        o, cache = self.attend(q, w["attn.attn_sink"], r, info, cache, made, visible, selected, cs)
        z = dense.grouped(
            o.reshape(o.shape[0], cfg.o_groups, -1), w["attn.wo_a"], layer=r,
            live=self.count, backend=self.on["dense"], out_dtype=self.ctx.dtype,
        )  # fmt: skip
        z = z.reshape(z.shape[0], -1)
        [y] = self.several(z, [w["attn.wo_b"]], r)
        return y, cache

    def compress(
        self, info: LayerInfo, w: Mapping[str, Any], r: int | Array, made: qkv.Inputs, cache: Cache
    ) -> Cache:
        """Compressor state and the compressed rows that the step completes."""
        kinds = {4: (("state4", "comp4", "attn.compressor"),
                     ("istate4", "index4", "attn.indexer.compressor")),
                 128: (("state128", "comp128", "attn.compressor"),)}  # fmt: skip
        names, rows = kinds.get(info.ratio, ()), self.rows
        if not names:
            return cache
        got = compressed_rows.update(
            tuple(
                compressed_rows.State(
                    getattr(cache, ring), getattr(cache, pool), values, w[f"{prefix}.norm"]
                )
                for (ring, pool, prefix), values in zip(names, made.states, strict=True)
            ),
            compressed_rows.Rows(rows.slot, rows.pos, rows.run, rows.after), cache.table,
            rows.cs4 if info.ratio == 4 else rows.cs128, layer=r, index=info.ratio_index,
            ratio=info.ratio, eps=self.ctx.cfg.rms_norm_eps, chunk=self.ctx.chunk,
            backend=self.on["compressor"],
        )  # fmt: skip
        new: dict[str, Array] = {}
        for (ring, pool, _), pair in zip(names, got, strict=True):
            new[ring], new[pool] = pair
        return cache.replace(**new)  # type: ignore[attr-defined]

    def select(
        self, q: Array, weight: Array, info: LayerInfo, cache: Cache, visible: Array
    ) -> Array:
        """Compressed rows that every row attends to in a layer of ratio 4."""
        return row_selection.select(
            q, weight, cache.index4, info.ratio_index, cache.table, self.rows.slot, visible,
            top_k=self.ctx.cfg.index_topk, backend=self.on["indexer"],
        )  # fmt: skip

    def attend(
        self, q: Array, sink_LH: Array, r: int | Array, info: LayerInfo, cache: Cache,
        made: qkv.Inputs, visible: Array, selected: Array | None, cs: Array,
    ) -> tuple[Array, Cache]:  # fmt: skip
        """Attention [T, H, D], rotated back, and the cache with the rows of the step."""
        rows, step = self.rows, made.step_TD
        window = cached_attention.Window(
            cache.raw, info.layer, rows.slot, rows.pos, step, None if step is None else rows.run
        )
        pool = {4: cache.comp4, 128: cache.comp128}.get(info.ratio)
        comp = None
        if pool is not None:
            comp = cached_attention.Compressed(
                pool, info.ratio_index, cache.table, visible, selected
            )
        o, raw = cached_attention.attend(
            q, sink_LH, window, comp, layer=r, size=self.ctx.cfg.sliding_window, cs_TR=cs,
            backend=self.on["attention"],
        )  # fmt: skip
        if step is not None:
            raw = layers.store_rows(raw, info.layer, rows, step, self.ctx)
        return o, cache.replace(raw=raw)  # type: ignore[attr-defined]

    # ---- experts -------------------------------------------------------------------------------

    def experts(
        self, info: LayerInfo, w: Mapping[str, Any], r: int | Array, h: Array
    ) -> tuple[tuple[Array, Array], Array, Array]:
        """Routed experts by slot and the shared expert, in parts; which slots count; the routes."""
        cfg, run, rows = self.ctx.cfg, self.ctx.run, self.rows
        names = ("ffn.gate", "ffn.shared_experts.w1", "ffn.shared_experts.w3")
        gate, g, u = self.several(h, [w[k] for k in names], r)
        limit = _limit(cfg.shared_swiglu_limits, info) if run.clamp_shared_expert else None
        ids, weights, shared = router.select(
            gate, router.Shared(g, u, limit), bias_LE=w.get("ffn.gate.bias"),
            table_LVK=w["ffn.gate.tid2eid"] if info.is_hash else None, token_T=rows.token,
            live_T=self.live, layer=r, top_k=self.top_k, scaling=cfg.routed_scaling_factor,
            normalise=cfg.norm_topk_prob, backend=self.on["router"],
        )  # fmt: skip
        routed, owned = experts.by_slot(
            h, ids, weights, w["ffn.experts.w13"], w["ffn.experts.w2"], layer=r,
            first_expert=self.ctx.first_expert, limit=_limit(cfg.swiglu_limits, info),
            backend=self.on["experts"],
        )  # fmt: skip
        [down] = self.several(shared, [w["ffn.shared_experts.w2"]], r)
        return (routed, down), owned, ids


def _compressors(ratio: int) -> int:
    return {4: 2, 128: 1}.get(ratio, 0)


def _limit(limits: tuple[float, ...], info: LayerInfo) -> float:
    found = {limits[info.layer]} if isinstance(info.layer, int) else set(limits)
    if len(found) > 1:
        raise NotImplementedError(
            f"experts: the kernels take one SwiGLU limit for all layers of a scan, not"
            f" {sorted(found)}"
        )
    return found.pop()


# ---- all layers ------------------------------------------------------------------------------


def run_layers(
    ctx: Context, params: Params, x_TND: Array, cache: Cache, rows: Rows
) -> tuple[Array, Array, Cache, dict[str, Array]]:
    """All layers: streams and map products of the head, the cache, captured streams by name.

    Raises: NotImplementedError: naming what has no kernel (formats, sizes, numerics, captures).
    """
    step = Step(ctx, rows)
    p = streams.none(x_TND)
    captured: dict[str, Array] = {}

    def capture(layer: int | Array, seen: Seen) -> None:
        found = {f"L{layer - 1}.streams_out": seen.start.reshape(x_TND.shape)}
        found[f"L{layer}.router_ids"] = seen.ids
        captured.update({k: v for k, v in found.items() if k in ctx.capture})

    for group, units in zip(params.layout, params.groups, strict=True):
        if group.count > 1:
            p, cache, stacked = _scan(step, group, units, p, cache)
            for i in range(group.count * len(group.unit) if ctx.capture else 0):
                r, u = divmod(i, len(group.unit))
                capture(group.first + i, jax.tree.map(lambda a, r=r: a[r], stacked[u]))
            continue
        for info, w in zip(group.unit, units, strict=True):
            p, cache, seen = step.layer(info, w, 0, p, cache)
            capture(info.layer, seen)
    head = params.top["hc_head_fn"][None]
    out, mixed = streams.mix(p, head, layer=0, backend=step.on["streams"])
    last = f"L{ctx.cfg.num_layers - 1}.streams_out"
    if last in ctx.capture:
        captured[last] = out.reshape(x_TND.shape)
    return out, mixed, cache, captured


def _scan(
    step: Step, group: Group, units: tuple[Any, ...], p: streams.Pending, cache: Cache
) -> tuple[streams.Pending, Cache, tuple[Seen, ...]]:
    """The repetitions of a group; what their layers left, stacked, if anything is captured."""

    def unit(
        r: int | Array, p: streams.Pending, cache: Cache
    ) -> tuple[streams.Pending, Cache, tuple[Seen, ...]]:
        left = []
        for u, info in enumerate(group.unit):
            here = params_lib.repeat_info(group, info, r)
            p, cache, seen = step.layer(here, units[u], r, p, cache)
            left.append(seen)
        return p, cache, tuple(left)

    # What is pending must have one shape all the way: written before the scan if it has not.
    x, _ = streams.mix(p, units[0]["hc_attn_fn"], layer=0, backend=step.on["streams"])
    shapes = jax.eval_shape(lambda p, c: unit(0, p, c)[0], p, cache)
    t, n = p.post_TN.shape
    parts = tuple((a.shape[0], int(i == 0)) for i, a in enumerate(shapes.parts))
    p = streams.none(x.reshape(t, n, -1), parts)

    def body(carry: tuple[Any, Cache], r: Array) -> tuple[tuple[Any, Cache], Any]:
        p, cache, left = unit(r, *carry)
        return (p, cache), left if step.ctx.capture else ()

    numbers = jnp.arange(group.count, dtype=jnp.int32)
    (p, cache), stacked = lax.scan(body, (p, cache), numbers)
    return p, cache, stacked


def logits(ctx: Context, params: Params, streams_TC: Array, mixed: Array, emit_E: Array) -> Array:
    """Logits of the emitted rows, float32 [E, V], from the results of `run_layers`."""
    on, top = backends(ctx.run), params.top
    cfg = ctx.cfg
    sizes = streams.Sizes(
        n=cfg.hc_mult, iters=cfg.hc_sinkhorn_iters, hc_eps=cfg.hc_eps, rms_eps=cfg.rms_norm_eps
    )
    x = streams.read_head(
        streams_TC[emit_E], mixed[emit_E], top["hc_head_scale"], top["hc_head_base"], top["norm"],
        sizes=sizes, backend=on["streams"],
    )  # fmt: skip
    both = x.reshape(-1, x.shape[2])
    [parts] = dense.several(both, [top["head"]], backend=on["dense"])
    y = dense.in_order(parts).reshape(2, emit_E.shape[0], -1)
    return y[0] + y[1]
