"""Importance of every matrix column, gathered from text: the file that `ds4jax convert --imatrix`
takes.

    python -m bench.imatrix MODEL -o imatrix.npz [-f TEXT ...]

The importance of a column is the mean square of the input it multiplies; for a routed expert, over
the tokens routed to it. Inputs are recomputed from captured activations with the model's own
functions. Small models only: whole sequences run on the reference backend.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from ds4jax import linear, model, tensors
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params, Weights
from pallas_kernels import hyper, norm

F32 = jnp.float32
LEAVES = ("attn_hc_pre", "heads_out", "ffn_hc_pre", "router_ids", "router_weights")


def _square(x: Array) -> Array:
    """Mean square of every column over all rows (and all leading axes)."""
    x = x.astype(F32).reshape(-1, x.shape[-1])
    return jnp.mean(x * x, axis=0)


def _matmul(x: Array, w: Any) -> Array:
    return linear.matmul(x, w, out_dtype=F32)


def _attention(cfg: ModelConfig, w: Weights, pre: Array, heads: Array) -> dict[str, Array]:
    x = norm.rms_norm(pre, w["attn_norm"], eps=cfg.rms_norm_eps)
    qr = norm.rms_norm(_matmul(x, w["attn.wq_a"]), w["attn.q_norm"], eps=cfg.rms_norm_eps)
    grouped = heads.reshape(heads.shape[0], cfg.o_groups, -1)
    z = linear.grouped_matmul(grouped, w["attn.wo_a"], out_dtype=F32)
    of_input = ("wq_a", "wkv", "compressor.wkv", "compressor.wgate", "indexer.weights_proj",
                "indexer.compressor.wkv", "indexer.compressor.wgate")  # fmt: skip
    out = {f"attn.{k}": _square(x) for k in of_input}
    out |= {f"attn.{k}": _square(qr) for k in ("wq_b", "indexer.wq_b")}
    out |= {"attn.wo_a": _square(grouped), "attn.wo_b": _square(z.reshape(z.shape[0], -1))}
    return {k: v for k, v in out.items() if k in w}


def _experts(cfg: ModelConfig, w: Weights, layer: int, got: dict[str, Array]) -> dict[str, Array]:
    x = norm.rms_norm(got["ffn_hc_pre"], w["ffn_norm"], eps=cfg.rms_norm_eps)
    limit = cfg.swiglu_limits[layer]
    hot = jax.nn.one_hot(got["router_ids"], cfg.num_experts, dtype=F32)
    share_TE = jnp.sum(hot * got["router_weights"][:, :, None], axis=1)
    used_TE = jnp.minimum(jnp.sum(hot, axis=1), 1.0)
    count_E = jnp.maximum(jnp.sum(used_TE, axis=0), 1.0)[:, None]
    mean = _square(x)
    into_EM = jnp.einsum("te,tm->em", used_TE, x * x) / count_E

    def hidden(w1: Any, w3: Any, limit: float) -> Array:
        g, u = _matmul(x, w1), _matmul(x, w3)
        return norm.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit)

    def inner(e: Array) -> Array:
        h = hidden(w["ffn.experts.w1"][e], w["ffn.experts.w3"][e], limit) * share_TE[:, e, None]
        return jnp.sum(h * h, axis=0) / count_E[e]

    down_EF = jax.lax.map(inner, jnp.arange(cfg.num_experts, dtype=jnp.int32))
    shared = hidden(
        w["ffn.shared_experts.w1"], w["ffn.shared_experts.w3"], cfg.shared_swiglu_limits[layer]
    )
    return {
        "ffn.gate": mean, "ffn.experts.w1": into_EM, "ffn.experts.w3": into_EM,
        "ffn.experts.w2": down_EF, "ffn.shared_experts.w1": mean, "ffn.shared_experts.w3": mean,
        "ffn.shared_experts.w2": _square(shared),
    }  # fmt: skip


def gather(
    params: Params, cfg: ModelConfig, token_NT: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray[np.float32]]:
    """Importance vectors by GGUF tensor name: [columns], or [experts, columns].

    Args:
        params: plain float32 weights, layers not scanned. token_NT: sequences of text.
    """
    names = {(s.key, s.layer): s.gguf for s in tensors.specs(cfg)}
    last = f"L{cfg.num_layers - 1}.streams_out"
    wanted = frozenset({f"L{i}.{leaf}" for i in range(cfg.num_layers) for leaf in LEAVES} | {last})

    @jax.jit
    def one(params: Params, token_T: Array) -> dict[str, Array]:
        _, seen = model.sequences(
            params, token_T[None], cfg=cfg, run=RuntimeConfig(), capture=wanted
        )
        out = {}
        for info, w in params.layers():
            got = {leaf: seen[f"L{info.layer}.{leaf}"] for leaf in LEAVES}
            found = _attention(cfg, w, got["attn_hc_pre"], got["heads_out"])
            found |= _experts(cfg, w, info.layer, got)
            out |= {names[key, info.layer]: v for key, v in found.items()}
        top = params.top
        hidden = hyper.collapse_head(
            seen[last], top["hc_head_fn"], top["hc_head_scale"], top["hc_head_base"],
            hc_eps=cfg.hc_eps, rms_eps=cfg.rms_norm_eps,
        )  # fmt: skip
        out[names["head", None]] = _square(norm.rms_norm(hidden, top["norm"], eps=cfg.rms_norm_eps))
        return out

    total: dict[str, npt.NDArray[np.float32]] = {}
    for row in token_NT:
        for name, value in one(params, jnp.asarray(row, jnp.int32)).items():
            total[name] = total.get(name, np.float32(0)) + np.asarray(value) / len(token_NT)
    return total


def main() -> None:
    """Gather from text files and write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.imatrix")
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("-f", "--file", type=Path, nargs="+", required=True, help="text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    args = parser.parse_args()
    from ds4jax import model_file, weights
    from ds4jax.tokenizer import Tokenizer

    source = model_file.open_model(args.model)
    kept = source.tokenizer_source
    tok = Tokenizer.from_path(kept) if isinstance(kept, Path) else Tokenizer.from_gguf(kept or {})
    run = RuntimeConfig(max_ctx=args.length)
    cfg, params = weights.load(source, run, cpu_weights="decoded", scan=False)
    ids = [i for f in args.file for i in tok.encode_completion(f.read_text(encoding="utf-8"))]
    rows = len(ids) // args.length
    if rows == 0:
        raise SystemExit(f"{len(ids)} tokens of text, at least {args.length} are needed")
    token_NT = np.array(ids[: rows * args.length], np.int32).reshape(rows, args.length)
    vectors = gather(params, cfg, token_NT)
    np.savez(args.output, **vectors)  # type: ignore[arg-type]
    print(f"{args.output}: {len(vectors)} tensors from {token_NT.size} tokens")


if __name__ == "__main__":
    main()
