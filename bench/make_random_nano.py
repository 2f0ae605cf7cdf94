"""Write `ds4jax/models/nano.gguf` with random weights: small, complete, and not trained.

    python -m bench.make_random_nano [OUT] [--seed N]

The file has every kind of layer (window only, ratio 4 with the indexer, ratio 128; hash and learned
routing), MXFP4 experts and ROCmFP4/ROCmFP6 dense weights, and a byte-level BPE vocabulary trained
on the sources of Python's standard library. It makes every command run; its text means nothing.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from ds4jax import gguf_write, hparams_write, quantize, tensors
from ds4jax.config import ModelConfig
from ds4jax.convert_types import Types
from ds4jax.formats import FORMATS
from ds4jax.tensors import TensorSpec
from ds4jax.tokenizer import OFFICIAL_IDS, Tokenizer, pre_tokenizer

OUT = Path(__file__).parent.parent / "ds4jax" / "models" / "nano.gguf"
VOCAB = 2048
DESCRIPTION = "Random weights: the right shapes and formats, no training. The text means nothing."

TYPES = Types(
    experts_gate_up="mxfp4", experts_down="mxfp4", attention="rocmfp4", shared="rocmfp4",
    embedding="rocmfp6", head="rocmfp4", compressor="rocmfp4", indexer="rocmfp4", router="f32",
)  # fmt: skip


def model_config() -> ModelConfig:
    """Six layers of which every kind occurs, 3 million parameters, most of them in experts."""
    ratios = (0, 0, 4, 128, 4, 128)
    count = len(ratios)
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=128, num_layers=count, num_heads=8, head_dim=64,
        rope_head_dim=32, q_lora_rank=64, o_groups=4, o_lora_rank=32, sliding_window=64,
        compress_ratios=ratios, index_num_heads=4, index_head_dim=64, index_topk=64,
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64, num_hash_layers=2,
        swiglu_limits=(10.0,) * count, shared_swiglu_limits=(10.0,) * count,
        rope_original_len=4096, max_position_embeddings=65536,
    )  # fmt: skip


def sources() -> Iterator[str]:
    """Python's standard library, file by file, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idlelib"} & set(parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of this model family with all its markers."""
    markers = list(OFFICIAL_IDS)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(markers),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = pre_tokenizer()
    bpe.train_from_iterator(sources(), trainer)
    model = json.loads(bpe.to_str())["model"]
    base = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = markers[:3] + base + markers[3:]  # begin, end and padding come first, as published
    added = {m: tokens.index(m) for m in markers}
    pairs = (m if isinstance(m, list) else m.split(" ") for m in model["merges"])
    merges = [(left, right) for left, right in pairs]
    return Tokenizer.from_vocab(tokens, merges, added, vocab_size=vocab_size)


def random_weight(
    spec: TensorSpec, cfg: ModelConfig, rng: np.random.Generator
) -> npt.NDArray[np.float32] | npt.NDArray[np.int32]:
    """A weight of the size that keeps activations of order one."""
    shape = spec.shape
    if spec.kind == "table":
        rows = [rng.permutation(cfg.num_experts)[: shape[1]] for _ in range(shape[0])]
        return np.array(rows, np.int32)
    noise = rng.standard_normal(shape, np.float32)
    if spec.kind == "norm":
        return 1 + np.float32(0.1) * noise
    if spec.kind == "hyper_connection" and len(shape) == 1:
        return np.float32(0.5) * noise
    if len(shape) == 1 or spec.key == "embed":
        return noise
    gain = 4 if spec.key == "head" else 1
    return np.float32(gain * shape[-1] ** -0.5) * noise


def tensor_data(cfg: ModelConfig, seed: int) -> Iterator[gguf_write.TensorData]:
    """All tensors, each encoded as `TYPES` says."""
    rng = np.random.default_rng(seed)
    for spec in tensors.specs(cfg):
        if not spec.required:
            continue
        target = TYPES.target(spec, spec.gguf)
        values = random_weight(spec, cfg, rng)
        if target == "i32":
            data: npt.NDArray[np.uint8] = values.astype(np.int32).view(np.uint8)
            type_id = 26
        else:
            data = quantize.encode(target, values.astype(np.float32))
            type_id = int(FORMATS[target].type_id or 0)
        yield gguf_write.TensorData(name=spec.gguf, type_id=type_id, shape=spec.shape, data=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cfg = model_config()
    metadata = hparams_write.gguf_metadata(cfg, name="ds4-nano (random weights)")
    metadata["general.version"] = "0731"  # the prompt format
    metadata["general.description"] = DESCRIPTION
    metadata |= train_tokenizer(cfg.vocab_size).to_gguf_metadata()
    args.out.parent.mkdir(exist_ok=True)
    size = gguf_write.write(args.out, metadata, tensor_data(cfg, args.seed), overwrite=True)
    print(f"{args.out}: {size} bytes")


if __name__ == "__main__":
    main()
