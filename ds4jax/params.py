"""The parameter tree: what every weight is called on the device and how layers are grouped.

A layer is a dictionary from the tensor keys of `ds4jax.tensors` ("attn.wq_a", "ffn.experts.w1",
...) to arrays: plain ones, or `QuantArray` in packed form. Layers of one kind that repeat are
stacked along a leading axis and scanned over; what does not repeat forms groups of one. No file is
read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from ds4jax.config import ModelConfig
from pallas_kernels import rope

Weights = dict[str, Any]
"""One layer (or one stack of layers): key -> Array or QuantArray."""


MATRIX_KEYS = frozenset(
    (
        "embed", "head", "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b",
        "attn.compressor.wkv", "attn.compressor.wgate", "attn.indexer.wq_b",
        "attn.indexer.weights_proj", "attn.indexer.compressor.wkv",
        "attn.indexer.compressor.wgate", "ffn.experts.w1", "ffn.experts.w2", "ffn.experts.w3",
        "ffn.experts.w13",
        "ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3",
    )
)  # fmt: skip
"""Keys whose weights the model multiplies by: only these may stay packed."""

JOINED = {"ffn.experts.w1": 0, "ffn.experts.w3": 1}
"""Keys that kernels take as one matrix, "ffn.experts.w13", and which of its halves they are."""


@dataclass(frozen=True)
class LayerInfo:
    """Facts about one layer. Inside a scan `layer` and `ratio_index` are int32 scalars."""

    layer: Any  # int, or Array inside a scan
    ratio: int
    ratio_index: Any  # which of the layers of this ratio; row of the caches that belong to it
    is_hash: bool


@dataclass(frozen=True)
class Group:
    """`count` repetitions of the layers `unit`, the first of which is layer number `first`.

    Layer `first + r * len(unit) + u` is entry r of the stack of unit position u.
    """

    first: int
    unit: tuple[LayerInfo, ...]  # infos of the first repetition
    count: int


def layer_infos(cfg: ModelConfig) -> tuple[LayerInfo, ...]:
    """Facts about every layer, in order."""
    seen: dict[int, int] = {}
    out = []
    for i, ratio in enumerate(cfg.compress_ratios):
        out.append(LayerInfo(i, ratio, seen.get(ratio, 0), cfg.is_hash_layer(i)))
        seen[ratio] = seen.get(ratio, 0) + 1
    return tuple(out)


def group_layers(
    cfg: ModelConfig, types: Sequence[Mapping[str, str]] | None = None, *, scan: bool
) -> tuple[Group, ...]:
    """Cut the layers into groups: the longest repeated run becomes one scan, the rest is unrolled.

    Args:
        types: per layer, key -> format name; layers repeat only if these agree. None: all agree.
        scan: False gives one group per layer (CPU: slicing a stack would copy its weights).
    """
    infos = layer_infos(cfg)
    kinds: list[Any] = [
        (x.ratio, x.is_hash, tuple(sorted(types[x.layer].items())) if types else ()) for x in infos
    ]
    best = (0, 0, 1)  # first, unit length, count
    if scan:
        for unit in range(1, len(kinds) // 2 + 1):
            for first in range(len(kinds) - 2 * unit + 1):
                count = 1
                while kinds[first + count * unit :][:unit] == kinds[first : first + unit]:
                    count += 1
                if count > 1 and unit * count > best[1] * best[2]:
                    best = (first, unit, count)
    first, unit, count = best
    out = []
    i = 0
    while i < len(infos):
        if unit and i == first:
            out.append(Group(i, infos[i : i + unit], count))
            i += unit * count
        else:
            out.append(Group(i, infos[i : i + 1], 1))
            i += 1
    return tuple(out)


FLOAT32_PREFIXES = (
    "norm", "head", "hc_", "attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm", "attn.attn_sink",
    "attn.compressor.", "attn.indexer.compressor.", "attn.indexer.weights_proj", "ffn.gate",
)  # fmt: skip
"""Weights used in float32 whatever the compute dtype (numerics of the official inference code)."""


def weight_dtype(key: str, dtype: Any) -> Any:
    """Dtype in which an unpacked weight is kept: float32 for the float32 islands, else `dtype`."""
    return jnp.float32 if key.startswith(FLOAT32_PREFIXES) else dtype


@struct.dataclass
class Params:
    """All weights of the model.

    `groups[g][u]` holds the stacked weights (leading axis: repetition) of unit position u of
    `layout[g]`; `top` holds the keys without a layer.
    """

    top: Weights
    groups: tuple[tuple[Weights, ...], ...]
    rope_main: Array  # float32 angle tables (pallas_kernels.rope), layers of ratio 0
    rope_compress: Array  # the same for layers with a ratio above 0
    layout: tuple[Group, ...] = struct.field(pytree_node=False)

    def layers(self) -> Iterator[tuple[LayerInfo, Weights]]:
        """Every layer with its own weights (slices of the stacks), in order."""
        for group, units in zip(self.layout, self.groups, strict=True):
            for r in range(group.count):
                for u, info in enumerate(group.unit):
                    yield repeat_info(group, info, r), layer_weights(units[u], r)


def repeat_info(group: Group, info: LayerInfo, repetition: int | Array) -> LayerInfo:
    """Facts about repetition number `repetition` of one layer of a group's unit."""
    per_unit = sum(1 for x in group.unit if x.ratio == info.ratio)
    return LayerInfo(
        info.layer + repetition * len(group.unit),
        info.ratio,
        info.ratio_index + repetition * per_unit,
        info.is_hash,
    )


def layer_weights(stack: Weights, index: int | Array) -> Weights:
    """Entry `index` of every stacked weight."""
    taken: Weights = jax.tree.map(lambda a: a[index], stack)
    return taken


def rope_tables(
    cfg: ModelConfig, max_ctx: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Angle tables for layers without and with compression, covering `max_ctx` positions."""
    main = rope.inverse_frequencies(cfg.rope_head_dim, cfg.rope_theta)
    compress = rope.yarn_frequencies(
        cfg.rope_head_dim,
        cfg.compress_rope_theta,
        factor=cfg.rope_scaling_factor,
        original_len=cfg.rope_original_len,
        beta_fast=cfg.rope_beta_fast,
        beta_slow=cfg.rope_beta_slow,
    )
    return rope.angle_tables(main, max_ctx), rope.angle_tables(compress, max_ctx)


def assemble(
    cfg: ModelConfig,
    layout: tuple[Group, ...],
    get: Callable[[str, int | None], Any],
    top_keys: Sequence[str],
    layer_keys: Callable[[int], Sequence[str]],
    *,
    max_ctx: int | None = None,
) -> Params:
    """Build the tree from single tensors, one after the other.

    Args:
        get: (key, layer or None) -> device array or QuantArray without the stack axis.
        top_keys: keys without a layer. layer_keys: layer -> its keys.
        max_ctx: positions that the angle tables cover; None: all that the model allows.
    """
    main, compress = rope_tables(cfg, max_ctx or cfg.max_position_embeddings)

    def stacked(group: Group, u: int, key: str) -> Any:
        layers = [group.first + r * len(group.unit) + u for r in range(group.count)]
        if len(layers) == 1:
            return jax.tree.map(lambda a: a[None], get(key, layers[0]))
        return jax.tree.map(lambda *a: jnp.stack(a), *(get(key, i) for i in layers))

    return Params(
        top={k: get(k, None) for k in top_keys},
        groups=tuple(
            tuple(
                {k: stacked(g, u, k) for k in layer_keys(info.layer)}
                for u, info in enumerate(g.unit)
            )
            for g in layout
        ),
        rope_main=jnp.asarray(main),
        rope_compress=jnp.asarray(compress),
        layout=layout,
    )
