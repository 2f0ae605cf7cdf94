"""Dense products: against NumPy in float64, and row by row bit-equal whatever the neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import dense, packing
from tests import little_effort


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


TILE = dense.Tile(rows=32, num_warps=1)


@pytest.mark.parametrize(
    ("name", "cols", "splits"),
    [
        ("rocmfp4", 512, 2),
        # Three blocks a part: a part ends amid what two blocks share.
        ("iq2_xxs", 768, 2),
        pytest.param("rocmfp3", 512, 1, marks=pytest.mark.slow),
        pytest.param("rocmfp2_affine", 1024, 2, marks=pytest.mark.slow),
        pytest.param("q8_0", 160, 1, marks=pytest.mark.slow),
        pytest.param("nvfp4", 192, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 320, 1, marks=pytest.mark.slow),
        pytest.param("float32", 320, 1, marks=pytest.mark.slow),
    ],
)
def test_emulated_kernel_against_the_reference(name: str, cols: int, splits: int) -> None:
    if name in dense.PLAIN:
        w = jnp.asarray(rows(2 * 64, cols, seed=3).reshape(2, 64, cols), name)
    else:
        w = weights(name, (2, 64, cols))
    x = jnp.asarray(rows(24, cols), jnp.bfloat16)
    want = np.asarray(dense.dense(x, w, layer=1, backend="reference", out_dtype=jnp.float32))
    run = little_effort.jit(
        lambda x: dense.dense(
            x, w, layer=1, backend="interpret", out_dtype=jnp.float32, tile=TILE, splits=splits
        )
    )
    whole = np.asarray(run(x))
    # Weights are rounded to bfloat16 where the format has more bits than that.
    rounded = name in ("iq2_xxs", "q8_0", "rocmfp2_affine")
    close(whole, want.astype(np.float64), 1e-2 if rounded else 2e-6)
    at = np.random.default_rng(0).permutation(24)[:3]
    np.testing.assert_array_equal(np.asarray(run(x[at])), whole[at])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("t", [8, 200])
def test_a_format_with_a_table_is_lowered(t: int, platform: Any) -> None:
    w = packing.abstract("iq2_xxs", (2,), 256, 1024)
    x = jax.ShapeDtypeStruct((t, 1024), jnp.bfloat16)
    run = jax.jit(lambda x, w: dense.launch(x, w, 1, jnp.bfloat16, platform))
    assert "dense_iq2_xxs" in run.trace(x, w).lower(lowering_platforms=(platform,)).as_text()


def test_emulated_kernel_misses_nothing() -> None:
    """One code, or one scale, changed anywhere must show."""
    w = weights("rocmfp4", (64, 256))
    x = jnp.ones((1, 256), jnp.bfloat16)
    run = little_effort.jit(
        lambda w: dense.dense(x, w, backend="interpret", out_dtype=jnp.float32, tile=TILE)
    )
    before = np.asarray(run(w))
    for field, at in (("codes", (63, 31)), ("codes", (0, 0)), ("scales", (3, 63))):
        array = getattr(w, field)
        changed = dataclasses.replace(w, **{field: array.at[at].set(array[at] ^ 0x40)})
        rows_changed = np.flatnonzero((np.asarray(run(changed)) != before)[0])
        assert rows_changed.tolist() == [at[0] if field == "codes" else at[1]]


def test_live_rows_keep_their_bits_where_the_others_are_left_out() -> None:
    q = weights("rocmfp4", (64, 256))
    x = jnp.asarray(rows(40, 256) * 0.05, jnp.bfloat16)
    tile = dense.Tile(rows=16, dots=1)

    @little_effort.jit
    def run(x: Any, live: Any) -> Any:
        return dense.dense(x, q, live=live, backend="interpret", tile=tile)

    whole = np.asarray(run(x, jnp.int32(40)), np.float32)
    few = np.asarray(run(x, jnp.int32(17)), np.float32)
    np.testing.assert_array_equal(few[:17], whole[:17])
    # The third tile of 16 rows was not computed.
    assert not np.array_equal(few[32:], whole[32:])


def test_grouped_products() -> None:
    w = weights("rocmfp4", (4 * 32, 128))
    x = jnp.asarray(rows(8 * 4, 128).reshape(8, 4, 128), jnp.bfloat16)
    want = np.einsum(
        "tgk,gnk->tgn",
        np.asarray(x, np.float64),
        np.asarray(packing.unpack(w), np.float64).reshape(4, 32, 128),
    )
    for backend in ("reference", "interpret"):
        got = dense.grouped(x, w, backend=backend, out_dtype=jnp.float32, tile=TILE)
        close(np.asarray(got).reshape(32, 32), want.reshape(32, 32), 2e-6)


def test_what_has_no_kernel_says_so() -> None:
    x = jnp.zeros((8, 256), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="no kernel for float16 weights; there is one for"
    ):
        dense.dense(x, jnp.zeros((64, 256), jnp.float16), backend="interpret")
    with pytest.raises(NotImplementedError, match="takes bfloat16 activations, not float32"):
        dense.dense(x.astype(jnp.float32), weights("rocmfp4", (64, 256)), backend="interpret")
    with pytest.raises(NotImplementedError, match="needs N a multiple of 64"):
        dense.dense(x, weights("rocmfp4", (48, 256)), backend="interpret", tile=dense.Tile())
