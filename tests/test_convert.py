"""Conversion between checkpoints and GGUF files: what must not change, and what may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4jax import (
    checkpoint_write,
    convert,
    convert_hf,
    gguf_write,
    hparams_write,
    quant,
    quantize,
    quantize_mix,
    tensors,
    tokenizer,
)
from ds4jax.checkpoint_write import CheckpointData
from ds4jax.config import DraftConfig, ModelConfig
from ds4jax.convert import PRESETS, Types, parse_types
from ds4jax.model_file import ModelFile, open_draft, open_model

CFG = ModelConfig(
    vocab_size=267, hidden_size=64, num_layers=4, num_heads=4, head_dim=64, rope_head_dim=32,
    q_lora_rank=64, o_groups=2, o_lora_rank=32, sliding_window=16, compress_ratios=(0, 4, 128, 4),
    index_num_heads=2, index_head_dim=32, index_topk=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, num_hash_layers=1, swiglu_limits=(10.0,) * 4,
    shared_swiglu_limits=(10.0,) * 4, rope_original_len=65536,
)  # fmt: skip
DRAFT = DraftConfig(
    num_stages=2, block_size=4, markov_rank=32, noise_token_id=266, target_layer_ids=(1, 3)
)


# Sources ------------------------------------------------------------------------------------------


def byte_tokenizer() -> tokenizer.Tokenizer:
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    markers = list(tokenizer.MARKER_SPELLINGS.values())
    tokens = [*letters, "th", "the", *markers]
    added = {m: tokens.index(m) for m in markers}
    return tokenizer.Tokenizer.from_vocab(tokens, [("t", "h"), ("th", "e")], added)


def published(spec: tensors.TensorSpec, rng: np.random.Generator, name: str, shape: Any) -> list:
    """One tensor as the published checkpoints store it, scales included."""
    stem = name.removesuffix(".weight")
    if spec.kind == "table":
        ids = rng.integers(0, CFG.num_experts, shape)
        return [CheckpointData(name=name, dtype="I64", shape=shape, data=ids.astype("<i8"))]
    x = (rng.standard_normal(shape) * 0.05).astype(np.float32)
    if spec.num_experts:
        packed, scale = quantize.hf_from_mxfp4(quantize.encode("mxfp4", x))
        return [
            CheckpointData(name=name, dtype="I8", shape=packed.shape, data=packed),
            CheckpointData(name=f"{stem}.scale", dtype="F8_E8M0", shape=scale.shape, data=scale),
        ]
    if spec.kind in ("attention", "shared"):
        codes = rng.integers(0, 0x7F, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        tiles = (-(-shape[0] // 128), -(-shape[1] // 128))
        scale = rng.integers(113, 118, tiles, np.uint8)
        return [
            CheckpointData(name=name, dtype="F8_E4M3", shape=shape, data=codes),
            CheckpointData(name=f"{stem}.scale", dtype="F8_E8M0", shape=tiles, data=scale),
        ]
    if spec.kind in ("hyper_connection", "sink") or spec.key.endswith((".ape", ".bias")):
        return [CheckpointData(name=name, dtype="F32", shape=shape, data=x)]
    packed = quantize.encode("bf16", x)
    return [CheckpointData(name=name, dtype="BF16", shape=shape, data=packed)]


def write_source(path: Path, *, draft: bool, with_tokenizer: bool) -> Path:
    rng = np.random.default_rng(0)
    rows = []
    specs = tensors.specs(CFG) + (tensors.draft_specs(CFG, DRAFT) if draft else [])
    for spec in specs:
        if not spec.required:
            continue
        for expert in range(spec.num_experts or 1):
            name = spec.hf.replace(tensors.EXPERT, str(expert))
            shape = spec.shape[1:] if spec.num_experts else spec.shape
            rows += published(spec, rng, name, shape)
    files = {}
    if with_tokenizer:
        files["tokenizer.json"] = hparams_write.tokenizer_json(byte_tokenizer()).encode()
        files["tokenizer_config.json"] = json.dumps({"chat_template": "{{ x }}"}).encode()
    config = hparams_write.hf_config(CFG, DRAFT if draft else None, fp8=True, fp4=True)
    checkpoint_write.write(path, config, rows, files=files)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """FP4/FP8 checkpoint without tokenizer and drafter."""
    place = tmp_path_factory.mktemp("source") / "plain"
    return open_model(write_source(place, draft=False, with_tokenizer=False))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """FP4/FP8 checkpoint with tokenizer and drafter."""
    place = tmp_path_factory.mktemp("source") / "full"
    return open_model(write_source(place, draft=True, with_tokenizer=True))


def assert_same_values(a: ModelFile, b: ModelFile) -> None:
    assert a.config == b.config
    assert [s.name for s in a.specs()] == [s.name for s in b.specs()]
    for spec in a.specs():
        if spec.kind == "table":
            assert (a.read_table(spec) == b.read_table(spec)).all()
            continue
        x, y = a.read_float32(spec), b.read_float32(spec)
        assert (x.view(np.uint32) == y.view(np.uint32)).all(), spec.name


def types_of(model: ModelFile) -> dict[str, str]:
    return {name: t.type_name for name, t in model.tensors.items()}


# Lossless -----------------------------------------------------------------------------------------


def test_checkpoint_to_gguf_and_back_is_lossless(full: ModelFile, tmp_path: Path) -> None:
    result = convert.convert(full, tmp_path / "m.gguf", PRESETS["lossless"])
    assert result.nbytes == (tmp_path / "m.gguf").stat().st_size
    assert all(t.error is None or t.error == 0 for t in result.tensors)
    middle = open_model(tmp_path / "m.gguf")
    assert_same_values(full, middle)
    assert middle.notes == () and not middle.check_values()
    held = types_of(middle)
    assert held["layers.2.ffn.experts.w1"] == "mxfp4"
    assert held["layers.2.attn.wq_a"] == "bf16"
    assert held["layers.0.ffn.gate.tid2eid"] == "i32"
    convert_hf.convert(middle, tmp_path / "back")
    back = open_model(tmp_path / "back")
    assert_same_values(full, back)
    assert types_of(back)["layers.2.ffn.experts.w1"] == "fp4"
    assert back.metadata["expert_dtype"] == "fp4" and "quantization_config" not in back.metadata
    for model in (middle, back):
        assert full.draft is not None and model.draft is not None
        assert not model.draft.problems
        left, right = full.draft.require(""), model.draft.require("")
        assert left.target_layer_ids == right.target_layer_ids and left.num_stages == 2
        assert model.draft.tensors.keys() == full.draft.tensors.keys()
        for name, stored in full.draft.tensors.items():
            x = full.draft.read(stored.spec).decode()
            y = model.draft.read(model.draft.tensors[name].spec).decode()
            assert (x.reshape(-1) == y.reshape(-1)).all(), name


def test_checkpoint_copy_keeps_fp8_and_fp4(full: ModelFile, tmp_path: Path) -> None:
    convert_hf.convert(full, tmp_path / "copy", shard_bytes=200_000)
    copy = open_model(tmp_path / "copy")
    assert len(copy.files) > 2
    assert_same_values(full, copy)
    differing = {
        (a, b)
        for a, b in zip(types_of(full).values(), types_of(copy).values(), strict=True)
        if a != b
    }
    assert differing == set()
    assert copy.metadata["quantization_config"]["fmt"] == "e4m3"


@pytest.mark.parametrize(
    "file",
    ["F16", "MXFP4_MOE", "Q3_0_ROCMFPX", "Q4_0_ROCMFP4", "Q4_0_ROCMFP4_FAST", "Q8_0"],
)
def test_published_gguf_types_go_into_a_checkpoint_without_loss(
    file: str, data_dir: Path, tmp_path: Path
) -> None:
    source = open_model(data_dir / "oracle" / "w16" / f"model.{file}.gguf")
    result = convert_hf.convert(source, tmp_path / "hf")
    assert_same_values(source, open_model(tmp_path / "hf"))
    assert result.nbytes == (tmp_path / "hf" / "model.safetensors").stat().st_size - header_bytes(
        tmp_path / "hf" / "model.safetensors"
    )


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_gguf_kept_as_it_is_has_the_same_bytes(data_dir: Path, tmp_path: Path) -> None:
    source = open_model(data_dir / "oracle" / "w16" / "model.Q3_0_ROCMFPX.gguf")
    assert "q5_1" in types_of(source).values()  # a type without a decoder of ours travels too
    convert.convert(source, tmp_path / "m.gguf", PRESETS["lossless"])
    copy = open_model(tmp_path / "m.gguf")
    assert_same_values(source, copy)
    for spec in source.specs():
        if types_of(source)[spec.name] == types_of(copy)[spec.name] != "i32":
            assert (source.read(spec).data == copy.read(spec).data).all()
    for spec in source.specs():
        if types_of(source)[spec.name] != types_of(copy)[spec.name]:
            assert convert.class_of(spec) is None and types_of(copy)[spec.name] in ("f32", "i32")
    assert "q5_1" in types_of(copy).values()


def test_fp8_with_float32_scales_becomes_float32(plain: ModelFile, tmp_path: Path) -> None:
    rows, seen = [], 0
    rng = np.random.default_rng(1)
    for spec in tensors.specs(CFG):
        for expert in range(spec.num_experts or 1):
            name = spec.hf.replace(tensors.EXPERT, str(expert))
            for row in published(
                spec, rng, name, spec.shape[1:] if spec.num_experts else spec.shape
            ):
                if row.name.endswith(".scale") and spec.kind == "attention":
                    scale = rng.uniform(0.001, 0.01, row.shape).astype(np.float32)
                    row = CheckpointData(name=row.name, dtype="F32", shape=row.shape, data=scale)
                    seen += 1
                rows.append(row)
    assert seen
    checkpoint_write.write(
        tmp_path / "base", hparams_write.hf_config(CFG, None, fp8=True, fp4=True), rows
    )
    source = open_model(tmp_path / "base")
    convert.convert(source, tmp_path / "m.gguf", PRESETS["lossless"])
    result = open_model(tmp_path / "m.gguf")
    assert_same_values(source, result)
    assert types_of(result)["layers.0.attn.wq_a"] == "f32"
    convert_hf.convert(source, tmp_path / "copy")
    copy = open_model(tmp_path / "copy")
    assert_same_values(source, copy)
    assert types_of(copy)["layers.0.attn.wq_a"] == "f8_e4m3_f32"


# Types --------------------------------------------------------------------------------------------

WORST = {  # relative RMS error on these weights
    "default": 0.01, "q8_0": 0.01, "mxfp4": 0.01, "lossless": 0, "f32": 0, "bf16": 0, "f16": 1e-3,
    "rocmfp8": 0.01, "rocmfp6": 0.04, "rocmfp4": 0.11, "rocmfp4_fast": 0.12, "rocmfp3": 0.2,
    "rocmfp2": 0.36,
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_a_usable_file(preset: str, plain: ModelFile, tmp_path: Path) -> None:
    types = PRESETS[preset]
    result = convert.convert(plain, tmp_path / "m.gguf", types)
    model = open_model(tmp_path / "m.gguf")
    assert model.config == plain.config
    assert not model.problems and not model.check_values()
    assert [t.name for t in result.tensors] == [s.gguf for s in model.specs()]
    for item, spec in zip(result.tensors, model.specs(), strict=True):
        assert model.tensors[spec.name].nbytes == item.nbytes
        if spec.kind == "table":
            continue
        x, y = plain.read_float32(spec), model.read_float32(spec)
        error = np.linalg.norm(x - y) / np.linalg.norm(x)
        step = 2.0**-10 if item.target.startswith("rocmfp") else 0  # of the smallest scale
        floor = step / 12**0.5 / np.sqrt(np.mean(x * x))
        assert error <= WORST[preset] + floor or (error <= 0.01 and "mxfp4" not in item.target)
        assert item.error is None or abs(item.error - error) <= 1e-6 + 1e-3 * error
        if len(spec.shape) == 1 or spec.kind in ("norm", "hyper_connection"):
            assert model.tensors[spec.name].type_name == "f32"
            assert error == 0


def test_requantising_encodes_what_the_source_decodes_to(data_dir: Path, tmp_path: Path) -> None:
    source = open_model(data_dir / "oracle" / "w16" / "model.MXFP4_MOE.gguf")
    types = parse_types(["rocmfp3", "blk.*.attn_kv.weight=q8_0"])
    convert.convert(source, tmp_path / "m.gguf", types)
    model = open_model(tmp_path / "m.gguf")
    held = types_of(model)
    for spec in source.specs():
        name = f"layers.{spec.layer}."
        if spec.kind == "experts_down" or spec.name == f"{name}attn.wkv":
            expected = {"experts_down": "rocmfp3"}.get(spec.kind, "q8_0")
            packed = quantize.encode(expected, source.read_float32(spec))
            assert (model.read(spec).data.reshape(packed.shape) == packed).all()
    assert held["layers.0.attn.wkv"] == "q8_0" and held["layers.0.attn.wq_a"] == "q4_0_rocmfp4"


def test_threads_and_piece_size_do_not_change_a_byte(
    plain: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = parse_types(["rocmfp2", "experts_down=rocmfp2_mix"])
    convert.convert(plain, tmp_path / "a.gguf", types, workers=1)
    monkeypatch.setattr(convert, "PIECE_BYTES", 1)
    convert.convert(plain, tmp_path / "b.gguf", types, workers=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    convert_hf.convert(plain, tmp_path / "a", workers=1)
    convert_hf.convert(plain, tmp_path / "b", workers=3)
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_words_of_the_command_line() -> None:
    types = parse_types(
        ["rocmfp4", "experts=mxfp4", "experts_down=q8_0", "head=f16", "blk.0.*=f32", "*.ape=bf16"]
    )
    assert (types.experts_gate_up, types.experts_down, types.head) == ("mxfp4", "q8_0", "f16")
    assert types.attention == "rocmfp4" and types.embedding == "rocmfp6"
    assert types.overrides == (("blk.0.*", "f32"), ("*.ape", "bf16"))
    assert parse_types([]) == Types()
    for words, text in (
        (["q9"], "type 'q9' is unknown: give one of default, lossless"),
        (["expert=q8_0"], "class 'expert' is unknown; classes are experts, experts_gate_up"),
        (["head=q4_k"], "type 'q4_k' is read, not written: types are keep, q8_0"),
        (["head=IQ2_XXS"], "type 'IQ2_XXS' is read, not written"),
        (["*=x"], "type 'x' is unknown: types are keep"),
        (["head=Q2_0_ROCMFP2"], "has several readings: give rocmfp2_m1012 or rocmfp2_affine"),
        (["rocmfp2_affine"], "no choice for a whole file .*: give it to a class, like experts="),
    ):
        with pytest.raises(ValueError, match=text):
            parse_types(words)


@pytest.mark.parametrize(("word", "target"), [
    ("rocmfp2", "rocmfp2_s40"), ("rocmfp2_fixed", "rocmfp2_m1012"), ("Q8_0", "q8_0"),
    ("Q4_0_ROCMFP4_FAST", "rocmfp4_fast"), ("Q2_0_ROCMFPX", "rocmfp2_s40"), ("BF16", "bf16"),
    ("Keep", "keep"), ("Q2_1_ROCMFP2_MIX", "rocmfp2_mix"),
])  # fmt: skip
def test_other_spellings_of_types(word: str, target: str) -> None:
    assert parse_types([f"head={word}"]).head == target
    assert parse_types(["Q4_0_ROCMFP4", "BF16", "rocmfp2_s40"]) == PRESETS["rocmfp2"]


def test_what_a_type_cannot_hold_is_listed_before_anything_is_written(
    plain: ModelFile, tmp_path: Path
) -> None:
    types = parse_types(["blk.*.hc_attn_scale.weight=q8_0", "attention=rocmfp2_mix"])
    with pytest.raises(ValueError) as error:
        convert.convert(plain, tmp_path / "m.gguf", types)
    text = str(error.value)
    assert "blk.3.hc_attn_scale.weight: rows of 3 weights are not a multiple" in text
    assert "--type 'blk.0.hc_attn_scale.weight=bf16'" in text
    assert "blk.0.attn_q_a.weight: rocmfp2_mix is for routed experts only" in text
    assert not os.listdir(tmp_path)


# Codebooks, type 107, NVFP4 -----------------------------------------------------------------------


def test_mix_types_carry_their_codebooks(plain: ModelFile, tmp_path: Path) -> None:
    types = parse_types(["experts_gate_up=rocmfp2_mix", "experts_down=rocmfp3_mix"])
    result = convert.convert(plain, tmp_path / "m.gguf", types)
    model = open_model(tmp_path / "m.gguf")
    assert not model.check_values()
    limits = {"experts_gate_up": 0.36, "experts_down": 0.16}
    books = {}
    for item, spec in zip(result.tensors, model.specs(), strict=True):
        if spec.kind in limits:
            x, y = plain.read_float32(spec), model.read_float32(spec)
            error = np.linalg.norm(x - y) / np.linalg.norm(x)
            assert error < limits[spec.kind]
            assert item.error is not None and abs(item.error - error) < 1e-4
            books[spec.key, spec.layer] = model.read(spec).side["codebooks_bf16"]
    assert (books["ffn.experts.w1", 1] == books["ffn.experts.w3", 1]).all()
    assert (books["ffn.experts.w1", 1] != books["ffn.experts.w1", 2]).any()
    again = convert.convert(model, tmp_path / "n.gguf", PRESETS["lossless"])
    copy = open_model(tmp_path / "n.gguf")
    assert_same_values(model, copy)
    assert all(t.error in (None, 0) for t in again.tensors)
    convert.convert(model, tmp_path / "o.gguf", parse_types(["lossless", "experts_down=q8_0"]))
    partly = open_model(tmp_path / "o.gguf")
    assert "deepseek4.gumix.sidecar" in partly.metadata
    assert "deepseek4.p4mix.sidecar" not in partly.metadata


def test_dense_codebooks_are_kept(plain: ModelFile, tmp_path: Path) -> None:
    spec = next(s for s in plain.specs() if s.name == "layers.0.attn.wq_a")
    base = tmp_path / "base.gguf"
    convert.convert(plain, base, PRESETS["bf16"])
    source = open_model(base)
    x = plain.read_float32(spec)
    books = quantize_mix.fit([x], 8)
    table = convert.mix.MixTable(
        tensor=spec.gguf, format="rocmfp3_mix", shape=None, modes=np.array(1, np.uint8),
        codebooks_bf16=books,
    )  # fmt: skip
    rows = []
    for other in source.specs():
        held = source.tensors[other.name]
        data = (
            source.read_table(other) if other.kind == "table" else np.array(source.read(other).data)
        )
        kind = held.type_id
        if other.name == spec.name:
            data, kind = quantize_mix.encode("rocmfp3_mix", x, books), 105
        assert kind is not None
        rows.append(
            gguf_write.TensorData(name=other.gguf, type_id=kind, shape=other.shape, data=data)
        )
    pairs = hparams_write.gguf_metadata(CFG) | {
        "deepseek4.dmix.sidecar": quantize_mix.pack_table("dmix", [table])
    }
    gguf_write.write(tmp_path / "m.gguf", pairs, rows)
    model = open_model(tmp_path / "m.gguf")
    convert.convert(model, tmp_path / "n.gguf", PRESETS["lossless"])
    copy = open_model(tmp_path / "n.gguf")
    assert types_of(copy)[spec.name] == "q3_1_rocmfp3_mix"
    assert_same_values(model, copy)


@pytest.mark.parametrize("reading", ["s40", "fixed", "affine"])
def test_type_107_keeps_its_reading(reading: Any, plain: ModelFile, tmp_path: Path) -> None:
    format = quant.ROCMFP2_READINGS[reading]
    convert.convert(plain, tmp_path / "m.gguf", parse_types([f"experts_gate_up={format}"]))
    model = open_model(tmp_path / "m.gguf")
    assert model.metadata["ds4jax.rocmfp2_reading"] == reading == model.rocmfp2.reading
    convert.convert(model, tmp_path / "n.gguf", PRESETS["lossless"])
    copy = open_model(tmp_path / "n.gguf")
    assert_same_values(model, copy)
    assert copy.metadata["ds4jax.rocmfp2_reading"] == reading
    other = "rocmfp2_m1012" if reading == "s40" else "rocmfp2_s40"
    types = parse_types(["lossless", f"experts_down={other}"])
    with pytest.raises(ValueError, match="type 107 would occur in the readings"):
        convert.convert(model, tmp_path / "o.gguf", types)


def test_kept_nvfp4_takes_its_tensor_scale_along(plain: ModelFile, tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    convert.convert(plain, base, PRESETS["bf16"])
    source, rows = open_model(base), []
    rng = np.random.default_rng(2)
    for spec in source.specs():
        kind: Any = source.tensors[spec.name].type_id
        data = source.read_table(spec) if spec.kind == "table" else source.read(spec).data
        if spec.key == "ffn.experts.w2" and spec.layer in (1, 2):
            blocks = rng.integers(0, 256, (*spec.shape[:2], 1, 36), dtype=np.uint8)
            blocks[..., :4] = 0x38
            data, kind = blocks, 40
            count = 1 if spec.layer == 1 else CFG.num_experts
            factor = rng.uniform(0.5, 2, count).astype(np.float32)
            name = spec.gguf.removesuffix(".weight") + ".scale"
            rows.append(gguf_write.TensorData(name=name, type_id=0, shape=(count,), data=factor))
        rows.append(
            gguf_write.TensorData(
                name=spec.gguf, type_id=kind, shape=spec.shape, data=np.array(data)
            )
        )
    gguf_write.write(tmp_path / "m.gguf", hparams_write.gguf_metadata(CFG), rows)
    model = open_model(tmp_path / "m.gguf")
    convert.convert(model, tmp_path / "n.gguf", PRESETS["lossless"])
    copy = open_model(tmp_path / "n.gguf")
    assert types_of(copy)["layers.1.ffn.experts.w2"] == "nvfp4"
    assert_same_values(model, copy)
    convert_hf.convert(model, tmp_path / "hf")
    assert_same_values(model, open_model(tmp_path / "hf"))


# Importance ---------------------------------------------------------------------------------------


def test_importance_reaches_the_encoder(plain: ModelFile, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    whole = rng.random(64, np.float32)
    each = rng.random((CFG.num_experts, 64), np.float32)
    imatrix = {
        "blk.1.ffn_gate_exps.weight": whole,
        "blk.1.ffn_up_exps.weight": each,
        "blk.1.attn_q_a.weight": whole,
        "output.weight": whole,
    }
    np.savez(tmp_path / "imatrix.npz", **imatrix)
    read = convert.read_imatrix(tmp_path / "imatrix.npz")
    types = parse_types(["rocmfp3", "head=q8_0"])
    result = convert.convert(plain, tmp_path / "m.gguf", types, imatrix=read)
    assert "3 of 4 importance vectors are used" in result.notes
    model = open_model(tmp_path / "m.gguf")
    for spec in plain.specs():
        if spec.gguf not in imatrix or spec.kind == "head":
            continue
        x, vector = plain.read_float32(spec), imatrix[spec.gguf]
        format = "rocmfp4" if spec.kind == "attention" else "rocmfp3"
        if vector.ndim == 2:
            parts = [quantize.encode(format, a, v) for a, v in zip(x, vector, strict=True)]
            expected = np.stack(parts)
        else:
            expected = quantize.encode(format, x, vector)
        assert (expected != quantize.encode(format, x)).any()
        assert (model.read(spec).data == expected).all()


def test_importance_that_fits_nothing_is_refused(plain: ModelFile, tmp_path: Path) -> None:
    imatrix = {
        "blk.9.attn_q_a.weight": np.ones(64, np.float32),
        "blk.1.attn_q_a.weight": np.ones((4, 64), np.float32),
        "blk.1.ffn_up_exps.weight": np.ones(32, np.float32),
    }
    with pytest.raises(ValueError) as error:
        convert.convert(plain, tmp_path / "m.gguf", imatrix=imatrix)
    text = str(error.value)
    assert "no tensor blk.9.attn_q_a.weight" in text
    assert "blk.1.attn_q_a.weight is [4, 64], must be [64]" in text
    assert "blk.1.ffn_up_exps.weight is [32], must be [64] or [4, 64]" in text
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([1.0, -1.0]), "must be finite numbers"),
        (np.array([1.0, np.nan]), "must be finite numbers"),
        (np.array([1, 2]), "int64"),
        (np.array(1.0), "of shape"),
        (np.array([object()], dtype=object), "no imatrix"),
    ],
)
def test_imatrix_files_are_checked(value: np.ndarray, text: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", **{"blk.0.attn_q_a.weight": value})
    with pytest.raises(ValueError, match=text):
        convert.read_imatrix(tmp_path / "i.npz")


def test_other_files_are_no_imatrix(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"GGUF")
    np.save(tmp_path / "y.npy", np.ones(3))
    for name in ("x.npz", "y.npy", "missing.npz"):
        with pytest.raises(ValueError, match="no imatrix"):
            convert.read_imatrix(tmp_path / name)


# Drafter, tokenizer, damage -----------------------------------------------------------------------


def test_a_drafter_from_elsewhere_is_merged(
    plain: ModelFile, full: ModelFile, tmp_path: Path
) -> None:
    draft = open_draft(full.path, plain)
    result = convert.convert(plain, tmp_path / "m.gguf", PRESETS["rocmfp4"], draft=draft)
    model = open_model(tmp_path / "m.gguf")
    assert model.draft is not None and model.draft.require("").markov_rank == 32
    held = {t.spec.key: t.type_name for t in model.draft.tensors.values()}
    assert held["main_proj"] == "q8_0" and held["markov_head.markov_w1"] == "bf16"
    assert held["ffn.experts.w1"] == "q4_0_rocmfp4" and held["norm"] == "f32"
    assert any(t.name == "dspark.1.ffn_gate_exps.weight" for t in result.tensors)
    imatrix = {"dspark.1.ffn_gate_exps.weight": np.ones(64, np.float32)}
    convert.convert(plain, tmp_path / "n.gguf", PRESETS["rocmfp4"], draft=draft, imatrix=imatrix)
    assert (tmp_path / "n.gguf").read_bytes() != (tmp_path / "m.gguf").read_bytes()


def test_the_tokenizer_travels(full: ModelFile, tmp_path: Path) -> None:
    convert.convert(full, tmp_path / "m.gguf", name="Tiny")
    model = open_model(tmp_path / "m.gguf")
    assert model.metadata["general.name"] == "Tiny"
    assert model.metadata["tokenizer.chat_template"] == "{{ x }}"
    made = tokenizer.Tokenizer.from_gguf(model.metadata, vocab_size=CFG.vocab_size)
    assert made.digest == byte_tokenizer().digest
    convert.convert(model, tmp_path / "n.gguf", PRESETS["rocmfp4"])
    again = open_model(tmp_path / "n.gguf")
    assert again.metadata["general.name"] == "Tiny"
    assert tokenizer.Tokenizer.from_gguf(again.metadata).digest == made.digest
    convert_hf.convert(again, tmp_path / "hf")
    assert tokenizer.Tokenizer.from_path(tmp_path / "hf").digest == made.digest
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ x }}"
    assert settings["eos_token"] == tokenizer.MARKER_SPELLINGS["eos"]


def test_without_tokenizer_the_file_says_so(plain: ModelFile, tmp_path: Path) -> None:
    result = convert.convert(plain, tmp_path / "m.gguf")
    assert any("no tokenizer" in note for note in result.notes)
    model = open_model(tmp_path / "m.gguf")
    assert model.tokenizer_source is None
    result = convert_hf.convert(model, tmp_path / "hf")
    assert any("no tokenizer" in note for note in result.notes)


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_invalid_values_stop_the_conversion_and_leave_nothing(
    to: str, plain: ModelFile, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in plain.path.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    held = plain.tensors["layers.3.ffn.experts.w2"]
    part = held.parts[2]
    assert part.scale is not None
    start = plain.reader.file.tensors[part.scale].start  # type: ignore[attr-defined]
    data[start + 5] = 0xFF
    weights.write_bytes(data)
    damaged = open_model(source)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=r"scale byte 255 \(NaN\) in 1 of .* source is damaged"):
        if to == "gguf":
            convert.convert(damaged, out / "m.gguf", PRESETS["lossless"])
        else:
            convert_hf.convert(damaged, out / "m")
    assert not os.listdir(out)


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_progress_adds_up_to_the_source(to: str, plain: ModelFile, tmp_path: Path) -> None:
    total = sum(t.nbytes for t in plain.tensors.values())
    calls: list[tuple[int, int, str]] = []
    module = convert if to == "gguf" else convert_hf
    module.convert(plain, tmp_path / "m", progress=lambda *x: calls.append(x))
    done = [c[0] for c in calls]
    assert done == sorted(done) and 0.98 * total <= done[-1] <= total
    assert {c[1] for c in calls} == {total}


def test_an_existing_result_is_not_touched(plain: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        convert.convert(plain, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"
    convert.convert(plain, tmp_path / "m.gguf", overwrite=True)
    assert open_model(tmp_path / "m.gguf").config == CFG


def test_no_jax_is_imported() -> None:
    code = "import sys, ds4jax.convert, ds4jax.convert_hf; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_is_not_converted_onto_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    source = Path(__file__).parent / "data/oracle/w16/model.Q3_0_ROCMFPX.gguf"
    path.write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match="is the model that is read"):
        convert.convert(open_model(path), path, overwrite=True)
    assert path.read_bytes() == source.read_bytes()


def test_a_pattern_that_fits_no_tensor_is_refused(tmp_path: Path) -> None:
    source = Path(__file__).parent / "data/oracle/w16/model.Q3_0_ROCMFPX.gguf"
    types = convert.parse_types(["blk.99.*=q8_0"])
    with pytest.raises(ValueError, match=r"blk\.99\.\*"):
        convert.convert(open_model(source), tmp_path / "out.gguf", types)
    assert not list(tmp_path.iterdir())
