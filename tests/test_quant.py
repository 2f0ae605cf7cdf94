"""Decoding of weight formats against recorded reference output and the public `gguf` package."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax import quant, quantize

VECTORS = sorted((Path(__file__).parent / "data" / "vectors").glob("quant_*.npz"))
SIDE = ("scale_e8m0", "codebooks_bf16", "modes")
BLOCKS = {
    "mxfp4": "mxfp4",
    "q8_0": "q8_0",
    "q3_0_rocmfpx": "rocmfp3",
    "q4_0_rocmfp4": "rocmfp4",
    "q4_0_rocmfp4_fast": "rocmfp4_fast",
    "q6_0_rocmfpx": "rocmfp6",
    "q8_0_rocmfpx": "rocmfp8",
}
STANDARD = {"q8_0": 8, "q2_k": 10, "q4_k": 12, "iq2_xxs": 16, "mxfp4": 39, "nvfp4": 40}
PAYLOAD_END = {"rocmfp3_mix": 12, "rocmfp2_mix": 8}


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype == np.float32
    assert got.shape == expected.shape
    wrong = np.flatnonzero(got.view(np.uint32) != expected.view(np.uint32))
    assert not len(wrong), f"{len(wrong)} of {got.size} differ, first at {wrong[0]}"


def load(path: Path) -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    with np.load(path) as z:
        arrays = dict(z)
    side = {name: arrays[name] for name in SIDE if name in arrays}
    return path.stem.removeprefix("quant_"), arrays, side


def random_bytes(name: str, rows: int, weights: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, quant.FORMATS[name].row_bytes(weights)), dtype=np.uint8)


def test_there_is_a_vector_for_every_packed_format() -> None:
    recorded = {p.stem.removeprefix("quant_") for p in VECTORS}
    assert recorded == set(quant.FORMATS) - {"f32", "f16", "bf16", "i32"}


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_decode_equals_the_recorded_bits(path: Path) -> None:
    name, arrays, side = load(path)
    assert_same_bits(quant.decode(name, arrays["packed"], **side), arrays["decoded"])


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_decode_in_small_chunks_and_row_slices_is_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arrays, side = load(path)
    monkeypatch.setattr(quant, "CHUNK_WEIGHTS", 3 * 256)
    packed, decoded = arrays["packed"], arrays["decoded"]
    assert_same_bits(quant.decode(name, packed, **side), decoded)
    if name == "hf_fp8_e4m3_block128":
        part = {"scale_e8m0": side["scale_e8m0"][1:]}
        assert_same_bits(quant.decode(name, packed[128:], **part), decoded[128:])
    else:
        part = {key: value[2:5] for key, value in side.items()}
        assert_same_bits(quant.decode(name, packed[2:5], **part), decoded[2:5])


@pytest.mark.parametrize("block", BLOCKS)
def test_decode_equals_the_recorded_blocks(block: str, data_dir: Path) -> None:
    with np.load(data_dir / "oracle" / "primitives.npz") as z:
        raw, expected = z[f"block_{block}_raw"], z[f"block_{block}_f32"]
    assert_same_bits(quant.decode(BLOCKS[block], raw), expected)
    stacked = quant.decode(BLOCKS[block], raw.reshape(4, 12, -1))
    assert_same_bits(stacked, expected.reshape(4, 12, 64))


@pytest.mark.parametrize("name", STANDARD)
def test_standard_types_equal_the_gguf_package(name: str) -> None:
    packed = random_bytes(name, 24, 512)
    kind = gguf.GGMLQuantizationType(STANDARD[name])
    with np.errstate(all="ignore"):
        expected = quants.dequantize(packed, kind)
    got = quant.decode(name, packed)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    assert (np.isfinite(got) == finite).all()
    assert_same_bits(got[finite], expected[finite])
    with np.errstate(all="ignore"):
        assert (np.isfinite(quant.decode_other(STANDARD[name], packed)) == finite).all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_floats(name: str) -> None:
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
    values = np.random.default_rng(1).standard_normal((5, 7)).astype(dtype)
    assert_same_bits(quant.decode(name, values.view(np.uint8)), values.astype(np.float32))


def test_unaligned_memory_decodes() -> None:
    values = np.arange(-5, 5, dtype=np.float32)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:]
    assert_same_bits(quant.decode("f32", shifted), values)


@pytest.mark.parametrize("scale", ["scale_e8m0", "scale_f32"])
def test_fp8_with_partial_tiles(scale: str) -> None:
    rng = np.random.default_rng(2)
    shape, tiles = (2, 130, 200), (2, 2, 2)
    codes = rng.integers(0, 0x7F, shape, dtype=np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    if scale == "scale_e8m0":
        side: Any = rng.integers(100, 140, tiles, dtype=np.uint8)
        factor = np.exp2(side.astype(np.float32) - 127)
    else:
        side = factor = rng.standard_normal(tiles).astype(np.float32)
    whole = np.repeat(np.repeat(factor, 128, axis=1), 128, axis=2)[:, :130, :200]
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    got = quant.decode("hf_fp8_e4m3_block128", codes, **{scale: side})
    assert_same_bits(got, expected)


def test_nan_codes_and_scales_of_the_checkpoint_stay_nan() -> None:
    packed = np.full((1, 16), 0x11, np.uint8)
    assert np.isnan(
        quant.decode("hf_fp4_e2m1", packed, scale_e8m0=np.array([[255]], np.uint8))
    ).all()
    codes = np.array([[0x7F, 0xFF, 0x38]], np.uint8)
    got = quant.decode("hf_fp8_e4m3_block128", codes, scale_e8m0=np.array([[127]], np.uint8))
    assert np.isnan(got[0, :2]).all() and got[0, 2] == 1


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 11, 13, 14, 17, 18, 20, 21, 22, 23])
def test_other_types_decode_through_the_gguf_package(kind: int) -> None:
    layout = quant.type_layout(kind)
    assert quant.format_of_type(kind) is None
    rng = np.random.default_rng(kind)
    packed = rng.integers(0, 60, (3, 2, 512 // layout.block * layout.block_bytes), dtype=np.uint8)
    expected = quants.dequantize(packed.reshape(6, -1), gguf.GGMLQuantizationType(kind))
    assert_same_bits(quant.decode_other(kind, packed), expected.reshape(3, 2, 512))


@pytest.mark.parametrize(
    ("kind", "text"), [(42, "unknown"), (101, "unknown|cannot"), (15, "cannot"), (9, "cannot")]
)
def test_types_the_package_cannot_decode_are_refused(kind: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quant.decode_other(kind, np.zeros((1, 17 * 40 * 292), np.uint8))


def test_type_table_agrees_with_the_gguf_package() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        layout = quant.type_layout(int(kind))
        assert (layout.ggml_name, layout.block, layout.block_bytes) == (kind.name, block, size)
    assert quant.type_layout(107).block_bytes == 10
    with pytest.raises(ValueError, match="unknown; known type ids are"):
        quant.type_layout(108)


def test_type_ids_lead_to_formats() -> None:
    assert quant.format_of_type(101) == "rocmfp4_fast"
    assert quant.format_of_type(6) is None
    for reading, name in quant.ROCMFP2_READINGS.items():
        assert quant.format_of_type(107, reading) == name
    with pytest.raises(ValueError, match="four incompatible readings"):
        quant.format_of_type(107)
    bits = {f.name: f.bits for f in quant.FORMATS.values()}
    assert bits["rocmfp4"] == 4.5 and bits["q2_k"] == 2.625 and bits["rocmfp2_mix"] == 2.5


@pytest.mark.parametrize(
    ("name", "packed", "side", "text"),
    [
        ("rocmfp5", np.zeros(18, np.uint8), {}, "unknown; known formats"),
        ("rocmfp4", np.zeros((2, 19), np.uint8), {}, "19 bytes is not a multiple .* 18 bytes"),
        ("rocmfp4", np.zeros((2, 18), np.int8), {}, "must be a uint8 array"),
        ("rocmfp4", b"bytes", {}, "must be a uint8 array"),
        ("rocmfp4", np.zeros(18, np.uint8), {"modes": np.zeros(1, np.uint8)}, "side arrays given"),
        ("i32", np.zeros(4, np.uint8), {}, "indices, not weights"),
        ("hf_fp4_e2m1", np.zeros((1, 16), np.uint8), {}, "side arrays given are"),
        (
            "hf_fp4_e2m1",
            np.zeros((1, 32), np.uint8),
            {"scale_e8m0": np.zeros((1, 1), np.uint8)},
            r"must be uint8 \(1, 2\)",
        ),
        (
            "hf_fp8_e4m3_block128",
            np.zeros((256, 8), np.uint8),
            {"scale_f32": np.zeros((1, 1), np.float32)},
            r"must be float32 \(2, 1\)",
        ),
        (
            "hf_fp8_e4m3_block128",
            np.zeros(8, np.uint8),
            {"scale_f32": np.zeros(1, np.float32)},
            r"must be \[\.\.\., out, in\]",
        ),
        ("rocmfp2_mix", np.zeros((2, 10), np.uint8), {"modes": np.zeros(2, np.uint8)}, "given are"),
        (
            "rocmfp2_mix",
            np.zeros((2, 1, 10), np.uint8),
            {"modes": np.zeros(3, np.uint8), "codebooks_bf16": np.zeros((3, 2, 4), np.uint16)},
            "leading axes",
        ),
        (
            "rocmfp2_mix",
            np.zeros((2, 1, 10), np.uint8),
            {"modes": np.zeros(2, np.uint8), "codebooks_bf16": np.zeros((2, 2, 8), np.uint16)},
            r"must be uint16 \(2, 2, 4\)",
        ),
        (
            "rocmfp3_mix",
            np.zeros((2, 1, 14), np.uint8),
            {
                "modes": np.array([0, 7], np.uint8),
                "codebooks_bf16": np.zeros((2, 2, 8), np.uint16),
            },
            r"modes \[7\] are unknown",
        ),
    ],
)
def test_wrong_arguments_are_named(
    name: str, packed: Any, side: dict[str, np.ndarray], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        quant.decode(name, packed, **side)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(set(quant.FORMATS) - {"i32"})), st.integers(0, 700))
def test_any_byte_count_decodes_or_is_refused(name: str, count: int) -> None:
    fmt = quant.FORMATS[name]
    packed = np.full((1, count), 0x35, np.uint8)
    side: dict[str, Any] = {}
    if "mix" in name:
        levels = 8 if "3" in name else 4
        books = np.tile(np.arange(levels, dtype=np.uint16), (2, 1))
        side = {"modes": np.array(1, np.uint8), "codebooks_bf16": books}
    elif name == "hf_fp4_e2m1":
        side = {"scale_e8m0": np.full((1, count // 16), 127, np.uint8)}
    elif name == "hf_fp8_e4m3_block128":
        side = {"scale_e8m0": np.full((1, -(-count // 128)), 127, np.uint8)}
    if count % fmt.block_bytes:
        with pytest.raises(ValueError, match=f"{count} bytes is not a multiple"):
            quant.decode(name, packed, **side)
    else:
        got = quant.decode(name, packed, **side)
        assert got.shape == (1, count // fmt.block_bytes * fmt.block)
        assert quant.check(name, packed, **side) == []


def test_dense_codebooks_equal_those_of_a_single_expert() -> None:
    for path in VECTORS:
        name, arrays, side = load(path)
        if "modes" not in side:
            continue
        for expert in range(6):
            one = {key: value[expert] for key, value in side.items()}
            got = quant.decode(name, arrays["packed"][expert], **one)
            assert_same_bits(got, arrays["decoded"][expert])


def test_large_tensors_need_little_memory_beside_the_result() -> None:
    for name in ("rocmfp4", "q4_k", "iq2_xxs", "rocmfp3", "hf_fp4_e2m1", "bf16"):
        packed = random_bytes(name, 1024, 8192)
        side = {}
        if name == "hf_fp4_e2m1":
            side = {"scale_e8m0": np.full((1024, 256), 120, np.uint8)}
        tracemalloc.start()
        out = quant.decode(name, packed, **side)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - out.nbytes < 12 << 20, name


# check ------------------------------------------------------------------------------------------

SCALE_BYTES = {
    "rocmfp4": (16, 17), "rocmfp4_fast": (16,), "rocmfp6": (24, 25), "rocmfp8": (32,),
    "rocmfp3": (12, 13), "rocmfp2_s40": (8, 9), "rocmfp2_m1012": (8, 9), "rocmfp2_affine": (8, 9),
    "mxfp4": (0,),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALE_BYTES)
def test_check_counts_and_places_invalid_scales(name: str) -> None:
    fmt = quant.FORMATS[name]
    good = np.full((2, 3, 5 * fmt.block_bytes), 0x7E, np.uint8)
    assert quant.check(name, good) == []
    for byte in SCALE_BYTES[name]:
        bad = good.copy()
        for row, block in (((1, 0), 4), ((1, 2), 0)):
            bad[*row, block * fmt.block_bytes + byte] = 0xFF
        (line,) = quant.check(name, bad)
        assert "in 2 of 30 blocks, first in row (1, 0) block 4" in line
        assert line.startswith(name)
        assert ("'signed'" in line) == name.startswith("rocmfp2")
    bad = good.copy()
    bad[0, 0, SCALE_BYTES[name][0]] = 0x7F
    assert len(quant.check(name, bad)) == (0 if name == "mxfp4" else 1)


def test_check_signed_accepts_the_sign_bit_only() -> None:
    block = np.full((1, 10), 0xFE, np.uint8)
    assert quant.check("rocmfp2_signed", block) == []
    block[0, 9] = 0xFF
    assert len(quant.check("rocmfp2_signed", block)) == 1


@pytest.mark.parametrize(
    ("name", "positions"),
    [("f16", [0]), ("q8_0", [0]), ("q4_k", [0, 2]), ("q2_k", [80, 82]), ("iq2_xxs", [0])],
)
def test_check_finds_half_precision_scales_that_are_not_finite(
    name: str, positions: list[int]
) -> None:
    good = np.zeros((3, 4 * quant.FORMATS[name].block_bytes), np.uint8)
    assert quant.check(name, good) == []
    for position in positions:
        for value in (np.inf, -np.inf, np.nan):
            bad = good.copy()
            at = quant.FORMATS[name].block_bytes + position
            bad[2, at : at + 2] = np.array([value], "<f2").view(np.uint8)
            (line,) = quant.check(name, bad)
            assert "not finite in 1 of 12" in line and "row (2,)" in line


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_check_finds_floats_that_are_not_finite(name: str) -> None:
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[name]
    values = np.zeros((2, 600000), dtype)
    values[1, 7] = np.nan
    values[1, 599999] = -np.inf
    (line,) = quant.check(name, values.view(np.uint8))
    assert "2 of 1200000 weights, first in row (1,) weight 7" in line


def test_check_of_checkpoint_formats() -> None:
    packed = np.zeros((4, 32), np.uint8)
    scale = np.full((4, 2), 127, np.uint8)
    assert quant.check("hf_fp4_e2m1", packed, scale_e8m0=scale) == []
    scale[3, 1] = 255
    (line,) = quant.check("hf_fp4_e2m1", packed, scale_e8m0=scale)
    assert "in 1 of 8 places, first at (3, 1)" in line
    codes = np.zeros((4, 32), np.uint8)
    codes[2, 5] = 0xFF
    found = quant.check("hf_fp8_e4m3_block128", codes, scale_f32=np.array([[np.nan]], np.float32))
    assert len(found) == 2 and "row (2,) weight 5" in found[1]
    assert quant.check("i32", np.full(4, 255, np.uint8)) == []
    (line,) = quant.check("nvfp4", np.full((1, 36), 0xFF, np.uint8))
    assert "NaN" in line


@pytest.mark.parametrize("path", [p for p in VECTORS if "_mix" in p.stem], ids=lambda p: p.stem)
def test_check_of_mix_types(path: Path) -> None:
    name, arrays, side = load(path)
    first = PAYLOAD_END[name]
    clean = arrays["packed"].copy().reshape(6, -1, quant.FORMATS[name].block_bytes)
    clean[:, :, first:] = 0x30
    clean = clean.reshape(arrays["packed"].shape)
    assert quant.check(name, clean, **side) == []
    with_flag = clean.copy()
    with_flag[:, 0, first] = 0xB0  # second codebook in mode 1, invalid in mode 0
    fixed = int((side["modes"] == 0).sum())
    assert 0 < fixed < 6
    (line,) = quant.check(name, with_flag, **side)
    assert f"invalid scale byte in {fixed} of" in line
    modes = side["modes"].copy()
    modes[4] = 2
    books = side["codebooks_bf16"].copy()
    adaptive = int(np.flatnonzero(side["modes"] == 1)[0])
    books[adaptive, 1, 2] = books[adaptive, 1, 1]
    found = quant.check(name, clean, modes=modes, codebooks_bf16=books)
    assert any("mode neither 0 nor 1 in 1 of 6 places, first at (4,)" in x for x in found)
    assert any(
        f"strictly increasing in 1 of 12 places, first at ({adaptive}, 1)" in x for x in found
    )


# type 107 ---------------------------------------------------------------------------------------


def signed_blocks(x: np.ndarray) -> np.ndarray:
    """A writer of the sign-flip reading: per half-block, x or -x, whichever fits better."""
    plain, mirrored = (quantize.encode("rocmfp2_m1012", part).reshape(-1, 10) for part in (x, -x))
    errors = [
        ((quant.decode("rocmfp2_m1012", p) - part.reshape(-1, 32)) ** 2).reshape(-1, 2, 16).sum(2)
        for p, part in ((plain, x), (mirrored, -x))
    ]
    out = plain.copy()
    for half in range(2):
        flip = errors[1][:, half] < errors[0][:, half]
        out[flip, 4 * half : 4 * half + 4] = mirrored[flip, 4 * half : 4 * half + 4]
        out[flip, 8 + half] = mirrored[flip, 8 + half] | 0x80
    return out


@pytest.mark.parametrize("kind", ["gauss", "fp4"])
@pytest.mark.parametrize("sigma", [0.02, 1.0])
@pytest.mark.parametrize("reading", quant.ROCMFP2_READINGS)
def test_reading_of_type_107_is_found_from_data(reading: Any, sigma: float, kind: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((256, 512)) * sigma).astype(np.float32)
    if kind == "fp4":
        x = quant.decode("mxfp4", quantize.encode("mxfp4", x))
    if reading == "signed":
        packed = signed_blocks(x)
        restored = quant.decode("rocmfp2_signed", packed).reshape(x.shape)
        assert np.linalg.norm(restored - x) < 0.36 * np.linalg.norm(x)
    else:
        packed = quantize.encode(quant.ROCMFP2_READINGS[reading], x)
    guess = quant.guess_rocmfp2_reading(packed)
    assert guess.reading == reading
    assert guess.format == quant.ROCMFP2_READINGS[reading]
    assert abs(sum(guess.code_shares) - 1) < 1e-6
    assert (guess.sign_bits > 0) == (reading == "signed")
    assert (guess.share_second_above > 0.8) == (reading == "affine")
    assert guess.reason


def test_reading_of_type_107_needs_data() -> None:
    with pytest.raises(ValueError, match="no block with a scale"):
        quant.guess_rocmfp2_reading(np.zeros((4, 50), np.uint8))
    with pytest.raises(ValueError, match="not a multiple"):
        quant.guess_rocmfp2_reading(np.zeros((4, 51), np.uint8))


def test_one_sign_bit_anywhere_decides_even_outside_the_sample() -> None:
    x = np.random.default_rng(6).standard_normal((64, 512)).astype(np.float32)
    packed = quantize.encode("rocmfp2_m1012", x)
    assert quant.guess_rocmfp2_reading(packed, max_blocks=100).reading == "fixed"
    packed[-1, -1] |= 0x80
    guess = quant.guess_rocmfp2_reading(packed, max_blocks=100)
    assert guess.reading == "signed" and guess.sign_bits == 1 and guess.blocks <= 100


def test_no_jax_is_imported() -> None:
    code = (
        "import sys, ds4jax.quant, ds4jax.quantize, ds4jax.mix;"
        "assert not {'jax', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
