"""Packing with two codebooks against recorded bytes; fitting of the codebooks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4jax import mix, quant, quantize_mix

VECTOR_DIR = Path(__file__).parent / "data" / "vectors"
FORMATS = ("rocmfp2_mix", "rocmfp3_mix")
QUALITY = {"rocmfp2_mix": 0.335, "rocmfp3_mix": 0.145}


def levels_of(books: np.ndarray) -> np.ndarray:
    return (books.astype(np.uint32) << 16).view(np.float32)


def roundtrip(name: str, x: np.ndarray, books: np.ndarray, imatrix=None) -> np.ndarray:
    packed = quantize_mix.encode(name, x, books, imatrix)
    modes = np.ones(books.shape[:-2], np.uint8)
    assert quant.check(name, packed, codebooks_bf16=books, modes=modes) == []
    return quant.decode(name, packed, codebooks_bf16=books, modes=modes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_encode_equals_the_recorded_bytes(name: str, weighted: bool) -> None:
    with np.load(VECTOR_DIR / f"quant_{name}.npz") as z:
        source, books, imatrix = z["source"], z["codebooks_bf16"][:2], z["imatrix"]
        expected = z["imatrix_packed" if weighted else "source_packed"]
    x = np.stack([source, source])
    packed = quantize_mix.encode(name, x, books, imatrix if weighted else None)
    assert (packed == expected).all()
    one = quantize_mix.encode(name, source, books[1], imatrix if weighted else None)
    assert (one == expected[1]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_fitted_books_suit_gaussian_weights(name: str) -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((64, 512)) * 0.05).astype(np.float32) for _ in range(2)]
    books = quantize_mix.fit(parts, quantize_mix.LEVELS[name])
    levels = levels_of(books)
    assert (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1
    np.testing.assert_allclose(levels, -levels[:, ::-1], atol=0.02)  # symmetric data
    for x in parts:
        error = np.linalg.norm(roundtrip(name, x, books) - x) / np.linalg.norm(x)
        assert error < QUALITY[name]


@pytest.mark.parametrize("name", FORMATS)
def test_fit_finds_the_levels_that_data_was_made_of(name: str) -> None:
    count = quantize_mix.LEVELS[name]
    truth = np.linspace(-1, 0.75, count).astype(np.float32)
    rng = np.random.default_rng(1)
    x = truth[rng.integers(0, count, (32, 512))]
    x[:, ::16] = -1  # every half-block has its largest magnitude
    books = quantize_mix.fit([x], count)
    peaked = levels_of(books)[1]
    np.testing.assert_allclose(peaked, truth, atol=0.03)
    error = np.abs(roundtrip(name, x, books) - x).max()
    assert error < 0.04


def test_columns_without_importance_do_not_shape_the_levels() -> None:
    rng = np.random.default_rng(2)
    x = (rng.choice([-0.75, 0.75], (64, 256))).astype(np.float32)
    x[:, ::16] = rng.choice([-1, 1], (64, 16))
    imatrix = np.where(np.arange(256) % 16 == 0, 0, 1).astype(np.float32)
    imatrix[1] = np.nan
    plain, weighted = (levels_of(quantize_mix.fit([x], 4, v))[1] for v in (None, imatrix))
    np.testing.assert_allclose(np.abs(plain).max(), 1, atol=0.05)
    np.testing.assert_allclose(np.abs(weighted), 0.75, atol=0.01)


@pytest.mark.parametrize(
    "x",
    [np.zeros((2, 32), np.float32), np.ones((2, 32), np.float32), -np.ones((1, 64), np.float32)],
)
def test_degenerate_weights_still_give_strictly_increasing_levels(x: np.ndarray) -> None:
    for name in FORMATS:
        books = quantize_mix.fit([x], quantize_mix.LEVELS[name])
        assert quant.codebook_problems("x", books, np.array(1, np.uint8)) == []
        np.testing.assert_allclose(roundtrip(name, x, books), x, atol=0.02)


def test_table_round_trip() -> None:
    rng = np.random.default_rng(3)
    tables = []
    for leaf in ("ffn_gate_exps", "ffn_up_exps"):
        books = np.stack([quantize_mix.fit([rng.random((4, 64), np.float32)], 4) for _ in range(3)])
        tables.append(
            mix.MixTable(
                tensor=f"blk.2.{leaf}.weight", format="rocmfp2_mix", shape=(3, 32, 64),
                modes=np.array([1, 0, 1], np.uint8), codebooks_bf16=books,
            )
        )  # fmt: skip
    read = mix.parse(quantize_mix.pack_table("gumix", tables), "x")
    assert list(read) == [t.tensor for t in tables]
    for table in tables:
        got = read[table.tensor]
        assert (got.format, got.shape) == (table.format, table.shape)
        assert (got.modes == table.modes).all()
        assert (got.codebooks_bf16 == table.codebooks_bf16).all()
    with pytest.raises(ValueError, match="cannot describe blk"):
        quantize_mix.pack_table("p4mix", tables)


def test_wrong_arguments_are_named() -> None:
    x, books = np.zeros((2, 4, 32), np.float32), np.zeros((2, 2, 4), np.uint16)
    with pytest.raises(ValueError, match="has no codebooks"):
        quantize_mix.encode("rocmfp3", x, books)
    with pytest.raises(ValueError, match=r"codebooks are \(2, 2, 4\)"):
        quantize_mix.encode("rocmfp3_mix", x, books)
    with pytest.raises(ValueError, match=r"codebooks are \(2, 2, 4\)"):
        quantize_mix.encode("rocmfp2_mix", x[:1], books)
    with pytest.raises(ValueError, match="finite"):
        quantize_mix.encode("rocmfp2_mix", x + np.inf, books)
    with pytest.raises(ValueError, match=r"imatrix is float32 \(3,\)"):
        quantize_mix.encode("rocmfp2_mix", x, books, np.zeros(3, np.float32))
