"""Model files for tests: raw GGUF and safetensors bytes, and sparse files of full-size models.

Written from the layout of the containers, apart from the product's own writers, so that every
count, length and offset can be made wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds4jax import gguf, tensors
from ds4jax.config import ModelConfig

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
           U64: "Q", I64: "q", F64: "d"}  # fmt: skip

Pair = tuple[str | bytes, int, Any]
"""Key, value type, value; for arrays the value is (element type, elements)."""


@dataclass
class Tensor:
    """One row of the table, and its bytes (None: a hole of the right size)."""

    name: str | bytes
    dims: Sequence[int]  # ggml order
    type_id: int
    data: bytes | None = None
    offset: int | None = None
    num_dims: int | None = None

    @property
    def block_bytes(self) -> int:
        return gguf.TYPES[self.type_id].nbytes

    @property
    def nbytes(self) -> int:
        info = gguf.TYPES.get(self.type_id)
        if info is None or not self.dims:
            return 0
        return math.prod(int(d) for d in self.dims) // info.block * info.nbytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        element, items = value
        head = struct.pack("<IQ", element, len(items))
        return head + b"".join(value_bytes(element, item) for item in items)
    return struct.pack("<" + _FORMAT[kind], value)


def gguf_head(
    pairs: Iterable[Pair],
    table: Sequence[Tensor],
    *,
    alignment: int = 32,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """Everything before the tensor data, padded; offsets are given out where a tensor has none."""
    pairs = list(pairs)
    out = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(table) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    for key, kind, value in pairs:
        out += text(key) + struct.pack("<I", kind) + value_bytes(kind, value)
    at = 0
    rows = []
    for t in table:
        offset = at if t.offset is None else t.offset
        rows.append(
            text(t.name)
            + struct.pack("<I", len(t.dims) if t.num_dims is None else t.num_dims)
            + b"".join(struct.pack("<Q", d) for d in t.dims)
            + struct.pack("<IQ", t.type_id, offset)
        )
        at = -(-(at + t.nbytes) // alignment) * alignment
    out += b"".join(rows)
    return out + bytes(-len(out) % alignment)


def write_gguf(path: Path, pairs: Iterable[Pair], table: Sequence[Tensor], **kwargs: Any) -> Path:
    """Writes a whole file; tensors without data become holes."""
    head = gguf_head(pairs, table, **kwargs)
    alignment = kwargs.get("alignment", 32)
    with open(path, "wb") as file:
        file.write(head)
        at = len(head)
        for t in table:
            if t.data is not None:
                file.seek(at)
                file.write(t.data)
            at = -(-(at + t.nbytes) // alignment) * alignment
    os.truncate(path, max(at, len(head)))
    return path


# --- configurations ---------------------------------------------------------------------------


def flash() -> ModelConfig:
    """DeepSeek-V4-Flash as published."""
    layers = 43
    return ModelConfig(
        vocab_size=129280, hidden_size=4096, num_layers=layers, num_heads=64, head_dim=512,
        rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, sliding_window=128,
        compress_ratios=(0, 0, *(4, 128) * 20, 4), index_num_heads=64, index_head_dim=128,
        index_topk=512, num_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048,
        num_hash_layers=3, swiglu_limits=(10.0,) * layers, shared_swiglu_limits=(10.0,) * layers,
    )  # fmt: skip


def pro() -> ModelConfig:
    """DeepSeek-V4-Pro as published."""
    layers = 61
    return dataclasses.replace(
        flash(), hidden_size=7168, num_layers=layers, num_heads=128, q_lora_rank=1536, o_groups=16,
        num_experts=384, moe_intermediate_size=3072, index_topk=1024, routed_scaling_factor=2.5,
        compress_ratios=(128, 128, *(4, 128) * 29, 4), swiglu_limits=(10.0,) * layers,
        shared_swiglu_limits=(10.0,) * layers,
    )  # fmt: skip


def small(**changes: Any) -> ModelConfig:
    """A model of a few thousand weights with every kind of layer."""
    base = ModelConfig(
        vocab_size=64, hidden_size=64, num_layers=4, num_heads=4, head_dim=32, rope_head_dim=16,
        q_lora_rank=32, o_groups=2, o_lora_rank=32, sliding_window=8,
        compress_ratios=(0, 4, 128, 4), index_num_heads=2, index_head_dim=32, index_topk=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hash_layers=1,
        swiglu_limits=(10.0,) * 4, shared_swiglu_limits=(10.0,) * 4,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def gguf_pairs(cfg: ModelConfig, *, extra: Iterable[Pair] = ()) -> list[Pair]:
    """Metadata of a model, with the types the usual converter writes."""
    p = "deepseek4."
    return [
        ("general.architecture", STRING, "deepseek4"),
        ("general.name", STRING, "test"),
        (p + "block_count", U32, cfg.num_layers),
        (p + "context_length", U32, cfg.max_position_embeddings),
        (p + "embedding_length", U32, cfg.hidden_size),
        (p + "vocab_size", U32, cfg.vocab_size),
        (p + "attention.head_count", U32, cfg.num_heads),
        (p + "attention.head_count_kv", U32, 1),
        (p + "attention.key_length", U32, cfg.head_dim),
        (p + "attention.value_length", U32, cfg.head_dim),
        (p + "rope.dimension_count", U32, cfg.rope_head_dim),
        (p + "rope.freq_base", F32, cfg.rope_theta),
        (p + "attention.compress_rope_freq_base", F32, cfg.compress_rope_theta),
        (p + "rope.scaling.type", STRING, "yarn"),
        (p + "rope.scaling.factor", F32, cfg.rope_scaling_factor),
        (p + "rope.scaling.original_context_length", U32, cfg.rope_original_len),
        (p + "rope.scaling.yarn_beta_fast", F32, cfg.rope_beta_fast),
        (p + "rope.scaling.yarn_beta_slow", F32, cfg.rope_beta_slow),
        (p + "attention.layer_norm_rms_epsilon", F32, cfg.rms_norm_eps),
        (p + "attention.q_lora_rank", U32, cfg.q_lora_rank),
        (p + "attention.output_lora_rank", U32, cfg.o_lora_rank),
        (p + "attention.output_group_count", U32, cfg.o_groups),
        (p + "attention.sliding_window", U32, cfg.sliding_window),
        (p + "attention.compress_ratios", ARRAY, (I32, cfg.compress_ratios)),
        (p + "attention.indexer.head_count", U32, cfg.index_num_heads),
        (p + "attention.indexer.key_length", U32, cfg.index_head_dim),
        (p + "attention.indexer.top_k", U32, cfg.index_topk),
        (p + "expert_count", U32, cfg.num_experts),
        (p + "expert_used_count", U32, cfg.num_experts_per_tok),
        (p + "expert_shared_count", U32, 1),
        (p + "expert_feed_forward_length", U32, cfg.moe_intermediate_size),
        (p + "expert_weights_scale", F32, cfg.routed_scaling_factor),
        (p + "expert_weights_norm", BOOL, cfg.norm_topk_prob),
        (p + "expert_gating_func", U32, 4),
        (p + "hash_layer_count", U32, cfg.num_hash_layers),
        (p + "swiglu_clamp_exp", ARRAY, (F32, cfg.swiglu_limits)),
        (p + "hyper_connection.count", U32, cfg.hc_mult),
        (p + "hyper_connection.sinkhorn_iterations", U32, cfg.hc_sinkhorn_iters),
        (p + "hyper_connection.epsilon", F32, cfg.hc_eps),
        *extra,
    ]


def replaced(pairs: Iterable[Pair], key: str, *value: Any) -> list[Pair]:
    """The pairs with one replaced (kind, value) or, without a value, dropped."""
    return [(k, *value) if k == key else (k, t, v) for k, t, v in pairs if k != key or value]


def tensor_table(
    specs: Iterable[tensors.TensorSpec], types: Mapping[str, int] | None = None
) -> list[Tensor]:
    """Rows for specified tensors without data: `types` by class, F32 by default."""
    types = types or {}
    return [
        Tensor(s.gguf, s.shape[::-1], 26 if s.kind == "table" else types.get(s.kind, 0))
        for s in specs
    ]


def with_values(table: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """F32 rows get small random numbers; others stay holes (zero bytes)."""
    rng = np.random.default_rng(seed)
    out = []
    for t in table:
        data = None
        if t.type_id == 0:
            count = int(np.prod(t.dims))
            data = rng.standard_normal(count).astype("<f4").tobytes()
        out.append(dataclasses.replace(t, data=data))
    return out


# --- checkpoints ------------------------------------------------------------------------------


def hf_config(cfg: ModelConfig, **changes: Any) -> dict[str, Any]:
    """config.json of a model, in the published spelling."""
    return {
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
        "n_shared_experts": 1,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": cfg.norm_topk_prob,
        "routed_scaling_factor": cfg.routed_scaling_factor,
        "swiglu_limit": cfg.swiglu_limits[0],
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
        "rope_theta": int(cfg.rope_theta),
        "compress_rope_theta": int(cfg.compress_rope_theta),
        "rope_scaling": {
            "type": "yarn",
            "factor": int(cfg.rope_scaling_factor),
            "beta_fast": int(cfg.rope_beta_fast),
            "beta_slow": int(cfg.rope_beta_slow),
            "original_max_position_embeddings": cfg.rope_original_len,
        },
        "num_nextn_predict_layers": 1,
        "compress_ratios": [*cfg.compress_ratios, 0],
        **changes,
    }


F8_KEYS = frozenset(
    ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b",
     "ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3", "e_proj", "h_proj",
     "main_proj")
)  # fmt: skip
F32_KEYS = ("hc_", "attn.attn_sink", "ffn.gate.bias")

Entry = tuple[str, tuple[int, ...]]
"""Dtype tag and stored shape."""


def hf_entries(specs: Iterable[tensors.TensorSpec], *, experts: str = "fp4") -> dict[str, Entry]:
    """Header entries of a published checkpoint; experts are fp4, fp8 (F32 scales) or bf16."""
    scale = "F32" if experts == "fp8" else "F8_E8M0"
    out: dict[str, Entry] = {}

    def tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-d // 128) for d in shape)

    for spec in specs:
        if spec.num_experts is not None:
            shape = spec.shape[1:]
            for e in range(spec.num_experts):
                name = spec.hf.replace("{e}", str(e))
                stem = name.removesuffix(".weight")
                if experts == "fp4":
                    out[name] = ("I8", (shape[0], shape[1] // 2))
                    out[stem + ".scale"] = ("F8_E8M0", (shape[0], shape[1] // 32))
                elif experts == "fp8":
                    out[name] = ("F8_E4M3", shape)
                    out[stem + ".scale"] = ("F32", tiles(shape))
                else:
                    out[name] = ("BF16", shape)
        elif spec.key in F8_KEYS and experts != "bf16":
            out[spec.hf] = ("F8_E4M3", spec.shape)
            out[spec.stem + ".scale"] = (scale, tiles(spec.shape))
        elif spec.kind == "table":
            out[spec.hf] = ("I64", spec.shape)
        elif spec.key.startswith(F32_KEYS) or spec.key.endswith(".ape"):
            out[spec.hf] = ("F32", spec.shape)
        else:
            out[spec.hf] = ("BF16", spec.shape)
    return out


SIZES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8,
         "I32": 4}  # fmt: skip


def safetensors_head(entries: Mapping[str, Entry]) -> tuple[bytes, int]:
    """Header bytes and the size of the whole file."""
    at = 0
    header: dict[str, Any] = {}
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw, 8 + len(raw) + at


def write_shard(path: Path, entries: Mapping[str, Entry]) -> None:
    """A shard whose data is a hole."""
    head, size = safetensors_head(entries)
    path.write_bytes(head)
    os.truncate(path, size)


def write_checkpoint(
    root: Path, config: Mapping[str, Any], entries: Mapping[str, Entry], shards: int = 1
) -> Path:
    """A checkpoint directory whose data is holes, split over `shards` files with an index."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_shard(root / "model.safetensors", entries)
        return root
    names = list(entries)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_shard(root / shard, {name: entries[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root
