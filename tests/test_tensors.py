"""The description of every tensor: counts, names and shapes of published models."""

from __future__ import annotations

import dataclasses
import math

import model_files as mf
import numpy as np
import pytest

from ds4jax import hparams, hparams_draft, tensors
from ds4jax.config import DraftConfig, ModelConfig

DRAFT = DraftConfig(
    num_stages=3,
    block_size=5,
    markov_rank=256,
    noise_token_id=128799,
    target_layer_ids=(40, 41, 42),
)


def by_gguf(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {s.gguf: s.shape for s in tensors.specs(cfg)}


def test_tensor_counts_of_flash() -> None:
    flash = mf.flash()
    main = tensors.specs(flash)
    assert len(main) == 1328
    assert len({s.gguf for s in main}) == len({s.hf for s in main}) == 1328
    assert len({s.name for s in main}) == 1328
    count = len(mf.hf_entries(main))
    assert count == 67612
    assert count + len(mf.hf_entries(tensors.mtp_specs(flash, 1))) == 69187
    draft = [s for s in tensors.draft_specs(flash, DRAFT) if s.key != "confidence_head.proj.bias"]
    assert len(draft) == 81
    assert count + len(mf.hf_entries(draft)) == 72317


def test_weights_of_flash() -> None:
    parameters = sum(math.prod(s.shape) for s in tensors.specs(mf.flash()) if s.kind != "table")
    experts = 43 * 256 * 3 * 4096 * 2048
    assert 284e9 < parameters < 285e9
    assert parameters - experts < 8e9


def test_gguf_names_and_shapes_of_flash() -> None:
    shapes = by_gguf(mf.flash())
    expected = {
        "token_embd.weight": (129280, 4096),
        "output.weight": (129280, 4096),
        "output_norm.weight": (4096,),
        "output_hc_fn.weight": (4, 16384),
        "output_hc_base.weight": (4,),
        "output_hc_scale.weight": (1,),
        "blk.0.attn_norm.weight": (4096,),
        "blk.42.ffn_norm.weight": (4096,),
        "blk.0.hc_attn_fn.weight": (24, 16384),
        "blk.0.hc_ffn_base.weight": (24,),
        "blk.0.hc_attn_scale.weight": (3,),
        "blk.0.attn_q_a.weight": (1024, 4096),
        "blk.0.attn_q_a_norm.weight": (1024,),
        "blk.0.attn_q_b.weight": (32768, 1024),
        "blk.0.attn_kv.weight": (512, 4096),
        "blk.0.attn_kv_a_norm.weight": (512,),
        "blk.0.attn_sinks.weight": (64,),
        "blk.0.attn_output_a.weight": (8192, 4096),
        "blk.0.attn_output_b.weight": (4096, 8192),
        "blk.2.attn_compressor_ape.weight": (4, 1024),
        "blk.2.attn_compressor_kv.weight": (1024, 4096),
        "blk.3.attn_compressor_ape.weight": (128, 512),
        "blk.3.attn_compressor_gate.weight": (512, 4096),
        "blk.3.attn_compressor_norm.weight": (512,),
        "blk.2.indexer.attn_q_b.weight": (8192, 1024),
        "blk.2.indexer.proj.weight": (64, 4096),
        "blk.2.indexer_compressor_ape.weight": (4, 256),
        "blk.2.indexer_compressor_kv.weight": (256, 4096),
        "blk.2.indexer_compressor_norm.weight": (128,),
        "blk.0.ffn_gate_inp.weight": (256, 4096),
        "blk.3.exp_probs_b.bias": (256,),
        "blk.2.ffn_gate_tid2eid.weight": (129280, 6),
        "blk.0.ffn_gate_exps.weight": (256, 2048, 4096),
        "blk.0.ffn_up_exps.weight": (256, 2048, 4096),
        "blk.0.ffn_down_exps.weight": (256, 4096, 2048),
        "blk.0.ffn_gate_shexp.weight": (2048, 4096),
        "blk.0.ffn_down_shexp.weight": (4096, 2048),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    absent = [
        "blk.0.attn_compressor_ape.weight", "blk.3.indexer.proj.weight", "blk.2.exp_probs_b.bias",
        "blk.3.ffn_gate_tid2eid.weight", "blk.43.attn_norm.weight",
    ]  # fmt: skip
    assert not set(absent) & set(shapes)


def test_checkpoint_names_and_shapes_of_pro() -> None:
    shapes = {s.stem: s.shape for s in tensors.specs(mf.pro())}
    expected = {
        "embed": (129280, 7168),
        "hc_head_fn": (4, 28672),
        "layers.0.attn.wq_a": (1536, 7168),
        "layers.0.attn.wq_b": (65536, 1536),
        "layers.60.attn.attn_sink": (128,),
        "layers.0.attn.wo_a": (16384, 4096),
        "layers.0.attn.wo_b": (7168, 16384),
        "layers.0.attn.compressor.ape": (128, 512),
        "layers.60.attn.indexer.wq_b": (8192, 1536),
        "layers.0.ffn.gate": (384, 7168),
        "layers.2.ffn.gate.tid2eid": (129280, 6),
        "layers.5.ffn.experts.{e}.w1": (384, 3072, 7168),
        "layers.5.ffn.experts.{e}.w2": (384, 7168, 3072),
    }
    assert {name: shapes.get(name) for name in expected} == expected


def test_mtp_and_draft_names_and_shapes() -> None:
    flash = mf.flash()
    mtp = {s.gguf: s.shape for s in tensors.mtp_specs(flash, 1)}
    assert mtp["blk.43.nextn.e_proj.weight"] == (4096, 4096)
    assert mtp["blk.43.nextn.shared_head_norm.weight"] == (4096,)
    assert mtp["blk.43.exp_probs_b.bias"] == (256,)
    separate = {s.gguf for s in tensors.mtp_specs(flash, 1, separate=True)}
    assert {"mtp.0.norm.weight", "mtp.0.attn_q_a.weight", "mtp.0.h_proj.weight"} <= separate
    expected = {
        "lucebox": ("dflash.fc.weight", "dflash.dspark.markov.w1", "blk.2.attn_q_a.weight"),
        "dspark": ("dspark.main_proj.weight", "dspark.markov_w2.weight",
                   "dspark.1.ffn_norm.weight"),
        "mtp": ("mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight",
                "mtp.2.hc_head_fn.weight"),
        "dflash": ("fc.weight", "conf_proj.bias", "blk.0.exp_probs_b.bias"),
    }  # fmt: skip
    shapes = {}
    for scheme, names in expected.items():
        shapes = {s.gguf: s.shape for s in tensors.draft_specs(flash, DRAFT, scheme)}  # type: ignore[arg-type]
        assert set(names) <= set(shapes)
        assert tensors.gguf_draft_scheme(shapes) == scheme
    assert shapes["fc.weight"] == (4096, 12288)
    assert shapes["conf_proj.weight"] == (1, 4352)
    assert shapes["markov_w1.weight"] == (129280, 256)


@pytest.mark.parametrize(
    ("theirs", "published"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("hc_head.scale", "hc_head_scale"),
        ("model.layers.3.input_layernorm.weight", "layers.3.attn_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "layers.3.ffn_norm.weight"),
        ("model.layers.3.attn_hc.base", "layers.3.hc_attn_base"),
        ("model.layers.3.self_attn.sinks", "layers.3.attn.attn_sink"),
        ("model.layers.3.self_attn.q_a_proj.weight", "layers.3.attn.wq_a.weight"),
        ("model.layers.3.self_attn.q_a_proj.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        ("model.layers.3.self_attn.q_a_norm.weight", "layers.3.attn.q_norm.weight"),
        ("model.layers.3.self_attn.kv_proj.weight", "layers.3.attn.wkv.weight"),
        ("model.layers.3.self_attn.o_b_proj.weight", "layers.3.attn.wo_b.weight"),
        (
            "model.layers.2.self_attn.compressor.position_bias",
            "layers.2.attn.compressor.ape",
        ),
        (
            "model.layers.2.self_attn.compressor.kv_norm.weight",
            "layers.2.attn.compressor.norm.weight",
        ),
        (
            "model.layers.2.self_attn.compressor.gate_proj.weight",
            "layers.2.attn.compressor.wgate.weight",
        ),
        (
            "model.layers.2.self_attn.compressor.indexer.kv_proj.weight",
            "layers.2.attn.indexer.compressor.wkv.weight",
        ),
        (
            "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
            "layers.2.attn.indexer.wq_b.weight",
        ),
        (
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.2.attn.indexer.weights_proj.weight",
        ),
        (
            "model.layers.2.self_attn.compressor.indexer.position_bias",
            "layers.2.attn.indexer.compressor.ape",
        ),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        (
            "model.layers.3.mlp.shared_experts.up_proj.weight",
            "layers.3.ffn.shared_experts.w3.weight",
        ),
        ("model.layers.3.mlp.experts.7.down_proj.weight", "layers.3.ffn.experts.7.w2.weight"),
        ("model.layers.3.mlp.experts.gate_up_proj", "layers.3.ffn.experts.gate_up_proj"),
    ],
)
def test_names_of_transformers_and_mlx(theirs: str, published: str) -> None:
    assert tensors.published_name(theirs) == published
    assert tensors.published_name(published) == published


def test_published_names_are_left_alone() -> None:
    specs = [*tensors.specs(mf.flash()), *tensors.draft_specs(mf.flash(), DRAFT)]
    names = {s.hf.replace("{e}", "3") for s in specs} | {s.stem + ".scale" for s in specs}
    assert {tensors.published_name(n) for n in names} == names


def test_every_layer_tensor_is_recognised_by_name() -> None:
    cfg = mf.small()
    for spec in tensors.specs(cfg):
        if spec.layer is not None:
            for name in (spec.gguf, spec.hf.replace("{e}", "1")):
                leaf = tensors.layer_leaf(name)
                assert leaf is not None and leaf[0] == spec.key
                assert tensors.layer_number(name) == spec.layer
    assert tensors.layer_leaf("blk.0.unknown.weight") is None


# --- configurations ---------------------------------------------------------------------------


def shapes_of(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    return by_gguf(cfg)


def metadata(pairs: list[mf.Pair]) -> dict[str, object]:
    """Pairs as the reader gives them: float32 scalars, arrays as NumPy."""
    out: dict[str, object] = {}
    kinds = {mf.I32: np.int32, mf.F32: np.float32, mf.U32: np.uint32, mf.I64: np.int64}
    for key, kind, value in pairs:
        if kind == mf.ARRAY:
            value = np.asarray(value[1], kinds[value[0]])
        elif kind == mf.F32:
            value = float(np.float32(value))
        out[key] = bool(value) if kind == mf.BOOL else value
    return out


def read(pairs: list[mf.Pair], cfg: ModelConfig) -> tuple[ModelConfig | None, hparams.Reading]:
    config, _, reading = hparams.from_gguf(metadata(pairs), shapes_of(cfg), "m.gguf")
    return config, reading


@pytest.mark.parametrize("cfg", [mf.flash(), mf.pro(), mf.small()], ids=["flash", "pro", "small"])
def test_both_kinds_of_file_give_the_same_configuration(cfg: ModelConfig) -> None:
    from_gguf, reading = read(mf.gguf_pairs(cfg), cfg)
    assert not reading.problems and not reading.notes
    from_hf, hf_reading = hparams.from_hf(mf.hf_config(cfg), "config.json")
    assert not hf_reading.problems and not hf_reading.notes
    assert from_gguf == from_hf == cfg


def test_liberal_value_types_of_gguf() -> None:
    cfg = mf.small(shared_swiglu_limits=(7.0,) * 4)
    p = "deepseek4."
    pairs = mf.gguf_pairs(cfg)
    pairs = mf.replaced(pairs, p + "block_count", mf.U64, cfg.num_layers)
    pairs = mf.replaced(pairs, p + "embedding_length", mf.I32, cfg.hidden_size)
    pairs = mf.replaced(pairs, p + "rope.scaling.original_context_length", mf.U64, 65536)
    pairs = mf.replaced(pairs, p + "swiglu_clamp_exp", mf.F32, 10.0)
    ratios = [*cfg.compress_ratios, 0, 0, 0]
    pairs = mf.replaced(pairs, p + "attention.compress_ratios", mf.ARRAY, (mf.U32, ratios))
    pairs.append((p + "swiglu_clamp_shexp", mf.ARRAY, (mf.F32, [7.0] * 6)))
    config, reading = read(pairs, cfg)
    assert config == cfg and not reading.notes


def test_what_producers_leave_out_is_assumed_and_said() -> None:
    cfg = mf.small()
    pairs = mf.gguf_pairs(cfg)
    optional = [
        "vocab_size", "context_length", "rope.freq_base", "attention.compress_rope_freq_base",
        "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
        "attention.layer_norm_rms_epsilon", "expert_weights_scale", "expert_weights_norm",
        "swiglu_clamp_exp", "hyper_connection.epsilon", "attention.compress_ratios",
        "expert_shared_count",
    ]  # fmt: skip
    for key in optional:
        pairs = mf.replaced(pairs, "deepseek4." + key)
    config, reading = read(pairs, cfg)
    assert config == cfg
    text = "\n".join(reading.notes)
    assert all(key in text for key in optional)


def test_settings_the_model_does_not_implement_are_refused_together() -> None:
    cfg = mf.small()
    p = "deepseek4."
    pairs = mf.gguf_pairs(cfg)
    pairs = mf.replaced(pairs, p + "attention.head_count_kv", mf.U32, 4)
    pairs = mf.replaced(pairs, p + "expert_gating_func", mf.U32, 2)
    pairs = mf.replaced(pairs, p + "rope.scaling.type", mf.STRING, "linear")
    pairs = mf.replaced(pairs, p + "attention.value_length", mf.U32, 64)
    pairs = mf.replaced(pairs, p + "hash_layer_count")
    pairs = mf.replaced(pairs, p + "swiglu_clamp_exp", mf.ARRAY, (mf.F32, [1.0]))
    pairs = mf.replaced(pairs, p + "hyper_connection.count", mf.STRING, "four")
    pairs.append((p + "expert_group_count", mf.U32, 8))
    config, reading = read(pairs, cfg)
    assert config is None
    assert {x.where for x in reading.problems} == {
        f"key {p}{k}"
        for k in (
            "attention.head_count_kv", "expert_gating_func", "rope.scaling.type",
            "attention.value_length", "hash_layer_count", "swiglu_clamp_exp",
            "hyper_connection.count", "expert_group_count",
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("attention.compress_ratios", (mf.I32, [0, 4, 64, 4]), "64"),
        ("attention.compress_ratios", (mf.I32, [0, 4]), "at least 4"),
        ("swiglu_clamp_exp", (mf.F32, [1.0, 0.0, 1.0, 1.0]), "finite and above 0"),
    ],
)
def test_bad_arrays_name_their_key(key: str, value: object, text: str) -> None:
    cfg = mf.small()
    pairs = mf.replaced(mf.gguf_pairs(cfg), "deepseek4." + key, mf.ARRAY, value)
    config, reading = read(pairs, cfg)
    assert config is None and len(reading.problems) == 1
    assert f"deepseek4.{key}" in str(reading.problems[0]) and text in str(reading.problems[0])


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("llama", "only DeepSeek-V4"),
        ("deepseek2", "only DeepSeek-V4"),
        ("deepseek4_1", "DeepSeek-V4.1 is another architecture"),
        ("deepseek_v4.1", "DeepSeek-V4.1 is another architecture"),
        ("deepseek4-dflash-draft", "--draft"),
        ("deepseek4-dspark", "--draft"),
        ("dflash", "--draft"),
        (None, "no such key"),
    ],
)
def test_other_architectures_are_refused_by_name(architecture: str | None, text: str) -> None:
    cfg = mf.small()
    pairs = mf.replaced(mf.gguf_pairs(cfg), "general.architecture")
    if architecture is not None:
        pairs.append(("general.architecture", mf.STRING, architecture))
    config, reading = read(pairs, cfg)
    assert config is None and text in str(reading.problems[0])
    assert architecture is None or architecture in str(reading.problems[0])


def test_mtp_layers_are_decided_by_tensors() -> None:
    cfg = mf.small()
    grown = {f"blk.{cfg.num_layers}.nextn.e_proj.weight": (64, 64), **shapes_of(cfg)}
    pairs = mf.gguf_pairs(cfg)
    counted = mf.replaced(pairs, "deepseek4.block_count", mf.U32, cfg.num_layers + 1)
    longer = [*cfg.compress_ratios, 0]
    counted = mf.replaced(
        counted, "deepseek4.attention.compress_ratios", mf.ARRAY, (mf.I32, longer)
    )
    for given in (counted, pairs):
        config, num_mtp, _ = hparams.from_gguf(metadata(given), grown, "m.gguf")
        assert config == cfg and num_mtp == 1
    # The key alone means nothing.
    pairs.append(("deepseek4.nextn_predict_layers", mf.U32, 1))
    config, num_mtp, _ = hparams.from_gguf(metadata(pairs), shapes_of(cfg), "m.gguf")
    assert config == cfg and num_mtp == 0


def test_deepseeks_own_key_names() -> None:
    flash = mf.flash()
    config = {
        "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43,
        "n_hash_layers": 3, "n_mtp_layers": 1, "n_heads": 64, "norm_eps": 1e-6,
        "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6,
        "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0,
        "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64, "o_groups": 8,
        "o_lora_rank": 1024, "window_size": 128, "compress_rope_theta": 160000.0,
        "compress_ratios": [*flash.compress_ratios, 0], "original_seq_len": 65536,
        "rope_theta": 10000.0, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "dtype": "fp8", "expert_dtype": "fp4",
    }  # fmt: skip
    got, reading = hparams.from_hf(config, "inference/config.json")
    assert got == flash and not reading.problems


def test_config_of_transformers() -> None:
    flash = mf.flash()
    config = mf.hf_config(flash)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}  # fmt: skip
    ratios = config.pop("compress_ratios")
    config["layer_types"] = [kinds[r] for r in ratios]
    config["mlp_layer_types"] = ["hash_moe"] * config.pop("num_hash_layers") + ["moe"] * 40
    config["partial_rotary_factor"] = config.pop("qk_rope_head_dim") / 512
    yarn = {k: v for k, v in config.pop("rope_scaling").items() if k != "type"}
    config["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": config.pop("rope_theta")},
        "compress": {"rope_type": "yarn", "rope_theta": config.pop("compress_rope_theta"), **yarn},
    }
    got, reading = hparams.from_hf(config, "config.json")
    assert not reading.problems
    assert got == flash


def test_longer_lists_of_ratios_belong_to_the_stages_behind() -> None:
    flash = mf.flash()
    config = mf.hf_config(flash, compress_ratios=[*flash.compress_ratios, 0, 0, 0])
    assert hparams.from_hf(config, "config.json")[0] == flash


def test_bad_config_values_are_listed_together() -> None:
    config = mf.hf_config(
        mf.small(), num_key_value_heads=2, scoring_func="softmax", tie_word_embeddings=True,
        hidden_size="wide", compress_ratios=[0], o_groups=None,
    )  # fmt: skip
    got, reading = hparams.from_hf(config, "config.json")
    assert got is None
    assert {p.where for p in reading.problems} == {
        "key num_key_value_heads", "key scoring_func", "key tie_word_embeddings", "key hidden_size",
        "key compress_ratios", "key o_groups",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"engram_layer_ids": [1, 14]},
        {"kv_source_layer_ids": [2, 8]},
        {"architectures": ["DeepseekV41ForCausalLM"]},
        {"architectures": None, "model_type": "deepseek_v4_1"},
    ],
)
def test_v41_checkpoints_are_refused_by_name(change: dict[str, object]) -> None:
    got, reading = hparams.from_hf(mf.hf_config(mf.small(), **change), "config.json")
    assert got is None and "DeepSeek-V4.1" in str(reading.problems[0])


def test_draft_configuration_in_every_layout() -> None:
    flash = mf.flash()
    values = {"block_size": 5, "markov_rank": 256, "noise": 128799}
    ids = np.array([40, 41, 42], np.int32)
    keys: dict[str | None, dict[str, object]] = {
        "lucebox": {
            "general.architecture": "deepseek4-dflash-draft",
            "deepseek4-dflash-draft.dflash.block_size": 5,
            "deepseek4-dflash-draft.dflash.dspark.markov_rank": 256,
            "deepseek4-dflash-draft.dflash.dspark.vocab_size": 129280,
            "deepseek4-dflash-draft.dflash.n_target_layers": 3,
            "deepseek4-dflash-draft.dflash.mask_token_id": values["noise"],
            "deepseek4-dflash-draft.dflash.capture_layer_ids": ids,
        },
        "dspark": {
            "general.architecture": "deepseek4-dspark",
            "deepseek4.dspark.block_size": 5,
            "deepseek4.dspark.markov_rank": 256,
            "deepseek4.dspark.noise_token_id": values["noise"],
            "deepseek4.dspark.target_layers": ids,
        },
        "mtp": {
            "general.architecture": "deepseek4-dspark",
            "dspark.block_size": 5,
            "dspark.markov_rank": 256,
            "dspark.noise_token_id": values["noise"],
            "dspark.target_layer_ids": ids,
        },
        "dflash": {
            "general.architecture": "dflash",
            "dflash.block_size": 5,
            "dflash.mask_token_id": values["noise"],
            "target_layers": ids + 1,
        },
        None: {
            "dspark_block_size": 5,
            "dspark_markov_rank": 256,
            "dspark_noise_token_id": values["noise"],
            "dspark_target_layer_ids": [40, 41, 42],
        },
    }
    for scheme, given in keys.items():
        specs = tensors.draft_specs(flash, DRAFT, scheme or "dspark")  # type: ignore[arg-type]
        shapes = {s.gguf if scheme else s.hf: s.shape for s in specs}
        got, reading = hparams_draft.draft_config(given, shapes, flash, scheme, "d")  # type: ignore[arg-type]
        assert got == DRAFT, (scheme, [str(p) for p in reading.problems])
    wrong = {**keys["lucebox"], "deepseek4-dflash-draft.dflash.dspark.vocab_size": 5}
    wrong["deepseek4-dflash-draft.dflash.capture_layer_ids"] = np.array([40, 41, 43])
    specs = tensors.draft_specs(flash, DRAFT, "lucebox")
    got, reading = hparams_draft.draft_config(
        wrong, {s.gguf: s.shape for s in specs}, flash, "lucebox", "d"
    )
    assert got is None and len(reading.problems) == 2


def test_draft_experts_may_differ_from_the_target() -> None:
    fewer = dataclasses.replace(DRAFT, num_experts=8)
    shapes = {s.key: s.shape for s in tensors.draft_specs(mf.flash(), fewer) if s.layer == 0}
    assert shapes["ffn.experts.w1"] == (8, 2048, 4096) and shapes["ffn.gate.bias"] == (8,)
