"""Decoding inside kernels: tiles equal the weights that `packing.unpack` rounds to bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import backend, decode, dense, formats, packing
from tests.test_kernel_packing import vector

ROWS = 16


def matrix(data_dir: Path, name: str) -> packing.QuantArray:
    """Sixteen rows of a recorded format (128 where scales belong to 128 rows)."""
    packed, _, side = vector(data_dir, name)
    if packed.ndim == 3:
        packed, side = packed[1], {k: v[1] for k, v in side.items()}
    if formats.get(name).scale == "tile":
        return packing.pack(name, packed[:128], scale_e8m0=side["scale_e8m0"][:1]).map(jnp.asarray)
    if "scale_e8m0" in side:
        side["scale_e8m0"] = side["scale_e8m0"][:ROWS]
    return packing.pack(name, packed[:ROWS], **side).map(jnp.asarray)


def decoded(q: packing.QuantArray) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Tiles of the emulated kernel side by side, and their factors spread over them."""
    fmt = formats.get(q.format)
    names, arrays = dense.operands(q)
    blocks, width = fmt.padded(q.cols) // fmt.block, decode.tile_width("interpret")

    def kernel(*refs: Any) -> None:
        *weights, out_ref, factor_ref = refs
        by_name = dict(zip(names, weights, strict=True))

        def body(b: jax.Array, carry: int) -> int:
            raw = decode.load(fmt, by_name, (), 0, q.rows, b)
            for j, (tile, factor) in enumerate(decode.tiles(fmt, raw, "interpret")):
                apart = decode.columns(fmt, "interpret")
                apart = jnp.arange(width, dtype=jnp.int32) if apart is None else apart
                first = decode.tile_start(fmt, "interpret", b, j)
                at = jnp.broadcast_to(first + apart, tile.shape)
                row = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
                ones = jnp.ones((q.rows,)) if factor is None else factor
                out_ref[row, at] = tile.astype(jnp.float32)
                factor_ref[row, at] = jnp.broadcast_to(ones[:, None], tile.shape)
            return carry

        jax.lax.fori_loop(0, blocks, body, 0)

    like = jax.ShapeDtypeStruct((q.rows, blocks * fmt.block), jnp.float32)
    call = backend.pallas(
        kernel,
        name="decode",
        grid=(1,),
        out_shape=(like, like),
        num_warps=4,
        num_stages=1,
        interpret=True,
    )
    tile, factor = call(*arrays)
    return np.asarray(tile)[:, : q.cols], np.asarray(factor)[:, : q.cols]


QUICK = ("hf_fp8_e4m3_block128", "iq2_xxs", "mxfp4", "rocmfp2_s40", "rocmfp4")


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in sorted(decode.DECODABLE)
    ],
)
def test_tiles_are_the_weights_in_bfloat16(data_dir: Path, name: str) -> None:
    q = matrix(data_dir, name)
    tile, factor = decoded(q)
    # A power of two aside: exact, unless it meets the ends of the range.
    got = tile.astype(np.float64) * factor * 2.0 ** decode.shift(formats.get(name))
    exact = jnp.float32 if formats.get(name).scale == "tile" else jnp.bfloat16
    want = np.asarray(jax.jit(packing.unpack, static_argnums=1)(q, exact)).astype(np.float64)
    # mxfp4 tiles leave bfloat16's range at weights of 2^31; s40 has 2^-125 where a scale is 0.
    inside = (np.abs(want) > 1e-20) & (np.abs(want) < 1e9)
    assert inside.mean() > 0.3
    np.testing.assert_array_equal(got[inside], want[inside])
    # Zeros beside weights past that range meet an infinite scale.
    largest = np.repeat(np.abs(want).reshape(len(want), -1, 32).max(axis=2), 32, axis=1)
    zero = (want == 0) & (largest < 1e9)
    assert zero.any() or not (want == 0).any()
    assert (np.abs(got[zero]) < 1e-30).all()


def test_a_scale_of_iq2_xxs_may_be_negative_zero_or_tiny(data_dir: Path) -> None:
    packed = vector(data_dir, "iq2_xxs")[0][:ROWS].copy()
    blocks = packed.reshape(ROWS, -1, 66)
    d = np.array([-0.75, 0.0, -0.0, 2.0**-24, -1023 * 2.0**-24, 65504.0], np.float16)
    for i in range(ROWS):
        for j in range(blocks.shape[1]):
            blocks[i, j, :2] = d[(i + j) % len(d)].reshape(1).view(np.uint8)
    q = packing.pack("iq2_xxs", packed).map(jnp.asarray)
    tile, _ = decoded(q)
    want = np.asarray(jax.jit(packing.unpack, static_argnums=1)(q, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(tile.view(np.uint32), want.view(np.uint32))


def test_every_format_has_a_decoder() -> None:
    assert set(formats.FORMATS) == decode.DECODABLE
