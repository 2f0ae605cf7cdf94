"""Dense products: against NumPy in float64, and row by row bit-equal whatever the neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import dense, packing


def close(got: Any, want: npt.NDArray[np.float64], tolerance: float) -> None:
    """Largest error of a row over that row's own norm."""
    g, w = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert g.shape == w.shape
    scale = np.linalg.norm(w, axis=-1) + 1e-30
    error = np.linalg.norm(g - w, axis=-1) / scale
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert np.isfinite(g).all() and error.max() <= tolerance, f"row {worst}: {error.max():.2e}"


def weights(name: str, shape: tuple[int, ...], seed: int = 0) -> packing.QuantArray:
    """Random packed weights with moderate scales."""
    *lead, cols = shape
    rng = np.random.default_rng(seed)
    size = (*lead, packing.row_bytes(name, cols))
    low = 0x78 if name == "mxfp4" else 0x38
    data = rng.integers(low, low + 16, size, dtype=np.uint8)
    return packing.pack(name, data).map(jnp.asarray)


def rows(t: int, k: int, seed: int = 1) -> npt.NDArray[np.float32]:
    """Activations with outliers of both signs and a zero row."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((t, k)).astype(np.float32)
    x[:, ::37] *= 30
    x[t // 2] = 0
    return x


@pytest.mark.parametrize("t", [1, 8, 13, 64])
def test_reference_against_numpy(t: int) -> None:
    q = weights("rocmfp4", (3, 40, 96))
    x = rows(t, 96)
    got = dense.dense(jnp.asarray(x), q, layer=1, backend="reference")
    w = np.asarray(packing.unpack(q), np.float64)[1]
    close(got, x.astype(np.float64) @ w.T, 1e-6)


def test_reference_rows_do_not_depend_on_their_neighbours() -> None:
    q = weights("rocmfp3", (33, 160))
    x = rows(64, 160)
    run = jax.jit(lambda x: dense.dense(x, q, backend="reference"))
    whole = np.asarray(run(x))
    for t in (8, 16, 40):
        at = np.random.default_rng(t).permutation(64)[:t]
        np.testing.assert_array_equal(np.asarray(run(x[at])), whole[at])


def test_plain_weights_and_output_dtype() -> None:
    x = rows(8, 64)
    w = rows(24, 64, seed=3)
    got = dense.dense(
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(w, jnp.bfloat16),
        backend="reference",
        out_dtype=jnp.float32,
    )
    assert got.dtype == jnp.float32
    xb, wb = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, w))
    close(got, xb @ wb.T, 1e-6)


def test_shapes_that_disagree_are_named() -> None:
    q = weights("rocmfp4", (2, 8, 64))
    x = jnp.zeros((8, 64))
    with pytest.raises(ValueError, match="no leading axis of w expected"):
        dense.dense(x, q, backend="reference")
    with pytest.raises(ValueError, match="do not fit"):
        dense.dense(x[:, :32], q, layer=0, backend="reference")
