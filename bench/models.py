"""The models that benchmarks run: the one in the package, a mid-size random one, or any file.

Also what a step has to read of them: bytes of weights by route, bytes of cache by position.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from ds4jax import model_file, params, synthetic, weights
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params
from ds4jax.tensors import TensorClass

WeightsForm = Literal["packed", "decoded"]

_RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
MID = ModelConfig(
    vocab_size=8192, hidden_size=1024, num_layers=8, num_heads=16, head_dim=128, rope_head_dim=64,
    q_lora_rank=256, o_groups=4, o_lora_rank=256, sliding_window=128, compress_ratios=_RATIOS,
    index_num_heads=8, index_head_dim=64, index_topk=128, num_experts=32, num_experts_per_tok=6,
    moe_intermediate_size=512, num_hash_layers=3, swiglu_limits=(7.0,) * 8,
    shared_swiglu_limits=(7.0,) * 8, rope_original_len=4096, max_position_embeddings=65536,
)  # fmt: skip
"""Every layer kind, 480 million weights, 122 million of them read per token."""

FLASH = ModelConfig(
    vocab_size=129280, hidden_size=4096, num_layers=43, num_heads=64, head_dim=512,
    rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4), index_num_heads=64, index_head_dim=128,
    index_topk=512, num_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048,
    num_hash_layers=3, swiglu_limits=(10.0,) * 43, shared_swiglu_limits=(10.0,) * 43,
)  # fmt: skip
"""DeepSeek-V4-Flash as published."""

MID_TYPES: dict[TensorClass, str] = {
    "experts_gate_up": "mxfp4", "experts_down": "mxfp4", "attention": "q8_0", "shared": "q8_0",
    "head": "q8_0", "embedding": "q8_0", "compressor": "q8_0", "indexer": "q8_0",
}  # fmt: skip
"""Formats of the packed mid-size model: the mixture of public files."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run, and how reports describe it."""

    cfg: ModelConfig
    params: Params
    facts: dict[str, Any]


def load(name: str, run: RuntimeConfig, form: WeightsForm) -> Loaded:
    """A model by name: "nano", "mid", or a path.

    Args:
        run: dtype, backend and max_ctx are used.
        form: packed or decoded weights (of "mid": formats of `MID_TYPES`, or plain).
    """
    start = time.perf_counter()
    if name == "mid":
        cfg, digest = MID, "synthetic"
        types = MID_TYPES if form == "packed" else None
        tree = synthetic.init_random(cfg, jax.random.key(0), run, types=types)
        stored = "mxfp4 experts, q8_0 dense" if types else run.dtype
    else:
        source = model_file.open_model(name)
        cfg, tree = weights.load(source, run, cpu_weights=form)
        digest = _sha256(source.path)
        stored = ", ".join(sorted({t.format for t in source.tensors.values()}))
    jax.block_until_ready(tree)
    facts = {
        "name": name,
        "sha256": digest,
        "quantisation": stored,
        "weights": form,
        "dtype": run.dtype,
        "numerics": run.numerics,
        "bytes_resident_per_device": sum(a.nbytes for a in jax.tree.leaves(tree)),
        "experts_per_token": run.num_experts_per_tok or cfg.num_experts_per_tok,
        "load_s": time.perf_counter() - start,
    }
    return Loaded(cfg=cfg, params=tree, facts=facts)


def _sha256(path: Path) -> str:
    if path.is_dir():
        return "directory"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads: if every row reads its own weights, and if rows share them."""

    streamed: int
    unique: int
    experts: float  # distinct experts per layer, mean


def traffic(
    model: Loaded,
    routes: Mapping[int, npt.NDArray[np.int32]],
    positions: Sequence[int],
    *,
    itemsize: int = 4,
) -> Traffic:
    """What one step over these rows reads.

    Args:
        routes: per layer the experts that its rows took, int32 [rows, k].
        positions: of the rows. itemsize: bytes of a number in the cache.
    """
    rows = len(positions)
    dense = _bytes(model.params.top["head"]) + sum(
        _bytes(v) for k, v in model.params.top.items() if k not in ("embed", "head")
    )
    per_row = dense
    unique = dense
    distinct = []
    for info, w in _layers(model.params):
        own = sum(b for k, b in w.items() if not k.startswith("ffn.experts.") and "tid2" not in k)
        expert = sum(b for k, b in w.items() if k.startswith("ffn.experts."))
        expert //= model.cfg.num_experts
        taken = routes[info.layer]
        distinct.append(len(np.unique(taken)))
        per_row += own + expert * taken.shape[1]
        unique += own + expert * distinct[-1]
    cache = itemsize * sum(_cache_numbers(model.cfg, p) for p in positions)
    return Traffic(rows * per_row + cache, unique + cache, float(np.mean(distinct)))


def _layers(tree: Params) -> list[tuple[params.LayerInfo, dict[str, int]]]:
    out = []
    for group, units in zip(tree.layout, tree.groups, strict=True):
        for r in range(group.count):
            for u, info in enumerate(group.unit):
                sizes = {k: _bytes(v) // group.count for k, v in units[u].items()}
                out.append((params.repeat_info(group, info, r), sizes))
    return out


def _bytes(leaf: Any) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(leaf))


def _cache_numbers(cfg: ModelConfig, pos: int) -> int:
    """Numbers that attention and indexer read for one row."""
    total = 0
    for ratio in cfg.compress_ratios:
        total += min(pos + 1, cfg.sliding_window) * cfg.head_dim
        seen = (pos + 1) // ratio if ratio else 0
        if ratio == 4:
            total += min(seen, cfg.index_topk) * cfg.head_dim
            total += seen * cfg.index_head_dim if seen > cfg.index_topk else 0
        else:
            total += seen * cfg.head_dim
    return total
