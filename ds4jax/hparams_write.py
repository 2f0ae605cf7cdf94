"""Model configurations into files: GGUF metadata, a checkpoint's config.json and tokenizer.json.

Counterpart of `ds4jax.hparams`: what is written here is read there as an equal configuration. Keys
and value types are those of the public `deepseek4` files, drafter keys those of the form in which a
target file carries its drafter. No tensor is touched here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ds4jax import hparams, tokenizer
from ds4jax.config import DraftConfig, ModelConfig

SQRT_SOFTPLUS = 4
"""Value of `expert_gating_func` for this family's router."""

_UNUSED = 5  # GGUF token type


def gguf_metadata(
    cfg: ModelConfig, draft: DraftConfig | None = None, name: str = ""
) -> dict[str, Any]:
    """Key/value pairs of a GGUF file of this model, without tokenizer, in the order of the file.

    Args:
        cfg: the model.
        draft: of the drafter that the same file carries, if any.
        name: `general.name`; left out if empty.

    Returns: values as `ds4jax.gguf_write` takes them.
    """
    arch = hparams.ARCHITECTURE
    out: dict[str, Any] = {"general.architecture": arch}
    if name:
        out["general.name"] = name
    out["general.quantization_version"] = 2
    out |= {f"{arch}.{key}": value for key, value in _sizes(cfg).items()}
    out |= {f"{arch}.{key}": value for key, value in _constants(cfg).items()}
    if draft is not None:
        out |= {f"{arch}.dspark.{key}": value for key, value in _drafter(cfg, draft).items()}
    return out


def _sizes(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "vocab_size": cfg.vocab_size,
        "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.q_lora_rank": cfg.q_lora_rank,
        "attention.output_lora_rank": cfg.o_lora_rank,
        "attention.output_group_count": cfg.o_groups,
        "attention.sliding_window": cfg.sliding_window,
        "attention.compress_ratios": np.array(cfg.compress_ratios, np.int32),
        "attention.indexer.head_count": cfg.index_num_heads,
        "attention.indexer.key_length": cfg.index_head_dim,
        "attention.indexer.top_k": cfg.index_topk,
        "expert_count": cfg.num_experts,
        "expert_used_count": cfg.num_experts_per_tok,
        "expert_shared_count": cfg.num_shared_experts,
        "expert_feed_forward_length": cfg.moe_intermediate_size,
        "hash_layer_count": cfg.num_hash_layers,
        "hyper_connection.count": cfg.hc_mult,
        "hyper_connection.sinkhorn_iterations": cfg.hc_sinkhorn_iters,
    }


def _constants(cfg: ModelConfig) -> dict[str, Any]:
    out: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": float(cfg.rms_norm_eps),
        "attention.compress_rope_freq_base": float(cfg.compress_rope_theta),
        "rope.dimension_count": cfg.rope_head_dim,
        "rope.freq_base": float(cfg.rope_theta),
    }
    if cfg.rope_scaling_factor != 1.0:
        out |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(cfg.rope_scaling_factor),
            "rope.scaling.original_context_length": cfg.rope_original_len,
            "rope.scaling.yarn_beta_fast": float(cfg.rope_beta_fast),
            "rope.scaling.yarn_beta_slow": float(cfg.rope_beta_slow),
        }
    else:
        out |= {
            "rope.scaling.type": "none",
            "rope.scaling.original_context_length": cfg.rope_original_len,
        }
    out |= {
        "expert_gating_func": SQRT_SOFTPLUS,
        "expert_weights_scale": float(cfg.routed_scaling_factor),
        "expert_weights_norm": cfg.norm_topk_prob,
        "hyper_connection.epsilon": float(cfg.hc_eps),
        "swiglu_clamp_exp": np.array(cfg.swiglu_limits, np.float32),
    }
    if cfg.shared_swiglu_limits != cfg.swiglu_limits:
        out["swiglu_clamp_shexp"] = np.array(cfg.shared_swiglu_limits, np.float32)
    return out


def _drafter(cfg: ModelConfig, draft: DraftConfig) -> dict[str, Any]:
    return {
        "layer_count": draft.num_stages,
        "block_size": draft.block_size,
        "markov_rank": draft.markov_rank,
        "noise_token_id": draft.noise_token_id,
        "expert_count": draft.num_experts or cfg.num_experts,
        "target_layers": np.array(draft.target_layer_ids, np.int32),
    }


def hf_config(
    cfg: ModelConfig, draft: DraftConfig | None, *, fp8: bool, fp4: bool
) -> dict[str, Any]:
    """config.json of a checkpoint of this model.

    Args:
        cfg: the model.
        draft: of the drafter in `mtp.*`, if any.
        fp8: whether linear layers are stored as FP8 with scales per 128 x 128 tile.
        fp4: whether routed experts are stored as FP4.

    Raises:
        ValueError: if the SwiGLU limits differ between layers or experts: a checkpoint has one.
    """
    limits = {*cfg.swiglu_limits, *cfg.shared_swiglu_limits}
    if len(limits) > 1:
        raise ValueError(
            f"SwiGLU limits {sorted(limits)}: a checkpoint's config.json holds one for the whole"
            " model; write a GGUF file instead"
        )
    stages = draft.num_stages if draft is not None else 0
    out: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_hash_layers": cfg.num_hash_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": 1,
        "head_dim": cfg.head_dim,
        "qk_rope_head_dim": cfg.rope_head_dim,
        "q_lora_rank": cfg.q_lora_rank,
        "o_lora_rank": cfg.o_lora_rank,
        "o_groups": cfg.o_groups,
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "n_shared_experts": cfg.num_shared_experts,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": cfg.norm_topk_prob,
        "routed_scaling_factor": cfg.routed_scaling_factor,
        "swiglu_limit": limits.pop(),
        "hidden_act": "silu",
        "sliding_window": cfg.sliding_window,
        "max_position_embeddings": cfg.max_position_embeddings,
        "index_n_heads": cfg.index_num_heads,
        "index_head_dim": cfg.index_head_dim,
        "index_topk": cfg.index_topk,
        "hc_mult": cfg.hc_mult,
        "hc_sinkhorn_iters": cfg.hc_sinkhorn_iters,
        "hc_eps": cfg.hc_eps,
        "rms_norm_eps": cfg.rms_norm_eps,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": cfg.rope_theta,
        "compress_rope_theta": cfg.compress_rope_theta,
        "rope_scaling": _hf_rope_scaling(cfg),
        "compress_ratios": [*cfg.compress_ratios, *[0] * stages],
        "num_nextn_predict_layers": 1 if stages else 0,
        "torch_dtype": "bfloat16",
    }
    if fp8:
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    if fp4:
        out["expert_dtype"] = "fp4"
    if draft is not None:
        out |= {
            "dspark_block_size": draft.block_size,
            "dspark_markov_rank": draft.markov_rank,
            "dspark_target_layer_ids": list(draft.target_layer_ids),
            "dspark_noise_token_id": draft.noise_token_id,
        }
    return out


def _hf_rope_scaling(cfg: ModelConfig) -> dict[str, Any] | None:
    if cfg.rope_scaling_factor == 1.0:
        return None
    return {
        "type": "yarn",
        "factor": cfg.rope_scaling_factor,
        "original_max_position_embeddings": cfg.rope_original_len,
        "beta_fast": cfg.rope_beta_fast,
        "beta_slow": cfg.rope_beta_slow,
    }


def tokenizer_json(tok: tokenizer.Tokenizer) -> str:
    """A tokenizer.json that `Tokenizer.from_json` reads as a tokenizer equal to `tok`.

    Raises:
        ValueError: if ids name nothing (padding rows): such a file cannot say so.
    """
    pairs = tok.to_gguf_metadata()
    tokens: list[str] = pairs["tokenizer.ggml.tokens"]
    unused = pairs["tokenizer.ggml.token_type"].count(_UNUSED)
    if unused:
        raise ValueError(f"{tok.source}: {unused} ids name nothing, tokenizer.json has no such ids")
    added = {i: spelling for spelling, i in tok.specials.items()}
    split = json.loads(tokenizer.pre_tokenizer().__getstate__())
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": added[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": added[i].startswith("<｜"),
            }
            for i in sorted(added)
        ],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens) if i not in added},
            "merges": [m.split(" ") for m in pairs["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip
    return json.dumps(data, ensure_ascii=False)
