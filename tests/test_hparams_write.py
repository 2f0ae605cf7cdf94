"""Configurations and tokenizers written into files are read back as equal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ds4jax import gguf, gguf_write, hparams, hparams_draft, hparams_write, tokenizer
from ds4jax.config import DraftConfig, ModelConfig


def config(**change: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 64, "num_layers": 5, "num_heads": 4, "head_dim": 96,
        "rope_head_dim": 32, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32,
        "sliding_window": 16, "compress_ratios": (0, 0, 4, 128, 4), "index_num_heads": 16,
        "index_head_dim": 64, "index_topk": 12, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_hash_layers": 2, "swiglu_limits": (1.5,) * 5,
        "shared_swiglu_limits": (1.5,) * 5, "routed_scaling_factor": 2.5,
        "norm_topk_prob": False, "hc_mult": 2, "hc_sinkhorn_iters": 7, "hc_eps": 3e-6,
        "rms_norm_eps": 2e-6, "rope_theta": 20000.0, "compress_rope_theta": 70000.0,
        "rope_scaling_factor": 8.0, "rope_original_len": 4096, "rope_beta_fast": 16.0,
        "rope_beta_slow": 2.0, "max_position_embeddings": 32768,
    }  # fmt: skip
    return ModelConfig(**(fields | change))


DRAFT = DraftConfig(
    num_stages=3, block_size=4, markov_rank=16, noise_token_id=299, target_layer_ids=(1, 3, 4)
)
SHAPES = {f"dspark.{i}.attn_norm.weight": (64,) for i in range(3)} | {
    "dspark.markov_w1.weight": (300, 16),
    "dspark.main_proj.weight": (64, 192),
}


def through_gguf(path: Path, pairs: dict[str, Any]) -> dict[str, Any]:
    gguf_write.write(path, pairs, [], overwrite=True)
    return gguf.open_gguf(path).metadata


CONFIGS = [
    config(),
    config(rope_scaling_factor=1.0, rope_beta_fast=32.0, rope_beta_slow=1.0),
    config(swiglu_limits=(1.0, 2.0, 3.0, 4.0, 5.0), shared_swiglu_limits=(9.0,) * 5),
    config(rope_theta=10000, norm_topk_prob=True),
]


@pytest.mark.parametrize("cfg", CONFIGS)
def test_gguf_metadata_is_read_as_the_same_model(cfg: ModelConfig, tmp_path: Path) -> None:
    pairs = through_gguf(tmp_path / "m.gguf", hparams_write.gguf_metadata(cfg, name="tiny"))
    read, num_mtp, reading = hparams.from_gguf(pairs, {}, "m.gguf")
    assert not reading.problems and num_mtp == 0
    assert read == cfg
    assert pairs["general.name"] == "tiny"
    assumed = [n for n in reading.notes if "assumed" in n]
    expected = [] if cfg.rope_scaling_factor != 1 else ["yarn_beta_fast", "yarn_beta_slow"]
    assert len(assumed) == len(expected)


def test_drafter_metadata_is_read_as_the_same_drafter(tmp_path: Path) -> None:
    cfg = config()
    pairs = through_gguf(tmp_path / "m.gguf", hparams_write.gguf_metadata(cfg, DRAFT))
    read, reading = hparams_draft.draft_config(pairs, SHAPES, cfg, "dspark", "m.gguf")
    assert not reading.problems
    assert read == dataclasses.replace(DRAFT, num_experts=8)


@pytest.mark.parametrize("cfg", [CONFIGS[0], CONFIGS[1], CONFIGS[3]])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_config_json_is_read_as_the_same_model(cfg: ModelConfig, draft: DraftConfig | None) -> None:
    if cfg.rope_scaling_factor == 1.0:  # a checkpoint without scaling names no original length
        cfg = dataclasses.replace(cfg, rope_original_len=65536)
    text = json.dumps(hparams_write.hf_config(cfg, draft, fp8=True, fp4=True))
    values = json.loads(text)
    read, reading = hparams.from_hf(values, "config.json")
    assert not reading.problems
    assert read == cfg
    if draft is not None:
        shapes = {f"mtp.{i}.attn_norm.weight": (64,) for i in range(3)}
        shapes["mtp.2.markov_head.markov_w1.weight"] = (300, 16)
        got, draft_reading = hparams_draft.draft_config(values, shapes, cfg, None, "config.json")
        assert not draft_reading.problems and got == draft
    assert len(values["compress_ratios"]) == 5 + (3 if draft else 0)


def test_limits_that_differ_have_no_place_in_config_json() -> None:
    with pytest.raises(ValueError, match="one for the whole model"):
        hparams_write.hf_config(CONFIGS[2], None, fp8=False, fp4=False)


# Tokenizers ---------------------------------------------------------------------------------------


def byte_tokenizer(unused: int = 0) -> tokenizer.Tokenizer:
    letters = [chr(c) for c in range(33, 127)]
    letters += [chr(c) for c in (*range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    markers = list(tokenizer.MARKER_SPELLINGS.values())
    tokens = [*letters, "th", "the", *markers, *(f"[{i}]" for i in range(unused))]
    added = {m: tokens.index(m) for m in markers}
    return tokenizer.Tokenizer.from_vocab(
        tokens,
        [("t", "h"), ("th", "e")],
        added,
        unused=frozenset(range(len(tokens) - unused, len(tokens))),
    )


TEXT = "the Then 12345, 毕老师！ the\n\n  </think>é\u0000"


def test_tokenizer_json_round_trip() -> None:
    tok = byte_tokenizer()
    again = tokenizer.Tokenizer.from_json(hparams_write.tokenizer_json(tok))
    assert again.digest == tok.digest and again.specials == tok.specials
    for markers in (False, True):
        assert again.encode(TEXT, markers=markers) == tok.encode(TEXT, markers=markers)
    assert hparams_write.tokenizer_json(again) == hparams_write.tokenizer_json(tok)


def test_tokenizer_of_gguf_round_trip(tmp_path: Path) -> None:
    tok = byte_tokenizer(unused=2)
    pairs = through_gguf(tmp_path / "m.gguf", tok.to_gguf_metadata())
    again = tokenizer.Tokenizer.from_gguf(pairs)
    assert again.digest == tok.digest
    assert again.encode(TEXT, markers=True) == tok.encode(TEXT, markers=True)
    with pytest.raises(ValueError, match="2 ids name nothing"):
        hparams_write.tokenizer_json(tok)


def test_the_library_itself_reads_the_written_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tok = byte_tokenizer()
    library = tokenizers.Tokenizer.from_str(hparams_write.tokenizer_json(tok))
    ids = library.encode(TEXT, add_special_tokens=False).ids
    assert ids == tok.encode(TEXT, markers=True)
    assert library.decode(ids, skip_special_tokens=False) == tok.decode(ids)
