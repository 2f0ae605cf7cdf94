"""Opening models: reference files, full-size headers, every kind of difference, reports."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import model_files as mf
import numpy as np
import pytest

from ds4jax import formats, model_file, quant, tensors
from ds4jax.config import DraftConfig, ModelConfig
from ds4jax.errors import ModelFileError
from ds4jax.tensors import TensorSpec

SMALL = mf.small()


def problems_of(path: Path | str, **kwargs: Any) -> list[str]:
    with pytest.raises(ModelFileError) as caught:
        model_file.open_model(path, **kwargs)
    assert caught.value.problems
    return [str(p) for p in caught.value.problems]


def small_table(**types: int) -> list[mf.Tensor]:
    return mf.with_values(mf.tensor_table(tensors.specs(SMALL), types))


def write_small(path: Path, table: list[mf.Tensor] | None = None, **kwargs: Any) -> Path:
    pairs = kwargs.pop("pairs", None) or mf.gguf_pairs(SMALL)
    return mf.write_gguf(path, pairs, small_table() if table is None else table, **kwargs)


def spec_of(model: model_file.ModelFile, key: str, layer: int | None) -> TensorSpec:
    return next(s for s in model.specs() if (s.key, s.layer) == (key, layer))


# --- oracle files -----------------------------------------------------------------------------


def oracle_ggufs(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "oracle").glob("*/*.gguf"))


def test_dequantised_tensors_are_bit_exact(data_dir: Path) -> None:
    compared = 0
    for path in oracle_ggufs(data_dir):
        name = path.name.removeprefix("model.").removesuffix(".gguf")
        reference = np.load(path.parent / f"gguf_{name}.npz")
        model = model_file.open_model(path)
        by_name = {s.gguf: s for s in model.specs()}
        for key in reference.files:
            if key.startswith("w."):
                want = reference[key]
                got = model.read_float32(by_name[key[2:]])
                assert got.shape == want.shape and got.dtype == np.float32
                np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
                compared += 1
        assert not model.check_values()
    assert compared == 36


@pytest.mark.parametrize(("name", "kind"), [("w16", "F16"), ("w128", "Q8_0_ROCMFPX")])
def test_checkpoint_and_gguf_are_the_same_model(data_dir: Path, name: str, kind: str) -> None:
    hf = model_file.open_model(data_dir / "oracle" / name)
    gguf = model_file.open_model(data_dir / "oracle" / name / f"model.{kind}.gguf")
    same = dataclasses.replace(hf.model_config, max_position_embeddings=4096)
    assert same == gguf.model_config
    assert [s.name for s in hf.specs()] == [s.name for s in gguf.specs()]
    assert not hf.check_values() and hf.tokenizer_source is None and gguf.tokenizer_source is None
    for spec in hf.specs():
        if spec.kind == "table":
            np.testing.assert_array_equal(hf.read_table(spec), gguf.read_table(spec))
            assert hf.read_table(spec).dtype == np.int32
            continue
        a, b = hf.read_float32(spec), gguf.read_float32(spec)
        assert a.shape == b.shape == spec.shape
        # Scale steps of 2^-10 cost small weights up to a tenth; a wrong tensor differs by 1.4.
        assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(a), spec.name


def test_slices_equal_the_whole(data_dir: Path) -> None:
    for path in [data_dir / "oracle/w16", data_dir / "oracle/w16/model.Q3_0_ROCMFPX.gguf"]:
        model = model_file.open_model(path)
        for spec in model.specs()[:40]:
            if len(spec.shape) > 1 and spec.kind != "table":
                whole = model.read_float32(spec)
                part = model.read_float32(spec, slice(1, 3))
                np.testing.assert_array_equal(part, whole[1:3])


def test_reading_a_gguf_copies_nothing(data_dir: Path) -> None:
    model = model_file.open_model(data_dir / "oracle/w16/model.Q8_0.gguf")
    for spec in model.specs():
        if spec.kind != "table":
            data = model.read(spec).data
            assert not data.flags.owndata and not data.flags.writeable
    with pytest.raises(ValueError, match="read_table"):
        model.read(spec_of(model, "ffn.gate.tid2eid", 0))


def test_types_without_a_packed_form_are_said_with_their_bytes(data_dir: Path) -> None:
    model = model_file.open_model(data_dir / "oracle/w16/model.Q3_0_ROCMFPX.gguf")
    (note,) = [n for n in model.notes if "q5_1" in n]
    held = [t for t in model.tensors.values() if t.type_name == "q5_1"]
    assert f"{len(held)} tensors" in note and str(sum(t.nbytes for t in held)) in note


# --- full-size headers ------------------------------------------------------------------------


def test_flash_as_antirez_writes_it(tmp_path: Path) -> None:
    flash = mf.flash()
    types = {
        "embedding": 1, "head": 8, "attention": 8, "shared": 8, "hyper_connection": 1,
        "compressor": 1, "indexer": 1, "router": 1, "experts_gate_up": 16, "experts_down": 10,
    }  # fmt: skip
    table = mf.tensor_table(tensors.specs(flash), types)
    for t in table:
        name = str(t.name)
        if "_base" in name or "_scale" in name or name.endswith(".bias"):
            t.type_id = 0
    assert len(table) == 1328
    pairs = mf.gguf_pairs(flash, extra=[("deepseek4.nextn_predict_layers", mf.U32, 1)])
    path = mf.write_gguf(tmp_path / "flash.gguf", pairs, table)
    start = time.process_time()
    model = model_file.open_model(path)
    assert time.process_time() - start < 1.0
    assert model.config == flash and model.num_mtp == 0 and len(model.tensors) == 1328
    report = model.describe(with_tensors=True)
    assert report["totals"]["tensors"] == len(report["tensors"]) == 1328
    assert 284e9 < report["totals"]["parameters"] < 285e9
    assert report["totals"]["by_type"]["iq2_xxs"]["tensors"] == 86
    assert report["totals"]["bytes"] == sum(t.nbytes for t in table)
    assert report["architecture"] == "deepseek4" and not report["problems"]
    json.dumps(report)


def test_flash_with_an_mtp_layer(tmp_path: Path) -> None:
    flash = mf.flash()
    specs = [*tensors.specs(flash), *tensors.mtp_specs(flash, 1)]
    pairs = mf.replaced(mf.gguf_pairs(flash), "deepseek4.block_count", mf.U32, 44)
    key = "deepseek4.attention.compress_ratios"
    pairs = mf.replaced(pairs, key, mf.ARRAY, (mf.I32, [*flash.compress_ratios, 0]))
    table = mf.tensor_table(specs, {"experts_gate_up": 39, "experts_down": 39})
    model = model_file.open_model(mf.write_gguf(tmp_path / "flash.gguf", pairs, table))
    assert model.config == flash and model.num_mtp == 1 and not model.extra
    report = model.describe(with_tensors=True)
    assert report["mtp"] == {"blocks": 1, "loaded": False}
    assert {r["role"] for r in report["tensors"]} == {"model", "mtp"}
    assert any("MTP" in note for note in model.notes)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("scheme", ["lucebox", "dspark", "mtp", "dflash"])
def test_drafters_in_every_gguf_layout(tmp_path: Path, scheme: Any, merged: bool) -> None:
    if merged and scheme in ("lucebox", "dflash"):
        pytest.skip("these layouts share block names with the model and are files of their own")
    ids = (mf.I32, [1, 2, 3])
    keys: dict[str, list[mf.Pair]] = {
        "lucebox": [
            ("general.architecture", mf.STRING, "deepseek4-dflash-draft"),
            ("deepseek4-dflash-draft.dflash.block_size", mf.U32, 5),
            ("deepseek4-dflash-draft.dflash.mask_token_id", mf.U32, 63),
            ("deepseek4-dflash-draft.dflash.capture_layer_ids", mf.ARRAY, ids),
            ("deepseek4-dflash-draft.dflash.dspark.markov_rank", mf.U32, 16),
        ],
        "dspark": [
            ("general.architecture", mf.STRING, "deepseek4-dspark"),
            ("deepseek4.dspark.block_size", mf.U32, 5),
            ("deepseek4.dspark.noise_token_id", mf.U32, 63),
            ("deepseek4.dspark.target_layers", mf.ARRAY, ids),
            ("deepseek4.dspark.markov_rank", mf.U32, 16),
        ],
        "mtp": [
            ("general.architecture", mf.STRING, "deepseek_v4_flash_dspark_draft"),
            ("dspark.block_size", mf.U32, 5),
            ("dspark.noise_token_id", mf.U32, 63),
            ("dspark.target_layer_ids", mf.ARRAY, (mf.U32, [1, 2, 3])),
            ("dspark.markov_rank", mf.U32, 16),
        ],
        "dflash": [
            ("general.architecture", mf.STRING, "dflash"),
            ("dflash.block_size", mf.U32, 5),
            ("dflash.mask_token_id", mf.U32, 63),
            ("dflash.target_layers", mf.ARRAY, ids),
        ],
    }
    want = DraftConfig(
        num_stages=3, block_size=5, markov_rank=16, noise_token_id=63, target_layer_ids=(1, 2, 3)
    )
    draft_table = mf.with_values(mf.tensor_table(tensors.draft_specs(SMALL, want, scheme)))
    draft_table = [t for t in draft_table if not str(t.name).endswith(("proj.bias", "ce.bias"))]
    assert len(draft_table) == 81
    if merged:
        path = tmp_path / "merged.gguf"
        pairs = mf.gguf_pairs(SMALL, extra=keys[scheme][1:])
        mf.write_gguf(path, pairs, [*small_table(), *draft_table])
        model = model_file.open_model(path)
        assert not model.extra
        draft = model.draft
        roles = [r["role"] for r in model.describe(with_tensors=True)["tensors"]]
        assert roles.count("draft") == 81
    else:
        model = model_file.open_model(write_small(tmp_path / "target.gguf"))
        path = mf.write_gguf(tmp_path / "draft.gguf", keys[scheme], draft_table)
        draft = model_file.open_draft(path, model)
        assert "--draft" in problems_of(path)[0]
    assert draft is not None and not draft.problems
    shifted = dataclasses.replace(want, target_layer_ids=(1, 2, 3))
    assert draft.require(str(path)) == shifted
    assert len(draft.tensors) == 81
    spec = next(s for s in tensors.draft_specs(SMALL, want) if s.key == "main_proj")
    assert draft.read(spec).decode().shape == (64, 192)


def test_a_broken_drafter_does_not_stop_the_model(tmp_path: Path) -> None:
    want = DraftConfig(
        num_stages=2, block_size=5, markov_rank=16, noise_token_id=63, target_layer_ids=(1, 2)
    )
    extra: list[mf.Pair] = [
        ("deepseek4.dspark.block_size", mf.U32, 5),
        ("deepseek4.dspark.noise_token_id", mf.U32, 64),
        ("deepseek4.dspark.target_layers", mf.ARRAY, (mf.I32, [1, 4])),
        ("deepseek4.dspark.markov_rank", mf.U32, 16),
    ]
    table = mf.tensor_table(tensors.draft_specs(SMALL, want))
    path = tmp_path / "m.gguf"
    mf.write_gguf(path, mf.gguf_pairs(SMALL, extra=extra), [*small_table(), *table])
    model = model_file.open_model(path)
    assert model.draft is not None and model.draft.config is None
    text = "\n".join(str(p) for p in model.draft.problems)
    assert "noise token" in text and "target layers" in text
    assert any("drafter cannot be used" in n for n in model.notes)
    with pytest.raises(ModelFileError):
        model.draft.require(str(path))
    # Right numbers, but a tensor missing, one of another shape and one of unknown name.
    extra[1] = ("deepseek4.dspark.noise_token_id", mf.U32, 63)
    extra[2] = ("deepseek4.dspark.target_layers", mf.ARRAY, (mf.I32, [1, 2]))
    table = [t for t in table if t.name != "dspark.norm.weight"]
    next(t for t in table if t.name == "dspark.main_proj.weight").dims = [64, 64]
    table.append(mf.Tensor("dspark.rotation.weight", [4], 0))
    mf.write_gguf(path, mf.gguf_pairs(SMALL, extra=extra), [*small_table(), *table])
    draft = model_file.open_model(path).draft
    assert draft is not None
    assert {p.where for p in draft.problems} == {
        "tensor dspark.norm.weight", "tensor dspark.main_proj.weight",
        "tensor dspark.rotation.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cfg", "experts", "behind", "count"),
    [
        pytest.param(mf.flash(), "fp4", "nothing", 67612, marks=pytest.mark.slow),
        (mf.flash(), "fp4", "mtp", 69187),
        (mf.flash(), "fp4", "dspark", 72317),
        pytest.param(mf.flash(), "fp8", "mtp", 69187, marks=pytest.mark.slow),
    ],
    ids=["flash", "flash-mtp", "flash-dspark", "base"],
)
def test_published_checkpoints(
    tmp_path: Path, cfg: ModelConfig, experts: str, behind: str, count: int
) -> None:
    entries = mf.hf_entries(tensors.specs(cfg), experts=experts)
    config = mf.hf_config(cfg)
    if behind == "mtp":
        entries |= mf.hf_entries(tensors.mtp_specs(cfg, 1), experts=experts)
    if behind == "dspark":
        draft = DraftConfig(num_stages=3, block_size=5, markov_rank=256, noise_token_id=128799,
                            target_layer_ids=(40, 41, 42))  # fmt: skip
        specs = [s for s in tensors.draft_specs(cfg, draft) if s.key != "confidence_head.proj.bias"]
        entries |= mf.hf_entries(specs)
        config |= {
            "compress_ratios": [*cfg.compress_ratios, 0, 0, 0],
            "dspark_block_size": 5, "dspark_markov_rank": 256, "dspark_noise_token_id": 128799,
            "dspark_target_layer_ids": [40, 41, 42],
        }  # fmt: skip
    assert len(entries) == count
    root = mf.write_checkpoint(tmp_path / "m", config, entries, shards=6)
    start = time.process_time()
    model = model_file.open_model(root)
    assert time.process_time() - start < 4.0
    assert model.config == cfg and len(model.tensors) == 1328 and not model.extra
    assert model.num_mtp == (behind == "mtp")
    assert (model.draft is not None) == (behind == "dspark")
    if model.draft is not None:
        assert not model.draft.problems and len(model.draft.tensors) == 81
    w1 = model.tensors["layers.5.ffn.experts.w1"]
    assert len(w1.parts) == 256
    assert w1.type_name == ("fp4" if experts == "fp4" else "f8_e4m3_f32")
    packed = model.read(w1.spec, slice(3, 5))
    if experts == "fp4":
        assert packed.data.shape == (2, 2048, 2048)
        assert packed.side["scale_e8m0"].shape == (2, 2048, 128)
    else:
        assert packed.data.shape == (2, 2048, 4096)
        assert packed.side["scale_f32"].shape == (2, 16, 32)
    report = model.describe()
    assert report["totals"]["bytes"] == sum(
        math.prod(shape) * mf.SIZES[dtype] for dtype, shape in entries.values()
    )


@pytest.mark.slow
def test_pro_checkpoint(tmp_path: Path) -> None:
    pro = mf.pro()
    entries = mf.hf_entries(tensors.specs(pro))
    model = model_file.open_model(
        mf.write_checkpoint(tmp_path / "m", mf.hf_config(pro), entries, 9)
    )
    assert model.config == pro
    assert 1.5e12 < model.describe()["totals"]["parameters"] < 1.6e12


# --- other spellings of a checkpoint ----------------------------------------------------------

TO_TRANSFORMERS = [
    ("embed.", "model.embed_tokens."), ("head.", "lm_head."), ("norm.", "model.norm."),
    ("hc_head_", "model.hc_head.hc_"),
]  # fmt: skip
IN_LAYER = [
    (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."),
    (".attn.indexer.compressor.norm.", ".self_attn.compressor.indexer.kv_norm."),
    (".attn.indexer.compressor.ape", ".self_attn.compressor.indexer.position_bias"),
    (".attn.indexer.compressor.wkv.", ".self_attn.compressor.indexer.kv_proj."),
    (".attn.indexer.compressor.wgate.", ".self_attn.compressor.indexer.gate_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.weights_proj."),
    (".attn.compressor.norm.", ".self_attn.compressor.kv_norm."),
    (".attn.compressor.ape", ".self_attn.compressor.position_bias"),
    (".attn.compressor.wkv.", ".self_attn.compressor.kv_proj."),
    (".attn.compressor.wgate.", ".self_attn.compressor.gate_proj."),
    (".attn.attn_sink", ".self_attn.sinks"), (".attn.q_norm.", ".self_attn.q_a_norm."),
    (".attn.kv_norm.", ".self_attn.kv_norm."), (".attn.wkv.", ".self_attn.kv_proj."),
    (".attn.wq_a.", ".self_attn.q_a_proj."), (".attn.wq_b.", ".self_attn.q_b_proj."),
    (".attn.wo_a.", ".self_attn.o_a_proj."), (".attn.wo_b.", ".self_attn.o_b_proj."),
    (".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"), (".ffn.gate.", ".mlp.gate."),
    (".ffn.shared_experts.w1.", ".mlp.shared_experts.gate_proj."),
    (".ffn.shared_experts.w2.", ".mlp.shared_experts.down_proj."),
    (".ffn.shared_experts.w3.", ".mlp.shared_experts.up_proj."),
]  # fmt: skip


def transformers_name(name: str) -> str:
    for ours, theirs in TO_TRANSFORMERS:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    for ours, theirs in IN_LAYER:
        if ours in name:
            return "model." + name.replace(ours, theirs)
    raise AssertionError(name)


def test_a_checkpoint_saved_by_transformers(data_dir: Path, tmp_path: Path) -> None:
    """Renamed tensors and stacked experts, gate first."""
    import safetensors.numpy

    source = model_file.open_model(data_dir / "oracle/w16")
    arrays: dict[str, Any] = {}
    for spec in source.specs():
        if spec.kind == "table":
            arrays[transformers_name(spec.hf)] = source.read_table(spec).astype(np.int64)
        elif spec.num_experts is None:
            arrays[transformers_name(spec.hf)] = source.read_float32(spec)
        elif spec.key.endswith("w2"):
            arrays[f"model.layers.{spec.layer}.mlp.experts.down_proj"] = source.read_float32(spec)
        elif spec.key.endswith("w1"):
            up = spec_of(source, "ffn.experts.w3", spec.layer)
            fused = np.concatenate([source.read_float32(spec), source.read_float32(up)], axis=1)
            arrays[f"model.layers.{spec.layer}.mlp.experts.gate_up_proj"] = fused
    shutil.copy(data_dir / "oracle/w16/config.json", tmp_path)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    model = model_file.open_model(tmp_path)
    assert not model.extra and not model.check_values()
    assert [s.name for s in model.specs()] == [s.name for s in source.specs()]
    for spec in source.specs():
        if spec.kind == "table":
            np.testing.assert_array_equal(model.read_table(spec), source.read_table(spec))
        else:
            np.testing.assert_array_equal(model.read_float32(spec), source.read_float32(spec))
    w3 = spec_of(model, "ffn.experts.w3", 2)
    np.testing.assert_array_equal(model.read_float32(w3, slice(2, 4)), source.read_float32(w3)[2:4])


# --- formats with something beside the bytes --------------------------------------------------


def test_fp8_and_fp4_of_a_checkpoint(tmp_path: Path) -> None:
    cfg = mf.small(hidden_size=256, moe_intermediate_size=128, q_lora_rank=160)
    entries = mf.hf_entries(tensors.specs(cfg))
    root = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries)
    head, size = mf.safetensors_head(entries)
    rng = np.random.default_rng(5)
    raw = rng.integers(100, 140, size - len(head), np.uint8)
    (root / "model.safetensors").write_bytes(head + raw.tobytes())
    model = model_file.open_model(root)
    data = model_file.checkpoint.open_checkpoint(root)
    spec = spec_of(model, "attn.wq_b", 1)
    want = quant.decode(
        "hf_fp8_e4m3_block128",
        data.packed("layers.1.attn.wq_b.weight"),
        scale_e8m0=data.array("layers.1.attn.wq_b.scale"),
    )
    np.testing.assert_array_equal(model.read_float32(spec), want)
    np.testing.assert_array_equal(model.read_float32(spec, slice(0, 100)), want[:100])
    with pytest.raises(ValueError, match="do not start at a tile"):
        model.read(spec, slice(3, 100))
    experts = spec_of(model, "ffn.experts.w2", 2)
    got = model.read_float32(experts)
    for e in range(cfg.num_experts):
        stem = f"layers.2.ffn.experts.{e}.w2"
        one = quant.decode(
            "hf_fp4_e2m1", data.packed(stem + ".weight"), scale_e8m0=data.array(stem + ".scale")
        )
        np.testing.assert_array_equal(got[e], one)


def test_nan_scales_and_codes_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    cfg = mf.small(hidden_size=128, moe_intermediate_size=64)
    entries = mf.hf_entries(tensors.specs(cfg))
    root = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries)
    assert not model_file.open_model(root).check_values()
    file = model_file.checkpoint.open_checkpoint(root)
    bad = {
        "layers.0.ffn.experts.2.w1.scale": 255,
        "layers.1.attn.wkv.scale": 255,
        "layers.2.attn.wq_a.weight": 0x7F,
    }
    with open(root / "model.safetensors", "r+b") as out:
        for name, value in bad.items():
            out.seek(file.tensors[name].start)
            out.write(bytes([value]))
        out.seek(file.tensors["layers.0.attn_norm.weight"].start)
        out.write(b"\x80\x7f")  # bfloat16 infinity
        out.seek(file.tensors["layers.0.ffn.gate.tid2eid"].start)
        out.write((4).to_bytes(8, "little"))
    found = model_file.open_model(root).check_values()
    assert [p.where for p in found] == [
        "tensor layers.0.attn_norm.weight", "tensor layers.0.ffn.gate.tid2eid",
        "tensor layers.0.ffn.experts.w1", "tensor layers.1.attn.wkv.weight",
        "tensor layers.2.attn.wq_a.weight",
    ]  # fmt: skip
    assert all(p.file == "model.safetensors" and p.fix for p in found)


@pytest.mark.parametrize(
    ("type_id", "at", "value"),
    [(39, 0, 255), (100, 17, 0x7F), (101, 16, 0xFF), (102, 24, 0x80), (103, 32, 0x7F),
     (104, 13, 0x7F), (8, 1, 0x7C)],
)  # fmt: skip
def test_invalid_scale_bytes_of_a_gguf_are_found(
    tmp_path: Path, type_id: int, at: int, value: int
) -> None:
    table = small_table(attention=type_id)
    path = write_small(tmp_path / "m.gguf", table)
    model = model_file.open_model(path)
    assert not model.check_values()
    held = model_file.gguf.open_gguf(path).tensors["blk.1.attn_kv.weight"]
    with open(path, "r+b") as out:
        out.seek(held.start + 3 * held.type.nbytes + at)
        out.write(bytes([value]))
    (problem,) = model_file.open_model(path).check_values()
    assert problem.where == "tensor blk.1.attn_kv.weight" and problem.file == "m.gguf"


def rocmfp2_block(reading: str, rng: np.random.Generator, count: int) -> bytes:
    """Blocks as each writer's statistics have them."""
    shares = {"s40": (0.18, 0.32, 0.32, 0.18), "affine": (0.14, 0.33, 0.36, 0.17)}
    p = shares.get(reading, (0.31, 0.38, 0.23, 0.08))
    codes = rng.choice(4, (count, 8, 4), p=p)
    payload = (codes << np.array([0, 2, 4, 6])).sum(axis=-1).astype(np.uint8)
    low = rng.integers(40, 60, (count, 1), np.uint8)
    high = low + (rng.integers(4, 7, (count, 1), np.uint8) if reading == "affine" else 0)
    if reading == "signed":
        high = high | (rng.integers(0, 2, (count, 1), np.uint8) << 7)
    return np.concatenate([payload, low, high], axis=1).astype(np.uint8).tobytes()


def rocmfp2_file(path: Path, reading: str, pairs: list[mf.Pair] | None = None) -> Path:
    rng = np.random.default_rng(7)
    table = small_table(experts_gate_up=107, experts_down=107)
    for t in table:
        if t.type_id == 107:
            t.data = rocmfp2_block(reading, rng, t.nbytes // 10)
    return write_small(path, table, pairs=mf.gguf_pairs(SMALL) + (pairs or []))


@pytest.mark.parametrize("reading", ["s40", "fixed", "signed", "affine"])
def test_reading_of_type_107_is_decided_and_reported(tmp_path: Path, reading: str) -> None:
    path = rocmfp2_file(tmp_path / "m.gguf", reading)
    model = model_file.open_model(path)
    assert model.rocmfp2.reading == reading and model.rocmfp2.tensors == 12
    assert any(f"read as {reading}" in n and "--rocmfp2" in n for n in model.notes)
    report = model.describe()["rocmfp2"]
    assert report["reading"] == reading and report["option"] == "auto"
    assert report["decided_by"] == "data"
    assert "blk.0.ffn_gate_exps.weight" in report["reason"]
    spec = spec_of(model, "ffn.experts.w1", 0)
    format = {"fixed": "rocmfp2_m1012"}.get(reading, f"rocmfp2_{reading}")
    want = quant.decode(format, model.read(spec).data)
    np.testing.assert_array_equal(model.read_float32(spec), want)
    assert not model.check_values()
    for other in ("s40", "fixed", "signed", "affine"):
        forced = model_file.open_model(path, rocmfp2=other)
        assert forced.rocmfp2.reading == other and forced.rocmfp2.option == other
        if reading == "signed" and other != "signed":
            assert "signed" in str(forced.check_values()[0])


def test_the_file_says_how_its_type_107_is_read(tmp_path: Path) -> None:
    def said(value: str) -> Path:
        pairs: list[mf.Pair] = [(model_file.READING_KEY, mf.STRING, value)]
        return rocmfp2_file(tmp_path / "m.gguf", "s40", pairs)

    model = model_file.open_model(said("affine"))  # whatever the data looks like
    assert (model.rocmfp2.reading, model.rocmfp2.decided_by) == ("affine", "key")
    assert model.tensors[spec_of(model, "ffn.experts.w1", 0).name].format == "rocmfp2_affine"
    assert any("read as affine (key ds4jax.rocmfp2_reading)" in n for n in model.notes)
    forced = model_file.open_model(said("affine"), rocmfp2="fixed")
    assert (forced.rocmfp2.reading, forced.rocmfp2.decided_by) == ("fixed", "option")
    assert any("the file says affine" in n for n in forced.notes)
    (problem,) = problems_of(said("other"))
    assert "ds4jax.rocmfp2_reading: found 'other', expected one of s40" in problem
    assert model_file.open_model(said("other"), rocmfp2="s40").rocmfp2.reading == "s40"


def test_reading_of_type_107_that_cannot_be_told(tmp_path: Path) -> None:
    path = write_small(tmp_path / "m.gguf", small_table(experts_gate_up=107))  # all zero
    (problem,) = problems_of(path)
    assert "--rocmfp2" in problem and "blk.0.ffn_gate_exps.weight" in problem
    assert model_file.open_model(path, rocmfp2="affine").config == SMALL
    with pytest.raises(ValueError, match="must be one of"):
        model_file.open_model(path, rocmfp2="other")


def gumix(tables: list[tuple[int, int]]) -> bytes:
    """A side table for gate (0), up (1) and down (2) experts of layers."""
    out = b"GUMIXs1\0" + struct.pack("<II", len(tables), 0)
    books = np.array([-1.0, -0.25, 0.25, 1.0], np.float32).view(np.uint32) >> 16
    for layer, surface in tables:
        shape = (64, 32) if surface == 2 else (32, 64)
        out += struct.pack("<7I", layer, surface, 4, *shape, 2, 4)
        out += bytes([0, 1, 1, 1]) + np.tile(books.astype("<u2"), 8).tobytes()
    return out


@pytest.mark.parametrize("beside", [False, True])
def test_mix_types_need_their_side_tables(tmp_path: Path, beside: bool) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(1)
    table = small_table(experts_gate_up=106)
    for t in table:
        if t.type_id == 106:
            block = rng.integers(0, 128, (t.nbytes // 10, 10)).astype(np.uint8)
            block[:, 8:] &= 0x3F
            t.data = block.tobytes()
    found = problems_of(write_small(path, table))
    assert len(found) == 8 and all("without codebooks" in x for x in found)
    side = gumix([(layer, surface) for layer in range(4) for surface in (0, 1)])
    if beside:
        (tmp_path / "m.gguf.gumix.bin").write_bytes(side)
        write_small(path, table)
    else:
        extra: list[mf.Pair] = [("deepseek4.gumix.sidecar", mf.ARRAY, (mf.U8, list(side)))]
        write_small(path, table, pairs=mf.gguf_pairs(SMALL, extra=extra))
    model = model_file.open_model(path)
    assert not model.check_values()
    spec = spec_of(model, "ffn.experts.w3", 2)
    whole = model.read(spec)
    assert whole.side["modes"].tolist() == [0, 1, 1, 1]
    np.testing.assert_array_equal(
        model.read_float32(spec, slice(1, 3)), quant.decode(
            "rocmfp2_mix", whole.data, **whole.side)[1:3]
    )  # fmt: skip
    (tmp_path / "m.gguf.gumix.bin").unlink(missing_ok=True)
    for wrong, expected, count in (
        (gumix([(0, 0), (0, 0)]), "blk.0.ffn_gate_exps.weight a second time", 1),
        (gumix([(9, 1)]), "blk.9.ffn_up_exps.weight", 9),
        (b"nonsense" * 4, "magic", 1),
    ):
        extra = [("deepseek4.gumix.sidecar", mf.ARRAY, (mf.U8, list(wrong)))]
        found = problems_of(write_small(path, table, pairs=mf.gguf_pairs(SMALL, extra=extra)))
        assert expected in "\n".join(found) and len(found) == count


@pytest.mark.parametrize("count", [1, 4, None])
def test_nvfp4_with_its_factor(tmp_path: Path, count: int | None) -> None:
    rng = np.random.default_rng(2)
    table = small_table(experts_gate_up=40)
    for t in table:
        if t.type_id == 40:
            t.data = rng.integers(0, 0x70, t.nbytes, np.uint8).tobytes()
    factor = np.array([0.5, 2.0, 4.0, 0.25][:count], "<f4")
    if count is not None:
        table.append(mf.Tensor("blk.1.ffn_up_exps.scale", [count], 0, factor.tobytes()))
        table.append(mf.Tensor("blk.1.ffn_up_exps.input_scale", [count], 0, factor.tobytes()))
    model = model_file.open_model(write_small(tmp_path / "m.gguf", table))
    spec = spec_of(model, "ffn.experts.w3", 1)
    packed = model.read(spec)
    plain = quant.decode("nvfp4", packed.data)
    factors = np.broadcast_to(1 if count is None else factor, (4,))
    np.testing.assert_array_equal(packed.decode(), plain * factors[:, None, None])
    part = model.read_float32(spec, slice(2, 4))
    np.testing.assert_array_equal(part, (plain * factors[:, None, None])[2:4])
    assert "unknown" not in model.extra
    assert ("activation scale" in model.extra) == (count is not None)


# --- differences ------------------------------------------------------------------------------


def test_everything_that_differs_is_one_error(tmp_path: Path) -> None:
    table = {str(t.name): t for t in small_table()}
    table["blk.0.attn_q_a.weight"].dims = [64, 31]
    table["blk.1.ffn_gate_exps.weight"].dims = [64, 32, 5]
    table["blk.0.ffn_gate_tid2eid.weight"].type_id = 0
    table["blk.2.attn_norm.weight"].type_id = 26
    del table["blk.3.hc_ffn_fn.weight"]
    del table["output.weight"]
    extra = [
        mf.Tensor("blk.0.attn_compressor_kv.weight", [64, 64], 0),
        mf.Tensor("blk.2.indexer.proj.weight", [64, 2], 0),
        mf.Tensor("blk.7.attn_norm.weight", [64], 0),
        mf.Tensor("blk.7.ffn_norm.weight", [64], 0),
        mf.Tensor("blk.0.engram.table", [64], 0),
    ]
    path = write_small(tmp_path / "m.gguf", [*table.values(), *extra])
    with pytest.raises(ModelFileError) as caught:
        model_file.open_model(path)
    # An engram tensor is another architecture: nothing else is worth saying.
    assert [p.where for p in caught.value.problems] == ["key general.architecture"]
    path = write_small(tmp_path / "m.gguf", [*table.values(), *extra[:-1]])
    with pytest.raises(ModelFileError) as caught:
        model_file.open_model(path)
    assert {p.where for p in caught.value.problems} == {
        "tensor blk.0.attn_q_a.weight", "tensor blk.1.ffn_gate_exps.weight",
        "tensor blk.0.ffn_gate_tid2eid.weight", "tensor blk.2.attn_norm.weight",
        "tensor blk.3.hc_ffn_fn.weight", "tensor output.weight",
        "tensor blk.0.attn_compressor_kv.weight", "tensor blk.2.indexer.proj.weight", "layer 7",
    }  # fmt: skip
    text = str(caught.value)
    assert "m.gguf: tensor blk.0.attn_q_a.weight: found shape [31, 64], expected [32, 64]" in text
    assert all(p.fix for p in caught.value.problems)


def test_a_config_of_another_size_lists_every_tensor(tmp_path: Path) -> None:
    wide = mf.small(hidden_size=96)
    path = tmp_path / "m.gguf"
    mf.write_gguf(path, mf.gguf_pairs(wide), small_table())
    with pytest.raises(ModelFileError) as caught:
        model_file.open_model(path)
    depends = [s for s in tensors.specs(wide) if s.shape not in
               {t.shape for t in tensors.specs(SMALL) if t.name == s.name}]  # fmt: skip
    assert {p.where for p in caught.value.problems} == {f"tensor {s.gguf}" for s in depends}
    assert len(depends) > 50


def test_differences_of_a_checkpoint_are_one_error(tmp_path: Path) -> None:
    entries = mf.hf_entries(tensors.specs(mf.small(hidden_size=128)))
    cfg = mf.small(hidden_size=128)
    entries["norm.weight"] = ("BF16", (127,))
    entries["layers.0.attn.wq_a.scale"] = ("BF16", (1, 1))
    entries["layers.0.attn.wkv.scale"] = ("F8_E8M0", (2, 1))
    del entries["layers.0.attn.wo_a.scale"]
    del entries["layers.1.ffn.experts.2.w1.weight"]
    entries["layers.2.ffn.experts.1.w3.weight"] = ("BF16", (32, 128))
    entries["layers.0.ffn.gate.tid2eid"] = ("F32", (64, 2))
    entries["layers.3.attn.q_norm.weight"] = ("I64", (32,))
    entries["layers.9.attn.q_norm.weight"] = ("BF16", (32,))
    entries["layers.0.attn.compressor.ape"] = ("F32", (4, 64))
    entries["embed.scale"] = ("F8_E8M0", (1, 1))
    root = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries)
    with pytest.raises(ModelFileError) as caught:
        model_file.open_model(root)
    assert {p.where for p in caught.value.problems} == {
        "tensor norm.weight", "tensor layers.0.attn.wq_a.scale", "tensor layers.0.attn.wkv.scale",
        "tensor layers.0.attn.wo_a.weight", "tensor layers.1.ffn.experts.2.w1.weight",
        "tensor layers.2.ffn.experts.1.w3.scale", "tensor layers.0.ffn.gate.tid2eid",
        "tensor layers.3.attn.q_norm.weight", "layer 9", "tensor layers.0.attn.compressor.ape",
        "tensor embed.scale",
    }  # fmt: skip


def test_tensors_that_are_not_ours_are_noted(tmp_path: Path) -> None:
    extra = [
        mf.Tensor("vision.patch.weight", [8], 0),
        mf.Tensor("layers.0.ffn.gate.bias_vl", [4], 0),
        mf.Tensor("blk.0.exp_probs_b.bias", [4], 0),
        mf.Tensor("blk.3.ffn_gate_tid2eid.weight", [2, 64], 26),
        mf.Tensor("blk.0.something.weight", [8], 0),
    ]
    model = model_file.open_model(write_small(tmp_path / "m.gguf", [*small_table(), *extra]))
    assert {k: len(v) for k, v in model.extra.items()} == {
        "vision": 2, "router bias": 1, "table": 1, "unknown": 1,
    }  # fmt: skip
    text = "\n".join(model.notes)
    for t in extra:
        assert str(t.name) in text
    roles = [r["role"] for r in model.describe(with_tensors=True)["tensors"]]
    assert roles.count("other") == 5


def test_leading_ones_may_be_dropped(tmp_path: Path) -> None:
    cfg = mf.small(num_experts_per_tok=1, num_experts=4)
    table = mf.with_values(mf.tensor_table(tensors.specs(cfg)))
    for t in table:
        if t.name == "output_hc_scale.weight":
            t.dims = [1, 1]
    path = tmp_path / "m.gguf"
    model = model_file.open_model(mf.write_gguf(path, mf.gguf_pairs(cfg), table))
    assert model.read_float32(spec_of(model, "hc_head_scale", None)).shape == (1,)


# --- other things to open ---------------------------------------------------------------------


def test_paths_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in problems_of(tmp_path / "absent.gguf")[0]
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert "the directory that holds it" in problems_of(tmp_path / "model.safetensors")[0]
    (tmp_path / "text.txt").write_text("hello")
    assert "not a GGUF file" in problems_of(tmp_path / "text.txt")[0]
    (tmp_path / "folder").mkdir()
    assert "config.json" in problems_of(tmp_path / "folder")[0]
    # A file or folder called nano comes before the packaged model.
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path / "nano")
    assert model_file.open_model("nano").config == SMALL


def test_reports_do_without_weights(tmp_path: Path) -> None:
    path = write_small(tmp_path / "m.gguf", small_table(experts_gate_up=107))
    with open(path, "rb") as file:
        head = file.read(16000)
    path.write_bytes(head)
    problems_of(path)
    model = model_file.open_model(path, keep_problems=True)
    report = model.describe(with_tensors=True)
    assert model.config == SMALL and report["problems"] and len(report["tensors"]) > 50
    assert model.rocmfp2.reading is None
    cfg = mf.flash()
    entries = mf.hf_entries(tensors.specs(cfg))
    root = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries, shards=3)
    for shard in root.glob("*.safetensors"):
        shard.unlink()
    (root / "tokenizer.json").write_text("{}")
    report = model_file.open_model(root, keep_problems=True).describe()
    assert len(report["problems"]) == 3 and report["config"]["vocab_size"] == 129280
    assert report["tokenizer"] == {"source": "tokenizer.json", "bytes": 2}
    (root / "model.safetensors.index.json").unlink()
    assert model_file.open_model(root, keep_problems=True).config == cfg
    broken = mf.write_gguf(tmp_path / "b.gguf", mf.gguf_pairs(SMALL)[:-3], small_table())
    model = model_file.open_model(broken, keep_problems=True)
    with pytest.raises(ModelFileError, match="hyper_connection"):
        _ = model.model_config


def test_tokenizer_of_a_gguf_is_described(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(64)]
    extra: list[mf.Pair] = [
        ("tokenizer.ggml.model", mf.STRING, "gpt2"),
        ("tokenizer.ggml.pre", mf.STRING, "joyai-llm"),
        ("tokenizer.ggml.tokens", mf.ARRAY, (mf.STRING, tokens)),
        ("tokenizer.ggml.merges", mf.ARRAY, (mf.STRING, ["t 1"])),
        ("tokenizer.ggml.eos_token_id", mf.U32, 1),
    ]
    path = write_small(tmp_path / "m.gguf", pairs=mf.gguf_pairs(SMALL, extra=extra))
    model = model_file.open_model(path)
    assert isinstance(model.tokenizer_source, dict)
    assert list(model.tokenizer_source["tokenizer.ggml.tokens"]) == tokens
    report = model.describe()["tokenizer"]
    assert report["pre"] == "joyai-llm" and report["tokens"] == 64 and report["merges"] == 1
    short: list[mf.Pair] = [(k, t, (mf.STRING, tokens[:9]) if k.endswith("tokens") else v)
                            for k, t, v in extra]  # fmt: skip
    path = write_small(tmp_path / "m.gguf", pairs=mf.gguf_pairs(SMALL, extra=short))
    assert any("9 tokens for a vocabulary of 64" in n for n in model_file.open_model(path).notes)


def test_no_jax_is_imported(data_dir: Path) -> None:
    code = (
        "import sys; from ds4jax import model_file\n"
        f"m = model_file.open_model({str(data_dir / 'oracle/w16/model.Q3_0_ROCMFPX.gguf')!r})\n"
        "m.describe(True); m.check_values()\n"
        "try: model_file.open_model('/absent')\n"
        "except ValueError: pass\n"
        "assert 'jax' not in sys.modules, 'jax was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=data_dir.parents[1])


def test_a_bad_file_costs_little_beyond_the_imports(tmp_path: Path) -> None:
    """Resident memory of a process that opens hostile files, over one that only imports."""
    paths = []
    cfg = mf.flash()
    table = mf.tensor_table(tensors.specs(cfg), {"experts_gate_up": 101, "experts_down": 101})
    for t in table:
        t.dims = [*t.dims[:-1], int(t.dims[-1]) + 1]
    paths.append(mf.write_gguf(tmp_path / "shapes.gguf", mf.gguf_pairs(cfg), table))
    head = mf.gguf_head([], [], num_pairs=1)[:24] + mf.text("w") + struct.pack("<I", mf.ARRAY)
    words = struct.pack("<IQ", mf.STRING, 1 << 20) + mf.text("ab€𝄞€") * (1 << 20)
    (tmp_path / "words.gguf").write_bytes(head + words[:-1])
    os.truncate(tmp_path / "words.gguf", 1 << 38)
    paths.append(tmp_path / "words.gguf")
    code = (
        "import resource, sys, time\n"
        "from ds4jax import model_file\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    start = time.process_time()\n"
        "    try: model_file.open_model(path)\n"
        "    except ValueError as error: str(error)\n"
        "    else: raise SystemExit('accepted ' + path)\n"
        "    assert time.process_time() - start < 1.5, path\n"
        "assert peak() - before < 256, peak() - before\n"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, cwd=root)


@pytest.mark.parametrize("hf", [True, False])
def test_a_few_bytes_of_configuration_cannot_cost_minutes(tmp_path: Path, hf: bool) -> None:
    """Thousands of layers and experts that no file holds."""
    sizes: list[dict[str, Any]] = [{"num_layers": 250, "num_experts": 250},
                                   {"num_layers": 256, "num_experts": 16384},
                                   {"num_layers": 1000, "num_experts": 4}]  # fmt: skip
    for size in sizes:
        layers = size["num_layers"]
        cfg = mf.small(**size, compress_ratios=(4,) * layers, swiglu_limits=(1.0,) * layers,
                       shared_swiglu_limits=(1.0,) * layers)  # fmt: skip
        if hf:
            entries = mf.hf_entries(tensors.specs(SMALL))
            path = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries)
        else:
            path = mf.write_gguf(tmp_path / "m.gguf", mf.gguf_pairs(cfg), small_table())
        start = time.process_time()
        problems_of(path)
        assert time.process_time() - start < 1.5


def test_metadata_of_unexpected_types_is_reported_as_nothing(tmp_path: Path) -> None:
    extra: list[mf.Pair] = [
        ("general.version", mf.ARRAY, (mf.U8, [1, 2])),
        ("general.basename", mf.ARRAY, (mf.STRING, ["a"])),
        ("tokenizer.ggml.model", mf.ARRAY, (mf.STRING, ["gpt2"])),
        ("tokenizer.ggml.tokens", mf.U32, 5),
    ]
    pairs = mf.replaced(mf.gguf_pairs(SMALL, extra=extra), "general.name", mf.F32, 1.0)
    report = model_file.open_model(write_small(tmp_path / "m.gguf", pairs=pairs)).describe()
    json.dumps(report)
    assert report["name"] is None and report["tokenizer"]["tokens"] is None


# --- mutations --------------------------------------------------------------------------------


def run_mutations(data_dir: Path, tmp_path: Path, count: int, seed: int) -> tuple[int, int]:
    """(refused, accepted) of mutated heads of a real file; accepted ones must be readable."""
    rng = random.Random(seed)
    whole = (data_dir / "oracle/w16/model.Q4_0_ROCMFP4_FAST.gguf").read_bytes()
    first = model_file.gguf.open_gguf(data_dir / "oracle/w16/model.Q4_0_ROCMFP4_FAST.gguf")
    head = min(t.start for t in first.tensors.values())
    path = tmp_path / "m.gguf"
    refused = accepted = 0
    for number in range(count):
        out = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2))):
            at = rng.randrange(head)
            if rng.random() < 0.5:
                out[at] = rng.randrange(256)
            else:
                value = rng.choice([0, 1, 3, 32, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1])
                out[at : at + 8] = value.to_bytes(8, "little")
        path.write_bytes(bytes(out))
        start = time.process_time()
        try:
            model = model_file.open_model(path)
        except ModelFileError as error:
            str(error)
            refused += 1
        else:
            accepted += 1
            json.dumps(model.describe(with_tensors=True))
            for spec in model.specs()[:3]:
                model.read_float32(spec)
        assert time.process_time() - start < 1.0, f"mutation {number} of seed {seed}"
    return refused, accepted


def test_mutated_models_are_read_or_refused(data_dir: Path, tmp_path: Path) -> None:
    refused, accepted = run_mutations(data_dir, tmp_path, 300, seed=5)
    assert refused > 100 and accepted > 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_mutated_models_are_read_or_refused(data_dir: Path, tmp_path: Path) -> None:
    refused, accepted = run_mutations(data_dir, tmp_path, 8000, seed=6)
    assert refused > 3000 and accepted > 40


def test_every_type_of_gguf_has_the_size_of_the_public_package() -> None:
    import gguf as public

    sizes = {int(k): v for k, v in public.GGML_QUANT_SIZES.items()}
    for type_id, info in model_file.gguf.TYPES.items():
        if type_id < 100:
            assert sizes[type_id] == (info.block, info.nbytes), info.name
        else:
            assert type_id in range(100, 108)
    assert formats.ROCMFP2_TYPE_ID in model_file.gguf.TYPES


def test_the_packaged_model_is_sound() -> None:
    model = model_file.open_model("nano")
    assert model.config is not None and not model.notes and not model.check_values()
    assert isinstance(model.tokenizer_source, dict)
    ratios = set(model.config.compress_ratios)
    assert ratios == {0, 4, 128} and 0 < model.config.num_hash_layers < model.config.num_layers
