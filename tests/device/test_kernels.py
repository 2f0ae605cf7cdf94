"""Kernels on a real GPU (`pytest -m device`): right, and the same bits whatever the batch.

One device run covers every format, every way of cutting the work, and batches of 1 to 256 rows. A
missing device fails.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import kernel_cases, kernel_timing, models
from pallas_kernels import backend, decode, dense, experts

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """Fails where JAX sees no GPU."""
    assert backend.platform() in ("cuda", "rocm"), "the device suite needs a GPU"


def activations(rows: int, cols: int) -> jax.Array:
    """Rows with outliers of both signs."""
    x = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)
    x[:, ::37] *= 30
    return jnp.asarray(x, jnp.bfloat16)


def error(got: Any, want: Any) -> float:
    """Largest error of a row over that row's norm."""
    g, w = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.linalg.norm(g - w, axis=-1) / np.linalg.norm(w, axis=-1)))


def dense_tiles(name: str) -> list[dense.Tile]:
    """Ways of cutting the work that must not show in the result."""
    tiles = [dense.Tile(rows=r, num_warps=w) for r, w in ((16, 1), (32, 1), (32, 2), (64, 4))]
    tiles += [dense.Tile(unroll=2, dots=1, num_stages=2), dense.Tile(dots=1)]
    tiles += [dense.Tile(num_stages=1)]
    if backend.platform() == "cuda":
        tiles += [dense.Tile(dot_rows=64, dots=1), dense.Tile(rows=128, dot_rows=128, dots=1)]
        if dense.default_tile(name, 256, 256, "cuda").dot_rows == 256:
            tiles += [dense.Tile(rows=128, dot_rows=256, dots=1, num_warps=8)]
    return tiles


@pytest.mark.parametrize("name", sorted(decode.DECODABLE))
def test_dense(name: str) -> None:
    w = kernel_timing.random_weights(name, (2,), 256, 2048)
    x = activations(256, 2048)
    want = dense.reference(x, w, layer=1, out_dtype=jnp.float32)

    def run(x: jax.Array, tile: dense.Tile | None = None) -> Any:
        y = dense.dense(x, w, layer=1, backend="triton", out_dtype=jnp.float32, tile=tile, splits=2)
        return np.asarray(y)

    whole = run(x)
    assert error(whole, want) < 1e-2
    for rows in (1, 8, 16, 17, 64, 128):
        at = np.random.default_rng(rows).permutation(256)[:rows]
        np.testing.assert_array_equal(run(x[at]), whole[at], err_msg=f"{rows} rows")
    for i, tile in enumerate(dense_tiles(name)):
        # Four products of 16 rows take long to compile: not with every tile.
        for rows in (3, 200) if tile.dots == 1 or i == 1 else (3,):
            np.testing.assert_array_equal(run(x[:rows], tile), whole[:rows], err_msg=str(tile))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plain_weights(dtype: str) -> None:
    w = jax.random.normal(jax.random.key(0), (256, 1024), jnp.float32).astype(dtype)
    x = activations(100, 1024)
    got = dense.dense(x, w, backend="triton", out_dtype=jnp.float32)
    assert error(got, dense.reference(x, w, out_dtype=jnp.float32)) < 1e-5


@pytest.mark.parametrize(
    "kind", [("mxfp4", "mxfp4"), ("rocmfp2_s40", "rocmfp3"), ("rocmfp4_fast", "q8_0")]
)
def test_experts(kind: tuple[str, str]) -> None:
    w13 = kernel_timing.random_weights(kind[0], (2, 16), 512, 512)
    w2 = kernel_timing.random_weights(kind[1], (2, 16), 512, 256)
    x = activations(96, 512) * jnp.bfloat16(0.05)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.stack([rng.permutation(18)[:6] for _ in range(96)]).astype(np.int32))
    ids = ids.at[7].set(-1)
    route = jnp.asarray(rng.uniform(0.1, 1.5, (96, 6)), jnp.float32)

    def run(at: Any, how: backend.Backend, tile: experts.Tile | None = None) -> Any:
        y = experts.experts(
            x[at], ids[at], route[at], w13, w2, layer=1, first_expert=1, limit=10.0, backend=how,
            tile=tile,
        )  # fmt: skip
        return np.asarray(y)

    every = np.arange(96)
    whole = run(every, "triton")
    live = every[every != 7]
    assert error(whole[live], run(every, "reference")[live]) < 1e-2
    assert not whole[7].any()
    for rows in (1, 8, 16, 33):
        at = np.random.default_rng(rows).permutation(96)[:rows]
        np.testing.assert_array_equal(run(at, "triton"), whole[at], err_msg=f"{rows} rows")
    small = experts.Tile(up_rows=32, up_warps=2, down_rows=16, down_warps=1, up_unroll=2)
    np.testing.assert_array_equal(run(every[:16], "triton", small), whole[:16])


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300])
def test_small_kernels(rows: int) -> None:
    for case in kernel_cases.cases(models.FLASH, rows):
        kernel_cases.check(case, rows, "triton")


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_sampling(rows: int) -> None:
    for case in kernel_cases.sampling(models.FLASH, rows):
        kernel_cases.check(case, rows, "triton")


def test_several_matrices() -> None:
    ws, x = kernel_cases.several_case(100)
    whole = [np.asarray(y) for y in kernel_cases.several(x, ws, "triton")]
    for got, want in zip(whole, kernel_cases.several(x, ws, "reference"), strict=True):
        assert error(got, want) < 1e-5
    for rows in (1, 16, 65):
        at = np.random.default_rng(rows).permutation(100)[:rows]
        for a, b in zip(kernel_cases.several(x[at], ws, "triton"), whole, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b[at])
