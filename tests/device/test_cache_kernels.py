"""Kernels that read and write the cache, on a real GPU: right, and bits that depend on the row.

Small cases are those that the emulated kernels pass; large ones have the sizes of the real model.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from bench import cache_cases, kernel_cases, models
from pallas_kernels import backend, cached_attention, row_selection
from tests import test_kernel_attention as attention
from tests import test_kernel_compressor as compressor
from tests import test_kernel_indexer as indexer

pytestmark = pytest.mark.device

CASES = ["compressor_ratio4", "compressor_ratio128", "indexer", "attention_ratio0",
         "attention_ratio4", "attention_ratio128"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """Fails where JAX sees no GPU."""
    assert backend.platform() in ("cuda", "rocm"), "the device suite needs a GPU"


@pytest.mark.parametrize("name", CASES)
def test_real_sizes(name: str) -> None:
    rows = 100
    [case] = [c for c in cache_cases.cases(models.FLASH, rows, tokens=9000) if c.name == name]
    kernel_cases.check(case, rows, "triton")
    # Few rows run as many small programs, many rows as few large ones.
    cache_cases.few_like_many(case, rows, "triton")


def test_every_tile_of_attention_gives_the_same_bits() -> None:
    tiles = [cached_attention.Tile(grid_rows=0), cached_attention.Tile(num_warps=8),
             cached_attention.Tile(width=64, channels=256, grid_rows=0),
             cached_attention.Tile(num_stages=3)]  # fmt: skip
    if backend.platform() == "cuda":
        tiles += [
            cached_attention.Tile(heads=32, num_warps=8, grid_rows=0),
            cached_attention.Tile(heads=64, channels=256, num_warps=8, grid_rows=0),
        ]
    found = []
    at = jnp.arange(16, dtype=jnp.int32)
    for tile in tiles:
        for case in cache_cases.cases(models.FLASH, 16, tile=tile):
            if case.name == "attention_ratio4":
                found.append(np.asarray(case.run(case.args, at, "triton")[0], np.float32))
    for tile, got in zip(tiles, found, strict=True):
        np.testing.assert_array_equal(got, found[0], err_msg=str(tile))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_of_small_cases(ratio: int) -> None:
    c = attention.case(ratio)
    got = attention.attend(c, attention.TILE, "triton")
    assert attention.error(got, attention.oracle(c)) < attention.TOLERANCE
    stale = attention.case(ratio, fill=np.nan)
    for tile in (attention.TILE, attention.WHOLE):
        np.testing.assert_array_equal(attention.attend(stale, tile, "triton"), got)


def test_attention_to_rows_of_the_step() -> None:
    written, chunk = attention.step_cases()
    want = attention.attend(written, attention.WHOLE, "triton")
    for tile in (attention.TILE, attention.WHOLE):
        np.testing.assert_array_equal(attention.attend(chunk, tile, "triton"), want)


def test_selection_of_small_cases() -> None:
    c = indexer.case(whole=True)
    want = [indexer.best(indexer.scores(c, t), indexer.TOP_K) for t in range(len(indexer.VISIBLE))]
    np.testing.assert_array_equal(indexer.select(c, indexer.TILE, "triton"), want)
    rough = indexer.select(indexer.case(whole=False), indexer.TILE, "triton")
    stale = indexer.select(indexer.case(whole=False, fill=np.nan), indexer.TILE, "triton")
    np.testing.assert_array_equal(rough, stale)


@pytest.mark.parametrize("part", [64, 512, 8192])
def test_picking(part: int) -> None:
    rng = np.random.default_rng(part)
    count, top_k = (1 << 18, 512) if part == 8192 else (512, 30)
    s = rng.standard_normal((5, count)).astype(np.float32)
    s[1] = np.round(s[1], 1)
    s[2] = rng.choice(indexer.SPECIAL, count)
    visible = np.asarray([count, count - 77, count, 29, 211], np.int32)
    warps = row_selection.default_tile(backend.target("triton")).pick_warps
    got = row_selection.pick(
        jnp.asarray(s), jnp.asarray(visible), top_k, part, warps, interpret=False
    )
    want = [indexer.best(row[:v], top_k) for row, v in zip(s, visible, strict=True)]
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressors_of_small_cases(ratio: int) -> None:
    c = compressor.case(ratio)
    got = compressor.update(c, ratio, backend="triton")
    for which, (_, pool) in enumerate(got):
        for (slot, number), row in compressor.oracle(c, ratio, which).items():
            found = compressor.row_at(c, pool, slot, number, ratio)
            assert np.linalg.norm(found - row) < compressor.TOLERANCE * np.linalg.norm(row)
    chunk = compressor.update(compressor.case(ratio), ratio, chunk=True, backend="triton")
    for (ring, pool), (want_ring, want_pool) in zip(chunk, got, strict=True):
        np.testing.assert_array_equal(ring, want_ring)
        np.testing.assert_array_equal(pool, want_pool)
