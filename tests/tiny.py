"""Small random models for tests that need a real executor but no particular weights."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from ds4jax import functional, tensors
from ds4jax import params as params_lib
from ds4jax.config import ModelConfig, RuntimeConfig
from tests import little_effort


def config(ratios: tuple[int, ...] = (0, 4, 128, 4), **kwargs: Any) -> ModelConfig:
    """A model of a few thousand parameters with every layer kind."""
    n = len(ratios)
    base: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, num_layers=n, num_heads=2, head_dim=32, rope_head_dim=16,
        q_lora_rank=16, o_groups=2, o_lora_rank=16, sliding_window=16, compress_ratios=ratios,
        index_num_heads=2, index_head_dim=32, index_topk=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, num_hash_layers=1, swiglu_limits=(7.0,) * n,
        shared_swiglu_limits=(7.0,) * n, hc_mult=2, hc_sinkhorn_iters=3, rope_original_len=256,
    )  # fmt: skip
    return ModelConfig(**(base | kwargs))


def params(cfg: ModelConfig, seed: int = 0, max_ctx: int = 2048) -> params_lib.Params:
    """Random weights, float32, scaled so that logits spread."""
    rng = np.random.default_rng(seed)
    by_key = {(s.key, s.layer): s for s in tensors.specs(cfg) if s.required}

    def get(key: str, layer: int | None) -> Any:
        spec = by_key[key, layer]
        if spec.kind == "table":
            table = [
                rng.permutation(cfg.num_experts)[: spec.shape[1]] for _ in range(spec.shape[0])
            ]
            return jnp.asarray(np.array(table, np.int32))
        if spec.kind == "norm":
            return jnp.asarray(1 + 0.1 * rng.standard_normal(spec.shape), jnp.float32)
        scale = 1.0 if len(spec.shape) == 1 else spec.shape[-1] ** -0.5
        if key in ("embed", "head"):
            scale = 1.0 if key == "embed" else 3 * spec.shape[-1] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(spec.shape), jnp.float32)

    return params_lib.assemble(
        cfg,
        params_lib.group_layers(cfg, scan=False),
        get,
        [k for k, layer in by_key if layer is None],
        lambda i: [k for k, layer in by_key if layer == i],
        max_ctx=max_ctx,
    )


def run_config(**kwargs: Any) -> RuntimeConfig:
    """Few slots, a short context, two programs."""
    base: dict[str, Any] = dict(
        max_ctx=640, num_slots=3, row_buckets=(8,), prefill_buckets=(128,)
    )  # fmt: skip
    return RuntimeConfig(**(base | kwargs))


@functools.cache
def model(seed: int = 0) -> tuple[ModelConfig, params_lib.Params]:
    """The default tiny model."""
    cfg = config()
    return cfg, params(cfg, seed)


SERVED = RuntimeConfig(max_ctx=256, num_slots=2, max_drafts=3)
CAPTURED = ("L1.index_ids", "L2.streams_out", "L3.router_weights")


@functools.cache
def prefill() -> Any:
    """`functional.prefill` of the default model, jitted once for all modules: 24 tokens, please."""
    return little_effort.jit(
        functools.partial(functional.prefill, cfg=config(), run=SERVED, capture=CAPTURED)
    )
