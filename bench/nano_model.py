"""ds4-nano: sizes, initial weights, and weights by name as the model's parameter tree.

What training (`bench.train_nano`), export and measurement share. Nothing here trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ds4jax import params, tensors
from ds4jax.config import ModelConfig
from ds4jax.tensors import TensorSpec
from pallas_kernels import rounding

Weights = dict[str, Array]
"""Weights by `TensorSpec.name`."""


def model_config(vocab_size: int = 3072) -> ModelConfig:
    """ds4-nano: five layers with every kind of layer, about 7 million parameters."""
    ratios = (0, 4, 128, 4, 128)
    count = len(ratios)
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=192, num_layers=count, num_heads=4, head_dim=64,
        rope_head_dim=32, q_lora_rank=96, o_groups=2, o_lora_rank=64, sliding_window=128,
        compress_ratios=ratios, index_num_heads=4, index_head_dim=32, index_topk=32,
        num_experts=16, num_experts_per_tok=2, moe_intermediate_size=96, num_hash_layers=3,
        swiglu_limits=(10.0,) * count, shared_swiglu_limits=(10.0,) * count, hc_mult=4,
        hc_sinkhorn_iters=8, rope_scaling_factor=4.0, rope_original_len=1024,
        max_position_embeddings=4096,
    )  # fmt: skip


def hash_table(
    counts_V: np.ndarray[Any, Any], experts: int, top_k: int, seed: int
) -> np.ndarray[Any, Any]:
    """Experts of every token so that all experts see about as many tokens; int32 [V, top_k].

    Tokens by falling frequency each take the `top_k` experts with the least load so far.
    """
    rng = np.random.default_rng(seed)
    load = rng.random(experts) * 1e-3
    table = np.zeros((len(counts_V), top_k), np.int32)
    for token in np.argsort(-counts_V, kind="stable"):
        chosen = np.argsort(load, kind="stable")[:top_k]
        table[token] = rng.permutation(chosen)
        load[chosen] += counts_V[token] + 1e-3 * rng.random(top_k)
    return table


def initial(cfg: ModelConfig, counts_V: np.ndarray[Any, Any], seed: int) -> Weights:
    """Initial weights: the streams start as near-copies that each sublayer reads in turn."""
    rng = np.random.default_rng(seed)
    out: Weights = {}
    for spec in tensors.specs(cfg):
        out[spec.name] = jnp.asarray(_initial(cfg, spec, rng, counts_V))
    return out


def _initial(
    cfg: ModelConfig, spec: TensorSpec, rng: np.random.Generator, counts_V: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    shape, key, n = spec.shape, spec.key, cfg.hc_mult
    layer = spec.layer or 0
    if spec.kind == "table":
        return hash_table(counts_V, cfg.num_experts, shape[1], 1000 + layer)
    if spec.kind == "norm":
        return np.ones(shape, np.float32)
    if key.endswith("_scale"):
        return np.full(shape, 0.1, np.float32)
    if key == "hc_head_base" or key in ("attn.attn_sink", "ffn.gate.bias"):
        return np.zeros(shape, np.float32)
    if key.endswith("_base"):  # read mostly one stream, write to all, keep every stream
        base = np.zeros(shape, np.float32)
        base[:n] = -1.5
        base[(2 * layer + (key == "hc_ffn_base")) % n] = 1.5
        base[2 * n :] = (4.0 * np.eye(n)).reshape(-1)
        return base
    if key == "embed":
        std = 0.5
    elif key == "head" or key.endswith("ape"):
        std = 0.02
    else:
        std = float(shape[-1] ** -0.5)
        if key.endswith((".wo_b", ".w2")):
            std *= (2 * cfg.num_layers) ** -0.5
    return (std * rng.standard_normal(shape)).astype(np.float32)


def layout(cfg: ModelConfig) -> tuple[params.Group, ...]:
    """Layers grouped for scans: every stretch of repeated layers, so that little is compiled."""
    infos = params.layer_infos(cfg)
    kinds = [(x.ratio, x.is_hash) for x in infos]
    out, at = [], 0
    while at < len(infos):
        best = (1, 1)  # size of the unit, repetitions
        for size in (1, 2):
            count = 1
            while kinds[at + count * size : at + (count + 1) * size] == kinds[at : at + size]:
                count += 1
            if count > 1 and size * count > best[0] * best[1]:
                best = (size, count)
        out.append(params.Group(at, infos[at : at + best[0]], best[1]))
        at += best[0] * best[1]
    return tuple(out)


def as_params(
    cfg: ModelConfig,
    weights: Weights,
    max_ctx: int,
    groups: tuple[params.Group, ...] | None = None,
) -> params.Params:
    """The model's parameter tree of weights by name; traceable. groups: None for `layout`."""
    names = {(s.key, s.layer): s.name for s in tensors.specs(cfg)}
    return params.assemble(
        cfg,
        groups or layout(cfg),
        lambda key, layer: weights[names[key, layer]],
        [k for k, layer in names if layer is None],
        lambda i: [k for k, layer in names if layer == i],
        max_ctx=max_ctx,
    )


def fp4_experts(weights: Weights) -> Weights:
    """Experts rounded to FP4 with one power-of-two scale per 32; the gradient passes through."""

    def rounded(name: str, w: Array) -> Array:
        if ".experts." not in name:
            return w
        return w + lax.stop_gradient(rounding.fp4_round_trip(w) - w)

    return {name: rounded(name, w) for name, w in weights.items()}


def save_weights(folder: Path, weights: Weights, limit: int = 15 << 20) -> list[Path]:
    """Trained weights as .npz files of at most `limit` bytes each."""
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for name, w in weights.items():
        array = np.asarray(w)
        if size + array.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    paths = [folder / f"weights{i}.npz" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        np.savez(path, **part)
    return paths


def load_weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What `save_weights` wrote."""
    out: dict[str, np.ndarray[Any, Any]] = {}
    for path in sorted(folder.glob("weights*.npz")):
        with np.load(path) as arrays:
            out |= {k: arrays[k] for k in arrays.files}
    if not out:
        raise FileNotFoundError(f"{folder}: no weights*.npz; train first (bench.train_nano)")
    return out
